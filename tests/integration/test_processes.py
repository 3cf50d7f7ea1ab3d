"""Two processes: peers that are killed, stopped, restarted or busy, and what is left of them in the other one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kvpull_async import (
    CacheDesc,
    CacheKey,
    DataType,
    KvCache,
    LLMDataDist,
    LLMException,
    LLMStatusCode,
    LLMTimeoutError,
)
from kvpull_async.values import LLMRole
from tests import duo
from tests.canaries import intact, set_canary
from tests.integration.own_loop import outcome, within
from tests.integration.processes import Child, Footprint, child
from tests.loop_nodes import eventually

SIZES = {"inline": 1024, "streamed": 3 * 1024 * 1024}
QUICK: dict[str, Any] = {"heartbeat_interval": 50, "heartbeat_timeout": 400, "handshake_timeout": 400}
PROMPT, DECODER = duo.PROMPT, duo.DECODER


def begin(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


class Puller:
    """The decode node in this process."""

    def __init__(self, node: LLMDataDist) -> None:
        self.node = node
        self.kept: list[KvCache] = []

    async def cache(self, nbytes: int) -> KvCache:
        self.kept.append(await self.node.kv_cache_manager.allocate_cache(CacheDesc(2, [4, nbytes], DataType.DT_UINT8)))
        return self.kept[-1]

    async def link(self, prefill: Child) -> None:
        info = duo.cluster(PROMPT, prefill.address)
        await self.node.link_clusters([info], duo.TIMEOUT_MS, raise_on_error=True)

    async def unlink(self, prefill: Child, *, force: bool = False, timeout: int = 10_000) -> LLMStatusCode:
        return (await self.node.unlink_clusters([duo.cluster(PROMPT, prefill.address)], timeout, force))[1][0]

    def pull(self, cache: KvCache, key: int = 0, *, entry: int = 0, timeout: float = duo.TIMEOUT_MS) -> Any:
        """The key is kept, since an offset is given."""
        return self.node.kv_cache_manager.pull_cache(
            CacheKey(PROMPT, key), cache, entry, src_cache_offset=0, timeout=timeout
        )

    async def check_right(self, nbytes: int, key: int = 3) -> None:
        """The next pull on the link, without linking again."""
        cache = await self.cache(nbytes)
        await within(self.pull(cache, key, entry=1))
        assert duo.holds(cache, entry=1, source=key % 4)


def link_failed(error: BaseException | None) -> None:
    assert isinstance(error, LLMException), error
    assert error.status_code is LLMStatusCode.LLM_LINK_FAILED, error
    assert error.retry_safe
    assert not error.destination_unsafe


# --- the prefill process ---


async def test_p1_p8_a_prefill_process_killed_in_the_middle_of_a_transfer() -> None:
    async with child("PROMPT", PROMPT, listen=True) as prefill, duo.node(LLMRole.DECODER, DECODER) as node:
        puller, before = Puller(node), Footprint(node)
        await prefill.ask("publish", "published", nbytes=SIZES["streamed"], first=0)
        await puller.link(prefill)
        cache = await puller.cache(SIZES["streamed"])
        await prefill.ask("hold", "holding", where="lending")
        pulls = [begin(puller.pull(cache)), *(begin(puller.pull(cache, entry=i)) for i in (1, 2))]
        await prefill.hear("held")
        prefill.kill()
        for pull in pulls:
            link_failed(await outcome(pull))
        set_canary(cache)
        assert not cache.quarantined
        link_failed(await outcome(begin(puller.pull(cache, timeout=5000))))
        assert await puller.unlink(prefill, timeout=2000) is LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED
        assert await puller.unlink(prefill, force=True) is LLMStatusCode.LLM_SUCCESS
        await before.check()
        assert intact(cache)


@pytest.mark.parametrize("size", SIZES)
async def test_p1_p3_p4_a_prefill_process_stopped_and_continued(size: str) -> None:
    """Stopped for less than the heartbeats' patience: pulls time out, and the link is the same one afterwards."""
    nbytes = SIZES[size]
    async with child("PROMPT", PROMPT, listen=True) as prefill, duo.node(LLMRole.DECODER, DECODER) as node:
        puller = Puller(node)
        await prefill.ask("publish", "published", nbytes=nbytes, first=0)
        await puller.link(prefill)
        await puller.check_right(nbytes)
        cache = await puller.cache(nbytes)
        prefill.stop()
        for _ in range(3):
            began = time.monotonic()
            error = await outcome(begin(puller.pull(cache, timeout=150)))
            assert isinstance(error, LLMTimeoutError), error
            assert time.monotonic() - began < 3
            assert not error.destination_unsafe
            set_canary(cache)
        prefill.go_on()
        for key in range(4):
            await puller.check_right(nbytes, key)
        assert intact(cache)
        assert node.counters["links_up"] == 1


