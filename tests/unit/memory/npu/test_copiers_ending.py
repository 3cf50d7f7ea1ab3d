"""The threads of a device beside others: their contexts, the end, a forked child."""

from __future__ import annotations

import threading

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.memory.base import Until
from kvpull_async.memory.npu.streams import Stream, Unsettled
from kvpull_async.status import LLMException, LLMStatusCode
from tests.unit.memory.emulated import BOUND, Thread, eventually, in_a_child
from tests.unit.memory.npu.copier_side import names, side

# -- the end -----------------------------------------------------------------------------------------------------------


def test_p1_stop_waits_for_what_was_begun() -> None:
    with side() as here:
        here.busy(2)
        assert not here.copiers.stop(Deadline.after_ms(30))
        threading.Timer(0.05, here.open_gates).start()
        assert here.copiers.stop(Deadline.after_ms(BOUND * 1000))


def test_p1_nothing_begins_after_stop_but_what_frees() -> None:
    with side() as here:
        here.busy()
        ran: list[str] = []
        queued = here.copiers.submit(lambda _: ran.append("queued before"))
        stopping = Thread()
        stopped = stopping.begin(lambda: here.copiers.stop(Deadline.after_ms(BOUND * 1000)))
        eventually(here.copiers._closing.is_set)
        late = here.copiers.submit(lambda _: ran.append("queued after"))
        last = here.copiers.submit(lambda _: ran.append("last"), last=True)
        here.open_gates()
        assert stopped()
        for work in (queued, late):
            error = here.copiers.outcome(work, Until())
            assert isinstance(error, LLMException)
            assert error.status_code == LLMStatusCode.LLM_ENGINE_FINALIZED
        last.result(BOUND)
        assert ran == ["last"]
        stopping.close()


def test_after_something_was_left_running_memory_may_not_be_given_back() -> None:
    def leaving(_: Stream) -> None:
        raise Unsettled

    with side() as here:
        here.copiers.outcome(here.copiers.submit(leaving), Until())
        assert not here.copiers.stop(Deadline.after_ms(BOUND * 1000))


def test_a_closed_device_does_nothing_more() -> None:
    with side() as here:
        here.copiers.call(names)
        assert here.copiers.close(Deadline.after_ms(BOUND * 1000)) == 0
        before = here.emulator.counts()
        for last in (True, False):
            with pytest.raises(LLMException, match="shut down") as caught:
                here.copiers.submit(names, last=last)
            assert caught.value.status_code == LLMStatusCode.LLM_ENGINE_FINALIZED
        assert here.emulator.counts() == before


# -- fork --------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_p1_a_forked_child_is_refused_and_calls_nothing() -> None:
    with side() as here:
        here.copiers.call(names)
        before = here.emulator.counts()

        def check() -> None:
            for ask in (
                lambda: here.copiers.submit(names),
                lambda: here.copiers.first(names),
            ):
                with pytest.raises(LLMException, match="forked child") as caught:
                    ask()
                assert caught.value.status_code == LLMStatusCode.LLM_FAILED
            assert here.emulator.counts() == before
            assert here.emulator.violations() == []

        assert in_a_child(check) == ""
        assert here.copiers.call(lambda _: 7) == 7
