"""How late an event loop is: a timer on a fixed schedule that notes by how much it was missed.

It must not know what keeps the loop busy.
"""

from __future__ import annotations

import asyncio
from typing import Final

__all__ = ["LagMeter"]

INTERVAL: Final = 0.002


class LagMeter:
    """Started and stopped from any thread.

    The schedule does not wait for a loop that is late: a stall of 20 ms counts as ten ticks that were late by 20, 18,
    16 ... ms, as callbacks spread over that time would have been. An idle loop is about 1 ms late, because it sleeps
    in whole milliseconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lags: list[float] = []
        self._due = 0.0
        self._running = True
        loop.call_soon_threadsafe(self._begin)

    def stop(self) -> list[float]:
        """The seconds by which each tick was late."""
        self._running = False
        return self._lags

    def _begin(self) -> None:
        self._due = self._loop.time()
        self._next()

    def _next(self) -> None:
        self._due += INTERVAL
        self._loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        if self._running:
            self._lags.append(self._loop.time() - self._due)
            self._next()
