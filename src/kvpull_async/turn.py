"""One call's stay on a link: its deadline, what may end it from elsewhere, and the error its caller then sees.

It must not know what the call is for.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from kvpull_async._deadline import Deadline
from kvpull_async.held import Entry, Pin
from kvpull_async.linkage import broken
from kvpull_async.observe import Report
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError, fresh

if TYPE_CHECKING:
    from kvpull_async.lane import Lane
    from kvpull_async.link import Link

__all__ = ["GRACE", "Turn", "cause_of"]

_LEAST: Final = 0.02

GRACE: Final = 0.07
"""Seconds after the deadline within which a call has settled or its destination is quarantined; the rest of the
promised 100 ms is for crossing back to the caller.
"""


class Turn:
    """Runs once. `stop` ends it from elsewhere on the loop with an error instead of a cancellation."""

    writes: bool = False
    """Whether the memory of its entry is to be written, not read."""
    losses_seen: int = 0
    """How often its link had been lost when it joined the queue."""

    def __init__(self, link: Link, entry: Entry, deadline: Deadline, report: Report) -> None:
        self._link = link
        self._entry = entry
        self._deadline = deadline
        self._report = report
        self._task: asyncio.Task[object] | None = None
        self._stop: LLMException | None = None
        self._expired = False
        self._committed = False
        self._holds_slot = False
        self._pin: Pin | None = None
        self._lane: Lane | None = None

    def stop(self, error: LLMException) -> None:
        """End the call with `error`, wherever it waits. Never waits itself."""
        if self._stop is None and not self._committed:
            self._stop = error
            self._cancel()

    def _interrupt(self) -> None:
        """The deadline has passed."""
        self._expired = True
        self._cancel()

    def _cancel(self) -> None:
        """End whichever wait is going on."""
        if self._task is not None:
            self._task.cancel()

    def _claim_memory(self) -> None:
        entry = self._entry
        if not entry.alive:
            raise LLMException(f"cache {entry.cache_id} was released", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
        entry.reach(writing=self.writes)
        self._pin = entry.pin(self._cut)

    def _cut(self) -> None:
        self.stop(
            LLMException(
                f"cache {self._entry.cache_id} was released meanwhile",
                status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
            )
        )

    def _leave(self) -> None:
        """Give back what it holds."""
        self._report.leave()
        if self._pin is not None:
            self._pin.release()
        if self._holds_slot:
            self._link.leave(self)

    def _wished(self, error: BaseException) -> bool:
        """Whether the caller itself asked for this end."""
        return isinstance(error, asyncio.CancelledError) and self._stop is None and not self._expired

    def _bound(self) -> Deadline:
        """When to stop waiting for what is being stopped. A core that comes late is no reason not to wait at all."""
        end = max(self._deadline.at + GRACE, time.monotonic() + _LEAST)
        return Deadline(end).sooner(self._link.settle_timeout)

    def _explain(self, error: BaseException, unsafe: bool) -> LLMException:
        """The exception the caller sees, a new instance with the fields that say what to do next."""
        if self._stop is not None and isinstance(error, asyncio.CancelledError):
            known = fresh(self._stop)
            _uncancel(self._task)
        elif isinstance(error, LLMException):
            known = error
        elif isinstance(error, (asyncio.TimeoutError, asyncio.CancelledError)):
            if isinstance(error, asyncio.CancelledError):
                _uncancel(self._task)
            known = LLMTimeoutError(f"the deadline of {self._budget_ms()} ms passed {self._where()}", retry_safe=True)
        elif isinstance(error, OSError):
            known = broken(error, self._lane, self._link.peer_name, push=self._report.push)
        else:
            known = LLMException(f"internal error: {error!r}", status_code=LLMStatusCode.LLM_FAILED)
        known.destination_unsafe |= unsafe  # memory that was closed under a copy has said so itself
        known.retry_safe = known.retry_safe and not known.destination_unsafe
        return known

    def _budget_ms(self) -> int:
        return round((self._deadline.at - self._report.started) * 1000)

    def _where(self) -> str:
        """At what the deadline passed, to end a sentence with."""
        raise NotImplementedError


def cause_of(error: BaseException) -> BaseException | None:
    return error.__cause__ if isinstance(error, (LLMException, asyncio.CancelledError)) else error


def _uncancel(task: asyncio.Task[object] | None) -> None:
    """Python 3.11 counts cancellations; one that became an error must not count."""
    uncancel = getattr(task, "uncancel", None)
    if uncancel is not None:
        uncancel()
