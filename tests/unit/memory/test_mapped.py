"""Whether there is memory at an address, told without bringing it in; and whether it can be read and written."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest

from kvpull_async.memory.mapped import mapped, refused

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
for _call in (LIBC.mprotect, LIBC.madvise):
    _call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


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


# -- rights ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["asked", "listed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels that can be asked for a page, and those that have only their list of mappings."""
    if request.param == "listed":
        unknown = 9999
        monkeypatch.setattr("kvpull_async.memory.mapped._POPULATE_READ", unknown)
        monkeypatch.setattr("kvpull_async.memory.mapped._POPULATE_WRITE", unknown)
    way: str = request.param
    return way


def pages(count: int, *, rights: int = mmap.PROT_READ | mmap.PROT_WRITE) -> int:
    """Fresh pages, which stay until the process ends."""
    address = LIBC.mmap(None, count * PAGE, rights, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert address != ctypes.c_void_p(-1).value
    return int(address)


def allow(address: int, count: int, rights: int) -> None:
    assert LIBC.mprotect(address, count * PAGE, rights) == 0


def usable(address: int, nbytes: int) -> tuple[bool, bool]:
    """Whether it can be read, and written."""
    reading, writing = (refused([(address, nbytes)], writing=writing) is None for writing in (False, True))
    return reading, writing


@pytest.mark.smoke
@pytest.mark.usefixtures("way")
def test_what_may_be_done_with_memory_is_told_by_its_first_and_its_last_page() -> None:
    start = pages(6)
    for nbytes in (1, 2 * PAGE, 6 * PAGE - 7):
        assert usable(start + 7, nbytes) == (True, True)
    for page in (0, 5):
        allow(start + page * PAGE, 1, mmap.PROT_READ)
        assert usable(start, 6 * PAGE) == (True, False)
        allow(start + page * PAGE, 1, 0)
        assert usable(start, 6 * PAGE) == (False, False)
        allow(start + page * PAGE, 1, mmap.PROT_READ | mmap.PROT_WRITE)
    assert usable(start, 6 * PAGE) == (True, True)


@pytest.mark.usefixtures("way")
def test_two_pages_are_both_looked_at_and_no_third() -> None:
    start = pages(4)
    allow(start, 1, 0)
    allow(start + 3 * PAGE, 1, 0)
    assert usable(start + PAGE, 2 * PAGE) == (True, True)
    assert usable(start + 2 * PAGE - 1, 2) == (True, True)
    assert usable(start + PAGE - 1, 2) == (False, False)
    assert usable(start + 3 * PAGE - 1, 2) == (False, False)


@pytest.mark.usefixtures("way")
def test_the_first_of_several_places_is_named() -> None:
    good, constant = pages(1), pages(1, rights=mmap.PROT_READ)
    assert refused([(good, PAGE), (constant, 1), (constant, PAGE)], writing=True) == 1
    assert refused([(good, PAGE), (constant, 1), (constant, PAGE)], writing=False) is None
    assert refused([], writing=True) is None


def test_looking_changes_nothing_and_brings_in_no_more_than_two_pages() -> None:
    array = np.arange(64 * 1024 * 1024 // 8)
    assert usable(array.ctypes.data, array.nbytes) == (True, True)
    assert array[0] == 0
    assert array[-1] == array.size - 1
    start = pages(64)
    LIBC.madvise(start, 64 * PAGE, mmap.MADV_NOHUGEPAGE)
    assert usable(start, 64 * PAGE) == (True, True)
    resident = (ctypes.c_ubyte * 64)()
    assert LIBC.mincore(ctypes.c_void_p(start), ctypes.c_size_t(64 * PAGE), resident) == 0
    assert sum(resident) <= 2


def test_a_mapping_that_is_longer_than_its_file_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(2 * PAGE))
    array = np.memmap(path, np.uint8, "r+")
    assert usable(array.ctypes.data, 2 * PAGE) == (True, True)
    path.write_bytes(b"")  # from now on a look at it is a SIGBUS
    if populates():
        assert usable(array.ctypes.data, 2 * PAGE) == (False, False)


def populates() -> bool:
    """Whether this kernel can be asked for a page."""
    return bool(LIBC.madvise(pages(1), PAGE, 23) == 0)


def test_without_the_list_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvpull_async.memory.mapped._MAPS", tmp_path / "none")
    assert usable(pages(1, rights=mmap.PROT_READ), PAGE)[1]
