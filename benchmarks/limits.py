"""The machine's own copies, measured as if they were contenders: what no pull over shared memory can beat.

It must not use the library, its C extension included.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from processes import Unavailable
from sides import Puller, Source, repeat
from workloads import Arena, Segment, Shape, Workload, own_memory

__all__ = ["MODES", "CopyPuller", "CopySource"]

IOVECS: Final = 1024
"""The most that one process_vm_readv takes."""
MODES: Final = {
    "numpy1": "numpy copies, 1 thread",
    "numpy2": "numpy copies, 2 threads",
    "memcpy1": "memcpy in C, 1 thread",
    "memcpy2": "memcpy in C, 2 threads",
    "stream1": "streaming stores in C, 1 thread",
    "stream2": "streaming stores in C, 2 threads",
    "memfd-stream1": "streaming stores out of a memfd, 1 thread",
    "memfd-stream2": "streaming stores out of a memfd, 2 threads",
    "vmread1": "process_vm_readv, 1 thread",
    "vmread2": "process_vm_readv, 2 threads",
}
"""Title by mode. The last character is the number of threads."""
Job = Callable[[], None]
Table = NDArray[np.uint64]


class CopySource(Source):
    """A process with the same bytes twice: in a memfd that others map, and in private memory that they read."""

    def __init__(self, *, huge: bool = False) -> None:
        self._huge = huge

    def open(self, shape: Shape, works: Sequence[Workload], *, seed: int) -> Any:
        nbytes = shape.tensors * shape.tensor_nbytes
        self._fd = os.memfd_create("kvpull-bench")
        os.ftruncate(self._fd, nbytes)
        self._shared = _mapped(self._fd, shape)
        self._own = own_memory(shape, huge=self._huge)
        for arena in self.arenas():
            arena.fill(seed)
        return {"pid": os.getpid(), "fd": self._fd, "address": self._own.addresses[0], "seed": seed}

    def arenas(self) -> Sequence[Arena]:
        return [self._own, self._shared]


def _mapped(fd: int, shape: Shape) -> Arena:
    memory = mmap.mmap(fd, shape.tensors * shape.tensor_nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    return Arena(list(np.frombuffer(memory, np.uint8).reshape(shape.tensors, -1)))


class CopyPuller(Puller):
    """Copies out of its own memory, out of the source's memfd, and out of the source's private memory."""

    def __init__(self, *, huge: bool = False) -> None:
        self._huge = huge

    def open(self, shape: Shape, works: Sequence[Workload], *, told: Any) -> None:
        self._shape, self._told = shape, told
        self._arena, self._local = (own_memory(shape, huge=self._huge) for _ in range(2))
        self._local.fill(told["seed"])
        fd = os.open(f"/proc/{told['pid']}/fd/{told['fd']}", os.O_RDWR)
        self._shared = _mapped(fd, shape)
        os.close(fd)
        self._helper = _Helper()
        self._c: ctypes.CDLL | None = None

    def arena(self, work: Workload) -> Arena:
        return self._arena

    def pull(self, work: Workload, count: int, mode: str = "memcpy1") -> list[float]:
        threads = int(mode[-1])
        jobs = []
        for pull in work.pulls:
            segments = pull.segments(self._shape)
            shares = [segments] if threads == 1 else [segments[: len(segments) // 2], segments[len(segments) // 2 :]]
            jobs.append([self._job(mode[:-1], share) for share in shares])
        calls = [one[0] if threads == 1 else partial(self._helper.both, *one) for one in jobs]
        return repeat(calls, count, budget=work.budget)

    def _job(self, how: str, segments: Sequence[Segment]) -> Job:
        if how == "numpy":
            to, out_of = self._arena.tensors, self._local.tensors
            pairs = [(to[dst][at : at + n], out_of[src][start : start + n]) for src, start, dst, at, n in segments]
            return partial(_copy, pairs)
        if how == "vmread":
            base = self._told["address"]
            starts = [base + i * self._shape.tensor_nbytes for i in range(self._shape.tensors)]
            return partial(_read, _vectors(self._told["pid"], self._table(segments, starts)))
        source = self._shared if how.startswith("memfd") else self._local
        table = self._table(segments, source.addresses)
        return self._in_c("stream_all" if how.endswith("stream") else "copy_all", table)

    def _table(self, segments: Sequence[Segment], starts: Sequence[int]) -> Table:
        """Rows: destination addresses, source addresses, bytes."""
        to = self._arena.addresses
        rows = [(to[dst] + at, starts[src] + start, n) for src, start, dst, at, n in segments]
        return np.ascontiguousarray(np.array(rows, np.uint64).T)

    def _in_c(self, name: str, table: Table) -> Job:
        self._c = self._c or build()
        _kept.append(table)
        at, row = table.ctypes.data, table.strides[0]
        return partial(getattr(self._c, name), at, at + row, at + 2 * row, table.shape[1])


def _copy(pairs: Sequence[tuple[Any, Any]]) -> None:
    for to, out_of in pairs:
        np.copyto(to, out_of)


_libc: Final = ctypes.CDLL(None, use_errno=True)


def _vectors(pid: int, table: Table) -> list[tuple[tuple[Any, ...], int]]:
    """Arguments of process_vm_readv calls, and the bytes that each must move."""
    iovecs = np.empty((2, table.shape[1], 2), np.uint64)
    iovecs[0, :, 0], iovecs[1, :, 0], iovecs[:, :, 1] = table[0], table[1], table[2]
    calls = []
    for first in range(0, table.shape[1], IOVECS):
        local, remote = (side[first : first + IOVECS] for side in iovecs)
        n = ctypes.c_ulong(len(local))
        where = [item for side in (local, remote) for item in (ctypes.c_void_p(side.ctypes.data), n)]
        calls.append(((pid, *where, ctypes.c_ulong(0)), int(local[:, 1].sum())))
    _kept.append(iovecs)
    return calls


_kept: Final[list[Any]] = []
"""What calls point to; a process makes a few dozen of them and ends."""


def _read(calls: Sequence[tuple[tuple[Any, ...], int]]) -> None:
    for arguments, nbytes in calls:
        got = _libc.process_vm_readv(*arguments)
        if got != nbytes:
            raise Unavailable(f"process_vm_readv moved {got} of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")


_libc.process_vm_readv.restype = ctypes.c_ssize_t


def build() -> ctypes.CDLL:
    """limits.c, compiled for this machine. Raises Unavailable when there is no gcc, or it fails."""
    gcc = shutil.which("gcc")
    if gcc is None:
        raise Unavailable("no gcc to compile limits.c with")
    with tempfile.TemporaryDirectory(prefix="kvpull-bench-") as folder:
        library = Path(folder) / "limits.so"
        source = Path(__file__).with_name("limits.c")
        command = [gcc, "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(library)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if ran.returncode:
            raise Unavailable(f"gcc failed: {ran.stderr.strip()[:200]}")
        c = ctypes.CDLL(str(library))  # stays mapped when the file is gone
    for name in ("copy_all", "stream_all"):
        function = getattr(c, name)
        function.argtypes, function.restype = [ctypes.c_void_p] * 3 + [ctypes.c_size_t], None
    return c


class _Helper:
    """A second thread that does one half while the caller does the other."""

    def __init__(self) -> None:
        self._todo: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self._todo.get()
            try:
                job()
            except Exception as error:  # noqa: BLE001  (raised again by the caller)
                self._done.put(error)
            else:
                self._done.put(None)

    def both(self, mine: Job, other: Job) -> None:
        self._todo.put(other)
        mine()
        error = self._done.get(timeout=60)
        if error is not None:
            raise error
