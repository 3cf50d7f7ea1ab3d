"""What is left of memory that was shared between processes: after pulls and releases, after links that are made again,
and after peers that die.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import pytest

from kvpull_async import CacheDesc, CacheKey, DataType
from kvpull_async.values import LLMRole, Placement
from tests import duo, npu
from tests.integration.content import content
from tests.integration.own_loop import outcome, within
from tests.integration.processes import Footprint, child, descriptors, mappings
from tests.integration.reader import KINDS, fields, options_for, reader, source, source_kind, whole
from tests.loop_nodes import eventually

SMALL, LARGE = 100_000, 3 * 1024 * 1024
each_kind = pytest.mark.parametrize("kind", KINDS)


@each_kind
async def test_p8_caches_pulled_once_each_leave_nothing(kind: str) -> None:
    """Descriptors, mappings and memory of both sides are those of the first round after many more."""
    rounds, options = 80 if kind == "mapped" else 30, options_for(kind, inline_limit=0)
    before = mappings()
    async with source(**options) as there, reader(**options) as here:
        await here.link(there)
        cache = await here.cache(SMALL)
        first: tuple[int, ...] = ()

        async def held() -> tuple[int, ...]:
            state = await fields(there)
            return (state["descriptors"], state["mappings"], state["used"], descriptors(), mappings())

        for number in range(rounds):
            await there.ask("publish", "published", key=number, nbytes=SMALL, kind=source_kind(kind))
            error = await outcome(here.pull(cache, number))
            assert error is None, error
            assert whole(cache, number)
            await there.ask("spoil", "spoiled", key=number)
            if number == 4:
                await eventually(lambda: mappings() <= before + 5)
                first = await held()
        give_up = time.monotonic() + 15  # what was released last goes once the other side has heard of it
        while True:
            last = await held()
            if all(now <= then for now, then in zip(last, first, strict=True)):
                break
            assert time.monotonic() < give_up, (first, last)
            await asyncio.sleep(0.01)


async def test_p8_two_thousand_small_caches_in_one_process_leave_nothing() -> None:
    async with duo.duo(transport="shm", inline_limit=0) as pair:
        manager, decoder = pair.prompt.kv_cache_manager, pair.decoder.kv_cache_manager
        desc = CacheDesc(2, [1, 4096], DataType.DT_UINT8)
        cache = await pair.destination(desc)
        start = (0, 0)
        for number in range(2000):
            made = await manager.allocate_cache(desc, [CacheKey(duo.PROMPT, number)])
            for tensor, array in enumerate(duo.arrays(made)):
                array[0] = content(number, tensor, 0, nbytes=4096)
            await decoder.pull_cache(CacheKey(duo.PROMPT, number), cache)
            assert whole(cache, number)
            await manager.deallocate_cache(made)
            if number == 20:
                start = descriptors(), mappings()
        await eventually(lambda: descriptors() <= start[0] and mappings() <= start[1], lambda: f"{start}")


async def test_p7_memory_counts_until_the_peer_has_it_mapped_no_more() -> None:
    async with duo.node(LLMRole.PROMPT, duo.PROMPT, listen=True, transport="shm") as prompt:
        memory = duo.engine_of(prompt).memory
        async with child("DECODER", duo.DECODER, transport="shm") as decode:
            assert prompt.listen_address is not None
            await decode.ask("link", "linked", cluster=duo.PROMPT, address=list(prompt.listen_address))
            desc = CacheDesc(2, [4, LARGE], DataType.DT_UINT8)
            for how in ("stopped", "killed"):
                offered = await prompt.kv_cache_manager.allocate_cache(desc, duo.keys(desc))
                duo.fill(offered)
                decode.tell("pull", cluster=duo.PROMPT, key=1, nbytes=LARGE, timeout=duo.TIMEOUT_MS)
                await decode.hear("pulling")
                assert (await decode.hear("pulled"))["right"]
                decode.stop()
                for key in duo.keys(desc):
                    await prompt.kv_cache_manager.remove_cache_key(key)
                await prompt.kv_cache_manager.deallocate_cache(offered)
                await asyncio.sleep(0.1)
                assert npu.used(memory, Placement.DEVICE) >= desc.size * desc.num_tensors, "its pages are still there"
                if how == "stopped":
                    decode.go_on()
                else:
                    decode.kill()
                await eventually(lambda: npu.used(memory, Placement.DEVICE) == 0)


async def test_p7_p8_a_puller_killed_in_the_middle_leaves_nothing_pinned() -> None:
    nbytes = 16 * 1024 * 1024
    async with duo.node(LLMRole.PROMPT, duo.PROMPT, listen=True, transport="shm") as prompt:
        desc = CacheDesc(2, [4, nbytes], DataType.DT_UINT8)
        offered = await prompt.kv_cache_manager.allocate_cache(desc, duo.keys(desc))
        duo.fill(offered)
        engine = duo.engine_of(prompt)
        footprint: Footprint | None = None
        held = 0
        for number in range(4):
            async with child("DECODER", duo.DECODER + number, transport="shm") as decode:
                assert prompt.listen_address is not None
                await decode.ask("link", "linked", cluster=duo.PROMPT, address=list(prompt.listen_address))
                decode.tell("pull", cluster=duo.PROMPT, key=0, nbytes=nbytes, timeout=duo.TIMEOUT_MS)
                await decode.hear("pulling")
                await asyncio.sleep(0.004 * number)
                decode.kill()
            await eventually(lambda: not any(entry.busy for entry in engine.registry.entries()))
            gone = duo.cluster(duo.DECODER + number, prompt.listen_address)
            await prompt.unlink_clusters([gone], 5000, True)
            if footprint is None:
                footprint, held = Footprint(prompt), descriptors()
            else:
                await footprint.check()
                await eventually(lambda: descriptors() <= held)  # noqa: B023
        await within(prompt.kv_cache_manager.deallocate_cache(offered))
        for key in duo.keys(desc):
            await prompt.kv_cache_manager.remove_cache_key(key)
        assert npu.used(engine.memory) == 0


@each_kind
async def test_p4_p8_a_link_made_again_and_again_works_and_keeps_nothing(kind: str) -> None:
    """By `unlink_clusters` and `link_clusters`, and by reconnecting after its connections were cut."""
    options, before = options_for(kind), mappings()
    async with source(**options) as there, reader(**options) as here:
        await there.ask("publish", "published", key=0, nbytes=LARGE, kind=source_kind(kind))
        counts: list[list[int]] = []
        for round_ in range(12):
            await here.link(there)
            await here.check_right(0, nbytes=LARGE)
            link = duo.engine_of(here.node).links.find(duo.PROMPT)
            assert link is not None
            lost = here.node.counters.get("links_lost", 0)
            duo.engine_of(here.node).core.loop.call_soon_threadsafe(link._lanes[round_ % 2].abort, "cut by the test")
            await eventually(lambda: here.node.counters.get("links_lost", 0) > lost)  # noqa: B023
            await here.check_right(0, nbytes=LARGE)
            await here.unlink(there)
            if round_ in (2, 11):
                await eventually(lambda: mappings() <= before + 1)
                state = await fields(there)
                while state["tasks"]:  # the last of the link that was ended; the test's own timeout bounds this
                    await asyncio.sleep(0.01)
                    state = await fields(there)
                mine = [descriptors(), mappings()]
                counts.append([*mine, state["descriptors"], state["mappings"], state["threads"], state["tasks"]])
        assert all(last <= first for first, last in zip(*counts, strict=True)), counts
        assert here.node.counters["links_up"] >= 24


async def test_p8_after_finalize_nothing_of_shared_memory_is_left_whoever_keeps_a_manager() -> None:
    kept: list[Any] = []
    before = descriptors(), mappings()
    async with duo.duo(transport="shm") as pair:
        await pair.publish(duo.BIG)
        cache = await pair.destination(duo.BIG)
        await pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 1), cache)
        kept += [pair.prompt.cache_manager, pair.decoder.kv_cache_manager]
    del pair, cache
    gc.collect()
    await eventually(lambda: (descriptors(), mappings()) <= before)


async def test_more_caches_than_can_be_published_are_streamed() -> None:
    async with duo.duo(transport="shm") as pair:
        publications: Any = duo.engine_of(pair.prompt).memory.publications
        publications._free.clear()
        await pair.publish(duo.BIG)
        cache = await pair.destination(duo.BIG)
        for entry in range(4):
            await within(pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, entry), cache, entry))
            assert duo.holds(cache, entry=entry, source=entry)
        assert pair.decoder.counters["links_up"] == 1


async def test_memory_of_one_file_registered_again_and_again_is_shared_each_time() -> None:
    """Its file is passed once for all of them, and anew once none of them is left."""
    async with source(transport="shm") as there, reader(transport="shm") as here:
        await here.link(there)
        cache = await here.cache(SMALL)
        await there.ask("publish", "published", key=0, nbytes=SMALL)
        for number in range(1, 60):
            await there.ask("again", "published", key=number, of=0)
            error = await outcome(here.pull(cache, number))
            assert error is None, error
            assert whole(cache, 0)
            await there.ask("unregister", "unregistered", key=number)


async def test_memory_taken_back_and_offered_anew_while_it_is_asked_for_is_there() -> None:
    """The peer hears that one cache is gone and of another one in the same file, and had no time to answer between."""
    async with duo.duo(transport="shm", inline_limit=0) as pair:
        manager, puller = pair.prompt.cache_manager, pair.decoder.kv_cache_manager
        offered, cache = await pair.publish(duo.SMALL), await pair.destination(duo.SMALL)
        addresses = [int(array.ctypes.data) for array in duo.arrays(offered)]
        first, second = [
            await manager.register_cache(duo.SMALL, addresses, [CacheKey(duo.PROMPT, 100 * number)])
            for number in (1, 2)
        ]
        await within(puller.pull_cache(CacheKey(duo.PROMPT, 100), cache))
        with duo.frozen(pair.prompt):
            pull = asyncio.ensure_future(puller.pull_cache(CacheKey(duo.PROMPT, 200), cache, 1))
            release = asyncio.ensure_future(manager.unregister_cache(first.cache_id))
            await asyncio.sleep(0.1)
        await within(asyncio.gather(pull, release))
        assert duo.holds(cache, entry=1, source=0)
        await manager.unregister_cache(second.cache_id)
