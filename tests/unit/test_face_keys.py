"""Keys of caches that are there, awaitable: the documented calls, in both managers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvpull_async import CacheKey, LLMException, LLMStatusCode
from tests.duo import PROMPT, SMALL, Duo, duo, fill, holds
from tests.loop_nodes import eventually

MISSING = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
MANAGERS = pytest.mark.parametrize("name", ["kv_cache_manager", "cache_manager"])


async def published(pair: Duo, name: str, *numbers: int, **options: Any) -> None:
    manager = getattr(pair.prompt, name)
    cache = await manager.allocate_cache(SMALL)
    pair.kept.append(cache)
    fill(cache)
    assert await manager.publish_cache(cache, [CacheKey(PROMPT, number) for number in numbers], **options) is None


@pytest.mark.smoke
@MANAGERS
async def test_published_kept_pulled_and_given_up(name: str) -> None:
    async with duo() as pair:
        await published(pair, name, 1, 4, lease=60_000)
        await published(pair, name, 2, lease=1)
        await published(pair, name, 3)
        manager, cache = getattr(pair.decoder, name), await getattr(pair.decoder, name).allocate_cache(SMALL)
        await manager.renew_key(CacheKey(PROMPT, 1), 120_000, timeout=20_000)
        await getattr(pair.prompt, name).renew_key(CacheKey(PROMPT, 4), 1)  # a peer only puts an end off
        await eventually(lambda: pair.prompt.counters.get("keys_expired") == 2)
        await manager.pull_cache(CacheKey(PROMPT, 1), cache)
        assert holds(cache, entry=0, source=0)
        assert await manager.release_key(CacheKey(PROMPT, 3), timeout=20_000) is None
        for number in (1, 2, 3, 4):
            with pytest.raises(LLMException) as caught:
                await manager.pull_cache(CacheKey(PROMPT, number), cache)
            assert caught.value.status_code == MISSING


@MANAGERS
async def test_what_is_removed_on_its_own_node_is_gone_at_once(name: str) -> None:
    async with duo() as pair:
        await published(pair, name, 1, 2)
        own, theirs = getattr(pair.prompt, name), getattr(pair.decoder, name)
        await own.remove_cache_key(CacheKey(PROMPT, 1))
        await own.remove_cache_key(CacheKey(PROMPT, 1))  # harmless
        await own.release_key(CacheKey(PROMPT, 2))
        for number in (1, 2):
            with pytest.raises(LLMException, match="released"):
                await theirs.release_key(CacheKey(PROMPT, number))


async def test_a_key_may_be_renewed_while_its_pull_runs_and_by_many_tasks() -> None:
    async with duo() as pair:
        await published(pair, "kv_cache_manager", *range(4), lease=60_000)
        manager, cache = pair.decoder.kv_cache_manager, await pair.destination()
        pulls = [manager.pull_cache(CacheKey(PROMPT, i), cache, i, src_cache_offset=0) for i in range(4)]
        renewals = [manager.renew_key(CacheKey(PROMPT, i % 4), 60_000) for i in range(100)]
        assert set(await asyncio.gather(*pulls, *renewals)) == {None}
