"""What a peer lets this side read without asking each time, and what was read so, to be reported to it in batches.

It must not know how memory is read. `find` and `note` may be called from any thread, the rest from the core's loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvpull_async.protocol import frames
from kvpull_async.transport.base import Standing

__all__ = ["Offered", "Standings"]

_INTERVAL: Final = 1.0
"""Seconds between two reports."""
_UNREPORTED: Final = 65536
"""Reads kept for the next report; beyond, the oldest go unreported."""
_IDS_AT_ONCE: Final = 64


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
        self._reads: deque[tuple[int, int, str]] = deque(maxlen=_UNREPORTED)

    def find(self, cache_id: int) -> Offered | None:
        """None when the peer has to be asked."""
        offered = self._offered.get(cache_id)
        if offered is not None and not offered.memory.valid:
            self._offered.pop(cache_id, None)
            return None
        return offered

    def remember(self, cache_id: int, offered: Offered) -> None:
        """The peer lets this side read a cache without asking; from now on it gets reports of that."""
        self._offered[cache_id] = offered
        if self._timer is None:
            self._tick()

    def clear(self) -> None:
        """The connection has ended."""
        self._offered.clear()
        self._reads.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        for read in self.reports():
            self._report(read)
        self._offered = {number: one for number, one in self._offered.items() if one.memory.valid}  # else kept mapped
        if self._offered:
            self._timer = asyncio.get_running_loop().call_later(_INTERVAL, self._tick)

    def note(self, cache_id: int, nbytes: int, pull_id: str = "") -> None:
        """Something was read. The source hears of it soon, with the pull's id if one is given."""
        self._reads.append((cache_id, nbytes, pull_id))

    def reports(self) -> list[frames.Read]:
        """What the source has not heard of yet, a message per cache (more for many ids)."""
        found: dict[int, list[frames.Read]] = {}
        for _ in range(len(self._reads)):
            cache_id, nbytes, pull_id = self._reads.popleft()
            parts = found.setdefault(cache_id, [frames.Read(cache_id, 0, 0, [])])
            last = parts[-1]
            ids = [pull_id] if pull_id else []
            if len(last.pull_ids) + len(ids) > _IDS_AT_ONCE:
                parts.append(frames.Read(cache_id, 1, nbytes, ids))
            else:
                parts[-1] = frames.Read(cache_id, last.pulls + 1, last.nbytes + nbytes, last.pull_ids + ids)
        return [part for parts in found.values() for part in parts]

    def __repr__(self) -> str:
        return f"<Standings caches={len(self._offered)} unreported={len(self._reads)}>"
