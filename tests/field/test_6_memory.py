"""Reports of registered memory and of leaks: blocks that nobody gives back, memory registered twice or wrongly."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from kvpull_async import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMException, LLMRole, LLMStatusCode, Placement
from kvpull_async.memory.base import Region
from tests import duo
from tests.conformance.api import AWAITED, Api
from tests.inject import gated_copies, gated_memories, stubborn_inproc
from tests.integration.content import SPOILT, content
from tests.integration.own_loop import outcome
from tests.integration.processes import child, descriptors
from tests.integration.rig import MISSING, Here, Nodes, begin, each_face, each_path, each_process_path, nodes
from tests.loop_nodes import event_log, eventually

INVALID = LLMStatusCode.LLM_PARAM_INVALID
CANARY = 0xA5
U8 = DataType.DT_UINT8
PAGE = os.sysconf("SC_PAGE_SIZE")


def addresses(memory: Any) -> list[int]:
    """Of each tensor of an array of (tensors, ...)."""
    return [tensor.ctypes.data for tensor in memory]


def held(node: Any) -> list[Any]:
    """The caches of a node that something uses, whether by a transfer or in quarantine."""
    return [entry for entry in duo.engine_of(node).registry.entries() if entry.busy]


@each_process_path
async def test_6_1_a_thousand_cancelled_pulls_and_a_source_that_dies_hold_nothing(path: str) -> None:
    """No message of the dead peer is needed to get the memory back."""
    async with (
        child("PROMPT", duo.PROMPT, listen=True, transport=path) as prefill,
        duo.node(LLMRole.DECODER, duo.DECODER, transport=path) as node,
    ):
        here, nbytes = Here(node), 200_000
        await prefill.ask("publish", "published", nbytes=nbytes, first=0)
        await here.link(prefill)
        before = descriptors()
        caches = [await here.cache(nbytes) for _ in range(20)]
        for burst in range(50):
            pulls = [here.pull(cache, timeout=5000) for cache in caches]
            await asyncio.sleep(0.002 * (burst % 3))
            if burst == 25:
                prefill.kill()
            for pull in pulls:
                pull.cancel()
            await asyncio.wait(pulls)
        await eventually(lambda: held(node) == [], lambda: repr(held(node)))
        counters = node.counters
        ends = sum(counters.get(f"pulls_{end}", 0) for end in ("finished", "failed", "timed_out", "cancelled"))
        assert ends == counters["pulls_started"]
        assert "regions_quarantined" not in counters
        for cache in caches:
            await node.kv_cache_manager.deallocate_cache(cache)
        assert duo.engine_of(node).registry.entries() == []
        del here, caches, cache, pulls, pull
        gc.collect()
        await eventually(lambda: descriptors() <= before + 2, lambda: f"{before} descriptors, now {descriptors()}")


@each_path
@each_face
async def test_6_3_a_puller_that_will_not_pull_gives_the_key_up_and_the_source_its_memory(path: str, api: Api) -> None:
    """In one round trip, and not when some time of the source's is over."""
    async with nodes(api, path) as n:
        cache = await api.do(n.prompt.kv_cache_manager.allocate_cache, duo.SMALL, duo.keys(duo.SMALL)[:1])
        await api.do(n.prompt.kv_cache_manager.deallocate_cache, cache)
        registry = duo.engine_of(n.prompt).registry
        assert len(registry.entries()) == 1, "the key keeps the memory"
        release = n.decoder.kv_cache_manager.release_key
        await api.do(release, CacheKey(duo.PROMPT, 0))
        assert registry.entries() == []
        assert n.prompt.counters["keys_released"] == 1
        error = await n.fails(await n.destination(), 0)
        assert error.status_code is MISSING
        with pytest.raises(LLMException) as caught:
            await api.do(release, CacheKey(duo.PROMPT, 0))
        assert caught.value.status_code is MISSING


# -- 6.4, 6.5, 6.7: what is registered ---------------------------------------------------------------------------------


