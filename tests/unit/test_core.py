"""Calls cross to the core's loop and back, from any thread and any loop, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from kvpull_async.core import Call, CoreLoop
from kvpull_async.status import LLMException, LLMStatusCode
from tests.unit.core_calls import BOUND, Step, call, running_core, value

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
FINALIZED = LLMStatusCode.LLM_ENGINE_FINALIZED


@pytest.fixture
def bugs() -> list[str]:
    return []


@pytest.fixture
def core(bugs: list[str]) -> Iterator[CoreLoop]:
    with running_core(bugs) as core:
        yield core


async def failure() -> None:
    raise OSError("it broke")


# -- there and back ----------------------------------------------------------------------------------------------------


def test_a_blocking_call_returns_what_the_coroutine_returned(core: CoreLoop) -> None:
    assert call(core, value).wait() == "value"


async def test_an_awaited_call_returns_what_the_coroutine_returned(core: CoreLoop) -> None:
    assert await call(core, value).result() == "value"


async def test_errors_cross(core: CoreLoop) -> None:
    with pytest.raises(OSError, match="it broke"):
        await call(core, failure).result()
    with pytest.raises(OSError, match="it broke"):
        await asyncio.to_thread(call(core, failure).wait)


def test_the_coroutine_runs_on_the_cores_thread(core: CoreLoop) -> None:
    async def where() -> tuple[str, bool]:
        return threading.current_thread().name, core.on_core_thread()

    assert call(core, where).wait() == ("test-core", True)
    assert not core.on_core_thread()


def test_a_call_sees_its_callers_context_and_changes_none(core: CoreLoop) -> None:
    async def change() -> str:
        seen = variable.get()
        variable.set("changed")
        return seen

    token = variable.set("the caller's")
    try:
        assert call(core, change).wait() == "the caller's"
        assert variable.get() == "the caller's"
    finally:
        variable.reset(token)
    assert call(core, change).wait() == "unset"


def test_a_context_may_be_given_instead(core: CoreLoop) -> None:
    async def see() -> str:
        return variable.get()

    token = variable.set("the caller's")
    try:
        assert core.call(see, patience=BOUND, context=contextvars.Context()).wait() == "unset"
    finally:
        variable.reset(token)


class Result:
    """Something that can be referred to weakly."""


async def test_a_result_belongs_to_its_caller_alone(core: CoreLoop) -> None:
    async def make() -> Result:
        return Result()

    for _ in range(50):
        results = [call(core, make).wait(), await call(core, make).result()]
        watched = [weakref.ref(result) for result in results]
        results.clear()
        assert [watch() for watch in watched] == [None, None]


def test_many_threads_at_once(core: CoreLoop) -> None:
    results: list[int] = []

    async def give(number: int) -> int:
        await asyncio.sleep(0)
        return number

    def work(number: int) -> None:
        results.extend(call(core, partial(give, number * 100 + i)).wait() for i in range(20))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)
    assert sorted(results) == sorted(number * 100 + i for number in range(8) for i in range(20))


# -- a caller that is cancelled ----------------------------------------------------------------------------------------


async def test_a_cancelled_caller_gets_its_cancellation_once_the_call_has_settled(core: CoreLoop) -> None:
    step = Step(core)
    step.settle.clear()
    task = asyncio.ensure_future(call(core, step.run).result())
    await asyncio.to_thread(step.began.wait, BOUND)
    for _ in range(3):
        task.cancel()
        await asyncio.to_thread(step.cancelled.wait, BOUND)
        assert not task.done()
    step.settle.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_patience_bounds_the_wait_of_a_cancelled_caller(core: CoreLoop) -> None:
    step = Step(core)
    step.settle.clear()
    crossing = call(core, step.run, patience=0.01)
    task = asyncio.ensure_future(crossing.result())
    await asyncio.to_thread(step.began.wait, BOUND)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not crossing.ended
    step.settle.set()


async def test_a_call_cancelled_too_late_says_that_it_succeeded(core: CoreLoop) -> None:
    async def stubborn() -> str:
        began.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(BOUND)
        return "done all the same"

    began = threading.Event()
    crossing = call(core, stubborn)
    task = asyncio.ensure_future(crossing.result())
    await asyncio.to_thread(began.wait, BOUND)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert crossing.succeeded


async def test_a_call_cancelled_before_it_crossed_never_runs(core: CoreLoop) -> None:
    task = asyncio.ensure_future(call(core, failure).result())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_who_waits_when_the_core_ends_is_told(bugs: list[str]) -> None:
    core = CoreLoop(name="test-core", on_bug=bugs.append)
    core.start()
    steps = [Step(core) for _ in range(2)]
    awaiting = asyncio.ensure_future(call(core, steps[0].run).result())
    blocking = asyncio.ensure_future(asyncio.to_thread(call(core, steps[1].run).wait))
    for step in steps:
        await asyncio.to_thread(step.began.wait, BOUND)
    assert await asyncio.to_thread(core.stop, BOUND)
    errors = await asyncio.gather(awaiting, blocking, return_exceptions=True)
    assert [error.status_code for error in errors if isinstance(error, LLMException)] == [FINALIZED] * 2
    assert errors[0] is not errors[1]


def test_a_call_after_the_end_is_told_too(bugs: list[str]) -> None:
    core = CoreLoop(name="test-core", on_bug=bugs.append)
    core.start()
    assert core.stop(BOUND)
    assert core.stop(BOUND)
    with pytest.raises(LLMException) as caught:
        call(core, value).wait()
    assert caught.value.status_code == FINALIZED


def test_a_call_sent_in_the_last_moment_is_told_too(bugs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    core = CoreLoop(name="test-core", on_bug=bugs.append)
    core.start()
    close, crossing = core.loop.close, call(core, value)

    def close_after_one_more() -> None:
        core.send(crossing)  # the loop still takes it, and will never run it
        close()

    monkeypatch.setattr(core.loop, "close", close_after_one_more)
    assert core.stop(BOUND)
    assert crossing.ended
    assert not crossing.succeeded


def test_asking_again_to_stop_lets_the_first_one_finish_and_looking_does_not_ask(bugs: list[str]) -> None:
    ended = threading.Event()

    async def ends_slowly() -> None:
        try:
            await asyncio.sleep(BOUND)
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            ended.set()

    with running_core(bugs) as core:
        core.loop.call_soon_threadsafe(lambda: core.loop.create_task(ends_slowly()))
        assert call(core, value).wait() == "value"
        assert not core.stopped
        assert call(core, value).wait() == "value"
        while not core.stop(0):
            pass
        assert core.stopped
    assert ended.is_set()


def test_a_task_that_outlasts_its_cancellation_does_not_hold_up_the_end(bugs: list[str]) -> None:
    core = CoreLoop(name="test-core", on_bug=bugs.append)
    core.start()
    step = Step(core)
    step.settle.clear()
    crossing = call(core, step.run)
    waiting = threading.Thread(target=_expect_the_end, args=(crossing,))
    waiting.start()
    assert step.began.wait(BOUND)
    assert core.stop(BOUND)
    waiting.join(BOUND)
    assert not waiting.is_alive()
    assert crossing.ended


def _expect_the_end(crossing: Call[Any]) -> None:
    with pytest.raises(LLMException):
        crossing.wait()


def test_what_goes_wrong_on_the_loop_is_reported(core: CoreLoop, bugs: list[str]) -> None:
    def broken() -> None:
        raise OSError("in a callback")

    core.loop.call_soon_threadsafe(broken)
    assert call(core, value).wait() == "value"
    assert len(bugs) == 1
    assert "in a callback" in bugs[0]


def test_pending_tasks_are_named_for_leak_checks(core: CoreLoop) -> None:
    step = Step(core)
    thread = threading.Thread(target=call(core, step.run).wait)
    thread.start()
    assert step.began.wait(BOUND)
    assert core.pending() == ["kvpull-call"]
    step.let_go()
    thread.join(BOUND)
    assert call(core, value).wait() == "value"
    assert core.pending() == []
    assert repr(core) == "<CoreLoop test-core calls=0>"
