"""One link's slot: order of arrival, bounds, and what cancelled and failed waiters leave behind."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from kvpull_async.fifo import Fifo
from kvpull_async.status import LLMException, LLMStatusCode


async def turns(count: int = 5) -> None:
    """Let every task on the loop run as far as it can."""
    for _ in range(count):
        await asyncio.sleep(0)


class Line:
    """Tasks that queue up, and the order in which they got the slot."""

    def __init__(self, fifo: Fifo) -> None:
        self.fifo = fifo
        self.order: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def join(self, count: int) -> None:
        for _ in range(count):
            self.tasks.append(asyncio.create_task(self._acquire(len(self.tasks))))
        await turns()

    async def _acquire(self, number: int) -> None:
        await self.fifo.acquire()
        self.order.append(number)

    async def leave(self, count: int = 1) -> None:
        for _ in range(count):
            self.fifo.release()
            await turns()


@pytest.fixture
def fifo() -> Fifo:
    return Fifo(limit=100, wait=True)


async def test_p5_the_slot_goes_to_one_at_a_time_in_order_of_arrival(fifo: Fifo) -> None:
    line = Line(fifo)
    await line.join(5)
    assert line.order == [0]
    await line.leave(2)
    await line.join(1)
    assert line.order == [0, 1, 2]
    await line.leave(4)
    assert line.order == [0, 1, 2, 3, 4, 5]
    assert not fifo.busy


async def test_nobody_overtakes_a_waiter_whose_turn_has_come(fifo: Fifo) -> None:
    await fifo.acquire()
    line = Line(fifo)
    await line.join(1)
    fifo.release()  # the waiter owns the slot now, though its task has not run yet
    assert fifo.busy
    await line.join(1)
    assert line.order == [0]
    await line.leave(2)
    assert line.order == [0, 1]


async def test_a_full_queue_refuses_at_once() -> None:
    line = Line(Fifo(limit=2, wait=True))
    await line.join(3)
    with pytest.raises(LLMException, match="2 calls wait for it already") as caught:
        await line.fifo.acquire()
    assert caught.value.status_code == LLMStatusCode.LLM_LINK_BUSY
    assert caught.value.retry_safe
    await line.leave(3)
    assert line.order == [0, 1, 2]


async def test_where_nobody_may_wait_a_busy_slot_refuses_at_once() -> None:
    fifo = Fifo(limit=100, wait=False)
    await fifo.acquire()
    with pytest.raises(LLMException) as caught:
        await fifo.acquire()
    assert caught.value.status_code == LLMStatusCode.LLM_LINK_BUSY
    fifo.release()
    await fifo.acquire()
    fifo.release()
    assert not fifo.busy


async def test_a_cancelled_waiter_is_passed_over(fifo: Fifo) -> None:
    line = Line(fifo)
    await line.join(4)
    line.tasks[1].cancel()
    await turns()
    assert line.tasks[1].cancelled()
    await line.leave(2)
    assert line.order == [0, 2, 3]


async def test_a_waiter_cancelled_in_the_turn_that_grants_it_passes_the_slot_on(fifo: Fifo) -> None:
    line = Line(fifo)
    await line.join(3)
    fifo.release()
    line.tasks[1].cancel()
    await turns()
    assert line.tasks[1].cancelled()
    assert line.order == [0, 2]
    await line.leave()
    assert not fifo.busy


async def test_failed_waiters_get_an_error_of_their_own_and_the_holder_keeps_the_slot(fifo: Fifo) -> None:
    line = Line(fifo)
    await line.join(3)
    error = LLMException("unlinked", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
    fifo.fail_waiters(error)
    await turns()
    raised = [task.exception() for task in line.tasks[1:]]
    assert [type(one) for one in raised] == [LLMException] * 2
    assert [str(one) for one in raised] == ["unlinked"] * 2
    assert len({id(one) for one in (error, *raised)}) == 3
    assert fifo.busy
    await line.join(1)
    await line.leave()
    assert line.order == [0, 3]


async def test_a_waiter_failed_and_cancelled_in_one_turn_leaves_nothing(fifo: Fifo) -> None:
    line = Line(fifo)
    await line.join(2)
    fifo.fail_waiters(LLMException("unlinked"))
    line.tasks[1].cancel()
    await turns()
    assert line.tasks[1].done()
    await line.leave()
    assert not fifo.busy


async def test_idle_ends_when_nobody_holds_or_waits(fifo: Fifo) -> None:
    assert fifo.idle().done()
    line = Line(fifo)
    await line.join(2)
    idle, given_up = fifo.idle(), fifo.idle()
    given_up.cancel()
    await line.leave()
    assert not idle.done()
    await line.leave()
    assert idle.done()


async def test_repr_says_who_holds_and_how_many_wait(fifo: Fifo) -> None:
    line = Line(fifo)
    await line.join(3)
    assert repr(fifo) == "<Fifo held=True waiting=2>"
    await line.leave(3)
    assert repr(fifo) == "<Fifo held=False waiting=0>"


@pytest.mark.parametrize("seed", range(20))
async def test_p5_any_mixture_of_arrivals_cancellations_and_failures_keeps_one_holder(seed: int, fifo: Fifo) -> None:
    """Never two holders, never a slot that is lost, and those who get it do so in order of arrival."""
    rng, inside, order = random.Random(seed), 0, []

    async def use(number: int) -> None:
        nonlocal inside
        await fifo.acquire()
        try:
            order.append(number)
            inside += 1
            assert inside == 1
            await turns(rng.randint(0, 2))
        finally:
            inside -= 1
            fifo.release()

    tasks: list[asyncio.Task[None]] = []
    for number in range(60):
        tasks.append(asyncio.create_task(use(number)))
        await turns(rng.randint(0, 2))
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
        if rng.random() < 0.05:
            fifo.fail_waiters(LLMException("over"))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, (type(None), asyncio.CancelledError, LLMException)) for one in results), results
    assert order == sorted(order)
    assert len(order) >= sum(one is None for one in results) > 0
    assert repr(fifo) == "<Fifo held=False waiting=0>"


# --- another thread's moment ---


async def test_a_claim_takes_an_idle_slot_only() -> None:
    fifo, loop = Fifo(limit=8, wait=True), asyncio.get_running_loop()
    assert fifo.claim("me")
    assert not fifo.claim("me")
    fifo.unclaim("me", loop)
    await fifo.acquire()
    assert not fifo.claim("me")
    fifo.release()
    assert fifo.claim("me")
    fifo.unclaim("me", loop)
    assert not fifo.busy


async def test_who_came_during_a_claim_gets_the_slot_afterwards_in_order() -> None:
    fifo, loop = Fifo(limit=8, wait=True), asyncio.get_running_loop()
    assert fifo.claim("me")
    order: list[int] = []

    async def wait(number: int) -> None:
        await fifo.acquire()
        order.append(number)
        fifo.release()

    tasks = [asyncio.ensure_future(wait(number)) for number in (1, 2)]
    idle = fifo.idle()
    await asyncio.sleep(0)
    thread = threading.Thread(target=fifo.unclaim, args=("me", loop))
    thread.start()
    thread.join()
    assert not fifo.claim("me"), "it belongs to those who wait"
    await asyncio.wait_for(asyncio.gather(*tasks, idle), 20)
    assert order == [1, 2]
    assert not fifo.busy


async def test_claims_of_other_threads_and_waits_on_the_loop_never_lose_the_slot() -> None:
    fifo, loop = Fifo(limit=1000, wait=True), asyncio.get_running_loop()
    stop, claimed = threading.Event(), [0]

    def claim() -> None:
        while not stop.is_set():
            if fifo.claim("me"):
                claimed[0] += 1
                fifo.unclaim("me", loop)

    thread = threading.Thread(target=claim)
    thread.start()
    try:
        for _ in range(300):
            await asyncio.wait_for(fifo.acquire(), 20)
            await asyncio.sleep(0)
            fifo.release()
    finally:
        stop.set()
        thread.join()
    assert not fifo.busy
    assert claimed[0]


async def test_p4_a_slot_given_back_twice_reaches_who_waits_for_it() -> None:
    """As after an interrupt in the middle of giving it back."""
    fifo, loop = Fifo(limit=8, wait=True), asyncio.get_running_loop()
    assert fifo.claim("me")
    waiting = asyncio.ensure_future(fifo.acquire())
    await asyncio.sleep(0)
    fifo.unclaim("me", loop)
    fifo.unclaim("me", loop)
    await asyncio.wait_for(waiting, 20)
    await asyncio.sleep(0)
    assert fifo.busy, "it was given to nobody else"
    fifo.release()
    assert not fifo.busy
