"""The threads that talk to one NPU. Each binds the device when it begins, and owns a stream until it ends.

Nobody else's thread ever has its context changed, and one that waits for a device that hangs holds up no other for
long: another thread takes its place. It must not know memory blocks or caches.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection
from concurrent import futures
from typing import Any, Final, TypeVar

from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers
from kvpull_async.memory._acl import Acl
from kvpull_async.memory.base import Until, forked
from kvpull_async.memory.npu.codes import AclError, check
from kvpull_async.memory.npu.streams import LONGEST, Stream, Unsettled, ended
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError

__all__ = ["Copiers"]

T = TypeVar("T")
_THREADS: Final = 4
"""Streams that copy at once: one direction of the host's link is full with fewer."""
_LOOK: Final = 0.02
"""Seconds between two looks whether somebody who waits in the queue still wants to."""
_SLOW: Final = 1.0
"""Seconds after which a thread that takes or clears memory counts as hanging."""
_HELD: Final = 5
"""Such looks beyond the end of its time, after which a thread that waits counts as hanging."""
_RUNNING: Final = 12
"""And after so many at one piece that is being copied, whatever its time: a MiB takes less than a thousandth of it."""


class _Bound(threading.local):
    """What this thread has of the device."""

    stream: Stream | None = None


