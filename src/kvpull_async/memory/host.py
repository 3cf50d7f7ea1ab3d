"""Ordinary memory: one sealed memory file per allocated cache, and memory that callers give by address.

It serves `Placement.DEVICE` too, so that the same program runs on a machine without an NPU. It must not know caches.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async.memory.base import (
    PIECE_BYTES,
    PIECE_VIEWS,
    Allocation,
    Batches,
    MemoryBackend,
    Region,
    Until,
    watched,
)
from kvpull_async.memory.budget import Budget
from kvpull_async.memory.copying import CancelFlag, copy_rows
from kvpull_async.memory.mapped import mapped, refused
from kvpull_async.memory.publications import Publications
from kvpull_async.memory.shared import SharedFile
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import Placement
from kvpull_async.values._check import require

__all__ = ["HostMemory"]

_CACHE_LINE: Final = 64
_PAGE: Final = mmap.PAGESIZE
_ROWS: Final = 4096


class HostMemory(MemoryBackend):
    """Host memory with an optional budget (bytes) per placement."""

    name = "host"
    direct = True

    def __init__(self, budgets: Mapping[Placement, int | None] | None = None) -> None:
        self._budgets = {placement: Budget(placement, (budgets or {}).get(placement)) for placement in Placement}
        self._leaving = dict.fromkeys(Placement, 0)
        """What others still have mapped of caches that are gone."""
        self._lock = threading.Lock()  # protects _leaving: caches are allocated in worker threads
        self.publications: Publications = Publications()
        self._files: weakref.WeakSet[SharedFile] = weakref.WeakSet()

    def allocate(self, *, tensors: int, tensor_nbytes: int, placement: Placement) -> Allocation:
        step = _round_up(tensor_nbytes, _PAGE if tensor_nbytes >= _PAGE else _CACHE_LINE)
        nbytes = step * tensors
        self._budgets[placement].reserve(nbytes)
        try:
            owner = _memory_file(nbytes)
            self._files.add(owner)
        except BaseException:
            self._budgets[placement].give_back(nbytes)
            raise
        regions = tuple(Region(owner.address + i * step, tensor_nbytes, placement, owner) for i in range(tensors))
        return Allocation(regions, nbytes, placement)

    def free(self, allocation: Allocation) -> None:
        """The memory counts against the budget until nobody on this machine has it mapped any more."""
        with self._lock:
            self._leaving[allocation.placement] += allocation.nbytes
        self.publications.withdraw(allocation.regions, partial(self._left, allocation.nbytes, allocation.placement))

    def returning(self, placement: Placement) -> bool:
        return bool(self._leaving[placement])

    def disown(self, regions: tuple[Region, ...]) -> None:
        self.publications.withdraw(regions, _nothing)

    def close(self) -> None:
        self.publications.close()
        for file in tuple(self._files):  # the memory is for handles and views, but nobody maps it any more
            file.unshare()

    def adopt(
        self, addresses: Sequence[int], *, tensor_nbytes: int, placement: Placement, owners: Sequence[object] = ()
    ) -> tuple[Region, ...]:
        pairs = zip(addresses, owners or repeat(None, len(addresses)), strict=True)
        return tuple(Region(address, tensor_nbytes, placement, owner) for address, owner in pairs)

    def reach(self, regions: Sequence[Region], *, writing: bool) -> None:
        """What of a tensor is looked at, `refused` says."""
        for i, region in enumerate(regions):
            require(
                mapped(region.address, region.nbytes),
                f"there is no memory at the address given for {_named(i, region)}: it is wrong, or was freed",
            )
        wrong = refused([(region.address, region.nbytes) for region in regions], writing=writing)
        if wrong is not None:
            reason = "be written: it is read-only, or not accessible" if writing else "be read: it is not accessible"
            raise LLMException(
                f"the memory at the address given for {_named(wrong, regions[wrong])} cannot {reason}",
                status_code=LLMStatusCode.LLM_PARAM_INVALID,
            )

    def views(self, regions: Sequence[Region]) -> list[memoryview]:
        return [_view(region) for region in regions]

    def landing(
        self,
        regions: Sequence[Region],
        segments: NDArray[np.int64],
        *,
        until: Until | None = None,
        landed: Callable[[int], None] | None = None,
    ) -> Batches:
        pieces = _batches(regions, segments, _view)
        return pieces if landed is None else watched(pieces, landed)

    def lending(self, regions: Sequence[Region], segments: NDArray[np.int64], *, until: Until | None = None) -> Batches:
        return _batches(regions, segments, _readonly_view)

    def copying(
        self,
        sources: Sequence[Region],
        destinations: Sequence[Region],
        pairs: NDArray[np.int64],
        *,
        until: Until | None = None,
    ) -> Generator[int, None, None]:
        """From address to address: a view for each of many small rows costs more than the copy."""
        into, out_of = _addresses(destinations, pairs[:, 2:4]), _addresses(sources, pairs[:, :2])
        lengths = np.ascontiguousarray(pairs[:, 4])
        ends, flag = np.cumsum(lengths), CancelFlag()
        at = done = 0
        while at < len(lengths):
            fit = int(np.searchsorted(ends, done + PIECE_BYTES, "right"))
            step = slice(at, min(max(fit, at + 1), at + _ROWS))
            yield copy_rows(into[step], out_of[step], lengths[step], flag)
            at, done = step.stop, int(ends[step.stop - 1])

    def _left(self, nbytes: int, placement: Placement) -> None:
        with self._lock:
            self._leaving[placement] -= nbytes
        self._budgets[placement].give_back(nbytes)

    def __repr__(self) -> str:
        used = ", ".join(f"{placement.name}={budget.used}" for placement, budget in self._budgets.items())
        return f"<HostMemory used: {used}>"


def _named(tensor: int, region: Region) -> str:
    return f"tensor {tensor} ({region.address:#x}, {region.nbytes} bytes)"


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _memory_file(nbytes: int) -> SharedFile:
    try:
        return SharedFile(nbytes)
    except OSError as error:
        raise LLMException(
            f"{nbytes} bytes could not be allocated: {error}", status_code=LLMStatusCode.LLM_OUT_OF_MEMORY
        ) from error


def _nothing() -> None:
    """Memory of the caller counts against no budget."""


def _view(region: Region) -> memoryview:
    array = (ctypes.c_char * region.nbytes).from_address(region.address)
    array._kvpull_owner = region.owner  # type: ignore[attr-defined]  # the view keeps the memory alive
    return memoryview(array).cast("B")


def _readonly_view(region: Region) -> memoryview:
    return _view(region).toreadonly()


def _addresses(regions: Sequence[Region], places: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Where the rows of region and byte offset begin."""
    starts = np.array([region.address for region in regions], np.uint64)
    found: NDArray[np.uint64] = starts[places[:, 0]] + places[:, 1].astype(np.uint64)
    return found


def _rows(segments: NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """The rows as Python integers, some at a time: all at once would hold the interpreter lock for long tables."""
    for start in range(0, len(segments), _ROWS):
        # By columns: a list for each row would be work for the garbage collector, which holds everybody up.
        yield from zip(*segments[start : start + _ROWS].T.tolist(), strict=True)


def _batches(
    regions: Sequence[Region], segments: NDArray[np.int64], view_of: Callable[[Region], memoryview]
) -> Batches:
    """Makes views of those tensors only that the segments name: a small pull out of a large cache stays small."""
    views: dict[int, memoryview] = {}
    batch: list[memoryview] = []
    room = PIECE_BYTES
    for tensor, start, length in _rows(segments):
        view = views.get(tensor)
        if view is None:
            view = views[tensor] = view_of(regions[tensor])
        at, end = start, start + length
        while at < end:
            n = min(end - at, room)
            batch.append(view[at : at + n])
            at += n
            room -= n
            if not room or len(batch) == PIECE_VIEWS:
                yield batch
                batch, room = [], PIECE_BYTES
    if batch:
        yield batch
