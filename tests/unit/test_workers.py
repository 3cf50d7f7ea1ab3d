"""The worker threads, and jobs made of bounded steps with a cancel flag between them."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvpull_async._workers import Job, Workers, report_to, resolve

BOUND = 10.0
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@contextmanager
def workers(threads: int = 1) -> Iterator[Workers]:
    executor = Workers(threads, name="test-worker")
    try:
        yield executor
    finally:
        assert executor.close(BOUND) == 0


class Gate:
    """A step that blocks its worker until it is opened, and says that it has begun."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> int:
        self.entered.set()
        assert self.opened.wait(BOUND)
        return 1


# -- the executor ------------------------------------------------------------------------------------------------------


def test_no_thread_before_the_first_work() -> None:
    before = threading.active_count()
    with workers():
        assert threading.active_count() == before


def test_work_runs_on_a_daemon_thread_and_returns() -> None:
    with workers() as executor:
        thread = executor.submit(threading.current_thread).result(BOUND)
        assert thread.daemon
        assert thread.name.startswith("test-worker")


def test_p1_work_that_was_refused_for_want_of_a_thread_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ran: list[int] = []
    with workers(2) as executor:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                executor.submit(ran.append, 1)
        assert executor.submit(len, ran).result(BOUND) == 0
    assert ran == []


def test_work_waits_for_the_threads_there_are_when_no_more_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    gate = Gate()
    with workers(2) as executor:
        held = executor.submit(gate)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            waiting = executor.submit(lambda: 7)
        gate.opened.set()
        assert waiting.result(BOUND) == 7
        held.result(BOUND)


def test_an_error_reaches_the_future_and_the_thread_lives_on() -> None:
    with workers() as executor:
        with pytest.raises(ZeroDivisionError):
            executor.submit(lambda: 1 // 0).result(BOUND)
        assert executor.submit(lambda: 7).result(BOUND) == 7


def test_as_many_threads_as_needed_and_no_more_than_allowed() -> None:
    with workers(2) as executor:
        gates = [Gate() for _ in range(4)]
        futures = [executor.submit(gate) for gate in gates]
        assert all(gate.entered.wait(BOUND) for gate in gates[:2])
        assert not any(gate.entered.is_set() for gate in gates[2:])
        for gate in gates:
            gate.opened.set()
        assert [future.result(BOUND) for future in futures] == [1] * 4


def test_an_idle_thread_is_used_again() -> None:
    with workers(8) as executor:
        names = set()
        for _ in range(20):
            names.add(executor.submit(threading.current_thread).result(BOUND).name)
            while "idle=1" not in repr(executor):  # the thread says that it is idle after it has handed over
                pass
        assert len(names) == 1


def test_the_state_shown_stays_true_after_a_queue_has_built_up() -> None:
    with workers(1) as executor:
        gate = Gate()
        futures = [executor.submit(gate), *(executor.submit(lambda: 1) for _ in range(5))]
        gate.opened.set()
        assert [future.result(BOUND) for future in futures] == [1] * 6
        assert executor.close(BOUND) == 0
        assert "threads=1/1 idle=1" in repr(executor)


def test_an_idle_thread_keeps_nothing_alive() -> None:
    class Result:
        pass

    with workers() as executor:
        future = executor.submit(Result)
        result = weakref.ref(future.result(BOUND))
        del future
        while "idle=1" not in repr(executor):
            pass
        assert result() is None


def test_work_sees_a_copy_of_the_callers_context() -> None:
    def change() -> str:
        seen = variable.get()
        variable.set("changed in the worker")
        return seen

    with workers() as executor:
        token = variable.set("the caller's")
        try:
            assert executor.submit(change).result(BOUND) == "the caller's"
            assert variable.get() == "the caller's"
        finally:
            variable.reset(token)
        assert executor.submit(variable.get).result(BOUND) == "unset"


def test_a_cancelled_future_that_has_not_begun_never_runs() -> None:
    with workers() as executor:
        gate, ran = Gate(), threading.Event()
        first = executor.submit(gate)
        second = executor.submit(ran.set)
        assert second.cancel()
        gate.opened.set()
        first.result(BOUND)
        executor.submit(lambda: None).result(BOUND)
        assert not ran.is_set()


def test_closing_finishes_what_is_queued_and_refuses_more() -> None:
    executor = Workers(1)
    gate = Gate()
    futures = [executor.submit(gate), executor.submit(lambda: 2)]
    gate.opened.set()
    assert executor.close(BOUND) == 0
    assert [future.result(0) for future in futures] == [1, 2]
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(lambda: None)
    assert executor.close(BOUND) == 0


def test_closing_is_bounded_and_counts_who_is_still_busy() -> None:
    executor = Workers(1)
    gate = Gate()
    executor.submit(gate)
    assert gate.entered.wait(BOUND)
    assert executor.close(0.01) == 1
    gate.opened.set()
    assert executor.close(BOUND) == 0


def test_each_thread_is_initialised_before_its_first_work() -> None:
    local = threading.local()
    executor = Workers(1, initializer=lambda: setattr(local, "ready", True))
    assert executor.submit(lambda: local.ready).result(BOUND)
    assert executor.close(BOUND) == 0


def test_reporting_to_a_closed_loop_is_answered_and_harmless() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    assert not report_to(loop, print)


async def test_a_wait_is_ended_once_and_what_has_ended_or_is_not_there_stays_as_it_is() -> None:
    waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    given_up.cancel()
    for future in (waiting, waiting, given_up, None):
        resolve(future)
    assert waiting.result() is None
    assert given_up.cancelled()


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
