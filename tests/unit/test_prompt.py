"""Futures whose waiter goes on at once, and coroutines that wait without a task."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

import pytest

from kvpull_async._prompt import Prompt, by_hand


def prompt() -> Prompt[str]:
    return Prompt(loop=asyncio.get_running_loop())


async def outside_tasks(callback: Callable[[], Any]) -> Any:
    """What the callback gives when the loop calls it, as it calls for bytes that have come."""
    done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: done.set_result(callback()))
    return await done


async def waiting_for(future: Prompt[str], told: list[str]) -> None:
    told.append(await future)


# --- futures ---


async def test_who_waits_goes_on_before_hand_returns() -> None:
    future, told = prompt(), list[str]()
    task = asyncio.create_task(waiting_for(future, told))
    await asyncio.sleep(0)

    def arrive() -> tuple[bool, list[str]]:
        awaited = future.awaited
        future.hand("here")
        return awaited, list(told)

    assert await outside_tasks(arrive) == (True, ["here"])
    await task


async def test_inside_another_task_it_is_a_plain_future() -> None:
    future, told = prompt(), list[str]()
    task = asyncio.create_task(waiting_for(future, told))
    await asyncio.sleep(0)
    assert not future.awaited
    future.hand("here")
    assert told == []
    await task
    assert told == ["here"]


async def test_handed_over_before_anybody_waits_it_is_there_for_who_comes() -> None:
    future = prompt()
    assert not await outside_tasks(lambda: future.awaited)
    await outside_tasks(lambda: future.hand("here"))
    assert await future == "here"


async def test_of_several_who_wait_all_are_told_and_it_says_that_they_are_several() -> None:
    future, told = prompt(), list[str]()
    tasks = [asyncio.create_task(waiting_for(future, told)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not await outside_tasks(lambda: future.awaited)
    await outside_tasks(lambda: future.hand("here"))
    await asyncio.gather(*tasks)
    assert told == ["here"] * 3


@pytest.mark.parametrize("end", ["result", "error", "cancel"])
async def test_every_other_end_is_told_in_the_next_turn(end: str) -> None:
    future, told = prompt(), list[str]()
    task = asyncio.create_task(waiting_for(future, told))
    await asyncio.sleep(0)
    if end == "result":
        future.set_result("set")
    elif end == "error":
        future.set_exception(OSError("broke"))
    else:
        assert future.cancel()
    assert not task.done()
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    expected: dict[str, Any] = {"result": type(None), "error": OSError, "cancel": asyncio.CancelledError}
    assert isinstance(outcome, expected[end])
    assert told == (["set"] if end == "result" else [])


async def test_a_waiter_who_is_cancelled_is_not_run() -> None:
    future, told = prompt(), list[str]()
    task = asyncio.create_task(waiting_for(future, told))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert future.cancelled()
    assert told == []


async def test_wait_for_leaves_nobody_behind_who_would_be_run() -> None:
    future = prompt()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(future), 0.01)
    called: list[object] = []
    future.add_done_callback(called.append)
    assert future.remove_done_callback(called.append) == 1
    await outside_tasks(lambda: future.hand("here"))
    await asyncio.sleep(0)
    assert called == []


async def test_the_waiter_runs_in_its_own_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nobody's")
    future, seen = prompt(), []

    async def wait() -> None:
        variable.set("the waiter's")
        await future
        seen.append(variable.get())

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    await outside_tasks(lambda: future.hand("here"))
    await task
    assert seen == ["the waiter's"]
    assert variable.get() == "nobody's"


# --- by hand ---


async def test_without_a_task_it_yields_what_it_waits_for() -> None:
    future = prompt()

    async def steps() -> str:
        await by_hand(future)
        await by_hand()
        return "done"

    def run() -> list[Any]:
        coroutine = steps()
        seen: list[Any] = [coroutine.send(None), coroutine.send(None)]
        with pytest.raises(StopIteration) as ended:
            coroutine.send(None)
        return [*seen, ended.value.value]

    assert await outside_tasks(run) == [future, None, "done"]


async def test_in_a_task_it_is_one_turn_of_the_loop() -> None:
    turns: list[int] = []
    asyncio.get_running_loop().call_soon(turns.append, 1)
    await by_hand(prompt())
    assert turns == [1]
