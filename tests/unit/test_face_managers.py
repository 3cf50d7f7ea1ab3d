"""The awaitable managers: the documented calls, both managers beside each other, and what is reserved."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvpull_async import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMException,
    LLMRole,
    LLMStatusCode,
    LLMTimeoutError,
    MemInfo,
    Memtype,
)
from tests.duo import BIG, DECODER, PROMPT, SMALL, arrays, duo, engine_of, fill, frozen, holds, node, pattern, untouched

TRANSPORTS = ["tcp", "inproc"]
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


@pytest.mark.smoke
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("desc", [SMALL, BIG], ids=["small", "big"])
async def test_the_documented_calls_deliver_what_was_published(transport: str, desc: CacheDesc) -> None:
    async with duo(transport=transport) as pair:
        await pair.publish(desc)
        cache = await pair.destination(desc)
        kv_cache_manager = pair.decoder.kv_cache_manager
        await kv_cache_manager.pull_cache(CacheKey(PROMPT, 1), cache, 0)
        assert holds(cache, entry=0, source=1)
        with pytest.raises(LLMException) as caught:
            await kv_cache_manager.pull_cache(CacheKey(PROMPT, 1), cache, 0)  # it was consumed
        assert caught.value.status_code == NOT_EXIST
        await kv_cache_manager.pull_cache(
            CacheKey(PROMPT, 2), cache, 1, src_layer_range=range(1), dst_layer_range=range(1, 2)
        )
        got = [array[1, 0] for array in arrays(cache)]
        assert got == [0, 0, pattern(0, 2), pattern(1, 2)]
        await kv_cache_manager.pull_cache(CacheKey(PROMPT, 3), cache, 2, src_cache_offset=0, dst_cache_offset=0)
        await kv_cache_manager.pull_cache(CacheKey(PROMPT, 3), cache, 3, src_cache_offset=0, dst_cache_offset=0)
        assert holds(cache, entry=2, source=3)
        assert holds(cache, entry=3, source=3)


@pytest.mark.smoke
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_most_programs_do_blocks_of_memory_of_their_own(transport: str) -> None:
    """`register_blocks_cache` by address, link, `pull_blocks`, all positional."""
    desc = CacheDesc(2, [8, 4096], DataType.DT_FLOAT16)
    memory = [np.zeros((2, 8, 4096), np.float16) for _ in range(2)]
    memory[0][...] = np.arange(8, dtype=np.float16)[None, :, None] + 1
    async with duo(transport=transport, enable_cache_manager=True) as pair:
        nodes = (pair.prompt, pair.decoder)
        source, destination = [
            await made.cache_manager.register_blocks_cache(
                desc, [tensor.ctypes.data for tensor in array], BlocksCacheKey(cluster_id, 0)
            )
            for made, array, cluster_id in zip(nodes, memory, (PROMPT, DECODER), strict=True)
        ]
        await pair.decoder.cache_manager.pull_blocks(BlocksCacheKey(PROMPT, 0), destination, [1, 2, 7], [5, 6, 0])
        expected = np.zeros_like(memory[1])
        expected[:, [5, 6, 0]] = memory[0][:, [1, 2, 7]]
        assert np.array_equal(memory[1], expected)
        # and the other way: a link serves both sides
        await pair.prompt.cache_manager.pull_blocks(BlocksCacheKey(DECODER, 0), source, [5], [0])
        assert (memory[0][:, 0] == memory[0][:, 1]).all()
        await pair.prompt.cache_manager.unregister_cache(source.cache_id)
        await pair.decoder.cache_manager.unregister_cache(destination.cache_id)


async def test_the_two_managers_of_a_node_share_its_caches() -> None:
    async with duo() as pair:
        cache = await pair.prompt.cache_manager.allocate_cache(SMALL, [CacheKey(PROMPT, 40)])
        fill(cache)
        target = await pair.destination()
        await pair.decoder.cache_manager.pull_cache(CacheKeyByIdAndIndex(PROMPT, cache.cache_id, 0), target)
        assert holds(target, entry=0, source=0)
        await pair.prompt.cache_manager.deallocate_cache(cache)
        await pair.prompt.kv_cache_manager.remove_cache_key(CacheKey(PROMPT, 40))


async def test_each_manager_has_its_own_code_for_a_timeout_and_both_are_caught_alike() -> None:
    async with duo() as pair:
        target = await pair.destination()
        key = CacheKeyByIdAndIndex(PROMPT, 1, 0)
        for manager, status in (
            (pair.decoder.kv_cache_manager, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT),
            (pair.decoder.cache_manager, LLMStatusCode.LLM_TIMEOUT),
        ):
            with frozen(pair.prompt), pytest.raises(LLMTimeoutError) as caught:
                await manager.pull_cache(key, target, timeout=50)  # type: ignore[arg-type]  # either kind of handle
            assert isinstance(caught.value, TimeoutError)
            error = caught.value
            assert (error.status_code, error.operation, error.retry_safe) == (status, "pull_cache", True)
            assert error.peer == "{}:{}".format(*pair.prompt.listen_address or ())
            assert error.elapsed_ms is not None
            assert not error.destination_unsafe
        assert untouched(target)


async def test_p2_cancelling_the_task_cancels_the_pull_and_the_key_stays() -> None:
    async with duo() as pair:
        await pair.publish(BIG)
        cache = await pair.destination(BIG)
        gate = pair.gate().lending_gate
        gate.close()
        pull = asyncio.ensure_future(pair.decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT, 1), cache))
        await gate.reached()
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        assert not cache.quarantined
        gate.open()
        await pair.decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT, 1), cache, 2)
        assert holds(cache, entry=2, source=1)


async def test_p1_wait_for_keeps_its_time_and_leaves_a_settled_destination() -> None:
    async with duo() as pair:
        await pair.publish(BIG)
        cache = await pair.destination(BIG)
        gate = pair.gate().lending_gate
        gate.close()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pair.decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT, 0), cache), 0.2)
        assert not cache.quarantined
        for array in arrays(cache):
            array[:] = 0xC3
        gate.open()
        await pair.decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT, 0), cache, 3)
        assert all((array[:3] == 0xC3).all() for array in arrays(cache))
        assert holds(cache, entry=3, source=0)


async def test_p7_releasing_the_source_under_a_reader_waits_then_cuts() -> None:
    async with duo(settle_timeout=100) as pair:
        source = await pair.prompt.kv_cache_manager.allocate_cache(BIG)
        cache = await pair.destination(BIG)
        gate = pair.gate().lending_gate
        gate.close()
        key = CacheKeyByIdAndIndex(PROMPT, source.cache_id, 0)
        pull = asyncio.ensure_future(pair.decoder.kv_cache_manager.pull_cache(key, cache))
        await gate.reached()
        release = asyncio.ensure_future(pair.prompt.kv_cache_manager.deallocate_cache(source))
        with pytest.raises(LLMException) as caught:
            await pull
        assert caught.value.status_code in (NOT_EXIST, LLMStatusCode.LLM_LINK_FAILED)
        assert caught.value.retry_safe or caught.value.status_code == NOT_EXIST
        gate.open()
        await asyncio.gather(release, return_exceptions=True)
        await pair.prompt.kv_cache_manager.deallocate_cache(source)


async def test_the_counters_of_both_sides_agree() -> None:
    async with duo() as pair:
        await pair.publish()
        cache = await pair.destination()
        for entry in range(4):
            await pair.decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT, entry), cache, entry)
        pulled = pair.decoder.counters
        assert (pulled["pulls_started"], pulled["pulls_finished"], pulled["bytes_pulled"]) == (4, 4, 4 * 4 * 1024)
        await pair.decoder.check_link_status(PROMPT)  # behind the last acknowledgement
        assert pair.prompt.counters["bytes_served"] == pulled["bytes_pulled"]


# -- what is reserved --------------------------------------------------------------------------------------------------


async def test_what_is_reserved_never_seems_to_succeed() -> None:
    async with node(LLMRole.PROMPT, PROMPT, enable_cache_manager=True) as made:
        with pytest.raises(LLMException, match="remap_registered_memory is not available") as caught:
            await made.cache_manager.remap_registered_memory(MemInfo(Memtype.MEM_TYPE_DEVICE, 4096, 64))
        assert caught.value.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
        assert caught.value.operation == "remap_registered_memory"
        assert engine_of(made).counters.snapshot() == {}


async def test_giving_up_a_cache_by_the_wrong_call_names_the_right_one() -> None:
    memory, desc = np.zeros((8, 64), np.uint8), CacheDesc(1, [8, 64], DataType.DT_UINT8)
    async with node(LLMRole.MIX, 1) as one:
        manager = one.cache_manager
        registered = await manager.register_blocks_cache(desc, [memory.ctypes.data])
        blocks, entries = await manager.allocate_blocks_cache(desc), await manager.allocate_cache(desc)
        for call, cache, right in (
            (manager.deallocate_cache, registered, "use unregister_cache"),
            (manager.deallocate_cache, blocks, "use deallocate_blocks_cache"),
            (manager.deallocate_blocks_cache, entries, "use deallocate_cache"),
        ):
            with pytest.raises(LLMException, match=right) as caught:
                await call(cache)
            assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
        await manager.unregister_cache(registered.cache_id)
        await manager.deallocate_blocks_cache(blocks)
        await manager.deallocate_cache(entries)
