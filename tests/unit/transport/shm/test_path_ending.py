"""The data path of one host: its streamed side, and its end."""

from __future__ import annotations

import asyncio
import ctypes

import pytest

from kvpull_async._deadline import absorb
from kvpull_async.memory import copying
from kvpull_async.memory.base import Span
from kvpull_async.memory.copying import CancelFlag, Words
from kvpull_async.testing.faults import Gate
from kvpull_async.transport.shm import remote
from tests import memfds
from tests.copies import noise
from tests.sides import NBYTES, file_regions, fill, heap_regions
from tests.unit.transport.shm.meetings import until
from tests.unit.transport.shm.shm_links import WHOLE, done, linked, soon

# -- the connection for bytes that cannot be read ----------------------------------------------------------------------


async def test_a_streamed_pull_given_up_does_not_disturb_the_next() -> None:
    async with linked(process_reads="off") as link:
        for lane in (0, 1):
            stale, fresh = heap_regions(), heap_regions()
            fill(stale)
            said = noise(NBYTES)[::-1].tobytes()
            ctypes.memmove(fresh[0].address, said, NBYTES)
            for _ in range(3):
                grant, _, serving = await link.grant(stale, WHOLE, lane=lane)
                await asyncio.wait([serving.done], timeout=0.05)
                link.pullers[lane].give_up()
                serving.abort()
                await absorb([serving.settled], soon())
                link.sources[lane].release(grant)
                assert await link.pull(fresh, lane=lane) == said


async def test_lanes_have_connections_of_their_own() -> None:
    async with linked(process_reads="off") as link:
        caches = heap_regions(), heap_regions()
        fill(caches[0])
        ctypes.memset(caches[1][0].address, 7, NBYTES)
        results = await asyncio.gather(*(link.pull(caches[lane], lane=lane) for lane in (0, 1)))
        assert results == [ctypes.string_at(cache[0].address, NBYTES) for cache in caches]


async def test_a_flood_of_connections_leaves_no_thread_and_no_descriptor() -> None:
    async with linked(process_reads="off") as link:
        before = memfds.descriptors()
        regions = heap_regions()
        said = fill(regions)
        for _ in range(30):
            (await link.pullers[0].dial(soon())).close()
            link.sources[0]._side.drain()
        assert await link.pull(regions) == said[0]
        await until(lambda: memfds.descriptors() <= before + 2)


async def test_without_a_descriptor_for_a_connection_it_is_an_error_that_passes() -> None:
    async with linked(process_reads="off") as link:
        regions = heap_regions()
        said = fill(regions)
        for free in (0, 1):
            with memfds.descriptor_limit(free), pytest.raises(OSError, match="Too many open files"):
                await link.pullers[0].ready(soon())
        assert not link.lost
        assert await link.pull(regions) == said[0]


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_the_end_of_the_side_channel_ends_new_pulls_and_is_told_to_the_link() -> None:
    async with linked() as link:
        regions = file_regions()
        grant, ticket, _ = await link.grant(regions, WHOLE)
        link.accepting._sides[link.token].close()
        with pytest.raises(ConnectionError, match="ended"):
            link.fetch(grant, ticket, WHOLE, WHOLE, heap_regions())
        with pytest.raises(ConnectionError, match="ended"):
            await link.pullers[0].ready(soon())
        with pytest.raises(ConnectionError, match="ended"):
            link.sources[0].describe(grant, Span(regions, lambda: WHOLE, direct=True))
        await until(lambda: link.lost)
        assert len(link.lost) == 1


async def test_a_read_that_runs_when_the_channel_ends_is_whole_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapping outlives its owner: what was read is what the source had."""
    gate, copy_rows = Gate(limit=20), copying.copy_rows

    def held_copy(destinations: Words, sources: Words, lengths: Words, flag: CancelFlag) -> int:
        gate.pass_through()
        return copy_rows(destinations, sources, lengths, flag)

    monkeypatch.setattr(remote, "copy_rows", held_copy)
    async with linked() as link:
        regions, into = file_regions(), heap_regions()
        said = fill(regions)
        grant, ticket, _ = await link.grant(regions, WHOLE)
        gate.close()
        fetching = link.fetch(grant, ticket, WHOLE, WHOLE, into)
        await gate.reached()
        link.accepting._sides[link.token].close()
        await until(lambda: link.pullers[0]._side.closed)
        gate.open()
        assert await done(fetching) == NBYTES
        assert ctypes.string_at(into[0].address, NBYTES) == said[0]


async def test_an_aborted_path_refuses_everything_and_may_be_aborted_again() -> None:
    async with linked() as link:
        grant, ticket, _ = await link.grant(file_regions(), WHOLE)
        for path in (link.pullers[0], link.sources[0]):
            path.abort()
            path.abort()
            with pytest.raises(ConnectionError):
                await path.ready(soon())
        with pytest.raises(ConnectionError):
            link.fetch(grant, ticket, WHOLE, WHOLE, heap_regions())


async def test_a_connection_that_comes_after_the_abort_is_closed() -> None:
    async with linked(process_reads="off") as link:
        before = memfds.descriptors()
        mine = await link.pullers[0].dial(soon())
        link.sources[0].abort()
        mine.settimeout(20)
        assert mine.recv(1) == b""
        mine.close()
        assert memfds.descriptors() < before
