"""Memory whose every byte is known: regions between pages that nobody may touch, each against the end of its page.

A write past a region ends the process, one before it changes bytes that are looked at. Nothing but MARK stands outside
the regions, so that a read from there shows.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

import numpy as np

PAGE: Final = mmap.PAGESIZE
MARK: Final = 0xEE
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class Arena:
    """`count` regions of `nbytes`, less than a page, full of bytes below 0x80 that differ from region to region."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, (2 * count + 1) * PAGE)
        self._all = np.frombuffer(self._memory, np.uint8)
        self._base = int(self._all.ctypes.data)
        self._pages = self._all[: 2 * count * PAGE].reshape(count, 2, PAGE)[:, 1]
        self._pages[:] = MARK
        self.count, self.nbytes = count, nbytes
        for number in range(count):
            self._pages[number, PAGE - nbytes :] = (np.arange(nbytes) + 37 * number) % 0x80
        self.pristine = self._pages.copy()
        for guard in range(count + 1):
            assert _LIBC.mprotect(ctypes.c_void_p(self._base + 2 * guard * PAGE), PAGE, 0) == 0

    def address(self, number: int) -> int:
        return self._base + (2 * number + 2) * PAGE - self.nbytes

    def fill(self, number: int, value: int) -> None:
        """From now on that region is full of this byte."""
        self._pages[number, PAGE - self.nbytes :] = value
        self.pristine[number] = self._pages[number]

    def changed(self) -> set[int]:
        """Regions that are no longer what they were; asserts that nothing else changed."""
        differs = self._pages != self.pristine
        if not differs.any():
            return set()
        assert not differs[:, : PAGE - self.nbytes].any(), "bytes outside every region were written"
        return set(np.flatnonzero(differs.any(axis=1)).tolist())

    def restore(self) -> None:
        self._pages[:] = self.pristine
