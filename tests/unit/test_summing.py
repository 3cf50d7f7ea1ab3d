"""Sums made by a worker: of the memory as it is, held meanwhile, and stopped between two batches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvpull_async import sums
from kvpull_async._workers import Workers
from kvpull_async.memory.base import PIECE_BYTES
from kvpull_async.registry import Entry, Registry
from kvpull_async.summing import Summing, at_once
from kvpull_async.testing.faults import GatedMemory
from kvpull_async.values import CacheDesc, DataType, Placement
from tests.loop_nodes import PlainMemory, eventually

NBYTES = 3 * PIECE_BYTES


class Scene:
    """A cache of one tensor, and a gate in the middle of its lendings."""

    def __init__(self) -> None:
        self.workers = Workers(1)
        self.memory = GatedMemory(PlainMemory(), after=1)
        self.gate = self.memory.lending_gate
        registry, desc = Registry(self.memory), CacheDesc(1, [1, NBYTES], DataType.DT_UINT8)
        allocation = self.memory.allocate(tensors=1, tensor_nbytes=NBYTES, placement=Placement.HOST)
        self.entry: Entry = registry.add(desc, allocation.regions, blocks=False, allocation=allocation)
        self.bytes = np.frombuffer(self.entry.views()[0], np.uint8)
        self.bytes[:] = np.arange(NBYTES) % 251

    def sum(self, name: str = "crc32") -> Summing:
        lending = self.memory.lending(self.entry.regions, np.array([[0, 0, NBYTES]]))
        return Summing(sums.begin(name, where="here"), lending, [self.entry], self.workers)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    made = Scene()
    yield made
    made.gate.open()
    made.workers.close(5.0)


@pytest.mark.parametrize("name", ["crc32", "xxh3"])
async def test_the_sum_is_that_of_the_bytes_and_the_memory_is_held_until_it_is_made(scene: Scene, name: str) -> None:
    scene.gate.close()
    summing = scene.sum(name)
    await scene.gate.reached()
    assert scene.entry.busy
    scene.gate.open()
    whole = sums.sum_of(sums.begin(name, where="here"), [[scene.bytes.data]])
    assert await summing.digest() == whole
    await summing.settled
    await eventually(lambda: not scene.entry.busy)


async def test_p1_an_abort_stops_it_between_two_batches_and_the_memory_is_held_until_then(scene: Scene) -> None:
    scene.gate.close()
    summing = scene.sum()
    await scene.gate.reached()
    summing.abort()
    await asyncio.sleep(0.01)
    assert not summing.settled.done()
    assert scene.entry.busy
    scene.gate.open()
    with pytest.raises(ConnectionAbortedError):
        await summing.digest()
    await summing.settled
    await eventually(lambda: not scene.entry.busy)
    summing.abort()


async def test_memory_that_is_taken_away_ends_it(scene: Scene) -> None:
    scene.gate.close()
    summing = scene.sum()
    await scene.gate.reached()
    scene.entry.cut_pins()
    scene.gate.open()
    with pytest.raises(ConnectionAbortedError):
        await summing.digest()


async def test_memory_that_cannot_be_read_is_an_error_of_the_sum(scene: Scene) -> None:
    def lending() -> sums.Pieces:
        yield [memoryview(b"some")]
        raise OSError(14, "Bad address")

    summing = Summing(sums.begin("crc32", where="here"), lending(), [scene.entry], scene.workers)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="Bad address"):
        await summing.digest()
    await eventually(lambda: not scene.entry.busy)


async def test_a_sum_that_cannot_begin_holds_nothing(scene: Scene) -> None:
    scene.workers.close(5.0)
    with pytest.raises(RuntimeError, match="shut down"):
        scene.sum()
    assert not scene.entry.busy


def test_only_a_few_bytes_in_a_few_rows_of_ordinary_memory_are_summed_on_a_loop() -> None:
    assert at_once(128 * 1024, 1024, direct=True)
    assert not at_once(128 * 1024 + 1, 1, direct=True)
    assert not at_once(2000, 1025, direct=True)
    assert not at_once(1, 1, direct=False)
