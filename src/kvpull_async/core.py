"""The core's event loop on a thread of its own, and the crossing of one call to it and back. It must not know what the
calls do.

Both faces cross here: one awaits from any loop of any thread, the other blocks its thread. A caller who is cancelled
(or interrupted) cancels the core's task and then waits until that has settled.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import os
import selectors
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, Generic, TypeVar

from kvpull_async._deadline import NEVER, Deadline, absorb
from kvpull_async._workers import report_to
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError

__all__ = ["Call", "CoreLoop"]

T = TypeVar("T")
_FINISH: Final = 1.0
"""Seconds that tasks have to end when the loop does."""
_SIGNALS: Final = 0.2
"""Seconds after which a signal is noticed at the latest by a thread that blocks."""
_WATCH: Final = 0.25
"""Seconds between two looks at the callers' loops."""

Outcome = tuple[Any, "BaseException | None"]


class CoreLoop:
    """Started by `init`, stopped by `finalize`; not reusable."""

    def __init__(self, *, name: str, on_bug: Callable[[str], None]) -> None:
        self._name = name
        self._on_bug = on_bug
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        # In an empty context, as is the thread below: what lasts must not keep that of whoever called `init`.
        self._loop = contextvars.Context().run(asyncio.SelectorEventLoop, self._selector)
        self._loop.set_exception_handler(self._handle)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._calls: set[Call[Any]] = set()
        self._stopped = False
        self._watching = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def start(self) -> None:
        contextvars.Context().run(self._thread.start)

    def call(
        self,
        make: Callable[[], Coroutine[Any, Any, T]],
        *,
        patience: float,
        context: contextvars.Context | None = None,
    ) -> Call[T]:
        """A coroutine to be run on the core, in a copy of the caller's context; its `wait` or `result` sends it there.

        `patience` (s) bounds how long a cancelled caller waits for it to settle; the coroutine itself keeps a
        tighter bound, so this one is reached only when the core is stuck.
        """
        self.check_process()
        return Call(self, make, patience, contextvars.copy_context() if context is None else context)

    def send(self, call: Call[Any]) -> None:
        """Begin a call, from any thread; on a core that has ended it fails."""
        self._calls.add(call)  # before it is sent: a core that ends right now finds it here
        try:
            self._loop.call_soon_threadsafe(call.begin, context=call.context)
        except RuntimeError:
            call.fail(finalized())

    def check_process(self) -> None:
        """RuntimeError in a forked child: the core's thread did not come along."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this LLMDataDist belongs to the parent process; after a fork, make and init a new one in the child"
            )

    def on_core_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def stop(self, timeout: float) -> bool:
        """Stop the loop and join its thread; False when it did not end within `timeout` seconds."""
        if not self._stopped:
            self._stopped = True
            report_to(self._loop, self._loop.stop)  # once only: a second one would cut `_finish` short
        if self.on_core_thread():
            return False
        self._thread.join(timeout)
        return self.stopped

    @property
    def stopped(self) -> bool:
        """Whether the thread has ended. Asking does not stop it."""
        return not self._thread.is_alive()

    def pending(self) -> list[str]:
        """Names of the tasks on the loop; for leak checks, from any thread."""
        return sorted(task.get_name() for task in asyncio.all_tasks(self._loop) if not task.done())

    def close_after_fork(self) -> None:
        """In a forked child: give up this process's copy of the selector."""
        self._selector.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._finish()

    def _finish(self) -> None:
        """Nothing may outlive the loop: what still runs is cancelled, who still waits is told."""
        bound = Deadline.after_ms(_FINISH * 1000)
        while (tasks := asyncio.all_tasks(self._loop)) and not bound.expired:
            for task in tasks:
                task.cancel()  # which may make others: a connection that ends is dialled again
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=_FINISH / 10))
        self._loop.run_until_complete(asyncio.sleep(0))
        asyncio.set_event_loop(None)
        self._loop.close()
        for call in tuple(self._calls):
            call.fail(finalized())

    def watch_callers(self) -> None:
        """While calls run, look now and then whether a caller's loop has closed under its call."""
        if not self._watching:
            self._watching = True
            self._loop.call_later(_WATCH, self._look, context=contextvars.Context())

    def _look(self) -> None:
        self._watching = False
        for call in tuple(self._calls):
            call.check_caller()
        if self._calls:
            self.watch_callers()

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._on_bug(f"{context.get('message')}: {context.get('exception')!r}")

    def __repr__(self) -> str:
        return f"<CoreLoop {self._name} calls={len(self._calls)}{' stopped' if self._stopped else ''}>"


