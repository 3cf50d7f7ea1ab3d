"""Every memory keeps the contract, the gated one too."""

from __future__ import annotations

from kvpull_async.memory.base import MemoryBackend
from kvpull_async.memory.host import HostMemory
from kvpull_async.testing.contracts import MemoryContract
from kvpull_async.testing.faults import GatedMemory


class TestHostMemory(MemoryContract):
    def make_memory(self) -> MemoryBackend:
        return HostMemory()


class TestGatedMemoryWithOpenGates(MemoryContract):
    def make_memory(self) -> MemoryBackend:
        return GatedMemory(HostMemory())
