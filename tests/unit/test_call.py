"""Callers that a signal interrupts, that sit on the core's own thread, that are gone, or in another process; and calls
that need no task.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any

import pytest

from kvpull_async._prompt import Prompt, by_hand
from kvpull_async.core import Call, CoreLoop
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from tests.unit.core_calls import BOUND, Step, call, running_core, value


@pytest.fixture
def core() -> Iterator[CoreLoop]:
    with running_core([]) as core:
        yield core


# -- signals -----------------------------------------------------------------------------------------------------------


class Interrupt(Exception):
    """What a signal handler of the application raises."""


@contextlib.contextmanager
def interrupting() -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def interrupt() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


def in_background(*steps: Any) -> threading.Thread:
    thread = threading.Thread(target=lambda: [step() for step in steps])
    thread.start()
    return thread


def test_an_interrupted_caller_cancels_the_call_and_waits_until_it_has_settled(core: CoreLoop) -> None:
    step = Step(core)
    step.settle.clear()
    crossing = call(core, step.run)
    helper = in_background(
        lambda: step.began.wait(BOUND), interrupt, lambda: step.cancelled.wait(BOUND), step.settle.set
    )
    with interrupting(), pytest.raises(Interrupt):
        crossing.wait()
    assert crossing.ended
    assert not crossing.succeeded
    helper.join()


def test_a_signal_whose_handler_raises_nothing_disturbs_nobody(core: CoreLoop) -> None:
    step, seen = Step(core), threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.set())
    try:
        helper = in_background(lambda: step.began.wait(BOUND), interrupt, lambda: seen.wait(BOUND), step.let_go)
        assert call(core, step.run).wait() == "done"
        helper.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_another_thread_was_given_interrupts_all_the_same(core: CoreLoop) -> None:
    """As does one that comes just before the wait begins: Python runs handlers on the main thread, when that looks."""
    step = Step(core)

    def elsewhere() -> None:
        step.began.wait(BOUND)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    helper = in_background(elsewhere)
    with interrupting(), pytest.raises(Interrupt):
        call(core, step.run).wait()
    assert step.cancelled.is_set()
    helper.join()


def test_a_second_interrupt_raises_at_once(core: CoreLoop) -> None:
    step = Step(core)
    step.settle.clear()
    crossing = call(core, step.run)
    helper = in_background(lambda: step.began.wait(BOUND), interrupt, lambda: step.cancelled.wait(BOUND), interrupt)
    with interrupting(), pytest.raises(Interrupt):
        crossing.wait()
    assert not crossing.ended
    step.settle.set()
    helper.join()


def test_interrupted_before_it_crossed_it_never_runs(core: CoreLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    def send(crossing: Call[Any]) -> None:
        raise KeyboardInterrupt

    ran = threading.Event()

    async def run() -> None:
        ran.set()

    monkeypatch.setattr(core, "send", send)
    crossing = call(core, run)
    with pytest.raises(KeyboardInterrupt):
        crossing.wait()
    assert crossing.ended
    monkeypatch.undo()
    core.send(crossing)
    assert call(core, value).wait() == "value"
    assert not ran.is_set()


def test_a_bounded_wait_ends_although_the_core_is_stuck(core: CoreLoop) -> None:
    step = Step(core)
    with pytest.raises(LLMTimeoutError):
        call(core, step.run).wait(0.01)
    assert step.cancelled.wait(BOUND)


# -- callers who cannot wait -------------------------------------------------------------------------------------------


def test_blocking_on_the_cores_own_thread_is_refused(core: CoreLoop) -> None:
    async def block() -> str:
        call(core, value).wait()
        return "never"

    with pytest.raises(RuntimeError, match="core's own thread"):
        call(core, block).wait()


def test_awaiting_on_the_cores_own_loop_works(core: CoreLoop) -> None:
    async def outer() -> Any:
        return await call(core, value).result()

    assert call(core, outer).wait() == "value"


def abandon(coroutine: Coroutine[Any, Any, Any], began: threading.Event) -> asyncio.Task[Any]:
    """Start it on a loop that is then closed under it; returns the task that will never end."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # the loop complains about the task when that is collected
    task = loop.create_task(coroutine)

    async def until_begun() -> None:
        await asyncio.to_thread(began.wait, BOUND)

    loop.run_until_complete(until_begun())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    return task


def test_a_call_whose_callers_loop_has_closed_is_cancelled_and_told_of_once(core: CoreLoop) -> None:
    step, told = Step(core), []
    crossing = call(core, step.run)
    crossing.orphaned = lambda: told.append(threading.current_thread().name)
    task = abandon(crossing.result(), step.began)
    assert step.cancelled.wait(BOUND)
    assert call(core, value).wait() == "value"
    assert crossing.ended
    assert told == ["test-core"]
    assert not task.done()


def test_a_result_for_a_loop_that_has_closed_is_dropped_and_told_of(core: CoreLoop) -> None:
    step, told = Step(core), threading.Event()
    crossing = call(core, step.run)
    crossing.orphaned = told.set
    task = abandon(crossing.result(), step.began)
    step.let_go()
    assert told.wait(BOUND)
    assert not task.done()


