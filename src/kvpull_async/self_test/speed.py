"""How fast one stream copies: pinned and pageable, up and down, in small and in large pieces.

A measurement, not a verdict: it fails only where copies fail. It must not check bytes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async.memory._acl import MemcpyKind
from kvpull_async.self_test.lines import Absent, Steps, Stop
from kvpull_async.self_test.raw import Raw

__all__ = ["check_speed"]

SPEED: Final = 6
_MIB = 1024 * 1024
_PIECES = (_MIB, 64 * _MIB)
_RUNS = 7
_ENOUGH: Final = 2.0
"""Seconds after which no further run begins."""
_WAYS = {MemcpyKind.HOST_TO_DEVICE: "to the device", MemcpyKind.DEVICE_TO_HOST: "from the device"}


def check_speed(steps: Steps, raw: Raw, *, nbytes: int, milliseconds: int) -> None:
    """`nbytes` go each time, in pieces. Then everything that `raw` has goes back, unless something may still use it."""
    speed = _Speed(raw, nbytes, milliseconds)
    with suppress(Stop):  # without memory there is nothing to measure, and that has been said
        steps.run(SPEED, "memory", speed.prepare, needed=True)
        for piece in sorted({min(piece, nbytes) for piece in _PIECES}):
            for name, run in (("pinned", speed.pinned), ("pageable", speed.pageable)):
                for kind, way in _WAYS.items():
                    measured = speed.measuring(run, kind, piece)
                    steps.run(SPEED, f"{name}, {way}, {piece / _MIB:g} MiB pieces", measured)
    steps.run(SPEED, "giving everything back", lambda: speed.give_back(safe=not steps.failed))


class _Speed:
    def __init__(self, raw: Raw, nbytes: int, milliseconds: int) -> None:
        self._raw = raw
        self._nbytes = nbytes
        self._limit = milliseconds
        self._device = self._stream = 0
        self._pinned: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._pageable: NDArray[np.uint8] = np.empty(0, np.uint8)

    def prepare(self) -> str:
        self._device = self._raw.malloc(self._nbytes)
        self._raw.fill(self._device, 1, self._nbytes)
        self._pinned = self._raw.malloc_host(self._nbytes)
        self._pinned[:] = 1
        self._pageable = np.ones(self._nbytes, np.uint8)
        self._stream = self._raw.stream()
        return f"{self._nbytes / _MIB:g} MiB each: of the device, pinned, pageable"

    def measuring(self, run: Callable[[MemcpyKind, int], None], kind: MemcpyKind, piece: int) -> Callable[[], str]:
        def measure() -> str:
            run(kind, piece)  # the first is slower
            rates: list[float] = []
            began = time.monotonic()
            while len(rates) < _RUNS and time.monotonic() - began < _ENOUGH:
                start = time.perf_counter()
                run(kind, piece)
                rates.append(self._nbytes / (time.perf_counter() - start) / 1e9)
            spread = f"median of {len(rates)}, {min(rates):.2f} to {max(rates):.2f}"
            return f"{statistics.median(rates):.2f} GB/s ({spread})"

        return measure

    def pinned(self, kind: MemcpyKind, piece: int) -> None:
        """All pieces are issued, then waited for: the call that waits comes once."""
        for into, out_of, nbytes in self._rows(self._pinned, kind, piece):
            self._raw.issue(into, out_of, nbytes, kind=kind, stream=self._stream)
        self._raw.finish(self._stream, self._limit)

    def pageable(self, kind: MemcpyKind, piece: int) -> None:
        for into, out_of, nbytes in self._rows(self._pageable, kind, piece):
            self._raw.copy(into, out_of, nbytes, kind)

    def give_back(self, *, safe: bool) -> str:
        if not safe:
            raise Absent("after a failure the device may still use it; the end of the process gives it back")
        self._pinned = np.empty(0, np.uint8)
        self._raw.close()
        return "streams and memory"

    def _rows(self, host: NDArray[np.uint8], kind: MemcpyKind, piece: int) -> list[tuple[int, int, int]]:
        up, base = kind is MemcpyKind.HOST_TO_DEVICE, int(host.ctypes.data)
        rows = []
        for at in range(0, self._nbytes, piece):
            here, there = base + at, self._device + at
            rows.append((there if up else here, here if up else there, min(piece, self._nbytes - at)))
        return rows
