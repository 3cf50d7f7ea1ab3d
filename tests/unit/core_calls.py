"""Calls for the core's tests: coroutines that wait until they are let go and tell how they ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvpull_async.core import Call, CoreLoop

BOUND = 10.0


@contextmanager
def running_core(bugs: list[str]) -> Iterator[CoreLoop]:
    core = CoreLoop(name="test-core", on_bug=bugs.append)
    core.start()
    yield core
    assert core.stop(BOUND)


class Step:
    """A coroutine for the core that waits until it is let go, and tells how it ended."""

    def __init__(self, core: CoreLoop) -> None:
        self.began = threading.Event()
        self.cancelled = threading.Event()
        self.settle = threading.Event()
        """What a cancelled step waits for before it ends; set from the start."""
        self.settle.set()
        self._core = core
        self._go: asyncio.Event | None = None

    async def run(self) -> str:
        self._go = asyncio.Event()
        self.began.set()
        try:
            await self._go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            while not self.settle.is_set():  # noqa: ASYNC110  (set by another thread)
                await asyncio.sleep(0.001)
            raise
        return "done"

    def let_go(self) -> None:
        assert self.began.wait(BOUND)
        assert self._go is not None
        self._core.loop.call_soon_threadsafe(self._go.set)


def call(core: CoreLoop, make: Any, *, patience: float = BOUND) -> Call[Any]:
    return core.call(make, patience=patience)


async def value() -> str:
    return "value"