async def test_p1_p4_a_prefill_process_stopped_in_the_middle_of_a_transfer() -> None:
    nbytes = SIZES["streamed"]
    async with child("PROMPT", PROMPT, listen=True) as prefill, duo.node(LLMRole.DECODER, DECODER) as node:
        puller = Puller(node)
        await prefill.ask("publish", "published", nbytes=nbytes, first=0)
        await puller.link(prefill)
        cache = await puller.cache(nbytes)
        await prefill.ask("hold", "holding", where="lending")
        pull = begin(puller.pull(cache, timeout=1500))
        await prefill.hear("held")
        prefill.tell("let_go")
        prefill.stop()
        error = await outcome(pull)
        if error is not None:  # it may have let go before it stopped
            assert isinstance(error, LLMTimeoutError), error
        set_canary(cache)
        prefill.go_on()
        await prefill.hear("let_go")
        await puller.check_right(nbytes)
        assert intact(cache)


async def test_p4_a_prefill_process_stopped_for_too_long_is_found_again() -> None:
    nbytes = SIZES["streamed"]
    async with (
        child("PROMPT", PROMPT, listen=True, **QUICK) as prefill,
        duo.node(LLMRole.DECODER, DECODER, **QUICK) as node,
    ):
        puller = Puller(node)
        await prefill.ask("publish", "published", nbytes=nbytes, first=0)
        await puller.link(prefill)
        cache = await puller.cache(nbytes)
        prefill.stop()
        await eventually(lambda: bool(node.counters.get("links_lost")))
        began = time.monotonic()
        error = await outcome(begin(puller.pull(cache, timeout=1000)))
        assert isinstance(error, LLMException), error
        assert error.status_code in (LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)
        assert time.monotonic() - began < 4
        set_canary(cache)
        prefill.go_on()
        await eventually(lambda: node.counters.get("reconnects", 0) >= 1)
        await puller.check_right(nbytes)
        assert intact(cache)


async def test_p3_p8_finalize_and_unlink_with_a_stopped_peer_are_bounded() -> None:
    async with child("PROMPT", PROMPT, listen=True) as prefill:
        async with duo.node(LLMRole.DECODER, DECODER, close_timeout=500) as node:
            puller, before = Puller(node), Footprint(node)
            await puller.link(prefill)
            prefill.stop()
            began = time.monotonic()
            assert await puller.unlink(prefill, timeout=200) is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
            assert time.monotonic() - began < 3
            assert duo.engine_of(node).links.find(PROMPT) is not None, "a gentle unlink that failed keeps the link"
            assert await puller.unlink(prefill, force=True) is LLMStatusCode.LLM_SUCCESS
            await before.check()
            assert time.monotonic() - began < 8
        async with duo.node(LLMRole.DECODER, DECODER + 1, close_timeout=500) as node:
            prefill.go_on()
            puller = Puller(node)
            await puller.link(prefill)
            prefill.stop()
            pull = begin(puller.pull(await puller.cache(1024)))
            await asyncio.sleep(0.05)
            began = time.monotonic()
            await node.finalize()
            assert time.monotonic() - began < 8
            error = await outcome(pull)
            assert isinstance(error, LLMException)
            assert error.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
        prefill.go_on()


