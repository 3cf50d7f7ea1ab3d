"""Every memory keeps the contract, the gated one too, and that of an NPU with each of the runtimes users have."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpull_async.memory import _acl
from kvpull_async.memory.ascend import open_memory
from kvpull_async.memory.base import MemoryBackend, Region
from kvpull_async.memory.host import HostMemory
from kvpull_async.testing.contracts import MemoryContract, WaitingMemoryContract
from kvpull_async.testing.faults import GatedMemory
from kvpull_async.values import Placement
from tests import npu


class TestHostMemory(MemoryContract):
    def make_memory(self) -> MemoryBackend:
        return HostMemory()


class TestGatedMemoryWithOpenGates(MemoryContract):
    def make_memory(self) -> MemoryBackend:
        return GatedMemory(HostMemory())


class OnNpu(MemoryContract):
    """What is said of an NPU's memory is looked at with the emulator's eye."""

    host_views = False
    foreign_placement = Placement.DEVICE

    @pytest.fixture(autouse=True)
    def npu(self, npu_variant: npu.Variant) -> Iterator[None]:
        with npu.serving(npu_variant) as self.emulator:
            yield

    def make_memory(self) -> MemoryBackend:
        return open_memory(_acl.load({"ASCEND_HOME_PATH": str(self.emulator.home)}), device_id=0, budgets={})

    def look(self, memory: MemoryBackend, region: Region) -> NDArray[np.uint8]:
        return self.emulator.memory(region.address, region.nbytes)

    def foreign(self, nbytes: int) -> tuple[int, NDArray[np.uint8], object]:
        made = npu.room(nbytes)
        return npu.address(made), made, made


@pytest.fixture(params=npu.VARIANTS, ids=lambda variant: variant.name)
def npu_variant(request: pytest.FixtureRequest) -> npu.Variant:
    variant: npu.Variant = request.param
    return variant


class OfAnNpu(OnNpu, WaitingMemoryContract):
    """Caches of Placement.DEVICE."""

    @pytest.fixture(autouse=True)
    def _stops(self, npu_variant: npu.Variant) -> None:
        self._refused = not npu_variant.settings.get("abort_works", 1)

    def stall(self, memory: MemoryBackend) -> None:
        self.emulator.hang(times=-1)

    def go_on(self, memory: MemoryBackend) -> None:
        self.emulator.resume()

    def stoppable(self, memory: MemoryBackend) -> bool:
        acl = _acl.load({"ASCEND_HOME_PATH": str(self.emulator.home)})
        looks = acl.has("aclrtStreamQuery") or acl.has("aclrtSynchronizeStreamWithTimeout")
        return looks and acl.has("aclrtStreamAbort") and not self._refused


class TestAscendMemory(OfAnNpu):
    pass


class TestGatedAscendMemoryWithOpenGates(OfAnNpu):
    @pytest.fixture
    def npu_variant(self) -> npu.Variant:
        return npu.Variant("newest")

    def make_memory(self) -> MemoryBackend:
        return GatedMemory(super().make_memory())


class TestHostMemoryBesideAnNpu(OnNpu):
    """Caches of Placement.HOST, on a node that has an NPU."""

    host_views = True
    placement = foreign_placement = Placement.HOST

    @pytest.fixture
    def npu_variant(self) -> npu.Variant:
        return npu.Variant("newest")

    look = MemoryContract.look
    foreign = MemoryContract.foreign
