"""Every data path keeps its contract between caches on an NPU, and between one there and one of the host."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpull_async.memory import _acl
from kvpull_async.memory.ascend import open_memory
from kvpull_async.memory.base import Allocation, MemoryBackend, Region
from kvpull_async.memory.host import HostMemory
from kvpull_async.observe import Log
from kvpull_async.testing.contracts import DataPathContract
from kvpull_async.testing.contracts.ends import Ends, viewed
from kvpull_async.testing.faults import WrappedMemory
from kvpull_async.testing.stubborn import StubbornTransport
from kvpull_async.transport.base import PathKind, Transport
from kvpull_async.transport.inproc import InprocTransport
from kvpull_async.transport.shm.kind import ShmPaths
from kvpull_async.transport.tcp import TcpTransport
from kvpull_async.values import Placement
from tests import npu

SOME = [variant for variant in npu.VARIANTS if variant.name in ("8.0", "9.0", "without timeouts and query")]


class OnNpu(DataPathContract):
    """Source and destination are on the NPU; each copy to and from it begins a little late."""

    @pytest.fixture(autouse=True, params=SOME, ids=lambda variant: variant.name)
    def npu(self, request: pytest.FixtureRequest) -> Iterator[None]:
        with npu.serving(request.param) as self.emulator:
            yield

    def make_memory(self) -> MemoryBackend:
        return open_memory(_acl.load({"ASCEND_HOME_PATH": str(self.emulator.home)}), device_id=0, budgets={})

    def look(self, memory: MemoryBackend, region: Region) -> NDArray[np.uint8]:
        return viewed(memory, region) if region.device is None else self.emulator.memory(region.address, region.nbytes)


class TestTcp(OnNpu):
    def make_transport(self) -> Transport:
        return TcpTransport(Log(), greeting_timeout=5)


class TestInproc(OnNpu):
    def make_transport(self) -> Transport:
        return InprocTransport(Log())


class TestStubborn(OnNpu):
    """The path that refuses to abort."""

    stoppable = False

    def make_transport(self) -> Transport:
        return StubbornTransport(InprocTransport(Log()))


class TestShm(OnNpu):
    """What is on a device goes through the link's connections, as nobody else can map it."""

    def make_transport(self) -> Transport:
        return TcpTransport(Log(), greeting_timeout=5)

    def make_kind(self, transport: Transport) -> PathKind:
        return ShmPaths(HostMemory().publications, Log())


class Mixed(WrappedMemory):
    """One cache here, one there: the first allocation is of one placement, the second of the other."""

    def __init__(self, inner: MemoryBackend, *placements: Placement) -> None:
        super().__init__(inner, kind="mixed")
        self._placements = iter(placements)

    def allocate(self, *, tensors: int, tensor_nbytes: int, placement: Placement) -> Allocation:
        return super().allocate(tensors=tensors, tensor_nbytes=tensor_nbytes, placement=next(self._placements))


class TestTcpFromTheHostToTheNpu(TestTcp):
    placements = (Placement.HOST, Placement.DEVICE)

    def make_memory(self) -> MemoryBackend:
        return Mixed(super().make_memory(), *self.placements)


class TestTcpFromTheNpuToTheHost(TestTcpFromTheHostToTheNpu):
    placements = (Placement.DEVICE, Placement.HOST)


class TestShmFromTheHostToTheNpu(OnNpu):
    """The puller reads the source's memory by itself, and fills what is copied to its NPU."""

    reads_itself = True

    @pytest.fixture(autouse=True)
    def _kinds(self) -> Iterator[None]:
        self.kinds: list[ShmPaths] = []
        yield
        self.kinds.clear()

    def make_transport(self) -> Transport:
        return TcpTransport(Log(), greeting_timeout=5)

    def make_kind(self, transport: Transport) -> PathKind:
        made = ShmPaths(HostMemory().publications, Log())
        self.kinds.append(made)
        return made

    def make_memory(self) -> MemoryBackend:
        return Mixed(super().make_memory(), Placement.HOST, Placement.DEVICE)

    def withdraw(self, ends: Ends) -> None:
        for kind in self.kinds:
            kind._publications.withdraw(ends.reading, lambda: None)
