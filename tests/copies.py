"""For the tests of copies by address: both implementations, and memory to copy from and to."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpull_async.memory import copying

KIB, MIB = 1024, 1024 * 1024
BOUND = 20.0
CANARY = 0xA5
STREAMED = KIB  # rows from this length on are written past the caches when there are enough of them
Bytes = NDArray[np.uint8]


def loaded(*, extension: bool) -> Any:
    """The module as a new process would have it, with the extension or without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVPULL_NO_EXTENSION", "" if extension else "1")
        spec = importlib.util.spec_from_file_location(f"copying_extension_{extension}", copying.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def words(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


def noise(nbytes: int) -> Bytes:
    return np.random.default_rng(7).integers(0, 256, nbytes, np.uint8)


def canaries(nbytes: int) -> Bytes:
    return np.full(nbytes, CANARY, np.uint8)


def at(array: NDArray[Any]) -> int:
    """The address of an array's memory."""
    return array.ctypes.data


def aligned(make: Callable[[int], Bytes], nbytes: int) -> Bytes:
    """An array that begins at a multiple of 64."""
    array = make(nbytes + 64)
    skipped = -at(array) % 64
    return array[skipped : skipped + nbytes]


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.0005)


def same(actual: Bytes, expected: Bytes) -> None:
    wrong = np.flatnonzero(actual != expected)
    assert not wrong.size, f"{wrong.size} bytes differ, the first at {wrong[0]}"


@contextmanager
def endless(nbytes: int) -> Iterator[tuple[int, Bytes]]:
    """`nbytes` of address space that is one MiB of memory over and over: its address, and that MiB."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    descriptor = os.memfd_create("test-copying")
    os.ftruncate(descriptor, MIB)
    reserve = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    base = libc.mmap(None, nbytes, 0, reserve, -1, 0)
    fixed = mmap.MAP_SHARED | 0x10  # MAP_FIXED
    assert base % mmap.PAGESIZE == 0, "no address space"
    try:
        for place in range(base, base + nbytes, MIB):
            assert libc.mmap(place, MIB, mmap.PROT_READ | mmap.PROT_WRITE, fixed, descriptor, 0) == place
        yield base, np.ctypeslib.as_array((ctypes.c_uint8 * MIB).from_address(base))
    finally:
        libc.munmap(base, nbytes)
        os.close(descriptor)