async def pulled(n: Nodes, key: int, nbytes: int) -> Any:
    """The bytes of one tensor's entry, pulled anew."""
    cache = await n.api.do(n.decoder.kv_cache_manager.allocate_cache, CacheDesc(1, [1, nbytes], U8))
    await n.api.do(n.decoder.kv_cache_manager.pull_cache, CacheKey(duo.PROMPT, key), cache, tensor_num_per_layer=1)
    found = duo.arrays(cache)[0][0].copy()
    await n.api.do(n.decoder.kv_cache_manager.deallocate_cache, cache)
    return found


@each_path
@each_face
async def test_6_4_memory_may_be_registered_twice_and_in_parts_that_overlap(path: str, api: Api) -> None:
    """Each registration is a cache of its own: it counts for itself, and the end of one is not the end of another."""
    memory = content(4, 0, 0, nbytes=64 * PAGE).copy()
    spans = [(0, 64), (0, 64), (10, 40), (30, 34), (63, 1)]
    async with nodes(api, path) as n:
        made = []
        for key, (first, pages) in enumerate(spans):
            at, desc = [memory.ctypes.data + first * PAGE], CacheDesc(1, [1, pages * PAGE], U8)
            register = n.prompt.cache_manager.register_cache
            made.append(await api.do(register, desc, at, [CacheKey(duo.PROMPT, key)]))
        for gone in (*made, None):
            for key, (first, pages) in list(enumerate(spans))[made.index(gone) if gone else len(made) :]:
                expected = memory[first * PAGE : (first + pages) * PAGE]
                assert np.array_equal(await pulled(n, key, pages * PAGE), expected)
            if gone is not None:
                await api.do(n.prompt.cache_manager.unregister_cache, gone.cache_id)


@each_face
async def test_6_5_a_registration_that_the_memory_below_refuses_raises_at_once_and_registers_nothing(
    monkeypatch: pytest.MonkeyPatch, api: Api
) -> None:
    memories = gated_memories(monkeypatch, after=0)
    memory = np.zeros((2, 4096), np.uint8)

    def adopt(addresses: Any, *, tensor_nbytes: int, **_: Any) -> tuple[Region, ...]:
        reason = f"the device does not take {tensor_nbytes} bytes at {addresses[0]:#x}: code -1"
        raise LLMException(reason, status_code=LLMStatusCode.LLM_DEVICE_MEM_ERROR)

    async with nodes(api, "inproc") as n:
        desc, key = CacheDesc(2, [1, 4096], U8), CacheKey(duo.PROMPT, 1)
        register = n.prompt.cache_manager.register_cache
        with monkeypatch.context() as broken:
            broken.setattr(memories[0], "adopt", adopt)
            with pytest.raises(LLMException, match=f"4096 bytes at {memory.ctypes.data:#x}: code -1") as caught:
                await api.do(register, desc, addresses(memory), [key])
        assert caught.value.status_code is LLMStatusCode.LLM_DEVICE_MEM_ERROR
        assert duo.engine_of(n.prompt).registry.entries() == []
        made = await api.do(register, desc, addresses(memory), [key])  # the key was not taken
        assert made.cache_id > 0


@each_path
@each_face
async def test_6_5_an_address_where_nothing_is_is_named_with_its_size_by_the_first_call_that_uses_it(
    path: str, api: Api
) -> None:
    """Not later as a failed transfer, and never as a wrong payload. Either end."""
    good = np.ones((1, 8192), np.uint8)
    desc = CacheDesc(1, [1, 8192], U8)
    text = r"no memory at the address given for tensor 0 \(0x1000, 8192 bytes\)"
    async with nodes(api, path) as n:
        ours, theirs = n.decoder.cache_manager, n.prompt.cache_manager
        for number, (source, into) in enumerate([([4096], addresses(good)), (addresses(good), [4096])]):
            key = CacheKey(duo.PROMPT, number)
            kept = await api.do(theirs.register_cache, desc, source, [key])
            cache = await api.do(ours.register_cache, desc, into)
            with pytest.raises(LLMException, match=text) as caught:
                await api.do(ours.pull_cache, key, cache, tensor_num_per_layer=1)
            assert caught.value.status_code is INVALID
            del kept


