"""Copies between addresses of this process, or from another one's, that can be stopped and checked against an epoch.

The functions below are complete by themselves. Where the C extension `_speedups` was built, its faster functions of the
same names take their place. This module checks arrays but trusts addresses: whoever calls holds the memory, and keeps
the arrays unchanged, until the call returns. It must not know caches, leases or peers.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib.util
import os
import platform
import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ACCELERATED",
    "ORDERED",
    "CancelFlag",
    "Words",
    "copy_checked",
    "copy_rows",
    "copy_rows_checked",
    "load_word",
    "read_process",
    "store_word",
]

# An extension that is there but does not load is a broken installation, and its ImportError says so.
_WANTED = os.environ.get("KVPULL_NO_EXTENSION", "") in {"", "0"}

ACCELERATED: Final[bool] = _WANTED and importlib.util.find_spec("kvpull_async.memory._speedups") is not None
"""Whether the extension does the work. KVPULL_NO_EXTENSION=1 in the environment turns it off."""

ORDERED: Final[bool] = ACCELERATED or platform.machine() == "x86_64"
"""Whether an epoch read after a copy was read after all that was copied. x86-64 keeps loads in order, others need the
extension's fences."""

Words = NDArray[np.int64] | NDArray[np.uint64]
"""One column of a table of rows: one-dimensional, contiguous."""

# What one call copies before the flag is looked at. Each piece takes the interpreter lock anew, which a busy program
# gives back late, so it is larger than the extension's 256 KiB.
_PIECE: Final = 1024 * 1024
_NUMBERS: Final = frozenset({np.dtype(np.int64), np.dtype(np.uint64)})
_MOST_IOVECS: Final = 1024  # the kernel's limit on one process_vm_readv

# All stores of this thread are seen before a lock is taken: taking one is an atomic exchange.
_fence = threading.Lock()


