"""Jobs made of bounded steps, with a cancel flag between them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from kvpull_async._workers import Job, Workers
from tests.unit.working import BOUND, Gate, workers

# -- jobs --------------------------------------------------------------------------------------------------------------


class Steps:
    """Steps that wait for a gate before the second one, and remember whether they were closed."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.closed = threading.Event()

    def run(self) -> Iterator[int]:
        try:
            yield 10
            self.gate()
            yield 20
            yield 30
        finally:
            self.closed.set()


async def test_a_job_adds_up_its_steps() -> None:
    with workers() as executor:
        job = Job(executor, iter([1, 2, 3]))
        assert await job.done == 6
        assert job.settled.done()


async def test_an_aborted_job_ends_after_its_current_step() -> None:
    with workers() as executor:
        steps = Steps()
        job = Job(executor, steps.run())
        await asyncio.to_thread(steps.gate.entered.wait, BOUND)
        assert job.abort()
        assert not job.settled.done()
        steps.gate.opened.set()
        await asyncio.wait_for(job.settled, BOUND)
        assert job.done.cancelled()
        assert steps.closed.is_set()


async def test_a_job_aborted_before_it_began_runs_nothing() -> None:
    with workers() as executor:
        gate = Gate()
        busy = executor.submit(gate)
        ran: list[int] = []
        job = Job(executor, (ran.append(i) or i for i in range(3)))
        job.abort()
        gate.opened.set()
        await asyncio.wait_for(job.settled, BOUND)
        assert ran == []
        assert job.done.cancelled()
        assert busy.result(BOUND) == 1


async def test_a_failing_step_fails_the_job() -> None:
    def steps() -> Iterator[int]:
        yield 1
        raise OSError("the step failed")

    with workers() as executor:
        job = Job(executor, steps())
        with pytest.raises(OSError, match="the step failed"):
            await job.done
        assert job.settled.done()


@pytest.mark.parametrize("aborted", [False, True])
async def test_a_job_settles_also_when_closing_its_steps_fails(*, aborted: bool) -> None:
    steps = Steps()

    def failing() -> Iterator[int]:
        try:
            yield from steps.run()
        finally:
            raise OSError("closing failed")

    with workers() as executor:
        job = Job(executor, failing())
        await asyncio.to_thread(steps.gate.entered.wait, BOUND)
        if aborted:
            job.abort()
        steps.gate.opened.set()
        await asyncio.wait_for(job.settled, BOUND)
        assert isinstance(job.done.exception(), OSError)


async def test_nobody_needs_to_ask_for_an_aborted_jobs_error() -> None:
    def steps() -> Iterator[int]:
        raise OSError("never asked for")
        yield 1

    with workers() as executor:
        await Job(executor, steps()).settled  # the loop's exception handler would fail the test


def test_a_job_whose_loop_has_closed_ends_quietly() -> None:
    async def start(executor: Workers) -> Steps:
        steps = Steps()
        Job(executor, steps.run())
        await asyncio.to_thread(steps.gate.entered.wait, BOUND)
        return steps

    with workers() as executor:
        steps = asyncio.run(start(executor))
        steps.gate.opened.set()
        assert steps.closed.wait(BOUND)


async def test_p5_long_jobs_take_turns_with_those_that_wait() -> None:
    pool, order = Workers(1), []

    def steps(name: str, count: int) -> Iterator[int]:
        for _ in range(count):
            time.sleep(0.001)
            yield 1
        order.append(name)

    long = Job(pool, steps("long", 400))
    short = [Job(pool, steps(f"short {i}", 2)) for i in range(3)]
    assert await asyncio.wait_for(asyncio.gather(*(job.done for job in short)), 20) == [2, 2, 2]
    assert not long.done.done(), "who came first held the thread to the end"
    assert await asyncio.wait_for(long.done, 20) == 400
    assert order[-1] == "long"
    assert pool.close(5.0) == 0


async def test_a_job_that_stepped_back_can_be_stopped_and_settles() -> None:
    pool, gate = Workers(1), threading.Event()

    def steps() -> Iterator[int]:
        while True:
            gate.wait(0.001)
            yield 1

    jobs = [Job(pool, steps()) for _ in range(3)]
    await asyncio.sleep(0.02)
    for job in jobs:
        assert job.abort()
    await asyncio.wait_for(asyncio.gather(*(job.settled for job in jobs)), 20)
    assert all(job.done.cancelled() for job in jobs)
    assert pool.close(5.0) == 0


async def test_a_job_that_never_began_is_over_as_soon_as_it_is_aborted() -> None:
    """However long the work before it takes: its memory is as it was."""
    resume, steps = threading.Event(), Steps()
    with workers(1) as executor:
        executor.submit(resume.wait, BOUND)
        job = Job(executor, steps.run())
        assert job.abort()
        assert job.abort()
        assert job.settled.done()
        assert job.done.cancelled()
        resume.set()
        assert await asyncio.wrap_future(executor.submit(lambda: 7)) == 7
        assert not steps.gate.entered.is_set()
