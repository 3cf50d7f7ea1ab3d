"""`wait_for_key`: a decode node may ask before the prefill node has published, inside its deadline, in nobody's way."""

from __future__ import annotations

import asyncio
from typing import Any

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
from tests.integration.own_loop import outcome, within
from tests.loop_nodes import event_log, eventually

pytestmark = pytest.mark.smoke

PATHS = ("inproc", "shm", "tcp")
BLOCKS = CacheDesc(4, [8, 1024], DataType.DT_UINT8)


async def publish(pair: duo.Duo, desc: CacheDesc = duo.SMALL) -> None:
    """First the bytes, then the keys."""
    cache = await pair.prompt.kv_cache_manager.allocate_cache(desc)
    pair.kept.append(cache)
    duo.fill(cache)
    await pair.prompt.kv_cache_manager.publish_cache(cache, duo.keys(desc))


def waiting(node: Any) -> int:
    """Watches that peers have on a node's caches."""
    return sum(map(len, tuple(duo.engine_of(node).registry._watches.values())))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [duo.SMALL, duo.BIG], ids=["inline", "streamed"])
async def test_a_pull_asked_for_early_gets_what_is_published_later(path: str, size: CacheDesc) -> None:
    async with duo.duo(transport=path) as pair:
        cache = await pair.destination(size)
        pull = asyncio.ensure_future(
            pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 2), cache, wait_for_key=True)
        )
        await eventually(lambda: waiting(pair.prompt) == 1)
        assert not pull.done()
        await publish(pair, size)
        await within(pull)
        assert duo.holds(cache, entry=0, source=2)
        assert not waiting(pair.prompt)
        error = await outcome(
            asyncio.ensure_future(pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 2), cache))
        )
        assert isinstance(error, LLMException)
        assert error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST  # consumed, once


async def test_p5_it_waits_in_nobodys_way() -> None:
    async with duo.duo() as pair:
        first, cache = await pair.destination(), await pair.destination()
        manager = pair.decoder.kv_cache_manager
        early = [
            asyncio.ensure_future(manager.pull_cache(CacheKey(duo.PROMPT, 900 + i), first, wait_for_key=True))
            for i in range(100)
        ]
        await eventually(lambda: waiting(pair.prompt) == len(early))
        await publish(pair)
        await manager.pull_cache(CacheKey(duo.PROMPT, 1), cache)
        assert duo.holds(cache, entry=0, source=1)
        for pull in early:
            pull.cancel()
        await asyncio.wait(early)
        await eventually(lambda: waiting(pair.prompt) == 0)


@pytest.mark.parametrize("path", PATHS)
async def test_blocks_and_cache_ids_are_waited_for_too(path: str) -> None:
    async with duo.duo(transport=path) as pair:
        decoder, prompt = pair.decoder.cache_manager, pair.prompt.cache_manager
        blocks, cache = await decoder.allocate_blocks_cache(BLOCKS), await decoder.allocate_cache(duo.SMALL)
        by_blocks = asyncio.ensure_future(
            decoder.pull_blocks(BlocksCacheKey(duo.PROMPT, 7), blocks, [3, 1], [0, 5], wait_for_key=True)
        )
        by_id = asyncio.ensure_future(
            decoder.pull_cache(CacheKeyByIdAndIndex(duo.PROMPT, 1, 2), cache, wait_for_key=True)
        )
        await eventually(lambda: waiting(pair.prompt) == 2)
        source = await prompt.allocate_cache(duo.SMALL)
        await within(by_id)  # zeros, as the cache is when it appears
        paged = await prompt.allocate_blocks_cache(BLOCKS, BlocksCacheKey(duo.PROMPT, 7))
        await within(by_blocks)
        assert source.cache_id == 1
        assert paged.is_blocks_cache


