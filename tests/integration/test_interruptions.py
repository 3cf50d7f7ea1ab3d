"""What is taken away under a running pull: its caches, its link, its engine. Each pull ends in time, with the code that
names the cause, and the next one is right.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kvpull_async import CacheDesc, CacheKey, CacheKeyByIdAndIndex, LLMException, LLMRole, LLMStatusCode
from kvpull_async.linkage import LinkState
from kvpull_async.protocol import frames
from kvpull_async.serve import Serving
from kvpull_async.testing.faults import GatedMemory
from tests import duo, npu
from tests.inject import gated_memories
from tests.integration.own_loop import loop_pair, outcome, within
from tests.loop_nodes import eventually

PATHS = ("tcp", "inproc", "shm")
SOON = 8.0
"""Seconds in which things end that are bounded by the default settings (settle_timeout is 1 s)."""


def begin(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


async def failed(task: asyncio.Task[Any], *codes: LLMStatusCode) -> LLMException:
    """The LLMException with which the task ends soon, its code being one of these."""
    began = time.monotonic()
    error = await outcome(task)
    assert time.monotonic() - began < SOON
    assert isinstance(error, LLMException), error
    assert error.status_code in codes, error
    assert error.operation
    assert error.elapsed_ms is not None
    return error


async def check_right(pair: duo.Duo, desc: Any, *, source: int = 3) -> None:
    """The next pull on the link, without linking again."""
    cache = await pair.destination(desc)
    key = CacheKey(duo.PROMPT, source)
    await within(pair.decoder.kv_cache_manager.pull_cache(key, cache, 0, src_cache_offset=0))
    assert duo.holds(cache, entry=0, source=source)


# --- the destination ---


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("in_time", [True, False], ids=["ends in time", "is cut"])
async def test_p1_a_destination_released_during_a_pull(
    monkeypatch: pytest.MonkeyPatch, path: str, in_time: bool
) -> None:
    """The release waits for the pull, bounded, and then cuts it; afterwards nothing is written."""
    memories = gated_memories(monkeypatch, after=1)
    async with duo.duo(transport=path, settle_timeout=20_000 if in_time else 100) as pair:
        decoder = pair.decoder.kv_cache_manager
        await pair.publish(duo.BIG)
        cache = await pair.destination(duo.BIG)
        arrays = duo.arrays(cache)
        lending = memories[0].lending_gate if path == "tcp" else memories[1].landing_gate
        lending.close()
        pull = begin(decoder.pull_cache(CacheKey(duo.PROMPT, 0), cache))
        await lending.reached()
        release = begin(decoder.deallocate_cache(cache))
        if in_time:
            await asyncio.wait([release], timeout=0.1)
            assert not release.done()
            lending.open()
            await within(pull)
        elif path == "tcp":
            await failed(pull, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
        else:
            await asyncio.wait([pull, release], timeout=SOON)
            lending.open()
            await failed(pull, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
            error = await outcome(release)
            if error is not None:  # the copy could not be stopped while it was held: the caller asks again
                assert isinstance(error, LLMException)
                assert error.destination_unsafe
                release = begin(decoder.deallocate_cache(cache))
        await within(release)
        for array in arrays:
            array[:] = 0xA5
        lending.open()
        if in_time:
            with pytest.raises(LLMException):
                await decoder.pull_cache(CacheKey(duo.PROMPT, 0), cache)
        await check_right(pair, duo.BIG)
        assert all(bool((array == 0xA5).all()) for array in arrays)


async def test_p1_a_pull_in_the_queue_whose_destination_is_released_never_begins() -> None:
    async with duo.duo() as pair:
        await pair.publish(duo.BIG)
        decoder, gated = pair.decoder.kv_cache_manager, pair.gate()
        running, waiting = await pair.destination(duo.BIG), await pair.destination(duo.BIG)
        gated.lending_gate.close()
        first = begin(decoder.pull_cache(CacheKey(duo.PROMPT, 0), running))
        await gated.lending_gate.reached()
        second = begin(decoder.pull_cache(CacheKey(duo.PROMPT, 1), waiting))
        await asyncio.sleep(0.02)
        await within(decoder.deallocate_cache(waiting))
        gated.lending_gate.open()
        await within(first)
        await failed(second, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
        await check_right(pair, duo.BIG, source=1)


# --- the source ---


@pytest.mark.parametrize(
    ("path", "desc"),
    [(path, desc) for path in PATHS for desc in (duo.SMALL, duo.BIG) if (path, desc) != ("shm", duo.BIG)],
    ids=lambda value: value if isinstance(value, str) else ("inline" if value is duo.SMALL else "streamed"),
)
@pytest.mark.parametrize("in_time", [True, False], ids=["ends in time", "is cut"])
async def test_p7_source_memory_taken_back_during_a_pull(
    monkeypatch: pytest.MonkeyPatch, path: str, desc: CacheDesc, in_time: bool
) -> None:
    """Registered memory, which its owner frees as soon as `unregister_cache` has returned."""
    memories = gated_memories(monkeypatch, after=0 if desc is duo.SMALL else 1)
    async with duo.duo(transport=path, settle_timeout=20_000 if in_time else 100) as pair:
        gate = memories[0].lending_gate
        memory = npu.room(desc.num_tensors, desc.size, fill=7)
        prompt, decoder = pair.prompt.cache_manager, pair.decoder.kv_cache_manager
        registered = await prompt.register_cache(desc, npu.addresses(memory))
        await pair.publish(desc)
        cache = await pair.destination(desc)
        gate.close(times=1)
        pull = begin(decoder.pull_cache(CacheKeyByIdAndIndex(duo.PROMPT, registered.cache_id), cache))
        await gate.reached()
        release = begin(prompt.unregister_cache(registered.cache_id))
        await asyncio.wait([release], timeout=0.3 if in_time else SOON)
        if in_time:
            assert not release.done(), "it returned while a thread was reading the memory"
            gate.open()
            await within(pull)
            assert all(bool((array[0] == 7).all()) for array in duo.arrays(cache))
        else:
            error = await failed(release, LLMStatusCode.LLM_TIMEOUT)  # held, it cannot be stopped
            assert error.destination_unsafe
            release = begin(prompt.unregister_cache(registered.cache_id))
            gate.open()
            await failed(pull, LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
        await within(release)
        memory[:] = 0
        await check_right(pair, desc)
        await failed(
            begin(decoder.pull_cache(CacheKeyByIdAndIndex(duo.PROMPT, registered.cache_id), cache)),
            LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        )


@pytest.mark.parametrize("path", PATHS)
async def test_p7_a_reader_that_is_cancelled_leaves_nothing_pinned(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    memories = gated_memories(monkeypatch, after=1)
    async with duo.duo(transport=path) as pair:
        source = await pair.publish(duo.BIG)
        cache = await pair.destination(duo.BIG)
        memories[1].landing_gate.close()
        pull = begin(pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 0), cache))
        await memories[1].landing_gate.reached()
        pull.cancel()
        memories[1].landing_gate.open()
        assert isinstance(await outcome(pull), asyncio.CancelledError)
        entry = duo.engine_of(pair.prompt).registry.find(source.cache_id)
        assert entry is not None
        await eventually(lambda: not entry.busy)


# --- a copy within one node ---


async def test_p10_a_copy_whose_cache_is_released_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    memories = gated_memories(monkeypatch, after=1)
    async with duo.node(LLMRole.DECODER, duo.DECODER, settle_timeout=100) as node:
        manager, gate = node.kv_cache_manager, memories[0].landing_gate
        src, dst = [await manager.allocate_cache(duo.BIG) for _ in range(2)]
        gate.close()
        copy = begin(manager.copy_cache(dst, src))
        await gate.reached()
        await failed(begin(manager.deallocate_cache(src)), LLMStatusCode.LLM_TIMEOUT)
        await failed(copy, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
        await failed(begin(manager.deallocate_cache(src)), LLMStatusCode.LLM_TIMEOUT)  # it is being read all the same
        assert dst.quarantined
        gate.open()
        await within(manager.deallocate_cache(src))
        assert not dst.quarantined


# --- the link ---


async def queued(pair: duo.Duo, gated: GatedMemory, *, waiting: int = 3) -> list[asyncio.Task[None]]:
    """One pull that is held in its middle at the source, and others that wait for it."""
    decoder = pair.decoder.kv_cache_manager
    await pair.publish(duo.BIG)
    caches = [await pair.destination(duo.BIG) for _ in range(1 + waiting)]
    gated.lending_gate.close()
    tasks = [begin(decoder.pull_cache(CacheKey(duo.PROMPT, 0), caches[0], src_cache_offset=0))]
    await gated.lending_gate.reached()
    tasks += [begin(decoder.pull_cache(CacheKey(duo.PROMPT, 1), cache, src_cache_offset=0)) for cache in caches[1:]]
    await asyncio.sleep(0.02)
    return tasks


@pytest.mark.parametrize("force", [False, True], ids=["gently", "by force"])
async def test_p10_unlink_during_pulls(force: bool) -> None:
    """The running pull may end (gently: as long as the unlink has time), those that wait end at once."""
    async with duo.duo(settle_timeout=200) as pair:
        gated = pair.gate()
        running, *waiting = await queued(pair, gated)
        info = duo.cluster(duo.PROMPT, pair.prompt.listen_address)
        unlink = begin(pair.decoder.unlink_clusters([info], 15_000, force=force))
        for task in waiting:
            await failed(task, LLMStatusCode.LLM_NOT_YET_LINK)
        if force:
            await failed(running, LLMStatusCode.LLM_NOT_YET_LINK)
            gated.lending_gate.open()
        else:
            assert not running.done()
            gated.lending_gate.open()
            await within(running)
        assert (await within(unlink))[0] is LLMStatusCode.LLM_SUCCESS
        await failed(
            begin(pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 2), await pair.destination(duo.BIG))),
            LLMStatusCode.LLM_NOT_YET_LINK,
        )
        await pair.link()
        await check_right(pair, duo.BIG)


@pytest.mark.parametrize("path", PATHS)
async def test_p10_the_answer_to_a_goodbye_counts_although_the_peer_hangs_up_the_other_connection_first(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Nothing orders what happens on one connection of a link before what happens on the other."""
    receive, pairs = Serving.receive, []

    def hang_up_first(serving: Serving, message: Any, tail: bytes) -> None:
        if isinstance(message, frames.Bye):
            theirs = pairs[0].source.engine.links.find(duo.DECODER)
            theirs.state = LinkState.CLOSED
            theirs._lanes[1].abort("hanging up")
            asyncio.get_running_loop().call_later(0.05, receive, serving, message, tail)
        else:
            receive(serving, message, tail)

    monkeypatch.setattr(Serving, "receive", hang_up_first)
    async with loop_pair(duo.SMALL, transport=path) as pair:
        pairs.append(pair)
        info = duo.cluster(duo.PROMPT, pair.source.engine.listen_address)
        unlink = pair.puller.dist.unlink_clusters([info], 10_000, False)
        assert await within(unlink.start()) == (duo.OK, [duo.OK])


