"""One call of a chaos run: made, cut short by chance, timed, and its destination watched after it has ended.

It must not know what is called, nor which bytes are right.
"""

from __future__ import annotations

import asyncio
import faulthandler
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from bad_days import layout
from bad_days.content import CANARY, Bytes, intact, refill, rows
from bad_days.process import Voice
from kvpull_async import LLMException, LLMTimeoutError

__all__ = ["AT_ONCE", "HANG", "Call", "Place", "Runner", "place"]

HANG: Final = 5.0
"""Seconds after its deadline at which a call hangs."""
AT_ONCE: Final = 256 * 1024
"""Bytes that are compared before other tasks have their turn."""
_GRACE: Final = 2.0
"""Seconds more, for a process that was stopped and has only just gone on."""
_SETTLED_MS: Final = 20_000
_CANCEL_AFTER: Final = (0.0, 0.0005, 0.002, 0.005, 0.01, 0.05)
_SABOTAGED: Final = 20


@dataclass
class Call:
    """What is known of one call. Times are those of `time.monotonic`."""

    kind: str
    source: int
    timeout: float
    """ms."""
    fate: str
    text: str
    """All that it was called with, to look for it again."""
    explained: bool = False
    """Whether it may fail although nothing is wrong: its key is being taken away, or may be used up."""
    began: float = 0.0
    ended: float = 0.0
    cancelled: float = 0.0
    error: BaseException | None = None

    @property
    def deadline(self) -> float:
        return self.began + self.timeout / 1000

    @property
    def unsafe(self) -> bool:
        """Of a push: whether something may still be written at its receiver. A cancelled one cannot say so."""
        return isinstance(self.error, asyncio.CancelledError) or getattr(self.error, "destination_unsafe", False)

    def status(self) -> str:
        if self.error is None:
            return "ok"
        if isinstance(self.error, LLMException):
            return getattr(self.error.status_code, "name", str(self.error.status_code))
        return "cancelled" if isinstance(self.error, asyncio.CancelledError) else type(self.error).__name__


@dataclass(eq=False)
class Place:
    """A destination, or the memory that is pushed from. Between calls all of it is the canary."""

    manager: Any
    cache: Any
    memory: list[Bytes]
    registered: bool
    blocks: bool
    last: Call | None = None
    """The call that had it last, and ended by raising."""

    def refill(self) -> None:
        for array in self.memory:
            refill(array)

    async def intact(self) -> bool:
        """In pieces, so that the loop on which calls end is not held long."""
        for array in self.memory:
            for row in array if array.nbytes > AT_ONCE else (array,):
                if not intact(row):
                    return False
            if array.nbytes >= AT_ONCE:
                await asyncio.sleep(0)
        return True

    def where(self) -> str:
        """The first bytes that are not the canary any more."""
        for tensor, array in enumerate(self.memory):
            wrong = np.argwhere(array != CANARY)
            if wrong.size:
                row, byte = (int(index) for index in wrong[0])
                what = array[row, byte : byte + 32].tobytes().hex(" ", 8)
                return f"{len(wrong)} bytes of tensor {tensor}, the first in row {row} at {byte}: {what}"
        return "none (any more)"

    async def close(self) -> None:
        if self.registered:
            await self.manager.unregister_cache(self.cache.cache_id)
        elif self.blocks:
            await self.manager.deallocate_blocks_cache(self.cache)
        else:
            await self.manager.deallocate_cache(self.cache)


async def place(manager: Any, *, number: int, nbytes: int, blocks: bool = False, registered: bool = False) -> Place:
    """`number` rows of `nbytes` in each tensor."""
    desc = layout.desc(number, nbytes)
    if registered:
        memory = [np.empty((number, nbytes), np.uint8) for _ in range(layout.TENSORS)]
        register = manager.register_blocks_cache if blocks else manager.register_cache
        addresses = [int(array.ctypes.data) for array in memory]
        cache = await register(desc, addresses, remote_accessible=True)
    else:
        cache = await (manager.allocate_blocks_cache if blocks else manager.allocate_cache)(desc)
        memory = rows(manager, cache)
    made = Place(manager, cache, memory, registered, blocks)
    made.refill()
    return made


