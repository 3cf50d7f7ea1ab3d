"""P4: connections that are cut or silent, or whose two sides have different settings. The link comes back by itself,
and the next pull is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

from kvpull_async import CacheKey, LLMException, LLMRole, LLMStatusCode, LLMTimeoutError
from tests import duo
from tests.inject import faulty_transports, gated_memories
from tests.integration.own_loop import outcome, within
from tests.loop_nodes import eventually

PATHS = ("tcp", "inproc", "shm")
SIZES = {"inline": duo.SMALL, "streamed": duo.BIG}
KINDS = [(path, size) for path in PATHS for size in SIZES]


def begin(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


async def check_right(pair: duo.Duo, desc: Any, *, source: int = 3) -> None:
    """The next pull on the link, without linking again."""
    cache = await pair.destination(desc)
    key = CacheKey(duo.PROMPT, source)
    await within(pair.decoder.kv_cache_manager.pull_cache(key, cache, 0, src_cache_offset=0))
    assert duo.holds(cache, entry=0, source=source)


@pytest.mark.parametrize(("path", "size"), KINDS)
@pytest.mark.parametrize("side", ["source", "puller"])
async def test_p2_p4_cut_at_each_frame_in_turn(
    monkeypatch: pytest.MonkeyPatch, path: str, size: str, side: str
) -> None:
    """The k-th frame that one side sends is lost with its connection. A pull that raised left the key, one that
    returned took it once its DONE is heard, and the link comes back by itself.
    """
    faults = faulty_transports(monkeypatch, path)
    async with duo.duo(transport=path) as pair:
        decoder, desc = pair.decoder.kv_cache_manager, SIZES[size]
        cut, link = faults[0 if side == "source" else 1], duo.engine_of(pair.decoder).links.find(duo.PROMPT)
        assert link is not None
        cache, number, outcomes = await pair.destination(desc), 0, []
        reached = True
        while reached:
            number += 1
            await pair.publish(desc, first=100 * number)
            key = CacheKey(duo.PROMPT, 100 * number)
            cut.cut_at(number)
            error = await outcome(begin(decoder.pull_cache(key, cache)))
            await eventually(lambda: not cut.frames_left or not link._unacknowledged)
            reached = not cut.frames_left
            cut.cut_at(0)
            await eventually(lambda: pair.decoder.counters.get("links_lost", 0) == number - (not reached))  # noqa: B023
            if error is not None:
                assert isinstance(error, LLMException), error
                assert error.status_code is LLMStatusCode.LLM_LINK_FAILED
                assert error.retry_safe
            await within(decoder.pull_cache(CacheKey(duo.PROMPT, 100 * number + 1), cache, 1))
            assert duo.holds(cache, entry=1, source=1)
            outcomes.append(error is None)
            again = await outcome(begin(decoder.pull_cache(key, cache)))
            if error is None:
                assert isinstance(again, LLMException), "a key was pulled twice"
                assert again.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
            else:
                assert again is None, "a pull that failed consumed the key"
                assert duo.holds(cache, entry=0, source=0)
        assert outcomes.count(False) >= 1
        assert outcomes[-1]


@pytest.mark.parametrize(
    ("path", "where"),
    [(path, where) for path in PATHS for where in ("landing", "lending") if (path, where) != ("shm", "lending")],
)
@pytest.mark.parametrize("aware", [True, False], ids=["both sides know", "only the puller knows"])
async def test_p10_a_connection_lost_in_the_middle_of_a_copy_is_a_link_failure(
    monkeypatch: pytest.MonkeyPatch, path: str, where: str, aware: bool
) -> None:
    memories, faults = gated_memories(monkeypatch, after=1), faulty_transports(monkeypatch, path)
    async with duo.duo(transport=path, settle_timeout=20_000) as pair:
        await pair.publish(duo.BIG)
        cache = await pair.destination(duo.BIG)
        gate = memories[1].landing_gate if where == "landing" else memories[0].lending_gate
        gate.close()
        key = CacheKey(duo.PROMPT, 0)
        pull = begin(pair.decoder.kv_cache_manager.pull_cache(key, cache, src_cache_offset=0))
        await gate.reached()
        with contextlib.nullcontext() if aware else duo.frozen(pair.prompt):
            faults[0 if aware else 1].cut()
            await eventually(lambda: bool(pair.decoder.counters.get("links_lost")))
            gate.open()
            error = await outcome(pull)
        if error is None:  # all of it had arrived before the loss
            assert path == "tcp"
            assert duo.holds(cache, entry=0, source=0)
        else:
            assert isinstance(error, LLMException)
            assert error.status_code is LLMStatusCode.LLM_LINK_FAILED
            assert error.retry_safe
        assert not cache.quarantined
        for array in duo.arrays(cache):
            array[:] = 0
        await check_right(pair, duo.BIG, source=0)
        assert duo.untouched(cache)


@pytest.mark.parametrize(("path", "size"), KINDS)
async def test_p3_p4_a_silent_peer_costs_a_pull_its_deadline_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, path: str, size: str
) -> None:
    faults = faulty_transports(monkeypatch, path)
    async with duo.duo(transport=path) as pair:
        decoder, desc = pair.decoder.kv_cache_manager, SIZES[size]
        await pair.publish(desc)
        cache = await pair.destination(desc)
        faults[0].stall()
        for _ in range(3):
            began = time.monotonic()
            error = await outcome(begin(decoder.pull_cache(CacheKey(duo.PROMPT, 0), cache, timeout=100)))
            assert isinstance(error, LLMTimeoutError), error
            assert error.status_code is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
            assert time.monotonic() - began < 3
        faults[0].resume()
        await check_right(pair, desc, source=0)
        assert duo.untouched(cache), "late answers must be recognised and dropped"
        assert pair.decoder.counters["links_up"] == 1


@pytest.mark.parametrize("path", PATHS)
async def test_p4_a_peer_that_was_silent_for_too_long_is_dialled_again(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    faults = faulty_transports(monkeypatch, path)
    quick = {"heartbeat_interval": 20, "heartbeat_timeout": 200, "handshake_timeout": 200}
    async with duo.duo(transport=path, **quick) as pair:
        await pair.publish(duo.BIG)
        faults[0].stall()
        await eventually(lambda: bool(pair.decoder.counters.get("links_lost")))
        pull = begin(check_right(pair, duo.BIG))
        await asyncio.sleep(0.05)
        faults[0].resume()
        await asyncio.wait([pull])
        if pull.exception() is not None:  # the attempt under way when the peer came back may have been lost with it
            await check_right(pair, duo.BIG)
        assert pair.decoder.counters["reconnects"] >= 1


async def test_p4_heartbeats_of_two_sides_with_different_settings_keep_the_link() -> None:
    """A side that expects to hear something every 300 ms is not given up by a peer that would ask every 10 s only."""
    async with (
        duo.node(LLMRole.PROMPT, duo.PROMPT, listen=True, heartbeat_interval=50, heartbeat_timeout=300) as prompt,
        duo.node(LLMRole.DECODER, duo.DECODER, heartbeat_interval=10_000, heartbeat_timeout=30_000) as decoder,
    ):
        pair = duo.Duo(prompt, decoder)
        await pair.link()
        await asyncio.sleep(1.0)
        assert prompt.counters["links_up"] == 1
        assert not prompt.counters.get("links_lost")


async def test_p4_the_two_sides_may_differ_in_what_they_send_inline() -> None:
    for source, puller in ((0, 65536), (65536, 0), (1024, 16384), (16384, 1024)):
        async with (
            duo.node(LLMRole.PROMPT, duo.PROMPT, listen=True, inline_limit=source) as prompt,
            duo.node(LLMRole.DECODER, duo.DECODER, inline_limit=puller) as decoder,
        ):
            pair = duo.Duo(prompt, decoder)
            await pair.link()
            await pair.publish(duo.SMALL)
            await check_right(pair, duo.SMALL)
