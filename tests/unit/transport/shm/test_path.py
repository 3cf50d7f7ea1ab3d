"""The data path of one host: what a ticket opens, what is streamed instead, and how its end is noticed."""

from __future__ import annotations

import asyncio
import ctypes
import secrets
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from kvpull_async.memory import copying
from kvpull_async.memory.base import Batches, Region, Span
from kvpull_async.memory.copying import ORDERED, CancelFlag, Words
from kvpull_async.memory.shared import SharedFile
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.testing.faults import Gate
from kvpull_async.transport.shm import remote
from tests.sides import NBYTES, file_regions, fill, heap_regions
from tests.unit.transport.shm.meetings import until
from tests.unit.transport.shm.readings import table
from tests.unit.transport.shm.shm_links import WHOLE, Rows, done, linked

# -- what a ticket opens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lane", [0, 1])
async def test_either_side_pulls_on_its_lane_out_of_files_and_out_of_the_process(lane: int) -> None:
    async with linked() as link:
        for regions in (file_regions(2), heap_regions(2)):
            said = fill(regions)
            for _ in range(3):
                assert await link.pull(regions, lane=lane) == said[0]
        assert not any(path.connected for path in (*link.sources, *link.pullers)), "no connection was needed"


@pytest.mark.parametrize("lane", [0, 1])
async def test_memory_that_must_not_be_read_is_streamed(lane: int) -> None:
    async with linked(process_reads="off") as link:
        mapped, streamed = file_regions(), heap_regions()
        said = fill(mapped), fill(streamed)
        for _ in range(2):
            assert await link.pull(streamed, lane=lane) == said[1][0]
            assert await link.pull(mapped, lane=lane) == said[0][0]


@pytest.mark.parametrize("lane", [0, 1])
async def test_caches_beyond_the_limit_are_streamed_though_no_connection_was_expected(lane: int) -> None:
    async with linked() as link:
        source = link.accepting if lane == 0 else link.meeting
        free, source._publications._free = source._publications._free, []
        regions = file_regions()
        said = fill(regions)
        for _ in range(3):
            assert await link.pull(regions, lane=lane) == said[0]
        source._publications._free = free
        assert (await link.grant(regions, WHOLE, lane=lane))[1] is not None
        assert await link.pull(regions, lane=lane) == said[0]


async def test_a_file_for_which_no_descriptor_was_left_is_read_from_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with linked() as link:
        with monkeypatch.context() as few:
            few.setattr("kvpull_async.memory.shared._descriptors", 2**40)
            file = SharedFile(NBYTES)
        regions = file_regions(1, file=file)
        said = fill(regions)
        assert file.descriptor == -1
        assert await link.pull(regions) == said[0]


@pytest.mark.parametrize(
    "ticket",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(0),
        msgspec.msgpack.encode(-1),
        msgspec.msgpack.encode(2**64 - 1),
        msgspec.msgpack.encode(12345),
        msgspec.msgpack.encode("1"),
        msgspec.msgpack.encode([1]),
        msgspec.msgpack.encode(1.0),
        b"\x91" * 4096,
        b"\xd9\xff",
    ],
)
async def test_a_forged_ticket_opens_nothing(ticket: bytes) -> None:
    async with linked() as link:
        into = heap_regions()
        grant, _, _ = await link.grant(file_regions(), WHOLE)
        with pytest.raises(OSError, match=r"\w"):
            link.fetch(grant, ticket, WHOLE, WHOLE, into)
        if ORDERED:
            with pytest.raises(OSError, match=r"\w"):
                link.pullers[0].standing(ticket)
        assert await link.pull(file_regions())


async def test_a_ticket_of_another_link_opens_only_what_this_one_has() -> None:
    async with linked() as link, linked() as other:
        regions = file_regions()
        fill(regions)
        for _ in range(3):
            await other.grant(file_regions(), WHOLE)
        grant, ticket, _ = await other.grant(regions, WHOLE)
        with pytest.raises(ConnectionError, match="not mapped"):
            link.fetch(grant, ticket, WHOLE, WHOLE, heap_regions())


@pytest.mark.parametrize(
    "src", [table((0, 1, NBYTES)), table((1, 0, NBYTES)), table((0, 2**62, NBYTES)), table((0, -1, NBYTES))], ids=str
)
@pytest.mark.parametrize("make", [file_regions, heap_regions])
async def test_a_grant_beyond_the_tensor_reads_nothing(make: Callable[[], tuple[Region, ...]], src: Rows) -> None:
    async with linked() as link:
        into = heap_regions()
        grant, ticket, _ = await link.grant(make(), WHOLE)
        fetching = link.fetch(grant, ticket, src, WHOLE, into)
        with pytest.raises(ValueError, match="outside"):
            await done(fetching)
        assert not any(ctypes.string_at(into[0].address, NBYTES))
        assert await link.pull(make())