async def test_p4_a_prefill_process_restarted_on_the_same_port() -> None:
    """What was pending fails at once, however long its deadline; the link comes back by itself."""
    nbytes = SIZES["streamed"]
    async with duo.node(LLMRole.DECODER, DECODER) as node:
        puller = Puller(node)
        async with child("PROMPT", PROMPT, listen=True) as prefill:
            await prefill.ask("publish", "published", nbytes=nbytes, first=0)
            await puller.link(prefill)
            cache = await puller.cache(nbytes)
            await prefill.ask("hold", "holding", where="lending")
            pending = [begin(puller.pull(cache, entry=i)) for i in range(3)]
            await prefill.hear("held")
            address = prefill.address
            prefill.kill()
        async with child("PROMPT", PROMPT, listen_ip_info=f"{address[0]}:{address[1]}") as restarted:
            for pull in pending:
                link_failed(await outcome(pull))
            set_canary(cache)
            await restarted.ask("publish", "published", nbytes=nbytes, first=100)
            await puller.check_right(nbytes, 101)
            assert node.counters["incarnation_changes"] == 1
            old = await outcome(begin(puller.pull(cache, 0)))
            assert isinstance(old, LLMException)
            assert old.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "what the old process held is gone"
            assert intact(cache)


async def test_p4_a_pull_asked_for_while_the_peer_is_away_waits_for_its_return() -> None:
    """Within `reconnect_grace` and the deadline; it asked nothing of the old process, so the new one may answer it."""
    async with duo.node(LLMRole.DECODER, DECODER, reconnect_grace=60_000) as node:
        puller = Puller(node)
        async with child("PROMPT", PROMPT, listen=True) as prefill:
            await puller.link(prefill)
            address = prefill.address
            prefill.kill()
        await eventually(lambda: bool(node.counters.get("links_lost")))
        cache = await puller.cache(1024)
        early = begin(puller.pull(cache, 100, timeout=500))
        patient = [begin(puller.pull(cache, 100 + i, entry=i)) for i in range(4)]
        assert isinstance(await outcome(early), LLMTimeoutError)
        async with duo.node(LLMRole.PROMPT, PROMPT, listen_ip_info=f"{address[0]}:{address[1]}") as back:
            source = await back.kv_cache_manager.allocate_cache(
                cache.cache_desc, [CacheKey(PROMPT, 100 + i) for i in range(4)]
            )
            duo.fill(source)
            errors = [await outcome(pull) for pull in patient]
            # (The link may be back before the cache was published.)
            assert all(error is None or "never published" in str(error) for error in errors), errors
            for i in range(4):
                await within(puller.pull(cache, 100 + i, entry=i))
                assert duo.holds(cache, entry=i, source=i)


async def test_p3_a_pull_from_a_peer_that_is_long_gone_fails_fast() -> None:
    async with duo.node(LLMRole.DECODER, DECODER, reconnect_grace=100) as node:
        puller = Puller(node)
        async with child("PROMPT", PROMPT, listen=True) as prefill:
            await puller.link(prefill)
            cache = await puller.cache(1024)
            prefill.kill()
        await eventually(lambda: bool(node.counters.get("links_lost")))
        await asyncio.sleep(0.2)
        for _ in range(3):
            began = time.monotonic()
            link_failed(await outcome(begin(puller.pull(cache, timeout=30_000))))
            assert time.monotonic() - began < 10


@pytest.mark.slow
@pytest.mark.parametrize("how", ["asleep", "busy"])
async def test_p6_a_prefill_process_whose_own_loop_is_blocked_still_serves(how: str) -> None:
    async with child("PROMPT", PROMPT, listen=True) as prefill, duo.node(LLMRole.DECODER, DECODER) as node:
        puller = Puller(node)
        for first, nbytes in enumerate(SIZES.values()):
            await prefill.ask("publish", "published", nbytes=nbytes, first=100 * first)
        await puller.link(prefill)
        await prefill.ask("block", "blocked", seconds=2.0, how=how)
        for first, nbytes in enumerate(SIZES.values()):
            await puller.check_right(nbytes, 100 * first + 1)
        assert prefill.heard_nothing(), "it served only once its loop was free again"
        await prefill.hear("unblocked")


