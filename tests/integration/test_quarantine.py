"""P1 where a copy cannot be stopped: the call still ends in time, and the destination is quarantined until it is over.

The copies are held in the middle by a gate. The coroutines run on the test's own loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpull_async import CacheDesc, LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.held import leaked
from kvpull_async.testing.faults import Gate
from kvpull_async.values import Placement
from tests import duo, npu
from tests.inject import gated_memories
from tests.integration.own_loop import LoopPair, loop_pair, outcome, prefix_key, within

CANARY = 0xA5
SHORT = 60
"""ms: a deadline that is to pass."""
KINDS = [(path, size) for path in ("tcp", "inproc", "shm") for size in ("inline", "streamed")]
SIZES = {"inline": duo.SMALL, "streamed": duo.BIG}


@dataclass
class Held:
    """A pair whose puller's copies can be held by `gate` in their middle (inline: before their only piece)."""

    pair: LoopPair
    gate: Gate
    desc: CacheDesc

    async def allocate(self) -> Any:
        return await self.pair.puller.allocate(self.desc)

    def pull(self, cache: Any, entry: int = 0, *, source: int = 0, **options: Any) -> asyncio.Task[None]:
        """A pull, begun."""
        pull = self.pair.puller.pull(prefix_key(source), cache, entry, **options)
        return asyncio.get_running_loop().create_task(pull)

    async def held_pull(self, cache: Any, *, timeout: float = duo.TIMEOUT_MS) -> asyncio.Task[None]:
        """A pull whose copy is held; those of later pulls are not. On a slow machine with a later deadline."""
        while True:
            self.gate.close(times=1)
            task = self.pull(cache, timeout=timeout)
            reached = asyncio.ensure_future(self.gate.reached())
            await asyncio.wait([task, reached], return_when=asyncio.FIRST_COMPLETED)
            if reached.done():
                await reached
                return task
            reached.cancel()
            assert isinstance(await outcome(task), LLMTimeoutError)
            timeout *= 2

    async def check_right(self, cache: Any, *, source: int = 1) -> None:
        for array in duo.arrays(cache):
            array[:] = 0
        await within(self.pull(cache, 1, source=source))
        assert duo.holds(cache, entry=1, source=source)

    async def settled(self, cache: Any, timeout_ms: float | None = None) -> None:
        await within(self.pair.puller.manager.settled(cache, timeout_ms).start())

    async def quarantined(self, *, timeout_ms: int = SHORT) -> Any:
        """A cache that a pull left quarantined."""
        cache = await self.allocate()
        task = await self.held_pull(cache, timeout=timeout_ms)
        error = await outcome(task)
        assert isinstance(error, LLMTimeoutError), error
        assert error.destination_unsafe
        assert not error.retry_safe
        assert cache.quarantined
        return cache


@pytest.fixture
def held(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., contextlib.AbstractAsyncContextManager[Held]]:
    @contextlib.asynccontextmanager
    async def make(path: str, size: str, **properties: Any) -> AsyncIterator[Held]:
        memories = gated_memories(monkeypatch, after=0 if size == "inline" else 1)
        async with loop_pair(SIZES[size], transport=path, **properties) as pair:
            gate = memories[1].landing_gate
            try:
                yield Held(pair, gate, SIZES[size])
            finally:
                gate.open()

    return make


def set_canary(cache: Any) -> list[NDArray[np.uint8]]:
    arrays = duo.arrays(cache)
    for array in arrays:
        array[:] = CANARY
    return arrays


def intact(arrays: list[NDArray[np.uint8]]) -> bool:
    return all(bool((array == CANARY).all()) for array in arrays)


@pytest.mark.parametrize(("path", "size"), KINDS)
@pytest.mark.parametrize("times", [1, 25])
async def test_p1_a_cancelled_pull_ends_only_when_its_copy_has(held: Any, path: str, size: str, times: int) -> None:
    async with held(path, size, settle_timeout=10_000) as here:
        cache = await here.allocate()
        task = await here.held_pull(cache)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.001)
        assert not task.done(), "it returned while a thread was about to write to the destination"
        here.gate.open()
        assert isinstance(await outcome(task), asyncio.CancelledError)
        arrays = set_canary(cache)
        assert not cache.quarantined
        await here.check_right(await here.allocate())
        assert intact(arrays)


@pytest.mark.parametrize(("path", "size"), KINDS)
async def test_p3_a_copy_that_does_not_end_holds_nobody_and_quarantines(held: Any, path: str, size: str) -> None:
    async with held(path, size, settle_timeout=10_000) as here:
        cache = await here.allocate()
        began = time.monotonic()
        task = await here.held_pull(cache, timeout=SHORT)
        error = await outcome(task)
        assert time.monotonic() - began < 5, "the deadline was 60 ms, and settling is bounded by it"
        assert isinstance(error, LLMTimeoutError)
        assert error.status_code is LLMStatusCode.LLM_TIMEOUT
        assert error.destination_unsafe
        assert not error.retry_safe
        assert cache.quarantined
        here.gate.open()
        await here.settled(cache)
        assert not cache.quarantined
        arrays = set_canary(cache)
        await here.check_right(await here.allocate())
        assert intact(arrays)


@pytest.mark.parametrize(("path", "size"), KINDS)
async def test_p3_a_cancelled_pull_ends_within_the_settle_timeout(held: Any, path: str, size: str) -> None:
    async with held(path, size, settle_timeout=SHORT) as here:
        cache = await here.allocate()
        task = await here.held_pull(cache)
        task.cancel()
        assert isinstance(await outcome(task), asyncio.CancelledError)
        assert cache.quarantined, "an exception cannot say so: wait_for and others replace it"
        here.gate.open()
        await here.settled(cache)
        assert intact_after(set_canary(cache))