async def test_a_ticket_of_a_cache_that_is_gone_opens_nothing() -> None:
    async with linked() as link:
        regions = file_regions()
        grant, ticket, _ = await link.grant(regions, WHOLE)
        link.accepting._publications.withdraw(regions, lambda: None)
        with pytest.raises(LLMException, match="took its cache away"):
            link.fetch(grant, ticket, WHOLE, WHOLE, heap_regions())


@pytest.mark.parametrize("make", [file_regions, heap_regions])
async def test_a_cache_that_is_dropped_while_it_is_read_is_an_error_and_the_link_lives(
    make: Callable[[], tuple[Region, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(limit=20)
    copy_rows, read_process = copying.copy_rows, copying.read_process

    def held_copy(destinations: Words, sources: Words, lengths: Words, flag: CancelFlag) -> int:
        gate.pass_through()
        return copy_rows(destinations, sources, lengths, flag)

    def held_read(pid: int, destinations: Words, sources: Words, lengths: Words, flag: CancelFlag) -> int:
        if lengths.sum() > 16:
            gate.pass_through()
        return read_process(pid, destinations, sources, lengths, flag)

    monkeypatch.setattr(remote, "copy_rows", held_copy)
    monkeypatch.setattr(remote, "read_process", held_read)
    async with linked() as link:
        regions, into = make(), heap_regions()
        fill(regions)
        grant, ticket, _ = await link.grant(regions, WHOLE)
        gate.close()
        fetching = link.fetch(grant, ticket, WHOLE, WHOLE, into)
        await gate.reached()
        over: list[bool] = []
        link.accepting._publications.withdraw(regions, lambda: over.append(True))
        await asyncio.sleep(0.05)
        assert not over, "the memory was given back while it was read"
        gate.open()
        with pytest.raises(LLMException) as caught:
            await done(fetching)
        assert caught.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        await until(lambda: over)
        fresh = make()
        said = fill(fresh)
        assert await link.pull(fresh) == said[0]


async def test_a_grant_that_was_not_described_or_is_over_is_streamed_or_nothing() -> None:
    async with linked() as link:
        regions = file_regions()
        grant, ticket, _ = await link.grant(regions, WHOLE)
        assert ticket is not None
        with pytest.raises(ConnectionError, match="no payload connection"):
            link.fetch(secrets.token_bytes(16), None, WHOLE, WHOLE, heap_regions())
        for unexpected in (secrets.token_bytes(16), b""):
            link.pullers[0].expect(grant, ticket, lambda: WHOLE, Span(heap_regions(), lambda: WHOLE, direct=True))
            with pytest.raises(ConnectionError, match="no payload connection"):
                link.pullers[0].fetch(unexpected, link.meeting.memory.landing(heap_regions(), WHOLE), NBYTES)
        link.pullers[0].expect(grant, ticket, lambda: WHOLE, Span(heap_regions(), lambda: WHOLE, direct=True))
        link.pullers[0].give_up()
        with pytest.raises(ConnectionError, match="no payload connection"):
            link.pullers[0].fetch(grant, link.meeting.memory.landing(heap_regions(), WHOLE), NBYTES)
        for _ in range(2):
            link.sources[0].release(grant)


async def test_what_the_source_holds_for_a_reader_ends_at_once() -> None:
    async with linked() as link:
        closed = []

        def lending() -> Batches:
            try:
                yield [memoryview(bytes(1))]
            finally:
                closed.append(True)

        grant = secrets.token_bytes(16)
        assert link.sources[0].describe(grant, Span(file_regions(), lambda: WHOLE, direct=True)) is not None
        serving = link.sources[0].serve(grant, lending(), NBYTES)
        assert serving.settled.done()
        assert serving.done.result() == 0
        assert serving.abort()


@pytest.mark.skipif(not ORDERED, reason="this machine proves each read by asking")
async def test_a_standing_cache_is_read_again_until_it_is_gone() -> None:
    async with linked() as link:
        regions, target = file_regions(2), np.zeros(100, np.uint8)
        said = fill(regions)
        _, ticket, _ = await link.grant(regions, WHOLE)
        assert ticket is not None
        standing = link.pullers[0].standing(ticket)
        assert standing is not None
        assert (standing.tensors, standing.tensor_nbytes) == (2, NBYTES)
        for start in (0, NBYTES - 100):
            assert standing.read(1, start, [target.ctypes.data], 100)
            assert target.tobytes() == said[1][start : start + 100]
        link.accepting._publications.withdraw(regions, lambda: None)
        assert not standing.valid
        assert not standing.read(1, 0, [target.ctypes.data], 100)
