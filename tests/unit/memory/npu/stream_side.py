"""What the tests of a stream share: one in a thread of its own, with memory on both sides."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from kvpull_async._deadline import Deadline
from kvpull_async.memory._acl import MemcpyKind
from kvpull_async.memory.base import Until
from kvpull_async.memory.npu.streams import Copies, Stream
from tests.unit.memory.emulated import Bytes, Npu, Thread, emulated, eventually, pattern

__all__ = ["ABORT", "ALIGNED", "BATCH", "MIXED", "QUERY", "ROOM", "TIMED", "UNSUPPORTED", "Side", "after_ms", "side"]

UP, DOWN, WITHIN = MemcpyKind.HOST_TO_DEVICE, MemcpyKind.DEVICE_TO_HOST, MemcpyKind.DEVICE_TO_DEVICE
ROOM = 1 << 20
BATCH, ABORT, QUERY = "aclrtMemcpyBatchAsync", "aclrtStreamAbort", "aclrtStreamQuery"
TIMED = "aclrtSynchronizeStreamWithTimeout"
UNSUPPORTED = 207000
# Rows of destination, source, length (bytes).
ALIGNED = ((0, 64, 64), (128, 0, 1000), (4096, 8192, 300_000))
MIXED = (*ALIGNED, (400_001, 500_000, 77), (500_032, 600_000, 64), (700_003, 700_003, 5000), (900_032, 800_000, 1))


class Side:
    """One stream in a thread of its own, with two blocks of the device and one of the host."""

    def __init__(self, npu: Npu, *without: str) -> None:
        self.npu = npu
        self.emulator = npu.emulator
        self.closing = threading.Event()
        self.thread = Thread()
        self._acl = npu.without(*without)
        self.stream: Stream = self.thread.run(self._open)

    def _open(self) -> Stream:
        self.npu.bind()
        self.device, self.other = (self._room(lambda out: self._acl.aclrtMalloc(out, ROOM, 0)) for _ in range(2))
        self.host = self._room(lambda out: self._acl.aclrtMallocHost(out, ROOM))
        self.view: Bytes = np.frombuffer((ctypes.c_char * ROOM).from_address(self.host), np.uint8)
        return Stream(self._acl, 0, closing=self.closing)

    @staticmethod
    def _room(call: Callable[[ctypes.c_void_p], int]) -> int:
        out = ctypes.c_void_p()
        assert call(out) == 0
        assert out.value is not None
        return out.value

    def begin(self, copies: Copies, until: Until | None = None) -> Callable[..., None]:
        return self.thread.begin(lambda: self.stream.copy(copies, until or Until()))

    def copy(self, copies: Copies, until: Until | None = None) -> None:
        self.begin(copies, until)()

    def hung(self, until: Until) -> Callable[..., None]:
        """A copy that has begun to hang."""
        self.emulator.hang()
        end = self.begin(self.upward((0, 0, ROOM)), until)
        eventually(lambda: self.npu.running() == 1)
        return end

    def upward(self, *rows: tuple[int, int, int], ordered: bool = False) -> Copies:
        return self._copies(self.device, self.host, rows, UP, ordered=ordered)

    def downward(self, *rows: tuple[int, int, int]) -> Copies:
        return self._copies(self.host, self.device, rows, DOWN)

    def within(self, *rows: tuple[int, int, int], ordered: bool = False) -> Copies:
        return self._copies(self.other, self.device, rows, WITHIN, ordered=ordered)

    @staticmethod
    def _copies(
        into: int, out_of: int, rows: tuple[tuple[int, int, int], ...], kind: MemcpyKind, *, ordered: bool = False
    ) -> Copies:
        table = np.array(rows, np.int64).reshape(-1, 3)
        return Copies(into + table[:, 0], out_of + table[:, 1], np.ascontiguousarray(table[:, 2]), kind, ordered)

    def works(self) -> None:
        """The stream copies as if nothing had happened."""
        data = pattern(ROOM, seed=time.monotonic_ns())
        self.view[:] = data
        self.copy(self.upward((0, 0, 4096), (65536, 65536, ROOM - 65536)))
        seen = self.npu.look(self.device, ROOM)
        assert np.array_equal(seen[:4096], data[:4096])
        assert np.array_equal(seen[65536:], data[65536:])

    def close(self) -> None:
        self.emulator.resume()
        self.thread.run(self._close)
        self.thread.close()

    def _close(self) -> None:
        self.stream.close()
        assert self._acl.aclrtFree(self.device) == 0
        assert self._acl.aclrtFree(self.other) == 0
        assert self._acl.aclrtFreeHost(self.host) == 0


@contextmanager
def side(*without: str, release: str = "9.0", clean: bool = True, **settings: int) -> Iterator[Side]:
    with emulated(release=release, clean=clean, **settings) as npu:
        made = Side(npu, *without)
        try:
            yield made
        finally:
            made.close()


def after_ms(milliseconds: float) -> Until:
    return Until(Deadline.after_ms(milliseconds))
