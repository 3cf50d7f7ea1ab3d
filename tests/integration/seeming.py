"""Memory of the host that passes for that of a device, so that its pieces can be made to fail or to wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from numpy import int64
from numpy.typing import NDArray

from kvpull_async.memory.base import Batches, MemoryBackend, Region, Until
from kvpull_async.testing.faults import WrappedMemory
from kvpull_async.values import Placement


class SeemingDevice(WrappedMemory):
    """What is registered there is no loop's and no other process's to touch, and whoever uses it says how long it is
    to wait.
    """

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner, kind="seeming")

    def pieces(self, inner: Batches, until: Until, *, reading: bool) -> Batches:
        """What becomes of the pieces that are lent (`reading`), or are to be filled."""
        raise NotImplementedError

    def adopt(
        self, addresses: Sequence[int], *, tensor_nbytes: int, placement: Placement, owners: Sequence[object] = ()
    ) -> tuple[Region, ...]:
        regions = super().adopt(addresses, tensor_nbytes=tensor_nbytes, placement=placement, owners=owners)
        return tuple(replace(region, device=0) for region in regions)

    def landing(
        self,
        regions: Sequence[Region],
        segments: NDArray[int64],
        *,
        until: Until | None = None,
        landed: Callable[[int], None] | None = None,
    ) -> Batches:
        assert until is not None
        return self.pieces(super().landing(regions, segments, until=until, landed=landed), until, reading=False)

    def lending(self, regions: Sequence[Region], segments: NDArray[int64], *, until: Until | None = None) -> Batches:
        assert until is not None
        return self.pieces(super().lending(regions, segments, until=until), until, reading=True)
