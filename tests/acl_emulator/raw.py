"""Calls of the library by name, with plain numbers, as C would make them: for tests of the emulator itself.

It must not check anything: what is wrong has to reach the library.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.acl_emulator import Emulator

HOST, DEVICE, UNREGISTERED = 0, 1, 2
H2H, H2D, D2H, D2D = range(4)


class Location(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("type", ctypes.c_int))


class BatchAttribute(ctypes.Structure):
    _fields_ = (("to", Location), ("source", Location), ("reserved", ctypes.c_uint8 * 16))


class PointerAttributes(ctypes.Structure):
    _fields_ = (("location", Location), ("page", ctypes.c_uint32), ("reserved", ctypes.c_uint32 * 4))


class Raw:
    """One program that uses the library in `home`. Calls answer the code; those that make something raise if not 0."""

    def __init__(self, home: Path) -> None:
        self.emulator = Emulator(home)
        self.library = ctypes.CDLL(str(self.emulator.path))

    def __call__(self, name: str, *arguments: object) -> int:
        # Every argument is passed in 64 bits; a C int takes the lower half.
        passed = (ctypes.c_void_p(given) if isinstance(given, int) else given for given in arguments)
        return int(self.library[name](*passed))

    def made(self, name: str, *arguments: object) -> int:
        """The handle or address that the call answers through its first pointer."""
        made = ctypes.c_void_p()
        code = self(name, ctypes.byref(made), *arguments)
        if code:
            raise OSError(code, name)
        return made.value or 0

    def number(self, name: str, *arguments: object, of: int = 0) -> int:
        """The whole number that the call writes behind its arguments, or before them if `of` is 0."""
        number = ctypes.c_int32()
        code = self(name, *arguments[:of], ctypes.byref(number), *arguments[of:])
        if code:
            raise OSError(code, name)
        return number.value

    def start(self, device: int = 0) -> None:
        self("aclInit", None)
        self("aclrtSetDevice", device)

    def stream(self) -> int:
        return self.made("aclrtCreateStream")

    def device(self, nbytes: int) -> int:
        return self.made("aclrtMalloc", nbytes, 0)

    def pinned(self, nbytes: int) -> int:
        return self.made("aclrtMallocHost", nbytes)

    def copy(self, to: int, source: int, nbytes: int, kind: int) -> int:
        return self("aclrtMemcpy", to, nbytes, source, nbytes, kind)

    def send(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> int:
        """An async copy."""
        return self("aclrtMemcpyAsync", to, nbytes, source, nbytes, kind, stream)

    def finish(self, stream: int, timeout_ms: int = 30_000) -> int:
        return self("aclrtSynchronizeStreamWithTimeout", stream, timeout_ms)

    def batch(
        self, rows: Sequence[tuple[int, int, int]], *, inward: bool, stream: int | None = None, device: int = 0
    ) -> tuple[int, int]:
        """Copy rows of (to, source, bytes); the code and which row is to blame. Async if there is a stream."""
        count = len(rows)
        to, sources, sizes = zip(*rows, strict=True)
        npu, cpu = Location(device, DEVICE), Location(0, HOST)
        attribute = BatchAttribute(npu, cpu) if inward else BatchAttribute(cpu, npu)
        lengths, blame = (ctypes.c_size_t * count)(*sizes), ctypes.c_size_t()
        tables = ((ctypes.c_void_p * count)(*to), lengths, (ctypes.c_void_p * count)(*sources), lengths, count)
        tail = (ctypes.byref(attribute), (ctypes.c_size_t * 1)(0), 1, ctypes.byref(blame))
        if stream is None:
            return self("aclrtMemcpyBatch", *tables, *tail), blame.value
        return self("aclrtMemcpyBatchAsync", *tables, *tail, stream), blame.value

    def message(self) -> str:
        function = self.library["aclGetRecentErrMsg"]
        function.restype = ctypes.c_char_p
        return (function() or b"").decode()

    def seen(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Host memory, as a program reads it. Where it is device memory, the program dies."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


@contextmanager
def recording(home: Path) -> Iterator[Raw]:
    """A started program whose violations are only remembered, at the emulator's defaults otherwise."""
    raw = Raw(home)
    raw.emulator.reset()
    raw.emulator.configure(abort_on_violation=0)
    raw.start()
    try:
        yield raw
    finally:
        raw.emulator.resume()
        raw.emulator.reset()


@contextmanager
def clean(home: Path) -> Iterator[Raw]:
    """As `recording`, for a program that must break no rule and leave nothing."""
    with recording(home) as raw:
        yield raw
        assert raw.emulator.violations() == []
        assert not any(raw.emulator.left().values())


def in_thread(function: object, *arguments: object) -> object:
    """The call in a thread that ends with it."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function, *arguments).result(timeout=60)  # type: ignore[arg-type]


class Pieces:
    """A stream, pinned memory with the pattern in it, and device memory, of NBYTES each."""

    NBYTES = 64 * 1024
    PATTERN = (np.arange(NBYTES) % 251).astype(np.uint8)

    def __init__(self, raw: Raw) -> None:
        self.raw, self.stream = raw, raw.stream()
        self.host, self.device = raw.pinned(self.NBYTES), raw.device(self.NBYTES)
        self.bytes = raw.seen(self.host, self.NBYTES)
        self.bytes[:] = self.PATTERN
        self.there = raw.emulator.memory(self.device, self.NBYTES)

    def send(self) -> int:
        """An async copy of all to the device."""
        return self.raw.send(self.device, self.host, self.NBYTES, H2D, self.stream)

    def half_there(self) -> None:
        """Wait until the first half of a copy to the device has arrived."""
        end = time.monotonic() + 30
        while (self.there[: self.NBYTES // 2] != self.PATTERN[: self.NBYTES // 2]).any():
            assert time.monotonic() < end
            time.sleep(0.001)

    def end(self) -> None:
        """Wait for what is on its way, and give everything back."""
        self.raw.emulator.resume()
        self.raw.finish(self.stream)
        codes = [self.raw("aclrtDestroyStream", self.stream), self.raw("aclrtFree", self.device)]
        assert [*codes, self.raw("aclrtFreeHost", self.host)] == [0, 0, 0]