async def test_many_who_wait_for_one_key_all_get_it(caplog: pytest.LogCaptureFixture) -> None:
    """More than may wait in the queue of the link: those who find it full have their turn later."""
    async with duo.duo(queue_limit=8) as pair:
        source = await pair.prompt.cache_manager.allocate_cache(duo.SMALL)
        duo.fill(source)
        caches = [await pair.destination() for _ in range(60)]
        prefix = CacheKey(duo.PROMPT, 2**64 - 1, 0, 5)
        manager = pair.decoder.kv_cache_manager
        pulls = [asyncio.ensure_future(manager.pull_cache(prefix, cache, wait_for_key=True)) for cache in caches[:8]]
        await eventually(lambda: waiting(pair.prompt) == 1)
        for cache in caches[8:]:
            pulls.append(asyncio.ensure_future(manager.pull_cache(prefix, cache, wait_for_key=True)))
            await eventually(lambda: pair.decoder.counters["pulls_started"] == len(pulls))
            await asyncio.sleep(0.002)
        await pair.prompt.cache_manager.publish_cache(source, [prefix])
        await within(asyncio.gather(*pulls))
        assert all(duo.holds(cache, entry=0, source=0) for cache in caches)


async def test_a_batch_entry_that_a_cache_does_not_have_is_not_asked_for_again_and_again() -> None:
    async with duo.duo() as pair:
        source = await pair.prompt.cache_manager.allocate_cache(duo.SMALL)
        cache = await pair.decoder.cache_manager.allocate_cache(duo.SMALL)
        key = CacheKeyByIdAndIndex(duo.PROMPT, source.cache_id, duo.SMALL.entries)
        pull = pair.decoder.cache_manager.pull_cache(key, cache, wait_for_key=True, timeout=300)
        with pytest.raises(TimeoutError, match=f"cache {source.cache_id}"):
            await pull
        assert pair.prompt.counters["serves_awaited"] == 1


async def test_p3_a_key_that_never_comes_ends_with_the_deadline() -> None:
    async with duo.duo() as pair:
        cache = await pair.destination()
        manager = pair.decoder.kv_cache_manager
        pull = asyncio.ensure_future(manager.pull_cache(CacheKey(duo.PROMPT, 1), cache, wait_for_key=True, timeout=150))
        error = await outcome(pull)
        assert isinstance(error, LLMException)
        assert error.status_code == LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
        assert isinstance(error, TimeoutError)
        assert "req_id 1 of model 0 had not been published" in str(error)
        assert error.retry_safe
        await eventually(lambda: waiting(pair.prompt) == 0)
        await publish(pair)
        await manager.pull_cache(CacheKey(duo.PROMPT, 1), cache)


@pytest.mark.parametrize("kind", ["id", "blocks"])
async def test_the_timeout_says_what_was_waited_for(kind: str) -> None:
    async with duo.duo() as pair:
        manager = pair.decoder.cache_manager
        if kind == "id":
            cache, key = await manager.allocate_cache(duo.SMALL), CacheKeyByIdAndIndex(duo.PROMPT, 41, 2)
            early = manager.pull_cache(key, cache, wait_for_key=True, timeout=100)
        else:
            cache = await manager.allocate_blocks_cache(BLOCKS)
            early = manager.pull_blocks(BlocksCacheKey(duo.PROMPT, 7), cache, [0], [0], wait_for_key=True, timeout=100)
        error = await outcome(asyncio.ensure_future(early))
        what = {"id": "cache 41 with batch entry 2", "blocks": "a blocks cache of model 7"}[kind]
        assert f"{what} had not been published" in str(error)


async def test_p9_a_wait_is_no_failure_of_the_source_and_its_time_is_told() -> None:
    async with duo.duo() as pair:
        cache = await pair.destination()
        manager = pair.decoder.kv_cache_manager
        with event_log() as events:
            with pytest.raises(LLMException):
                await manager.pull_cache(CacheKey(duo.PROMPT, 1), cache, wait_for_key=True, timeout=150)
            (failed,) = events.named("pull.failed", text="req_id 1 of model 0")
            assert failed["key"] == "request:1:0"
            assert 0 < failed["wait_ms"] <= failed["elapsed_ms"]
            pull = asyncio.ensure_future(manager.pull_cache(CacheKey(duo.PROMPT, 1), cache, wait_for_key=True))
            await eventually(lambda: waiting(pair.prompt) == 1)
            await publish(pair)
            await within(pull)
            (finished,) = events.named("pull.finished")
            assert finished["wait_ms"] > 0
            awaited = await events.first("serve.awaited", pull_id=finished["pull_id"])
            assert awaited["key"] == "request:1:0"
            assert not events.named("serve.refused")
        counted = pair.prompt.counters
        assert counted["serves_awaited"] == 2
        assert "serves_refused" not in counted


