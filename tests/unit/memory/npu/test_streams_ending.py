"""Copies of a stream that end early, by a deadline, a stop or an error: nothing is touched any more, or it is said."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from kvpull_async.memory.base import Until
from kvpull_async.memory.npu import streams
from kvpull_async.memory.npu.codes import AclError, meaning
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


@pytest.mark.parametrize("code", [107019, 107020, 507010, 507046])
def test_p1_a_wait_that_says_it_runs_still_is_asked_again(code: int) -> None:
    with side() as here:
        here.emulator.inject(TIMED, code, times=3)
        here.works()


def test_p1_a_synchronous_copy_whose_end_nobody_saw_is_not_over() -> None:
    with side() as here:
        here.emulator.inject("aclrtMemcpy", 507012)
        with pytest.raises(Unsettled, match="507012") as caught:
            here.copy(here.upward(*MIXED))
        assert caught.value.destination_unsafe
        here.works()


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
