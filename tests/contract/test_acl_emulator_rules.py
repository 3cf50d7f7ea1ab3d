"""The emulated AscendCL catches wrong programs: each breaks one rule, and exactly that is found."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.acl_emulator.raw import D2D, D2H, H2D, Raw, recording
from tests.emulation import build

NBYTES = 64 * 1024
POISON, GARBAGE = 0xDB, 0x6B


class Wrong:
    """What the wrong programs start from: a stream, pinned memory, memory of device 0; and copies wait for `finish`."""

    def __init__(self, raw: Raw) -> None:
        self.raw, self.stream = raw, raw.stream()
        self.host, self.device = raw.pinned(NBYTES), raw.device(NBYTES)
        self.bytes = raw.seen(self.host, NBYTES)
        self.bytes[:] = 1
        heap = np.ones(NBYTES + 64, np.uint8)
        self.pageable = heap[-heap.ctypes.data % 64 :][:NBYTES]
        self.there = raw.emulator.memory(self.device, NBYTES)
        raw.emulator.configure(hang_early=1)
        raw.emulator.hang(times=-1)

    def send(self, *, nbytes: int = NBYTES, at: int = 0) -> int:
        return self.raw.send(self.device + at, self.host + at, nbytes, H2D, self.stream)

    def fetch(self) -> int:
        return self.raw.send(self.host, self.device, NBYTES, D2H, self.stream)

    def finish(self) -> int:
        """Let all copies go on, and wait for them."""
        self.raw.emulator.resume()
        return self.raw.finish(self.stream)

    def close(self) -> None:
        """Leave nothing behind, whatever the program has ended already."""
        self.raw.emulator.resume()
        self.raw("aclrtSetDevice", 0)
        self.raw("aclrtDestroyStreamForce", self.stream)
        self.raw("aclrtFree", self.device)
        self.raw("aclrtFreeHost", self.host)


@pytest.fixture
def wrong() -> Iterator[Wrong]:
    with recording(build()) as raw:
        yield from opened(raw)


@pytest.fixture(params=["8.0", "8.2"])
def wrong_of_old(request: pytest.FixtureRequest) -> Iterator[Wrong]:
    with recording(build(release=request.param)) as raw:
        yield from opened(raw)


def opened(raw: Raw) -> Iterator[Wrong]:
    wrong = Wrong(raw)
    yield wrong
    wrong.close()
    assert not any(raw.emulator.left().values())


Program = Callable[[Wrong], object]
PROGRAMS: dict[str, tuple[str, Program]] = {}


def breaks(text: str) -> Callable[[Program], Program]:
    """The program's one violation says this."""

    def note(program: Program) -> Program:
        PROGRAMS[program.__name__] = (text, program)
        return program

    return note


def await_byte(memory: NDArray[np.uint8], value: int) -> None:
    """Until the first byte is this one."""
    end = time.monotonic() + 30
    while memory[0] != value:
        assert time.monotonic() < end
        time.sleep(0.001)


# --- memory that is in use ---


@breaks("freed while a copy")
def frees_the_device_early(wrong: Wrong) -> None:
    wrong.send()
    assert wrong.raw("aclrtFree", wrong.device) == 0
    assert wrong.finish() == 0


@breaks("freed while a copy")
def frees_the_pinned_end_early(wrong: Wrong) -> None:
    wrong.fetch()
    assert wrong.raw("aclrtFreeHost", wrong.host) == 0
    assert wrong.finish() == 0


@breaks("freed while a copy")
def frees_after_a_timeout(wrong: Wrong) -> None:
    wrong.send()
    assert wrong.raw.finish(wrong.stream, 10) == 507046
    wrong.raw("aclrtFree", wrong.device)
    assert wrong.finish() == 0


@breaks("the source")
def changes_the_source(wrong: Wrong) -> None:
    wrong.send()
    wrong.bytes[NBYTES - 1] = 2
    wrong.finish()


@breaks("the source")
def changes_what_is_copied_already_of_the_source(wrong: Wrong) -> None:
    wrong.raw.emulator.configure(hang_early=0)
    wrong.send()
    await_byte(wrong.there, 1)
    wrong.bytes[0] = 2
    wrong.finish()


