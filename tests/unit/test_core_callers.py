"""Callers that a signal interrupts, that sit on the core's own thread, that are gone, or in another process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any

import pytest

from kvpull_async.core import Call, CoreLoop
from kvpull_async.status import LLMTimeoutError
from tests.core_calls import BOUND, Step, call, running_core, value


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
