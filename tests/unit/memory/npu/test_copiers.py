"""The threads of a device: bound once, never anybody else's, replaced while they hang, closed when all is over."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.memory.base import Until
from kvpull_async.memory.npu import copiers as module
from kvpull_async.memory.npu.codes import AclError
from kvpull_async.memory.npu.streams import Stream, Unsettled
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from tests.unit.memory.emulated import BOUND, Thread, eventually
from tests.unit.memory.npu.copier_side import names, side

# -- threads -----------------------------------------------------------------------------------------------------------


def test_work_is_done_in_threads_of_their_own_each_with_its_stream_and_the_device() -> None:
    with side() as here:
        barrier = threading.Barrier(4)

        def work(stream: Stream) -> tuple[int, int, int | None]:
            barrier.wait(BOUND)
            return threading.get_ident(), id(stream), here.npu.context()

        found = [here.copiers.submit(work) for _ in range(4)]
        answers = [future.result(BOUND) for future in found]
        assert len({thread for thread, _, _ in answers}) == len({stream for _, stream, _ in answers}) == 4
        assert len({context for _, _, context in answers}) == 1
        assert threading.get_ident() not in {thread for thread, _, _ in answers}
        assert here.emulator.count("aclrtSetDevice") == 4
        assert here.npu.left().get("streams", 0) == 4


def test_a_thread_binds_the_device_once() -> None:
    with side() as here:
        for _ in range(10):
            here.copiers.call(names)
            eventually(lambda: "idle=1" in repr(here.copiers))
        assert here.emulator.count("aclrtSetDevice") == here.emulator.count("aclrtCreateStream") == 1


def test_the_callers_thread_is_never_bound() -> None:
    with side() as here:
        thread = Thread()

        def ask() -> None:
            assert here.copiers.call(names) != names()
            here.copiers.first(names)
            assert here.npu.context() is None

        thread.run(ask)
        thread.close()


def test_an_error_reaches_whoever_waits_and_the_thread_lives_on() -> None:
    def failing(_: Stream) -> int:
        raise ValueError("no")

    with side() as here:
        with pytest.raises(ValueError, match="no"):
            here.copiers.call(failing)
        assert here.copiers.call(lambda _: 7) == 7


@pytest.mark.parametrize("function", ["aclrtSetDevice", "aclrtCreateStream"])
def test_a_device_that_cannot_be_bound_is_tried_again_for_the_next_work(function: str) -> None:
    with side() as here:
        here.emulator.inject(function, 507033)
        with pytest.raises(AclError) as caught:
            here.copiers.call(names)
        assert (caught.value.function, caught.value.code) == (function, 507033)
        assert here.copiers.call(lambda _: 7) == 7


def test_a_stream_that_cannot_be_destroyed_is_told_of_and_the_thread_ends() -> None:
    with side(clean=False) as here:
        here.copiers.call(names)
        here.emulator.inject("aclrtDestroyStream", 507899)
        assert here.copiers.close(Deadline.after_ms(BOUND * 1000)) == 0
        assert [error.code for error in here.failures if isinstance(error, AclError)] == [507899]


def test_without_a_thread_the_work_is_refused_and_the_memory_is_not_said_to_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with side() as here:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(LLMException, match="can't start new thread") as caught:
                here.copiers.submit(names)
        assert caught.value.status_code == LLMStatusCode.LLM_FAILED
        assert here.copiers.call(lambda _: 7) == 7


# -- waiting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stopped", [True, False])
def test_what_has_not_begun_in_time_never_begins(*, stopped: bool) -> None:
    with side() as here:
        here.busy()
        ran: list[int] = []
        until = Until() if stopped else Until(Deadline.after_ms(20))
        waiting = here.copiers.submit(lambda _: ran.append(1))
        if stopped:
            threading.Timer(0.02, until.stop).start()
        with pytest.raises(LLMException, match="stopped" if stopped else "in time") as caught:
            here.copiers.wait(waiting, until)
        assert isinstance(caught.value, LLMTimeoutError) != stopped
        here.open_gates()
        assert here.copiers.call(lambda _: 7) == 7
        assert ran == []


def test_the_queue_has_a_bound_also_for_whoever_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST", 0.05)
    with side() as here:
        here.busy()
        with pytest.raises(LLMTimeoutError):
            here.copiers.call(names)


def test_what_has_begun_is_waited_for_and_a_long_wait_is_told_of() -> None:
    with side() as here:
        (work,) = here.busy(1)
        end = Thread()
        waited = end.begin(lambda: here.copiers.wait(work, Until(Deadline.after_ms(10))))
        eventually(lambda: here.holds == [True])
        here.open_gates()
        assert waited() == 1
        assert here.holds == [True, False]
        end.close()


def test_a_wait_that_ends_soon_after_its_time_is_not_told_of() -> None:
    with side() as here:
        (work,) = here.busy(1)
        threading.Timer(0.03, here.open_gates).start()
        assert here.copiers.wait(work, Until(Deadline.after_ms(1))) == 1
        assert here.holds == []


def test_p1_whatever_disturbs_the_waiting_the_outcome_comes_with_the_end() -> None:
    """Slots are given back by it: a copy that runs still would write into another's."""

    def disturbing(begins: bool) -> None:
        raise KeyboardInterrupt

    with side() as here:
        (work,) = here.busy(1)
        here.copiers.held = disturbing
        end = Thread()
        waited = end.begin(lambda: here.copiers.outcome(work, Until(Deadline.after_ms(1))))
        with pytest.raises(TimeoutError):
            waited(0.4)
        here.open_gates()
        assert isinstance(waited(), KeyboardInterrupt)
        end.close()


