"""One call on its way to the core and back: run there, waited for here, cancelled from here. It must not know what it
does.

Both faces cross with it: one awaits from any loop of any thread, the other blocks its thread. A caller who is cancelled
(or interrupted) cancels what runs on the core and then waits until that has settled.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from kvpull_async._deadline import NEVER, absorb
from kvpull_async._prompt import Prompt
from kvpull_async._threads import Ended
from kvpull_async._workers import report_to
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError

__all__ = ["Call", "finalized"]

T = TypeVar("T")
Outcome = tuple[Any, "BaseException | None"]


class Core(Protocol):
    """What a call needs of the loop it crosses to."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def send(self, call: Call[Any]) -> None: ...

    def over(self, call: Call[Any]) -> None: ...

    def watch_callers(self) -> None: ...

    def check_thread(self) -> None: ...


class Call(Generic[T]):
    """One call on its way. Wait for it once, with `wait` (blocking) or `result` (awaiting)."""

    def __init__(
        self,
        core: Core,
        make: Callable[[], Coroutine[Any, Any, T]],
        patience: float,
        context: contextvars.Context,
        *,
        prompt: bool,
    ) -> None:
        self.context = context
        self.orphaned: Callable[[], None] | None = None
        self.undo: Callable[[T], None] | None = None
        """Called on the core with a result that nobody takes, because its caller has gone meanwhile."""
        self._core = core
        self._make = make
        self.patience = patience
        self._prompt = prompt
        self._task: asyncio.Task[T] | None = None
        self._by_hand: Coroutine[Any, Any, T] | None = None
        self._caller: asyncio.AbstractEventLoop | None = None
        self._there: Prompt[None] | None = None
        self._arrived = False
        self._waiter: Callable[[], bool] = bool
        self._lock = threading.Lock()  # protects _outcome and _untaken, which two threads set
        self._outcome: Outcome | None = None
        self._untaken = False

    # -- on the core's thread ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        if self._outcome is not None:  # interrupted on its way
            return
        if self._caller is not None:
            self._core.watch_callers()
        coroutine = self._carry()
        if self._prompt:
            self._by_hand = coroutine
            self._step()
        else:
            self._run(coroutine)

    def _step(self, _: object = None) -> None:
        """Run it by hand until it waits or wants a task."""
        coroutine = self._by_hand
        if coroutine is not None:
            try:
                until = coroutine.send(None)
                if not (until is None or isinstance(until, Prompt)):
                    coroutine.throw(RuntimeError(f"{self!r} waits for {until!r}, which needs a task"))
            except StopIteration:
                self._by_hand = None
                return
            if until is None:
                self._run(coroutine)
            else:
                until.add_done_callback(self._step, context=self.context)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._by_hand = None
        self._task = self._core.loop.create_task(coroutine, name="kvpull-call")
        if not self._prompt:  # one that is cancelled before it began would not say so
            self._task.add_done_callback(self._ended)

    def give_task(self) -> None:
        """It may be cancelled from now on."""
        if self._by_hand is not None:
            self.context.run(self._run, self._by_hand)

    async def _carry(self) -> T:
        """Whoever waits for a plain "done" is woken on the spot, not when the loop comes to the task's callbacks."""
        if not self._prompt:
            value = await self._make()
        else:
            try:
                value = await self._make()
            except BaseException as error:
                self._task = None
                self._settle((None, error))
                if not isinstance(error, Exception):
                    raise
                return None  # type: ignore[return-value]  # nobody asks the task
        if value is None:
            self._task = None
            self._settle((None, None))
        return value

    def check_caller(self) -> None:
        """A caller whose loop has closed can neither take the result nor cancel: do the latter for it."""
        if self._caller is not None and self._caller.is_closed():
            self._orphan()
            self._cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        self._task = None
        if task.cancelled():
            self._settle((None, asyncio.CancelledError()))
        elif (error := task.exception()) is not None:
            self._settle((None, error))
        elif task.result() is not None:
            self._settle((task.result(), None))

    def _settle(self, outcome: Outcome) -> None:
        self._set(outcome)
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
        self._core.over(self)
        waiter, self._waiter = self._waiter, _told  # which leads back to this call
        if not waiter():
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
        self.give_task()
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
    def error(self) -> BaseException | None:
        return None if self._outcome is None else self._outcome[1]

    @property
    def succeeded(self) -> bool:
        """Whether it has ended without an error, also when its caller was cancelled too late to stop it."""
        return self._outcome is not None and self._outcome[1] is None

    def start(self, ended: Callable[[], bool], *, caller: asyncio.AbstractEventLoop | None = None) -> None:
        """Run it without waiting. `ended` is called once, on the core's thread, when `taken` has something to give, and
        answers whether anybody still listens: on the loop `caller`, or (None) in a thread that blocks. Who starts a
        call this way also cancels it, and then waits at most `patience` seconds until it has ended.
        """
        self._caller, self._waiter = caller, ended
        self._core.send(self)

    def wait(self, bound: float = math.inf) -> T:
        """Run it, and block until it has ended, at most `bound` seconds (then LLMTimeoutError).

        An exception raised meanwhile by a signal handler (KeyboardInterrupt) cancels the call and is raised once that
        has settled; a second one is raised at once.
        """
        self._core.check_thread()
        ended = Ended()
        self._waiter = ended.set
        try:
            self._core.send(self)
            ended.wait(bound)
        except BaseException:
            self.cancel()
            ended.wait(self.patience)
            self._leave()
            raise
        return self.taken(bound)

    async def result(self, bound: float = math.inf) -> T:
        """Run it, and await it on the running loop, whichever that is; at most `bound` seconds (then LLMTimeoutError).

        A cancelled caller gets CancelledError once the call has settled; further cancellations meanwhile are absorbed.
        """
        loop = self._caller = asyncio.get_running_loop()
        self._there = Prompt(loop=loop)
        self._waiter = partial(report_to, loop, self._arrive)
        self._core.send(self)
        try:
            if math.isinf(bound):
                await self._there
            else:
                await asyncio.wait([self._there], timeout=bound)
        except asyncio.CancelledError:
            self.cancel()
            if not self._arrived:
                self._there = Prompt(loop=loop)  # the cancellation has ended the other one
                await absorb([self._there], NEVER.sooner(self.patience))
            self._leave()
            raise
        except GeneratorExit:  # the caller's loop is going away and cannot wait
            self.cancel()
            self._leave()
            raise
        return self.taken(bound)

    def _arrive(self) -> None:
        """On the caller's loop: it has ended."""
        self._arrived = True
        if self._there is not None and not self._there.done():
            self._there.hand(None)

    def taken(self, bound: float = math.inf) -> T:
        """The result of a call that has ended, or its error."""
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


def _told() -> bool:
    """Stands for a waiter who has been woken."""
    return True