@each_path
@pytest.mark.parametrize("shift", [0, 1, 7, 64, 4095])
async def test_6_7_memory_of_any_alignment_is_right(path: str, shift: int) -> None:
    """No rule of a device holds here, so none is found out after the link was made."""
    room, into = content(5, 0, 0, nbytes=3 * PAGE).copy(), np.full(3 * PAGE, CANARY, np.uint8)
    desc = CacheDesc(1, [1, PAGE], U8)
    async with nodes(AWAITED, path) as n:
        key = CacheKey(duo.PROMPT, 1)
        kept = await n.prompt.cache_manager.register_cache(desc, [room.ctypes.data + shift], [key])
        cache = await n.decoder.cache_manager.register_cache(desc, [into.ctypes.data + shift])
        await n.decoder.cache_manager.pull_cache(key, cache, tensor_num_per_layer=1)
        expected = np.full(3 * PAGE, CANARY, np.uint8)
        expected[shift : shift + PAGE] = room[shift : shift + PAGE]
        assert np.array_equal(into, expected)
        del kept


# -- 6.8, 6.9, 6.12: memory in use -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*was dropped without:ResourceWarning")
@each_path
async def test_6_8_everything_dropped_in_the_middle_of_a_transfer_crashes_nothing(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The task, the destination, its arrays: the memory lives until the transfer has ended."""
    memories, copies = gated_memories(monkeypatch, after=1), gated_copies(monkeypatch)
    async with nodes(AWAITED, path) as n:
        await n.publish(duo.BIG)
        gate = copies if path == "shm" else memories[1].landing_gate
        gate.close()
        manager = n.decoder.kv_cache_manager
        cache = await manager.allocate_cache(duo.BIG)
        task: Any = begin(manager.pull_cache(CacheKey(duo.PROMPT, 0), cache))
        await gate.reached()
        registry = duo.engine_of(n.decoder).registry
        task.cancel()
        del cache, task
        gc.collect()
        assert [entry.busy for entry in registry.entries()] == [True]
        gate.open()
        await eventually(lambda: not held(n.decoder), lambda: repr(held(n.decoder)))
        await n.check_right(duo.BIG)


@each_face
async def test_6_9_what_an_engine_still_writes_after_a_timeout_is_told_and_counted(
    monkeypatch: pytest.MonkeyPatch, api: Api
) -> None:
    """A path that cannot be stopped: its destination is not given back as if it were free."""
    stubborn_inproc(monkeypatch)
    memories = gated_memories(monkeypatch, after=1)
    with event_log() as log:
        async with nodes(api, "inproc", settle_timeout=50) as n:
            await n.publish(duo.BIG)
            cache, gate = await n.destination(duo.BIG), memories[1].landing_gate
            gate.close()
            error = await n.fails(cache, timeout=200)
            assert error.destination_unsafe
            assert not error.retry_safe
            assert cache.quarantined
            assert n.decoder.counters["regions_quarantined"] == 1
            await api.until(lambda: len(log.named("region.quarantined", cache_id=cache.cache_id)) == 1)
            with pytest.raises(LLMException) as caught:
                await api.do(n.decoder.kv_cache_manager.deallocate_cache, cache)
            assert caught.value.destination_unsafe, "its memory was given back while it is written"
            gate.open()
            await api.until(lambda: not cache.quarantined)
            await n.check_right(duo.BIG)


@each_path
@each_face
async def test_6_12_memory_taken_back_during_a_pull_is_read_no_more_when_that_returns(
    monkeypatch: pytest.MonkeyPatch, path: str, api: Api
) -> None:
    """With the link up. What the pull delivers is what was registered, or it fails; never what came there later."""
    memories, copies = gated_memories(monkeypatch, after=1), gated_copies(monkeypatch)
    source = np.stack([content(6, tensor, 0, nbytes=3 << 20) for tensor in range(2)])
    right, desc = source.copy(), CacheDesc(2, [1, 3 << 20], U8)
    async with nodes(api, path, settle_timeout=300) as n:
        key = CacheKey(duo.PROMPT, 1)
        made = await api.do(n.prompt.cache_manager.register_cache, desc, addresses(source), [key])
        cache = await n.destination(desc)
        gate = copies if path == "shm" else memories[0].lending_gate
        gate.close()
        running = api.start(lambda: api.do(n.decoder.kv_cache_manager.pull_cache, key, cache, timeout=5000))
        await api.until(lambda: gate.held > 0)
        taken = api.start(lambda: api.do(n.prompt.cache_manager.unregister_cache, made.cache_id))
        registry = duo.engine_of(n.prompt).registry
        await api.until(lambda: registry.local(made.cache_id) is None)  # the release has begun
        error = await pulled_or_error(running, taken, gate, source)
        if error is None:
            assert np.array_equal(np.stack([array[0] for array in duo.arrays(cache)]), right)
        else:
            assert isinstance(error, LLMException), error
            assert not error.destination_unsafe


async def pulled_or_error(running: Any, taken: Any, gate: Any, source: Any) -> Any:
    """How the pull ended, after the memory had been taken back and overwritten."""
    gate.open()
    outcome = await taken.outcome()
    assert outcome is None, outcome
    source[:] = SPOILT
    return await running.outcome()


@each_path
async def test_6_12_caches_are_registered_after_the_link_and_as_many_as_one_likes(path: str) -> None:
    """Neither the order nor a number of addresses is asked for: 300 of them, taken back with the link up."""
    memory = np.stack([content(7, number, 0, nbytes=512) for number in range(300)])
    async with nodes(AWAITED, path) as n:
        manager = n.prompt.cache_manager
        made = [
            await manager.register_cache(CacheDesc(1, [1, 512], U8), [row.ctypes.data], [CacheKey(duo.PROMPT, number)])
            for number, row in enumerate(memory)
        ]
        for number in (0, 150, 299):
            assert np.array_equal(await pulled(n, number, 512), memory[number])
            await manager.unregister_cache(made[number].cache_id)
            cache = await n.destination(CacheDesc(1, [1, 512], U8))
            pull = n.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, number), cache, tensor_num_per_layer=1)
            error = await outcome(begin(pull))
            assert isinstance(error, LLMException)
            assert error.status_code is MISSING


# -- 6.11: what cannot be registered here ------------------------------------------------------------------------------

ENGINES = """
import sys
from kvpull_sync import LLMConfig, LLMDataDist, LLMException, LLMRole
for name, value in (("transfer_backend", "nixl"), ("transfer_backend", "mooncake"), ("device_backend", "acl")):
    config = LLMConfig()
    setattr(config, name, value)
    node = LLMDataDist(LLMRole.MIX, 1)
    try:
        node.init(config.generate_options())
    except LLMException as error:
        print(error.status_code.name, value in str(error))
print(any(name.split(".")[0] in ("nixl", "mooncake", "torch", "torch_npu", "acl") for name in sys.modules))
"""


def test_6_11_device_memory_and_engines_that_are_not_there_are_refused_by_init() -> None:
    """Not by the first registration or transfer, and without loading anything to find out."""
    done = subprocess.run([sys.executable, "-c", ENGINES], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["LLM_FEATURE_NOT_ENABLED True"] * 3 + ["False"]


@each_path
async def test_6_11_memory_that_is_called_device_memory_works_where_there_is_no_device(path: str) -> None:
    source, into = content(8, 0, 0, nbytes=8192).copy(), np.zeros(8192, np.uint8)
    desc = CacheDesc(1, [2, 4096], U8, Placement.DEVICE)
    async with nodes(AWAITED, path) as n:
        key = BlocksCacheKey(duo.PROMPT, 0)
        kept = await n.prompt.cache_manager.register_blocks_cache(desc, [source.ctypes.data], key)
        cache = await n.decoder.cache_manager.register_blocks_cache(desc, [into.ctypes.data])
        await n.decoder.cache_manager.pull_blocks(key, cache, [0, 1], [1, 0], tensor_num_per_layer=1)
        assert np.array_equal(into, np.roll(source, 4096))
        del kept
