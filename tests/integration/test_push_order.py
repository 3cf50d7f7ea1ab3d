"""P5 for pushes: one link, one call at a time, in order; nobody waits in a circle, nor one link for another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvpull_async import CacheKeyByIdAndIndex, LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.values import LLMRole
from tests import duo
from tests.conformance.api import AWAITED
from tests.integration.own_loop import outcome, within
from tests.integration.pushing import PUSHER, RECEIVER, WAYS, Ends, desc, ends, laid, options_for

SHAPE = desc(2_000_003, tensors=2)
each_way = pytest.mark.parametrize("way", WAYS)


def begin(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


def other_way(there: Ends) -> Ends:
    return Ends(there.api, there.way, there.receiver, there.pusher, there.kept)


async def finish(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        await within(asyncio.wait([task]))
        task.result()


@each_way
async def test_p5_two_nodes_that_push_to_each_other_do_not_wait_in_a_circle(way: str) -> None:
    """Each has its link's only slot taken while it takes what the other one pushes."""
    async with ends(AWAITED, way) as there:
        back = other_way(there)
        pairs = [(e, await e.source(SHAPE, seed=n), await e.destination(SHAPE)) for n, e in enumerate((there, back))]
        gates = [duo.gate(node).landing_gate for node in (there.pusher, there.receiver)]
        held = way in ("inproc", "tcp", "streamed")  # elsewhere the library copies without asking for pieces
        for gate in gates if held else ():
            gate.close()
        pushes = [begin(e.push(destination, source, 1)) for e, source, destination in pairs]
        for gate in gates:
            if held:
                await gate.reached()
            gate.open()
        await finish(pushes)
        for _, source, destination in pairs:
            wanted = laid(destination, [(tensor, 0, source.arrays[tensor][1]) for tensor in range(2)])
            assert np.array_equal(destination.image, wanted)


@each_way
async def test_p5_many_pushes_both_ways_at_once(way: str) -> None:
    async with ends(AWAITED, way) as there:
        back = other_way(there)
        small, pushes = desc(9_001, tensors=2, entries=1), []
        pairs = [(e, await e.source(s, seed=n), await e.destination(s)) for n in range(12) for e in (there, back)
                 for s in (small, SHAPE) if s is small or n < 3]  # fmt: skip
        for e, source, destination in pairs:
            pushes.append(begin(e.push(destination, source)))
        await finish(pushes)
        for _, source, destination in pairs:
            wanted = laid(destination, [(tensor, 0, source.arrays[tensor][0]) for tensor in range(2)])
            assert np.array_equal(destination.image, wanted)


@pytest.mark.parametrize("way", ["tcp", "inproc", "streamed"])
async def test_p5_pushes_and_pulls_of_one_link_come_in_their_order(way: str) -> None:
    async with ends(AWAITED, way) as e:
        source, destination, pulled = await e.source(SHAPE), await e.destination(SHAPE), await e.source(SHAPE)
        for array in pulled.arrays:
            array[:] = 0
        ended: list[str] = []
        gate = duo.gate(e.receiver).landing_gate
        gate.close()

        async def push(entry: int) -> None:
            await e.push(destination, source, entry, entry=entry)
            ended.append(f"push {entry}")

        async def pull() -> None:
            """What the push before it brought, back to where it came from."""
            key = CacheKeyByIdAndIndex(RECEIVER, destination.cache.cache_id, 0)
            await e.pusher.cache_manager.pull_cache(key, pulled.cache, 2, src_cache_offset=0)
            ended.append("pull")

        tasks = [begin(push(0)), begin(pull()), begin(push(1))]
        await gate.reached()
        assert not ended
        gate.open()
        await finish(tasks)
        assert ended == ["push 0", "pull", "push 1"]
        for tensor in range(2):
            assert np.array_equal(pulled.arrays[tensor][2], source.arrays[tensor][0])
            assert np.array_equal(destination.arrays[tensor][1], source.arrays[tensor][1])


async def test_p5_a_link_that_is_busy_with_a_push_says_so_where_that_is_wanted() -> None:
    async with ends(AWAITED, "tcp", link_busy_policy="raise") as e:
        source, destination = await e.source(SHAPE), await e.destination(SHAPE)
        gate = duo.gate(e.receiver).landing_gate
        gate.close()
        first = begin(e.push(destination, source))
        await gate.reached()
        error = await e.refused(e.push, destination, source)
        assert error.status_code is LLMStatusCode.LLM_LINK_BUSY
        gate.open()
        await finish([first])


@each_way
async def test_p3_p5_a_dead_receiver_delays_no_push_to_another(way: str) -> None:
    async with ends(AWAITED, way) as e, duo.node(LLMRole.MIX, 13, listen=True, **options_for(way)) as third:
        info = duo.cluster(13, third.listen_address)
        assert await e.pusher.link_clusters([info], duo.TIMEOUT_MS) == (duo.OK, [duo.OK])
        source, stuck = await e.source(SHAPE), await e.destination(SHAPE)
        other = Ends(e.api, way, e.pusher, third, e.kept)
        destination = await other.destination(SHAPE)
        await e.push(stuck, source)
        with duo.frozen(e.receiver):
            silent = [begin(e.push(stuck, source, timeout=limit)) for limit in (1000, 1000, 30_000)]
            for entry in range(3):
                await within(other.push(destination, source, entry, entry=entry))
            for push in silent[:2]:
                error = await outcome(push)
                assert isinstance(error, LLMTimeoutError), error
            silent[2].cancel()
            assert isinstance(await outcome(silent[2]), asyncio.CancelledError)
        assert np.array_equal(destination.image, source.image)
        await within(e.push(stuck, source))


@pytest.mark.parametrize("dials", ["pusher", "receiver"])
async def test_p4_the_link_that_was_broken_carries_the_next_push(dials: str) -> None:
    async with ends(AWAITED, "tcp", dials=dials) as e:
        source, destination = await e.source(SHAPE), await e.destination(SHAPE)
        for node, peer in ((e.pusher, RECEIVER), (e.receiver, PUSHER)):
            await within(e.push(destination, source))
            engine = duo.engine_of(node)
            link = engine.links.find(peer)
            assert link is not None
            engine.core.loop.call_soon_threadsafe(link._lanes[0].abort, "cut by the test")
            error = await outcome(begin(e.push(destination, source, 1)))
            if error is not None:  # it was on its way
                assert isinstance(error, LLMException)
                assert error.status_code is LLMStatusCode.LLM_LINK_FAILED
            await within(e.push(destination, source, 2))
            assert np.array_equal(destination.arrays[0][0], source.arrays[0][2])
