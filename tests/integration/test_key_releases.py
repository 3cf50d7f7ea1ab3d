"""Keys that are kept for longer, and given up: on the node that has them, and from the side that pulls."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kvpull_async import CacheKey, CacheKeyByIdAndIndex, LLMException, LLMRole, LLMStatusCode
from kvpull_async.protocol import frames
from tests import duo, hostile
from tests.conformance.api import AWAITED, Api
from tests.integration.leased import INVALID, LONG, MISSING, expired, key, leased, refused
from tests.integration.rig import begin, each_face, each_path, nodes

pytestmark = pytest.mark.smoke


# -- renewal and release -----------------------------------------------------------------------------------------------


@each_path
@each_face
async def test_a_key_is_kept_for_longer_by_the_side_that_pulls(path: str, api: Api) -> None:
    async with nodes(api, path) as n:
        await leased(n, 1, lease=800)
        await leased(n, 2, lease=800)
        renew = n.decoder.kv_cache_manager.renew_key
        await api.do(renew, key(1), LONG)
        await api.do(renew, key(1), 1)  # a peer does not shorten it
        await expired(n)
        cache = await n.destination()
        await api.do(n.decoder.kv_cache_manager.pull_cache, key(1), cache)
        assert duo.holds(cache, entry=0, source=0)
        assert "expired" in str(await refused(n, renew, key(2), LONG))
        assert "pulled already" in str(await refused(n, renew, key(1), LONG))
        assert n.prompt.counters["keys_renewed"] == 2


@each_face
async def test_its_own_node_says_exactly_when_a_key_ends(api: Api) -> None:
    async with nodes(api) as n:
        await n.publish()
        manager = n.prompt.kv_cache_manager
        await leased(n, 11, lease=LONG)
        await api.do(manager.renew_key, key(11), 20)  # sooner
        await api.do(manager.renew_key, key(0), 20)  # one that had no end
        await api.do(n.decoder.kv_cache_manager.renew_key, key(1), 20)  # a peer gives it none
        await expired(n, 2)
        await api.do(manager.release_key, key(1))
        for number, what in ((11, "expired"), (0, "expired"), (1, "released"), (99, "never published")):
            assert what in str(await refused(n, manager.renew_key, key(number), 20))
            assert what in str(await refused(n, manager.release_key, key(number)))
        assert "keys_released" not in n.prompt.counters  # peers did not do it


@each_path
@each_face
async def test_what_a_decode_node_will_not_pull_it_gives_up(path: str, api: Api) -> None:
    async with nodes(api, path) as n:
        prefix = CacheKey(duo.PROMPT, 2**64 - 1, 3, 5)
        manager, release = n.prompt.kv_cache_manager, n.decoder.kv_cache_manager.release_key
        source = await api.do(manager.allocate_cache, duo.SMALL)
        await api.do(manager.publish_cache, source, [key(1), prefix])
        await api.do(manager.deallocate_cache, source)
        del source
        await api.do(release, key(1))
        await api.do(release, prefix)
        assert duo.engine_of(n.prompt).registry.entries() == []
        error = await refused(n, release, prefix)
        assert "prefix_id 5 of model 3 is not here: released" in str(error)
        assert error.peer
        assert error.retry_safe
        assert error.elapsed_ms is not None
        assert n.prompt.counters["keys_released"] == 2


async def test_of_two_decode_nodes_that_give_a_key_up_one_hears_that_it_is_gone() -> None:
    async with nodes(AWAITED) as n, duo.node(LLMRole.DECODER, 3) as other:
        await other.link_clusters([duo.cluster(duo.PROMPT, n.prompt.listen_address)], duo.TIMEOUT_MS)
        both = [n.decoder.kv_cache_manager, other.kv_cache_manager]
        for number in range(20):
            await leased(n, number, lease=LONG)
            ends = await asyncio.gather(*(one.release_key(key(number)) for one in both), return_exceptions=True)
            assert sorted(end is None for end in ends) == [False, True], ends
            (error,) = [end for end in ends if end is not None]
            assert isinstance(error, LLMException)
            assert error.status_code == MISSING
            assert "released" in str(error)


async def test_renewals_that_race_with_the_end_of_the_key_either_keep_it_or_say_that_it_is_gone() -> None:
    async with nodes(AWAITED) as n:
        cache = await n.destination()
        manager = n.decoder.kv_cache_manager
        kept, gone = 0, list[LLMException]()
        for number in range(30):
            await leased(n, number, lease=8)
            await asyncio.sleep(0.001 * (number % 12))
            try:
                await manager.renew_key(key(number), LONG)
            except LLMException as error:
                gone.append(error)
                await refused(n, manager.pull_cache, key(number), cache)
            else:
                kept += 1
                await asyncio.sleep(0.02)
                await manager.pull_cache(key(number), cache)
        assert n.prompt.counters.get("keys_expired", 0) == len(gone) == 30 - kept
        assert all(error.status_code == MISSING and "expired" in str(error) for error in gone), gone


async def test_hundreds_of_them_at_once_do_not_overwhelm_the_peer() -> None:
    async with nodes(AWAITED) as n:
        await n.publish()
        manager = n.decoder.kv_cache_manager
        ends = await asyncio.gather(*(manager.renew_key(key(i % 4), LONG) for i in range(600)))
        assert ends == [None] * 600
        assert "links_lost" not in n.decoder.counters


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@each_face
async def test_wrong_arguments_are_named(api: Api) -> None:
    async with nodes(api) as n:
        manager = n.decoder.kv_cache_manager
        for wrong in (0, -1, 2**31):
            with pytest.raises(ValueError, match="lease"):
                await api.do(manager.renew_key, key(1), wrong)
        for odd in (None, 1.5, True, "1"):
            with pytest.raises(TypeError, match="lease"):
                await api.do(manager.renew_key, key(1), odd)
        with pytest.raises(TypeError, match="cache_key"):
            await api.do(manager.release_key, 7)
        with pytest.raises(LLMException, match="by its id") as by_id:
            await api.do(manager.release_key, CacheKeyByIdAndIndex(duo.PROMPT, 1, 0))
        assert by_id.value.status_code == INVALID
        with pytest.raises(LLMException, match="names nothing"):
            await api.do(manager.release_key, key(2**64 - 1))
        with pytest.raises(ValueError, match="timeout"):
            await api.do(manager.release_key, key(1), timeout=0)
        source = await api.do(n.prompt.kv_cache_manager.allocate_cache, duo.SMALL)
        with pytest.raises(ValueError, match="lease"):
            await api.do(n.prompt.kv_cache_manager.publish_cache, source, [key(1)], lease=0)
        await refused(n, manager.release_key, CacheKey(77, 1), code=LLMStatusCode.LLM_NOT_YET_LINK)


@each_face
async def test_p3_a_silent_peer_costs_no_more_than_the_timeout(api: Api) -> None:
    async with nodes(api) as n:
        await n.publish()
        with duo.frozen(n.prompt):
            began = time.monotonic()
            with pytest.raises(TimeoutError, match="did not answer") as caught:
                await api.do(n.decoder.kv_cache_manager.release_key, key(1), timeout=100)
            assert time.monotonic() - began < 5
            error = caught.value
            assert isinstance(error, LLMException)
            assert (error.operation, error.retry_safe) == ("release_key", True)
        await n.check_right(key=2)


async def test_p4_a_cancelled_call_leaves_the_link_usable() -> None:
    async with nodes(AWAITED) as n:
        await n.publish()
        with duo.frozen(n.prompt):
            calls = [begin(n.decoder.kv_cache_manager.renew_key(key(1), LONG)) for _ in range(100)]
            await asyncio.sleep(0.05)
            for call in calls:
                call.cancel()
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        await n.decoder.kv_cache_manager.renew_key(key(1), LONG)
        await n.check_right(key=1)


async def test_a_lost_connection_is_made_anew() -> None:
    async with nodes(AWAITED) as n:
        await n.publish()
        renew = n.decoder.kv_cache_manager.renew_key
        for link in hostile.links_of(n.decoder):
            duo.engine_of(n.decoder).core.loop.call_soon_threadsafe(link._lanes[0].abort)
        ends = await asyncio.gather(*(renew(key(number), LONG) for number in range(3)), return_exceptions=True)
        broken = [end for end in ends if end is not None]  # those in whose very middle the connection broke
        for end in broken:
            assert isinstance(end, LLMException)
            assert end.status_code == LLMStatusCode.LLM_LINK_FAILED
            assert end.retry_safe
        await n.decoder.kv_cache_manager.release_key(key(3))


# -- peers that are not honest -----------------------------------------------------------------------------------------


async def test_p7_a_hostile_peer_releases_only_what_it_might_pull() -> None:
    async with nodes(AWAITED) as n:
        await n.publish()
        peer = await hostile.raw_peer(n.prompt.listen_address)
        try:
            kinds = [("cache", 1), ("blocks", 0), ("address", 4096), ("", 0), ("request", -5), ("request", 2**70)]
            for number, (kind, identity) in enumerate(kinds, 1):
                if identity < 2**63:
                    await peer.asks.send(frames.encode(frames.Lease(number, "p", kind, identity, 0, 0, 0)))
            answers: list[Any] = []
            while len(answers) < len(kinds) - 1:
                answers += [m for m in hostile.messages(await peer.asks.receive()) if isinstance(m, frames.Result)]
            assert [LLMStatusCode(answer.status) for answer in answers] == [INVALID] * 4 + [MISSING]
        finally:
            peer.close()
        await n.check_right(key=3)
