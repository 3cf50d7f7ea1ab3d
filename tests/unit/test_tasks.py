"""One transfer as whoever waits for it sees it: running, over, and told of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvpull_async import CacheDesc, DataType, LLMException, LLMRole, LLMStatusCode, TransferConfig
from kvpull_async.managers import pushes
from kvpull_async.tasks import TransferTask, wait_seconds
from tests.transferring import BOUND, Held, Ready, Sends
from tests.unit.side import Side

OK, FAILED = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_FAILED
DESC = CacheDesc(2, [3, 64], DataType.DT_UINT8)


class Begun:
    """A transfer of one layer to two clusters, held by its synchronizer."""

    def __init__(self, side: Side) -> None:
        self.held = Held()
        configs = [TransferConfig(2, [16, 32]), TransferConfig(3, [16, 32])]
        arguments = (side.allocate(DESC), self.held, configs, None, None, None)
        self.task = TransferTask(side.engine, side.manager.transfer_cache_async(*arguments, options={}, caller=None))

    def end(self) -> None:
        over = threading.Event()
        self.task.when_over(over.set)
        self.held.let_go()
        assert over.wait(BOUND)


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sends]:
    made = Sends()
    monkeypatch.setattr(pushes, "send", made)
    yield made
    made.parcels.clear()  # they keep the memory of caches


@pytest.fixture
def side(sends: Sends) -> Iterator[Side]:
    made = Side("kv", LLMRole.PROMPT)
    yield made
    made.close()


def test_while_it_runs_its_status_says_so(side: Side) -> None:
    begun, waiting = Begun(side), LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
    assert (begun.task.over, begun.task.overall, begun.task.results) == (False, waiting, [waiting] * 2)
    assert begun.task.exceptions == [None] * 2
    begun.end()
    assert (begun.task.over, begun.task.overall, begun.task.results) == (True, OK, [OK] * 2)


def test_everyone_is_told_once(side: Side) -> None:
    begun, told = Begun(side), []
    waiters = [lambda name=name: told.append(name) for name in "abc"]
    for waiter in waiters:
        begun.task.when_over(waiter)
    begun.task.forget(waiters[1])
    begun.end()
    assert sorted(told) == ["a", "c"]
    begun.task.when_over(waiters[1])
    assert told[-1] == "b", "who comes later is told at once"
    begun.task.forget(waiters[1])


def test_what_it_gives_is_the_callers(side: Side) -> None:
    begun = Begun(side)
    begun.end()
    begun.task.results.clear()
    begun.task.exceptions.clear()
    assert (begun.task.results, begun.task.exceptions) == ([OK] * 2, [None] * 2)


def test_a_transfer_that_breaks_is_no_success(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours, outside of any config."""
    begun, error = Begun(side), RuntimeError("a bug")

    def broken(numbers: Any) -> Any:
        raise error

    monkeypatch.setattr(begun.task._transfer, "_send_to", broken)
    begun.end()
    assert (begun.task.overall, begun.task.results) == (FAILED, [FAILED] * 2)
    assert begun.task.exceptions == [error] * 2


def test_nobody_need_keep_it(side: Side, sends: Sends) -> None:
    begun = Begun(side)
    held, over = begun.held, threading.Event()
    begun.task.when_over(over.set)
    del begun
    held.let_go()
    assert over.wait(BOUND)
    assert len(sends.parcels) == 2


def test_after_finalize_there_is_no_new_one(sends: Sends) -> None:
    side = Side("cache", LLMRole.MIX)
    arguments = (side.allocate(DESC), Ready(), [], None, None, None)
    asked = side.manager.transfer_cache_async(*arguments, options={}, caller=None)
    side.close()
    with pytest.raises(LLMException) as caught:
        TransferTask(side.engine, asked)
    assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED


def test_timeouts_are_uint32_milliseconds() -> None:
    assert [wait_seconds(value) for value in (0, 1, 2**32 - 1)] == [0, 0.001, (2**32 - 1) / 1000]
    assert wait_seconds(None) == float("inf")
    for wrong, error in ((-1, ValueError), (2**32, ValueError), (True, TypeError), (1.0, TypeError), ("1", TypeError)):
        with pytest.raises(error, match="timeout_in_millis"):
            wait_seconds(wrong)
