"""What the tests of reports about speed measure with: counts, processor time of one thread, and ratios within a run.
Of several runs the best one counts: the machine may be slow, or busy with something else.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

from tests import duo

RUNS = 8


class Gaps:
    """What a loop's thread did at the longest while it ran nothing else, in seconds of its processor time, which do not
    grow when others have the processor; and how often it came round. Begun and ended from any thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.worst = 0.0
        self.turns = 0
        self._loop = loop
        self._running = True
        loop.call_soon_threadsafe(self._tick, None)

    def end(self) -> float:
        self._running = False
        return self.worst

    def _tick(self, last: float | None) -> None:
        now = time.thread_time()
        if last is not None:
            self.worst = max(self.worst, now - last)
        self.turns += 1
        if self._running:
            self._loop.call_later(0.001, self._tick, now)


@contextlib.asynccontextmanager
async def gaps(*nodes: Any) -> AsyncIterator[list[float]]:
    """Of this loop and of those nodes' cores; filled in at the end."""
    loops = [asyncio.get_running_loop(), *(duo.engine_of(node).core.loop for node in nodes)]
    found: list[float] = []
    meters = [Gaps(loop) for loop in loops]
    await asyncio.sleep(0.005)
    try:
        yield found
    finally:
        await asyncio.sleep(0.005)
        found += [meter.end() for meter in meters]


async def stalls(make: Callable[[], Coroutine[Any, Any, Any]], *nodes: Any, enough: float) -> float:
    """The longest stall of any of the loops while what is made runs, in seconds of processor time, in the best run.
    There are no more runs once it is below `enough`.
    """
    best = float("inf")
    for _ in range(RUNS):
        async with gaps(*nodes) as working:
            await make()
        best = min(best, max(working))
        if best < enough:
            break
    return best


async def turns(call: Coroutine[Any, Any, Any]) -> int:
    """How often this loop came round while the call was under way, at most once in a millisecond."""
    meter = Gaps(asyncio.get_running_loop())
    try:
        await call
    finally:
        meter.end()
    return meter.turns


def by_hand(count: int) -> float:
    """Seconds of processor time that plain Python takes for three numbers about each of so many blocks."""
    best = float("inf")
    for _ in range(5):
        began = time.thread_time()
        rows = [(number, 4096 * number, 2**40 + 4096 * number) for number in range(count)]
        rows = [(tensor, offset, address + offset) for tensor, offset, address in rows]
        best = min(best, time.thread_time() - began)
        del rows
    return best


@contextlib.contextmanager
def counting_steps() -> Iterator[list[int]]:
    """How many instructions of Python this thread has carried out."""
    counted = [0]

    def count(frame: Any, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            counted[0] += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield counted
    finally:
        sys.settrace(before)


def used() -> tuple[float, int]:
    """Seconds of processor time that this process has used, and how often one of its threads went to sleep."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, usage.ru_nvcsw
