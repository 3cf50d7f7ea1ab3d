"""Keys that end by themselves: each in its time, without harm to a pull under way, and without cost to others."""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvpull_async import CacheDesc, DataType
from tests import duo, npu
from tests.conformance.api import AWAITED, Api
from tests.inject import gated_copies
from tests.integration.leased import INVALID, LONG, expired, key, leased, refused
from tests.integration.rig import begin, each_face, each_path, nodes
from tests.loop_nodes import event_log, eventually

pytestmark = pytest.mark.smoke

HUGE = CacheDesc(4, [1, 8 * 1024 * 1024], DataType.DT_UINT8)
"""Copied in several pieces on every path."""


# -- expiry ------------------------------------------------------------------------------------------------------------


@each_path
@each_face
async def test_a_key_goes_by_itself_and_the_others_stay(path: str, api: Api) -> None:
    with event_log() as log:
        async with nodes(api, path) as n:
            await n.publish(first=10)
            began = time.monotonic()
            await leased(n, 1, 2, lease=60)
            await leased(n, 3, lease=LONG)
            await expired(n, 2)
            assert time.monotonic() - began >= 0.06
            cache, pull = await n.destination(), n.decoder.kv_cache_manager.pull_cache
            error = await refused(n, pull, key(1), cache)
            ago = re.search(r"req_id 1 of model 0 is not here: expired (\d+) ms ago \(held: .*req_id 3 of", str(error))
            assert ago, error
            assert int(ago[1]) <= (time.monotonic() - began) * 1000
            await api.do(pull, key(3), cache)
            await api.do(pull, key(12), cache, 1)
            assert duo.holds(cache, entry=0, source=0)
            assert duo.holds(cache, entry=1, source=2)
            await leased(n, 1, lease=None)  # the name is free again
            await api.do(pull, key(1), cache)
        told = log.named("key.expired")  # one for both, or one for each
        assert sum(event["keys"] for event in told) == 2
        assert {name for event in told for name in event["key"].split()} == {"request:1:0", "request:2:0"}


@each_face
async def test_what_became_of_a_key_is_told(api: Api) -> None:
    async with nodes(api) as n:
        manager = n.prompt.kv_cache_manager
        cache, pull = await n.destination(), n.decoder.kv_cache_manager.pull_cache
        await leased(n, 1, 2, 3, lease=None)
        await leased(n, 4, lease=1)
        memory = npu.room(4, 4096)
        registered = await api.do(n.prompt.cache_manager.register_cache, duo.SMALL, npu.addresses(memory), [key(5)])
        await api.do(pull, key(1), cache)
        await n.api.until(lambda: n.prompt.counters.get("keys_consumed", 0) == 1)
        await api.do(manager.remove_cache_key, key(2))
        await api.do(n.decoder.kv_cache_manager.release_key, key(3))
        await api.do(n.prompt.cache_manager.unregister_cache, registered.cache_id)
        await expired(n)
        told = {}
        for number in range(1, 7):
            error = await refused(n, pull, key(number), cache)
            told[number] = re.sub(r"\d+ ms", "N ms", str(error).split("not here: ")[1].split(" (held")[0])
            assert error.retry_safe
        assert told == {
            1: "pulled already N ms ago",
            2: "released N ms ago",
            3: "released N ms ago",
            4: "expired N ms ago",
            5: "released with its cache N ms ago",
            6: "never published",
        }


