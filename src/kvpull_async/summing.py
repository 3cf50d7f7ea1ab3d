"""The sum over what a cache lends, made here and now or by a worker while that is held. It must not know for whom."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial

from kvpull_async import sums
from kvpull_async._workers import Job, Workers
from kvpull_async.held import Entry, Pin
from kvpull_async.memory.base import FEW_BYTES, FEW_ROWS, Batches, Until
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.sums import Sum
from kvpull_async.transport.base import break_off, moved

__all__ = ["Summed"]

_Steps = Generator[int, None, None]


class Summed:
    """`nbytes` bytes in `rows` rows of the entries' memory, `direct` if a loop may read that. The lending was made with
    `until`.

    Few are summed here and now, in some 30 us with the slower sum. Others by a worker that begins at once, and the
    entries are held until no thread reads them any more; one that is taken away ends it. Whatever goes wrong, it is
    `digest` that raises.
    """

    def __init__(
        self, growing: Sum, lending: Batches, entries: Sequence[Entry], workers: Workers,
        *, nbytes: int, rows: int, direct: bool, until: Until,
    ) -> None:  # fmt: skip
        self._sum = growing
        self._until = until
        self._error: Exception | None = None
        few, steps = direct and nbytes <= FEW_BYTES and rows <= FEW_ROWS, _steps(growing, lending)
        self._job = None if few else self._begin(steps, entries, workers.fit(direct=direct))
        if few:
            self._finish(steps)

    @property
    def settled(self) -> bool:
        """Whether no thread reads the memory any more."""
        return self._job is None or self._job.settled.done()

    def _finish(self, steps: _Steps) -> None:
        try:
            for _ in steps:
                pass
        except (LLMException, OSError) as error:
            self._error = error.with_traceback(None)

    def _begin(self, steps: _Steps, entries: Sequence[Entry], workers: Workers) -> Job | None:
        pins = [entry.pin(self.abort) for entry in entries]
        try:
            job = Job(workers, steps)
        except RuntimeError as error:
            _release(pins)
            reason, status = f"no thread to sum with: {error}", LLMStatusCode.LLM_OUT_OF_MEMORY
            self._error = LLMException(reason, status_code=status, retry_safe=True)
            return None
        job.settled.add_done_callback(partial(_release, pins))
        return job

    def abort(self) -> None:
        """Stop after the step that runs now. Never waits."""
        if self._job is not None:
            break_off(self._job, self._until)

    async def digest(self) -> bytes:
        """The sum; once. OSError or LLMException if the memory cannot be read, or was taken away meanwhile;
        LLM_OUT_OF_MEMORY if there was no thread for it.
        """
        if self._job is not None:
            await moved(self._job)
        elif self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # else it and this frame would hold each other
        return self._sum.digest()

    def __repr__(self) -> str:
        return f"<Summed {'settled' if self.settled else 'running'}>"


def _release(pins: list[Pin], *_: object) -> None:
    for pin in pins:
        pin.release()


def _steps(growing: Sum, lending: Batches) -> _Steps:
    with closing(lending):
        yield from sums.steps(growing, lending)
