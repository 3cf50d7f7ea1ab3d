"""Which cache has the memory at an address. It must not touch that memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from kvpull_async.held import Entry
from kvpull_async.memory.base import Region

__all__ = ["Addresses"]


class Addresses:
    """A table of all tensors of some caches, made anew after `forget` when it is next asked for."""

    def __init__(self, entries: Callable[[], Iterable[Entry]]) -> None:
        self._entries = entries
        self._found: list[tuple[Entry, Region]] | None = None

    def forget(self) -> None:
        """The caches have changed."""
        self._found = None

    def find(self, address: int, nbytes: int) -> tuple[Entry, Region] | None:
        """The tensor that has those bytes, of the youngest cache if several have."""
        if self._found is None:
            self._found = [(entry, region) for entry in self._entries() for region in entry.regions]
            self._begins = np.array([region.address for _, region in self._found], np.uint64)
            self._ends = self._begins + np.array([region.nbytes for _, region in self._found], np.uint64)
        if not 0 <= address < 2**63 or not 0 < nbytes < 2**63:
            return None
        begin, end = np.uint64(address), np.uint64(address + nbytes)
        inside = np.flatnonzero((self._begins <= begin) & (self._ends >= end))
        return self._found[int(inside[-1])] if inside.size else None
