"""What the tests of the ways to a device and from it share: one with a block, and what fills and reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np
from numpy.typing import NDArray

from kvpull_async._deadline import Deadline
from kvpull_async.memory.base import PIECE_BYTES, PIECE_VIEWS, Batches, Region, Until
from kvpull_async.memory.npu.device import Device
from kvpull_async.memory.npu.layout import SLOT_BYTES, Load, loads
from kvpull_async.memory.npu.staged import Staged
from kvpull_async.memory.npu.staging import Slots
from kvpull_async.values import Placement
from tests.unit.memory.emulated import BOUND, Bytes, Npu, emulated, pattern

__all__ = [
    "DEPTH",
    "ROOM",
    "SHARED",
    "Side",
    "fill",
    "nobody",
    "put",
    "read",
    "scattered",
    "side",
    "spread",
    "whole",
]


ROOM = 8 * PIECE_BYTES
DEPTH = 3
SHARED = 64


class Side:
    """A device with one block, and the ways to and from it."""

    def __init__(self, npu: Npu) -> None:
        self.npu = npu
        self.emulator = npu.emulator
        self.device = Device(npu.acl, 0)
        self.device.open()
        self.made: list[int] = []
        self.slots = Slots(self._slot, self.device.free_host)
        self.staged = Staged(self.device, self.slots)
        self.block = self.device.malloc(ROOM)
        self.region = Region(self.block, ROOM, Placement.DEVICE, device=0)

    def _slot(self, until: Until) -> int:
        self.made.append(self.device.malloc_host(SLOT_BYTES, until))
        return self.made[-1]

    def memory(self) -> Bytes:
        return self.emulator.memory(self.block, ROOM)

    def plan(self, rows: NDArray[np.int64]) -> Iterator[Load]:
        return loads([self.region], rows)

    def landing(
        self,
        rows: NDArray[np.int64],
        until: Until | None = None,
        landed: Callable[[int], None] | None = None,
    ) -> Batches:
        return self.staged.landing(self.plan(rows), until or Until(), landed or nobody)

    def lending(self, rows: NDArray[np.int64], until: Until | None = None) -> Batches:
        return self.staged.lending(self.plan(rows), until or Until())

    def idle(self) -> bool:
        return "taken=0" in repr(self.slots)

    def works(self) -> None:
        data = pattern(3 * PIECE_BYTES, seed=time.monotonic_ns())
        fill(self.landing(whole(data.size)), data)
        assert read(self.lending(whole(data.size))) == bytes(data)

    def close(self) -> None:
        self.emulator.resume()
        self.slots.close()
        self.device.free(self.block).result(BOUND)
        assert self.device.copiers.close(Deadline.after_ms(BOUND * 1000)) == 0


@contextmanager
def side(*, clean: bool = True, release: str = "9.0", **settings: int) -> Iterator[Side]:
    with emulated(clean=clean, release=release, **settings) as npu:
        made = Side(npu)
        try:
            yield made
            if clean:
                assert made.idle()
        finally:
            made.close()


def nobody(nbytes: int) -> None:
    """Nobody is told."""


def whole(nbytes: int, start: int = 0) -> NDArray[np.int64]:
    return np.array([(0, start, nbytes)], np.int64)


def scattered() -> NDArray[np.int64]:
    """Rows from everywhere in the block, none over another: aligned, odd, long, short, empty."""
    random, rows, at = np.random.default_rng(11), [], 0
    while at < ROOM - 2 * PIECE_BYTES:
        length = int(random.choice([0, 1, 63, 64, 100, 4096, 70_000, PIECE_BYTES + 64]))
        rows.append((0, at, length))
        at += length + int(random.choice([0, 0, 1, 28, 64, 5000]))
        at = -(-at // 64) * 64 if random.random() < 0.6 else at
    order = random.permutation(len(rows))
    return np.array(rows, np.int64)[order]


def put(batch: Sequence[memoryview], data: Bytes, at: int) -> int:
    for view in batch:
        view[:] = bytes(data[at : at + view.nbytes])
        at += view.nbytes
    return at


def fill(landing: Batches, data: Bytes) -> None:
    at = 0
    with closing(landing):
        for batch in landing:
            assert 0 < sum(view.nbytes for view in batch) <= PIECE_BYTES
            assert len(batch) <= PIECE_VIEWS
            at = put(batch, data, at)
    assert at == data.size


def read(lending: Batches) -> bytes:
    with closing(lending):
        return b"".join(bytes(view) for batch in lending for view in batch)


def spread(rows: NDArray[np.int64], data: Bytes, before: Bytes) -> Bytes:
    """The block as it must be when the data have landed."""
    expected, at = before.copy(), 0
    for _, start, length in rows.tolist():
        expected[start : start + length] = data[at : at + length]
        at += length
    return expected
