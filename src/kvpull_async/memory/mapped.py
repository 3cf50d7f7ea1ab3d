"""Whether there is memory at an address of this process. It must not touch that memory, nor know what it is for."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
from typing import Any, Final

__all__ = ["mapped"]

_PAGE: Final = mmap.PAGESIZE
_MS_ASYNC: Final = 1


def mapped(address: int, nbytes: int) -> bool:
    """Whether all pages of `nbytes` bytes at `address` are mapped, be it for reading or writing or neither.

    For the moment of asking. True also where the kernel does not say.
    """
    start = address // _PAGE * _PAGE
    # msync with MS_ASYNC writes nothing and brings no page in: the kernel only walks the list of mappings.
    if not _msync()(start, address + nbytes - start, _MS_ASYNC):
        return True
    return ctypes.get_errno() != errno.ENOMEM


@functools.cache
def _msync() -> Any:
    msync = ctypes.CDLL(None, use_errno=True).msync
    msync.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return msync
