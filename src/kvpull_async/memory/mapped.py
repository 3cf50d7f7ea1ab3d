"""What this process may do with memory at an address of its own. It must not change that memory, nor know what it is
for.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import functools
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["mapped", "refused"]

_PAGE: Final = mmap.PAGESIZE
_MS_ASYNC: Final = 1
_POPULATE_READ: Final = 22  # MADV_..., from Linux 5.14 on
_POPULATE_WRITE: Final = 23
_MAPS: Final = Path("/proc/self/maps")


def mapped(address: int, nbytes: int) -> bool:
    """Whether all pages of `nbytes` bytes at `address` are mapped, be it for reading or writing or neither.

    For the moment of asking. True also where the kernel does not say. Brings no page in.
    """
    start = address // _PAGE * _PAGE
    # msync with MS_ASYNC writes nothing and brings no page in: the kernel only walks the list of mappings.
    if not _libc().msync(start, address + nbytes - start, _MS_ASYNC):
        return True
    return ctypes.get_errno() != errno.ENOMEM


def refused(places: Sequence[tuple[int, int]], *, writing: bool) -> int | None:
    """The first of some mapped places (address, bytes) that cannot be read, or written if `writing`; None if all can.

    For the moment of asking, and of the first and the last page of each place: those are brought in, as a use of them
    would, with what they hold unchanged. Not seen is a mapping of other rights in between. Kernels before 5.14 tell by
    their list of mappings: that is seen whole, but takes a millisecond or so for a program with thousands of them, and
    does not know of a file that is shorter than its mapping. None also where there is no such list.
    """
    rights: _Rights | None = None
    for i, (address, nbytes) in enumerate(places):
        allowed = _populated(address, nbytes, _POPULATE_WRITE if writing else _POPULATE_READ)
        if allowed is None:  # the list tells, too, what a device's memory allows, of which no page can be brought in
            rights = rights or _Rights(writing=writing)
            allowed = rights.cover(address, nbytes)
        if not allowed:
            return i
    return None


def _populated(address: int, nbytes: int, advice: int) -> bool | None:
    """None when the kernel does not say. It faults the pages in as if they were used, but without a signal."""
    first, last = address // _PAGE * _PAGE, (address + nbytes - 1) // _PAGE * _PAGE
    near = last - first <= _PAGE
    for start, length in ((first, last + _PAGE - first),) if near else ((first, _PAGE), (last, _PAGE)):
        if _libc().madvise(start, length, advice):
            return False if ctypes.get_errno() in (errno.EFAULT, errno.ENOMEM) else None
    return True


class _Rights:
    """The parts of the address space that may be read, or written, as the kernel lists them."""

    def __init__(self, *, writing: bool) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._known = True
        try:
            for begin, end in _listed(b"w" if writing else b"r"):
                if self._ends and self._ends[-1] == begin:
                    self._ends[-1] = end
                else:
                    self._begins.append(begin)
                    self._ends.append(end)
        except OSError:  # no /proc
            self._known = False

    def cover(self, address: int, nbytes: int) -> bool:
        at = bisect.bisect_right(self._begins, address) - 1
        return not self._known or (at >= 0 and address + nbytes <= self._ends[at])


def _listed(right: bytes) -> Iterator[tuple[int, int]]:
    """Begin and end of each mapping with that right, in the order of addresses."""
    for line in _MAPS.read_bytes().splitlines():
        place, rights = line.split(None, 2)[:2]
        if right in rights:
            begin, end = place.split(b"-")
            yield int(begin, 16), int(end, 16)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    for function in (libc.msync, libc.madvise):
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc
