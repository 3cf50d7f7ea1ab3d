"""Connections that have not finished their greeting, and which of them goes when there are too many. It must not know
what they are greeted with.
"""

from __future__ import annotations

import asyncio
from collections import Counter

__all__ = ["Greetings"]


class Greetings:
    """At most `most` of them. One more ends the oldest of the address that has most: whoever opens connections faster
    than an honest peer can greet pushes out its own.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._hosts: dict[asyncio.Task[None], str] = {}
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._hosts)

    def add(self, task: asyncio.Task[None], host: str) -> tuple[asyncio.Task[None], str] | None:
        """One more; the one that has to go for it, with its address. It is forgotten here and not yet cancelled."""
        evicted = self._oldest_of_most() if len(self._hosts) >= self._most else None
        if evicted is not None:
            self.discard(evicted[0])
        self._hosts[task] = host
        self._counts[host] += 1
        return evicted

    def discard(self, task: asyncio.Task[None]) -> None:
        """It is through, or over. May be told twice."""
        host = self._hosts.pop(task, None)
        if host is not None:
            self._counts[host] -= 1
            if not self._counts[host]:
                del self._counts[host]

    def all(self) -> tuple[asyncio.Task[None], ...]:
        """The oldest first."""
        return tuple(self._hosts)

    def _oldest_of_most(self) -> tuple[asyncio.Task[None], str]:
        most = max(self._counts.values())
        return next((task, host) for task, host in self._hosts.items() if self._counts[host] == most)

    def __repr__(self) -> str:
        return f"<Greetings {len(self._hosts)} of {self._most}, from {len(self._counts)} addresses>"
