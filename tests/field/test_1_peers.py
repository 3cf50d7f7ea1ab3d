"""Field reports of theme 1, further: peers that say nothing, that die, or that are asked for too much."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvpull_async import CacheDesc, CacheKey, DataType, LLMException, LLMRole, LLMStatusCode, LLMTimeoutError
from tests import duo
from tests.conformance.api import Api
from tests.integration.own_loop import outcome
from tests.integration.processes import child, sockets
from tests.integration.rig import (
    OK,
    SOON,
    begin,
    complete,
    each_face,
    each_path,
    each_process_path,
    links_of,
    nodes,
)
from tests.loop_nodes import eventually

# --- 1.10 ---


@each_face
@pytest.mark.parametrize("words", [b"", b"\x00\x00"], ids=["silent", "half a greeting"])
def test_1_10_a_peer_that_accepts_and_says_nothing_costs_the_link_its_timeout(api: Api, words: bytes) -> None:
    async def body() -> None:
        with silent_peer(words) as (address, taken):
            async with nodes(api, linked=False) as two:
                before = sockets()
                infos = [duo.cluster(9, address), duo.cluster(duo.PROMPT, two.prompt.listen_address)]
                began = time.monotonic()
                overall, codes = await api.do(two.decoder.link_clusters, infos, 400)
                assert 0.39 <= time.monotonic() - began < SOON
                assert codes == [LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT, OK]
                assert overall is not OK
                assert [link.cluster_id for link in links_of(two.decoder)] == [duo.PROMPT]
                await api.do(two.decoder.unlink_clusters, infos[1:], duo.TIMEOUT_MS)
                await api.until(lambda: sockets() - len(taken) <= before)

    api.run(body())


@contextlib.contextmanager
def silent_peer(words: bytes) -> Iterator[tuple[tuple[str, int], list[socket.socket]]]:
    """Its address, and what it has accepted. Without words it does not even do that: the kernel does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken: list[socket.socket] = []

        def take() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(server.accept()[0])
                    taken[-1].sendall(words)

        thread = threading.Thread(target=take, daemon=True)
        if words:
            thread.start()
        try:
            yield server.getsockname(), taken
        finally:
            server.shutdown(socket.SHUT_RDWR)
            if words:
                thread.join(SOON)
            for one in taken:
                one.close()


# --- 1.11 ---


@each_process_path
@pytest.mark.parametrize("when", ["before its pull", "in its pull"])
async def test_1_11_a_decode_node_that_dies_frees_the_source(path: str, when: str) -> None:
    """What it was about to pull can be released and its memory used again at once, while others are served."""
    nbytes = 16 * 1024 * 1024
    desc = CacheDesc(2, [4, nbytes], DataType.DT_UINT8)
    pool = {"mem_pool_cfg": f'{{"memory_size": {desc.size * 2 + 4096}}}'}
    async with (
        duo.node(LLMRole.PROMPT, duo.PROMPT, listen=True, transport=path, **pool) as prefill,
        child("DECODER", duo.DECODER, transport=path) as decode,
    ):
        manager = prefill.kv_cache_manager
        cache = await manager.allocate_cache(desc, duo.keys(desc))
        duo.fill(cache)
        assert prefill.listen_address is not None
        await decode.ask("link", "linked", cluster=duo.PROMPT, address=list(prefill.listen_address))
        if when == "in its pull":
            if path == "tcp":
                await decode.ask("hold", "holding", where="landing")
            decode.tell("pull", cluster=duo.PROMPT, key=0, nbytes=nbytes, timeout=duo.TIMEOUT_MS)
            await decode.hear("pulling")
            await (decode.hear("held") if path == "tcp" else asyncio.sleep(0))
        decode.kill()
        for key in duo.keys(desc):
            await manager.remove_cache_key(key)
        began = time.monotonic()
        await manager.deallocate_cache(cache)
        del cache
        again = await manager.allocate_cache(desc, duo.keys(desc))
        assert time.monotonic() - began < SOON
        await manager.deallocate_cache(again)


@each_process_path
async def test_1_11_memory_of_a_node_that_died_before_its_pull_is_free_when_the_keys_time_is_over(path: str) -> None:
    """Nobody at the source has to notice anything: the cache had been given up to its keys."""
    desc = CacheDesc(2, [4, 1024 * 1024], DataType.DT_UINT8)
    pool = {"mem_pool_cfg": f'{{"memory_size": {desc.size * 2 + 4096}}}'}
    async with (
        duo.node(LLMRole.PROMPT, duo.PROMPT, listen=True, transport=path, **pool) as prefill,
        child("DECODER", duo.DECODER, transport=path) as decode,
    ):
        manager = prefill.kv_cache_manager
        cache = await manager.allocate_cache(desc)
        assert prefill.listen_address is not None
        await decode.ask("link", "linked", cluster=duo.PROMPT, address=list(prefill.listen_address))
        await manager.publish_cache(cache, duo.keys(desc), lease=300)
        await manager.deallocate_cache(cache)
        del cache
        with pytest.raises(LLMException) as full:
            await manager.allocate_cache(desc)
        assert full.value.status_code is LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
        decode.kill()
        await eventually(lambda: prefill.counters.get("keys_expired", 0) == desc.entries)
        await manager.deallocate_cache(await manager.allocate_cache(desc))


# --- 1.12 ---


@each_path
async def test_1_12_more_pulls_than_a_link_can_serve_wait_in_a_bounded_queue_inside_their_deadlines(path: str) -> None:
    limit, asked = 50, 200
    async with (
        duo.duo(transport=path, queue_limit=limit, heartbeat_timeout=60_000) as pair,
        duo.node(LLMRole.PROMPT, 7, listen=True, transport=path) as other,
    ):
        await pair.publish()
        manager, cache = pair.decoder.kv_cache_manager, await pair.destination()
        elsewhere = await other.kv_cache_manager.allocate_cache(duo.SMALL, [CacheKey(7, 0)])
        await pair.decoder.link_clusters([duo.cluster(7, other.listen_address)], raise_on_error=True)
        key = CacheKey(duo.PROMPT, 0)
        with duo.frozen(pair.prompt):
            pulls = [begin(manager.pull_cache(key, cache, 0, src_cache_offset=0, timeout=1500)) for _ in range(asked)]
            await manager.pull_cache(CacheKey(7, 0), await pair.destination())  # no other link is held up
            errors = [await outcome(pull) for pull in pulls]
        late = [complete(error) for error in errors if isinstance(error, LLMTimeoutError)]
        busy = [complete(error) for error in errors if isinstance(error, LLMException) and error not in late]
        assert (len(late), len(busy)) == (1 + limit, asked - 1 - limit)
        assert all(1500 * 0.99 <= (error.elapsed_ms or 0) < 1000 * SOON for error in late)
        assert {error.status_code for error in busy} == {LLMStatusCode.LLM_LINK_BUSY}
        assert all((error.elapsed_ms or 0) < 1500 and error.retry_safe for error in busy)
        await manager.pull_cache(key, cache, 0, src_cache_offset=0)
        assert duo.holds(cache, entry=0, source=0)
        await other.kv_cache_manager.deallocate_cache(elsewhere)