def intact_after(arrays: list[NDArray[np.uint8]], seconds: float = 0.05) -> bool:
    time.sleep(seconds)
    return intact(arrays)


@pytest.mark.parametrize(("path", "size"), KINDS)
async def test_p5_the_link_goes_on_while_a_destination_is_quarantined(held: Any, path: str, size: str) -> None:
    async with held(path, size) as here:
        cache, other = await here.quarantined(), await here.allocate()
        waiting = here.pull(cache, source=2)
        await asyncio.sleep(0)
        for source in range(4):
            await here.check_right(other, source=source)
        assert not waiting.done(), "a pull into a quarantined cache waits"
        assert cache.quarantined
        here.gate.open()
        await within(waiting)
        assert not cache.quarantined
        assert duo.holds(cache, entry=0, source=2)


@pytest.mark.parametrize(("path", "size"), KINDS)
async def test_p1_a_pull_into_a_quarantined_cache_writes_nothing_and_times_out(held: Any, path: str, size: str) -> None:
    async with held(path, size) as here:
        cache = await here.quarantined()
        error = await outcome(here.pull(cache, 3, timeout=SHORT))
        assert isinstance(error, LLMTimeoutError)
        assert "quarantined" in str(error)
        assert not any(array[3].any() for array in duo.arrays(cache))
        here.gate.open()
        await here.settled(cache)
        await here.check_right(cache)


async def test_p1_waiting_for_a_quarantined_cache_is_bounded_and_says_that_it_is_unsafe(held: Any) -> None:
    async with held("tcp", "streamed") as here:
        cache = await here.quarantined()
        with pytest.raises(LLMTimeoutError) as raised:
            await here.settled(cache, SHORT)
        assert raised.value.destination_unsafe
        here.gate.open()
        await here.settled(cache)
        await here.settled(cache)


async def test_p1_a_copy_into_a_quarantined_cache_is_refused(held: Any) -> None:
    async with held("tcp", "streamed", settle_timeout=SHORT) as here:
        cache, other = await here.quarantined(timeout_ms=1000), await here.allocate()
        set_canary(other)
        manager = here.pair.puller.manager
        with pytest.raises(LLMTimeoutError) as raised:
            await within(manager.copy_cache(cache, other, 3, 0, 0, -1, None).start())
        assert raised.value.destination_unsafe
        assert not any(array[3].any() for array in duo.arrays(cache))
        here.gate.open()
        await here.settled(cache)
        await within(manager.copy_cache(cache, other, 3, 0, 0, -1, None).start())
        assert all(bool((array[3] == CANARY).all()) for array in duo.arrays(cache))


@pytest.mark.parametrize("path", ["tcp", "inproc", "shm"])
async def test_p1_memory_is_not_given_back_before_its_quarantine_is_over(held: Any, path: str) -> None:
    async with held(path, "streamed", settle_timeout=SHORT) as here:
        cache = await here.quarantined(timeout_ms=1000)
        arrays, manager = duo.arrays(cache), here.pair.puller.manager
        memory = here.pair.puller.engine.memory
        before = npu.used(memory, Placement.DEVICE)
        for _ in range(2):
            with pytest.raises(LLMException) as raised:
                await within(manager.deallocate(cache, blocks=False).start())
            assert raised.value.status_code is LLMStatusCode.LLM_TIMEOUT
            assert raised.value.destination_unsafe
        assert cache.quarantined
        assert npu.used(memory, Placement.DEVICE) == before
        here.gate.open()
        await here.settled(cache)
        await within(manager.deallocate(cache, blocks=False).start())
        assert npu.used(memory, Placement.DEVICE) < before
        for array in arrays:
            array[:] = CANARY
        assert intact_after(arrays)


async def test_p1_memory_of_the_caller_is_not_released_before_its_quarantine_is_over(held: Any) -> None:
    async with held("tcp", "streamed", settle_timeout=SHORT) as here:
        desc = here.desc
        memory = npu.room(desc.num_tensors, desc.size)
        manager = here.pair.puller.manager
        addresses = npu.addresses(memory)
        cache = await within(manager.register_cache(desc, addresses, [], None).start())
        task = await here.held_pull(cache, timeout=1000)
        assert isinstance(await outcome(task), LLMTimeoutError)
        with pytest.raises(LLMException) as raised:
            await within(manager.unregister_cache(cache.cache_id).start())
        assert raised.value.destination_unsafe
        here.gate.open()
        await within(manager.unregister_cache(cache.cache_id).start())
        memory[:] = CANARY
        assert intact_after([memory])


@pytest.mark.allow_leak("acl-emulator-device")  # of an NPU that is all that is left: it is never given back
@pytest.mark.parametrize("path", ["tcp", "inproc", "shm"])
async def test_p8_finalize_leaves_memory_that_is_still_written_and_says_so(
    held: Any, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with held(path, "streamed", settle_timeout=SHORT, close_timeout=200) as here:
        cache = await here.quarantined(timeout_ms=1000)
        arrays = duo.arrays(cache)
        began = time.monotonic()
        await here.pair.puller.close()
        assert time.monotonic() - began < 10
        assert any("region.leaked" in record.getMessage() for record in caplog.records)
        here.gate.open()  # what is held writes its next piece now, into memory that is still mapped
        assert sum(int(array.any()) for array in arrays)
        leaked.clear()
