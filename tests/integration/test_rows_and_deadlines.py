"""What goes by the number of blocks and not by bytes: the event loops stay free, and the deadline counts all of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvpull_async import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.managers import checks
from kvpull_async.memory.base import FEW_ROWS
from tests import duo, npu

MANY = 60_000  # one-byte blocks: few bytes, so they ride on the grant
DESC = CacheDesc(1, [MANY, 1], DataType.DT_UINT8)


@pytest.fixture
async def pair() -> AsyncIterator[Any]:
    async with duo.duo(transport="tcp") as made:
        yield made


async def test_p6_many_tiny_blocks_are_put_in_place_off_the_loop(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the loop only what is a matter of few rows, on either side."""
    copied: list[str] = []
    here = {duo.engine_of(node).core._thread.name for node in (pair.prompt, pair.decoder)}
    for node in (pair.prompt, pair.decoder):
        backend = duo.engine_of(node).memory
        for name in ("landing", "lending"):
            made = getattr(backend, name)

            def watched(regions: Any, rows: Any, *, made: Any = made, **options: Any) -> Any:
                if len(rows) > FEW_ROWS:
                    copied.append(threading.current_thread().name)
                return made(regions, rows, **options)

            monkeypatch.setattr(backend, name, watched)
    source = await pair.prompt.cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(duo.PROMPT, 5))
    target = await pair.decoder.cache_manager.allocate_blocks_cache(DESC)
    npu.tensors(source)[0][:] = np.arange(MANY) % 251
    order = list(range(0, MANY, 2)) + list(range(1, MANY, 2))  # no two neighbours, so nothing merges
    await pair.decoder.cache_manager.pull_blocks(
        BlocksCacheKey(duo.PROMPT, 5), target, order, order[::-1], timeout=60_000
    )
    expected = np.zeros(MANY, np.uint8)
    expected[order[::-1]] = np.array(order) % 251
    assert np.array_equal(npu.tensors(target)[0], expected)
    assert len(copied) == 2
    assert not here & set(copied)
    await pair.prompt.cache_manager.deallocate_blocks_cache(source)
    await pair.decoder.cache_manager.deallocate_blocks_cache(target)


async def test_p3_checking_the_arguments_spends_the_deadline(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(draft: Any, src: object, dst: object, real: Any = checks.block_lists) -> None:
        time.sleep(0.3)
        real(draft, src, dst)

    monkeypatch.setattr(checks, "block_lists", slow)
    await pair.prompt.cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(duo.PROMPT, 5))
    target = await pair.decoder.cache_manager.allocate_blocks_cache(DESC)
    with pytest.raises(LLMTimeoutError, match="the deadline of 200 ms passed") as caught:
        await pair.decoder.cache_manager.pull_blocks(BlocksCacheKey(duo.PROMPT, 5), target, [0], [0], timeout=200)
    assert caught.value.elapsed_ms is not None
    assert caught.value.elapsed_ms >= 300


async def test_a_source_that_puts_more_on_the_grant_than_was_allowed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the puller would copy on its loop whatever a source chooses to send."""
    async with duo.duo(transport="tcp") as pair:
        await pair.publish(duo.BIG)
        cache = await pair.destination(duo.BIG)
        link = duo.engine_of(pair.decoder).links.find(duo.PROMPT)
        monkeypatch.setattr(link, "inline_limit", 1000)  # less than the request says
        with pytest.raises(LLMException) as caught:
            await pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 0), cache, 0, size=5000)
        assert caught.value.status_code == LLMStatusCode.LLM_LINK_FAILED
        assert duo.untouched(cache)
        monkeypatch.undo()
        await asyncio.wait_for(pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 0), cache), 60)
        assert duo.holds(cache, entry=0, source=0)


async def test_a_request_for_more_pieces_than_one_pull_may_have_is_refused(pair: Any) -> None:
    wide = CacheDesc(400, [2, 1], DataType.DT_UINT8)
    source = await pair.prompt.cache_manager.allocate_blocks_cache(wide, BlocksCacheKey(duo.PROMPT, 5))
    target = await pair.decoder.cache_manager.allocate_blocks_cache(wide)
    many = [1] * 50_000  # the same block again and again: nothing merges
    with pytest.raises(LLMException) as caught:
        await pair.decoder.cache_manager.pull_blocks(BlocksCacheKey(duo.PROMPT, 5), target, many, many, timeout=60_000)
    assert caught.value.status_code in (LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_LINK_FAILED)
    await pair.decoder.cache_manager.pull_blocks(BlocksCacheKey(duo.PROMPT, 5), target, [0], [1], timeout=60_000)
    await pair.prompt.cache_manager.deallocate_blocks_cache(source)
    await pair.decoder.cache_manager.deallocate_blocks_cache(target)
