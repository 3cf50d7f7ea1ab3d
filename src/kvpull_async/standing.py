"""What a peer lets this side read without asking each time, and what was read so, to be reported to it in batches.

It must not know how memory is read. `find` and `note` may be called from any thread, the rest from the core's loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from kvpull_async.protocol import frames
from kvpull_async.transport.base import Standing

__all__ = ["Offered", "Standings"]

_INTERVAL: Final = 1.0
"""Seconds between two reports."""
_IDS_AT_ONCE: Final = 64


@dataclass
class _Reads:
    """Those of one cache since the last report. Only pulls that crossed to the core have ids, so they are not many."""

    pulls: int = 0
    nbytes: int = 0
    pull_ids: list[str] = field(default_factory=list)

    def messages(self, cache_id: int) -> Iterator[frames.Read]:
        yield frames.Read(cache_id, self.pulls, self.nbytes, self.pull_ids[:_IDS_AT_ONCE])
        for first in range(_IDS_AT_ONCE, len(self.pull_ids), _IDS_AT_ONCE):
            yield frames.Read(cache_id, 0, 0, self.pull_ids[first : first + _IDS_AT_ONCE])


@dataclass(frozen=True)
class Offered:
    """A cache of the peer: its layout, as its own side has checked it, and the memory behind the ticket of a grant."""

    ticket: bytes
    entry_nbytes: int
    memory: Standing


class Standings:
    """Those of one connection of a link, by the peer's cache id."""

    def __init__(self, report: Callable[[frames.Read], None]) -> None:
        self._report = report
        self._timer: asyncio.TimerHandle | None = None
        self._offered: dict[int, Offered] = {}
        self._lock = threading.RLock()  # protects _unreported; a signal handler may pull in the middle of it
        self._unreported: dict[int, _Reads] = {}

    def find(self, cache_id: int) -> Offered | None:
        """None when the peer has to be asked."""
        offered = self._offered.get(cache_id)
        return offered if offered is not None and offered.memory.valid else None

    def remember(self, cache_id: int, offered: Offered) -> None:
        """The peer lets this side read a cache without asking; from now on it gets reports of that."""
        self._offered[cache_id] = offered
        if self._timer is None:
            self._tick()

    def note(self, cache_id: int, nbytes: int, pull_id: str = "") -> None:
        """Something was read. The source hears of it soon, with the pull's id if one is given."""
        with self._lock:
            reads = self._unreported.setdefault(cache_id, _Reads())
            reads.pulls += 1
            reads.nbytes += nbytes
            if pull_id:
                reads.pull_ids.append(pull_id)

    def report(self) -> None:
        """Tell the source what it has not heard of yet."""
        for read in self._take():
            self._report(read)

    def clear(self) -> int:
        """The connection has ended; how many reads the source will never hear of."""
        self._offered.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return sum(read.pulls for read in self._take())

    def _tick(self) -> None:
        self.report()
        self._offered = {number: one for number, one in tuple(self._offered.items()) if one.memory.valid}
        again = asyncio.get_running_loop().call_later(_INTERVAL, self._tick) if self._offered else None
        self._timer = again

    def _take(self) -> list[frames.Read]:
        """A message per cache, more for many ids."""
        with self._lock:
            unreported, self._unreported = self._unreported, {}
        return [read for cache_id, reads in unreported.items() for read in reads.messages(cache_id)]

    def __repr__(self) -> str:
        return f"<Standings caches={len(self._offered)} unreported={len(self._unreported)}>"
