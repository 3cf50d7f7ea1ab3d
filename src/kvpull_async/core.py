"""The core's event loop on a thread of its own, to which calls cross. It must not know what the calls do."""

from __future__ import annotations

import asyncio
import contextvars
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from kvpull_async._deadline import Deadline
from kvpull_async._threads import Bell
from kvpull_async._workers import report_to
from kvpull_async.call import Call, finalized

__all__ = ["Call", "CoreLoop"]

T = TypeVar("T")
_FINISH: Final = 1.0
"""Seconds that tasks have to end when the loop does."""
_AT_ONCE: Final = 128
"""Calls begun in one turn of the loop."""
_WATCH: Final = 0.25
"""Seconds between two looks at the callers' loops."""


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
        self._bell = Bell(self._loop, self._begin)
        self._sent: deque[Call[Any]] = deque()
        self._calls: set[Call[Any]] = set()
        self._stopped = False
        self._watching = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def start(self) -> None:
        try:
            contextvars.Context().run(self._thread.start)
        except RuntimeError:
            self._bell.close()
            raise

    def call(
        self,
        make: Callable[[], Coroutine[Any, Any, T]],
        *,
        patience: float,
        context: contextvars.Context | None = None,
        prompt: bool = False,
    ) -> Call[T]:
        """A coroutine to be run on the core, in a copy of the caller's context; its `wait` or `result` sends it there.

        `patience` (s) bounds how long a cancelled caller waits for it to settle; the coroutine itself keeps a
        tighter bound, so this one is reached only when the core is stuck. A `prompt` coroutine has no
        task before it asks for one: see `by_hand`.
        """
        self.check_process()
        return Call(self, make, patience, contextvars.copy_context() if context is None else context, prompt=prompt)

    def send(self, call: Call[Any]) -> None:
        """Begin a call, from any thread; on a core that has ended it fails."""
        self._calls.add(call)  # before it is sent: a core that ends right now finds it here
        self._sent.append(call)
        if not self._bell.ring():
            call.fail(finalized())

    def over(self, call: Call[Any]) -> None:
        """It has ended."""
        self._calls.discard(call)

    def _begin(self) -> None:
        for _ in range(min(len(self._sent), _AT_ONCE)):
            call = self._sent.popleft()
            call.context.run(call.begin)
        if self._sent:
            self._bell.ring()

    def check_process(self) -> None:
        """RuntimeError in a forked child: the core's thread did not come along."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this LLMDataDist belongs to the parent process; after a fork, make and init a new one in the child "
                "(which cannot use an NPU that the parent uses)"
            )

    def on_core_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def check_thread(self) -> None:
        if self.on_core_thread():
            raise RuntimeError("the blocking API was called from the core's own thread, which it would wait for")

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
        """In a forked child: give up this process's copies of what is open."""
        self._selector.close()
        self._bell.close_after_fork()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._bell.listen()
            self._loop.run_forever()
        finally:
            self._finish()

    def _finish(self) -> None:
        """Nothing may outlive the loop: what still runs is cancelled, who still waits is told."""
        bound = Deadline.after_ms(_FINISH * 1000)
        for call in tuple(self._calls):
            call.give_task()
        while (tasks := asyncio.all_tasks(self._loop)) and not bound.expired:
            for task in tasks:
                task.cancel()  # which may make others: a connection that ends is dialled again
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=_FINISH / 10))
        self._loop.run_until_complete(asyncio.sleep(0))
        asyncio.set_event_loop(None)
        self._bell.close()
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
