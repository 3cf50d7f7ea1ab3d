"""One `transfer_cache_async` from its start to its end, without the waiting, in which the two faces differ.

It must not wait. Dropping it ends nothing: the transfer runs on.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable

from kvpull_async.call import finalized
from kvpull_async.engine import Engine
from kvpull_async.managers.manager import Operation
from kvpull_async.managers.transfers import OPERATION, Transfer
from kvpull_async.status import LLMStatusCode
from kvpull_async.values._check import uint32

__all__ = ["TransferTask", "wait_seconds"]


class TransferTask:
    """Started when it is made. Any number of threads and event loops may look at it and wait for its end."""

    def __init__(self, engine: Engine, transfer: Transfer) -> None:
        engine.core.check_process()
        if engine.stopped:
            raise finalized()
        self._engine = engine
        self._transfer = transfer
        self._lock = threading.RLock()  # protects _waiters and _over; a signal handler may wait, too
        self._waiters: set[Callable[[], object]] = set()
        self._over = False
        self._call = engine.call(Operation(OPERATION, transfer.run))
        self._call.start(self._end)

    @property
    def over(self) -> bool:
        return self._over

    @property
    def results(self) -> list[LLMStatusCode | None]:
        """One per config; while it runs the status that says so."""
        transfer = self._transfer
        return list(transfer.statuses) if self._over else [transfer.running_status] * len(transfer.statuses)

    @property
    def overall(self) -> LLMStatusCode:
        """The first status other than LLM_SUCCESS, if there is one; while it runs the status that says so."""
        if not self._over:
            return self._transfer.running_status
        success = LLMStatusCode.LLM_SUCCESS
        return next((status for status in self._transfer.statuses if status not in (None, success)), None) or success

    @property
    def exceptions(self) -> list[BaseException | None]:
        return list(self._transfer.exceptions)

    def when_over(self, waiter: Callable[[], object]) -> None:
        """Call `waiter` once, from whatever thread; at once when it is over already. It must not wait or raise.
        RuntimeError in a forked child, where nothing of the transfer runs.
        """
        self._engine.core.check_process()
        with self._lock:
            if not self._over:
                self._waiters.add(waiter)
                return
        waiter()

    def forget(self, waiter: Callable[[], object]) -> None:
        """It waits no more."""
        with self._lock:
            self._waiters.discard(waiter)

    def _end(self) -> bool:
        error = self._call.error
        if error is not None:  # nobody but a core that ends cancels it
            self._transfer.fail(finalized() if isinstance(error, asyncio.CancelledError) else error)
        with self._lock:
            self._over = True
            waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            waiter()
        return True

    def __repr__(self) -> str:
        return f"<TransferTask {'over' if self._over else 'running'} {self.results}>"


def wait_seconds(timeout_in_millis: object) -> float:
    """What a caller's timeout (ms, uint32; None for none) comes to."""
    return math.inf if timeout_in_millis is None else uint32("timeout_in_millis", timeout_in_millis) / 1000
