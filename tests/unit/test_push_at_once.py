"""Small pushes that are begun without a task: they need none unless something has to be cleaned up."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvpull_async.call import Call
from kvpull_async.push import Push
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from tests.loop_nodes import eventually
from tests.unit.push_link import PushBench


class Here:
    """The test's own loop as the core."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def send(self, call: Call[Any]) -> None:
        call.begin()

    def over(self, call: Call[Any]) -> None: ...

    def watch_callers(self) -> None: ...

    def check_thread(self) -> None: ...


@pytest.fixture
async def bench() -> AsyncIterator[PushBench]:
    made = PushBench("at once", settle_timeout=0.05)
    yield made
    await made.link.close()


async def begun(push: Push) -> Call[None]:
    """From a callback of the loop, as on the core, where nobody has a task."""
    call: Call[None] = Call(Here(), push.run, 10.0, contextvars.copy_context(), prompt=True)
    asyncio.get_running_loop().call_soon(call.start, lambda: True)
    await asyncio.sleep(0)
    return call


async def outcome(call: Call[None]) -> BaseException | None:
    await eventually(lambda: call.ended)
    return call.error


def has_task() -> bool:
    return any(task.get_name() == "kvpull-call" for task in asyncio.all_tasks())


async def test_a_small_push_on_an_idle_link_needs_no_task(bench: PushBench) -> None:
    call = await begun(bench.push())
    assert len(bench.link.lane.heard) == 1  # already
    assert not has_task()
    assert await outcome(call) is None
    assert bench.link.received == [bench.expected]
    assert bench.reports[0].bytes == len(bench.expected)
    bench.quiet()


@pytest.mark.parametrize("why", ["busy link", "many rows", "clogged", "lost"])
async def test_one_that_has_to_wait_gets_a_task(bench: PushBench, why: str) -> None:
    if why == "busy link":
        await bench.link.fifo.acquire()
    elif why == "clogged":
        bench.link.lane.channel.clogged = True
    elif why == "lost":
        bench.link.lane.lose("the connection broke")
    call = await begun(bench.push(most_rows=2**40 if why == "many rows" else 4))
    assert has_task()
    if why == "busy link":
        bench.link.fifo.release()
    elif why == "clogged":
        call._cancel()
        assert isinstance(await outcome(call), asyncio.CancelledError)
        await bench.next_one()
        return
    assert await outcome(call) is None
    assert bench.link.received == [bench.expected]
    await eventually(lambda: not bench.entry.busy)


def cancelled(call: Call[None], _: Push) -> None:
    call._cancel()


def stopped(_: Call[None], push: Push) -> None:
    push.stop(LLMException("the peer has unlinked", status_code=LLMStatusCode.LLM_NOT_YET_LINK, retry_safe=True))


def twice(call: Call[None], push: Push) -> None:
    stopped(call, push)
    push.stop(LLMException("too late"))


@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.parametrize("end", [cancelled, stopped, twice], ids=lambda end: end.__name__)
async def test_p1_p4_one_that_is_ended_hears_whether_the_destination_is_safe(
    bench: PushBench, end: Callable[[Call[None], Push], None], deaf: bool
) -> None:
    bench.link.silent, bench.link.deaf = True, deaf
    push = bench.push()
    call = await begun(push)
    end(call, push)
    error = await outcome(call)
    assert bench.link.lane.cancels == [1]
    if end is cancelled:
        assert isinstance(error, asyncio.CancelledError)
    else:
        assert isinstance(error, LLMException)
        assert str(error) == "the peer has unlinked"
        assert (error.retry_safe, error.destination_unsafe) == (not deaf, deaf)
    await eventually(lambda: not bench.entry.busy)
    assert not bench.link.fifo.busy
    await bench.next_one()


async def test_p3_its_deadline_ends_it(bench: PushBench) -> None:
    bench.link.silent = True
    began = time.monotonic()
    error = await outcome(await begun(bench.push(40)))
    assert time.monotonic() - began < 5
    assert isinstance(error, LLMTimeoutError)
    assert "while peer:1 took the bytes" in str(error)
    assert (error.retry_safe, error.destination_unsafe) == (True, False)
    await bench.next_one()


async def test_a_lost_connection_ends_it(bench: PushBench) -> None:
    bench.link.silent = True
    call = await begun(bench.push())
    bench.link.lane.lose("the connection broke")
    error = await outcome(call)
    assert isinstance(error, LLMException)
    assert (str(error), error.destination_unsafe) == ("the connection broke", True)
    await bench.next_one()


async def test_a_released_source_is_not_offered(bench: PushBench) -> None:
    push = bench.push()
    bench.registry.release(bench.entry)
    error = await outcome(await begun(push))
    assert isinstance(error, LLMException)
    assert error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert bench.link.lane.heard == []
    assert not bench.link.fifo.busy
