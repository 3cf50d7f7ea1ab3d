"""Memory that other processes of this machine can map: sealed anonymous files, and where in this process they lie.

Nobody but this process ever writes to such a file, and nobody, this process included, changes its size: a reader that
mapped it can neither be crashed nor fooled by its owner's end. It must not know caches, epochs or peers.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import resource
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["SharedFile", "check_sealed", "find", "map_readonly"]

# From <linux/fcntl.h>; the fcntl module has the names from Python 3.8 on, F_SEAL_FUTURE_WRITE only from 3.13 on.
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_SEALS: Final = 0x0001 | 0x0002 | 0x0004 | 0x0010  # SEAL, SHRINK, GROW, FUTURE_WRITE
_AT_ONCE: Final = 8 * 1024 * 1024
"""Bytes that are unmapped within 2 ms."""
_HUGE_PAGE: Final = 2 * 1024 * 1024
_MADV_POPULATE_WRITE: Final = 23
_PROC: Final = Path("/proc")
_GROUPS: Final = Path("/sys/fs/cgroup")
_NO_LIMIT: Final = 2**60  # older kernels say a number above this
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_numbers = itertools.count(1)
_lock = threading.RLock()  # protects what is below; a garbage collection may come in the middle, so it is reentrant
_files: dict[int, weakref.ref[SharedFile]] = {}
_starts: list[int] = []  # their addresses in order; replaced as a whole, so that looking needs no lock
_descriptors = 0
_leaving: deque[tuple[int, int]] = deque()
_unmapping = False
"""Whether there is a thread that takes from `_leaving`."""


class SharedFile:
    """`nbytes` zeroed bytes at `address`, every page of which exists. They go when nothing refers to this object.

    `number` is never used again in this process.
    """

    def __init__(self, nbytes: int, *, name: str = "kvpull-cache", needed: bool = False) -> None:
        """OSError when there is no memory or no descriptor. `needed` takes a descriptor though few are left."""
        self.number: int = next(_numbers)
        self.nbytes = nbytes
        available = _available()
        if nbytes > available:  # the kernel would kill a process rather than refuse
            raise OSError(errno.ENOMEM, f"{available} bytes are available")
        writable = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(writable, nbytes)
            self.address: int = _map(writable, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
            try:
                if nbytes >= _HUGE_PAGE and _huge_on_advice():  # only a page fault takes the advice
                    _LIBC.madvise(self.address, nbytes, _MADV_POPULATE_WRITE)
                os.posix_fallocate(writable, 0, nbytes)  # what is missing: touching it later can fail no more
                self._shared = _Descriptor(_reopened(writable, needed=needed) if _sealed(writable) else -1)
            except BaseException:
                _unmap(self.address, nbytes)
                raise
        finally:
            os.close(writable)
        weakref.finalize(self, _release, self.address, nbytes, self._shared).atexit = False
        _enter(self.address, self)

    @property
    def descriptor(self) -> int:
        """Opens the file for reading only. -1 where the process has few descriptors left or the kernel is too old to
        seal (before 5.1), and after `unshare`: then nobody else can map the file.
        """
        return self._shared.number

    def unshare(self) -> None:
        """Give the descriptor back; the memory stays."""
        self._shared.close()

    def __repr__(self) -> str:
        return f"<SharedFile {self.number} {self.nbytes} bytes>"


class _Descriptor:
    """One of those that count against the process's limit; -1 is none."""

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        """May be called twice, from any thread."""
        global _descriptors  # noqa: PLW0603
        with _lock:
            number, self.number = self.number, -1
            _descriptors -= number >= 0
        if number >= 0:
            os.close(number)


def find(address: int, nbytes: int) -> tuple[SharedFile, int] | None:
    """The file of this process that holds all of `nbytes` from `address` on, and the offset in it."""
    starts = _starts
    at = bisect.bisect_right(starts, address) - 1
    entered = _files.get(starts[at]) if at >= 0 else None
    file = entered() if entered is not None else None
    if file is None or address + nbytes > file.address + file.nbytes:
        return None
    return file, address - file.address


def check_sealed(descriptor: int, nbytes: int) -> None:
    """Refuse a peer's descriptor that reading could crash on: OSError unless it is a memory file of at least `nbytes`
    bytes, all of them there, which nobody can shrink or punch holes into.
    """
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError as error:
        raise OSError(errno.EPERM, f"what the peer passed is no memory file: {error}") from error
    if seals & _SEALS != _SEALS:
        raise OSError(errno.EPERM, f"the peer's memory file has the seals {seals:#x}, not {_SEALS:#x}")
    about = os.fstat(descriptor)
    if about.st_size < nbytes or about.st_blocks * 512 < about.st_size:
        held = f"{about.st_size} bytes, {about.st_blocks * 512} of them allocated"
        raise OSError(errno.EPERM, f"the peer's memory file has {held}, {nbytes} are needed")


