"""Bytes that ride on a frame: all of them, and the memory is held no longer than it is read."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvpull_async._workers import Workers
from kvpull_async.gathering import fill, gathered
from kvpull_async.memory.base import Batches
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
    assert await gathered(pieces(), scene.entry, scene.workers, here=here) == b"some bytes of a cache"
    await eventually(lambda: not scene.entry.busy)
    scene.workers.close(5.0)


async def test_p7_memory_is_held_while_a_worker_reads_whoever_still_waits() -> None:
    scene, gate = Scene(), threading.Event()
    task = asyncio.ensure_future(gathered(pieces(gate), scene.entry, scene.workers, here=False))
    await eventually(lambda: scene.entry.busy)
    scene.entry.cut_pins()  # it may be taken away once the thread is done
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert scene.entry.busy
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
        await gathered(pieces(), scene.entry, workers, here=False)
    assert not scene.entry.busy
