"""What a peer passes is proven before it is mapped."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path

import pytest

from kvpull_async.memory.shared import SharedFile, check_sealed, map_readonly
from tests import memfds

PAGE = mmap.PAGESIZE


def refused(descriptor: int, nbytes: int) -> str:
    with pytest.raises(OSError, match="peer") as caught:
        check_sealed(descriptor, nbytes)
    assert caught.value.errno == errno.EPERM
    os.close(descriptor)
    return str(caught.value)


@pytest.mark.parametrize("missing", [memfds.SEAL, memfds.SHRINK, memfds.GROW, memfds.FUTURE_WRITE, memfds.ALL])
def test_each_seal_is_needed(missing: int) -> None:
    assert "seals" in refused(memfds.memfd(PAGE, seals=memfds.ALL & ~missing), PAGE)


def test_a_file_sealed_against_all_writes_is_as_good_only_with_the_seals_asked_for() -> None:
    descriptor = memfds.memfd(PAGE, seals=memfds.ALL | memfds.WRITE)
    check_sealed(descriptor, PAGE)
    os.close(descriptor)


def test_too_small_is_refused_to_the_byte() -> None:
    assert "100 bytes" in refused(memfds.memfd(100), 101)
    refused(memfds.memfd(PAGE), PAGE + 1)
    descriptor = memfds.memfd(100)
    check_sealed(descriptor, 100)
    os.close(descriptor)


@pytest.mark.parametrize("allocated", [0, PAGE, 15 * PAGE])
def test_a_file_with_holes_is_refused(allocated: int) -> None:
    assert "allocated" in refused(memfds.memfd(16 * PAGE, allocated=allocated), 16 * PAGE)


def test_a_hole_in_the_part_needed_is_not_made_up_for_by_the_rest() -> None:
    descriptor = os.memfd_create("kvpull-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 16 * PAGE)
    os.posix_fallocate(descriptor, 8 * PAGE, 8 * PAGE)
    fcntl.fcntl(descriptor, memfds.ADD_SEALS, memfds.ALL)
    refused(descriptor, 8 * PAGE)


def test_what_is_no_memory_file_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(PAGE))
    reading, writing = os.pipe()
    os.close(writing)
    for descriptor in (
        os.open(plain, os.O_RDWR),
        os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY),
        os.open("/dev/zero", os.O_RDWR),
        os.open("/dev/null", os.O_RDONLY),
        reading,
    ):
        assert "no memory file" in refused(descriptor, PAGE)


def test_a_file_in_shared_memory_that_has_a_name_is_refused() -> None:
    path = Path("/dev/shm/kvpull-test-named")
    try:
        path.write_bytes(bytes(PAGE))
        refused(os.open(path, os.O_RDWR), PAGE)
    finally:
        path.unlink()


def test_a_closed_descriptor_is_refused_as_an_error() -> None:
    descriptor = memfds.memfd(PAGE)
    os.close(descriptor)
    with pytest.raises(OSError, match="no memory file"):
        check_sealed(descriptor, PAGE)


@pytest.mark.parametrize("nbytes", [0, 2**62, 2**63 - 1])
def test_a_size_that_cannot_be_mapped_is_an_error_and_leaves_nothing(nbytes: int) -> None:
    file, before = SharedFile(PAGE), memfds.mappings()
    with pytest.raises(OSError, match=r"\w"):
        map_readonly(file.descriptor, nbytes)
    assert memfds.mappings() == before
