"""Deadlines are absolute, and the wait that absorbs cancellations ends when it should."""

from __future__ import annotations

import asyncio
import math
import time

import anyio
import pytest

from kvpull_async._deadline import NEVER, Deadline, absorb, finish

LONG_MS = 60_000


def test_remaining_counts_down_to_zero_and_not_below() -> None:
    deadline = Deadline(time.monotonic() - 5)
    assert deadline.expired
    assert deadline.remaining == 0.0
    assert deadline.remaining_ms == 0


def test_remaining_is_in_seconds_and_rounds_up_to_a_whole_millisecond() -> None:
    deadline = Deadline.after_ms(LONG_MS)
    assert not deadline.expired
    assert 0 < deadline.remaining <= 60
    assert Deadline(time.monotonic() + 0.0005).remaining_ms in (0, 1)
    assert isinstance(deadline.remaining_ms, int)


def test_sooner_takes_the_earlier_and_later_moves() -> None:
    deadline = Deadline.after_ms(LONG_MS)
    assert deadline.sooner(1).at < deadline.at
    assert deadline.sooner(3600) == deadline
    assert deadline.later(2.5).at == pytest.approx(deadline.at + 2.5)


def test_never_neither_expires_nor_overflows_a_frame() -> None:
    assert not NEVER.expired
    assert math.isinf(NEVER.remaining)
    assert NEVER.remaining_ms == 2**31 - 1
    assert not math.isinf(NEVER.sooner(1).remaining)


async def test_the_scope_raises_a_timeout_once_the_deadline_has_passed() -> None:
    with pytest.raises(asyncio.TimeoutError):
        async with Deadline.after_ms(10).scope():
            await asyncio.get_running_loop().create_future()


async def test_an_expired_deadline_ends_the_first_wait() -> None:
    with pytest.raises(asyncio.TimeoutError):
        async with Deadline(time.monotonic() - 1).scope():
            await asyncio.sleep(60)


async def test_the_scope_leaves_what_is_in_time_alone() -> None:
    for deadline in (NEVER, Deadline.after_ms(LONG_MS)):
        async with deadline.scope():
            await asyncio.sleep(0)


async def test_a_cancellation_inside_the_scope_stays_a_cancellation() -> None:
    async def wait() -> None:
        async with Deadline.after_ms(LONG_MS).scope():
            await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# -- absorb ------------------------------------------------------------------------------------------------------------


async def test_absorb_waits_for_every_future() -> None:
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    task = asyncio.ensure_future(absorb([first, second], NEVER))
    await asyncio.sleep(0)
    first.set_result(None)
    await asyncio.sleep(0.01)
    assert not task.done()
    second.set_exception(OSError("a failure counts as done"))
    assert await task
    assert isinstance(second.exception(), OSError)


async def test_absorb_of_nothing_left_does_not_wait() -> None:
    done = asyncio.get_running_loop().create_future()
    done.cancel()
    assert await absorb([], Deadline(0))
    assert await absorb([done], Deadline(0))


async def test_absorb_says_when_the_deadline_came_first() -> None:
    future = asyncio.get_running_loop().create_future()
    assert not await absorb([future], Deadline.after_ms(5))
    assert not future.cancelled()


async def test_absorb_outlasts_repeated_cancellations() -> None:
    future = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(absorb([future], NEVER))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    future.set_result(None)
    assert await task


async def test_absorb_keeps_its_bound_when_cancelled_meanwhile() -> None:
    future = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(absorb([future], Deadline.after_ms(50)))
    await asyncio.sleep(0)
    task.cancel()
    assert not await asyncio.wait_for(task, 10)


async def test_a_cancellation_in_the_turn_in_which_the_future_ends_is_absorbed_too() -> None:
    future = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(absorb([future], NEVER))
    await asyncio.sleep(0)
    future.set_result(None)
    task.cancel()
    assert await task


async def test_absorbing_under_a_cancelled_anyio_scope_waits_instead_of_spinning() -> None:
    """anyio cancels again on every turn of the loop; each would wake the wait for nothing."""
    turns = 0
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    counting = asyncio.ensure_future(count())
    with anyio.CancelScope() as scope:
        scope.cancel()
        before = time.process_time()
        assert not await absorb([never], Deadline.after_ms(500))
        spent = time.process_time() - before
    counting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await counting
    assert turns > 10
    assert spent < 0.4


@pytest.mark.parametrize("times", [1, 3])
async def test_a_step_is_finished_before_its_cancellation_is_raised(times: int) -> None:
    done: list[str] = []

    async def step() -> None:
        await asyncio.sleep(0.05)
        done.append("step")

    task = asyncio.create_task(finish(step(), Deadline.after_ms(LONG_MS)))
    for _ in range(times):
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["step"]


async def test_a_step_that_is_not_cancelled_ends_or_fails_as_it_does() -> None:
    async def fail() -> None:
        raise OSError("no")

    await finish(asyncio.sleep(0), Deadline.after_ms(LONG_MS))
    with pytest.raises(OSError, match="no"):
        await finish(fail(), Deadline.after_ms(LONG_MS))


async def test_a_cancellation_waits_for_no_step_beyond_the_deadline() -> None:
    waiting = asyncio.get_running_loop().create_future()

    async def step() -> None:
        await waiting

    task = asyncio.create_task(finish(step(), Deadline.after_ms(20)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 20)
    waiting.set_result(None)
