"""Frames on their way out of a channel, in the order in which they were handed over. It must not know what takes them.

Whoever may wait does so while the peer has yet to read earlier frames; nobody who comes later goes before them.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable

__all__ = ["Outbox"]


class Outbox:
    """Used by one event loop. `write` hands bytes to the connection, `full` says whether the peer must read first."""

    def __init__(self, write: Callable[[bytes], object], full: Callable[[], bool]) -> None:
        self._write = write
        self._full = full
        self._ended = False
        self._waiting: deque[asyncio.Future[None] | bytes] = deque()
        """Those who wait for their turn, and what was posted behind them."""

    @property
    def ready(self) -> bool:
        """Whether `send` would neither wait nor fail now."""
        return not (self._ended or self._waiting or self._full())

    async def send(self, data: bytes) -> None:
        """See `ControlChannel.send`. ConnectionResetError once it has ended."""
        if not self._ended and (self._waiting or self._full()):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except BaseException:  # it may have been its turn already
                self._waiting.remove(turn)
                self.flow()
                raise
            self._waiting.remove(turn)
        if self._ended:
            self.flow()
            raise ConnectionResetError(errno.ECONNRESET, "the connection is over")
        self._write(data)
        self.flow()

    def post(self, data: bytes) -> None:
        """See `ControlChannel.post`."""
        if self._ended:
            return
        if self._waiting:
            self._waiting.append(data)
        else:
            self._write(data)

    def flow(self) -> None:
        """The peer has read: whoever is first may go on."""
        while self._waiting:
            first = self._waiting[0]
            if isinstance(first, bytes):
                self._waiting.popleft()
                if not self._ended:
                    self._write(first)
                continue
            if (self._ended or not self._full()) and not first.done():
                first.set_result(None)
            return

    def end(self) -> None:
        """The connection is over: who waits hears of it."""
        self._ended = True
        self.flow()

    def __repr__(self) -> str:
        return f"<Outbox waiting={len(self._waiting)}{' ended' if self._ended else ''}>"