class CancelFlag:
    """Tells a running copy to stop. It is never reset, and may be set from any thread."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = False

    def set(self) -> None:
        self._value = True

    @property
    def is_set(self) -> bool:
        return self._value


def copy_rows(destinations: Words, sources: Words, lengths: Words, flag: CancelFlag, /) -> int:
    """Copy `lengths[i]` bytes from `sources[i]` to `destinations[i]` for every row, in order; the bytes copied.

    Fewer than all only if the flag was set, which is looked at every 256 KiB (without the extension: every MiB).
    Nothing is written after the return. The interpreter lock is released. Rows must not overlap. TypeError and
    ValueError for arrays that are no table.
    """
    _check_flag(flag)
    _check_table(destinations, sources, lengths)
    done = 0
    for destination, source, length in zip(destinations.tolist(), sources.tolist(), lengths.tolist(), strict=True):
        for offset in range(0, length, _PIECE):
            if flag.is_set:
                return done
            piece = min(_PIECE, length - offset)
            ctypes.memmove(destination + offset, source + offset, piece)
            done += piece
    return done


def copy_checked(destination: int, source: int, nbytes: int, epoch_address: int, epoch: int, /) -> bool:
    """Copy and say whether the 64-bit word at `epoch_address` was `epoch` both before and after.

    If it was not before, nothing is copied; if it was not after, what was copied may be torn. For small copies: the
    interpreter lock may stay held. Plain integers only. Trust a True only where ORDERED is true.
    """
    word = ctypes.c_uint64.from_address(epoch_address)
    if word.value != epoch:
        return False
    ctypes.memmove(destination, source, nbytes)
    return word.value == epoch


def copy_rows_checked(destinations: Words, sources: Words, lengths: Words, epoch_address: int, epoch: int, /) -> bool:
    """`copy_checked` for a few rows under one epoch."""
    _check_table(destinations, sources, lengths)
    word = ctypes.c_uint64.from_address(epoch_address)
    if word.value != epoch:
        return False
    copy_rows(destinations, sources, lengths, CancelFlag())
    return word.value == epoch


def load_word(address: int, /) -> int:
    """The 64-bit word at an aligned address. What is read later is read after it, where ORDERED is true."""
    return ctypes.c_uint64.from_address(address).value


def store_word(address: int, value: int, /) -> None:
    """Write a 64-bit word to an aligned address: after all earlier writes, and before any later access (on x86-64)."""
    if not 0 <= value < 1 << 64:
        raise OverflowError(f"a word holds 0 to 2**64 - 1, not {value}")
    ctypes.c_uint64.from_address(address).value = value
    with _fence:
        pass


def read_process(pid: int, destinations: Words, sources: Words, lengths: Words, flag: CancelFlag, /) -> int:
    """Fill rows of this process from addresses of process `pid`, in order; the bytes read.

    Fewer than all only if the flag was set, which is looked at every MiB. The interpreter lock is released. OSError
    with ESRCH (no such process), EPERM (the kernel forbids it), EFAULT (a row is not mapped); some rows may be filled.
    """
    _check_flag(flag)
    _check_table(destinations, sources, lengths)
    if not 1 <= pid < 1 << 31:
        raise ValueError(f"pid must be from 1 to 2**31 - 1, not {pid}")
    local, remote = _iovecs(destinations, sources, lengths)
    sizes = local[:, 1].copy()
    ends = np.cumsum(sizes)
    done = at = 0
    while at < len(sizes) and not flag.is_set:
        within = int(np.searchsorted(ends, done + _PIECE, "right"))
        count = min(max(within - at, 1), _MOST_IOVECS)
        done += _readv(pid, local[at : at + count], remote[at : at + count])
        at = int(np.searchsorted(ends, done, "right"))
        if at < len(sizes) and (left := int(ends[at]) - done) < sizes[at]:  # the kernel stopped inside a piece
            local[at, 0] += local[at, 1] - left
            remote[at, 0] += remote[at, 1] - left
            local[at, 1] = remote[at, 1] = left
    return done


def _iovecs(destinations: Words, sources: Words, lengths: Words) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Both sides' rows of address and length, as the kernel takes them, none empty or longer than a piece."""
    lengths = lengths.astype(np.int64)
    pieces = -(-lengths // _PIECE)
    row = np.repeat(np.arange(len(lengths)), pieces)
    offset = (np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * _PIECE
    size = np.minimum(lengths[row] - offset, _PIECE)
    sides = [np.stack([side.view(np.int64)[row] + offset, size], axis=1) for side in (destinations, sources)]
    local, remote = (side.astype(np.uint64) for side in sides)
    return local, remote


def _readv(pid: int, local: NDArray[np.uint64], remote: NDArray[np.uint64]) -> int:
    call = _libc().process_vm_readv
    n = call(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if n > 0:
        return int(n)
    code = ctypes.get_errno() if n else errno.EFAULT
    raise OSError(code, os.strerror(code))


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    vector = (ctypes.c_void_p, ctypes.c_ulong)
    libc.process_vm_readv.argtypes = (ctypes.c_int, *vector, *vector, ctypes.c_ulong)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc


def _check_flag(flag: object) -> None:
    if type(flag) is not CancelFlag:
        raise TypeError(f"flag must be a CancelFlag, not {type(flag).__name__}")


def _check_table(destinations: Words, sources: Words, lengths: Words) -> None:
    columns = {"destinations": destinations, "sources": sources, "lengths": lengths}
    for name, column in columns.items():
        if not isinstance(column, np.ndarray):
            raise TypeError(f"{name} must be an array, not {type(column).__name__}")
        if column.dtype not in _NUMBERS:
            raise TypeError(f"{name} must hold int64 or uint64, not {column.dtype}")
        if column.ndim != 1 or not column.flags.c_contiguous or not column.flags.aligned:
            raise ValueError(f"{name} must be one-dimensional, contiguous and aligned")
    if not len(destinations) == len(sources) == len(lengths):
        raise ValueError("destinations, sources and lengths must be equally long")
    numbers = lengths.view(np.int64)
    if numbers.size and (numbers.min() < 0 or numbers.sum(dtype=np.float64) >= 2.0**63):
        raise ValueError("lengths must not be negative, nor their sum 2**63 or more")


if ACCELERATED and not TYPE_CHECKING:
    from kvpull_async.memory._speedups import (
        CancelFlag,
        copy_checked,
        copy_rows,
        copy_rows_checked,
        load_word,
        read_process,
        store_word,
    )
