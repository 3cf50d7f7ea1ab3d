"""Shared memory keeps the contract of data paths, in each of the ways in which it can reach the source's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvpull_async.memory.base import Allocation, MemoryBackend, Region
from kvpull_async.memory.copying import CancelFlag, Words
from kvpull_async.memory.host import HostMemory
from kvpull_async.observe import Log
from kvpull_async.testing.contracts import DataPathContract
from kvpull_async.testing.contracts.path import Ends
from kvpull_async.testing.faults import Gate, WrappedMemory
from kvpull_async.transport.base import PathKind, Transport
from kvpull_async.transport.shm import remote
from kvpull_async.transport.shm.kind import ShmPaths
from kvpull_async.transport.tcp import TcpTransport
from kvpull_async.values import Placement
from tests.copies import loaded
from tests.sides import this_process

pytestmark = pytest.mark.smoke


class Heap(HostMemory):
    """As memory that a program registers by address: in no file."""

    def allocate(self, *, tensors: int, tensor_nbytes: int, placement: Placement) -> Allocation:
        arrays = [np.zeros(tensor_nbytes, np.uint8) for _ in range(tensors)]
        regions = tuple(Region(array.ctypes.data, tensor_nbytes, placement, array) for array in arrays)
        return Allocation(regions, tensors * tensor_nbytes, placement)


class IntoStaged(WrappedMemory):
    """The first cache is where the host reaches it; the others are filled piece by piece, as a device's memory is."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner, kind="half staged")
        self._first = True

    def allocate(self, *, tensors: int, tensor_nbytes: int, placement: Placement) -> Allocation:
        made = super().allocate(tensors=tensors, tensor_nbytes=tensor_nbytes, placement=placement)
        first, self._first = self._first, False
        return made if first else replace(made, regions=tuple(replace(region, device=0) for region in made.regions))


class Shm(DataPathContract):
    """What the ways have in common: every copy can be held at a gate, in the thread that makes it."""

    process_reads: str = "off"
    tensors: type[HostMemory] = HostMemory
    """Where source and destination lie."""
    staged: bool = False
    """Whether the destination hands out pieces, as a device's memory does."""
    extension: bool = True

    @pytest.fixture(autouse=True)
    def gated_copies(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        copying = loaded(extension=self.extension)
        if self.extension and not copying.ACCELERATED:
            pytest.skip("the extension was not built for this Python")
        if self.tensors is Heap and self.reads_itself:
            this_process()
        self.gate = Gate()
        self.kinds: list[ShmPaths] = []
        self.copies = 0

        def copy_rows(destinations: Words, sources: Words, lengths: Words, flag: CancelFlag) -> int:
            """One that was held does all its work, as a long piece would."""
            self.copies += 1
            self.gate.pass_through()
            return int(copying.copy_rows(destinations, sources, lengths, copying.CancelFlag()))

        def read_process(pid: int, destinations: Words, sources: Words, lengths: Words, flag: CancelFlag) -> int:
            if lengths.sum() > 16:  # else the probe
                self.copies += 1
                self.gate.pass_through()
            return int(copying.read_process(pid, destinations, sources, lengths, copying.CancelFlag()))

        monkeypatch.setattr(remote, "copy_rows", copy_rows)
        monkeypatch.setattr(remote, "read_process", read_process)
        monkeypatch.setattr(remote, "load_word", copying.load_word)
        yield
        self.gate.open()
        self.kinds.clear()

    def make_transport(self) -> Transport:
        return TcpTransport(Log(), greeting_timeout=5)

    def make_kind(self, transport: Transport) -> PathKind:
        self.kinds.append(ShmPaths(HostMemory().publications, Log(), process_reads=self.process_reads))
        return self.kinds[-1]

    def make_memory(self) -> MemoryBackend:
        return IntoStaged(self.tensors()) if self.staged else self.tensors()

    def writing_gate(self, ends: Ends) -> Gate:
        return self.gate if self.fills_itself else super().writing_gate(ends)

    async def test_the_bytes_go_the_way_that_this_suite_is_about(self) -> None:
        async with self.ends() as ends:
            await ends.check_next()
            assert bool(self.copies) == self.reads_itself

    def withdraw(self, ends: Ends) -> None:
        for kind in self.kinds:
            kind._publications.withdraw(ends.reading, lambda: None)


class TestMapped(Shm):
    """Memory files of the source, mapped by the puller."""

    reads_itself = fills_itself = True


class TestMappedWithoutTheExtension(TestMapped):
    extension = False


class TestMappedIntoStagedMemory(Shm):
    reads_itself = staged = True


class TestReadFromTheProcess(Shm):
    """Memory that is in no file, read through the kernel."""

    reads_itself = fills_itself = True
    tensors = Heap
    process_reads = "auto"


class TestReadFromTheProcessWithoutTheExtension(TestReadFromTheProcess):
    extension = False


class TestReadFromTheProcessIntoStagedMemory(TestReadFromTheProcess):
    fills_itself = False
    staged = True


class TestStreamed(Shm):
    """Memory that is in no file, and must not be read by others."""

    tensors = Heap


class TestStreamedBeyondTheLimit(Shm):
    """More caches than can be published, where the puller meant to read by itself and so made no connection."""

    process_reads = "auto"

    def make_kind(self, transport: Transport) -> PathKind:
        super().make_kind(transport)
        self.kinds[-1]._publications._free.clear()
        return self.kinds[-1]
