"""Copies of a stream that end early, by a deadline, a stop or an error: nothing is touched any more, or it is said."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from kvpull_async.memory.base import Until
from kvpull_async.memory.npu import streams
from kvpull_async.memory.npu.codes import CODES, STILL_RUNNING, AclError, meaning
from kvpull_async.memory.npu.streams import Unsettled
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from tests.unit.memory.emulated import BOUND, eventually, pattern
from tests.unit.memory.npu.stream_side import (
    ABORT,
    ALIGNED,
    BATCH,
    MIXED,
    QUERY,
    ROOM,
    TIMED,
    after_ms,
    side,
)

# -- ends that come early ----------------------------------------------------------------------------------------------

ENDS: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    "abort": ((), {}),
    "no query": ((QUERY,), {}),
    "query refused": ((), {"query_works": 0}),
    "no timeout": ((TIMED,), {}),
    "no batch": ((BATCH,), {}),
}


@pytest.mark.parametrize("way", ENDS)
def test_p1_a_deadline_ends_the_wait_once_nothing_runs_any_more(way: str) -> None:
    without, settings = ENDS[way]
    with side(*without, **settings) as here:
        end = here.hung(after_ms(150))
        with pytest.raises(LLMTimeoutError) as caught:
            end()
        assert here.npu.running() == 0
        assert caught.value.retry_safe
        here.works()


@pytest.mark.parametrize("way", ENDS)
def test_a_stop_ends_the_wait_soon_and_nothing_runs_any_more(way: str) -> None:
    without, settings = ENDS[way]
    with side(*without, **settings) as here:
        until = after_ms(BOUND * 1000)
        end = here.hung(until)
        time.sleep(0.05)
        until.stop()
        with pytest.raises(LLMException, match="stopped") as caught:
            end(BOUND / 10)
        assert caught.value.status_code == LLMStatusCode.LLM_FAILED
        assert here.npu.running() == 0
        here.works()


def test_without_a_deadline_the_streams_own_bound_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "LONGEST", 0.1)
    with side() as here:
        end = here.hung(Until())
        with pytest.raises(LLMTimeoutError):
            end()
        assert here.npu.running() == 0


@pytest.mark.parametrize("why", ["in time", "stopped"])
def test_what_is_over_before_it_begins_never_begins(why: str) -> None:
    with side() as here:
        until = Until() if why == "stopped" else after_ms(0)
        if why == "stopped":
            until.stop()
        before = here.emulator.counts()
        with pytest.raises(LLMException, match=why):
            here.copy(here.upward(*MIXED), until)
        assert here.emulator.counts() == before


@pytest.mark.parametrize("kind", ["odd", "single"])
def test_a_stop_is_seen_between_rows_that_take_long_to_issue(kind: str) -> None:
    with side(BATCH, call_us=2000) as here:
        until = Until()
        odd = kind == "odd"
        end = here.begin(here.upward(*((at * 128 + odd, at * 128, 32) for at in range(4000))), until)
        call = "aclrtMemcpy" if odd else "aclrtMemcpyAsync"
        eventually(lambda: here.emulator.count(call) > 3)
        until.stop()
        with pytest.raises(LLMException, match="stopped"):
            end()
        assert here.emulator.count(call) < 2000
        assert here.npu.running() == 0


STUBBORN: dict[str, tuple[tuple[str, ...], dict[str, int]]] = {
    "no abort": ((ABORT,), {}),
    "abort refused": ((), {"abort_works": 0}),
    "no abort, no query": ((ABORT, QUERY), {}),
    "abort and query refused": ((), {"abort_works": 0, "query_works": 0}),
    "no abort, no timeout": ((ABORT, TIMED), {}),
}


@pytest.mark.parametrize("way", STUBBORN)
def test_p1_what_cannot_be_stopped_is_waited_for(way: str) -> None:
    without, settings = STUBBORN[way]
    with side(*without, **settings) as here:
        here.view[:] = data = pattern(ROOM)
        end = here.hung(after_ms(60))
        with pytest.raises(TimeoutError):
            end(0.4)
        assert here.npu.running() == 1
        here.emulator.resume()
        with pytest.raises(LLMTimeoutError):
            end()
        assert here.npu.running() == 0
        assert np.array_equal(here.npu.look(here.device, ROOM), data)
        here.works()


@pytest.mark.parametrize("way", STUBBORN)
def test_p1_closing_leaves_what_cannot_be_stopped_and_says_so(way: str) -> None:
    without, settings = STUBBORN[way]
    with side(*without, clean=False, **settings) as here:
        end = here.hung(after_ms(60))
        with pytest.raises(TimeoutError):
            end(0.2)
        here.closing.set()
        with pytest.raises(Unsettled) as caught:
            end()
        assert caught.value.destination_unsafe
        assert here.npu.running() == 1
        here.emulator.resume()
        eventually(lambda: here.npu.running() == 0)


# -- errors of the device ----------------------------------------------------------------------------------------------

FAILING: dict[str, tuple[str, tuple[str, ...], Any]] = {
    "a task": ("task", (), "upward"),
    "a batch": (BATCH, (), "upward"),
    "a batch downward": (BATCH, (), "downward"),
    "a single one": ("aclrtMemcpyAsync", (BATCH,), "upward"),
    "within": ("aclrtMemcpyAsync", (), "within"),
    "a synchronous one": ("aclrtMemcpy", (), "upward"),
    "the wait": (TIMED, (), "upward"),
    "the wait without a limit": ("aclrtSynchronizeStream", (TIMED,), "upward"),
    "the question": (QUERY, (TIMED,), "upward"),
}


@pytest.mark.parametrize("code", [507053, 207001, 107003, 507899, 123456])
@pytest.mark.parametrize("where", FAILING)
def test_p1_an_error_of_the_device_comes_with_its_meaning_once_nothing_runs(where: str, code: int) -> None:
    function, without, make = FAILING[where]
    with side(*without) as here:
        here.emulator.inject(function, code)
        with pytest.raises(AclError) as caught:
            here.copy(getattr(here, make)(*MIXED))
        assert here.npu.running() == 0
        assert caught.value.code == code
        assert caught.value.status_code == meaning(code).status
        here.works()


@pytest.mark.parametrize("without", [(ABORT,), (ABORT, QUERY), (ABORT, TIMED)])
def test_p1_after_an_error_without_an_abort_the_rest_is_waited_for(without: tuple[str, ...]) -> None:
    with side(*without, BATCH, delay_us=30_000) as here:
        here.view[:] = data = pattern(ROOM)
        here.emulator.inject("aclrtMemcpyAsync", 507899, after=2)
        with pytest.raises(AclError):
            here.copy(here.upward(*((at * 8192, at * 8192, 4096) for at in range(4))))
        assert here.npu.running() == 0
        assert np.array_equal(here.npu.look(here.device, 4096), data[:4096])
        here.works()


@pytest.mark.parametrize("code", [107019, 507046])
def test_p1_a_wait_that_was_too_short_is_repeated(code: int) -> None:
    with side(call_us=10_000) as here:  # the limit of the first wait
        here.emulator.inject(TIMED, code, times=3)
        here.works()


@pytest.mark.parametrize("code", sorted({*CODES, 123456}))
def test_p1_p2_whatever_a_copy_failed_with_it_has_not_succeeded(code: int) -> None:
    with side() as here:
        here.emulator.inject("task", code)
        with pytest.raises(AclError) as caught:
            here.copy(here.upward(*ALIGNED))
        assert caught.value.code == code
        here.works()


@pytest.mark.parametrize("code", sorted(STILL_RUNNING))
@pytest.mark.parametrize("without", [(), (ABORT,), (ABORT, TIMED)])
def test_p1_p2_a_copy_that_failed_is_not_waited_for_as_if_it_only_took_long(
    without: tuple[str, ...], code: int
) -> None:
    """The device tells of a failed copy once; asked again, it would say that all is well."""
    with side(*without) as here:
        here.emulator.inject("task", code)
        with pytest.raises(AclError) as caught:
            here.copy(here.upward(*ALIGNED))
        assert caught.value.code == code
        assert here.npu.running() == 0
        here.works()


@pytest.mark.parametrize("code", [107020, 507010])
def test_p1_after_an_end_that_nobody_saw_the_word_of_a_wait_is_no_proof(code: int) -> None:
    with side(ABORT, QUERY, clean=False) as here:
        here.emulator.inject("task", code)
        end = here.begin(here.upward(*ALIGNED))
        with pytest.raises(TimeoutError, match="has not ended"):
            end(0.3)
        here.closing.set()
        with pytest.raises(Unsettled):
            end()


@pytest.mark.parametrize("code", [507012, 507046])
def test_p1_a_synchronous_copy_whose_end_nobody_saw_is_not_over_before_the_memory_closes(code: int) -> None:
    with side() as here:
        here.emulator.inject("aclrtMemcpy", code)
        end = here.begin(here.upward(*MIXED), after_ms(20))
        with pytest.raises(TimeoutError, match="has not ended"):
            end(0.2)
        here.closing.set()
        with pytest.raises(Unsettled, match=str(code)) as caught:
            end()
        assert caught.value.destination_unsafe


@pytest.mark.parametrize("code", [207001, 507053, 507899])
def test_p1_a_stream_that_failed_and_answers_every_question_with_it_is_over_when_it_was_waited_for(code: int) -> None:
    with side(ABORT, failed_queries=1) as here:
        here.emulator.inject("task", code)
        with pytest.raises(AclError) as caught:
            here.copy(here.upward(*ALIGNED))
        assert caught.value.code == code
        assert here.npu.running() == 0
        here.works()


@pytest.mark.parametrize("code", [107022, 107023])
def test_a_wait_that_says_that_the_copies_were_aborted_is_believed(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with side(ABORT, QUERY) as here:
        waits = getattr(here._acl, TIMED)

        def aborted(stream: object, _: int) -> int:
            """The emulator knows no such end: here it is that of the copy."""
            assert waits(stream, 20_000) == 0
            return code

        monkeypatch.setattr(here._acl, TIMED, aborted)
        with pytest.raises(AclError) as caught:
            here.copy(here.upward(*ALIGNED))
        assert caught.value.code == code
        assert here.npu.running() == 0


@pytest.mark.parametrize("code", [207001, 107003, 507010, 507899])
def test_p1_a_device_that_answers_nothing_but_an_error_has_ended_nothing(code: int) -> None:
    with side(ABORT, clean=False) as here:
        end = here.hung(after_ms(60))
        here.emulator.inject(TIMED, code, times=-1)
        here.emulator.inject(QUERY, code, times=-1)
        with pytest.raises(TimeoutError, match="has not ended"):
            end(0.4)
        assert here.npu.running() == 1
        asked = here.emulator.count(QUERY)
        time.sleep(0.3)
        assert here.emulator.count(QUERY) - asked < 30, "it is asked less and less often"
        here.closing.set()
        with pytest.raises(Unsettled):
            end()
        here.emulator.resume()
        eventually(lambda: here.npu.running() == 0)


def test_a_stream_that_cannot_be_made_anew_is_made_for_a_later_copy() -> None:
    with side() as here:
        here.emulator.inject("task", 507899)
        with pytest.raises(AclError):
            here.copy(here.upward(*ALIGNED))
        here.emulator.inject("aclrtCreateStream", 207008)
        with pytest.raises(AclError) as caught:
            here.copy(here.upward(*ALIGNED))
        assert caught.value.code == 207008
        here.works()


def test_a_stream_that_cannot_be_destroyed_is_destroyed_by_force() -> None:
    with side() as here:
        here.emulator.inject("task", 507899)
        here.emulator.inject("aclrtDestroyStream", 507899)
        with pytest.raises(AclError):
            here.copy(here.upward(*ALIGNED))
        assert here.emulator.count("aclrtDestroyStreamForce") == 1
        here.works()
