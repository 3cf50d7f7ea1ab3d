"""Memory files as tests need them: made by hand, with any seals, and what a process holds of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

GROW, SHRINK, SEAL, WRITE, FUTURE_WRITE = 0x4, 0x2, 0x1, 0x8, 0x10
ALL = SEAL | SHRINK | GROW | FUTURE_WRITE
ADD_SEALS = 1033


def memfd(nbytes: int, *, seals: int = ALL, allocated: int | None = None) -> int:
    """A descriptor, for reading and writing; `allocated` bytes of it exist, by default all."""
    descriptor = os.memfd_create("kvpull-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    exist = nbytes if allocated is None else allocated
    if exist:
        os.posix_fallocate(descriptor, 0, exist)
    fcntl.fcntl(descriptor, ADD_SEALS, seals)
    return descriptor


def descriptors() -> int:
    """How many this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1


def mappings(name: str = "/memfd:kvpull") -> int:
    return Path("/proc/self/maps").read_text(encoding="ascii").count(name)


@contextlib.contextmanager
def descriptor_limit(free: int) -> Iterator[None]:
    """Only `free` descriptors more can be opened meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    fillers = [os.open("/dev/null", os.O_RDONLY)]
    while fillers[-1] <= highest:  # no number is free below the limit
        fillers.append(os.open("/dev/null", os.O_RDONLY))
    spare = [os.open("/dev/null", os.O_RDONLY) for _ in range(free)]
    limit = (spare or fillers)[-1] + 1
    for descriptor in spare:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in fillers:
            os.close(descriptor)


def in_child(work: Callable[[], object]) -> str:
    """What `work` returns in a forked child, or its exception, as text."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of other tests: the child does little
        pid = os.fork()
    if not pid:
        try:
            os.close(reading)
            try:
                said = str(work())
            except BaseException as error:  # noqa: BLE001  (the parent is told)
                said = f"{type(error).__name__}: {error}"
            os.write(writing, said.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    return said
