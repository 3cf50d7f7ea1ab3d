"""Which cache has the memory at an address. It must not touch that memory.

Peers ask, on the loop: the table is kept up to date with every cache, and all addresses of an offer are looked up at
once.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async.held import Entry, may_know
from kvpull_async.memory.base import Region

__all__ = ["Addresses"]

Numbers = NDArray[np.int64]
_TOP: Final = 2**63 - 1
_FEW: Final = 1024
"""Fewest rows that the table has room for."""


class Addresses:
    """A row for each tensor of some caches, in the order in which these were made."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._begins, self._ends, self._owners, self._crowds = np.zeros((4, _FEW), np.int64)
        self._used = self._dead = 0
        self._allowed: list[frozenset[int] | None] = [None]
        """Who may know of a row, by the number of that crowd."""
        self._numbers: dict[frozenset[int] | None, int] = {None: 0}

    def add(self, entry: Entry) -> None:
        """A cache that is younger than all that are in the table."""
        if self._used + len(entry.regions) > len(self._begins):
            self._resize(2 * (self._used + len(entry.regions)))
        first, last = self._used, self._used + len(entry.regions)
        self._begins[first:last] = [min(region.address, _TOP) for region in entry.regions]
        self._ends[first:last] = [min(region.address + region.nbytes, _TOP) for region in entry.regions]
        self._owners[first:last] = entry.cache_id
        self._crowds[first:last] = self._number(entry.allowed)
        self._used = last
        self._entries[entry.cache_id] = entry

    def _number(self, allowed: frozenset[int] | None) -> int:
        number = self._numbers.setdefault(allowed, len(self._allowed))
        if number == len(self._allowed):
            self._allowed.append(allowed)
        return number

    def remove(self, entry: Entry) -> None:
        """Nothing happens if it is not in the table."""
        if self._entries.pop(entry.cache_id, None) is None:
            return
        first, last = np.searchsorted(self._owners[: self._used], (entry.cache_id, entry.cache_id + 1))
        self._begins[first:last], self._ends[first:last] = _TOP, -1
        self._dead += int(last - first)
        if self._dead > max(self._used // 2, _FEW):
            self._resize(len(self._begins))

    def find(self, addresses: Numbers, nbytes: int, *, peer: int | None = None) -> list[tuple[Entry, Region] | None]:
        """For each address the tensor that has those bytes, of the youngest cache if several have. For a peer only
        caches count that it may know of.
        """
        if not 0 < nbytes <= _TOP or not addresses.size:
            return [None] * addresses.size
        rows = self._rows(addresses, nbytes, peer)
        owners = self._owners[rows]
        tensors = rows - np.searchsorted(self._owners[: self._used], owners)
        found: list[tuple[Entry, Region] | None] = []
        for row, owner, tensor in zip(rows.tolist(), owners.tolist(), tensors.tolist(), strict=True):
            entry = self._entries[owner] if row >= 0 else None
            found.append(None if entry is None else (entry, entry.regions[tensor]))
        return found

    def _rows(self, addresses: Numbers, nbytes: int, peer: int | None) -> Numbers:
        """The number of the row for each address, or -1."""
        order = np.argsort(addresses)
        points = addresses[order]
        begins, lasts = self._begins[: self._used], self._ends[: self._used] - nbytes
        rows = np.flatnonzero((begins <= points[-1]) & (lasts >= points[0]))
        low, high = np.searchsorted(points, begins[rows]), np.searchsorted(points, lasts[rows], "right")
        some = high > low  # the points low..high lie in that tensor
        if len(self._allowed) > 1:
            some[some] = self._known(rows[some], peer)
        result = np.empty_like(addresses)
        result[order] = _youngest(rows[some], low[some], high[some], count=points.size)
        return result

    def _known(self, rows: Numbers, peer: int | None) -> NDArray[np.bool_]:
        """Whether the peer may know of each row."""
        crowds, numbers = np.unique(self._crowds[rows], return_inverse=True)
        return np.array([may_know(self._allowed[crowd], peer) for crowd in crowds.tolist()], np.bool_)[numbers]

    def _resize(self, room: int) -> None:
        """With room for so many rows, and without those of caches that are no more, and their crowds."""
        alive = np.flatnonzero(self._ends[: self._used] >= 0)
        old = (self._begins, self._ends, self._owners, self._crowds)
        self._begins, self._ends, self._owners, self._crowds = new = np.zeros((4, room), np.int64)
        for before, after in zip(old, new, strict=True):
            after[: alive.size] = before[alive]
        self._used, self._dead = alive.size, 0
        crowds, numbers = np.unique(np.append(self._crowds[: alive.size], 0), return_inverse=True)  # 0: everyone
        self._crowds[: alive.size] = numbers[:-1]
        self._allowed = [self._allowed[crowd] for crowd in crowds.tolist()]
        self._numbers = {allowed: number for number, allowed in enumerate(self._allowed)}

    def __repr__(self) -> str:
        return f"<Addresses caches={len(self._entries)} rows={self._used - self._dead}>"


def _youngest(rows: Numbers, low: Numbers, high: Numbers, *, count: int) -> Numbers:
    """For each of `count` points the largest of the rows, which ascend, whose range low..high has it; -1 if none has.

    A range is covered by two ranges of 2^k points, which are halved until they are points: however many ranges there
    are and however they overlap, it takes no step for each.
    """
    levels = np.frexp(high - low)[1] - 1
    best = np.full((2, count.bit_length(), count), -1, np.int64)
    best[0, levels, low] = rows  # of several rows for one place the last stays, which is the largest
    best[1, levels, high - (1 << levels)] = rows
    ranges: Numbers = np.maximum(best[0], best[1])
    for level in range(len(ranges) - 1, 0, -1):
        half, wide, narrow = 1 << (level - 1), ranges[level], ranges[level - 1]
        np.maximum(narrow, wide, out=narrow)
        np.maximum(narrow[half:], wide[: count - half], out=narrow[half:])
    best_of_all: Numbers = ranges[0]
    return best_of_all
