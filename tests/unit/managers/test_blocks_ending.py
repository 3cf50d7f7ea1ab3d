"""How copies of blocks end: cancelled, cut by a release, short of memory, and what then may still write."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest

from kvpull_async import LLMException, LLMRole, LLMStatusCode
from kvpull_async.crossing import awaited
from kvpull_async.testing.faults import GatedMemory
from tests.unit.managers.test_blocks import HOST, NOT_EXIST, PARAM_INVALID, TENSORS, content, cpu, desc, fill
from tests.unit.side import Side

MANY = desc(blocks=8, nbytes=1024 * 1024)


@final
class Stopped:
    """A swap from a device cache into memory of the caller, which is stopped after its first piece."""

    def __init__(self, **properties: Any) -> None:
        self.side = Side("cache", LLMRole.MIX, **properties)
        self.memory = self.side.engine.registry.backend = GatedMemory(self.side.engine.memory)
        self.array = np.zeros((TENSORS, 8, 1024 * 1024), np.uint8)
        self.handle = cpu(self.side, self.array)

    async def __aenter__(self) -> Stopped:
        self.cache = await awaited(self.side.engine, self.side.manager.allocate_blocks_cache(MANY, None))
        for tensor in range(TENSORS):
            self.side.tensor(self.cache, tensor)[:] = 1
        self.memory.landing_gate.close()
        swap = self.side.manager.swap_blocks(self.cache, self.handle, {n: n for n in range(8)})
        self.swapping = asyncio.ensure_future(awaited(self.side.engine, swap))
        await self.memory.landing_gate.reached()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.memory.landing_gate.open()
        await asyncio.gather(self.swapping, return_exceptions=True)
        await asyncio.to_thread(self.side.close)


async def test_p1_memory_of_the_caller_is_not_touched_after_a_cancelled_swap_has_ended() -> None:
    async with Stopped() as stopped:
        stopped.swapping.cancel()
        await asyncio.sleep(0.01)
        assert not stopped.swapping.done()  # the piece that runs is waited for
        stopped.memory.landing_gate.open()
        with pytest.raises(asyncio.CancelledError):
            await stopped.swapping
        assert not stopped.handle.quarantined
        stopped.array[:] = 7
        await asyncio.to_thread(stopped.side.engine.workers.submit(lambda: None).result)
        assert (stopped.array == 7).all()


async def test_p1_memory_of_the_caller_says_when_a_swap_that_did_not_stop_may_still_write() -> None:
    async with Stopped(settle_timeout=20) as stopped:
        manager, engine = stopped.side.manager, stopped.side.engine
        stopped.swapping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopped.swapping
        assert stopped.handle.quarantined
        with pytest.raises(LLMException, match="quarantined") as caught:
            await awaited(engine, manager.swap_blocks(stopped.cache, stopped.handle, {0: 0}))
        assert caught.value.destination_unsafe
        stopped.memory.landing_gate.open()
        await awaited(engine, manager.settled(stopped.handle, 20_000))
        assert not stopped.handle.quarantined
        stopped.array[:] = 7
        await awaited(engine, manager.swap_blocks(stopped.cache, stopped.handle, {0: 1}))
        assert stopped.array.min(axis=2).tolist() == [[7, 1, 7, 7, 7, 7, 7, 7]] * TENSORS


async def test_p1_a_quarantine_of_the_callers_memory_counts_for_every_node() -> None:
    other = Side("cache", LLMRole.MIX, settle_timeout=20)
    async with Stopped(settle_timeout=20) as stopped:
        cache = await awaited(other.engine, other.manager.allocate_blocks_cache(MANY, None))
        stopped.swapping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopped.swapping
        swaps = ((cache, stopped.handle), (stopped.handle, cache))
        for src, dst in swaps:
            with pytest.raises(LLMException, match="quarantined") as caught:
                await awaited(other.engine, other.manager.swap_blocks(src, dst, {0: 0}))
            assert caught.value.destination_unsafe
            assert stopped.handle.quarantined
        with pytest.raises(LLMException, match="still quarantined"):
            await awaited(other.engine, other.manager.settled(stopped.handle, 10))
        stopped.memory.landing_gate.open()
        await awaited(other.engine, other.manager.settled(stopped.handle, 20_000))
        assert not stopped.handle.quarantined
        for src, dst in swaps:
            await awaited(other.engine, other.manager.swap_blocks(src, dst, {0: 0}))
    await asyncio.to_thread(other.close)


async def test_p1_a_quarantine_is_seen_although_another_node_used_the_memory_meanwhile() -> None:
    other = Side("cache", LLMRole.MIX)
    async with Stopped(settle_timeout=20) as stopped:
        cache = await awaited(other.engine, other.manager.allocate_blocks_cache(MANY, None))
        await awaited(other.engine, other.manager.swap_blocks(cache, stopped.handle, {0: 7}))
        assert not stopped.handle.quarantined
        stopped.swapping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopped.swapping
        assert stopped.handle.quarantined
        await awaited(other.engine, other.manager.deallocate(stopped.handle, blocks=True))  # is not of that node
        assert stopped.handle.quarantined
        stopped.memory.landing_gate.open()
        await awaited(stopped.side.engine, stopped.side.manager.settled(stopped.handle, 20_000))
        assert not stopped.handle.quarantined
    await asyncio.to_thread(other.close)


async def test_a_swap_whose_cache_is_released_under_it_says_so() -> None:
    async with Stopped(settle_timeout=100) as stopped:
        manager, engine = stopped.side.manager, stopped.side.engine
        releasing = asyncio.ensure_future(awaited(engine, manager.deallocate(stopped.cache, blocks=True)))
        with pytest.raises(LLMException, match="was released during the copy") as caught:
            await stopped.swapping
        assert (caught.value.status_code, caught.value.operation) == (NOT_EXIST, "swap_blocks")
        stopped.memory.landing_gate.open()
        await asyncio.gather(releasing, return_exceptions=True)  # it may have had to give up by now


async def test_p1_a_cancelled_copy_of_blocks_leaves_a_cache_that_nobody_writes_to() -> None:
    made = Side("cache", LLMRole.MIX)
    gated = made.engine.registry.backend = GatedMemory(made.engine.memory)
    try:
        cache = await awaited(made.engine, made.manager.allocate_blocks_cache(MANY, None))
        gated.lending_gate.close()
        trading = made.manager.copy_blocks(cache, {n: [7 - n] for n in range(8)})
        copying = asyncio.ensure_future(awaited(made.engine, trading))
        await gated.lending_gate.reached()
        copying.cancel()
        gated.lending_gate.open()
        with pytest.raises(asyncio.CancelledError):
            await copying
        fill(made, cache, np.full((TENSORS, 8, 1024 * 1024), 7, np.uint8))
        await asyncio.to_thread(made.engine.workers.submit(lambda: None).result)
        assert (content(made, cache) == 7).all()
    finally:
        gated.lending_gate.open()
        await asyncio.to_thread(made.close)


@contextmanager
def little_memory(room: int) -> Iterator[None]:
    """This process gets `room` bytes of address space more and no others."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize("kind", ["kv", "cache"])
