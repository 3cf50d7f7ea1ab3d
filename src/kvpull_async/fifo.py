"""One link's slot: whoever comes first goes first, and nobody waits without a bound. It must not know what for."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from kvpull_async._workers import report_to, resolve
from kvpull_async.status import LLMException, LLMStatusCode, fresh

__all__ = ["Fifo"]


class Fifo:
    """A lock that is granted in order of arrival. The waiting is bounded by the caller's own deadline.

    Used by one event loop, but for `claim` and `unclaim`, with which any thread may hold the slot for a moment.
    """

    def __init__(self, *, limit: int, wait: bool) -> None:
        self._gate = threading.RLock()  # protects _held, and that nobody begins to wait for a slot just given back
        self._limit = limit if wait else 0
        self._held: object = False
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._idle: set[asyncio.Future[None]] = set()

    @property
    def busy(self) -> bool:
        return self._held is not False or bool(self._waiters)

    async def acquire(self) -> None:
        """Wait for the slot. LLM_LINK_BUSY at once when the queue is full (or when nobody may wait)."""
        with self._gate:
            if not self.busy:
                self._held = True
                return
            if len(self._waiters) >= self._limit:
                raise LLMException(
                    f"the link is busy and {len(self._waiters)} calls wait for it already",
                    status_code=LLMStatusCode.LLM_LINK_BUSY,
                    retry_safe=True,
                )
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
        try:
            await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release()  # granted and cancelled in the same turn of the loop: the next one's turn
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def take(self) -> bool:
        """The slot, if it is to be had without waiting; to be given back with `release`."""
        return self.claim(True)

    def claim(self, token: object) -> bool:
        """From any thread: take the slot if nobody has it or waits for it. Give it back with `unclaim`, soon.

        The token tells whose it is: an interrupt that comes while this returns leaves no doubt about it.
        """
        with self._gate:
            if self.busy:
                return False
            self._held = token
            return True

    def unclaim(self, token: object, loop: asyncio.AbstractEventLoop) -> None:
        """From any thread, and more than once. Who has begun to wait meanwhile is woken on the loop."""
        with self._gate:
            if self._held is not token:
                return
            if not (self._waiters or self._idle):
                self._held = False
                return
        report_to(loop, self._pass_on, token)

    def _pass_on(self, token: object) -> None:
        if self._held is token:
            self.release()

    def release(self) -> None:
        with self._gate:
            while self._waiters:
                waiter = self._waiters.popleft()
                if not waiter.done():
                    self._held = True
                    waiter.set_result(None)
                    return
            self._held = False
        for idle in tuple(self._idle):
            resolve(idle)

    def fail_waiters(self, error: LLMException) -> None:
        """End every waiting call with its own instance of `error`."""
        with self._gate:
            waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(fresh(error))

    def idle(self) -> asyncio.Future[None]:
        """A future that ends when the slot is free and nobody waits."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._gate:
            if self.busy:
                self._idle.add(future)
                future.add_done_callback(self._idle.discard)
            else:
                future.set_result(None)
        return future

    def __repr__(self) -> str:
        return f"<Fifo held={self._held is not False} waiting={len(self._waiters)}>"