@breaks("somebody wrote to")
def writes_into_the_destination(wrong: Wrong) -> None:
    wrong.fetch()
    wrong.bytes[NBYTES // 2] = 2
    wrong.finish()


@breaks("somebody wrote to")
def writes_into_what_has_arrived_before_the_end(wrong: Wrong) -> None:
    wrong.raw.emulator.configure(hang_early=0)
    wrong.there[:] = 5
    wrong.fetch()
    await_byte(wrong.bytes, 5)
    wrong.bytes[0] = 2
    wrong.finish()


@breaks("meets a copy")
def copies_at_once_what_is_still_on_its_way(wrong: Wrong) -> None:
    wrong.send()
    back = np.zeros(NBYTES, np.uint8)
    wrong.raw.copy(back.ctypes.data, wrong.device, NBYTES, D2H)
    assert (back == POISON).all()
    wrong.finish()


@breaks("meets a copy")
def lets_two_streams_meet(wrong: Wrong) -> None:
    other, back = wrong.raw.stream(), wrong.raw.pinned(NBYTES)
    wrong.raw.emulator.hang()  # only the first
    wrong.send()
    wrong.raw.send(back, wrong.device, NBYTES, D2H, other)
    assert wrong.raw.finish(other) == 0
    wrong.finish()
    wrong.raw("aclrtDestroyStream", other)
    wrong.raw("aclrtFreeHost", back)


@breaks("somebody wrote outside")
def writes_past_pinned_memory(wrong: Wrong) -> None:
    host = wrong.raw.pinned(100)
    wrong.raw.seen(host, 101)[100] = 0
    wrong.raw("aclrtFreeHost", host)


# --- addresses ---


@breaks("passes the end")
def copies_past_the_end(wrong: Wrong) -> None:
    assert wrong.raw.copy(wrong.device + 64, wrong.host, NBYTES, H2D) == 107000


@breaks("passes the end")
def has_a_batch_with_a_row_past_the_end(wrong: Wrong) -> None:
    rows = [(wrong.device, wrong.host, 64), (wrong.device + NBYTES - 64, wrong.host, 128)]
    assert wrong.raw.batch(rows, inward=True) == (107000, 1)


@breaks("do not fit")
def copies_more_than_there_is_room(wrong: Wrong) -> None:
    assert wrong.raw("aclrtMemcpy", wrong.device, 63, wrong.host, 64, H2D) == 107000


@breaks("not in allocated device memory")
def takes_host_memory_for_the_devices(wrong: Wrong) -> None:
    assert wrong.raw.copy(wrong.pageable.ctypes.data, wrong.host, 64, H2D) == 107000


@breaks("is device memory")
def takes_device_memory_for_the_hosts(wrong: Wrong) -> None:
    assert wrong.raw.copy(wrong.device, wrong.device, 64, H2D) == 107000


@breaks("on device 1, the context on device 0")
def copies_to_another_device_without_leave(wrong: Wrong) -> None:
    wrong.raw("aclrtSetDevice", 1)
    second = wrong.raw.device(64)
    wrong.raw("aclrtSetDevice", 0)
    assert wrong.raw.copy(second, wrong.device, 64, D2D) == 107000
    wrong.raw("aclrtFree", second)


@breaks("twice freed")
def frees_twice(wrong: Wrong) -> None:
    assert [wrong.raw("aclrtFree", wrong.device) for _ in "12"] == [0, 107000]


@breaks("is not the start of pinned memory but in a block of device memory")
def frees_device_memory_as_pinned(wrong: Wrong) -> None:
    assert wrong.raw("aclrtFreeHost", wrong.device) == 107000


@breaks("is not the start of device memory")
def frees_from_the_middle(wrong: Wrong) -> None:
    assert wrong.raw("aclrtFree", wrong.device + 64) == 107000


# --- streams, contexts, the library ---


@breaks("a timeout of 0")
def waits_for_no_time(wrong: Wrong) -> None:
    wrong.send()
    assert wrong.raw.finish(wrong.stream, 0) == 107000
    assert wrong.finish() == 0


@breaks("a timeout of -2")
def waits_for_less_than_ever(wrong: Wrong) -> None:
    assert wrong.raw.finish(wrong.stream, -2) == 107000


@breaks("tasks unfinished")
def destroys_a_busy_stream(wrong: Wrong) -> None:
    wrong.send()
    assert wrong.raw("aclrtDestroyStream", wrong.stream) == 0
    wrong.stream = wrong.raw.stream()


@breaks("no living stream")
def uses_a_destroyed_stream(wrong: Wrong) -> None:
    dead = wrong.stream
    wrong.raw("aclrtDestroyStream", dead)
    wrong.stream = wrong.raw.stream()
    assert wrong.raw.send(wrong.device, wrong.host, 64, H2D, dead) == 107017


@breaks("no living context")
def enters_a_destroyed_context(wrong: Wrong) -> None:
    context = wrong.raw.made("aclrtCreateContext", 0)
    assert wrong.raw("aclrtDestroyContext", context) == 0
    assert wrong.raw("aclrtSetCurrentContext", context) == 107017


@breaks("is not the caller's")
def destroys_the_devices_own_context(wrong: Wrong) -> None:
    assert wrong.raw("aclrtDestroyContext", wrong.raw.made("aclrtGetCurrentContext")) == 107000


@breaks("blocks of device memory are allocated")
def finalizes_too_early(wrong: Wrong) -> None:
    wrong.raw("aclFinalize")
    wrong.raw.start()


@breaks("shared with somebody")
def resets_a_device_that_others_use(wrong: Wrong) -> None:
    wrong.raw.emulator.claim()
    wrong.raw("aclrtSetDevice", 1)
    assert wrong.raw("aclrtResetDevice", 1) == 0


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_wrong_program_is_found(wrong: Wrong, name: str) -> None:
    text, program = PROGRAMS[name]
    program(wrong)
    violations = wrong.raw.emulator.violations()
    assert len(violations) == 1, violations
    assert text in violations[0]


# --- what the eye sees: no rule can be checked, but the bytes are wrong ---


def test_who_does_not_synchronise_reads_poison(wrong: Wrong) -> None:
    wrong.there[:] = 5
    wrong.fetch()
    assert (wrong.bytes == POISON).all()
    wrong.finish()
    assert (wrong.bytes == 5).all()
    wrong.send()
    assert (wrong.there == POISON).all()
    wrong.finish()
    assert wrong.raw.emulator.violations() == []


def test_a_thread_that_forgets_the_context_is_refused(wrong: Wrong) -> None:
    wrong.there[:] = 5
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(wrong.send).result(timeout=30) == 107002
    assert (wrong.there == 5).all()


# --- the old releases: async copies need pinned memory and aligned addresses ---


def test_pageable_memory_in_an_async_copy_of_an_old_release(wrong_of_old: Wrong) -> None:
    wrong, raw = wrong_of_old, wrong_of_old.raw
    assert raw.send(wrong.device, wrong.pageable.ctypes.data, NBYTES, H2D, wrong.stream) == 0
    assert wrong.finish() == 0
    assert (wrong.there == GARBAGE).all()
    (violation,) = raw.emulator.violations()
    assert "needs host memory of aclrtMallocHost" in violation


@pytest.mark.parametrize(("to", "source"), [(32, 0), (0, 8)])
def test_crooked_addresses_in_an_async_copy_of_an_old_release(wrong_of_old: Wrong, to: int, source: int) -> None:
    wrong, raw = wrong_of_old, wrong_of_old.raw
    assert raw.send(wrong.device + to, wrong.host + source, 64, H2D, wrong.stream) == 0
    assert wrong.finish() == 0
    assert (wrong.there[to : to + 64] == GARBAGE).all()
    (violation,) = raw.emulator.violations()
    assert "addresses that 64 divides" in violation


def test_host_to_host_is_no_async_copy_of_an_old_release(wrong_of_old: Wrong) -> None:
    raw, host = wrong_of_old.raw, wrong_of_old.host
    assert raw.send(host + 64, host, 64, 0, wrong_of_old.stream) == 207000


def test_the_same_is_right_at_once_and_in_new_releases(wrong_of_old: Wrong, wrong: Wrong) -> None:
    old, pageable = wrong_of_old, wrong_of_old.pageable.ctypes.data
    assert old.raw.copy(old.device + 8, pageable, 64, H2D) == 0
    wrong.raw.emulator.resume()
    assert wrong.raw.send(wrong.device + 8, pageable, 64, H2D, wrong.stream) == 0
    assert wrong.raw.emulator.violations() == old.raw.emulator.violations() == []


def test_bad_arguments_get_the_documented_codes(wrong: Wrong) -> None:
    raw = wrong.raw
    assert raw("aclrtFree", 0) == 100000
    assert raw("aclrtFreeHost", 0) == 100000
    assert raw("aclrtMalloc", ctypes.byref(ctypes.c_void_p()), 0, 0) == 100000
    assert raw.copy(0, 0, 0, H2D) == 0
    assert raw.copy(0, wrong.host, 64, H2D) == 100000
    assert raw.copy(wrong.device, wrong.host, 64, 6) == 100000
    assert raw("aclrtDeviceCanAccessPeer", ctypes.byref(ctypes.c_int32()), 0, 0) == 100000
    assert raw("aclrtDeviceEnablePeerAccess", 1, 1) == 200006
    assert raw.batch([(wrong.device, wrong.host, 64)], inward=True, device=1)[0] == 107000
    assert raw.emulator.violations() == []