async def test_p10_no_memory_to_set_blocks_aside_is_an_error_of_the_manager(kind: str) -> None:
    made, half, block = Side(kind, LLMRole.MIX), 32, 4 * 1024 * 1024
    try:
        large = desc(blocks=2 * half, nbytes=block, tensors=1)
        cache = await awaited(made.engine, made.manager.allocate_blocks_cache(large, None))
        tensor = made.tensor(cache, 0)
        tensor[0, :8] = 1
        await awaited(made.engine, made.manager.copy_blocks(cache, {0: [1]}))  # whatever else needs memory has it now
        trade = {n: [n ^ half] for n in range(2 * half)}
        with little_memory(2 * half * block // 2), pytest.raises(LLMException, match="no memory") as caught:
            await awaited(made.engine, made.manager.copy_blocks(cache, trade))
        wanted = {"kv": LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY, "cache": LLMStatusCode.LLM_OUT_OF_MEMORY}
        assert (caught.value.status_code, caught.value.operation) == (wanted[kind], "copy_blocks")
        assert tensor[[0, 1, half], 0].tolist() == [1, 1, 0]
    finally:
        await asyncio.to_thread(made.close)


async def test_p6_tables_are_judged_by_a_worker_and_types_by_the_call() -> None:
    made, free = Side("cache", LLMRole.MIX), threading.Event()
    try:
        cache = await awaited(made.engine, made.manager.allocate_blocks_cache(desc(), None))
        host = await awaited(made.engine, made.manager.allocate_blocks_cache(desc(placement=HOST), None))
        for _ in range(made.engine.workers.limit):
            made.engine.workers.submit(free.wait, 30)
        wrong = (
            made.manager.copy_blocks(cache, {0: [1], 2: [1]}),
            made.manager.copy_blocks(cache, {0: [1], 2: [6]}),
            made.manager.swap_blocks(cache, host, {0: 6}),
        )
        calls = [asyncio.ensure_future(awaited(made.engine, operation)) for operation in wrong]
        with pytest.raises(TypeError, match="copy_block_info"):
            made.manager.copy_blocks(cache, {0: ["1"]})
        await awaited(made.engine, made.manager.settled(cache, 20_000))  # the core answers meanwhile
        assert not any(call.done() for call in calls)
        free.set()
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [error.status_code for error in errors if isinstance(error, LLMException)] == [PARAM_INVALID] * 3
    finally:
        free.set()
        await asyncio.to_thread(made.close)