def map_readonly(descriptor: int, nbytes: int) -> Mapping:
    """Map a descriptor that was checked; it may be closed afterwards. OSError when the kernel refuses."""
    return Mapping(_map(descriptor, nbytes, mmap.PROT_READ), nbytes)


class Mapping:
    """Another process's file, mapped here for reading while this object lives."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        weakref.finalize(self, _unmap_aside, address, nbytes).atexit = False


def _map(descriptor: int, nbytes: int, protection: int) -> int:
    """Not by the mmap module, whose objects keep a descriptor each."""
    address = _LIBC.mmap(None, nbytes, protection, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, _MAP_FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if nbytes >= _HUGE_PAGE:  # taken where the kernel gives huge pages to memory files, else without effect
        _LIBC.madvise(address, nbytes, mmap.MADV_HUGEPAGE)
    return int(address)


def _unmap(address: int, nbytes: int) -> None:
    """In pieces: meanwhile the other threads of this process can touch no new page."""
    for start in range(address, address + nbytes, _AT_ONCE):
        _LIBC.munmap(start, min(_AT_ONCE, address + nbytes - start))


def _unmap_aside(address: int, nbytes: int) -> None:
    """Giving pages back takes the kernel a quarter of a second per GiB, and who lets go of the memory may be a loop.

    So one thread does it, as long as there is something to unmap.
    """
    global _unmapping  # noqa: PLW0603
    if nbytes <= _AT_ONCE:
        _unmap(address, nbytes)
        return
    with _lock:
        _leaving.append((address, nbytes))
        if _unmapping:
            return
        _unmapping = True
    try:
        threading.Thread(target=_unmap_all, name="kvpull-unmap", daemon=True).start()
    except RuntimeError:  # no thread to be had: then the loop has to wait
        _unmap_all()


def _unmap_all() -> None:
    global _unmapping  # noqa: PLW0603
    while True:
        with _lock:
            if not _leaving:
                _unmapping = False
                return
            address, nbytes = _leaving.popleft()
        _unmap(address, nbytes)


def _enter(address: int, file: SharedFile) -> None:
    global _starts  # noqa: PLW0603
    with _lock:
        _files[address] = weakref.ref(file)
        _starts = sorted(_files)


def _release(address: int, nbytes: int, descriptor: _Descriptor) -> None:
    global _starts  # noqa: PLW0603
    with _lock:
        del _files[address]
        _starts = sorted(_files)
    descriptor.close()
    _unmap_aside(address, nbytes)


def _sealed(writable: int) -> bool:
    """Whether the kernel knows all the seals."""
    try:
        fcntl.fcntl(writable, _F_ADD_SEALS, _SEALS)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def _reopened(writable: int, *, needed: bool) -> int:
    """The same file for reading only. Half the process's descriptors are left to others."""
    global _descriptors  # noqa: PLW0603
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with _lock:
        if not needed and limit != resource.RLIM_INFINITY and _descriptors >= limit // 2:
            return -1
        try:
            descriptor = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # none left, or no /proc: the memory is good all the same
            return -1
        _descriptors += 1
    return descriptor


def _available() -> int:
    """Bytes that the kernel can give without swapping, to this process and to its control group (a container's)."""
    known = _numbers_in(_PROC / "meminfo").get("MemAvailable:")
    found = [] if known is None else [known * 1024]
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / "self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                found += _left_in_groups(_GROUPS / "memory" if controllers else _GROUPS, path)
    return max(0, min(found, default=2**63 - 1))


def _left_in_groups(root: Path, path: str) -> Iterator[int]:
    """What a control group and each of those around it may still take; its caches of files count as free."""
    own = root / path.lstrip("/")
    for group in (own, *own.parents):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                most = int((group / limit).read_bytes().decode("ascii"))
                if most < _NO_LIMIT:
                    stat = _numbers_in(group / "memory.stat")
                    total = "total_" if "total_inactive_file" in stat else ""
                    cached = stat.get(f"{total}inactive_file", 0) + stat.get(f"{total}active_file", 0)
                    yield most - int((group / used).read_bytes().decode("ascii")) + cached
        if group == root:
            return


def _numbers_in(file: Path) -> dict[str, int]:
    """Lines of a name and a number; empty when there is no such file."""
    with contextlib.suppress(OSError):
        words = [line.split() for line in file.read_bytes().decode("ascii").splitlines()]
        return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdecimal()}
    return {}


def _huge_on_advice() -> bool:
    try:
        return "[advise]" in Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_bytes().decode("ascii")
    except OSError:
        return False


_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _after_fork() -> None:
    """In a forked child: a thread of the parent may have held the lock."""
    global _lock, _unmapping  # noqa: PLW0603
    _lock = threading.RLock()
    _unmapping = False
    _leaving.clear()  # the parent's thread did not come along; nor is there any need for haste


os.register_at_fork(after_in_child=_after_fork)