class Copiers:
    """Used from any thread but their own. `held` hears when such a thread hangs with them, and when no more; `failed`
    hears of errors that nobody waits for.
    """

    def __init__(self, acl: Acl, device: int, *, failed: Callable[[BaseException], object]) -> None:
        self.unsettled: bool = False
        """Whether a copy was left that may still run."""
        self.held: Callable[[bool], object] = _nobody
        self._failed = failed
        self._acl = acl
        self._device = device
        self._pid = os.getpid()
        self._bound = _Bound()
        self._closing = threading.Event()
        self._changed = threading.Condition()  # protects _running
        self._running = 0
        self._workers = Workers(_THREADS, name=f"kvpull-acl-{device}", finalizer=self._unbind)

    def submit(self, work: Callable[[Stream], T], *, last: bool = False) -> futures.Future[T]:
        """`work` in one of the threads, with its stream. After `stop` only the `last` works are done, which free.
        AscendCL documentation: a forked child must not go on.
        """
        return self._submit(lambda: work(self._bind()), last=last)

    def call(self, work: Callable[[Stream], T], until: Until | None = None) -> T:
        """The same, waited for."""
        return self.wait(self.submit(work), until)

    def within(
        self,
        work: Callable[[Stream], T],
        deadline: Deadline,
        *,
        late: Callable[[futures.Future[T]], object] | None = None,
    ) -> T:
        """The same for what the device may never answer: LLMTimeoutError after the deadline, though `work` may go on.
        Then `late` is given its future. LONGEST seconds are the limit in any case.
        """
        future, deadline = self.submit(work), deadline.sooner(LONGEST)
        futures.wait([future], deadline.sooner(_SLOW).remaining)
        if not future.done() and not (deadline.expired and future.cancel()):
            self._wait_on(future, deadline)
        if not future.cancel() and future.done():
            return future.result()
        if late is not None and not future.cancelled():
            late(future)
        raise LLMTimeoutError("the device did not answer in time", retry_safe=True)

    def _wait_on(self, future: futures.Future[T], deadline: Deadline) -> None:
        """Others take the places of the threads: of the device's until it is free again, however long that takes."""
        self._workers.stand_in(begins=True)
        future.add_done_callback(lambda _: self._workers.stand_in(begins=False))
        self.held(True)
        try:
            futures.wait([future], deadline.remaining)
        finally:
            self.held(False)

    def first(self, work: Callable[[], T]) -> T:
        """Before there is a device to bind."""
        return self.wait(self._submit(work))

    def wait(
        self, future: futures.Future[T], until: Until | None = None, *, beside: Collection[futures.Future[Any]] = ()
    ) -> T:
        """What began ends by itself, as its own bounds say; what has not by the end of its time, or within LONGEST
        seconds, need not begin any more. What runs on although it is over, or for long, hangs, and so do those `beside`
        it, of the same transfer: others take the places of their threads.
        """
        until, patience, over, ran, hanging = until or Until(), Deadline.after_ms(LONGEST * 1000), 0, 0, 0
        try:
            while not future.done():
                with contextlib.suppress(futures.TimeoutError, futures.CancelledError):
                    future.exception(_LOOK)
                if future.done():
                    break
                ran += future.running()
                if until.over or patience.expired:
                    if future.cancel():
                        raise ended(until)
                    over += 1
                if not hanging and (over >= _HELD or ran >= _RUNNING):
                    hanging = 1 + sum(other.running() for other in beside)
                    self._hang(hanging, begins=True)
        finally:
            if hanging:
                self._hang(hanging, begins=False)
        return future.result()

    def _hang(self, threads: int, *, begins: bool) -> None:
        for _ in range(threads):
            self._workers.stand_in(begins=begins)
        self.held(begins)

    def outcome(
        self, future: futures.Future[T], until: Until, *, beside: Collection[futures.Future[Any]] = ()
    ) -> BaseException | None:
        """The end of what began, and how it went. Whatever disturbs the waiting, it returns no sooner."""
        error: BaseException | None = None
        while not future.done():
            try:
                self.wait(future, until, beside=beside)
            except BaseException as raised:  # noqa: BLE001  (given to the caller, who has one of its own already)
                error = raised
        return (None if future.cancelled() else future.exception()) or error

    def stop(self, deadline: Deadline) -> bool:
        """Leave what cannot be stopped. Whether all that was begun has ended, so that memory may be given back."""
        with self._changed:
            self._closing.set()
            ended_all = self._changed.wait_for(lambda: not self._running, deadline.remaining)
        return ended_all and not self.unsettled

    def close(self, deadline: Deadline) -> int:
        """Let the threads end after what is queued; how many have not by then."""
        self._closing.set()
        return self._workers.close(deadline.remaining)

    # -- in the threads ---------------------------------------------------------------------------------------------

    def _submit(self, work: Callable[[], T], *, last: bool = False) -> futures.Future[T]:
        self._refuse_forked()
        try:
            return self._workers.submit(self._run, work, last=last)
        except RuntimeError as error:  # closed, or no thread to be had
            closed = self._closing.is_set()
            status = LLMStatusCode.LLM_ENGINE_FINALIZED if closed else LLMStatusCode.LLM_FAILED
            reason = f"nothing can be done on the device: {error}"
            raise LLMException(reason, status_code=status, retry_safe=not closed) from error

    def _refuse_forked(self) -> None:
        if os.getpid() != self._pid:
            raise forked()

    def _run(self, work: Callable[[], T], *, last: bool) -> T:
        with self._changed:
            if self._closing.is_set() and not last:  # `stop` has perhaps looked already, and memory is being freed
                reason = "the device's memory has been closed"
                raise LLMException(reason, status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)
            self._running += 1
        try:
            return work()
        except Unsettled:
            self.unsettled = True
            raise
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _bind(self) -> Stream:
        """Where that fails it is tried again for the next work: the device may have come back."""
        stream = self._bound.stream
        if stream is None:
            check(self._acl, "aclrtSetDevice", self._acl.aclrtSetDevice(self._device))
            stream = Stream(self._acl, self._device, closing=self._closing)
            self._bound.stream = stream
        return stream

    def _unbind(self) -> None:
        stream, self._bound.stream = self._bound.stream, None
        if stream is not None:
            try:
                stream.close()
            except AclError as error:  # the thread ends all the same
                self._failed(error)

    def __repr__(self) -> str:
        return f"<Copiers of device {self._device} running={self._running} {self._workers!r}>"


def _nobody(begins: bool) -> None:
    """Nobody is told that a thread hangs."""
