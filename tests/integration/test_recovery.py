"""Peers that die and come back, many at a time; and nodes that run out of descriptors or memory and get some again."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvpull_async import CacheDesc, CacheKey, DataType, LLMDataDist, LLMException, LLMRole
from kvpull_async.linkage import LinkState
from kvpull_async.testing.proxy import FaultProxy
from tests import duo
from tests.canaries import intact, set_canary
from tests.integration.own_loop import outcome, within
from tests.integration.processes import Child, child, few_descriptors, sockets
from tests.integration.proxied import begin, check_failure
from tests.loop_nodes import eventually

SLACK = 8.0
"""Seconds that a slow machine may need beyond what was promised; what is looked for would take 20 s."""
BEAT = 0.3
"""Seconds between heartbeats."""
BEATS: dict[str, Any] = {"heartbeat_interval": 300, "heartbeat_timeout": 1500, "handshake_timeout": 1000}
LARGE = 3 * 1024 * 1024
PROMPT, DECODER = duo.PROMPT, duo.DECODER


class Puller:
    """The node of this process, and where the bytes of its pulls go."""

    def __init__(self, node: LLMDataDist) -> None:
        self.node = node
        self.kept: list[Any] = []

    async def link(self, address: tuple[str, int], cluster: int = PROMPT) -> None:
        await self.node.link_clusters([duo.cluster(cluster, address)], duo.TIMEOUT_MS, raise_on_error=True)

    async def cache(self, nbytes: int = LARGE, *, entries: int = 4) -> Any:
        desc = CacheDesc(2, [entries, nbytes], DataType.DT_UINT8)
        self.kept.append(await self.node.kv_cache_manager.allocate_cache(desc))
        set_canary(self.kept[-1])
        return self.kept[-1]

    async def pull(self, cache: Any, key: int, *, timeout: float = duo.TIMEOUT_MS, entry: int = 0) -> None:
        await self.node.kv_cache_manager.pull_cache(
            CacheKey(PROMPT, key), cache, entry, src_cache_offset=0, timeout=timeout
        )

    async def check_right(self, key: int = 3, *, nbytes: int = LARGE) -> None:
        """The next pull on the link, without linking again."""
        cache = await self.cache(nbytes)
        await within(self.pull(cache, key, entry=1))
        assert duo.holds(cache, entry=1, source=key % 4)


@contextlib.asynccontextmanager
async def puller(transport: str = "tcp", **more: Any) -> AsyncIterator[Puller]:
    async with duo.node(LLMRole.DECODER, DECODER, transport=transport, **{**BEATS, **more}) as node:
        yield Puller(node)


@contextlib.asynccontextmanager
async def prefill(*, transport: str = "tcp", port: int = 0, first: int = 0, **more: Any) -> AsyncIterator[Child]:
    """With four keys, from `first` on."""
    options = {"transport": transport, "listen_ip_info": f"127.0.0.1:{port}", **BEATS, **more}
    async with child("PROMPT", PROMPT, program="host", **options) as made:
        await made.ask("publish", "published", nbytes=LARGE, first=first)
        yield made


# --- one peer ---


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_p1_p4_pending_pulls_end_with_the_peer_and_the_link_comes_back_by_itself(transport: str) -> None:
    """It is stopped first, so that all of them have been asked for and none is answered."""
    async with puller(transport, heartbeat_timeout=20_000) as here:
        async with prefill(transport=transport) as there:
            await here.link(there.address)
            await here.check_right()
            cache = await here.cache()
            there.stop()
            pending = [begin(here.pull(cache, entry, entry=entry)) for entry in range(4)]
            await eventually(lambda: here.node.counters["pulls_started"] == 5)
            assert not any(pull.done() for pull in pending)
            there.kill()
            began = time.monotonic()
            errors = [await outcome(pull) for pull in pending]
            assert time.monotonic() - began < BEAT + SLACK
        for error in errors:
            assert error is not None
            check_failure(error)
            assert "connect" in str(error).lower() or "restarted" in str(error), error
        set_canary(cache)
        async with prefill(transport=transport, port=there.address[1], first=100):
            await eventually(lambda: here.node.counters.get("reconnects", 0) == 1)
            assert here.node.counters["incarnation_changes"] == 1
            await here.check_right(101)
            assert intact(cache)


async def test_p4_p10_attempts_to_reach_a_dead_peer_are_damped() -> None:
    """However many pulls are made meanwhile: a listener that only hangs up counts the attempts."""
    slow: dict[str, Any] = {"heartbeat_interval": 1000, "heartbeat_timeout": 5000, "reconnect_grace": 100}
    async with puller(**slow) as here, prefill() as there:
        with FaultProxy(there.address) as proxy:
            await here.link(proxy.address)
            cache = await here.cache()
            there.kill()
            await eventually(lambda: bool(here.node.counters.get("links_lost")))
            before, began = proxy.accepted, time.monotonic()
            await asyncio.sleep(2.0)
            await eventually(lambda: proxy.accepted - before >= 3)
            idle, took = proxy.accepted - before, time.monotonic() - began
            assert idle <= 5 + 5 * took, f"{idle} attempts in {took:.1f} s while nobody asked"
            before, began = proxy.accepted, time.monotonic()
            while time.monotonic() - began < 1.0:
                pulls = [begin(here.pull(cache, 0, timeout=200, entry=entry)) for entry in range(4)]
                for pull in pulls:
                    error = await outcome(pull)
                    assert error is not None
                    check_failure(error)
            hurried = proxy.accepted - before
            assert hurried <= 50 * (time.monotonic() - began) + 5, f"{hurried} attempts while pulls were made"


@pytest.mark.slow
async def test_p8_many_pulls_at_a_time_leave_no_more_sockets_than_a_link_has() -> None:
    """Two control connections, and one of payload for this direction; whatever becomes of the pulls."""
    async with prefill() as there, puller() as here:
        before = sockets()
        await here.link(there.address)
        caches = [await here.cache(entries=1) for _ in range(10)]
        most = 0

        async def work(number: int) -> None:
            nonlocal most
            for turn in range(20):
                timeout = 2.0 if (number + turn) % 7 == 0 else duo.TIMEOUT_MS
                with contextlib.suppress(LLMException):
                    await here.pull(caches[number], turn % 4, timeout=timeout)
                most = max(most, sockets() - before)

        await within(asyncio.gather(*(work(number) for number in range(10))))
        assert here.node.counters["pulls_timed_out"] > 0, "the test is wrong: it broke no payload connection"
        await here.check_right()
        await eventually(lambda: sockets() - before == 3, lambda: str(sockets() - before))
        assert most <= 3 + 10, "a payload connection that is given up ends before long"
        theirs = await there.ask("state", "state")
        for turn in range(50):
            await within(here.pull(caches[0], turn % 4))
            assert duo.holds(caches[0], entry=0, source=turn % 4)
        assert sockets() - before == 3
        assert (await there.ask("state", "state"))["sockets"] <= theirs["sockets"]


# --- many peers at a time ---


EACH = 25


class Storm:
    """The links of this process to many nodes in others."""

    def __init__(self, node: LLMDataDist) -> None:
        self.node = node

    async def link(self, first: int, addresses: list[list[Any]]) -> None:
        for number, (host, port) in enumerate(addresses):
            info = duo.cluster(first + number, (host, port))
            await self.node.link_clusters([info], duo.TIMEOUT_MS, raise_on_error=True)

    def up(self, first: int, count: int) -> int:
        links = [duo.engine_of(self.node).links.find(first + number) for number in range(count)]
        return sum(link is not None and link.state is LinkState.READY for link in links)

    async def takes(self, condition: Callable[[], bool]) -> float:
        """Seconds until it is so."""
        began = time.monotonic()
        await eventually(condition)
        return time.monotonic() - began

    async def check(self, first: int, count: int) -> None:
        cache = await self.node.kv_cache_manager.allocate_cache(duo.SMALL)
        for number in range(count):
            key = CacheKey(first + number, number % 4)
            await within(self.node.kv_cache_manager.pull_cache(key, cache, 0, src_cache_offset=0))
            assert duo.holds(cache, entry=0, source=number % 4)
        await self.node.kv_cache_manager.deallocate_cache(cache)


@contextlib.asynccontextmanager
async def many(first: int, ports: list[int]) -> AsyncIterator[tuple[Child, list[list[Any]]]]:
    async with child("PROMPT", first, program="storm", transport="tcp", ports=ports, **BEATS) as made:
        yield made, (await made.hear("addresses"))["addresses"]


async def died_and_back(storm: Storm, first: int, count: int) -> float:
    """So many peers die at once and are started again: seconds from when all listen until all links are up."""
    async with many(first, [0] * count) as (process, addresses):
        await storm.link(first, addresses)
        process.kill()
    await eventually(lambda: storm.up(first, count) == 0)
    await asyncio.sleep(1.0)
    async with many(first, [port for _, port in addresses]):
        took = await storm.takes(lambda: storm.up(first, count) == count)
        await storm.check(first, count)
        for number in range(count):
            info = duo.cluster(first + number, tuple(addresses[number]))
            await storm.node.unlink_clusters([info], duo.TIMEOUT_MS)
    return took


@pytest.mark.slow
async def test_p4_fifty_links_whose_peers_all_died_come_back_at_a_time() -> None:
    """Measured by how long one takes, a heartbeat included: one after another they would take fifty times that."""
    async with puller() as here:
        storm = Storm(here.node)
        one = max([await died_and_back(storm, 50, 1) for _ in range(2)])
        fifty = await died_and_back(storm, 100, 2 * EACH)
        sys.stdout.write(f"one link was back after {one:.3f} s, fifty after {fifty:.3f} s\n")
        assert fifty < EACH * (one + BEAT), f"one: {one:.3f} s, fifty: {fifty:.3f} s"


@pytest.mark.slow
async def test_p4_p5_links_come_back_while_others_wait_for_peers_that_say_nothing() -> None:
    """Half of the peers are stopped: each attempt to reach one takes the whole `handshake_timeout`."""
    async with puller() as here:
        storm = Storm(here.node)
        async with many(300, [0] * EACH) as (silent, theirs):
            await storm.link(300, theirs)
            silent.stop()
            await eventually(lambda: storm.up(300, EACH) == 0)
            took = await died_and_back(storm, 400, EACH)
            assert took < EACH * BEATS["handshake_timeout"] / 1000 / 2, "they waited for one after the other"
            silent.go_on()
            back = await storm.takes(lambda: storm.up(300, EACH) == EACH)
            assert back < EACH * BEATS["handshake_timeout"] / 1000 / 2
            await storm.check(300, EACH)


# --- descriptors ---


async def test_p10_a_puller_out_of_descriptors_says_so_and_recovers_over_tcp() -> None:
    async with prefill() as there, puller() as here:
        with FaultProxy(there.address) as proxy:
            await here.link(proxy.address)
            await here.check_right()
            cache = await here.cache()
            before = sockets()
            proxy.cut(kind="payload")
            await eventually(lambda: sockets() == before - 2)  # the proxy's, which are of this process too
            with few_descriptors(0):
                for _ in range(3):
                    error = await outcome(begin(here.pull(cache, 0, timeout=1000)))
                    assert error is not None
                    check_failure(error)
                    assert "Too many open files" in str(error), error
                with pytest.raises(LLMException):
                    await here.node.link_clusters([duo.cluster(PROMPT + 5, there.address)], 1000, raise_on_error=True)
            set_canary(cache)
            await here.check_right()
            assert here.node.counters["links_up"] == 1
            assert intact(cache)


async def test_p10_a_source_out_of_descriptors_lives_and_recovers_over_tcp() -> None:
    async with prefill() as there, puller(reconnect_grace=100) as here:
        with FaultProxy(there.address) as proxy:
            await here.link(proxy.address)
            await here.check_right()
            cache = await here.cache()
            await there.ask("limit_descriptors", "limited", spare=0)
            proxy.cut()
            for _ in range(3):
                error = await outcome(begin(here.pull(cache, 0, timeout=300)))
                assert error is None or isinstance(error, LLMException)
            set_canary(cache)
            told = await there.ask("allocate", "allocated", nbytes=LARGE)
            assert told["status"] in ("", "LLM_DEVICE_OUT_OF_MEMORY"), told
            await there.ask("limit_descriptors", "limited", spare=None)
            await eventually(lambda: here.node.counters.get("reconnects", 0) >= 1)
            await here.check_right()
            assert intact(cache)


# --- memory ---


async def test_p10_a_source_out_of_memory_says_so_still_serves_and_recovers() -> None:
    async with prefill() as there, puller() as here:
        await here.link(there.address)
        await here.check_right()
        await there.ask("limit_memory", "limited", spare=16 * 1024 * 1024)
        for _ in range(3):
            told = await there.ask("allocate", "allocated", nbytes=256 * 1024 * 1024)
            assert told["status"] == "LLM_DEVICE_OUT_OF_MEMORY", told
        await here.check_right()
        await there.ask("limit_memory", "limited", spare=None)
        assert not (await there.ask("allocate", "allocated", nbytes=256 * 1024 * 1024))["status"]
        await here.check_right()


async def test_p10_a_puller_out_of_memory_says_so_and_recovers() -> None:
    """Not even the stack of a thread is to be had, which a payload connection needs."""
    async with (
        duo.node(LLMRole.PROMPT, PROMPT, listen=True, **BEATS) as source,
        child("DECODER", DECODER, program="host", **BEATS) as there,
    ):
        desc = CacheDesc(2, [4, LARGE], DataType.DT_UINT8)
        cache = await source.kv_cache_manager.allocate_cache(desc, duo.keys(desc))
        duo.fill(cache)
        address = list(source.listen_address or ())
        asked = {"cluster": PROMPT, "key": 1, "nbytes": LARGE}
        await there.ask("begin_link", "linking", cluster=PROMPT, address=address, timeout=duo.TIMEOUT_MS)
        await there.hear("linked")
        for _ in range(2):
            await there.ask("prepare", "prepared", nbytes=LARGE)
        await there.ask("limit_memory", "limited", spare=7 * 1024 * 1024)
        told = await there.ask("allocate", "allocated", nbytes=64 * 1024 * 1024)
        assert told["status"] == "LLM_DEVICE_OUT_OF_MEMORY", told
        await there.ask("begin_pull", "pulling", timeout=1000, **asked)
        ended = await there.hear("ended")
        assert ended["right"] or ended["status"], ended
        await there.ask("limit_memory", "limited", spare=None)
        await there.ask("begin_pull", "pulling", timeout=duo.TIMEOUT_MS, **asked)
        ended = await there.hear("ended")
        assert ended["right"], ended
        assert (await there.ask("look", "looked"))["intact"]
