"""How rows of device memory are laid out in staging slots: which bytes share one, at which place. It must not copy.

A slot carries its rows in stream order. Each begins at a multiple of 64 bytes, so that an aligned row stays one that
may be copied asynchronously, and rows whose lengths are such multiples lie side by side, as one view.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async.memory.base import PIECE_BYTES, PIECE_VIEWS, Region

__all__ = ["ALIGNMENT", "SLOT_BYTES", "Load", "aligned", "bases_of", "loads", "named", "overlapping"]

ALIGNMENT: Final = 64
"""Bytes; AscendCL documentation of aclrtMemcpyAsync (up to 8.1): source and destination are aligned to 64 bytes."""
SLOT_BYTES: Final = PIECE_BYTES
_FEW: Final = 64
_WINDOW: Final = 16384
"""Rows looked at together: a table of millions is not to be held several times."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Load:
    """What one slot carries: `addresses` and `lengths` of device memory, and the `places` of these bytes in the slot.
    Neighbours on both sides, of one tensor, are one row.
    """

    addresses: Numbers
    places: Numbers
    lengths: Numbers
    nbytes: int

    def views(self, slot: memoryview) -> list[memoryview]:
        """The bytes in stream order, as few pieces as there can be."""
        if len(self.lengths) == 1:
            start = int(self.places[0])
            return [slot[start : start + self.nbytes]]
        first = _firsts(self.places, self.lengths)
        starts = self.places[first]
        ends = starts + np.add.reduceat(self.lengths, first)
        return [slot[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def aligned(*addresses: Numbers) -> NDArray[np.bool_]:
    """In which rows all of these are multiples of ALIGNMENT."""
    together = np.bitwise_or.reduce(addresses)
    found: NDArray[np.bool_] = together % ALIGNMENT == 0
    return found


def named(regions: Sequence[Region], tensors: Numbers) -> dict[int, Region]:
    """Only those regions that are among the tensors: the other thousands of a cache are not looked at."""
    if len(tensors) <= _FEW:
        numbers = sorted(set(tensors.tolist()))
    else:
        among = np.zeros(len(regions), np.bool_)
        among[tensors] = True
        numbers = np.flatnonzero(among).tolist()
    return {number: regions[number] for number in numbers}


def bases_of(regions: Sequence[Region], tensors: Numbers) -> Numbers:
    """The address of each region, by its number; of those that are among the tensors."""
    bases = np.zeros(len(regions), np.uint64)
    for number, region in named(regions, tensors).items():
        bases[number] = region.address
    return bases.view(np.int64)


def loads(regions: Sequence[Region], segments: NDArray[np.int64]) -> Iterator[Load]:
    """The segments (rows of tensor, byte offset, length) of device regions, slot by slot."""
    bases = bases_of(regions, segments[:, 0])
    for start in range(0, len(segments), _WINDOW):
        rows = segments[start : start + _WINDOW]
        yield from _slots(*_cut(*_joined(bases[rows[:, 0]] + rows[:, 1], rows[:, 2], rows[:, 0])))


def overlapping(regions: Sequence[Region], segments: NDArray[np.int64]) -> bool:
    """Whether any byte belongs to more than one of the segments."""
    bases = bases_of(regions, segments[:, 0])
    starts = bases[segments[:, 0]] + segments[:, 1]
    ends = starts + segments[:, 2]
    if bool((starts[1:] >= ends[:-1]).all()):  # as most tables are
        return False
    held = segments[:, 2] > 0
    order = np.argsort(starts[held], kind="stable")
    starts, ends = starts[held][order], ends[held][order]
    return bool((starts[1:] < ends[:-1]).any())  # whoever overlaps any overlaps a neighbour


def _firsts(starts: Numbers, lengths: Numbers, tensors: Numbers | None = None) -> NDArray[np.intp]:
    """The rows that do not continue the one before. What is not of one tensor may be of two allocations, which happen
    to lie side by side; no copy may span them.
    """
    breaks = np.empty(len(starts), np.bool_)
    breaks[:1] = True
    np.not_equal(starts[1:], starts[:-1] + lengths[:-1], out=breaks[1:])
    if tensors is not None:
        breaks[1:] |= tensors[1:] != tensors[:-1]
    return np.flatnonzero(breaks)


def _joined(addresses: Numbers, lengths: Numbers, tensors: Numbers) -> tuple[Numbers, Numbers]:
    held = lengths > 0
    if not held.all():
        addresses, lengths, tensors = addresses[held], lengths[held], tensors[held]
    if not len(addresses):
        return addresses, lengths
    first = _firsts(addresses, lengths, tensors)
    return addresses[first], np.add.reduceat(lengths, first)


def _cut(addresses: Numbers, lengths: Numbers) -> tuple[Numbers, Numbers]:
    """None longer than a slot. Pieces of one row never share a slot, since each but the last fills one."""
    if not len(lengths) or int(lengths.max()) <= SLOT_BYTES:
        return addresses, lengths
    pieces = -(-lengths // SLOT_BYTES)
    row = np.repeat(np.arange(len(lengths)), pieces)
    done = (np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * SLOT_BYTES
    return addresses[row] + done, np.minimum(lengths[row] - done, SLOT_BYTES)


def _slots(addresses: Numbers, lengths: Numbers) -> Iterator[Load]:
    padded = -(-lengths // ALIGNMENT) * ALIGNMENT
    starts = np.cumsum(padded) - padded
    ends, views = (starts + padded).tolist(), np.cumsum(padded != lengths).tolist()
    at = filled = viewed = 0
    while at < len(lengths):
        stop = min(bisect_right(ends, filled + SLOT_BYTES, at), bisect_right(views, viewed + PIECE_VIEWS - 1, at) + 1)
        rows = slice(at, max(stop, at + 1))
        mine = lengths[rows]
        yield Load(addresses[rows], starts[rows] - filled, mine, int(mine.sum()))
        at = rows.stop
        filled, viewed = ends[at - 1], views[at - 1]