@dataclass
class Runner:
    """Makes the calls of one decode process, and keeps what became of them until it is told."""

    who: str
    voice: Voice
    sabotage: str
    stacks: Callable[[], str]
    random: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    late: list[tuple[str, float, float, float]] = field(default_factory=list)
    """Calls that ended after their deadline: kind, began, ended, ms late."""
    cancels: list[tuple[float, float, float]] = field(default_factory=list)
    """Calls that were cancelled: began, ended, ms from the cancellation to the end."""
    failures: list[dict[str, Any]] = field(default_factory=list)

    def call(self, kind: str, source: int, text: str, *, cancel: bool = True, explained: bool = False) -> Call:
        """With a deadline and a fate by chance."""
        fate = self.random.choices(("", "tiny deadline", "cancelled"), (82, 9, 9 if cancel else 0))[0]
        timeout = self.random.uniform(400.0, 2500.0)
        if fate == "tiny deadline":
            timeout = 10 ** self.random.uniform(-0.5, 1.3)
        return Call(kind, source, timeout, fate, f"{self.who} prefill {source} {kind} {text}", explained)

    async def run(self, call: Call, start: Callable[[], Awaitable[Any]], used: Place, *, pushes: bool = False) -> bool:
        """True when the call returned. `pushes`: what it uses is its source, spoilt as soon as the call has ended."""
        if used.last is not None and not await used.intact():
            self.changed(used)
        used.last = None
        task = asyncio.ensure_future(self._timed(call, start, used, pushes))
        if call.fate == "cancelled":
            await asyncio.wait([task], timeout=self.random.choice(_CANCEL_AFTER))
            call.cancelled = time.monotonic()
            task.cancel()
        left = call.timeout / 1000 + HANG
        await asyncio.wait([task], timeout=left)
        if not task.done():
            await asyncio.wait([task], timeout=_GRACE)
        if not task.done():
            self._hangs(call, task)
            return False
        if task.cancelled():
            call.error = asyncio.CancelledError()
            call.began = call.began or call.cancelled
            call.ended = call.ended or time.monotonic()
        self._note(call)
        if call.error is not None and not pushes:
            used.last = call
            await self._watch(call, used)
        return call.error is None

    async def _timed(self, call: Call, start: Callable[[], Awaitable[Any]], used: Place, pushes: bool) -> None:
        call.began = time.monotonic()
        try:
            await start()
        except asyncio.CancelledError as error:
            call.error = error
        except Exception as error:  # noqa: BLE001  (judged by `_note`)
            call.error = error
        call.ended = time.monotonic()
        if pushes or (call.error is not None and not used.cache.quarantined):
            used.refill()

    async def _watch(self, call: Call, used: Place) -> None:
        """P1: what raised writes no more, or has quarantined its destination, which is waited for."""
        if used.cache.quarantined:
            self.counts["quarantined"] += 1
            try:
                await used.manager.settled(used.cache, _SETTLED_MS)
            except LLMTimeoutError:
                self.voice.violation("hang", f"quarantined for more than {_SETTLED_MS} ms: {call.text}")
                return
            used.refill()
        if self.sabotage in ("late", "all") and self.random.randrange(_SABOTAGED) == 0:
            asyncio.get_running_loop().call_later(0.002, used.memory[0][0].__setitem__, 8, 0)
        if self.random.random() < 0.7:
            await asyncio.sleep(self.random.choice((0.0, 0.001, 0.005, 0.02)))
            if not await used.intact():
                self.changed(used)

    def changed(self, used: Place) -> None:
        assert used.last is not None
        call, passed = used.last, time.monotonic() - used.last.ended
        text = f"{call.text}: {call.status()} ({call.error}); {passed * 1000:.1f} ms later: {used.where()}"
        self.voice.violation("settled", text)
        used.refill()
        used.last = None

    def _note(self, call: Call) -> None:
        status = call.status()
        self.counts[f"{call.kind}: {status}"] += 1
        self.counts[f"status: {status}"] += 1
        late = (call.ended - call.deadline) * 1000
        if late > 0:
            self.late.append((call.kind, call.began, call.ended, late))
        if call.fate == "cancelled" and call.cancelled and call.error is not None:
            self.cancels.append((call.began, call.ended, (call.ended - call.cancelled) * 1000))
        if call.error is None:
            return
        if not isinstance(call.error, (LLMException, asyncio.CancelledError)):
            self.voice.violation("not an LLMException", f"{call.text}: {call.error!r}")
        expected = {"tiny deadline": "LLM_TIMEOUT", "cancelled": "cancelled"}.get(call.fate)
        if not call.explained and status != expected:
            told = {"source": call.source, "status": status, "began": call.began, "ended": call.ended}
            self.failures.append({**told, "text": f"{call.text}: {call.error!r}"})

    def _hangs(self, call: Call, task: asyncio.Task[None]) -> None:
        sys.stderr.write(f"\nHANG of {self.who}: {call.text}\n")
        task.print_stack(file=sys.stderr)
        faulthandler.dump_traceback(all_threads=True)
        self.voice.violation("hang", f"{call.text}: {HANG + _GRACE} s after its deadline. {self.stacks()}")
