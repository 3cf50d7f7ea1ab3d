"""Sums of what a cache lends: few bytes here and now, others by a worker, held meanwhile, and stopped between two
batches.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvpull_async import sums
from kvpull_async._workers import Job, Workers
from kvpull_async.memory.base import PIECE_BYTES, Batches, Until
from kvpull_async.registry import Entry, Registry
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.summing import Summed
from kvpull_async.testing.faults import GatedMemory
from kvpull_async.values import CacheDesc, DataType, Placement
from tests.loop_nodes import PlainMemory, eventually
from tests.orders import endings

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

    def sum(self, name: str = "crc32", lending: Batches | None = None, *, few: bool = False) -> Summed:
        """Of the whole cache, unless `lending` is something else; `few` as if that were few bytes in direct memory."""
        if lending is None:
            lending = self.memory.lending(self.entry.regions, np.array([[0, 0, NBYTES]]))
        self.until = Until()
        size = {"nbytes": 1, "rows": 1, "direct": True} if few else {"nbytes": NBYTES, "rows": 1, "direct": False}
        growing = sums.begin(name, where="here")
        return Summed(growing, lending, [self.entry], self.workers, until=self.until, **size)  # type: ignore[arg-type]


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
    await eventually(lambda: summing.settled)
    await eventually(lambda: not scene.entry.busy)


async def test_p1_an_abort_stops_it_between_two_batches_and_the_memory_is_held_until_then(scene: Scene) -> None:
    scene.gate.close()
    summing = scene.sum()
    await scene.gate.reached()
    assert not scene.until.stopped
    summing.abort()
    assert scene.until.stopped, "memory that has to wait would not hear of it"
    await asyncio.sleep(0.01)
    assert not summing.settled
    assert scene.entry.busy
    scene.gate.open()
    with pytest.raises(ConnectionAbortedError):
        await summing.digest()
    await eventually(lambda: summing.settled)
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


@pytest.mark.parametrize("few", [False, True])
async def test_memory_that_cannot_be_read_is_an_error_of_the_sum(scene: Scene, few: bool) -> None:
    def lending() -> Batches:
        yield [memoryview(b"some")]
        raise OSError(14, "Bad address")

    summing = scene.sum(lending=lending(), few=few)
    with pytest.raises(OSError, match="Bad address"):
        await summing.digest()
    await eventually(lambda: summing.settled and not scene.entry.busy)


async def test_p10_without_a_thread_the_sum_is_an_error_and_nothing_is_held(scene: Scene) -> None:
    scene.workers.close(5.0)
    summing = scene.sum()
    assert summing.settled
    assert not scene.entry.busy
    with pytest.raises(LLMException, match=r"no thread to sum with: .*shut down") as caught:
        await summing.digest()
    assert (caught.value.status_code, caught.value.retry_safe) == (LLMStatusCode.LLM_OUT_OF_MEMORY, True)
    summing.abort()


async def test_an_error_of_a_sum_keeps_nothing_alive(scene: Scene) -> None:
    """Not even until the garbage collector comes."""

    def lending() -> Batches:
        yield from ()
        raise OSError(14, "Bad address")

    gc.disable()
    try:
        for asked in (True, False):
            summing = scene.sum(lending=lending(), few=True)
            gone = weakref.ref(summing)
            if asked:
                with pytest.raises(OSError, match="Bad address"):
                    await summing.digest()
            del summing
            assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("nbytes", "rows", "direct", "at_once"),
    [
        (128 * 1024, 1024, True, True), (128 * 1024 + 1, 1, True, False), (2000, 1025, True, False),
        (1, 1, False, False),
    ],
)  # fmt: skip
async def test_only_a_few_bytes_in_a_few_rows_of_ordinary_memory_are_summed_on_a_loop(
    scene: Scene, nbytes: int, rows: int, direct: bool, at_once: bool
) -> None:
    readers: list[threading.Thread] = []

    def lending() -> Batches:
        readers.append(threading.current_thread())
        yield [memoryview(b"some")]

    growing = sums.begin("crc32", where="here")
    summing = Summed(
        growing, lending(), [scene.entry], scene.workers, nbytes=nbytes, rows=rows, direct=direct, until=Until()
    )
    assert summing.settled >= at_once
    assert await summing.digest() == sums.sum_of(sums.begin("crc32", where="here"), [[memoryview(b"some")]])
    assert (readers == [threading.current_thread()]) == at_once


async def test_p1_a_sum_is_aborted_before_its_memory_is_told_to_wait_no_more(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.gate.close()
    summing, heard = scene.sum(), endings(monkeypatch, Job)
    await scene.gate.reached()
    summing.abort()
    assert heard == ["abort", "stop"]
    scene.gate.open()
    await eventually(lambda: summing.settled)