# --- the decode process ---


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_p7_p8_a_decode_process_killed_or_stopped_in_the_middle_of_a_transfer(how: str) -> None:
    """Its reader is cut, nothing stays pinned, and others are served meanwhile."""
    nbytes = 16 * 1024 * 1024  # the two tensors together are more than two kernels' buffers hold
    async with (
        duo.node(LLMRole.PROMPT, PROMPT, listen=True, lease_margin=300) as prefill,
        child("DECODER", DECODER) as decode,
        duo.node(LLMRole.DECODER, DECODER + 1) as other,
    ):
        desc = CacheDesc(2, [4, nbytes], DataType.DT_UINT8)
        source = await prefill.kv_cache_manager.allocate_cache(desc, duo.keys(desc))
        duo.fill(source)
        puller, address = Puller(other), prefill.listen_address
        assert address is not None
        await other.link_clusters([duo.cluster(PROMPT, address)], duo.TIMEOUT_MS, raise_on_error=True)
        await puller.check_right(nbytes)
        await eventually(lambda: not busy(prefill, source))
        before = Footprint(prefill)
        linked = await decode.ask("link", "linked", cluster=PROMPT, address=list(address))
        assert linked["codes"] == ["LLM_SUCCESS", "LLM_SUCCESS"]
        await decode.ask("hold", "holding", where="landing")
        decode.tell("pull", cluster=PROMPT, key=0, nbytes=nbytes, timeout=2000)
        await decode.hear("pulling")
        await decode.hear("held")
        await eventually(lambda: busy(prefill, source))
        if how == "killed":
            decode.kill()
        else:
            decode.stop()
        await puller.check_right(nbytes)
        await eventually(lambda: not busy(prefill, source))
        if how == "stopped":  # the lease ended, and with it the pin
            assert prefill.counters["serves_refused"] + prefill.counters.get("leases_expired", 0) >= 1
            decode.kill()
        gone = duo.cluster(DECODER, address)
        assert (await prefill.unlink_clusters([gone], 5000, True))[1] == [LLMStatusCode.LLM_SUCCESS]
        await before.check()
        await puller.check_right(nbytes)


def busy(node: LLMDataDist, cache: KvCache) -> bool:
    entry = duo.engine_of(node).registry.find(cache.cache_id)
    return entry is not None and entry.busy


async def test_p8_finalize_after_the_peer_was_killed_leaves_nothing() -> None:
    """(The leak guard looks at the rest.)"""
    for killed_first in (True, False):
        async with child("PROMPT", PROMPT, listen=True) as prefill, duo.node(LLMRole.DECODER, DECODER) as node:
            puller = Puller(node)
            await prefill.ask("publish", "published", nbytes=SIZES["streamed"], first=0)
            await puller.link(prefill)
            await puller.check_right(SIZES["streamed"])
            if killed_first:
                prefill.kill()
                await eventually(lambda: bool(node.counters.get("links_lost")))
            else:
                prefill.stop()
                prefill.kill()
            began = time.monotonic()
            await node.finalize()
            assert time.monotonic() - began < 8


async def test_p9_a_decode_process_reports_what_a_stopped_source_cost_it() -> None:
    """The same from the other side: the child pulls, this process serves and is frozen for a while."""
    async with duo.node(LLMRole.PROMPT, PROMPT, listen=True) as prefill, child("DECODER", DECODER) as decode:
        desc = CacheDesc(2, [4, 1024], DataType.DT_UINT8)
        source = await prefill.kv_cache_manager.allocate_cache(desc, duo.keys(desc))
        duo.fill(source)
        assert prefill.listen_address is not None
        await decode.ask("link", "linked", cluster=PROMPT, address=list(prefill.listen_address))
        with duo.frozen(prefill):
            decode.tell("pull", cluster=PROMPT, key=0, nbytes=1024, timeout=150)
            await decode.hear("pulling")
            assert (await decode.hear("failed"))["status"] == "LLM_WAIT_PROCESS_TIMEOUT"
        decode.tell("pull", cluster=PROMPT, key=1, nbytes=1024, timeout=20_000)
        await decode.hear("pulling")
        assert (await decode.hear("pulled"))["right"]
        state = await decode.ask("state", "state")
        assert state["counters"]["links_up"] == 1
