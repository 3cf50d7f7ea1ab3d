"""The emulator does what a test asks of it: hangs, failures, refusals, counts, views; and an abort ends what hangs."""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from tests.acl_emulator.raw import H2D, Pieces, PointerAttributes, Raw, in_thread

NBYTES = Pieces.NBYTES
POISON = 0xDB
pattern = Pieces.PATTERN


def pointed() -> object:
    return ctypes.byref(PointerAttributes())


# --- hangs, aborts, failures ---


def test_a_hanging_copy_outlives_a_timeout_and_ends_by_resume(raw: Raw, pieces: Pieces) -> None:
    raw.emulator.hang()
    assert pieces.send() == 0
    used = time.process_time()
    assert raw.finish(pieces.stream, 300) == 507046
    assert time.process_time() - used < 0.2  # waiting costs nothing
    pieces.half_there()
    assert (pieces.there[NBYTES // 2 :] == POISON).all()
    raw.emulator.resume()
    assert raw.finish(pieces.stream) == 0
    assert (pieces.there == pattern).all()


def test_a_resume_reaches_a_copy_that_is_just_being_issued(raw: Raw, pieces: Pieces) -> None:
    context = raw.made("aclrtGetCurrentContext")
    for _ in range(200):
        raw.emulator.hang()
        with ThreadPoolExecutor(1, initializer=raw, initargs=("aclrtSetCurrentContext", context)) as threads:
            sending = threads.submit(pieces.send)
            while raw.emulator.left()["running"] == 0:
                pass
            raw.emulator.resume()
            assert sending.result(timeout=30) == 0
        assert raw.finish(pieces.stream) == 0


def test_an_abort_leaves_half_a_copy_drops_the_queue_and_wakes_who_waits(raw: Raw, pieces: Pieces) -> None:
    second = raw.device(NBYTES)
    context = raw.made("aclrtGetCurrentContext")
    raw.emulator.hang()
    assert pieces.send() == 0
    assert raw.send(second, pieces.host, NBYTES, H2D, pieces.stream) == 0
    pieces.half_there()

    def synchronise() -> int:
        raw("aclrtSetCurrentContext", context)
        return raw.finish(pieces.stream)

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(synchronise)
        while raw.emulator.count("aclrtSynchronizeStreamWithTimeout") == 0:
            time.sleep(0.001)
        assert raw("aclrtStreamAbort", pieces.stream) == 0
        assert waiting.result(timeout=30) == 107023
    assert raw.emulator.left()["running"] == 0
    assert (pieces.there[: NBYTES // 2] == pattern[: NBYTES // 2]).all()
    assert (pieces.there[NBYTES // 2 :] == POISON).all()
    assert (raw.emulator.memory(second, NBYTES) == POISON).all()
    assert pieces.send() == 0
    assert raw.finish(pieces.stream) == 0
    assert raw("aclrtFree", second) == 0


def test_a_synchronous_copy_can_be_held(raw: Raw, pieces: Pieces) -> None:
    context = raw.made("aclrtGetCurrentContext")
    raw.emulator.hang_sync()

    def copy() -> int:
        raw("aclrtSetCurrentContext", context)
        return raw.copy(pieces.device, pieces.host, NBYTES, H2D)

    with ThreadPoolExecutor(1) as threads:
        copying = threads.submit(copy)
        while raw.emulator.left()["running"] == 0:
            time.sleep(0.001)
        assert wait([copying], timeout=0.05).not_done
        raw.emulator.resume()
        assert copying.result(timeout=30) == 0
    assert (pieces.there == pattern).all()


def test_a_failed_copy_is_told_by_the_next_synchronise_once(raw: Raw, pieces: Pieces) -> None:
    raw.emulator.inject("task", 507053)
    assert pieces.send() == 0
    assert raw.finish(pieces.stream) == 507053
    assert raw.finish(pieces.stream) == 0
    assert (pieces.there != pattern).any()


def test_a_call_answers_the_injected_code_as_often_as_asked(raw: Raw, pieces: Pieces) -> None:
    raw.emulator.inject("aclrtMemcpyAsync", 507013, after=1, times=2)
    assert [pieces.send() for _ in range(4)] == [0, 507013, 507013, 0]
    assert raw.emulator.count("aclrtMemcpyAsync") == 4
    with pytest.raises(ValueError, match="aclrtMemcopy"):
        raw.emulator.inject("aclrtMemcopy", 1)


@pytest.mark.parametrize(
    ("setting", "call"),
    [
        ("abort_works", lambda raw, pieces: raw("aclrtStreamAbort", pieces.stream)),
        ("query_works", lambda raw, pieces: raw("aclrtStreamQuery", pieces.stream, ctypes.byref(ctypes.c_int()))),
        ("batch_supported", lambda raw, pieces: raw.batch([(pieces.device, pieces.host, 64)], inward=True)[0]),
        ("pointer_attributes", lambda raw, pieces: raw("aclrtPointerGetAttributes", pieces.device, pointed())),
    ],
)
def test_a_feature_can_be_unsupported(raw: Raw, pieces: Pieces, setting: str, call: object) -> None:
    assert call(raw, pieces) == 0  # type: ignore[operator]
    raw.emulator.configure(**{setting: 0})
    assert call(raw, pieces) == 207000  # type: ignore[operator]
    with pytest.raises(ValueError, match="nonsense"):
        raw.emulator.configure(nonsense=1)


# --- what a test learns ---


def test_the_threads_that_call_a_function_are_known(raw: Raw) -> None:
    raw("aclInit", None)
    other = in_thread(lambda: (raw("aclInit", None), threading.get_native_id())[1])
    assert raw.emulator.threads("aclInit") == {threading.get_native_id(), other}
    assert raw.emulator.threads("aclFinalize") == set()


def test_reset_forgets_everything_but_what_is_allocated(raw: Raw) -> None:
    host = raw.pinned(64)
    raw.emulator.inject("aclrtFreeHost", 107000)
    raw("aclrtFree", host)
    assert raw.emulator.violations()
    raw.emulator.reset()
    assert (raw.emulator.counts(), raw.emulator.violations()) == ({}, [])
    assert raw.emulator.left()["pinned_blocks"] == 1
    assert raw("aclrtFreeHost", host) == 0


def test_a_view_outlives_its_memory_until_the_reset(raw: Raw) -> None:
    block = raw.device(NBYTES)
    view = raw.emulator.memory(block, NBYTES)
    view[:] = pattern
    assert raw("aclrtFree", block) == 0
    assert (view == pattern).all()
    view[:] = 1
    with pytest.raises(ValueError, match="not in one allocation"):
        raw.emulator.memory(block, 1)
