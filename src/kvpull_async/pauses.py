"""The pauses between attempts to bring a link back. It must not know what is attempted."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import Final

from kvpull_async._deadline import Deadline

__all__ = ["Pauses"]

_SHORTEST: Final = 0.02
_LONGEST: Final = 2.0
"""Seconds."""


class Pauses:
    """None before the first attempt, then growing ones, up to `longest` seconds, or two, with jitter: peers that were
    lost together do not all come back in step.
    """

    def __init__(self, longest: float) -> None:
        self._longest = min(longest, _LONGEST)
        self._pause = 0.0
        self._began = 0.0
        self._hurry = asyncio.Event()

    def begin(self) -> None:
        """The next attempt is the first one."""
        self._pause = 0.0

    def hurry(self) -> None:
        """Somebody waits: cut this pause, or the next one, short."""
        self._hurry.set()

    async def next(self) -> None:
        """Until the next attempt, which begins 20 ms after the last one at the earliest."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with Deadline.after_ms(self._pause * 1000 * random.uniform(0.5, 1.0)).scope():  # noqa: S311  (jitter)
                await self._hurry.wait()
        self._hurry.clear()
        await asyncio.sleep(max(0.0, self._began + _SHORTEST - time.monotonic()))
        self._pause = min(self._longest, max(_SHORTEST, self._pause * 2))
        self._began = time.monotonic()

    def __repr__(self) -> str:
        return f"<Pauses next={self._pause:.2f} s>"
