"""Whether there is memory at an address: told without a look at it, and without bringing it in."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest

from kvpull_async.memory.mapped import mapped

PAGE = mmap.PAGESIZE


@pytest.mark.smoke
def test_memory_of_the_heap_at_any_boundary() -> None:
    array = np.zeros(3 * PAGE, np.uint8)
    for start, nbytes in ((0, 1), (7, 2 * PAGE), (PAGE - 1, 2), (0, array.size), (array.size - 1, 1)):
        assert mapped(array.ctypes.data + start, nbytes)


@pytest.mark.smoke
@pytest.mark.parametrize("address", [1, 8, 4096, 12345, 2**47, 2**63, 2**64 - 2 * PAGE, 2**64 - 1])
def test_addresses_where_nothing_is(address: int) -> None:
    assert not mapped(address, 1)
    assert not mapped(address, 3 * PAGE)


def test_memory_that_ends_too_soon_and_memory_that_was_given_back() -> None:
    room = mmap.mmap(-1, 4 * PAGE)
    held = ctypes.c_char.from_buffer(room)
    address = ctypes.addressof(held)
    assert mapped(address, 4 * PAGE)
    assert not mapped(address, 2**46)
    del held
    room.close()
    assert not mapped(address, 4 * PAGE)


def test_asking_brings_no_page_in() -> None:
    path = Path("/proc/self/smaps_rollup")
    room = np.empty(256 * 1024 * 1024, np.uint8)  # more than all that may come and go meanwhile

    def resident() -> int:
        line = next(line for line in path.read_text().splitlines() if line.startswith("Rss:"))
        return int(line.split()[1]) * 1024

    before = resident()
    assert mapped(room.ctypes.data, room.size)
    assert resident() - before < room.size // 4