@each_path
async def test_p7_a_pull_under_way_ends_whole_when_its_key_expires(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the key was all that kept the memory."""
    async with nodes(AWAITED, path) as n:
        cache = await n.destination(HUGE)
        gate = gated_copies(monkeypatch) if path == "shm" else duo.gate(n.decoder).landing_gate
        source = await leased(n, 1, lease=LONG, desc=HUGE)
        n.kept.remove(source)
        await n.prompt.kv_cache_manager.deallocate_cache(source)
        gate.close()
        pull = begin(n.decoder.kv_cache_manager.pull_cache(key(1), cache))
        await eventually(lambda: gate.held > 0)
        await n.prompt.kv_cache_manager.renew_key(key(1), 1)
        await expired(n)
        assert not pull.done()
        error = await refused(n, n.decoder.kv_cache_manager.release_key, key(1))  # beside the pull, without waiting
        assert "expired" in str(error)
        gate.open()
        await pull
        assert duo.holds(cache, entry=0, source=0)
        assert "keys_consumed" not in n.prompt.counters
        await eventually(lambda: not duo.engine_of(n.prompt).registry.entries())


@each_path
async def test_the_memory_goes_with_the_last_key(path: str) -> None:
    async with nodes(AWAITED, path) as n:
        source = await leased(n, 1, 2, lease=LONG)
        entries = duo.engine_of(n.prompt).registry.entries
        n.kept.remove(source)
        await n.prompt.kv_cache_manager.deallocate_cache(source)
        del source
        gc.collect()
        assert len(entries()) == 1
        await n.prompt.kv_cache_manager.renew_key(key(1), 1)
        await expired(n)
        assert len(entries()) == 1
        await n.prompt.kv_cache_manager.renew_key(key(2), 1)
        await eventually(lambda: not entries())
        assert n.prompt.counters["keys_expired"] == 2


async def test_a_key_that_was_pulled_leaves_no_timer() -> None:
    async with nodes(AWAITED) as n:
        leases = duo.engine_of(n.prompt).registry._leases
        await leased(n, 1, lease=LONG)
        assert leases._timer is not None
        await n.decoder.kv_cache_manager.pull_cache(key(1), await n.destination())
        await eventually(lambda: leases._timer is None)


async def test_keys_of_registered_caches_end_too_and_their_memory_stays() -> None:
    async with nodes(AWAITED) as n:
        manager, memory = n.prompt.cache_manager, npu.room(4, 4096, fill=7)
        source = await manager.register_cache(duo.SMALL, npu.addresses(memory))
        await manager.publish_cache(source, [key(1)], lease=50)
        await expired(n)
        cache = await n.destination()
        await refused(n, n.decoder.kv_cache_manager.pull_cache, key(1), cache)
        await manager.publish_cache(source, [key(2)])
        await n.decoder.kv_cache_manager.pull_cache(key(2), cache)
        error = await refused(n, n.decoder.kv_cache_manager.release_key, key(2), code=INVALID)
        assert not error.retry_safe
        await n.prompt.cache_manager.renew_key(key(2), LONG)
        await n.decoder.kv_cache_manager.release_key(key(2))
        await manager.unregister_cache(source.cache_id)


async def test_who_waits_for_an_expired_key_gets_the_next_one_of_that_name() -> None:
    async with nodes(AWAITED) as n:
        await leased(n, 1, lease=1)
        await expired(n)
        cache = await n.destination()
        pull = begin(n.decoder.kv_cache_manager.pull_cache(key(1), cache, wait_for_key=True))
        await eventually(lambda: n.prompt.counters.get("serves_awaited", 0) == 1)
        await leased(n, 1, lease=LONG)
        await pull
        assert duo.holds(cache, entry=0, source=0)


# -- many --------------------------------------------------------------------------------------------------------------


class Turns:
    """How many keys ended at the most between two turns of others on that loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ended: Callable[[], int]) -> None:
        self._loop = loop
        self._ended = ended
        self._last = ended()
        self._running = True
        self.most = 0
        loop.call_soon_threadsafe(self._tick)

    def _tick(self) -> None:
        now = self._ended()
        self.most, self._last = max(self.most, now - self._last), now
        if self._running:
            self._loop.call_soon(self._tick)

    def stop(self) -> None:
        self._running = False


async def test_p6_a_hundred_thousand_leases_are_one_timer_and_hold_nobody_up() -> None:
    desc = CacheDesc(1, [1000, 8], DataType.DT_UINT8)
    async with nodes(AWAITED, "inproc") as n:
        manager, loop = n.prompt.kv_cache_manager, duo.engine_of(n.prompt).core.loop
        timers = len(loop._scheduled)  # type: ignore[attr-defined]
        for first in range(0, 100_000, 1000):
            source = await manager.allocate_cache(desc)
            await manager.publish_cache(source, [key(first + i) for i in range(1000)], lease=LONG)
            await manager.deallocate_cache(source)
        registry = duo.engine_of(n.prompt).registry
        assert len(registry._leases) == 100_000
        assert len(loop._scheduled) < timers + 30  # type: ignore[attr-defined]
        end = time.monotonic() + 0.7

        def ends(entry: Any) -> None:
            for binding in tuple(entry.bindings.values()):
                registry.lease(binding, end - time.monotonic())

        for entry in registry.entries()[:20]:
            loop.call_soon_threadsafe(ends, entry)
        await asyncio.sleep(0.3)
        early = n.prompt.counters.get("keys_expired", 0)
        assert early == 0 or time.monotonic() >= end
        turns = Turns(loop, lambda: n.prompt.counters.get("keys_expired", 0))
        await eventually(lambda: n.prompt.counters.get("keys_expired", 0) == 20_000)
        turns.stop()
        assert turns.most < 2000, "a millisecond's worth of keys ends at a time, of twenty thousand"
        await n.publish(first=200_000)
        await n.check_right(key=200_000)
