"""One absolute point in time, made at the API edge and passed down. It must not know what it bounds.

Every wait of a call (queueing, connecting, handshake, transfer) spends the same deadline.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import anyio
import async_timeout

__all__ = ["NEVER", "Deadline", "absorb", "finish"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of `time.monotonic()`, in seconds. asyncio's loops read the same clock."""

    at: float

    @classmethod
    def after_ms(cls, milliseconds: float) -> Deadline:
        return cls(time.monotonic() + milliseconds / 1000.0)

    @property
    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    @property
    def remaining_ms(self) -> int:
        return 2**31 - 1 if math.isinf(self.at) else math.ceil(self.remaining * 1000)

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.at

    def sooner(self, seconds: float) -> Deadline:
        """The earlier of this deadline and `seconds` from now."""
        return Deadline(min(self.at, time.monotonic() + seconds))

    def later(self, seconds: float) -> Deadline:
        return Deadline(self.at + seconds)

    def scope(self) -> async_timeout.Timeout:
        """A context manager that raises `asyncio.TimeoutError` in the running task once the deadline has passed."""
        if math.isinf(self.at):
            return async_timeout.timeout_at(None)
        now = time.monotonic()
        return async_timeout.timeout_at(asyncio.get_running_loop().time() + self.at - now)


NEVER = Deadline(math.inf)


async def absorb(waiting: Iterable[asyncio.Future[Any]], deadline: Deadline) -> bool:
    """Wait until every future is done or the deadline has passed, whatever cancels the waiting task meanwhile.

    Returns whether all are done. The caller is already unwinding from a cancellation or a failure and must re-raise
    it afterwards; further cancellations arriving here are absorbed, because returning early would hand the caller's
    memory back while something may still write to it.
    """
    pending = {future for future in waiting if not future.done()}
    if not pending:
        return True
    with anyio.CancelScope(
        shield=True
    ):  # a cancelled anyio scope around it would cancel anew on every turn of the loop
        while pending and not deadline.expired:
            try:
                _, pending = await asyncio.wait(pending, timeout=deadline.remaining)
            except asyncio.CancelledError:
                pending = {future for future in pending if not future.done()}
    return not pending


async def finish(step: Coroutine[Any, Any, None], deadline: Deadline) -> None:
    """Have a step that keeps to the deadline run to its end; a cancellation of the waiting task is raised then."""
    running = asyncio.get_running_loop().create_task(step, name="kvpull-finish")
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await absorb([running], deadline)
        raise
