"""What is measured: the same memory on both sides, and five ways to pull parts of it.

It must not know how the bytes travel: the library, plain sockets and the check afterwards all read the same pulls.

The memory is 80 tensors of 256 blocks of 32 KiB, 640 MiB. Seen as a contiguous cache it has two batch entries of 4 MiB
per tensor, seen as a paged cache its blocks. No two segments of a pull are neighbours, so nothing merges by luck.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FULL",
    "KIB",
    "MIB",
    "QUICK",
    "SMALL",
    "Arena",
    "BlocksPull",
    "EntryPull",
    "Pull",
    "Shape",
    "Workload",
    "build",
    "own_memory",
    "wrong_bytes",
]

KIB: Final = 1024
MIB: Final = 1024 * KIB
POISON: Final = 0xA5
Bytes = NDArray[np.uint8]
Segment = tuple[int, int, int, int, int]
"""Source tensor, offset in it, destination tensor, offset in it, bytes."""


@dataclass(frozen=True)
class Shape:
    """How much memory one side has."""

    tensors: int
    blocks: int
    block_nbytes: int

    @property
    def tensor_nbytes(self) -> int:
        return self.blocks * self.block_nbytes

    @property
    def entry_nbytes(self) -> int:
        return self.tensor_nbytes // 2


FULL: Final = Shape(tensors=80, blocks=256, block_nbytes=32 * KIB)
SMALL: Final = Shape(tensors=8, blocks=32, block_nbytes=32 * KIB)
"""For contenders of small pulls only: the same pulls out of less memory."""
QUICK: Final = Shape(tensors=8, blocks=32, block_nbytes=4 * KIB)
"""For trying whether everything runs; its figures mean nothing."""


class Arena:
    """One side's memory: an array of bytes for each tensor."""

    def __init__(self, tensors: Sequence[Bytes]) -> None:
        self.tensors = tensors
        self._views = [tensor.data.cast("B") for tensor in tensors]

    @property
    def addresses(self) -> list[int]:
        return [tensor.ctypes.data for tensor in self.tensors]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where the memory is: address and bytes of each tensor."""
        return [(tensor.ctypes.data, tensor.size) for tensor in self.tensors]

    def view(self, tensor: int, offset: int, nbytes: int) -> memoryview:
        return self._views[tensor][offset : offset + nbytes]

    def fill(self, seed: int) -> None:
        """What a source holds."""
        pattern = _Pattern(seed, len(self.tensors), self.tensors[0].size)
        for index, tensor in enumerate(self.tensors):
            tensor[:] = pattern.tensor(index)

    def poison(self) -> None:
        """What a destination holds before a pull that will be checked. Touches every page."""
        for tensor in self.tensors:
            tensor[:] = POISON


def own_memory(shape: Shape, *, huge: bool = False) -> Arena:
    """Memory as a serving program would have it, outside the library, with pages of 4 KiB (or of 2 MiB)."""
    memory = mmap.mmap(-1, shape.tensors * shape.tensor_nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return Arena(list(np.frombuffer(memory, np.uint8).reshape(shape.tensors, -1)))


class _Pattern:
    """The bytes of a source, which both sides can make: one random run, read from another place for each tensor.

    The places are an odd number of bytes apart, so that a segment that lands in a wrong tensor or at a wrong offset
    differs from what belongs there.
    """

    _STEP = 4099

    def __init__(self, seed: int, tensors: int, tensor_nbytes: int) -> None:
        rng = np.random.Generator(np.random.SFC64(seed))
        self._run = rng.integers(0, 256, tensor_nbytes + tensors * self._STEP, dtype=np.uint8)
        self._nbytes = tensor_nbytes

    def tensor(self, index: int) -> Bytes:
        start = index * self._STEP
        return self._run[start : start + self._nbytes]


@dataclass(frozen=True)
class EntryPull:
    """The first `nbytes` of batch entry 0 of some tensors, into entry 0 of as many tensors."""

    src: range
    dst: range
    nbytes: int
    per_layer: int = 1

    @property
    def total(self) -> int:
        return len(self.src) * self.nbytes

    def segments(self, shape: Shape) -> list[Segment]:
        assert self.nbytes <= shape.entry_nbytes
        return [(src, 0, dst, 0, self.nbytes) for src, dst in zip(self.src, self.dst, strict=True)]

    def layers(self) -> dict[str, Any]:
        """The keyword arguments that say this to `pull_cache`."""
        n = self.per_layer
        src, dst = (range(tensors.start // n, tensors.stop // n) for tensors in (self.src, self.dst))
        return {"src_layer_range": src, "dst_layer_range": dst, "tensor_num_per_layer": n}


@dataclass(frozen=True)
class BlocksPull:
    """Blocks of every tensor, into other blocks of the same tensor."""

    tensors: int
    src_blocks: tuple[int, ...]
    dst_blocks: tuple[int, ...]
    block_nbytes: int

    @property
    def total(self) -> int:
        return self.tensors * len(self.src_blocks) * self.block_nbytes

    def segments(self, shape: Shape) -> list[Segment]:
        size = shape.block_nbytes
        pairs = list(zip(self.src_blocks, self.dst_blocks, strict=True))
        return [(t, src * size, t, dst * size, size) for t in range(self.tensors) for src, dst in pairs]


Pull = EntryPull | BlocksPull


@dataclass(frozen=True)
class Workload:
    """Some pulls that are timed as one. `count` times, or less once `budget` seconds are over."""

    name: str
    title: str
    pulls: tuple[Pull, ...]
    warmup: int
    count: int
    budget: float = 1.5

    @property
    def nbytes(self) -> int:
        return sum(pull.total for pull in self.pulls)

    @property
    def is_latency(self) -> bool:
        return self.nbytes <= 64 * KIB

    @property
    def in_blocks(self) -> bool:
        return isinstance(self.pulls[0], BlocksPull)


def build(shape: Shape, *, seed: int) -> dict[str, Workload]:
    """All workloads by name. Another seed gives other blocks."""
    tensors, entry = range(shape.tensors), shape.entry_nbytes
    picked = shape.blocks // 4
    blocks = BlocksPull(
        shape.tensors,
        _scattered(shape.blocks, picked, seed=seed),
        _scattered(shape.blocks, picked, seed=seed + 1),
        shape.block_nbytes,
    )
    layers = tuple(EntryPull(tensors[i : i + 2], tensors[i : i + 2], entry, 2) for i in tensors[::2])
    size = _text(entry)
    every = (
        Workload("W1", f"{shape.tensors} tensors x {size}", (EntryPull(tensors, tensors, entry),), 2, 6),
        Workload("W2", f"{shape.tensors} tensors x {picked} blocks of {_text(shape.block_nbytes)}", (blocks,), 2, 8),
        Workload("W3", "one segment of 64 KiB", (EntryPull(range(1, 2), range(2, 3), 64 * KIB),), 100, 600),
        Workload("W4", "one segment of 4 KiB", (EntryPull(range(3, 4), range(4, 5), 4 * KIB),), 100, 600),
        Workload("W5", f"{len(layers)} pulls in turn of 2 tensors x {size}", layers, 1, 5),
    )
    return {work.name: work for work in every}


def _text(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def _scattered(blocks: int, count: int, *, seed: int) -> tuple[int, ...]:
    """Block ids in random order, all even or all odd: no two are neighbours."""
    rng = np.random.default_rng(seed)
    ids = 2 * rng.permutation(blocks // 2)[:count] + rng.integers(2)
    return tuple(ids.tolist())


def wrong_bytes(arena: Arena, pulls: Sequence[Pull], *, shape: Shape, seed: int) -> int:
    """How many bytes of a destination differ from what they must be after these pulls onto poison.

    Looks at all of it: the bytes that were to be pulled, and those that were not to be touched.
    """
    pattern = _Pattern(seed, shape.tensors, shape.tensor_nbytes)
    pulled: dict[int, list[Segment]] = {}
    for pull in pulls:
        for segment in pull.segments(shape):
            pulled.setdefault(segment[2], []).append(segment)
    wanted = np.full(shape.tensor_nbytes, POISON, np.uint8)  # one for all: making it anew takes longer than comparing
    wrong = 0
    for index, tensor in enumerate(arena.tensors):
        segments = pulled.get(index, ())
        for src, start, _, offset, nbytes in segments:
            wanted[offset : offset + nbytes] = pattern.tensor(src)[start : start + nbytes]
        wrong += _differences(tensor, wanted)
        for _, _, _, offset, nbytes in segments:
            wanted[offset : offset + nbytes] = POISON
    return wrong


def _differences(one: Bytes, other: Bytes) -> int:
    """How many bytes differ, looked at in pieces that fit the cache."""
    size = 256 * KIB
    return sum(int(np.count_nonzero(one[at : at + size] != other[at : at + size])) for at in range(0, one.size, size))
