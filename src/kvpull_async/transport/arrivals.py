"""What has arrived on a control channel, until it is handed on: to whoever waits in `receive`, or by a callback.

Every channel keeps one. It must not know where the bytes come from. Used by one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

__all__ = ["Arrivals", "Arrived", "Ended"]

Arrived = Callable[["bytes | memoryview"], None]
Ended = Callable[["OSError | None"], None]


def _nothing(n: int) -> None:
    """What handing on tells a channel that does not count."""


class Arrivals:
    """`taken` hears how many bytes have been handed on. Nothing is kept as long as a callback takes what comes."""

    def __init__(self, taken: Callable[[int], object] = _nothing) -> None:
        self.unread: int = 0
        """Bytes that wait here."""
        self.paused: bool = False
        self._taken = taken
        self._waiting: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._arrived: Arrived | None = None
        self._on_end: Ended | None = None
        self._over = False
        self._error: OSError | None = None

    def put(self, data: bytes | memoryview) -> None:
        """Some bytes, valid during this call only."""
        if self._over:
            return
        if self._arrived is not None and not self.paused and not self._waiting:
            self._arrived(data)
            self._taken(len(data))
            return
        self._waiting.append(bytes(data))
        self.unread += len(data)
        self._wake()

    def end(self, error: OSError | None = None) -> None:
        """Nothing more will come: the peer's end of stream, or the connection broke. Only the first one counts."""
        if not self._over:
            self._over, self._error = True, error
            self._wake()
            self._hand_on()

    async def receive(self) -> bytes:
        """Some bytes, or b"" after the end of the stream. OSError when the connection is broken."""
        while not self._waiting and not self._over:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._waiting:
            return self._take()
        if self._error is not None:
            raise self._error
        return b""

    def deliver(self, arrived: Arrived, ended: Ended) -> None:
        """From now on by these callbacks, beginning in the next turn of the loop with what is here."""
        self._arrived, self._on_end = arrived, ended
        if self._waiting or self._over:
            asyncio.get_running_loop().call_soon(self._hand_on)

    def pause(self) -> None:
        """Call back no more until `resume`."""
        self.paused = True

    def resume(self) -> None:
        """Hand on what has waited. Not to be called from within a callback."""
        self.paused = False
        self._hand_on()

    def _take(self) -> bytes:
        data = self._waiting.popleft()
        self.unread -= len(data)
        self._taken(len(data))
        return data

    def _hand_on(self) -> None:
        if self._arrived is None:
            return
        while self._waiting and not self.paused:
            self._arrived(self._take())
        if self._over and not self._waiting and not self.paused and self._on_end is not None:
            ended, self._on_end = self._on_end, None
            ended(self._error)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def __repr__(self) -> str:
        return f"<Arrivals unread={self.unread}{' paused' if self.paused else ''}{' over' if self._over else ''}>"
