"""The side channel: each end has what the other publishes as long as it does, whatever a hostile end says."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from functools import partial

import numpy as np
import pytest

from kvpull_async.memory.base import Region
from kvpull_async.memory.copying import CancelFlag
from kvpull_async.memory.publications import Publications
from kvpull_async.memory.shared import SharedFile
from kvpull_async.transport.shm import side
from kvpull_async.transport.shm.messages import (
    DESCRIPTORS,
    TENSORS,
    Files,
    Layout,
    Missed,
)
from kvpull_async.transport.shm.remote import Mapped, Private
from kvpull_async.values import Placement
from tests import memfds
from tests.copies import at
from tests.loop_nodes import eventually
from tests.sides import (
    NBYTES,
    duo,
    file_regions,
    fill,
    heap_regions,
    hostile,
    missing,
    packets,
    published,
    read,
    taken_back,
    turn,
    view,
)

# -- honest ends -------------------------------------------------------------------------------------------------------


async def test_what_one_end_publishes_the_other_reads() -> None:
    with duo() as pair:
        regions = file_regions(3)
        said = fill(regions)
        number = published(pair.one, regions)
        cache = pair.other.cache(number)
        assert isinstance(cache, Mapped)
        assert cache.tensor_nbytes == NBYTES
        cache.check()
        assert read(cache) == said
        missing(pair.one, number)


async def test_both_ends_publish_and_numbers_do_not_mix() -> None:
    with duo() as pair:
        mine, theirs = file_regions(1), file_regions(2)
        said = fill(mine), fill(theirs)
        numbers = published(pair.one, mine), published(pair.other, theirs)
        assert numbers[0] == numbers[1]
        assert read(pair.other.cache(numbers[0])) == said[0]
        assert read(pair.one.cache(numbers[1])) == said[1]


async def test_memory_in_no_file_is_published_only_to_who_may_read_it() -> None:
    with duo() as pair:
        assert pair.one.publish(heap_regions(2)) is None
    with duo(reads=True) as pair:
        regions = heap_regions(2)
        said = fill(regions)
        cache = pair.other.cache(published(pair.one, regions))
        assert isinstance(cache, Private)
        assert read(cache) == said
        cache.check()


async def test_a_layout_of_very_many_tensors_comes_in_parts() -> None:
    with duo() as pair:
        count = TENSORS + 7
        file = SharedFile(count * 8)
        np.frombuffer(view(file), np.int64)[:] = np.arange(count)
        regions = tuple(Region(file.address + 8 * i, 8, Placement.HOST, file) for i in reversed(range(count)))
        number = published(pair.one, regions)
        cache = pair.other.cache(number)
        assert len(cache.bases) == count
        target = np.zeros(count, np.int64)
        places = np.arange(count, dtype=np.int64) * 8 + at(target)
        cache.copy(places, cache.bases, np.full(count, 8, np.int64), CancelFlag())
        assert np.array_equal(target, np.arange(count)[::-1])


async def test_a_cache_in_more_files_than_one_message_may_pass_comes_whole() -> None:
    with duo() as pair:
        regions = tuple(region for _ in range(DESCRIPTORS + 5) for region in file_regions(1))
        said = fill(regions)
        assert read(pair.other.cache(published(pair.one, regions))) == said


async def test_a_cache_published_again_costs_no_message() -> None:
    with hostile() as end:
        regions = file_regions(2)
        numbers = {end.side.publish(regions) for _ in range(5)}
        assert len(numbers) == 1
        assert [type(message) for message in end.heard()] == [Files, Layout]


async def test_a_file_that_the_peer_has_is_not_passed_again() -> None:
    with duo() as pair:
        file = SharedFile(2 * NBYTES)
        first, second = file_regions(1, file=file), file_regions(2, file=file)
        said = fill(second)
        published(pair.one, first)
        before = memfds.mappings()
        assert read(pair.other.cache(published(pair.one, second))) == said
        assert memfds.mappings() == before + 1, "the peer maps it once"


async def test_a_withdrawn_cache_is_unmapped_and_its_end_is_told() -> None:
    with duo() as pair:
        regions, said = file_regions(2), []
        number = published(pair.one, regions)
        cache = pair.other.cache(number)
        cache.check()
        before = memfds.mappings()
        pair.publications[0].withdraw(regions, lambda: said.append("over"))
        assert not cache.valid
        assert not said
        taken_back(pair.other, number)
        await asyncio.sleep(0)
        pair.one.drain()
        assert not said, "it is mapped still"
        del cache
        await asyncio.sleep(0)
        pair.one.drain()
        assert said == ["over"]
        gc.collect()
        assert memfds.mappings() == before - 1


async def test_a_read_that_runs_keeps_its_memory_when_the_cache_is_dropped() -> None:
    with duo() as pair:
        regions = file_regions(1)
        said = fill(regions)
        cache = pair.other.cache(published(pair.one, regions))
        pair.publications[0].withdraw(regions, lambda: None)
        pair.other.drain()
        del regions
        gc.collect()
        assert read(cache) == said, "stale bytes, but no crash"
        assert not cache.valid


async def test_a_file_stays_mapped_as_long_as_one_of_its_caches_is_published() -> None:
    with duo() as pair:
        file = SharedFile(2 * NBYTES)
        first, second = file_regions(1, file=file), file_regions(2, file=file)
        said = fill(second)
        published(pair.one, first)
        number = published(pair.one, second)
        pair.publications[0].withdraw(first, lambda: None)
        assert read(pair.other.cache(number)) == said
        pair.publications[0].withdraw(second, lambda: None)
        third = file_regions(2, file=file)
        assert read(pair.other.cache(published(pair.one, third))) == said, "passed anew"


async def test_very_many_caches_come_and_go_and_leave_nothing() -> None:
    with duo() as pair:
        before = memfds.descriptors(), memfds.mappings()
        regions: tuple[Region, ...] = ()
        for _ in range(400):
            regions = file_regions(1)
            over: list[bool] = []
            pair.other.cache(published(pair.one, regions))
            pair.publications[0].withdraw(regions, partial(over.append, True))
            pair.other.drain()
            await asyncio.sleep(0)
            pair.one.drain()
            assert over
        del regions
        gc.collect()
        assert (memfds.descriptors(), memfds.mappings()) == before


async def test_more_caches_than_can_be_published_are_left_to_the_stream() -> None:
    with duo() as pair:
        pair.publications[0]._free.clear()
        assert pair.one.publish(file_regions(1)) is None


async def test_a_connection_is_passed_to_the_lane_that_it_is_for() -> None:
    with duo() as pair:
        taken: dict[int, list[socket.socket]] = {0: [], 1: []}
        pair.other.streams = {lane: sockets.append for lane, sockets in taken.items()}
        mine, theirs = socket.socketpair()
        with mine:
            with theirs:
                pair.one.stream(1, theirs)
            pair.other.drain()
            assert not taken[0]
            (passed,) = taken[1]
            with passed:
                assert not os.get_inheritable(passed.fileno())
                mine.sendall(b"through")
                assert passed.recv(100) == b"through"


async def test_a_connection_that_nobody_takes_is_closed() -> None:
    with duo() as pair:
        mine, theirs = socket.socketpair()
        with mine:
            with theirs:
                pair.one.stream(0, theirs)
            pair.other.drain()
            mine.settimeout(20)
            assert mine.recv(1) == b""
            assert not pair.other.closed


async def test_a_file_of_a_withdrawn_cache_is_passed_anew_for_the_next_one_before_the_peer_has_answered() -> None:
    with duo() as pair:
        first = file_regions(1)
        said, file = fill(first), first[0].owner
        assert isinstance(file, SharedFile)
        published(pair.one, first)
        pair.other.drain()
        for _ in range(3):
            after = file_regions(1, file=file)
            pair.publications[0].withdraw(first, lambda: None)
            assert read(pair.other.cache(published(pair.one, after))) == said
            first = after


# -- descriptors run out -----------------------------------------------------------------------------------------------


async def test_a_descriptor_that_did_not_fit_is_missed_and_the_next_attempt_works() -> None:
    with duo() as pair:
        regions = file_regions(1)
        said = fill(regions)
        number = published(pair.one, regions)
        with memfds.descriptor_limit(0):
            pair.other.drain()
            missing(pair.other, number)
        assert not pair.other.closed
        pair.one.drain()
        assert published(pair.one, regions) == number
        assert read(pair.other.cache(number)) == said


async def test_some_of_many_descriptors_are_as_good_as_none_and_do_not_stay_open() -> None:
    with duo() as pair:
        regions = tuple(region for _ in range(10) for region in file_regions(1))
        number = published(pair.one, regions)
        before = memfds.descriptors(), memfds.mappings()
        with memfds.descriptor_limit(4):
            pair.other.drain()
        missing(pair.other, number)
        assert (memfds.descriptors(), memfds.mappings()) == before
        pair.one.drain()
        assert len(pair.other.cache(published(pair.one, regions)).bases) == 10


async def test_a_connection_that_did_not_fit_leaves_the_channel_as_it_is() -> None:
    with duo() as pair:
        pair.other.streams[0] = lambda _: pytest.fail("there was none")
        mine, theirs = socket.socketpair()
        with mine, theirs:
            pair.one.stream(0, theirs)
            with memfds.descriptor_limit(0):
                pair.other.drain()
        assert not pair.other.closed


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_the_peers_end_is_seen_and_told_once() -> None:
    with duo() as pair:
        regions, said = file_regions(1), []
        cache = pair.other.cache(published(pair.one, regions))
        pair.other.close()
        await eventually(lambda: pair.one.closed)
        pair.publications[0].withdraw(regions, lambda: said.append("over"))
        assert said == ["over"]
        pair.one.drain()
        await eventually(lambda: bool(pair.lost))
        await asyncio.sleep(side._FAREWELL)  # a later timer than one that tells it again
        assert [who for who, _ in pair.lost] == ["one"]
        assert cache.tensor_nbytes == NBYTES


async def test_an_end_that_closes_by_itself_tells_nobody() -> None:
    with duo() as pair:
        pair.one.close()
        pair.one.close()
        await eventually(lambda: bool(pair.lost))  # the end that closed would have been told first
        assert [who for who, _ in pair.lost] == ["other"]


async def test_nothing_is_published_on_a_channel_that_breaks_in_that_moment() -> None:
    with hostile() as end:
        regions, said = file_regions(1), []
        end.sock.close()
        with pytest.raises(ConnectionError):
            end.side.publish(regions)
        assert end.side.closed
        end.publications.withdraw(regions, lambda: said.append("over"))
        assert said == ["over"], "nobody has it, and its memory counts for ever"


async def test_a_closed_end_has_nothing_and_takes_nothing() -> None:
    with duo() as pair:
        number = published(pair.one, file_regions(1))
        pair.other.cache(number)
        before = memfds.mappings("/memfd:kvpull-cache")
        pair.other.close()
        pair.other.drain()
        missing(pair.other, number)
        gc.collect()
        assert memfds.mappings("/memfd:kvpull-cache") == before - 1


async def test_a_broken_channel_is_an_error_also_where_broken_pipes_kill() -> None:
    one, other = packets()
    other.close()

    def child() -> str:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            side.send(one, Missed(1))
        except OSError as error:
            return type(error).__name__
        return "sent"

    assert memfds.in_child(child) == "BrokenPipeError"
    one.close()


async def test_nobody_waits_for_a_message_though_the_socket_would() -> None:
    one, other = packets()
    with one, other:
        one.setblocking(True)
        with pytest.raises(BlockingIOError):
            side.receive(one)


async def test_a_channel_that_ends_while_it_is_drained_for_a_pull_says_so() -> None:
    with hostile() as end:
        end.sock.close()
        missing(end.side, 1)
        assert end.side.closed


async def test_a_forked_child_closes_its_copy_and_the_channel_goes_on() -> None:
    with duo() as pair:

        def child() -> str:
            pair.one.close_after_fork()
            pair.other.close_after_fork()
            return "closed"

        assert memfds.in_child(child) == "closed"
        await turn()
        assert not pair.one.closed
        regions = file_regions(1)
        said = fill(regions)
        assert read(pair.other.cache(published(pair.one, regions))) == said


async def test_a_channel_whose_peer_is_in_a_forked_child_ends_with_the_child() -> None:
    with hostile() as end:
        page, theirs = Publications(), end.sock

        def child() -> str:
            return str(theirs.send(b"junk from a child"))

        assert memfds.in_child(child) == "17"
        await turn()
        assert end.side.closed
        assert page.publish(heap_regions(1)) is not None
