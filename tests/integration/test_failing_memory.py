"""Memory that fails while bytes are read from it or written to it, as a device's may: whoever called hears its status
and its reason from either side, nothing is consumed, and the next call works.
"""

from __future__ import annotations

import asyncio
import traceback
from contextlib import closing
from typing import Any

import pytest

from kvpull_async import CacheKey, LLMException, LLMStatusCode
from kvpull_async.memory.base import Batches, MemoryBackend, Until
from tests import duo
from tests.conformance.api import AWAITED
from tests.integration.own_loop import outcome, within
from tests.integration.pushing import PUSHER, Ends, Stock, desc, ends
from tests.integration.seeming import SeemingDevice
from tests.integration.verifying import keyed, pull
from tests.loop_nodes import eventually

BROKEN = LLMStatusCode.LLM_DEVICE_MEM_ERROR
REASON = "the device has lost its memory"
ways = pytest.mark.parametrize("way", ["inproc", "tcp", "mapped"])
sizes = pytest.mark.parametrize(("nbytes", "after"), [(96, 0), (5_000_000, 0), (5_000_000, 2)])
"""Bytes of a batch entry, and the pieces that are moved before the memory fails."""


class Failing(SeemingDevice):
    """While `armed` what is lent (`reading`), or is to land, fails after so many pieces."""

    def __init__(self, inner: MemoryBackend, *, reading: bool, after: int) -> None:
        super().__init__(inner)
        self.armed = True
        self._reading = reading
        self._after = after

    def pieces(self, inner: Batches, until: Until, *, reading: bool) -> Batches:
        return _failing(inner, self._after) if self.armed and reading is self._reading else inner


def _failing(pieces: Batches, after: int) -> Batches:
    with closing(pieces):
        for number, piece in enumerate(pieces):
            if number == after:
                raise LLMException(REASON, status_code=BROKEN)
            yield piece


def fails(node: Any, *, reading: bool, after: int) -> Failing:
    """The memory of caches that are registered there from now on."""
    registry = duo.engine_of(node).registry
    registry.backend = made = Failing(registry.backend, reading=reading, after=after)
    return made


async def ended(call: Any) -> BaseException | None:
    return await outcome(asyncio.ensure_future(call))


async def check_told(call: Any, operation: str) -> None:
    error = await ended(call)
    assert isinstance(error, LLMException), repr(error)
    assert error.status_code is BROKEN, error
    assert REASON in str(error)
    assert error.operation == operation
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert "_failing" not in frames, "whoever keeps the error keeps the memory"
    assert error.peer
    assert error.elapsed_ms is not None
    assert not error.destination_unsafe


@ways
@sizes
@pytest.mark.parametrize("where", ["the source", "the destination"])
async def test_p2_a_pull_says_what_has_failed_and_takes_nothing(way: str, where: str, nbytes: int, after: int) -> None:
    async with ends(AWAITED, way, enable_remote_cache_accessible=False) as e:
        reading = where == "the source"
        memory = fails(e.pusher if reading else e.receiver, reading=reading, after=after)
        key = CacheKey(PUSHER, 7)
        if reading:
            source = await e.source(desc(nbytes), by_address=True, cache_keys=[key])
        else:
            source = await keyed(e, desc(nbytes), key)
        to = await e.destination(desc(nbytes), by_address=True)
        for _ in range(2):
            await check_told(pull(e, key, to), "pull_cache")
        assert not e.pusher.counters.get("keys_consumed", 0)
        memory.armed = False
        await within(pull(e, key, to))
        assert (to.image[:, 0] == source.image[:, 0]).all()
        if not reading:  # else it is registered memory, which keeps its key
            await eventually(lambda: e.pusher.counters.get("keys_consumed", 0) == 1)


@ways
@sizes
@pytest.mark.parametrize("where", ["the source", "the destination"])
async def test_p2_a_push_says_what_has_failed(way: str, where: str, nbytes: int, after: int) -> None:
    async with ends(AWAITED, way) as e:
        reading = where == "the source"
        memory = fails(e.pusher if reading else e.receiver, reading=reading, after=after)
        source = await e.source(desc(nbytes), by_address=True)
        to = await e.destination(desc(nbytes), by_address=True)
        for _ in range(2):
            await check_told(push(e, to, source), "push_cache")
        memory.armed = False
        await within(push(e, to, source))
        assert (to.image[:, 0] == source.image[:, 0]).all()


async def push(e: Ends, to: Stock, source: Stock) -> None:
    await e.push(to, source)


async def test_p2_a_copy_says_what_has_failed() -> None:
    async with ends(AWAITED, "inproc") as e:
        memory = fails(e.pusher, reading=True, after=1)
        source, to = [await e.source(desc(5_000_000), by_address=True) for _ in range(2)]
        error = await ended(e.pusher.cache_manager.copy_cache(to.cache, source.cache))
        assert isinstance(error, LLMException)
        assert (error.status_code, error.operation) == (BROKEN, "copy_cache")
        memory.armed = False
        await e.pusher.cache_manager.copy_cache(to.cache, source.cache)
        assert (to.image[:, 0] == source.image[:, 0]).all()
