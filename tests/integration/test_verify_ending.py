"""Verified pulls and pushes that are held while something is summed: what changes meanwhile is found, and whatever ends
them, they end in time and leave nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvpull_async import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.testing.faults import Gate, GatedMemory
from tests import duo
from tests.conformance.api import AWAITED
from tests.integration.own_loop import outcome
from tests.integration.proxied import OVER
from tests.integration.pushing import PUSHER, SIZES, Ends, Stock, desc, ends
from tests.integration.verifying import by_id, check_mismatch, pull
from tests.loop_nodes import eventually

ways = pytest.mark.parametrize("way", ["inproc", "tcp", "mapped", "read"])


def gated(node: Any, *, after: int = 0) -> GatedMemory:
    return duo.gate(node, after=after)


@contextlib.asynccontextmanager
async def held(way: str, **options: Any) -> AsyncIterator[tuple[Ends, Stock, Stock]]:
    """Whatever a test closes is opened in the end."""
    async with ends(AWAITED, way, **options) as e:
        shape = desc(SIZES["large"])
        try:
            yield e, await e.source(shape), await e.destination(shape)
        finally:
            for node in (e.pusher, e.receiver):
                backend = duo.engine_of(node).registry.backend
                if isinstance(backend, GatedMemory):
                    backend.lending_gate.open()
                    backend.landing_gate.open()


def begin(call: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(call)


def same(source: Stock, to: Stock) -> bool:
    return np.array_equal(to.image[:, 0], source.image[:, 0])


# --- memory that changes meanwhile ---


def held_copy(node: Any, way: str) -> Gate:
    """A gate at which the puller's copy stops: before the memory, or, where that is copied whole, before threads."""
    if way == "inproc":
        gate = gated(node).landing_gate
        gate.close()
    else:
        gate, workers = Gate(), duo.engine_of(node).workers
        gate.close()
        for _ in range(workers.limit):
            workers.submit(gate.pass_through)
    return gate


@pytest.mark.parametrize("way", ["mapped", "read"])
async def test_p2_a_shared_page_that_changes_between_the_copy_and_the_sum_is_found(way: str) -> None:
    async with held(way) as (e, source, to):
        gate = gated(e.pusher).lending_gate  # where the source sums; the copy is the puller's
        gate.close()
        running = begin(pull(e, by_id(source), to, verify="xxh3"))
        await gate.reached()
        await eventually(lambda: same(source, to))
        source.arrays[3][0, 100] ^= 1
        gate.open()
        check_mismatch(await outcome(running), "xxh3", e.receiver)
        await pull(e, by_id(source), to, verify="xxh3")
        assert same(source, to)


@pytest.mark.parametrize("way", ["inproc", "mapped", "read"])
async def test_p2_a_byte_that_changes_between_the_sum_and_the_copy_is_found(way: str) -> None:
    async with held(way) as (e, source, to):
        gate = held_copy(e.receiver, way)
        running = begin(pull(e, by_id(source), to, verify="crc32"))
        await gate.reached()
        await eventually(lambda: e.pusher.counters.get("serves") == 1, "the source's sum")
        source.arrays[3][0, SIZES["large"] - 1] ^= 1
        gate.open()
        check_mismatch(await outcome(running), "crc32", e.receiver)


# --- the puller's own sum ---


@ways
async def test_p1_p3_p4_the_deadline_passes_while_the_puller_sums(way: str) -> None:
    async with held(way) as (e, source, to):
        gate = gated(e.receiver).lending_gate
        gate.close()
        began = time.monotonic()
        error = await outcome(begin(pull(e, by_id(source), to, verify="xxh3", timeout=300)))
        assert time.monotonic() - began < 0.3 + OVER
        assert isinstance(error, LLMTimeoutError)
        assert "verified" in str(error)
        assert not error.destination_unsafe  # nothing writes, though something reads
        await check_memory_is_held(e, to, gate)
        other = await e.destination(desc(SIZES["large"]))
        await pull(e, by_id(source), other, verify="xxh3")
        assert same(source, other)


@ways
async def test_p1_p4_a_pull_is_cancelled_while_the_puller_sums(way: str) -> None:
    async with held(way) as (e, source, to):
        gate = gated(e.receiver).lending_gate
        gate.close()
        running = begin(pull(e, by_id(source), to, verify="crc32"))
        await gate.reached()
        running.cancel()
        assert isinstance(await outcome(running), asyncio.CancelledError)
        assert not to.cache.quarantined
        for array in to.arrays:
            array[:] = 0xC3
        gate.open()
        await eventually(lambda: not to.cache._binding.busy, "the end of the sum")
        assert all(bool((array == 0xC3).all()) for array in to.arrays)
        await pull(e, by_id(source), to, verify="crc32")
        assert same(source, to)


async def check_memory_is_held(e: Ends, stock: Stock, gate: Gate) -> None:
    """As long as a thread reads it the memory is not given back, and then it is."""
    manager: Any = e.receiver.cache_manager
    release = manager.unregister_cache if stock.cache.is_registered else manager.deallocate_cache
    releasing = begin(release(stock.cache.cache_id if stock.cache.is_registered else stock.cache))
    registry = duo.engine_of(e.receiver).registry
    await eventually(lambda: registry.local(stock.cache.cache_id) is None, "the release")
    await asyncio.sleep(0.05)  # nothing is waited for: it must not have ended
    assert not releasing.done()
    gate.open()
    assert await outcome(releasing) is None


# --- the source's sum ---


