"""Many pulls at once: one link serves them one after another in their order, links do not wait for each other, queues
are bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvpull_async import CacheDesc, CacheKey, DataType, KvCache, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from kvpull_async.testing.faults import GatedMemory
from tests import duo
from tests.integration.own_loop import outcome, within

PATHS = ("tcp", "inproc", "shm")
PULLS = 100
KINDS = {
    "inline": CacheDesc(2, [PULLS, 512], DataType.DT_UINT8),
    "streamed": CacheDesc(2, [PULLS, 64 * 1024], DataType.DT_UINT8),
}
DECODER = 100


@contextlib.asynccontextmanager
async def star(links: int, transport: str, **properties: Any) -> AsyncIterator[tuple[LLMDataDist, list[LLMDataDist]]]:
    """A decoder linked to as many prompt nodes, of cluster ids 1 and up."""
    async with contextlib.AsyncExitStack() as stack:
        prompts = [
            await stack.enter_async_context(
                duo.node(LLMRole.PROMPT, 1 + i, listen=True, transport=transport, **properties)
            )
            for i in range(links)
        ]
        decoder = await stack.enter_async_context(duo.node(LLMRole.DECODER, DECODER, transport=transport, **properties))
        infos = [duo.cluster(1 + i, prompt.listen_address) for i, prompt in enumerate(prompts)]
        assert duo.codes(await decoder.link_clusters(infos, duo.TIMEOUT_MS)) == ["LLM_SUCCESS"] * (1 + links)
        yield decoder, prompts


async def publish(prompt: LLMDataDist, desc: CacheDesc) -> KvCache:
    """A cache with a key for each entry; every byte tells its cluster, its tensor and its entry. Keep the handle."""
    keys = [CacheKey(prompt.cluster_id, entry) for entry in range(desc.entries)]
    cache = await prompt.kv_cache_manager.allocate_cache(desc, keys)
    for tensor, array in enumerate(duo.arrays(cache)):
        for entry, row in enumerate(array):
            row[:] = content(prompt.cluster_id, tensor, entry, row.size)
    return cache


def content(cluster_id: int, tensor: int, entry: int, nbytes: int) -> Any:
    return (np.arange(nbytes, dtype=np.uint32) * 31 + cluster_id * 7 + tensor * 101 + entry).astype(np.uint8)


@pytest.mark.parametrize("transport", PATHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("links", [1, 8])
async def test_p5_a_hundred_pulls_at_once_are_right_and_in_order_on_each_link(
    transport: str, kind: str, links: int
) -> None:
    desc = KINDS[kind]
    async with star(links, transport) as (decoder, prompts):
        kept = [await publish(prompt, desc) for prompt in prompts]
        kept.append(cache := await decoder.kv_cache_manager.allocate_cache(desc))
        ended: list[int] = []

        async def pull(number: int) -> None:
            key = CacheKey(1 + number % links, number)
            await decoder.kv_cache_manager.pull_cache(key, cache, number)
            ended.append(number)

        await within(asyncio.gather(*(pull(number) for number in range(PULLS))))
        for link in range(links):
            on_link = [number for number in ended if number % links == link]
            assert on_link == sorted(on_link), "pulls on one link overtook each other"
        for tensor, array in enumerate(duo.arrays(cache)):
            for entry, row in enumerate(array):
                assert np.array_equal(row, content(1 + entry % links, tensor, entry, row.size)), (tensor, entry)
        infos = [duo.cluster(prompt.cluster_id, prompt.listen_address) for prompt in prompts]
        await decoder.unlink_clusters(infos, duo.TIMEOUT_MS, raise_on_error=True)  # the last DONE has been heard then
        for prompt in prompts:
            assert prompt.counters["keys_consumed"] == len(range(prompt.cluster_id - 1, PULLS, links))


@pytest.mark.parametrize("transport", PATHS)
async def test_p5_pulls_from_many_loops_and_threads_are_right(transport: str) -> None:
    desc = KINDS["inline"]
    async with star(1, transport) as (decoder, prompts):
        kept = [await publish(prompts[0], desc)]
        kept.append(cache := await decoder.kv_cache_manager.allocate_cache(desc))
        errors: list[BaseException] = []

        async def some(first: int) -> None:
            pulls = (
                decoder.kv_cache_manager.pull_cache(CacheKey(1, number), cache, number)
                for number in range(first, PULLS, 5)
            )
            errors.extend(error for error in await asyncio.gather(*pulls, return_exceptions=True) if error is not None)

        threads = [threading.Thread(target=asyncio.run, args=(some(first),)) for first in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await within(asyncio.to_thread(thread.join, 15))
        assert not errors
        for tensor, array in enumerate(duo.arrays(cache)):
            for entry, row in enumerate(array):
                assert np.array_equal(row, content(1, tensor, entry, row.size))


@pytest.mark.parametrize("transport", PATHS)
async def test_p5_a_link_whose_peer_is_silent_delays_no_other(transport: str) -> None:
    desc = KINDS["inline"]
    async with star(2, transport, heartbeat_timeout=60_000) as (decoder, prompts):
        kept = [await publish(prompt, desc) for prompt in prompts]
        manager = decoder.kv_cache_manager
        kept.append(cache := await manager.allocate_cache(desc))
        with duo.frozen(prompts[0]):
            stuck = [asyncio.ensure_future(manager.pull_cache(CacheKey(1, n), cache, n)) for n in range(10)]
            await within(asyncio.gather(*(manager.pull_cache(CacheKey(2, n), cache, n) for n in range(10, 60))))
            assert not any(task.done() for task in stuck)
        await within(asyncio.gather(*stuck))


async def held_link(stack: contextlib.AsyncExitStack, **properties: Any) -> tuple[duo.Duo, GatedMemory, Any]:
    """A pair of which one pull holds the link, at the gate."""
    pair = await stack.enter_async_context(duo.duo(**properties))
    gated = pair.gate()
    stack.callback(gated.lending_gate.open)
    await pair.publish(duo.BIG)
    gated.lending_gate.close()
    running = asyncio.ensure_future(pull(pair, await pair.destination(duo.BIG)))
    await gated.lending_gate.reached()
    return pair, gated, running


def pull(pair: duo.Duo, cache: Any, **options: Any) -> Any:
    return pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 0), cache, 0, src_cache_offset=0, **options)


async def test_p5_link_busy_policy_raise_refuses_a_second_pull_at_once() -> None:
    async with contextlib.AsyncExitStack() as stack:
        pair, gated, running = await held_link(stack, link_busy_policy="raise")
        other = await pair.destination(duo.BIG)
        for _ in range(3):
            with pytest.raises(LLMException) as raised:
                await pull(pair, other)
            assert raised.value.status_code is LLMStatusCode.LLM_LINK_BUSY
            assert raised.value.retry_safe
        gated.lending_gate.open()
        await within(running)
        assert duo.untouched(other)
        await pull(pair, other)
        assert duo.holds(other, entry=0, source=0)


async def test_p5_a_full_queue_refuses_and_those_in_it_are_served() -> None:
    async with contextlib.AsyncExitStack() as stack:
        pair, gated, running = await held_link(stack, queue_limit=3)
        caches = [await pair.destination(duo.BIG) for _ in range(4)]
        queued = [asyncio.ensure_future(pull(pair, cache)) for cache in caches[:3]]
        await asyncio.sleep(0.05)
        error = await outcome(asyncio.ensure_future(pull(pair, caches[3])))
        assert isinstance(error, LLMException)
        assert error.status_code is LLMStatusCode.LLM_LINK_BUSY
        queued[1].cancel()
        await asyncio.wait([queued[1]])
        late = asyncio.ensure_future(pull(pair, caches[3]))
        await asyncio.sleep(0.05)
        gated.lending_gate.open()
        await within(asyncio.gather(running, queued[0], queued[2], late))
        assert duo.untouched(caches[1])
        assert all(duo.holds(caches[i], entry=0, source=0) for i in (0, 2, 3))


async def test_p3_waiting_in_the_queue_spends_the_deadline() -> None:
    async with contextlib.AsyncExitStack() as stack:
        pair, gated, running = await held_link(stack)
        other = await pair.destination(duo.BIG)
        error = await outcome(asyncio.ensure_future(pull(pair, other, timeout=80)))
        assert isinstance(error, LLMException)
        assert error.status_code is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
        assert "earlier ones" in str(error)
        assert error.elapsed_ms is not None
        assert error.elapsed_ms >= 79
        gated.lending_gate.open()
        await within(running)
        await pull(pair, other)
        assert duo.holds(other, entry=0, source=0)


@pytest.mark.parametrize("transport", PATHS)
async def test_p5_pulls_both_ways_on_one_link_do_not_interleave(transport: str) -> None:
    """Two nodes that pull from each other at the same time, each through its own connection of the link."""
    desc = CacheDesc(2, [16, 64 * 1024], DataType.DT_UINT8)
    options = {"listen": True, "transport": transport, "enable_cache_manager": True}
    async with duo.node(LLMRole.MIX, 1, **options) as one, duo.node(LLMRole.MIX, 2, **options) as two:
        assert (
            duo.codes(await one.link_clusters([duo.cluster(2, two.listen_address)], duo.TIMEOUT_MS))[0] == "LLM_SUCCESS"
        )
        caches = []
        for node in (one, two):
            keys = [CacheKey(node.cluster_id, entry) for entry in range(desc.entries)]
            source = await node.cache_manager.allocate_cache(desc, keys)
            for tensor, array in enumerate(duo.arrays(source)):
                for entry, row in enumerate(array):
                    row[:] = content(node.cluster_id, tensor, entry, row.size)
            caches.append(await node.cache_manager.allocate_cache(desc))
        both = ((one, 2, caches[0]), (two, 1, caches[1]))
        pulls = [
            node.cache_manager.pull_cache(CacheKey(peer, entry), cache, entry)
            for entry in range(desc.entries)
            for node, peer, cache in both
        ]
        await within(asyncio.gather(*pulls))
        for _, peer, cache in both:
            for tensor, array in enumerate(duo.arrays(cache)):
                for entry, row in enumerate(array):
                    assert np.array_equal(row, content(peer, tensor, entry, row.size))
