"""The awaitable `CacheTask`: waiting for it, with and without a bound, from several tasks and loops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvpull_async import (
    CacheDesc,
    CacheTask,
    DataType,
    LayerSynchronizer,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    TransferConfig,
)
from kvpull_async.managers import pushes
from tests import duo
from tests.transferring import Held, Ready, ReadyLater, Sends

OK, FAILED = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_FAILED
DESC = CacheDesc(4, [3, 64], DataType.DT_UINT8)
RUNNING = {"kv": LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT, "cache": LLMStatusCode.LLM_TIMEOUT}


@pytest.fixture
def sends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sends]:
    made = Sends()
    monkeypatch.setattr(pushes, "send", made)
    yield made
    made.parcels.clear()  # they keep the memory of caches


@pytest.fixture
async def node(sends: Sends) -> AsyncIterator[LLMDataDist]:
    async with duo.node(LLMRole.PROMPT, duo.PROMPT) as made:
        yield made


class Begin:
    """Begins transfers of one kind of manager; the cache is released when it is left."""

    def __init__(self, node: LLMDataDist, kind: str) -> None:
        self._manager: Any = node.kv_cache_manager if kind == "kv" else node.cache_manager

    async def __aenter__(self) -> Begin:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        self._cache = await self._manager.allocate_cache(DESC)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._manager.deallocate_cache(self._cache)

    def __call__(self, synchronizer: LayerSynchronizer, *clusters: int) -> CacheTask:
        configs = [TransferConfig(cluster, [16, 32, 48, 64]) for cluster in clusters or (2,)]
        task: CacheTask = self._manager.transfer_cache_async(self._cache, synchronizer, configs)
        assert isinstance(task, CacheTask)
        return task


@pytest.mark.parametrize("kind", ["kv", "cache"])
async def test_a_task_that_runs_says_so_when_the_time_is_over(node: LLMDataDist, kind: str) -> None:
    held = Held()
    async with Begin(node, kind) as begin:
        task = begin(held, 2, 3)
        assert await task.synchronize(1) is RUNNING[kind]
        assert await task.synchronize(timeout_in_millis=0) is RUNNING[kind]
        assert await task.get_results(timeout_in_millis=1) == [RUNNING[kind]] * 2
        held.let_go()
        assert await task.synchronize() is OK
        assert await task.get_results() == [OK, OK]
        assert await task is OK
        assert task.exceptions == [None, None]


async def test_many_may_wait_and_one_that_is_cancelled_disturbs_nobody(node: LLMDataDist) -> None:
    held = Held()
    async with Begin(node, "cache") as begin:
        task = begin(held)
        waiters = [asyncio.ensure_future(task.synchronize()) for _ in range(3)]
        await asyncio.to_thread(held.entered.wait)
        waiters[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiters[0]
        held.let_go()
        assert await asyncio.gather(*waiters[1:]) == [OK, OK]


async def test_another_loop_may_wait_too(node: LLMDataDist) -> None:
    held = Held()
    async with Begin(node, "cache") as begin:
        task = begin(held)
        elsewhere = asyncio.ensure_future(asyncio.to_thread(lambda: asyncio.run(task.get_results())))
        await asyncio.to_thread(held.entered.wait)
        held.let_go()
        assert await elsewhere == [OK]
        assert await asyncio.to_thread(lambda: asyncio.run(task.synchronize(10))) is OK


async def test_a_failure_is_a_status_and_not_raised(node: LLMDataDist) -> None:
    error = ValueError("no")

    def refuse(layer: int) -> bool:
        raise error

    async with Begin(node, "cache") as begin:
        task = begin(Ready(refuse), 2, 3)
        assert await task is FAILED
        assert await task.get_results() == [FAILED, FAILED]
        assert task.exceptions == [error, error]
        refused = begin(Ready(lambda _: False))
        assert await refused is LLMStatusCode.LLM_PARAM_INVALID


@pytest.mark.parametrize(
    ("wrong", "error"), [(True, TypeError), (1.5, TypeError), (-1, ValueError), (2**32, ValueError)]
)
async def test_timeouts_are_checked(node: LLMDataDist, wrong: Any, error: type[Exception]) -> None:
    async with Begin(node, "cache") as begin:
        task = begin(Ready())
        for wait in (task.synchronize, task.get_results):
            with pytest.raises(error, match="timeout_in_millis"):
                await wait(wrong)
        assert await task is OK


async def test_a_coroutine_runs_on_the_loop_that_called(node: LLMDataDist, sends: Sends) -> None:
    later = ReadyLater()
    async with Begin(node, "kv") as begin:
        assert await begin(later) is OK
    assert later.loops == [asyncio.get_running_loop()] * 2
    assert later.layers == [0, 1]
    assert len(sends.parcels) == 2


async def test_when_that_loop_is_gone_the_status_says_so(node: LLMDataDist) -> None:
    class Forever(LayerSynchronizer):
        async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            await asyncio.Event().wait()
            return True

    async with Begin(node, "cache") as begin:

        async def call() -> CacheTask:
            task = begin(Forever())
            await asyncio.sleep(0.01)
            return task

        task = await asyncio.to_thread(lambda: asyncio.run(call()))
        assert await task is FAILED
        assert "event loop" in str(task.exceptions[0])


async def test_a_coroutine_needs_a_loop(node: LLMDataDist) -> None:
    async with Begin(node, "cache") as begin:
        with pytest.raises(TypeError, match="running event loop"):
            await asyncio.to_thread(begin, ReadyLater())
        task = await asyncio.to_thread(begin, Ready())
        assert await task is OK, "a plain function needs none"
