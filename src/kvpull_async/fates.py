"""What became of keys that are here no more, for the message that says so. It must not decide anything.

Used by the core's loop only. It holds the last few thousand names, so it never grows.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kvpull_async.held import Entry, KeyId, may_know

__all__ = ["EXPIRED", "PULLED", "RELEASED", "UNMADE", "Fates"]

PULLED: Final = "pulled already"
EXPIRED: Final = "expired"
RELEASED: Final = "released"
UNMADE: Final = "released with its cache"

_LIMIT: Final = 4096


class Fates:
    """Of each name the last thing that became of it, by `clock`, in s."""

    def __init__(self, *, limit: int = _LIMIT, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._known: OrderedDict[tuple[KeyId, bool], tuple[str, float, frozenset[int] | None]] = OrderedDict()
        """By name, and whether the cache was open to some clusters only: what those hear is no news to the others."""
        self._forgot = False

    def note(self, name: KeyId, what: str, entry: Entry, *, since: float | None = None) -> None:
        """`since` is when it happened; now, unless it is given."""
        place = (name, entry.allowed is not None)
        self._known[place] = (what, self._clock() if since is None else since, entry.allowed)
        self._known.move_to_end(place)
        if len(self._known) > self._limit:
            self._known.popitem(last=False)
            self._forgot = True

    def of(self, name: KeyId, *, peer: int | None) -> str:
        """For a peer, or with None for this node itself. Who may not know of a cache hears nothing of its keys."""
        found = [self._known[place] for place in ((name, False), (name, True)) if place in self._known]
        known = [(since, what) for what, since, allowed in found if may_know(allowed, peer)]
        if known:
            since, what = max(known)
            return f"{what} {round((self._clock() - since) * 1000)} ms ago"
        return f"never published, or not among the last {self._limit} that went" if self._forgot else "never published"

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return f"<Fates {len(self)}>"
