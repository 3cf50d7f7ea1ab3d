"""Tensors of torch as a cache's memory, and a cache's memory as tensors of torch: by address, directly, and back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from kvpull_async import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)
from kvpull_sync import LLMDataDist as BlockingDataDist
from tests.duo import DECODER, OK, PROMPT, TIMEOUT_MS, cluster, duo, options
from tests.loop_nodes import eventually
from tests.torch_cpu import torch_cpu

torch = torch_cpu()

TRANSPORTS = ["inproc", "tcp", "shm"]
TYPES = {
    DataType.DT_FLOAT: torch.float32,
    DataType.DT_FLOAT16: torch.float16,
    DataType.DT_BF16: torch.bfloat16,
    DataType.DT_INT8: torch.int8,
    DataType.DT_INT32: torch.int32,
    DataType.DT_UINT8: torch.uint8,
}
BLOCKS, ROW = 8, 96


def numbered(kind: DataType, seed: int, blocks: int = BLOCKS) -> Any:
    """A tensor of random bits, so of every value that the type has, those that are no number included."""
    bits = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (blocks, ROW * kind.nbytes), np.uint8))
    return bits.view(TYPES[kind])


def same(left: Any, right: Any) -> bool:
    return bool(torch.equal(left.view(torch.uint8), right.view(torch.uint8)))


def descriptor(kind: DataType, tensors: int = 2) -> CacheDesc:
    return CacheDesc(tensors, torch.zeros(BLOCKS, ROW).shape, kind)  # a torch.Size is a tuple


# -- registered --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", TYPES)
async def test_tensors_of_every_type_are_pulled_bit_by_bit(transport: str, kind: DataType) -> None:
    """The source's by address and the puller's directly, then the other way round."""
    theirs, ours = [numbered(kind, 1), numbered(kind, 2)], [numbered(kind, 3), numbered(kind, 4)]
    desc, before = descriptor(kind), [tensor.clone() for tensor in ours]
    async with duo(transport=transport, enable_cache_manager=True) as pair:
        source, puller = pair.prompt.cache_manager, pair.decoder.cache_manager
        await source.register_blocks_cache(desc, [tensor.data_ptr() for tensor in theirs], BlocksCacheKey(PROMPT, 0))
        held = await puller.register_blocks_cache(desc, blocks_cache_key=BlocksCacheKey(DECODER, 0), tensors=ours)
        assert held.tensor_addrs == [tensor.data_ptr() for tensor in ours]
        assert all(map(same, ours, before))
        await puller.pull_blocks(BlocksCacheKey(PROMPT, 0), held, [1, 2, 7], [5, 6, 0])
        for tensor, untouched, original in zip(ours, before, theirs, strict=True):
            expected = untouched.clone()
            expected[[5, 6, 0]] = original[[1, 2, 7]]
            assert same(tensor, expected)
        copies = [torch.zeros_like(tensor) for tensor in theirs]
        back = await source.register_blocks_cache(desc, [tensor.data_ptr() for tensor in copies])
        await source.pull_blocks(BlocksCacheKey(DECODER, 0), back, list(range(BLOCKS)), list(range(BLOCKS)))
        assert all(map(same, copies, ours))
        for manager, cache in ((puller, held), (source, back)):
            await manager.unregister_cache(cache.cache_id)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_batch_entries_of_tensors_and_of_arrays_are_pulled(transport: str) -> None:
    kind = DataType.DT_BF16
    theirs = [numbered(kind, 1), numbered(kind, 2)]
    ours = [np.zeros((BLOCKS, ROW), np.uint16) for _ in range(2)]
    async with duo(transport=transport, enable_cache_manager=True) as pair:
        keys = [CacheKey(PROMPT, number) for number in range(BLOCKS)]
        await pair.prompt.cache_manager.register_cache(descriptor(kind), cache_keys=keys, tensors=theirs)
        held = await pair.decoder.cache_manager.register_cache(descriptor(kind), tensors=ours)
        await pair.decoder.cache_manager.pull_cache(keys[3], held, 6)
        for array, tensor in zip(ours, theirs, strict=True):
            assert same(torch.from_numpy(array[6]).view(torch.bfloat16), tensor[3])
            assert not array[:6].any()
            assert not array[7:].any()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_registered_tensor_stays_though_its_caller_drops_it(transport: str) -> None:
    kind = DataType.DT_FLOAT16
    memory = np.random.default_rng(5).integers(0, 256, (BLOCKS, ROW * 2), np.uint8)
    expected, gone = torch.from_numpy(memory.copy()).view(torch.float16), weakref.ref(memory)
    tensor = torch.from_numpy(memory).view(torch.float16)
    ours = torch.zeros(BLOCKS, ROW, dtype=torch.float16)
    async with duo(transport=transport, enable_cache_manager=True) as pair:
        source, puller = pair.prompt.cache_manager, pair.decoder.cache_manager
        key = CacheKey(PROMPT, 1)
        offered = await source.register_cache(descriptor(kind, 1), cache_keys=[key], tensors=[tensor])
        held = await puller.register_cache(descriptor(kind, 1), tensors=[ours])
        del memory, tensor
        gc.collect()
        await puller.pull_cache(key, held)
        assert same(ours[0], expected[0])
        assert gone() is not None
        await source.unregister_cache(offered.cache_id)

        def collected() -> bool:
            gc.collect()
            return gone() is None

        await eventually(collected)  # a peer on shared memory may still have to forget it


async def test_what_cannot_be_registered_leaves_nothing_behind() -> None:
    desc = descriptor(DataType.DT_BF16, 1)
    tensor = torch.zeros(ROW, BLOCKS, dtype=torch.bfloat16).t()
    async with LLMDataDist(LLMRole.PROMPT, PROMPT) as node:
        await node.init(options(enable_cache_manager=True))
        manager = node.cache_manager
        for register in (manager.register_cache, manager.register_blocks_cache):
            with pytest.raises(LLMException, match=r"tensors\[0\] is not contiguous") as caught:
                await register(desc, tensors=[tensor])
            assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
        cache = await manager.register_cache(desc, tensors=[tensor.contiguous()])
        assert cache.cache_id == 1


def test_the_blocking_api_takes_them_too() -> None:
    kind = DataType.DT_BF16
    theirs, ours = numbered(kind, 1), torch.zeros(BLOCKS, ROW, dtype=torch.bfloat16)
    with BlockingDataDist(LLMRole.PROMPT, PROMPT) as source, BlockingDataDist(LLMRole.DECODER, DECODER) as puller:
        source.init(options(listen=True, enable_cache_manager=True))
        puller.init(options(enable_cache_manager=True))
        source.cache_manager.register_blocks_cache(
            descriptor(kind, 1), blocks_cache_key=BlocksCacheKey(PROMPT, 0), tensors=[theirs]
        )
        held = puller.cache_manager.register_blocks_cache(descriptor(kind, 1), tensors=[ours])
        assert puller.link_clusters([cluster(PROMPT, source.listen_address)], TIMEOUT_MS) == (OK, [OK])
        puller.cache_manager.pull_blocks(BlocksCacheKey(PROMPT, 0), held, list(range(BLOCKS)), list(range(BLOCKS)))
        assert same(ours, theirs)


# -- allocated ---------------------------------------------------------------------------------------------------------


def as_torch(manager: Any, cache: Any, index: int, kind: DataType) -> Any:
    (tensor,) = manager.get_cache_tensors(cache, index)
    return torch.from_dlpack(tensor).view(TYPES[kind])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", TYPES)
async def test_a_cache_is_written_and_read_through_torch(transport: str, kind: DataType) -> None:
    contents = [numbered(kind, 1), numbered(kind, 2)]
    async with duo(transport=transport) as pair:
        source, puller = pair.prompt.kv_cache_manager, pair.decoder.kv_cache_manager
        filled = await source.allocate_cache(descriptor(kind), [CacheKey(PROMPT, 1)])
        held = await puller.allocate_cache(descriptor(kind))
        seen = [as_torch(puller, held, index, kind) for index in range(2)]
        for index, tensor in enumerate(contents):
            as_torch(source, filled, index, kind)[...] = tensor
        await puller.pull_cache(CacheKey(PROMPT, 1), held, 4)
        for view, tensor in zip(seen, contents, strict=True):
            assert same(view[4], tensor[0])
            assert not view.view(torch.uint8)[:4].any()
        for manager, cache in ((source, filled), (puller, held)):
            await manager.deallocate_cache(cache)


async def test_torch_keeps_the_memory_of_a_cache_that_is_gone() -> None:
    kind = DataType.DT_FLOAT
    async with LLMDataDist(LLMRole.PROMPT, PROMPT) as node:
        await node.init(options())
        manager = node.kv_cache_manager
        cache = await manager.allocate_cache(descriptor(kind))
        view = as_torch(manager, cache, 1, kind)
        view.fill_(1.5)
        await manager.deallocate_cache(cache)
        del cache
        gc.collect()
        others = [await manager.allocate_cache(descriptor(kind)) for _ in range(20)]
        assert (view == 1.5).all()
        view.fill_(2.5)
        assert not any(as_torch(manager, other, index, kind).any() for other in others for index in range(2))
        for other in others:
            await manager.deallocate_cache(other)
    assert (view == 2.5).all()


async def test_small_pulls_without_asking_land_in_registered_tensors() -> None:
    """The first ones ask, the later ones are done on the caller's thread: a cache is looked at before its first use."""
    kind = DataType.DT_FLOAT16
    theirs = numbered(kind, 1)
    properties = {"transport": "shm", "local_comm_res": ""}
    async with duo(**properties) as pair:
        offered = await pair.prompt.cache_manager.register_cache(descriptor(kind, 1), tensors=[theirs])
        for _ in range(3):
            ours = torch.zeros(BLOCKS, ROW, dtype=torch.float16)
            held = await pair.decoder.cache_manager.register_cache(descriptor(kind, 1), tensors=[ours])
            for entry in range(BLOCKS):
                key = CacheKeyByIdAndIndex(PROMPT, offered.cache_id, entry)
                await pair.decoder.cache_manager.pull_cache(key, held, entry)
            assert same(ours, theirs)
            await pair.decoder.cache_manager.unregister_cache(held.cache_id)
