"""Memory that keeps a call waiting, as a device may: no longer than its deadline, and than anybody wants the bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from kvpull_async import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.memory.base import Batches, MemoryBackend, Until
from tests import duo
from tests.conformance.api import AWAITED
from tests.integration.own_loop import outcome, within
from tests.integration.pushing import Ends, Stock, desc, ends
from tests.integration.seeming import SeemingDevice
from tests.integration.verifying import by_id, pull
from tests.loop_nodes import eventually

ways = pytest.mark.parametrize("way", ["inproc", "tcp", "mapped"])
sizes = pytest.mark.parametrize("nbytes", [96, 5_000_000])
sides = pytest.mark.parametrize("where", ["the source", "the destination"])
LIMIT = 10.0
"""Seconds after which this memory would end a wait by itself."""


class Stuck(SeemingDevice):
    """It answers only once it is `free_again`."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.free_again = False
        self.waiting = 0
        self.gave_up = False

    def pieces(self, inner: Batches, until: Until, *, reading: bool) -> Batches:
        with closing(inner):
            for piece in inner:
                self._wait(until)
                yield piece

    def _wait(self, until: Until) -> None:
        limit = time.monotonic() + LIMIT
        self.waiting += 1
        try:
            while not self.free_again:
                self.gave_up |= time.monotonic() > limit
                if until.over or self.gave_up:
                    kind = LLMTimeoutError if until.deadline.expired else LLMException
                    raise kind("the device did not answer", status_code=LLMStatusCode.LLM_TIMEOUT)
                time.sleep(0.002)
        finally:
            self.waiting -= 1


async def stuck(e: Ends, where: str, nbytes: int) -> tuple[Stuck, Stock, Stock]:
    """A source and a destination, one of which is in such memory."""
    registry = duo.engine_of(e.pusher if where == "the source" else e.receiver).registry
    registry.backend = made = Stuck(registry.backend)
    return made, await e.source(desc(nbytes), by_address=True), await e.destination(desc(nbytes), by_address=True)


def calls(e: Ends, to: Stock, source: Stock, **options: Any) -> dict[str, Callable[[], Any]]:
    return {
        "pull": lambda: pull(e, by_id(source), to, **options),
        "push": lambda: e.push(to, source, **options),
    }


def idle(e: Ends) -> bool:
    nodes = [duo.engine_of(node).registry for node in (e.pusher, e.receiver)]
    return not any(entry.busy for registry in nodes for entry in tuple(registry._entries.values()))


async def check_works(e: Ends, memory: Stuck, call: Callable[[], Any], to: Stock, source: Stock) -> None:
    await eventually(lambda: not memory.waiting and idle(e))
    assert not memory.gave_up, "nobody told it to end its wait"
    memory.free_again = True
    to.set_canary()
    await asyncio.sleep(0.05)
    assert to.untouched
    await within(call())
    assert (to.image[:, 0] == source.image[:, 0]).all()


@ways
@sizes
@sides
@pytest.mark.parametrize("operation", ["pull", "push"])
async def test_p1_the_deadline_ends_the_wait(way: str, where: str, nbytes: int, operation: str) -> None:
    async with ends(AWAITED, way) as e:
        memory, source, to = await stuck(e, where, nbytes)
        error = await outcome(asyncio.ensure_future(calls(e, to, source, timeout=300)[operation]()))
        assert isinstance(error, LLMTimeoutError), repr(error)
        assert not error.destination_unsafe
        await check_works(e, memory, calls(e, to, source)[operation], to, source)


@ways
@sizes
@sides
@pytest.mark.parametrize("operation", ["pull", "push"])
async def test_p1_a_cancellation_ends_the_wait(way: str, where: str, nbytes: int, operation: str) -> None:
    """At once on this side, and on the other one as soon as it hears of it."""
    async with ends(AWAITED, way) as e:
        memory, source, to = await stuck(e, where, nbytes)
        call = calls(e, to, source)[operation]
        task = asyncio.ensure_future(call())
        await eventually(lambda: bool(memory.waiting))
        task.cancel()
        assert isinstance(await outcome(task), asyncio.CancelledError)
        await check_works(e, memory, call, to, source)


@ways
@sizes
async def test_p1_a_source_that_is_released_ends_the_wait(way: str, nbytes: int) -> None:
    async with ends(AWAITED, way, settle_timeout=200) as e:
        memory, source, to = await stuck(e, "the source", nbytes)
        task = asyncio.ensure_future(pull(e, by_id(source), to))
        await eventually(lambda: bool(memory.waiting))
        await within(e.pusher.cache_manager.unregister_cache(source.cache.cache_id))
        assert (memory.waiting, memory.gave_up) == (0, False)
        error = await outcome(task)
        assert isinstance(error, LLMException), repr(error)
        assert not error.destination_unsafe


async def test_p1_a_copy_that_is_cancelled_ends_its_wait() -> None:
    async with ends(AWAITED, "inproc") as e:
        memory, source, _ = await stuck(e, "the source", 5_000_000)
        to = await e.source(desc(5_000_000), by_address=True)
        task = asyncio.ensure_future(e.pusher.cache_manager.copy_cache(to.cache, source.cache))
        await eventually(lambda: bool(memory.waiting))
        task.cancel()
        assert isinstance(await outcome(task), asyncio.CancelledError)
        await eventually(lambda: not memory.waiting and idle(e))
        assert not memory.gave_up
