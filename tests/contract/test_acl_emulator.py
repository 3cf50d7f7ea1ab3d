"""The emulated AscendCL does what the documents say of a right program: copies, streams, contexts, and its controls."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests import acl_emulator
from tests.acl_emulator import CFLAGS, HERE, RELEASES, NoCompiler, functions
from tests.acl_emulator.raw import D2D, D2H, H2D, Pieces, PointerAttributes, Raw, clean, in_thread
from tests.emulation import build, needs_gcc

NBYTES = Pieces.NBYTES
POISON, FRESH = 0xDB, 0xA5
pattern = Pieces.PATTERN


@pytest.fixture(params=sorted(RELEASES))
def every(request: pytest.FixtureRequest) -> Iterator[Raw]:
    with clean(build(release=request.param)) as raw:
        yield raw


# --- building ---


def test_one_build_for_the_same_sources_and_arguments() -> None:
    assert build() == build(release="9.0", without=())
    assert len({build(release=release) for release in RELEASES}) == len(RELEASES)


@needs_gcc
@pytest.mark.parametrize("release", sorted(RELEASES))
def test_our_compiler_has_nothing_to_say(release: str, tmp_path: Path) -> None:
    """A build does not insist on that: a newer compiler may warn of more."""
    command = ["gcc", *CFLAGS, "-Werror", f"-DACL_RELEASE={RELEASES[release][0]}", "-o", str(tmp_path / "checked.so")]
    done = subprocess.run([*command, *map(str, HERE.glob("*.c"))], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_gcc_it_is_said_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(NoCompiler, match="gcc"):
        acl_emulator.build()
    with pytest.raises(pytest.skip.Exception, match="gcc"):
        build()
    assert [path for folder in tmp_path.iterdir() for path in folder.iterdir()] == []


def test_a_build_lacks_what_its_release_lacks_and_what_it_is_told_to() -> None:
    everything = ctypes.CDLL(str(build() / "lib64" / "libascendcl.so"))
    assert [name for name in functions() if not hasattr(everything, name)] == []
    older = ctypes.CDLL(str(build(release="8.0", without=["aclrtStreamQuery"]) / "lib64" / "libascendcl.so"))
    missing = {name for name in functions() if not hasattr(older, name)}
    assert missing == {*RELEASES["8.0"][1], "aclrtStreamQuery"}


@pytest.mark.parametrize("arguments", [{"release": "7.0"}, {"without": ["aclrtMemcopy"]}])
def test_a_build_of_something_unknown_is_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"7\.0|aclrtMemcopy"):
        build(**arguments)  # type: ignore[arg-type]


# --- copies ---


def test_bytes_go_to_the_device_within_it_and_back(every: Raw) -> None:
    pieces, other, back = Pieces(every), every.device(NBYTES), every.pinned(NBYTES)
    assert (pieces.there == FRESH).all()  # memory is not cleared
    assert pieces.send() == 0
    assert every.send(other, pieces.device, NBYTES, D2D, pieces.stream) == 0
    assert every.send(back, other, NBYTES, D2H, pieces.stream) == 0
    assert every.finish(pieces.stream) == 0
    assert (every.seen(back, NBYTES) == pattern).all()
    assert every("aclrtMemset", pieces.device, NBYTES, 7, NBYTES) == 0
    plain = np.zeros(NBYTES, np.uint8)
    assert every.copy(plain.ctypes.data, pieces.device, NBYTES, D2H) == 0
    assert (plain == 7).all()
    assert [every("aclrtFree", other), every("aclrtFreeHost", back)] == [0, 0]
    pieces.end()


@pytest.mark.parametrize("run", ["at once", "async"])
def test_a_batch_copies_every_row(raw: Raw, pieces: Pieces, run: str) -> None:
    raw.emulator.configure(hang_early=1)
    raw.emulator.hang()
    rows = [(pieces.device + at, pieces.host + NBYTES - 1024 - at, 1024) for at in range(0, NBYTES, 1024)]
    code, _ = raw.batch(rows, inward=True, stream=pieces.stream if run == "async" else None)
    assert code == 0
    if run == "async":
        assert (pieces.there == POISON).all()
    raw.emulator.resume()
    assert raw.finish(pieces.stream) == 0
    assert (pieces.there.reshape(-1, 1024) == pattern.reshape(-1, 1024)[::-1]).all()


def test_the_destination_of_an_async_copy_is_poison_until_it_arrives(raw: Raw, pieces: Pieces) -> None:
    raw.emulator.configure(hang_early=1)
    raw.emulator.hang()
    assert pieces.send() == 0
    assert raw.emulator.left()["running"] == 1
    assert (pieces.there == POISON).all()
    assert raw.number("aclrtStreamQuery", pieces.stream, of=1) == 1
    raw.emulator.resume()
    assert raw.finish(pieces.stream) == 0
    assert (pieces.there == pattern).all()
    assert raw.number("aclrtStreamQuery", pieces.stream, of=1) == 0


def test_an_async_copy_comes_late(raw: Raw, pieces: Pieces) -> None:
    raw.emulator.configure(delay_us=50_000)
    begin = time.monotonic()
    assert pieces.send() == 0
    assert raw.finish(pieces.stream) == 0
    assert time.monotonic() - begin >= 0.049


def test_an_async_copy_of_pageable_memory_is_over_when_the_call_returns(raw: Raw, pieces: Pieces) -> None:
    raw.emulator.configure(delay_us=100_000)
    assert raw.send(pieces.device, pattern.ctypes.data, NBYTES, H2D, pieces.stream) == 0
    assert raw.emulator.left()["running"] == 0
    assert (pieces.there == pattern).all()


def test_copies_of_one_direction_share_the_bandwidth(raw: Raw, pieces: Pieces) -> None:
    raw.emulator.configure(bandwidth=NBYTES * 20, delay_us=0)  # 50 ms each
    other, second = raw.stream(), raw.device(NBYTES)
    begin = time.monotonic()
    assert pieces.send() == 0
    assert raw.send(second, pieces.host, NBYTES, H2D, other) == 0
    assert [raw.finish(pieces.stream), raw.finish(other)] == [0, 0]
    assert time.monotonic() - begin >= 0.099
    assert [raw("aclrtDestroyStream", other), raw("aclrtFree", second)] == [0, 0]


def test_an_event_puts_one_streams_copy_before_anothers(raw: Raw, pieces: Pieces) -> None:
    raw.emulator.hang()
    other, back, event = raw.stream(), raw.pinned(NBYTES), raw.made("aclrtCreateEvent")
    assert pieces.send() == 0
    assert raw("aclrtRecordEvent", event, pieces.stream) == 0
    assert raw("aclrtStreamWaitEvent", other, event) == 0
    assert raw.number("aclrtQueryEventStatus", event, of=1) == 0
    assert raw.send(back, pieces.device, NBYTES, D2H, other) == 0
    assert raw("aclrtSynchronizeEventWithTimeout", event, 1) == 507047
    with ThreadPoolExecutor(1, initializer=raw, initargs=("aclrtSetDevice", 0)) as threads:
        waiting = threads.submit(raw, "aclrtSynchronizeEvent", event)
        while raw.emulator.count("aclrtSynchronizeEvent") == 0:
            time.sleep(0.001)
        raw.emulator.resume()
        assert waiting.result(timeout=30) == 0
    assert (pieces.there == pattern).all()
    assert raw.finish(other) == 0
    assert (raw.seen(back, NBYTES) == pattern).all()
    assert raw.number("aclrtQueryEventStatus", event, of=1) == 1
    done = [raw("aclrtDestroyEvent", event), raw("aclrtDestroyStream", other), raw("aclrtFreeHost", back)]
    assert done == [0, 0, 0]


# --- threads, contexts, devices ---


def test_a_bare_thread_has_no_context_until_it_takes_one(raw: Raw, pieces: Pieces) -> None:
    context = raw.made("aclrtGetCurrentContext")

    def bare() -> list[int]:
        handle = ctypes.c_void_p()
        codes = [raw("aclrtGetCurrentContext", ctypes.byref(handle)), pieces.send(), raw("aclrtFree", pieces.device)]
        raw.emulator.configure(bare_context_code=0)
        codes.append(raw("aclrtGetCurrentContext", ctypes.byref(handle)))
        assert handle.value is None
        return [*codes, raw("aclrtSetCurrentContext", context), pieces.send()]

    assert in_thread(bare) == [107002, 107002, 107002, 0, 0, 0]


def test_a_stream_belongs_to_its_context(raw: Raw, pieces: Pieces) -> None:
    context = raw.made("aclrtGetCurrentContext")
    other = raw.made("aclrtCreateContext", 0)  # which becomes current
    assert [pieces.send(), raw.finish(pieces.stream), raw("aclrtDestroyStream", pieces.stream)] == [107003] * 3
    assert raw("aclrtSetCurrentContext", context) == 0
    assert raw("aclrtDestroyContext", other) == 0


def test_devices_have_memory_of_their_own(raw: Raw) -> None:
    raw.emulator.configure(devices=3, device_bytes=8 << 20)
    assert raw.number("aclrtGetDeviceCount") == 3
    assert raw("aclrtSetDevice", 3) == 107001
    block = raw.device((6 << 20) - 64)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert raw("aclrtGetMemInfo", 1, ctypes.byref(free), ctypes.byref(total)) == 0
    assert (free.value, total.value) == (2 << 20, 8 << 20)
    with pytest.raises(OSError, match="aclrtMalloc") as refused:
        raw.device(3 << 20)
    assert refused.value.errno == 207001
    assert raw("aclrtSetDevice", 1) == 0
    second = raw.device(3 << 20)
    attributes = PointerAttributes()
    raw("aclrtPointerGetAttributes", second, ctypes.byref(attributes))
    assert (attributes.location.id, attributes.location.type) == (1, 1)
    assert [raw("aclrtFree", second), raw("aclrtFree", block)] == [0, 0]


def test_one_device_reads_another_once_it_may(raw: Raw, pieces: Pieces) -> None:
    assert raw("aclrtSetDevice", 1) == 0
    second = raw.device(NBYTES)
    assert raw("aclrtSetDevice", 0) == 0
    assert raw.number("aclrtDeviceCanAccessPeer", 0, 1) == 1
    assert raw("aclrtDeviceEnablePeerAccess", 1, 0) == 0
    assert pieces.send() == 0
    assert raw.send(second, pieces.device, NBYTES, D2D, pieces.stream) == 0
    assert raw.finish(pieces.stream) == 0
    assert (raw.emulator.memory(second, NBYTES) == pattern).all()
    assert [raw("aclrtFree", second), raw("aclrtDeviceDisablePeerAccess", 1)] == [0, 0]


def test_pinned_memory_ends_too(raw: Raw) -> None:
    raw.emulator.configure(pinned_bytes=NBYTES)
    host = raw.pinned(NBYTES)
    with pytest.raises(OSError, match="aclrtMallocHost"):
        raw.pinned(1)
    assert raw("aclrtFreeHost", host) == 0


def stream_threads() -> int:
    """How many threads of streams the kernel knows; it forgets one a moment after it has ended."""
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            count += (task / "comm").read_text(encoding="ascii") == "acl-stream\n"
    return count


def test_a_destroyed_stream_leaves_no_thread(raw: Raw) -> None:
    def reach(wanted: int) -> bool:
        end = time.monotonic() + 30
        while stream_threads() != wanted and time.monotonic() < end:
            time.sleep(0.001)
        return stream_threads() == wanted

    before = stream_threads()  # what another test has left hanging on purpose
    streams = [raw.stream() for _ in range(8)]
    assert reach(before + 8)
    assert raw.emulator.left()["streams"] == 8
    assert [raw("aclrtDestroyStream", stream) for stream in streams] == [0] * 8
    assert reach(before)


def test_initialising_is_counted_and_a_message_is_the_threads_own(raw: Raw) -> None:
    raw.message()
    assert raw("aclInit", None) == 100002
    assert in_thread(raw.message) == ""
    assert "100002" in raw.message()
    assert raw.message() == ""
    raw.emulator.configure(message_mode=1)
    assert raw("aclInit", None) == 100002
    assert "100002" in str(in_thread(raw.message))


def test_many_threads_at_once(raw: Raw) -> None:
    raw.emulator.configure(delay_us_min=0, delay_us_max=200)
    context, gate = raw.made("aclrtGetCurrentContext"), threading.Barrier(4)

    def work(seed: int) -> None:
        raw("aclrtSetCurrentContext", context)
        gate.wait(timeout=30)
        for turn in range(20):
            pieces = Pieces(raw)
            pieces.bytes[:] = (seed * 31 + turn) % 256
            assert pieces.send() == 0
            if turn % 3 == 0:
                assert raw("aclrtStreamAbort", pieces.stream) == 0
            else:
                assert raw.finish(pieces.stream) == 0
                assert (pieces.there == pieces.bytes).all()
            pieces.end()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
