"""The core's event loop on a thread of its own, and the crossing of one call to it and back. It must not know what the
calls do.

Both faces cross here: one awaits from any loop of any thread, the other blocks its thread. A caller who is cancelled
(or interrupted) cancels the core's task and then waits until that has settled.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import selectors
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar

from kvpull_async._deadline import NEVER, absorb
from kvpull_async._workers import report_to
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError

__all__ = ["Call", "CoreLoop"]

T = TypeVar("T")
Outcome = tuple[Any, "BaseException | None"]


class CoreLoop:
    """Started by `init`, stopped by `finalize`; not reusable."""

    def __init__(self, *, name: str, on_bug: Callable[[str], None]) -> None:
        self._name = name
        self._on_bug = on_bug
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._loop.set_exception_handler(self._handle)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._calls: set[Call[Any]] = set()
        self._stopped = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def start(self) -> None:
        # Tasks of the loop inherit an empty context, not that of whoever called `init`.
        contextvars.Context().run(self._thread.start)

    def call(self, make: Callable[[], Coroutine[Any, Any, T]], *, patience: float) -> Call[T]:
        """Run a coroutine on the core, in a copy of the caller's context.

        `patience` (s) bounds how long a cancelled caller waits for it to settle; the coroutine itself keeps a
        tighter bound, so this one is reached only when the core is stuck.
        """
        self.check_process()
        call = Call(self, make, patience)
        try:
            self._loop.call_soon_threadsafe(call.begin, context=contextvars.copy_context())
        except RuntimeError as error:
            raise finalized() from error
        return call

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
        self._stopped = True
        if not report_to(self._loop, self._loop.stop):
            return True
        if self.on_core_thread():
            return False
        self._thread.join(timeout)
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
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        self._loop.run_until_complete(asyncio.sleep(0))
        for call in tuple(self._calls):
            call.fail(finalized())
        asyncio.set_event_loop(None)
        self._loop.close()

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._on_bug(f"{context.get('message')}: {context.get('exception')!r}")

    def __repr__(self) -> str:
        return f"<CoreLoop {self._name} calls={len(self._calls)}{' stopped' if self._stopped else ''}>"


class Call(Generic[T]):
    """One call on its way. Wait for it once, with `wait` (blocking) or `result` (awaiting)."""

    def __init__(self, core: CoreLoop, make: Callable[[], Coroutine[Any, Any, T]], patience: float) -> None:
        self.orphaned: Callable[[], None] | None = None
        self._core = core
        self._make = make
        self._patience = patience
        self._task: asyncio.Task[T] | None = None
        self._lock = threading.Lock()  # protects _outcome and _waiter, set from two threads
        self._outcome: Outcome | None = None
        self._waiter: Callable[[], bool] | None = None

    # -- on the core's thread ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._core._calls.add(self)
        self._task = self._core.loop.create_task(self._make(), name="kvpull-call")
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._settle((None, asyncio.CancelledError()))
        elif (error := task.exception()) is not None:
            self._settle((None, error))
        else:
            self._settle((task.result(), None))

    def fail(self, error: LLMException) -> None:
        self._settle((None, error))

    def _settle(self, outcome: Outcome) -> None:
        self._core._calls.discard(self)
        with self._lock:
            if self._outcome is not None:
                return
            self._outcome = outcome
            waiter = self._waiter
        if waiter is not None and not waiter() and self.orphaned is not None:
            self.orphaned()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # -- on the caller's --------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Ask the core's task to stop, from any thread. Never waits."""
        report_to(self._core.loop, self._cancel)

    @property
    def ended(self) -> bool:
        return self._outcome is not None

    @property
    def succeeded(self) -> bool:
        """Whether it has ended without an error, also when its caller was cancelled too late to stop it."""
        return self._outcome is not None and self._outcome[1] is None

    def wait(self, bound: float | None = None) -> T:
        """Block until it has ended, at most `bound` seconds (then LLMTimeoutError).

        An exception raised meanwhile by a signal handler (KeyboardInterrupt) cancels the call and is raised once that
        has settled; a second one is raised at once.
        """
        if self._core.on_core_thread():
            self.cancel()
            raise RuntimeError("the blocking API was called from the core's own thread, which it would wait for")
        ended = threading.Event()
        self._listen(partial(_signal, ended))
        try:
            in_time = ended.wait(bound)
        except BaseException:
            self.cancel()
            ended.wait(self._patience)
            raise
        if not in_time:
            self.cancel()
            raise LLMTimeoutError(f"the core did not answer within {bound} s")
        return self._unpack()

    async def result(self) -> T:
        """Await it on the running loop, whichever that is. A cancelled caller gets CancelledError once the call has
        settled; further cancellations meanwhile are absorbed.
        """
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self._listen(lambda: report_to(loop, _resolve, ended))
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            self.cancel()
            await absorb([ended], NEVER.sooner(self._patience))
            raise
        except GeneratorExit:  # the caller's loop is going away and cannot wait
            self.cancel()
            raise
        return self._unpack()

    def _listen(self, waiter: Callable[[], bool]) -> None:
        with self._lock:
            if self._outcome is None:
                self._waiter = waiter
                return
        waiter()

    def _unpack(self) -> T:
        assert self._outcome is not None
        value, error = self._outcome
        if error is None:
            result: T = value
            return result
        if isinstance(error, asyncio.CancelledError):  # nobody asked for it: the core ended underneath the call
            raise finalized()
        raise error


def finalized() -> LLMException:
    return LLMException("the engine was finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)


def _signal(ended: threading.Event) -> bool:
    ended.set()
    return True


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