class Call(Generic[T]):
    """One call on its way. Wait for it once, with `wait` (blocking) or `result` (awaiting)."""

    def __init__(
        self,
        core: CoreLoop,
        make: Callable[[], Coroutine[Any, Any, T]],
        patience: float,
        context: contextvars.Context,
    ) -> None:
        self.context = context
        self.orphaned: Callable[[], None] | None = None
        self.undo: Callable[[T], None] | None = None
        """Called on the core with a result that nobody takes, because its caller has gone meanwhile."""
        self._core = core
        self._make = make
        self._patience = patience
        self._task: asyncio.Task[T] | None = None
        self._caller: asyncio.AbstractEventLoop | None = None
        self._waiter: Callable[[], bool] = bool
        self._lock = threading.Lock()  # protects _outcome and _untaken, which two threads set
        self._outcome: Outcome | None = None
        self._untaken = False

    # -- on the core's thread ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        if self._outcome is not None:  # interrupted on its way
            return
        self._task = self._core.loop.create_task(self._make(), name="kvpull-call")
        self._task.add_done_callback(self._ended)
        if self._caller is not None:
            self._core.watch_callers()

    def check_caller(self) -> None:
        """A caller whose loop has closed can neither take the result nor cancel: do the latter for it."""
        if self._caller is not None and self._caller.is_closed():
            self._orphan()
            self._cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._set((None, asyncio.CancelledError()))
        elif (error := task.exception()) is not None:
            self._set((None, error))
        else:
            self._set((task.result(), None))
        self._task = None
        if self._untaken:
            self._take_back()
        if self._outcome is None or self._outcome[0] is None:
            self._wake()
        else:  # when nothing here refers to the result any more: a cache that its caller drops is gone at once
            self._core.loop.call_soon(self._wake)

    def fail(self, error: BaseException) -> None:
        """End it with an error, unless it has ended."""
        self._set((None, error))
        self._wake()

    def _set(self, outcome: Outcome) -> None:
        with self._lock:
            if self._outcome is None:
                self._outcome = outcome

    def _wake(self) -> None:
        self._core._calls.discard(self)
        if not self._waiter():
            self._orphan()

    def _orphan(self) -> None:
        orphaned, self.orphaned = self.orphaned, None
        if orphaned is not None:
            orphaned()
        self._leave()

    def _take_back(self) -> None:
        outcome, self._outcome = self._outcome, (None, self._outcome[1] if self._outcome is not None else None)
        if self.undo is not None and outcome is not None and outcome[1] is None and outcome[0] is not None:
            self.undo(outcome[0])

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:
            self.fail(asyncio.CancelledError())

    # -- on the caller's --------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Ask the core's task to stop, from any thread. Never waits."""
        report_to(self._core.loop, self._cancel)

    def _leave(self) -> None:
        """The caller goes without the result, which may be there already or still come."""
        with self._lock:
            self._untaken = True
            there = self._outcome is not None
        if there:
            report_to(self._core.loop, self._take_back)

    @property
    def ended(self) -> bool:
        return self._outcome is not None

    @property
    def succeeded(self) -> bool:
        """Whether it has ended without an error, also when its caller was cancelled too late to stop it."""
        return self._outcome is not None and self._outcome[1] is None

    def wait(self, bound: float = math.inf) -> T:
        """Run it, and block until it has ended, at most `bound` seconds (then LLMTimeoutError).

        An exception raised meanwhile by a signal handler (KeyboardInterrupt) cancels the call and is raised once that
        has settled; a second one is raised at once.
        """
        if self._core.on_core_thread():
            raise RuntimeError("the blocking API was called from the core's own thread, which it would wait for")
        ended = _Ended()
        self._waiter = ended.set
        try:
            self._core.send(self)
            ended.wait(bound)
        except BaseException:
            self.cancel()
            ended.wait(self._patience)
            self._leave()
            raise
        return self._in_time(bound)

    async def result(self, bound: float = math.inf) -> T:
        """Run it, and await it on the running loop, whichever that is; at most `bound` seconds (then LLMTimeoutError).

        A cancelled caller gets CancelledError once the call has settled; further cancellations meanwhile are absorbed.
        """
        loop = self._caller = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self._waiter = partial(report_to, loop, _resolve, ended)
        self._core.send(self)
        try:
            await asyncio.wait([ended], timeout=None if math.isinf(bound) else bound)
        except asyncio.CancelledError:
            self.cancel()
            await absorb([ended], NEVER.sooner(self._patience))
            self._leave()
            raise
        except GeneratorExit:  # the caller's loop is going away and cannot wait
            self.cancel()
            self._leave()
            raise
        return self._in_time(bound)

    def _in_time(self, bound: float) -> T:
        if self._outcome is None:
            self.cancel()
            self._leave()
            raise LLMTimeoutError(f"the core did not answer within {bound} s")
        value, error = self._outcome
        self._outcome = (None, error)
        if error is None:
            result: T = value
            return result
        if isinstance(error, asyncio.CancelledError):  # nobody asked for it: the core ended underneath the call
            raise finalized()
        raise error


def finalized() -> LLMException:
    return LLMException("the engine was finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)


class _Ended:
    """Set once by the core's thread, and waited for by one that signals may interrupt.

    Not a `threading.Event`: an exception that a signal handler raises inside its `wait` may come out as another one.
    And a signal that comes in the wrong moment, or to another thread, ends no wait for a lock: this one looks up often.
    """

    def __init__(self) -> None:
        self._set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> bool:
        self._set = True
        with contextlib.suppress(RuntimeError):  # released already
            self._lock.release()
        return True

    def wait(self, timeout: float) -> None:
        deadline = NEVER.sooner(timeout)
        while not self._set and not deadline.expired:
            self._lock.acquire(timeout=min(deadline.remaining, _SIGNALS))


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
