"""Sealed memory files: nobody can crash or fool who maps one, what a peer passes is proven first, nothing is left."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpull_async.memory import shared
from kvpull_async.memory.shared import Mapping, SharedFile, check_sealed, find, map_readonly
from tests import memfds

KIB, MIB = 1024, 1024 * 1024
PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
PUNCH_HOLE, KEEP_SIZE, MADV_REMOVE = 2, 1, 9


def content(at: SharedFile | Mapping) -> NDArray[np.uint8]:
    return np.frombuffer(memoryview((ctypes.c_ubyte * at.nbytes).from_address(at.address)), np.uint8)


def reopened(file: SharedFile) -> int:
    """As a process of the same user could: for writing, too."""
    return os.open(f"/proc/self/fd/{file.descriptor}", os.O_RDWR | os.O_CLOEXEC)


# -- a file of this process --------------------------------------------------------------------------------------------


def test_a_file_is_zeroed_and_all_of_it_exists() -> None:
    file = SharedFile(3 * MIB + 5)
    assert not content(file).any()
    about = os.fstat(file.descriptor)
    assert about.st_size == 3 * MIB + 5
    assert about.st_blocks * 512 >= 3 * MIB + 5
    check_sealed(file.descriptor, file.nbytes)


def test_what_the_owner_writes_is_what_others_read() -> None:
    file = SharedFile(2 * PAGE)
    mapped = map_readonly(file.descriptor, file.nbytes)
    content(file)[:] = np.arange(2 * PAGE, dtype=np.uint32).astype(np.uint8)
    assert mapped.address != file.address
    assert np.array_equal(content(mapped), content(file))


def test_the_descriptor_given_away_reads_only() -> None:
    file = SharedFile(PAGE)
    assert fcntl.fcntl(file.descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert fcntl.fcntl(file.descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    with pytest.raises(PermissionError):
        mmap.mmap(file.descriptor, PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def test_nobody_can_write_shrink_grow_or_punch_even_with_a_descriptor_for_writing() -> None:
    file = SharedFile(4 * PAGE)
    content(file)[:] = 7
    descriptor = reopened(file)
    try:
        for nbytes in (0, PAGE, 8 * PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, nbytes)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            os.posix_fallocate(descriptor, 4 * PAGE, PAGE)
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 4 * PAGE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        assert LIBC.fallocate(descriptor, PUNCH_HOLE | KEEP_SIZE, 0, PAGE) == -1
        assert ctypes.get_errno() == errno.EPERM
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, memfds.ADD_SEALS, memfds.WRITE)
    finally:
        os.close(descriptor)
    assert (content(file) == 7).all()


def test_a_reader_cannot_make_its_mapping_writable() -> None:
    file = SharedFile(PAGE)
    for flags in (os.O_RDONLY, os.O_RDWR):
        descriptor = os.open(f"/proc/self/fd/{file.descriptor}", flags)
        mapped = map_readonly(descriptor, PAGE)
        os.close(descriptor)
        LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        assert LIBC.mprotect(mapped.address, PAGE, mmap.PROT_READ | mmap.PROT_WRITE) == -1
        assert ctypes.get_errno() == errno.EACCES


def test_not_even_the_owner_can_take_pages_back() -> None:
    file = SharedFile(4 * PAGE)
    content(file)[:] = 7
    assert LIBC.madvise(file.address, PAGE, MADV_REMOVE) == -1
    assert LIBC.madvise(file.address, PAGE, mmap.MADV_DONTNEED) == 0  # drops the mapping's entries, not the file's
    assert (content(file) == 7).all()


def test_numbers_are_never_used_again() -> None:
    numbers = [SharedFile(PAGE).number for _ in range(20)]
    assert len(set(numbers)) == 20
    assert numbers == sorted(numbers)


def test_everything_goes_with_the_last_reference() -> None:
    descriptors, mappings = memfds.descriptors(), memfds.mappings()
    file = SharedFile(PAGE)
    assert (memfds.descriptors(), memfds.mappings()) == (descriptors + 1, mappings + 1)
    del file
    gc.collect()
    assert (memfds.descriptors(), memfds.mappings()) == (descriptors, mappings)


def test_a_mapping_outlives_its_file_and_its_descriptor() -> None:
    file = SharedFile(PAGE)
    content(file)[:3] = (1, 2, 3)
    mapped = map_readonly(file.descriptor, PAGE)
    del file
    gc.collect()
    assert content(mapped)[:3].tolist() == [1, 2, 3]
    before = memfds.mappings()
    del mapped
    gc.collect()
    assert memfds.mappings() == before - 1


@pytest.mark.parametrize("nbytes", [0, -1, -(2**40)])
def test_a_size_that_no_file_can_have_is_an_error_and_leaves_nothing(nbytes: int) -> None:
    before = memfds.descriptors(), memfds.mappings()
    with pytest.raises(OSError, match=r"\w"):
        SharedFile(nbytes)
    assert (memfds.descriptors(), memfds.mappings()) == before


@pytest.mark.parametrize("nbytes", [2**50, 2**63 - 1, 2**70])
def test_more_memory_than_there_is_is_refused_instead_of_killing_the_process(nbytes: int) -> None:
    before = memfds.descriptors(), memfds.mappings()
    with pytest.raises(OSError, match="available") as caught:
        SharedFile(nbytes)
    assert caught.value.errno == errno.ENOMEM
    assert (memfds.descriptors(), memfds.mappings()) == before


GROUPS = {
    "new": ("0::/pod/box", "", ("memory.max", "memory.current"), ("active_file", "inactive_file")),
    "old": (
        "9:cpu:/\n4:cpu,memory:/pod/box\n0::/",
        "memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("total_active_file", "total_inactive_file"),
    ),
}


@pytest.mark.parametrize("kind", sorted(GROUPS))
@pytest.mark.parametrize("limited", ["pod/box", "pod", "."])
def test_a_containers_limit_is_respected_instead_of_killing_the_process(
    kind: str, limited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, root, names, caches = GROUPS[kind]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(own)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 99999999 kB\n")
    for folder in ("pod/box", "pod", "."):
        group = tmp_path / "groups" / root / folder
        group.mkdir(parents=True, exist_ok=True)
        (group / names[0]).write_text(f"{64 * MIB}\n" if folder == limited else "max\n")
        (group / names[1]).write_text(f"{50 * MIB}\n")
        (group / "memory.stat").write_text(
            f"anon 1\n{caches[0]} {MIB}\n{caches[1]} {2 * MIB}\ninactive_file {MIB * 2}\n"
        )
    monkeypatch.setattr(shared, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(shared, "_GROUPS", tmp_path / "groups")
    with pytest.raises(OSError, match=f"{17 * MIB} bytes are available"):
        SharedFile(17 * MIB + 1)
    assert SharedFile(17 * MIB).nbytes == 17 * MIB


def test_a_machine_that_tells_nothing_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_PROC", tmp_path)
    monkeypatch.setattr(shared, "_GROUPS", tmp_path)
    assert SharedFile(PAGE).nbytes == PAGE
    (tmp_path / "meminfo").write_text("nothing of use\nMemAvailable:\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("nonsense\n")
    assert SharedFile(PAGE).nbytes == PAGE


def test_a_process_that_may_map_no_more_gets_an_error_and_leaves_nothing() -> None:
    def limited() -> str:
        before = memfds.descriptors()
        resource.setrlimit(resource.RLIMIT_AS, (64 * MIB, resource.RLIM_INFINITY))
        try:
            SharedFile(128 * MIB)
        except OSError as error:
            return f"{error.errno} {memfds.descriptors() - before}"
        return "made"

    assert memfds.in_child(limited) == f"{errno.ENOMEM} 0"


# -- descriptors -------------------------------------------------------------------------------------------------------


def test_half_of_the_descriptors_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_descriptors", 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (memfds.descriptors() + 24, hard))
    try:
        budget = (memfds.descriptors() + 24) // 2
        files = [SharedFile(PAGE) for _ in range(budget + 3)]
        assert [file.descriptor for file in files[-3:]] == [-1, -1, -1]
        assert all(file.descriptor >= 0 for file in files[: budget - 1])
        content(files[-1])[:] = 5  # its memory works all the same
        del files[0]
        gc.collect()
        assert SharedFile(PAGE).descriptor >= 0, "what was given back may be used again"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        files.clear()


def test_no_descriptor_at_all_is_an_error_and_works_again_later() -> None:
    before = memfds.mappings()
    with memfds.descriptor_limit(0), pytest.raises(OSError, match="Too many open files"):
        SharedFile(PAGE)
    assert memfds.mappings() == before
    assert SharedFile(PAGE).descriptor >= 0


def test_with_the_last_descriptor_memory_can_still_be_had_that_nobody_is_handed() -> None:
    with memfds.descriptor_limit(1):
        file = SharedFile(PAGE)
        assert file.descriptor == -1
        assert SharedFile(PAGE).descriptor == -1, "it is free again"
        content(file)[:] = 1
    assert SharedFile(PAGE).descriptor >= 0


def test_a_kernel_that_cannot_seal_gives_memory_that_nobody_is_handed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_SEALS", memfds.ALL | 0x4000)  # as an unknown one is refused by old kernels
    before = memfds.descriptors()
    file = SharedFile(PAGE)
    assert file.descriptor == -1
    assert memfds.descriptors() == before
    content(file)[:] = 1


# -- finding -----------------------------------------------------------------------------------------------------------


def test_find_knows_the_edges() -> None:
    file = SharedFile(3 * PAGE + 100)
    first, end = file.address, file.address + file.nbytes
    assert find(first, file.nbytes) == (file, 0)
    assert find(first + 17, 1) == (file, 17)
    assert find(end - 1, 1) == (file, file.nbytes - 1)
    assert find(first - 1, 1) is None
    assert find(first - 1, file.nbytes) is None
    assert find(end - 1, 2) is None
    assert find(end, 1) is None
    assert find(first, file.nbytes + 1) is None
    assert find(0, 1) is None
    assert find(2**64 - 1, 1) is None
    assert find(first, 2**64) is None


def test_find_tells_many_files_apart_and_forgets_those_that_went() -> None:
    files = [SharedFile((1 + i % 3) * PAGE) for i in range(50)]
    for file in files:
        assert find(file.address + 5, 10) == (file, 5)
    gone = [(file.address, file.nbytes) for file in files[::2]]
    kept = files[1::2]
    del files, file
    gc.collect()
    assert [find(address, nbytes) for address, nbytes in gone] == [None] * len(gone)
    assert all(find(file.address, 1) == (file, 0) for file in kept)


def test_memory_that_is_in_no_file_is_not_found() -> None:
    held = SharedFile(PAGE)
    array = np.zeros(64, np.uint8)
    assert find(array.ctypes.data, 64) is None
    assert find(held.address, 1) is not None


def test_threads_and_the_collector_may_make_and_drop_files_at_once() -> None:
    kept, failures = SharedFile(PAGE), []
    stop = threading.Event()

    def churn() -> None:
        try:
            while not stop.is_set():
                files = [SharedFile(PAGE) for _ in range(5)]
                cycle: list[object] = [files]
                cycle.append(cycle)  # only the collector finds it, wherever that happens to run
                for file in files:
                    assert find(file.address, PAGE) == (file, 0)
                assert find(kept.address, 1) == (kept, 0)
        except BaseException as error:  # noqa: BLE001  (for the test's thread)
            failures.append(error)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    threshold = gc.get_threshold()
    gc.set_threshold(10)
    try:
        for thread in threads:
            thread.start()
        stop.wait(0.5)
        stop.set()
        for thread in threads:
            thread.join(20)
    finally:
        gc.set_threshold(*threshold)
    assert not failures
    assert find(kept.address, PAGE) == (kept, 0)


# -- a forked child ----------------------------------------------------------------------------------------------------


def test_a_forked_child_has_the_memory_and_takes_nothing_of_it_away() -> None:
    file = SharedFile(PAGE)
    content(file)[:4] = (1, 2, 3, 4)
    address, nbytes, descriptor = file.address, file.nbytes, file.descriptor

    def child() -> str:
        nonlocal file
        seen = content(file)[:4].tolist(), find(address, nbytes) == (file, 0), SharedFile(PAGE).number > file.number
        del file
        gc.collect()
        return str((seen, find(address, 1)))

    assert memfds.in_child(child) == "(([1, 2, 3, 4], True, True), None)"
    assert content(file)[:4].tolist() == [1, 2, 3, 4]
    check_sealed(descriptor, nbytes)


def test_a_child_forked_while_another_thread_held_the_lock_can_still_make_files() -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with shared._lock:
            held.set()
            release.wait(20)

    def child() -> str:
        signal.alarm(10)
        return str(SharedFile(PAGE).nbytes)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    try:
        assert memfds.in_child(child) == str(PAGE)
    finally:
        release.set()
        thread.join()


def test_a_file_that_is_no_longer_shared_gives_its_descriptor_back_and_keeps_its_memory() -> None:
    file, before = SharedFile(PAGE), memfds.descriptors()
    view = (ctypes.c_char * PAGE).from_address(file.address)
    file.unshare()
    file.unshare()
    assert file.descriptor == -1
    assert memfds.descriptors() == before - 1
    view[0] = b"x"
    assert view[0] == b"x"
    del file
    gc.collect()
    assert memfds.descriptors() == before - 1
