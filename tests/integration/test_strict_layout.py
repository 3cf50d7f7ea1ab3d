"""`strict_layout`: for callers who want more than the right number of bytes."""

from __future__ import annotations

import asyncio

import pytest

from kvpull_async import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMException,
    LLMStatusCode,
)
from tests import duo
from tests.integration.own_loop import outcome

HALF = CacheDesc(4, [4, 2, 256], DataType.DT_FLOAT16)
OTHER_TYPE = CacheDesc(4, [4, 2, 256], DataType.DT_BF16)
OTHER_SHAPE = CacheDesc(4, [4, 4, 128], DataType.DT_FLOAT16)
FEWER_ENTRIES = CacheDesc(4, [2, 2, 256], DataType.DT_FLOAT16)


@pytest.mark.parametrize("path", ["inproc", "shm", "tcp"])
@pytest.mark.parametrize("remote", [False, True], ids=["by key", "remote access"])
async def test_a_layout_that_differs_is_refused_and_nothing_else_happens(path: str, remote: bool) -> None:
    properties = {"enable_cache_manager": True, "enable_remote_cache_accessible": remote}
    async with duo.duo(transport=path, **properties) as pair:
        source = await pair.prompt.cache_manager.allocate_cache(HALF, duo.keys(HALF))
        duo.fill(source)
        manager = pair.decoder.cache_manager
        key = CacheKeyByIdAndIndex(duo.PROMPT, source.cache_id, 1) if remote else CacheKey(duo.PROMPT, 1)
        for desc in (OTHER_TYPE, OTHER_SHAPE):
            cache = await manager.allocate_cache(desc)
            for _ in range(2):
                error = await outcome(asyncio.ensure_future(manager.pull_cache(key, cache, strict_layout=True)))
                assert isinstance(error, LLMException)
                assert error.status_code is LLMStatusCode.LLM_PARAM_INVALID
                assert "strict_layout" in str(error)
                assert "DT_FLOAT16" in str(error)
                assert not error.retry_safe
            assert duo.untouched(cache)
        cache = await manager.allocate_cache(FEWER_ENTRIES)
        await manager.pull_cache(key, cache, 1, strict_layout=True)  # the key is there still
        assert duo.holds(cache, entry=1, source=1)


async def test_without_it_bytes_count() -> None:
    async with duo.duo() as pair:
        duo.fill(await pair.prompt.cache_manager.allocate_cache(HALF, duo.keys(HALF)))
        cache = await pair.decoder.cache_manager.allocate_cache(OTHER_TYPE)
        await pair.decoder.cache_manager.pull_cache(CacheKey(duo.PROMPT, 1), cache)
        assert duo.holds(cache, entry=0, source=1)


async def test_blocks_compare_blocks_and_slices_only_types() -> None:
    async with duo.duo() as pair:
        prompt, decoder = pair.prompt.cache_manager, pair.decoder.cache_manager
        await prompt.allocate_blocks_cache(HALF, BlocksCacheKey(duo.PROMPT))
        await prompt.allocate_cache(CacheDesc(4, [1, 4, 2, 256], DataType.DT_FLOAT16), [CacheKey(duo.PROMPT, 1)])
        same, other = await decoder.allocate_blocks_cache(HALF), await decoder.allocate_blocks_cache(OTHER_TYPE)
        await decoder.pull_blocks(BlocksCacheKey(duo.PROMPT), same, [0], [1], strict_layout=True)
        for key, blocks in ((BlocksCacheKey(duo.PROMPT), [0]), (CacheKey(duo.PROMPT, 1), [])):
            error = await outcome(
                asyncio.ensure_future(decoder.pull_blocks(key, other, blocks, [1], strict_layout=True))
            )
            assert isinstance(error, LLMException)
            assert error.status_code is LLMStatusCode.LLM_PARAM_INVALID
        await decoder.pull_blocks(CacheKey(duo.PROMPT, 1), same, [], [3, 2], strict_layout=True)


async def test_it_is_true_or_false() -> None:
    async with duo.duo() as pair:
        cache = await pair.destination()
        with pytest.raises(TypeError, match="strict_layout"):
            await pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 1), cache, strict_layout="yes")
