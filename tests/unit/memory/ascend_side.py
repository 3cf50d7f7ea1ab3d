"""What the tests of memory on an NPU share: one of the emulator's, and the ways to write, read and look at it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpull_async.memory.ascend import AscendMemory, open_memory
from kvpull_async.memory.base import Allocation, Region, Until, copy_batches
from kvpull_async.values import Placement
from tests.unit.memory.emulated import Bytes, Npu, Thread, emulated, pattern

__all__ = ["DEVICE", "HOST", "MIB", "Rows", "Side", "free_what_is_left", "iter_once", "pairs", "side", "whole"]

HOST, DEVICE = Placement.HOST, Placement.DEVICE
MIB = 1024 * 1024
Rows = NDArray[np.int64]


class Side:
    def __init__(self, npu: Npu, number: int, budgets: Mapping[Placement, int | None]) -> None:
        self.npu = npu
        self.emulator = npu.emulator
        self.memory: AscendMemory = open_memory(npu.acl, device_id=number, budgets=budgets)
        self.failures: list[BaseException] = []
        self.memory.device.failed = self.failures.append

    def cache(self, nbytes: int = MIB, tensors: int = 1, placement: Placement = DEVICE) -> Allocation:
        return self.memory.allocate(tensors=tensors, tensor_nbytes=nbytes, placement=placement)

    def look(self, region: Region) -> Bytes:
        """A region's bytes, writable, wherever they are."""
        if region.device is not None:
            return self.emulator.memory(region.address, region.nbytes)
        return np.frombuffer(self.memory.views([region])[0], np.uint8)

    def write(self, regions: tuple[Region, ...], rows: Rows, data: Bytes, until: Until | None = None) -> None:
        for _ in copy_batches(iter_once(data), self.memory.landing(regions, rows, until=until)):
            pass

    def read(self, regions: tuple[Region, ...], rows: Rows, until: Until | None = None) -> bytes:
        with closing(self.memory.lending(regions, rows, until=until)) as lending:
            return b"".join(bytes(view) for batch in lending for view in batch)

    def works(self) -> None:
        cache = self.cache(3 * MIB)
        data = pattern(3 * MIB, seed=time.monotonic_ns())
        self.write(cache.regions, whole(3 * MIB), data)
        assert np.array_equal(self.look(cache.regions[0]), data)
        assert self.read(cache.regions, whole(3 * MIB)) == bytes(data)
        self.memory.free(cache)


def iter_once(data: Bytes) -> Any:
    yield [memoryview(data)]


@contextmanager
def side(
    *,
    number: int = 0,
    clean: bool = True,
    release: str = "9.0",
    budgets: Mapping[Placement, int | None] | None = None,
    **settings: int,
) -> Iterator[Side]:
    with emulated(clean=clean, release=release, **settings) as npu:
        made = Side(npu, number, budgets or {})
        try:
            yield made
        finally:
            npu.emulator.resume()
            made.memory.close()


def whole(nbytes: int, tensor: int = 0, start: int = 0) -> Rows:
    return np.array([(tensor, start, nbytes)], np.int64)


def pairs(*rows: tuple[int, int, int, int, int]) -> Rows:
    return np.array(rows, np.int64).reshape(-1, 5)


def free_what_is_left(npu: Npu) -> None:
    """The emulator's own device memory: of the first of them that is found."""
    thread = Thread()

    def free() -> None:
        npu.bind()
        for address in _mapped():
            npu.acl.aclrtFree(address)

    thread.run(free)
    thread.close()


def _mapped() -> list[int]:
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        lines = [line.split() for line in maps if "/memfd:acl-emulator" in line]
    return [int(line[0].split("-")[0], 16) + 64 for line in lines if line[1].startswith("---")]
