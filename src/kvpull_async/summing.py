"""A sum over a cache's memory, made by a worker in bounded steps while that is held. It must not know for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Final

from kvpull_async import sums
from kvpull_async._workers import Job, Workers
from kvpull_async.held import Entry
from kvpull_async.memory.base import FEW_ROWS, Batches
from kvpull_async.sums import Sum
from kvpull_async.transport.base import moved

__all__ = ["Summing", "at_once"]

_TINY: Final = 128 * 1024
"""Most bytes summed on a loop: some 30 us with the slower sum, about what handing them to a thread takes."""


def at_once(nbytes: int, rows: int, *, direct: bool) -> bool:
    """Whether an event loop may sum so many bytes in so many rows by itself."""
    return direct and nbytes <= _TINY and rows <= FEW_ROWS


class Summing:
    """Begins at once, and holds the entries until no thread reads them any more. One that is taken away ends it."""

    def __init__(self, growing: Sum, lending: Batches, entries: Sequence[Entry], workers: Workers) -> None:
        self._sum = growing
        self._job: Job | None = None
        pins = [entry.pin(self.abort) for entry in entries]
        try:
            self._job = job = Job(workers, _steps(growing, lending))
        except BaseException:
            for pin in pins:
                pin.release()
            raise
        self.settled: asyncio.Future[None] = job.settled
        for pin in pins:
            job.settled.add_done_callback(lambda _, pin=pin: pin.release())  # type: ignore[misc]

    def abort(self) -> None:
        """Stop after the step that runs now. Never waits."""
        if self._job is not None:
            self._job.abort()

    async def digest(self) -> bytes:
        """The sum. OSError or LLMException if the memory cannot be read, or was taken away meanwhile."""
        assert self._job is not None
        await moved(self._job)
        return self._sum.digest()

    def __repr__(self) -> str:
        return f"<Summing {'settled' if self.settled.done() else 'running'}>"


def _steps(growing: Sum, lending: Batches) -> Generator[int, None, None]:
    with closing(lending):
        yield from sums.steps(growing, lending)