async def test_without_it_a_missing_key_is_an_error_at_once() -> None:
    async with duo.duo() as pair:
        cache = await pair.destination()
        error = await outcome(
            asyncio.ensure_future(pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 1), cache))
        )
        assert isinstance(error, LLMException)
        assert error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        with pytest.raises(TypeError, match="wait_for_key"):
            await pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 1), cache, wait_for_key=1)


async def test_a_destination_released_while_it_waits_ends_it() -> None:
    async with duo.duo() as pair:
        manager = pair.decoder.kv_cache_manager
        cache = await manager.allocate_cache(duo.SMALL)
        pull = asyncio.ensure_future(manager.pull_cache(CacheKey(duo.PROMPT, 1), cache, wait_for_key=True))
        await eventually(lambda: waiting(pair.prompt) == 1)
        await manager.deallocate_cache(cache)
        await publish(pair)
        error = await outcome(pull)
        assert isinstance(error, LLMException)
        assert error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


async def test_p4_a_connection_lost_while_it_waits_is_made_anew() -> None:
    async with duo.duo() as pair:
        cache = await pair.destination()
        pull = asyncio.ensure_future(
            pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 0), cache, wait_for_key=True)
        )
        await eventually(lambda: waiting(pair.prompt) == 1)
        engine = duo.engine_of(pair.decoder)
        (link,) = engine.links.all()
        engine.core.loop.call_soon_threadsafe(link._lanes[0].abort, "cut by the test")
        await eventually(lambda: pair.decoder.counters.get("reconnects", 0) == 1 and waiting(pair.prompt) == 1)
        await publish(pair)
        await within(pull)
        assert duo.holds(cache, entry=0, source=0)


@pytest.mark.parametrize("end", ["unlink", "finalize", "finalize the source"])
async def test_what_ends_a_link_ends_who_waits_on_it(end: str) -> None:
    async with duo.duo() as pair:
        cache = await pair.destination()
        pull = asyncio.ensure_future(
            pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 0), cache, wait_for_key=True)
        )
        await eventually(lambda: waiting(pair.prompt) == 1)
        if end == "unlink":
            await pair.decoder.unlink_clusters([duo.cluster(duo.PROMPT, pair.prompt.listen_address)], 5000)
        elif end == "finalize":
            pair.kept.clear()
            await pair.decoder.finalize()
        else:
            await pair.prompt.finalize()
        error = await outcome(pull)
        assert isinstance(error, LLMException)
        expected = {
            "unlink": {LLMStatusCode.LLM_NOT_YET_LINK},
            "finalize": {LLMStatusCode.LLM_ENGINE_FINALIZED},
            "finalize the source": {LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_NOT_YET_LINK},
        }
        assert error.status_code in expected[end]


@pytest.mark.parametrize("path", PATHS)
async def test_layers_may_be_waited_for(path: str) -> None:
    async with duo.duo(transport=path) as pair:
        cache = await pair.destination(duo.BIG)
        manager = pair.decoder.kv_cache_manager
        seen = []

        async def pull() -> None:
            async with manager.pull_layers(CacheKey(duo.PROMPT, 1), cache, wait_for_key=True) as layers:
                async for layer in layers:
                    seen.append(layer)  # noqa: PERF401  (it is the iteration that is looked at)

        pulling = asyncio.ensure_future(pull())
        await eventually(lambda: waiting(pair.prompt) == 1)
        await publish(pair, duo.BIG)
        await within(pulling)
        assert seen == [0, 1]
        assert duo.holds(cache, entry=0, source=1)
