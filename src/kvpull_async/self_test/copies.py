"""The checks of copies, byte by byte, and of what can be done about one that takes too long.

It must not measure how fast they are, nor end anything but its own stream.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from kvpull_async._deadline import Deadline
from kvpull_async.memory._acl import MemcpyKind
from kvpull_async.memory.base import Until
from kvpull_async.memory.npu.codes import FEATURE_NOT_SUPPORT, STILL_RUNNING, meaning
from kvpull_async.memory.npu.device import Device
from kvpull_async.memory.npu.layout import ALIGNMENT
from kvpull_async.memory.npu.streams import Copies
from kvpull_async.self_test.lines import Absent, Steps, Wrong
from kvpull_async.self_test.raw import Raw

__all__ = ["check_copies", "check_ends", "compare"]

COPIES, ENDS = 4, 5
Bytes = NDArray[np.uint8]
_UP, _DOWN, _WITHIN = MemcpyKind.HOST_TO_DEVICE, MemcpyKind.DEVICE_TO_HOST, MemcpyKind.DEVICE_TO_DEVICE
_MIB = 1024 * 1024
_HALF = 2 * _MIB
_LARGE = 64 * _MIB


def check_copies(steps: Steps, raw: Raw, milliseconds: int) -> None:
    """Raises Stop where there is no memory to copy to."""
    checks = _Copies(raw, milliseconds)
    steps.run(COPIES, "memory", checks.prepare, needed=True)
    steps.run(COPIES, "pinned host memory to the device and back, asynchronous", checks.pinned)
    steps.run(COPIES, "within the device, asynchronous", checks.within)
    steps.run(COPIES, "pageable host memory to the device and back, synchronous", checks.pageable)
    steps.run(COPIES, "many pieces, as the library copies them", checks.pieces)
    steps.run(COPIES, "unaligned pieces, as the library copies them", checks.unaligned)


def check_ends(steps: Steps, raw: Raw, milliseconds: int) -> None:
    """Raises Stop where there is no memory to copy to."""
    checks = _Ends(raw, milliseconds)
    steps.run(ENDS, "memory", checks.prepare, needed=True)
    steps.run(ENDS, "waiting with a limit", checks.limit)
    steps.run(ENDS, "asking whether a stream is done", checks.query)
    steps.run(ENDS, "aborting a stream", checks.abort)


def compare(got: Bytes, expected: Bytes, where: str) -> None:
    """Wrong unless every byte is the same."""
    wrong = np.flatnonzero(got != expected)
    if wrong.size:
        at = int(wrong[0])
        raise Wrong(
            f"{where}: {wrong.size} of {expected.size} bytes are wrong, the first is byte {at}: "
            f"{int(got[at]):#04x} instead of {int(expected[at]):#04x}"
        )


def _bytes(nbytes: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def _size(nbytes: int) -> str:
    return f"{nbytes / _MIB:g} MiB, every byte is right"


class _Copies:
    def __init__(self, raw: Raw, milliseconds: int) -> None:
        self._raw = raw
        self._limit = milliseconds
        self._stream = self._here = self._there = self._address = 0
        self._pinned: Bytes = np.empty(0, np.uint8)

    def prepare(self) -> str:
        self._here, self._there = self._raw.malloc(2 * _HALF), self._raw.malloc(2 * _HALF)
        self._pinned = self._raw.malloc_host(2 * _HALF)
        self._address = int(self._pinned.ctypes.data)
        self._stream = self._raw.stream()
        crooked = [at for at in (self._here, self._there, self._address) if at % ALIGNMENT]
        if crooked:
            raise Wrong(f"addresses that {ALIGNMENT} does not divide: {', '.join(map(hex, crooked))}")
        return f"of the device and pinned, aligned to {ALIGNMENT} bytes"

    def pinned(self) -> str:
        self._pinned[:_HALF] = _bytes(_HALF, 1)
        self._pinned[_HALF:] = 0
        self._run(self._here, self._address, _UP)
        self._run(self._address + _HALF, self._here, _DOWN)
        compare(self._pinned[_HALF:], _bytes(_HALF, 1), "after the way there and back")
        return _size(_HALF)

    def within(self) -> str:
        self._pinned[:_HALF] = _bytes(_HALF, 2)
        self._pinned[_HALF:] = 0
        self._run(self._here, self._address, _UP)
        self._run(self._there, self._here, _WITHIN)
        self._run(self._address + _HALF, self._there, _DOWN)
        compare(self._pinned[_HALF:], _bytes(_HALF, 2), "after a copy within the device")
        return _size(_HALF)

    def pageable(self) -> str:
        source, back = _bytes(_HALF, 3), np.zeros(_HALF, np.uint8)
        self._raw.copy(self._there, int(source.ctypes.data), _HALF, _UP)
        self._raw.copy(int(back.ctypes.data), self._there, _HALF, _DOWN)
        compare(back, source, "after the way there and back")
        return _size(_HALF)

    def pieces(self) -> str:
        answers = _watch_batches(self._raw)
        places = np.random.default_rng(4).permutation(512).astype(np.int64) * (_HALF // 512)
        self._rows(places, np.full(512, _HALF // 512, np.int64), seed=4)
        if self._raw.acl.aclrtMemcpyBatchAsync is None:
            return f"512 pieces, {_size(_HALF)}; one by one, since the library has no aclrtMemcpyBatchAsync"
        told = ", ".join(f"{code} ({meaning(code).name})" if code else "0" for code in sorted(set(answers)))
        return f"512 pieces, {_size(_HALF)}; aclrtMemcpyBatchAsync answers {told}"

    def unaligned(self) -> str:
        lengths = np.array([1, 63, 65, 1000, 4099, 65537, 3], np.int64)
        places = np.cumsum([1, *(lengths[:-1] + 61).tolist()], dtype=np.int64)
        self._rows(places, lengths, seed=5)
        return f"{len(lengths)} pieces of {lengths.min()} to {lengths.max()} bytes; neighbours are untouched"

    def _rows(self, places: NDArray[np.int64], lengths: NDArray[np.int64], *, seed: int) -> None:
        """Pieces go from the same places of pinned memory to the device and back; what lies between must stay."""
        nothing, data = np.full(_HALF, 0x5A, np.uint8), _bytes(_HALF, seed)
        expected = nothing.copy()
        for at, nbytes in zip(places.tolist(), lengths.tolist(), strict=True):
            expected[at : at + nbytes] = data[at : at + nbytes]
        self._raw.fill(self._here, 0x5A, _HALF)
        self._pinned[:_HALF] = data
        self._as_the_library(Copies(self._here + places, self._address + places, lengths, _UP))
        self._run(self._address + _HALF, self._here, _DOWN)
        compare(self._pinned[_HALF:], expected, "on the device")
        self._pinned[:_HALF] = 0x5A
        self._as_the_library(Copies(self._address + places, self._here + places, lengths, _DOWN))
        compare(self._pinned[:_HALF], expected, "back on the host")

    def _as_the_library(self, copies: Copies) -> None:
        device, until = Device(self._raw.acl, self._raw.number), Until(Deadline.after_ms(self._limit))
        device.open()
        try:
            device.copiers.wait(device.copy(copies, until), until)
        finally:
            device.copiers.close(Deadline.after_ms(self._limit))

    def _run(self, destination: int, source: int, kind: MemcpyKind) -> None:
        self._raw.issue(destination, source, _HALF, kind=kind, stream=self._stream)
        self._raw.finish(self._stream, self._limit)


def _watch_batches(raw: Raw) -> list[int]:
    """What the batch call answers from now on."""
    answers: list[int] = []
    call = raw.acl.aclrtMemcpyBatchAsync

    def noted(*arguments: object) -> int:
        assert call is not None
        answers.append(call(*arguments))
        return answers[-1]

    if call is not None:
        raw.acl.aclrtMemcpyBatchAsync = noted
    return answers


class _Ends:
    def __init__(self, raw: Raw, milliseconds: int) -> None:
        self._raw = raw
        self._limit = milliseconds
        self._device = self._stream = self._address = 0
        self._pinned: Bytes = np.empty(0, np.uint8)

    def prepare(self) -> str:
        self._device = self._raw.malloc(_LARGE)
        self._pinned = self._raw.malloc_host(_LARGE)
        self._address = int(self._pinned.ctypes.data)
        self._pinned[:] = 0x33
        self._stream = self._raw.stream()
        return f"{_LARGE // _MIB} MiB of the device, and as much pinned"

    def limit(self) -> str:
        if self._raw.acl.aclrtSynchronizeStreamWithTimeout is None:
            raise Absent("the library has no aclrtSynchronizeStreamWithTimeout")
        self._issue()
        code = self._raw.synchronise(self._stream, 1)
        if code != 0 and code not in STILL_RUNNING:
            raise Wrong(f"after 1 ms of a copy of {_LARGE // _MIB} MiB it answers {code} ({meaning(code).name})")
        self._raw.finish(self._stream, self._limit)
        return (
            f"after 1 ms of a copy of {_LARGE // _MIB} MiB it answers {code} ({meaning(code).name if code else 'done'})"
        )

    def query(self) -> str:
        if self._raw.acl.aclrtStreamQuery is None:
            raise Absent("the library has no aclrtStreamQuery")
        self._issue()
        at_once = self._raw.complete(self._stream)
        self._raw.finish(self._stream, self._limit)
        if not self._raw.complete(self._stream):
            raise Wrong("not done, though the stream was waited for")
        return f"right after a copy was issued: {'done' if at_once else 'not done'}; after it was waited for: done"

    def abort(self) -> str:
        """What the library relies on: nothing is written any more after an abort that answers 0."""
        if self._raw.acl.aclrtStreamAbort is None:
            raise Absent("the library has no aclrtStreamAbort")
        for _ in range(4):
            self._issue()
        code = self._raw.abort(self._stream)
        if code == FEATURE_NOT_SUPPORT:
            self._raw.finish(self._stream, self._limit)
            raise Absent(f"the device answers {code} ({meaning(code).name})")
        if code != 0:
            raise Wrong(f"aclrtStreamAbort answers {code} ({meaning(code).name})")
        self._raw.destroy(self._stream)
        self._raw.fill(self._device, 0x77, _LARGE)
        time.sleep(0.1)
        self._stream = self._raw.stream()
        self._raw.issue(self._address, self._device, _LARGE, kind=_DOWN, stream=self._stream)
        self._raw.finish(self._stream, self._limit)
        late = int(np.count_nonzero(self._pinned != 0x77))
        if late:
            raise Wrong(f"{late} bytes were still written after aclrtStreamAbort had answered 0")
        return "answers 0, nothing is written afterwards, and a new stream works"

    def _issue(self) -> None:
        self._raw.issue(self._device, self._address, _LARGE, kind=_UP, stream=self._stream)