@pytest.mark.parametrize("way", ["inproc", "mapped", "read"])
async def test_p3_p4_the_deadline_passes_while_the_source_sums(way: str) -> None:
    async with held(way, lease_margin=0, settle_timeout=200) as (e, source, to):
        gate = gated(e.pusher, after=0).lending_gate
        gate.close()
        began = time.monotonic()
        error = await outcome(begin(pull(e, by_id(source), to, verify="xxh3", timeout=300)))
        assert time.monotonic() - began < 0.3 + OVER
        assert isinstance(error, LLMTimeoutError), error
        link = duo.engine_of(e.receiver).links.find(PUSHER)
        assert link is not None
        assert not link._lanes[link._own_lane]._answers._digests, "a sum that nobody waits for any more"
        gate.open()
        await e.api.do(e.receiver.cache_manager.settled, to.cache, 5000)
        await pull(e, by_id(source), to, verify="xxh3")
        assert same(source, to)
        await eventually(lambda: not source.cache._binding.busy, "the end of the source's sum")


@pytest.mark.parametrize("way", ["mapped", "read"])
async def test_p10_a_source_that_takes_its_cache_away_while_it_sums_says_so(way: str) -> None:
    async with held(way) as (e, source, to):
        gate = gated(e.pusher, after=1).lending_gate
        gate.close()
        running = begin(pull(e, by_id(source), to, verify="xxh3"))
        await gate.reached()
        await eventually(lambda: same(source, to))
        manager: Any = e.pusher.cache_manager
        registered = source.cache.is_registered
        release = manager.unregister_cache if registered else manager.deallocate_cache
        releasing = begin(release(source.cache.cache_id if registered else source.cache))
        error = await outcome(running)  # it does not wait for the thread that is held
        assert isinstance(error, LLMException)
        assert error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        assert error.retry_safe
        gate.open()
        assert await outcome(releasing) is None


@pytest.mark.parametrize("way", ["mapped", "read"])
async def test_p4_the_link_breaks_while_the_puller_waits_for_the_sum(way: str) -> None:
    async with held(way) as (e, source, to):
        gate = gated(e.pusher).lending_gate
        gate.close()
        running = begin(pull(e, by_id(source), to, verify="xxh3"))
        await gate.reached()
        links = duo.engine_of(e.receiver).links
        loop = duo.engine_of(e.receiver).core.loop
        link = links.find(PUSHER)
        assert link is not None
        loop.call_soon_threadsafe(lambda: link._lanes[link._own_lane].abort("cut by the test"))
        error = await outcome(running)
        assert isinstance(error, LLMException)
        assert error.status_code is LLMStatusCode.LLM_LINK_FAILED
        assert error.retry_safe
        gate.open()
        assert not to.cache.quarantined
        await pull(e, by_id(source), to, verify="xxh3")
        assert same(source, to)


# --- no threads ---


@pytest.mark.parametrize("call", ["pull", "push"])
@pytest.mark.parametrize("whose", ["pusher", "receiver"])
async def test_p10_who_finds_no_thread_to_sum_with_says_so_and_the_link_stays(
    call: str, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ends(AWAITED, "tcp", inline_limit=2**20) as e:
        shape = desc(100_000)  # all but receivers copy so much on the loop; nobody sums it there
        copies = (call, whose) == ("push", "receiver")
        source, to = await e.source(shape), await e.destination(shape)
        workers = duo.engine_of(getattr(e, whose)).workers
        submit, work = workers.submit, []

        def refuse(*call: Any) -> Any:
            work.append(call)
            if len(work) > copies:
                raise RuntimeError("can't start new thread")
            return submit(*call)

        async def verified() -> None:
            if call == "pull":
                await pull(e, by_id(source), to, verify="crc32")
            else:
                await e.push(to, source, verify="crc32")

        with monkeypatch.context() as patched:
            patched.setattr(workers, "submit", refuse)
            error = await outcome(begin(verified()))
        assert isinstance(error, LLMException), error
        assert error.retry_safe
        assert not error.destination_unsafe
        if (call, whose) == ("pull", "pusher"):  # the source has no words for it
            assert error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        else:
            assert error.status_code is LLMStatusCode.LLM_OUT_OF_MEMORY
            assert "no thread to sum with" in str(error)
        await verified()
        assert same(source, to)
        assert e.receiver.counters["links_up"] == 1
        await eventually(lambda: not source.cache._binding.busy and not to.cache._binding.busy)


# --- pushes ---


@ways
async def test_p1_p4_a_push_is_cancelled_while_the_receiver_sums(way: str) -> None:
    async with held(way) as (e, source, to):
        gate = gated(e.receiver).lending_gate
        gate.close()
        running = begin(e.push(to, source, verify="xxh3"))
        await gate.reached()
        running.cancel()
        assert isinstance(await outcome(running), asyncio.CancelledError)
        for array in to.arrays:
            array[:] = 0xC3
        gate.open()
        await eventually(lambda: not to.cache._binding.busy, "the end of the sum")
        assert all(bool((array == 0xC3).all()) for array in to.arrays)
        await e.push(to, source, verify="xxh3")
        assert same(source, to)


@pytest.mark.parametrize("way", ["mapped", "read"])
async def test_p3_p4_the_deadline_passes_while_the_pusher_sums(way: str) -> None:
    async with held(way) as (e, source, to):
        gate = gated(e.pusher).lending_gate
        gate.close()
        began = time.monotonic()
        error = await outcome(begin(e.push(to, source, verify="crc32", timeout=300)))
        assert time.monotonic() - began < 0.3 + OVER
        assert isinstance(error, LLMTimeoutError)
        assert not error.destination_unsafe
        assert same(source, to)  # only nobody knows
        assert source.cache._binding.busy  # read by the thread that is held
        gate.open()
        await eventually(lambda: not source.cache._binding.busy, "the end of the sum")
        await e.push(to, source, verify="crc32")
