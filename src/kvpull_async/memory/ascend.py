"""Memory of an NPU, through AscendCL: caches of Placement.DEVICE live there, those of Placement.HOST in host memory.

What comes lands in page-locked slots, and each is copied to the device while the next one fills; what goes is fetched
ahead in the same way. It must not know caches, links or peers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async._deadline import Deadline
from kvpull_async.memory._acl import Acl, MemcpyKind
from kvpull_async.memory.base import PIECE_BYTES, Allocation, Batches, MemoryBackend, Region, Until
from kvpull_async.memory.budget import Budget
from kvpull_async.memory.host import HostMemory
from kvpull_async.memory.npu.device import Device
from kvpull_async.memory.npu.layout import ALIGNMENT, SLOT_BYTES, bases_of, loads, named, overlapping
from kvpull_async.memory.npu.pool import Block, Pool
from kvpull_async.memory.npu.staged import Staged
from kvpull_async.memory.npu.staging import Slots
from kvpull_async.memory.npu.streams import LONGEST, Copies
from kvpull_async.memory.publications import Publications
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import Placement

__all__ = ["AscendMemory", "open_memory"]

_GUARD: Final = 32
"""AscendCL documentation: so many bytes behind each part of a block that is cut up, on A2 and A3."""
_CLOSING: Final = 2.0
"""Seconds that the threads have to end at `close`."""
_ROWS: Final = 4096
_LEFT: Final = "a copy could not be stopped: none of the memory of the device is given back before the process ends"


class AscendMemory(MemoryBackend):
    """One NPU's memory, and the host's. Made by `open_memory`; `close` waits at most 2 s."""

    name = "acl"
    direct = True

    def __init__(self, device: Device, *, budgets: Mapping[Placement, int | None]) -> None:
        self.device: Device = device
        self._host = HostMemory({Placement.HOST: budgets.get(Placement.HOST)})
        self._budget = Budget(Placement.DEVICE, budgets.get(Placement.DEVICE))
        self._pool = Pool(device.malloc, device.free)
        self._slots = Slots(partial(device.malloc_host, SLOT_BYTES), device.free_host)
        self._staged = Staged(device, self._slots)
        self._adopted: Counter[tuple[int, int]] = Counter()
        """How often memory of these addresses and lengths is registered here."""
        self._checked: set[tuple[int, int]] = set()
        """Which of it is known to be the device's. Others' is looked at each time, since nobody says when it goes."""
        self._lock = threading.Lock()  # protects _adopted and _checked
        self._closed = False

    @property
    def publications(self) -> Publications:
        """Those of host memory: another process can only be sent what is on the device."""
        return self._host.publications

    def describe(self) -> dict[str, object]:
        """For the log and for reports: device_id, library, soc, version, missing."""
        return self.device.describe()

    # -- regions ----------------------------------------------------------------------------------------------------

    def allocate(self, *, tensors: int, tensor_nbytes: int, placement: Placement) -> Allocation:
        """Device memory comes from a pool, in one block for all tensors, and is cleared before it is used again. What a
        device that hangs may still clear is lost, and counts against the budget for ever.
        """
        if placement is Placement.HOST:
            return self._host.allocate(tensors=tensors, tensor_nbytes=tensor_nbytes, placement=placement)
        step = _round_up(_round_up(tensor_nbytes, _GUARD) + _GUARD, ALIGNMENT)
        nbytes = step * tensors
        self._budget.reserve(nbytes)
        deadline = Deadline.after_ms(LONGEST * 1000)
        try:
            block = self._pool.take(nbytes, deadline)
        except BaseException:
            self._budget.give_back(nbytes)
            raise
        try:
            self.device.clear(block.address, block.nbytes, deadline, unsettled=lambda: self._pool.lose(block))
        except BaseException:
            self._give_back(block, nbytes)
            raise
        places = range(block.address, block.address + nbytes, step)
        regions = tuple(Region(at, tensor_nbytes, placement, block, self.device.number) for at in places)
        return Allocation(regions, nbytes, placement)

    def free(self, allocation: Allocation) -> None:
        if allocation.placement is Placement.HOST:
            self._host.free(allocation)
        else:
            self._give_back(allocation.regions[0].owner, allocation.nbytes)

    def waits(self, placement: Placement) -> bool:
        return placement is Placement.DEVICE

    def returning(self, placement: Placement) -> bool:
        return placement is Placement.HOST and self._host.returning(placement)

    def adopt(
        self, addresses: Sequence[int], *, tensor_nbytes: int, placement: Placement, owners: Sequence[object] = ()
    ) -> tuple[Region, ...]:
        """Addresses of Placement.DEVICE are the NPU's, as `data_ptr()` of a torch_npu tensor."""
        made = self._host.adopt(addresses, tensor_nbytes=tensor_nbytes, placement=placement, owners=owners)
        if placement is Placement.HOST:
            return made
        with self._lock:
            self._adopted.update((each.address, each.nbytes) for each in made)
        return tuple(Region(each.address, each.nbytes, placement, each.owner, self.device.number) for each in made)

    def disown(self, regions: tuple[Region, ...]) -> None:
        gone = [(region.address, region.nbytes) for region in regions if region.device is not None]
        with self._lock:
            for place in gone:
                self._adopted[place] -= 1
                if self._adopted[place] <= 0:
                    del self._adopted[place]
            self._checked.difference_update(gone)
        self._host.disown(regions)

    def leak(self, regions: Sequence[Region]) -> None:
        for block in {region.owner for region in regions if isinstance(region.owner, Block)}:
            self._pool.lose(block)

    def reach(self, regions: Sequence[Region], *, writing: bool) -> None:
        """What is said to be the device's is looked at when bytes move: asking the device may take a while."""
        if regions[0].device is None:
            self._host.reach(regions, writing=writing)

    def views(self, regions: Sequence[Region]) -> list[memoryview]:
        if regions and regions[0].device is not None:
            raise LLMException(
                f"the memory is that of NPU {self.device.number}, which the host cannot read or write: copy it to a "
                "cache of Placement.HOST (copy_cache), or register tensors of torch_npu and use those",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        return self._host.views(regions)

    # -- bytes ------------------------------------------------------------------------------------------------------

    def landing(
        self,
        regions: Sequence[Region],
        segments: NDArray[np.int64],
        *,
        until: Until | None = None,
        landed: Callable[[int], None] | None = None,
    ) -> Batches:
        if not _any_on_device(regions, segments):
            return self._host.landing(regions, segments, until=until, landed=landed)
        return self._landing(regions, segments, until or Until(), landed or _nobody)

    def lending(self, regions: Sequence[Region], segments: NDArray[np.int64], *, until: Until | None = None) -> Batches:
        if not _any_on_device(regions, segments):
            return self._host.lending(regions, segments, until=until)
        return self._lending(regions, segments, until or Until())

    def copying(
        self,
        sources: Sequence[Region],
        destinations: Sequence[Region],
        pairs: NDArray[np.int64],
        *,
        until: Until | None = None,
    ) -> Generator[int, None, None]:
        """Within the device, or within the host's memory, at once; between them by way of the slots."""
        used = (*named(sources, pairs[:, 0]).values(), *named(destinations, pairs[:, 2]).values())
        there = {region.device is not None for region in used}
        if there == {True}:
            return self._copying(sources, destinations, pairs, until or Until())
        if True in there:
            return super().copying(sources, destinations, pairs, until=until)
        return self._host.copying(sources, destinations, pairs, until=until)

    def watch(self, *, failed: Callable[[BaseException], object], held: Callable[[bool], object]) -> None:
        self.device.failed, self.device.copiers.held = failed, held

    def close(self) -> None:
        """Device memory goes back, also that of caches nobody released; but none of it while a copy cannot be stopped:
        then all of it stays, for the process.
        """
        if self._closed:
            return
        self._closed = True
        deadline = Deadline.after_ms(_CLOSING * 1000)
        self._pool.hold()  # a transfer that ends now may give back what a copy still writes
        self._slots.close()
        if self.device.copiers.stop(deadline):
            self._pool.close()
        else:
            self._pool.abandon()
            self.device.failed(LLMException(_LEFT, status_code=LLMStatusCode.LLM_FAILED))
        self._slots.returned(deadline)  # what comes later cannot be freed any more
        self.device.copiers.close(deadline)
        self._host.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _landing(
        self, regions: Sequence[Region], segments: NDArray[np.int64], until: Until, landed: Callable[[int], None]
    ) -> Batches:
        self._check(named(regions, segments[:, 0]), until)
        done = 0
        for rows, on_device in _alike(regions, segments):
            hear = partial(_told, landed, done)
            if on_device:
                ordered = overlapping(regions, rows)
                yield from self._staged.landing(loads(regions, rows), until, hear, ordered=ordered)
            else:
                yield from self._host.landing(regions, rows, landed=hear)
            done += int(rows[:, 2].sum())

    def _lending(self, regions: Sequence[Region], segments: NDArray[np.int64], until: Until) -> Batches:
        self._check(named(regions, segments[:, 0]), until)
        for rows, on_device in _alike(regions, segments):
            if on_device:
                yield from self._staged.lending(loads(regions, rows), until)
            else:
                yield from self._host.lending(regions, rows)

    def _check(self, regions: Mapping[int, Region], until: Until) -> None:
        """LLM_PARAM_INVALID before a byte is copied, where adopted memory is not the device's."""
        unknown = {
            tensor: region
            for tensor, region in regions.items()
            if region.device is not None
            and not isinstance(region.owner, Block)
            and (region.address, region.nbytes) not in self._checked
        }
        if unknown:
            self.device.check_places(unknown, until)
            places = {(region.address, region.nbytes) for region in unknown.values()}
            with self._lock:
                self._checked |= places & self._adopted.keys()

    def _copying(
        self, sources: Sequence[Region], destinations: Sequence[Region], pairs: NDArray[np.int64], until: Until
    ) -> Generator[int, None, None]:
        self._check(named(sources, pairs[:, 0]), until)
        self._check(named(destinations, pairs[:, 2]), until)
        ordered = overlapping(destinations, pairs[:, 2:])
        bases = bases_of(sources, pairs[:, 0]), bases_of(destinations, pairs[:, 2])
        ends = np.cumsum(pairs[:, 4])
        at = done = 0
        while at < len(pairs):
            fit = int(np.searchsorted(ends, done + PIECE_BYTES, "right"))
            rows = pairs[at : min(max(fit, at + 1), at + _ROWS)]
            into, out_of = bases[1][rows[:, 2]] + rows[:, 3], bases[0][rows[:, 0]] + rows[:, 1]
            lengths = np.ascontiguousarray(rows[:, 4])
            copies = Copies(into, out_of, lengths, MemcpyKind.DEVICE_TO_DEVICE, ordered)
            self._finish(self.device.copy(copies, until), until)
            at += len(rows)
            yield int(ends[at - 1]) - done
            done = int(ends[at - 1])

    def _finish(self, copy: Future[None], until: Until) -> None:
        error = self.device.copiers.outcome(copy, until)
        if error is not None:
            raise error

    def _give_back(self, block: Block, nbytes: int) -> None:
        if self.device.copiers.unsettled:  # perhaps it is this one that is still written
            self._pool.lose(block)
        if self._pool.give(block):
            self._budget.give_back(nbytes)

    def __repr__(self) -> str:
        return f"<AscendMemory {self.device!r} {self._budget!r} {self._pool!r} {self._slots!r}>"


def open_memory(acl: Acl, *, device_id: int, budgets: Mapping[Placement, int | None]) -> AscendMemory:
    """Initialise AscendCL and open a device; blocks, maybe for seconds. AclError, or LLM_PARAM_INVALID when there is no
    such device.
    """
    device = Device(acl, device_id)
    device.open()
    return AscendMemory(device, budgets=budgets)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _alike(regions: Sequence[Region], segments: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], bool]]:
    """The segments, run by run of those that are all on the device, or all the host's, and which."""
    there = np.zeros(len(regions), np.bool_)
    there[[tensor for tensor, region in named(regions, segments[:, 0]).items() if region.device is not None]] = True
    on_device = there[segments[:, 0]]
    bounds = [0, *(np.flatnonzero(on_device[1:] != on_device[:-1]) + 1).tolist(), len(segments)]
    for start, stop in pairwise(bounds):
        if start < stop:
            yield segments[start:stop], bool(on_device[start])


def _any_on_device(regions: Sequence[Region], segments: NDArray[np.int64]) -> bool:
    return any(region.device is not None for region in named(regions, segments[:, 0]).values())


def _told(landed: Callable[[int], None], before: int, nbytes: int) -> None:
    landed(before + nbytes)


def _nobody(nbytes: int) -> None:
    """Nobody is told what has landed."""