async def test_p10_a_peer_that_unlinks_ends_the_pulls() -> None:
    async with duo.duo(settle_timeout=200) as pair:
        gated = pair.gate()
        tasks = await queued(pair, gated)
        info = duo.cluster(duo.DECODER, pair.prompt.listen_address)
        assert (await within(pair.prompt.unlink_clusters([info], 15_000)))[0] is LLMStatusCode.LLM_SUCCESS
        for task in tasks:
            await failed(task, LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_LINK_FAILED)
        gated.lending_gate.open()
        await pair.link()
        await check_right(pair, duo.BIG)


# --- the engine ---


async def test_p8_finalize_during_pulls_ends_them_all_in_time() -> None:
    async with duo.duo() as pair:
        gated = pair.gate()
        tasks = await queued(pair, gated, waiting=20)
        began = time.monotonic()
        await within(pair.decoder.finalize())
        assert time.monotonic() - began < SOON
        for task in tasks:
            await failed(task, LLMStatusCode.LLM_ENGINE_FINALIZED)
        gated.lending_gate.open()


async def test_p8_finalize_of_the_peer_during_pulls_ends_them_all_in_time() -> None:
    async with duo.duo(settle_timeout=200) as pair:
        gated = pair.gate()
        tasks = await queued(pair, gated, waiting=20)
        finalize = begin(pair.prompt.finalize())
        for task in tasks:
            error = await outcome(task)
            assert isinstance(error, LLMException), error
            assert error.status_code in (LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_NOT_YET_LINK), error
        gated.lending_gate.open()
        await within(finalize)


async def test_p8_calls_after_finalize_say_so() -> None:
    async with duo.duo() as pair:
        manager, cache = pair.decoder.kv_cache_manager, await pair.destination()
        await pair.decoder.finalize()
        for call in (
            lambda: manager.pull_cache(CacheKey(duo.PROMPT, 0), cache),
            lambda: manager.allocate_cache(duo.SMALL),
            lambda: manager.deallocate_cache(cache),
        ):
            with pytest.raises(LLMException) as raised:
                await within(call())
            assert raised.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
