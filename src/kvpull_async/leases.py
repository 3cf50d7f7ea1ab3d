"""Keys that end by themselves: which, when, and one timer for all of them. It must not know tables or peers.

Used by the core's loop only. Ends are gathered in steps of a 128th of the lease or less, so that a hundred thousand
keys cost a few hundred steps and no timer each. Who looks a key up compares its `ends` by itself, to the millisecond.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import time
from collections.abc import Callable
from typing import Final

from kvpull_async.held import Binding

__all__ = ["Leases"]

_SLICE: Final = 0.001
"""Seconds of the loop that ends may take before others have their turns."""
_FINEST: Final = 8
"""ms between two steps, for short leases."""
_FRACTION_BITS: Final = 7


class Leases:
    """`ended` is called with each key whose time is over, `told` with those of one turn of the loop."""

    def __init__(
        self,
        ended: Callable[[Binding], object],
        told: Callable[[list[Binding]], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ended = ended
        self._told = told
        self._clock = clock
        self._steps: list[int] = []
        """A heap of the steps, in ms by the clock, that have a place in `_due`."""
        self._due: dict[int, set[Binding]] = {}
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timed = 0

    def set(self, binding: Binding, seconds: float) -> None:
        """The key ends so many seconds from now, whatever end it had."""
        now = self._clock()
        binding.ends = now + seconds
        step = _step(now, seconds)
        if binding.step is not None:
            if binding.step <= step:  # it is looked at in time, and put off then
                return
            self._take_out(binding)
        self._put(binding, step)
        self._arm()

    def drop(self, binding: Binding) -> None:
        """The key is gone, or has no end any more."""
        binding.ends = None
        if binding.step is not None:
            self._take_out(binding)
            if not self._count:
                self.clear()

    def over(self, binding: Binding) -> bool:
        """Whether its time has come, even if it has not been ended yet."""
        return binding.ends is not None and binding.ends <= self._clock()

    def clear(self) -> None:
        """No key has an end any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._steps.clear()
        self._due.clear()
        self._count = 0

    def _put(self, binding: Binding, step: int) -> None:
        place = self._due.get(step)
        if place is None:
            place = self._due[step] = set()
            heapq.heappush(self._steps, step)
        place.add(binding)
        binding.step = step
        self._count += 1

    def _take_out(self, binding: Binding) -> None:
        """An empty place stays until its time, so that the heap has every step once."""
        assert binding.step is not None
        self._due[binding.step].discard(binding)
        binding.step = None
        self._count -= 1

    def _arm(self) -> None:
        if not self._steps or (self._timer is not None and self._timed <= self._steps[0]):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timed = self._steps[0]
        wait = max(0.0, self._timed / 1000 - self._clock())
        self._timer = asyncio.get_running_loop().call_later(wait, self._sweep, context=contextvars.Context())

    def _sweep(self) -> None:
        self._timer = None
        began, gone = self._clock(), []
        while (binding := self._next(began)) is not None:
            if self.over(binding):
                gone.append(binding)
                self._ended(binding)
            elif binding.ends is not None:  # it was put off
                self._put(binding, _step(began, binding.ends - began))
            if self._clock() - began > _SLICE:
                break
        if gone:
            self._told(gone)
        self._arm()

    def _next(self, now: float) -> Binding | None:
        """Taken out of its place."""
        while self._steps and self._steps[0] <= now * 1000:
            place = self._due[self._steps[0]]
            if place:
                binding = place.pop()
                binding.step = None
                self._count -= 1
                return binding
            del self._due[heapq.heappop(self._steps)]
        return None

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<Leases {len(self)} in {len(self._steps)} steps>"


def _step(now: float, seconds: float) -> int:
    """The first step, ms, at or after so many seconds from now."""
    wide = int(seconds * 1000) >> _FRACTION_BITS
    width = max(_FINEST, 1 << wide.bit_length() - 1 if wide else 0)
    return -(-int((now + seconds) * 1000 + 1) // width) * width
