"""Bytes that ride on a frame: all of them, and the memory is held no longer than it is read."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvpull_async._workers import Workers
from kvpull_async.gathering import fill, gathered
from kvpull_async.memory.base import Batches, Until
from tests.loop_nodes import eventually
from tests.serving import Scene


def pieces(gate: threading.Event | None = None) -> Batches:
    yield [memoryview(b"some "), memoryview(b"bytes ")]
    if gate is not None:
        gate.wait(20)
    yield [memoryview(b"of a cache")]


@pytest.mark.parametrize("here", [True, False])
async def test_all_bytes_come_in_their_order(here: bool) -> None:
    scene = Scene()
    assert await gathered(pieces(), scene.entry, scene.workers, here=here, until=Until()) == b"some bytes of a cache"
    await eventually(lambda: not scene.entry.busy)
    scene.workers.close(5.0)


def reused() -> Batches:
    """As of memory that is staged: the place of one batch is the next one's."""
    place = bytearray(5)
    for text in (b"some ", b"bytes", b" more"):
        place[:] = text
        yield [memoryview(place)[:2], memoryview(place)[2:]]
    place[:] = b"wrong"


@pytest.mark.parametrize("here", [True, False])
async def test_bytes_of_a_batch_are_taken_before_the_next_is_asked_for(here: bool) -> None:
    scene = Scene()
    assert await gathered(reused(), scene.entry, scene.workers, here=here, until=Until()) == b"some bytes more"
    await eventually(lambda: not scene.entry.busy)
    scene.workers.close(5.0)


async def test_p7_memory_is_held_while_a_worker_reads_whoever_still_waits() -> None:
    scene, gate, until = Scene(), threading.Event(), Until()
    task = asyncio.ensure_future(gathered(pieces(gate), scene.entry, scene.workers, here=False, until=until))
    await eventually(lambda: scene.entry.busy)
    scene.entry.cut_pins()  # it may be taken away once the thread is done
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert scene.entry.busy
    assert until.stopped
    gate.set()
    await eventually(lambda: not scene.entry.busy)
    scene.workers.close(5.0)


def test_each_piece_gets_its_part_of_the_payload() -> None:
    memory = bytearray(8)
    fill([memoryview(memory)[5:8], memoryview(memory)[0:2]], b"abcde")
    assert memory == b"de\0\0\0abc"


async def test_memory_that_no_worker_takes_is_not_held() -> None:
    scene, workers = Scene(), Workers(1)
    workers.close(1.0)
    with pytest.raises(RuntimeError, match="shut down"):
        await gathered(pieces(), scene.entry, workers, here=False, until=Until())
    assert not scene.entry.busy


@pytest.mark.parametrize("here", [True, False])
async def test_p7_a_lending_ends_with_what_fails_in_the_middle(here: bool) -> None:
    scene, ended, gone = Scene(), threading.Event(), memoryview(b"")
    gone.release()

    def lending() -> Batches:
        try:
            yield [memoryview(b"some "), gone]
            yield [memoryview(b"bytes")]
        finally:
            ended.set()

    with pytest.raises(TypeError, match="bytes-like") as caught:
        await gathered(lending(), scene.entry, scene.workers, here=here, until=Until())
    assert ended.is_set(), f"kept by {caught.value!r}"
    await eventually(lambda: not scene.entry.busy)
    scene.workers.close(5.0)


@pytest.mark.parametrize("by", ["a cancellation", "the end of the cache"])
async def test_p1_memory_is_not_waited_for_when_nobody_wants_its_bytes(by: str) -> None:
    scene, gate, until = Scene(), threading.Event(), Until()
    task = asyncio.ensure_future(gathered(pieces(gate), scene.entry, scene.workers, here=False, until=until))
    await eventually(lambda: scene.entry.busy)
    assert not until.stopped
    if by == "a cancellation":
        task.cancel()
    else:
        scene.entry.cut_pins()
    await asyncio.sleep(0)
    assert until.stopped
    gate.set()
    await asyncio.wait([task])
    await eventually(lambda: not scene.entry.busy)
    scene.workers.close(5.0)
