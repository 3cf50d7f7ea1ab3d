"""What the source has yet to acknowledge: that grants have landed here. It must not know links or send by itself."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from kvpull_async._workers import resolve
from kvpull_async.linkage import first
from kvpull_async.protocol import frames
from kvpull_async.status import LLMException

__all__ = ["Receipts"]

_MOST: Final = 4096  # more than these the source does not remember either


class Receipts:
    """In the order in which they were written. They are told again on every new connection."""

    def __init__(self) -> None:
        self._open: OrderedDict[bytes, frames.Done] = OrderedDict()
        self._waiters: set[asyncio.Future[None]] = set()

    def __iter__(self) -> Iterator[frames.Done]:
        return iter(tuple(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    def add(self, done: frames.Done) -> None:
        self._open[done.grant_id] = done
        if len(self._open) > _MOST:
            self._open.popitem(last=False)

    def acknowledged(self, grant_id: bytes) -> None:
        self._open.pop(grant_id, None)
        if not self._open:
            for waiter in self._waiters:
                resolve(waiter)

    def clear(self) -> None:
        """What was promised is void: the source is another process now."""
        self._open.clear()

    async def settled(self, lost: asyncio.Future[LLMException], *, timeout: float) -> bool:
        """Wait until every one is acknowledged, the connection is `lost`, or the timeout (s) is over."""
        if not self._open:
            return True
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await first(waiter, lost, timeout=timeout)
            return waiter.done()
        finally:
            self._waiters.discard(waiter)

    def __repr__(self) -> str:
        return f"<Receipts {len(self)}>"
