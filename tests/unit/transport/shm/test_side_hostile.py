"""A hostile end of a side channel: what it passes is never mapped unproven, what it says never harms."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvpull_async.memory.publications import EPOCHS
from kvpull_async.transport.shm import side as side_module
from kvpull_async.transport.shm.messages import (
    Drop,
    Dropped,
    Files,
    Hello,
    Layout,
    Message,
    Missed,
    Opened,
    Stream,
)
from tests import memfds
from tests.copies import at
from tests.sides import (
    NBYTES,
    file_regions,
    heap_regions,
    hostile,
    layout,
    missing,
    published,
    read,
    this_process,
    turn,
)

# -- a hostile peer's files --------------------------------------------------------------------------------------------


def pipe(_: Path) -> int:
    reading, writing = os.pipe()
    os.close(writing)
    return reading


def plain_file(folder: Path) -> int:
    (folder / "plain").write_bytes(bytes(NBYTES))
    return os.open(folder / "plain", os.O_RDWR)


BAD: dict[str, Callable[[Path], int]] = {
    "unsealed": lambda _: memfds.memfd(NBYTES, seals=memfds.SEAL),
    "may shrink": lambda _: memfds.memfd(NBYTES, seals=memfds.ALL & ~memfds.SHRINK),
    "may be written": lambda _: memfds.memfd(NBYTES, seals=memfds.ALL & ~memfds.FUTURE_WRITE),
    "may be unsealed": lambda _: memfds.memfd(NBYTES, seals=memfds.ALL & ~memfds.SEAL),
    "too small": lambda _: memfds.memfd(NBYTES - 1),
    "empty": lambda _: memfds.memfd(0),
    "full of holes": lambda _: memfds.memfd(4 * NBYTES, allocated=0),
    "a file": plain_file,
    "a directory": lambda folder: os.open(folder, os.O_RDONLY),
    "a pipe": pipe,
    "a device": lambda _: os.open("/dev/zero", os.O_RDWR),
}


@pytest.mark.parametrize("kind", sorted(BAD))
async def test_a_descriptor_that_reading_could_crash_on_is_never_mapped(kind: str, tmp_path: Path) -> None:
    with hostile() as end:
        descriptor = BAD[kind](tmp_path)
        before = memfds.descriptors(), memfds.mappings(""), memfds.mappings("/memfd:")
        end.say(Files([1], [NBYTES]), [descriptor])
        end.say(layout())
        end.side.drain()
        missing(end.side, 1)
        assert end.heard() == [Missed(1)]
        os.close(descriptor)
        assert memfds.descriptors() == before[0] - 1
        assert memfds.mappings("/memfd:") == before[2]


async def test_a_descriptor_for_writing_too_is_fine_when_it_is_sealed() -> None:
    with hostile() as end:
        descriptor = memfds.memfd(NBYTES)
        end.say(Files([1], [NBYTES]), [descriptor])
        os.close(descriptor)
        end.say(layout())
        end.side.drain()
        assert read(end.side.cache(1)) == [bytes(NBYTES)]


@pytest.mark.parametrize(
    "bad",
    [
        layout(1, (0, 1)),
        layout(1, (0, -1)),
        layout(1, (0, -NBYTES)),
        layout(1, (0, NBYTES)),
        layout(1, (0, 2**63 - 1)),
        layout(1, (0, -(2**63))),
        layout(1, (1, 0)),
        layout(1, (-1, 0)),
        layout(1, (-(2**63), 0)),
        layout(1, (0, 0), (0, 1)),
        layout(1, (0, 0), (2**62, 0)),
        layout(1, tensor_nbytes=NBYTES + 1),
        layout(1, tensor_nbytes=2**63 - 1),
        layout(1, files=[2]),
        layout(1, files=[1, 2]),
        layout(1, files=[]),
    ],
)
async def test_places_outside_of_the_file_are_never_read(bad: Layout) -> None:
    with hostile() as end:
        descriptor = memfds.memfd(NBYTES)
        end.say(Files([1], [NBYTES]), [descriptor])
        os.close(descriptor)
        end.say(bad)
        end.side.drain()
        missing(end.side, 1)
        assert end.heard() == [Missed(1)]


async def test_a_size_announced_larger_than_the_file_is_caught_before_it_is_mapped() -> None:
    with hostile() as end:
        for number, nbytes in enumerate((NBYTES + 1, 2**40, 2**63 - 1, 0), start=1):
            descriptor = memfds.memfd(NBYTES)
            end.say(Files([number], [nbytes]), [descriptor])
            os.close(descriptor)
            end.say(layout(number, files=[number]))
            end.side.drain()
            missing(end.side, number)
        assert not end.side.closed


async def test_a_file_used_twice_in_one_layout_is_counted_as_it_should() -> None:
    with hostile() as end:
        descriptor = memfds.memfd(NBYTES)
        end.say(Files([1], [NBYTES]), [descriptor])
        os.close(descriptor)
        before = memfds.mappings("/memfd:kvpull-test")
        end.say(layout(1, (0, 0), (1, 0), files=[1, 1]))
        end.side.drain()
        assert memfds.mappings("/memfd:kvpull-test") == before + 1
        end.say(Drop(1))
        end.side.drain()
        gc.collect()
        assert memfds.mappings("/memfd:kvpull-test") == before


# -- a hostile peer's words --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [Hello(bytes(16), 1, bytes(16), True)],
        [layout(1, slot=EPOCHS)],
        [layout(1, slot=2**63 - 1)],
        [layout(1, first=1)],
        [layout(1, places=bytes(17))],
        [layout(1, places=bytes(31), tensors=2)],
        [layout(1, (0, 0), (0, 0), tensors=1)],
        [layout(1, tensors=3), layout(2, tensors=3, first=1)],
        [layout(1, tensors=3), layout(1, tensors=3, first=1, epoch=2)],
        [layout(1, tensors=2), layout(1, tensors=2)],
        [Files([1], [NBYTES, NBYTES])],
        [Files([1, 2], [NBYTES])],
    ],
    ids=str,
)
async def test_nonsense_ends_the_channel_with_a_reason(messages: list[Message]) -> None:
    with hostile() as end:
        for message in messages:
            end.say(message)
        await turn()
        assert end.side.closed
        await asyncio.sleep(0.15)
        assert len(end.lost) == 1
        assert "side channel" in end.lost[0]
        assert end.heard() == [None]


@pytest.mark.parametrize("data", [b"x", b"\x93\x03", b"\0" * 70_000, msgspec.msgpack.encode(["a", 1])])
async def test_junk_ends_the_channel_and_takes_its_descriptors_along(data: bytes) -> None:
    with hostile() as end:
        end.say_raw(data, [0])
        await turn()
        assert end.side.closed


async def test_a_packet_longer_than_any_message_ends_the_channel() -> None:
    with hostile() as end:
        end.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1024 * 1024)
        end.say_raw(bytes([0x92, 6, 1]) + bytes(120_000))
        await turn()
        assert end.side.closed


async def test_a_layout_number_that_is_in_use_ends_the_channel() -> None:
    process, probe = this_process()
    with hostile(process=process) as end:
        end.say(layout(1, (-1, at(probe)), files=[]))
        end.side.drain()
        end.side.cache(1)
        end.say(layout(1, (-1, at(probe)), files=[]))
        await turn()
        assert end.side.closed


async def test_more_caches_than_there_are_epochs_end_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_module, "EPOCHS", 20)
    process, probe = this_process()
    with hostile(process=process) as end:
        for number in range(20):
            end.say(layout(number, (-1, at(probe)), files=[]))
            end.side.drain()
        assert not end.side.closed
        end.say(layout(20, (-1, at(probe)), files=[]))
        end.side.drain()
        assert end.side.closed


async def test_more_files_than_a_process_may_map_end_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_module, "_FILES", 100)
    with hostile() as end:
        for first in range(0, 100, 50):
            end.say(Files(list(range(first, first + 50)), [1] * 50))
            end.side.drain()
        assert not end.side.closed
        end.say(Files([100], [1]))
        end.side.drain()
        assert end.side.closed


async def test_what_is_no_connection_is_not_taken_for_one_and_not_left_open() -> None:
    with hostile() as end:
        end.side.streams[0] = lambda _: pytest.fail("that was no socket")
        before = memfds.descriptors()
        descriptor = memfds.memfd(NBYTES)
        end.say(Stream(0), [descriptor])
        os.close(descriptor)
        await turn()
        assert end.side.closed
        assert memfds.descriptors() == before - 1  # this end's own socket


async def test_a_stream_without_a_connection_or_for_no_lane_is_nothing() -> None:
    with hostile() as end:
        end.side.streams[0] = lambda _: pytest.fail("there was none")
        end.say(Stream(0))
        end.say(Stream(1), [0, 0, 0])
        await turn()
        assert not end.side.closed


async def test_descriptors_beside_a_message_that_needs_none_are_closed() -> None:
    with hostile() as end:
        before = memfds.descriptors()
        for _ in range(20):
            end.say(Missed(1), [0, 0, 0])
        await turn()
        assert memfds.descriptors() == before
        assert not end.side.closed


async def test_an_answer_to_nothing_changes_nothing() -> None:
    with hostile() as end:
        regions = file_regions(1)
        number = published(end.side, regions)
        for message in (Missed(number + 1), Dropped(number + 1), Drop(17), Missed(number), Missed(number)):
            end.say(message)
        end.side.drain()
        assert not end.side.closed
        assert published(end.side, regions) == number
        assert [type(message) for message in end.heard()] == [Files, Layout, Dropped, Files, Layout]


async def test_a_peer_that_claims_to_have_dropped_a_living_cache_does_not_end_it() -> None:
    with hostile() as end:
        regions, said = file_regions(1), []
        number = published(end.side, regions)
        end.say(Dropped(number))
        end.side.drain()
        published(end.side, regions)
        end.publications.withdraw(regions, lambda: said.append("over"))
        assert not said
        end.say(Dropped(number))
        end.side.drain()
        assert said == ["over"]


async def test_a_flood_is_taken_a_part_at_a_time_and_leaves_the_loop_free() -> None:
    with hostile() as end:
        turns = 0
        for _ in range(2000):
            while True:
                try:
                    end.say(Missed(1))
                    break
                except BlockingIOError:
                    turns += 1
                    await asyncio.sleep(0)
        await turn()
        assert turns
        assert not end.side.closed


async def test_a_peer_that_never_reads_is_given_up_and_its_memory_given_back() -> None:
    with hostile() as end:
        over = 0

        def count() -> None:
            nonlocal over
            over += 1

        total = 0
        while not end.side.closed and total < 6000:
            regions = heap_regions(1, 8)
            end.side.read_by_peer = True
            with contextlib.suppress(ConnectionError):
                end.side.publish(regions)
            end.publications.withdraw(regions, count)
            total += 1
        assert end.side.closed
        assert over == total, "memory of a cache that the peer never dropped counts for ever"


async def test_what_waits_for_a_slow_peer_comes_in_order_once_it_reads() -> None:
    with hostile() as end:
        end.side.read_by_peer = True
        numbers = []
        caches = []
        while True:
            caches.append(heap_regions(1, 8))
            try:
                numbers.append(published(end.side, caches[-1]))
            except ConnectionError as error:
                assert "does not take" in str(error)  # noqa: PT017
                break
        assert not end.side.closed
        heard: list[Message | None] = []
        for _ in range(20):
            heard += end.heard()
            await turn(1)
        assert [message.number for message in heard if isinstance(message, Layout)] == [*numbers, numbers[-1] + 1]
        assert published(end.side, caches[-1]) == numbers[-1] + 1


async def test_the_answer_about_reading_may_come_late() -> None:
    with hostile() as end:
        regions = heap_regions(1)
        assert end.side.publish(regions) is None
        end.say(Opened(True))
        end.side.drain()
        assert end.side.publish(regions) is not None
