"""A pull of layers that stops in its middle, until the test lets it go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvpull_async.testing.faults import Gate
from tests import duo
from tests.canaries import intact
from tests.inject import gated_memories
from tests.integration.own_loop import within
from tests.layered import LAYERED, key

SOME = 2
"""Layers that land before the gate of `held` stops the transfer."""


def begin(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


class Held:
    """Two linked nodes, a published cache, and a gate at which a pull of it stops when SOME layers have landed."""

    def __init__(self, pair: duo.Duo, gate: Gate) -> None:
        self.pair, self.gate = pair, gate
        self.manager = pair.decoder.kv_cache_manager

    async def check_next(self, canary: Any) -> None:
        """After a pull that was stopped: the next one is right, the key was kept, and nothing was written."""
        assert not canary.quarantined
        self.gate.open()
        cache = await self.pair.destination(LAYERED)
        await within(self.manager.pull_cache(key(), cache, 1))
        assert duo.holds(cache, entry=1, source=0)
        assert intact(canary)

    def open_soon(self) -> None:
        """What is held cannot stop; let it go while it is waited for."""
        asyncio.get_running_loop().call_later(0.05, self.gate.open)


@contextlib.asynccontextmanager
async def held(monkeypatch: pytest.MonkeyPatch, path: str, **properties: Any) -> AsyncIterator[Held]:
    memories = gated_memories(monkeypatch, after=2 * SOME)
    async with duo.duo(transport=path, settle_timeout=20_000, **properties) as pair:
        await pair.publish(LAYERED)
        memories[1].direct = True  # the pieces are the memory itself
        made = Held(pair, memories[0].lending_gate)
        made.gate.close()
        try:
            yield made
        finally:
            made.gate.open()


async def some(layers: Any) -> None:
    """Take the layers that land before the gate."""
    for layer in range(SOME):
        assert await within(layers.__anext__()) == layer