def test_in_a_forked_process_there_is_no_core(core: CoreLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="parent process"):
        call(core, value)


# -- calls that are started and looked at later ------------------------------------------------------------------------


def telling(ended: threading.Event) -> Callable[[], bool]:
    def tell() -> bool:
        ended.set()
        return True

    return tell


def test_a_started_call_runs_while_its_caller_does_something_else(core: CoreLoop) -> None:
    step, ended = Step(core), threading.Event()
    crossing = call(core, step.run)
    crossing.start(telling(ended))
    assert step.began.wait(BOUND)
    assert not crossing.ended
    assert crossing.error is None
    step.let_go()
    assert ended.wait(BOUND)
    assert crossing.taken() == "done"


def test_a_started_call_that_is_cancelled_tells_when_it_has_settled(core: CoreLoop) -> None:
    step, ended = Step(core), threading.Event()
    step.settle.clear()
    crossing = call(core, step.run)
    crossing.start(telling(ended))
    assert step.began.wait(BOUND)
    crossing.cancel()
    assert step.cancelled.wait(BOUND)
    assert not ended.is_set()
    step.settle.set()
    assert ended.wait(BOUND)
    assert isinstance(crossing.error, asyncio.CancelledError)
    assert not crossing.succeeded


# -- calls without a task ----------------------------------------------------------------------------------------------


class ByHand:
    """A coroutine for the core that waits without a task, and tells what it came to."""

    def __init__(self, core: CoreLoop) -> None:
        self.waits = threading.Event()
        self.tasks: list[bool] = []
        """Whether there was a task at each of its steps."""
        self.ended: BaseException | None = None
        self._core = core
        self._answer: Prompt[str] | None = None

    async def run(self) -> None:
        self._answer = Prompt(loop=asyncio.get_running_loop())
        self._step()
        self.waits.set()
        try:
            await by_hand(self._answer)
            self._step()
            if await self._answer == "wait":
                await by_hand()
                self._step()
                await asyncio.sleep(0)
        except BaseException as error:
            self.ended = error
            self._step()
            await asyncio.sleep(0.001)  # as cleaning up may
            raise

    def _step(self) -> None:
        self.tasks.append(asyncio.current_task() is not None)

    def answer(self, word: str) -> None:
        assert self.waits.wait(BOUND)
        assert self._answer is not None
        self._core.loop.call_soon_threadsafe(self._answer.hand, word)


def prompt_call(core: CoreLoop, step: ByHand) -> Call[None]:
    return core.call(step.run, patience=BOUND, prompt=True)


@pytest.mark.parametrize(("word", "tasks"), [("go", [False, False]), ("wait", [False, False, True])])
async def test_a_prompt_call_has_no_task_before_it_asks_for_one(core: CoreLoop, word: str, tasks: list[bool]) -> None:
    step = ByHand(core)
    threading.Thread(target=step.answer, args=(word,)).start()
    await prompt_call(core, step).result()
    assert step.tasks == tasks


def test_a_prompt_call_can_be_waited_for_by_a_thread(core: CoreLoop) -> None:
    step = ByHand(core)
    threading.Thread(target=step.answer, args=("go",)).start()
    prompt_call(core, step).wait(BOUND)
    assert step.tasks == [False, False]


async def test_a_cancelled_prompt_call_settles_in_a_task(core: CoreLoop) -> None:
    step = ByHand(core)
    task = asyncio.create_task(prompt_call(core, step).result())
    assert await asyncio.to_thread(step.waits.wait, BOUND)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert isinstance(step.ended, asyncio.CancelledError)
    assert step.tasks == [False, True]
    step.answer("too late")
    assert await call(core, value).result() == "value"
    assert len(step.tasks) == 2


async def test_an_answered_call_is_gone_without_the_garbage_collector(core: CoreLoop) -> None:
    async def run() -> None:
        """Nothing."""

    gc.disable()
    try:
        for prompt in (True, False):
            crossing = core.call(run, patience=BOUND, prompt=prompt)
            gone, seen = weakref.ref(crossing), threading.Event()
            await crossing.result()
            del crossing
            core.loop.call_soon_threadsafe(seen.set)  # after which the core's own references are gone, too
            assert await asyncio.to_thread(seen.wait, BOUND)
            assert gone() is None
    finally:
        gc.enable()


async def test_an_error_before_the_first_wait_crosses_too(core: CoreLoop) -> None:
    async def run() -> None:
        raise OSError("at once")

    with pytest.raises(OSError, match="at once"):
        await core.call(run, patience=BOUND, prompt=True).result()


async def test_a_prompt_call_is_ended_with_the_core() -> None:
    with running_core([]) as core:
        step = ByHand(core)
        task = asyncio.create_task(prompt_call(core, step).result())
        assert await asyncio.to_thread(step.waits.wait, BOUND)
        assert await asyncio.to_thread(core.stop, BOUND)
        with pytest.raises(LLMException) as caught:
            await task
    assert caught.value.status_code == LLMStatusCode.LLM_ENGINE_FINALIZED
    assert isinstance(step.ended, asyncio.CancelledError)
