"""The worker threads: who runs what, who hangs, and how they end."""

from __future__ import annotations

import asyncio
import threading
import weakref

import pytest

from kvpull_async._workers import Workers, report_to, resolve, stand_in_here
from tests.unit.working import BOUND, Gate, variable, workers

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


def test_each_thread_ends_with_the_finalizer_in_itself() -> None:
    ended: list[str] = []
    executor = Workers(2, name="test-worker", finalizer=lambda: ended.append(threading.current_thread().name))
    gates = [Gate() for _ in range(2)]
    futures = [executor.submit(gate) for gate in gates]
    assert all(gate.entered.wait(BOUND) for gate in gates)
    names = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("test-worker"))
    assert ended == []
    for gate in gates:
        gate.opened.set()
    assert [future.result(BOUND) for future in futures] == [1, 1]
    assert executor.close(BOUND) == 0
    assert sorted(ended) == names


# -- threads that hang -------------------------------------------------------------------------------------------------


def test_another_thread_takes_the_place_of_one_that_hangs_also_for_what_waits_already() -> None:
    with workers(1) as executor:
        gate = Gate()
        hanging, waiting = executor.submit(gate), executor.submit(lambda: 2)
        assert gate.entered.wait(BOUND)
        executor.stand_in(begins=True)
        assert waiting.result(BOUND) == 2
        assert executor.submit(lambda: 3).result(BOUND) == 3
        gate.opened.set()
        assert hanging.result(BOUND) == 1
        executor.stand_in(begins=False)


def test_a_stand_in_is_started_only_when_there_is_work_for_it() -> None:
    with workers(1) as executor:
        gate = Gate()
        hanging = executor.submit(gate)
        assert gate.entered.wait(BOUND)
        executor.stand_in(begins=True)
        assert "threads=1/2" in repr(executor)
        gate.opened.set()
        assert hanging.result(BOUND) == 1
        executor.stand_in(begins=False)
        assert "threads=1/1" in repr(executor)


def test_once_nobody_hangs_no_more_threads_are_started_than_before() -> None:
    with workers(1) as executor:
        executor.stand_in(begins=True)
        executor.stand_in(begins=False)
        gates = [Gate(), Gate()]
        futures = [executor.submit(gate) for gate in gates]
        assert gates[0].entered.wait(BOUND)
        assert not gates[1].entered.wait(0.05)
        for gate in gates:
            gate.opened.set()
        assert [future.result(BOUND) for future in futures] == [1, 1]


def test_stand_ins_are_few_however_many_hang_and_all_of_them_are_taken_back() -> None:
    with workers(2) as executor:
        for _ in range(20):
            executor.stand_in(begins=True)
        assert executor.limit == 10
        for _ in range(13):
            executor.stand_in(begins=False)
        assert executor.limit == 9
        for _ in range(7):
            executor.stand_in(begins=False)
        assert executor.limit == 2


def test_closing_joins_the_stand_ins_and_none_comes_after_it() -> None:
    before = threading.active_count()
    executor = Workers(1)
    gate = Gate()
    hanging, waiting = executor.submit(gate), executor.submit(lambda: 2)
    assert gate.entered.wait(BOUND)
    executor.stand_in(begins=True)
    assert waiting.result(BOUND) == 2
    late = executor.submit(Gate().opened.is_set)
    assert executor.close(0.01) <= 2
    executor.stand_in(begins=True)
    gate.opened.set()
    assert hanging.result(BOUND) == 1
    assert late.result(BOUND) is False
    assert executor.close(BOUND) == 0
    assert threading.active_count() == before


# -- reporting ---------------------------------------------------------------------------------------------------------


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


# -- those apart -------------------------------------------------------------------------------------------------------


def test_p5_what_hangs_apart_holds_up_nobody_else() -> None:
    workers, resume = Workers(1), threading.Event()
    try:
        hanging = workers.apart.submit(resume.wait, 20)
        assert workers.apart is workers.apart
        assert workers.submit(lambda: 7).result(20) == 7
        assert not hanging.done()
        assert workers.close(0) >= 1
    finally:
        resume.set()
    assert workers.close(20) == 0
    with pytest.raises(RuntimeError, match="shut down"):
        workers.apart.submit(int)


def test_those_apart_that_are_first_asked_for_at_the_end_do_nothing() -> None:
    workers = Workers(1)
    workers.close(0)
    with pytest.raises(RuntimeError, match="shut down"):
        workers.apart.submit(int)


def test_the_stand_in_is_for_the_pool_of_the_thread_that_hangs() -> None:
    one, other = Workers(1), Workers(1)
    try:
        one.submit(stand_in_here, begins=True).result(20)
        stand_in_here(begins=True)  # this thread is no pool's
        assert (one.limit, other.limit) == (2, 1)
        one.submit(stand_in_here, begins=False).result(20)
        assert one.limit == 1
    finally:
        assert one.close(20) == other.close(20) == 0


def test_what_is_the_hosts_and_what_waits_for_a_device_are_kept_apart() -> None:
    workers = Workers(1)
    try:
        assert workers.fit(direct=True) is workers
        assert workers.fit(direct=False) is workers.apart
    finally:
        assert workers.close(20) == 0