def test_an_outcome_is_what_became_of_the_work() -> None:
    error = Unsettled()

    def failing(_: Stream) -> int:
        raise error

    with side() as here:
        assert here.copiers.outcome(here.copiers.submit(names), Until()) is None
        failed = here.copiers.submit(failing)
        assert here.copiers.outcome(failed, Until()) is error
        assert here.copiers.outcome(failed, Until()) is error
        assert here.copiers.unsettled
        here.busy()
        until = Until(Deadline.after_ms(1))
        queued = here.copiers.submit(names)
        assert isinstance(here.copiers.outcome(queued, until), LLMTimeoutError)
        assert here.copiers.outcome(queued, until) is None


# -- hanging -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waiters", [1, 4])
def test_others_go_on_however_many_threads_hang(waiters: int) -> None:
    """Also if one waits for several: those beside the first hang as it does."""
    with side() as here:
        hanging = here.busy()
        threads = [Thread() for _ in range(waiters)]
        until = Until(Deadline.after_ms(10))
        shares = [hanging[at::waiters] for at in range(waiters)]
        ends = [
            thread.begin(partial(here.copiers.wait, share[0], until, beside=share[1:]))
            for thread, share in zip(threads, shares, strict=True)
        ]
        eventually(lambda: here.holds == [True] * waiters)
        assert here.copiers.call(lambda _: 7) == 7
        assert "threads=5/8" in repr(here.copiers)
        here.open_gates()
        assert [end() for end in ends] == [1] * waiters
        assert "/4" in repr(here.copiers)
        assert here.holds.count(False) == waiters
        for thread in threads:
            thread.close()


# -- what may never be answered ----------------------------------------------------------------------------------------


def test_what_does_not_answer_in_time_ends_with_a_timeout_and_is_handed_on() -> None:
    with side() as here:
        late: list[Future[int]] = []
        with pytest.raises(LLMTimeoutError) as caught:
            here.copiers.within(here.gate(), Deadline.after_ms(50), late=late.append)
        assert caught.value.retry_safe
        (going,) = late
        assert going.running()
        here.open_gates()
        assert going.result(BOUND) == 1


def test_what_never_began_is_not_handed_on() -> None:
    with side() as here:
        here.busy()
        late: list[Future[int]] = []
        with pytest.raises(LLMTimeoutError):
            here.copiers.within(here.gate(), Deadline.after_ms(50), late=late.append)
        assert late == []


def test_others_take_the_places_of_threads_that_are_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SLOW", 0.02)
    with side() as here:
        threads = [Thread() for _ in range(4)]
        gate = here.gate()
        ends = [thread.begin(lambda: here.copiers.within(gate, Deadline.after_ms(BOUND * 1000))) for thread in threads]
        eventually(lambda: here.holds == [True] * 4)
        assert here.copiers.call(lambda _: 7) == 7
        here.open_gates()
        assert [end() for end in ends] == [1] * 4
        assert sorted(here.holds) == [False] * 4 + [True] * 4
        for thread in threads:
            thread.close()


def test_a_thread_that_copies_one_piece_for_long_counts_as_hanging_before_its_time_is_over() -> None:
    with side() as here:
        thread = Thread()
        end = thread.begin(lambda: here.copiers.call(here.gate(), Until(Deadline.after_ms(BOUND * 1000))))
        eventually(lambda: here.holds == [True])
        here.open_gates()
        assert end() == 1
        assert here.holds == [True, False]
        thread.close()


def test_waiting_in_the_queue_is_no_hanging() -> None:
    with side() as here:
        here.busy()
        thread = Thread()
        end = thread.begin(lambda: here.copiers.call(lambda _: 3, Until(Deadline.after_ms(BOUND * 1000))))
        with pytest.raises(TimeoutError):
            end(0.5)
        assert here.holds == []
        here.open_gates()
        assert end() == 3
        thread.close()
