"""`pull_layers` into blocks: from blocks, and from a contiguous entry that is cut into them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpull_async import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMException, LLMStatusCode
from tests import duo

PATHS = ("inproc", "shm", "tcp")
LAYERS = 3
SIZES = {"inline": 256, "streamed": 256 * 1024}


def blocks_of(size: int) -> CacheDesc:
    return CacheDesc(2 * LAYERS, [8, size], DataType.DT_UINT8)


def number(cache: Any) -> None:
    """Each block with a byte of its own."""
    for tensor, array in enumerate(duo.arrays(cache)):
        array[:] = (1 + 8 * tensor + np.arange(len(array), dtype=np.uint8))[:, None]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", SIZES)
async def test_layers_of_blocks_come_in_order_and_whole(path: str, size: str) -> None:
    async with duo.duo(transport=path) as pair:
        desc, key = blocks_of(SIZES[size]), BlocksCacheKey(duo.PROMPT)
        source = await pair.prompt.cache_manager.allocate_blocks_cache(desc, key)
        number(source)
        manager = pair.decoder.cache_manager
        cache = await manager.allocate_blocks_cache(desc)
        src, dst, seen = [6, 0, 1, 5], [2, 3, 7, 0], []
        ranges: Any = {"src_layer_range": range(2), "dst_layer_range": range(1, 3)}
        async with manager.pull_layers(key, cache, src_blocks=src, dst_blocks=dst, **ranges) as layers:
            async for layer in layers:
                seen.append(layer)
                for tensor in (2 * layer, 2 * layer + 1):
                    assert (duo.arrays(cache)[tensor][dst] == duo.arrays(source)[tensor - 2][src]).all()
        assert seen == [1, 2]
        rest = [block for block in range(8) if block not in dst]
        assert not any(array[rest].any() for array in duo.arrays(cache))
        assert not any(array.any() for array in duo.arrays(cache)[:2])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", SIZES)
async def test_slices_of_an_entry_whose_last_block_is_partly_filled(path: str, size: str) -> None:
    async with duo.duo(transport=path) as pair:
        block = SIZES[size]
        held = 2 * block + block // 4
        desc = CacheDesc(2 * LAYERS, [2, held], DataType.DT_UINT8)
        source = await pair.prompt.cache_manager.allocate_cache(desc, duo.keys(desc))
        duo.fill(source)
        manager = pair.decoder.cache_manager
        cache = await manager.allocate_blocks_cache(blocks_of(block))
        seen = []
        async with manager.pull_layers(CacheKey(duo.PROMPT, 1), cache, dst_blocks=[4, 1, 6]) as layers:
            async for layer in layers:
                seen.append(layer)
                for tensor in (2 * layer, 2 * layer + 1):
                    landed = duo.arrays(cache)[tensor][[4, 1, 6]].reshape(-1)
                    assert (landed[:held] == duo.pattern(tensor, 1)).all()
                    assert not landed[held:].any()
        assert seen == list(range(LAYERS))
        with pytest.raises(LLMException) as caught:
            await manager.pull_cache(CacheKey(duo.PROMPT, 1), await manager.allocate_cache(desc))  # consumed
        assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


async def test_blocks_and_entries_are_not_mixed() -> None:
    async with duo.duo() as pair:
        manager = pair.decoder.cache_manager
        cache, key = await manager.allocate_blocks_cache(blocks_of(256)), BlocksCacheKey(duo.PROMPT)
        for wrong in ({"batch_index": 1}, {"size": 16}):
            with pytest.raises(LLMException) as caught:
                manager.pull_layers(key, cache, src_blocks=[0], dst_blocks=[0], **wrong)
            assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
        with pytest.raises(TypeError, match="src_cache_offset"):
            manager.pull_layers(key, cache, src_blocks=[0], dst_blocks=[0], src_cache_offset=0)
        with pytest.raises(TypeError, match="dst_blocks"):
            manager.pull_layers(key, cache, src_blocks=[0])


@pytest.mark.parametrize("remote_access", [False, True])
async def test_who_names_no_blocks_is_told_how(remote_access: bool) -> None:
    async with duo.duo(enable_remote_cache_accessible=remote_access) as pair:
        manager = pair.decoder.cache_manager
        cache = await manager.allocate_blocks_cache(blocks_of(256))
        with pytest.raises(TypeError, match=r"dst_blocks= \(and src_blocks="):
            manager.pull_layers(BlocksCacheKey(duo.PROMPT), cache)
        with pytest.raises(LLMException, match="blocks cache; for blocks give dst_blocks=") as caught:
            manager.pull_layers(CacheKey(duo.PROMPT, 1), cache)
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'dst_block'; allowed are .*dst_blocks"):
            manager.pull_layers(BlocksCacheKey(duo.PROMPT), cache, dst_block=[0])
