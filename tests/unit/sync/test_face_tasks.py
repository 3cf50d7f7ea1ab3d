"""The blocking `CacheTask`: waiting for it, with and without a bound, from several threads, and through a signal."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import kvpull_async
from kvpull_async.managers import pushes
from kvpull_sync import (
    CacheDesc,
    CacheTask,
    DataType,
    LayerSynchronizer,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    TransferConfig,
)
from tests import duo
from tests.transferring import BOUND, Held, Ready, ReadyLater, Sends

OK, FAILED = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_FAILED
DESC = CacheDesc(4, [3, 64], DataType.DT_UINT8)
RUNNING = {"kv": LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT, "cache": LLMStatusCode.LLM_TIMEOUT}


class Begin:
    """A node, whose transfers of either manager it begins."""

    def __init__(self) -> None:
        self.node = LLMDataDist(LLMRole.PROMPT, duo.PROMPT)
        self.node.init(duo.options())
        self._managers: dict[str, Any] = {"kv": self.node.kv_cache_manager, "cache": self.node.cache_manager}
        self._caches = {kind: manager.allocate_cache(DESC) for kind, manager in self._managers.items()}

    def __call__(self, synchronizer: LayerSynchronizer, *clusters: int, kind: str = "cache") -> CacheTask:
        configs = [TransferConfig(cluster, [16, 32, 48, 64]) for cluster in clusters or (2,)]
        task: CacheTask = self._managers[kind].transfer_cache_async(self._caches[kind], synchronizer, configs)
        assert isinstance(task, CacheTask)
        assert not isinstance(task, kvpull_async.CacheTask)
        return task

    def close(self) -> None:
        self.node.finalize()
        self._caches.clear()


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    sends = Sends()
    monkeypatch.setattr(pushes, "send", sends)
    made = Begin()
    yield made
    made.close()
    sends.parcels.clear()  # they keep the memory of caches


@pytest.mark.parametrize("kind", ["kv", "cache"])
def test_a_task_that_runs_says_so_when_the_time_is_over(begin: Begin, kind: str) -> None:
    held = Held()
    task = begin(held, 2, 3, kind=kind)
    assert task.synchronize(1) is RUNNING[kind]
    assert task.synchronize(timeout_in_millis=0) is RUNNING[kind]
    assert task.get_results(timeout_in_millis=1) == [RUNNING[kind]] * 2
    held.let_go()
    assert task.synchronize() is OK
    assert task.get_results() == [OK, OK]
    assert task.exceptions == [None, None]


def test_many_threads_may_wait(begin: Begin) -> None:
    held = Held()
    task = begin(held)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(task.synchronize) for _ in range(3)]
        assert held.entered.wait(BOUND)
        held.let_go()
        assert [done.result(BOUND) for done in waiting] == [OK] * 3


def test_a_failure_is_a_status_and_not_raised(begin: Begin) -> None:
    error = ValueError("no")

    def refuse(layer: int) -> bool:
        raise error

    task = begin(Ready(refuse), 2, 3)
    assert task.synchronize() is FAILED
    assert task.get_results() == [FAILED, FAILED]
    assert task.exceptions == [error, error]


@pytest.mark.parametrize(
    ("wrong", "error"), [(True, TypeError), (1.5, TypeError), (-1, ValueError), (2**32, ValueError)]
)
def test_timeouts_are_checked(begin: Begin, wrong: Any, error: type[Exception]) -> None:
    task = begin(Ready())
    for wait in (task.synchronize, task.get_results):
        with pytest.raises(error, match="timeout_in_millis"):
            wait(wrong)
    assert task.synchronize() is OK


def test_an_interrupted_wait_ends_nothing_else(begin: Begin) -> None:
    held = Held()
    task = begin(held)

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        waiter = threading.get_ident()
        timer = threading.Timer(0.05, signal.pthread_kill, (waiter, signal.SIGUSR1))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            task.synchronize()
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    held.let_go()
    assert task.synchronize() is OK


def test_a_coroutine_function_is_for_the_other_package(begin: Begin) -> None:
    with pytest.raises(TypeError, match="awaitable API"):
        begin(ReadyLater())


def test_finalize_ends_it(begin: Begin) -> None:
    held = Held()
    task = begin(held)
    assert held.entered.wait(BOUND)
    began = time.monotonic()
    begin.node.finalize()
    assert time.monotonic() - began < BOUND / 2, "it does not wait for the caller's function"
    assert task.synchronize() is LLMStatusCode.LLM_ENGINE_FINALIZED
    assert task.get_results() == [LLMStatusCode.LLM_ENGINE_FINALIZED]
    held.let_go()
