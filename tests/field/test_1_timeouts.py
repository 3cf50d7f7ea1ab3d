"""Field reports of theme 1: timeouts and hangs. Every wait ends, in time, with an error that says what to do next."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from kvpull_async import CacheKey, LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.testing.proxy import Fault, FaultKind, Way
from kvpull_async.transport.shm.path import ShmPath
from kvpull_async.transport.shm.remote import Mapped
from tests import duo
from tests.conformance.api import Api
from tests.inject import gated_copies, gated_memories
from tests.integration.own_loop import outcome
from tests.integration.rig import (
    MISSING,
    PATHS,
    SOON,
    STEADY,
    begin,
    each_face,
    each_path,
    faces_in_turn,
    nodes,
)
from tests.loop_nodes import event_log, eventually

NATIVE = "the native engine says no"


# --- 1.1 ---


@each_face
@each_path
def test_1_1_a_pull_of_a_key_whose_time_is_over_says_so_and_never_brings_stale_bytes(api: Api, path: str) -> None:
    """The source has used the memory for something else meanwhile."""

    async def body() -> None:
        async with nodes(api, path) as two:
            manager = two.prompt.kv_cache_manager
            source, cache = await api.do(manager.allocate_cache, duo.BIG), await two.destination(duo.BIG)
            two.kept.append(source)
            duo.fill(source)
            await api.do(manager.publish_cache, source, duo.keys(duo.BIG), lease=100)
            await api.until(lambda: two.prompt.counters.get("keys_expired", 0) == duo.BIG.entries)
            for array in duo.arrays(source):
                array[:] = 0xEE
            error = await two.fails(cache, 1)
            assert error.status_code is MISSING
            assert "expired" in str(error) or "lease" in str(error), error
            assert error.retry_safe
            assert not error.destination_unsafe
            assert duo.untouched(cache)

    api.run(body())


@each_path
async def test_1_1_a_pull_that_began_in_time_ends_whole_though_the_time_is_over(path: str) -> None:
    patch = pytest.MonkeyPatch()
    memories, copies = gated_memories(patch, after=1), gated_copies(patch)
    try:
        async with duo.duo(transport=path) as pair:
            manager = pair.prompt.kv_cache_manager
            source, cache = await manager.allocate_cache(duo.BIG), await pair.destination(duo.BIG)
            pair.kept.append(source)
            duo.fill(source)
            gate = {"tcp": memories[0].lending_gate, "inproc": memories[1].landing_gate, "shm": copies}[path]
            gate.close()
            await manager.publish_cache(source, duo.keys(duo.BIG), lease=200)
            pull = begin(pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 1), cache))
            if path != "shm":
                await gate.reached()
            await eventually(lambda: pair.prompt.counters.get("keys_expired", 0) >= duo.BIG.entries - 1)
            gate.open()
            error = await outcome(pull)
            assert error is None, error
            assert duo.holds(cache, entry=0, source=1)
            late = await outcome(begin(pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 2), cache)))
            assert isinstance(late, LLMException)
            assert late.status_code is MISSING
    finally:
        patch.undo()


# --- 1.2 ---


def breaks_at_submit(work: Any, *_: Any, **options: Any) -> Any:
    raise RuntimeError(NATIVE)


def breaks_in_the_middle(work: Any, *args: Any, **options: Any) -> Any:
    with contextlib.closing(work(*args, **options)) as batches:
        yield from itertools.islice(batches, 1)
        raise RuntimeError(NATIVE)


def breaks_at_completion(work: Any, *args: Any, **options: Any) -> Any:
    yield from work(*args, **options)
    raise RuntimeError(NATIVE)


LANDINGS: dict[str, Callable[..., Any]] = {
    "submit": breaks_at_submit,
    "poll": breaks_in_the_middle,
    "completion": breaks_at_completion,
}


@contextlib.contextmanager
def broken(node: Any, path: str, where: str) -> Iterator[None]:
    """Meanwhile what moves bytes into that node's memory raises there, in the thread that moves them."""
    with pytest.MonkeyPatch.context() as patch:
        if path == "shm" and where == "submit":
            patch.setattr(ShmPath, "fetch", breaks_at_submit)
        elif path == "shm":  # it copies out of the other process's memory by itself
            patch.setattr(Mapped, "copy", broken_copy(where))
        else:
            memory = duo.engine_of(node).registry.backend
            patch.setattr(memory, "landing", partial(LANDINGS[where], memory.landing))
        yield


def broken_copy(where: str) -> Callable[..., int]:
    inner = Mapped.copy

    def copy(*args: Any) -> int:
        if where == "completion":
            inner(*args)
        raise RuntimeError(NATIVE)

    return copy


@faces_in_turn(path=PATHS, where=LANDINGS)
def test_1_2_an_exception_below_ends_the_pull_at_once_with_its_cause(api: Api, path: str, where: str) -> None:
    async def body() -> None:
        async with nodes(api, path) as two:
            await two.publish(duo.BIG)
            cache = await two.destination(duo.BIG)
            with broken(two.decoder, path, where):
                error = await two.fails(cache)
            assert NATIVE in str(error)
            assert NATIVE in str(cause(error))
            assert not error.destination_unsafe
            await two.check_right(duo.BIG, key=0)

    api.run(body())


def cause(error: BaseException) -> BaseException:
    """The exception at the beginning of the chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


# --- 1.6 ---


@faces_in_turn(
    gone=[("control",), ("payload",), ("control", "payload")], how=[FaultKind.CLOSE, FaultKind.CUT, FaultKind.SWALLOW]
)
def test_1_6_the_first_pull_after_an_idle_gap_finds_the_connections_gone(
    api: Api, gone: tuple[str, ...], how: FaultKind
) -> None:
    """Closed by the peer, by what lies between, or dropped without a word: the pull is only a little later."""

    async def body() -> None:
        with event_log() as log:
            async with nodes(api, through=True, **STEADY) as two:
                await two.publish(duo.BIG)
                await two.check_right(duo.BIG)
                for kind in gone:
                    two.proxy.inflict(*(Fault(how, way) for way in Way), kind=kind)
                if "control" in gone:
                    await two.counted("links_lost")
                    await two.counted("reconnects")
                if how is not FaultKind.SWALLOW or "control" in gone:
                    await two.check_right(duo.BIG)
                else:  # nothing tells that what the source sends is lost: that costs one pull its deadline
                    error = await two.fails(await two.destination(duo.BIG), timeout=300)
                    assert error.retry_safe is not error.destination_unsafe  # unsafe on a machine that is too busy
                    await two.check_right(duo.BIG)
                told = [event["event"] for event in log.warnings if event["local_cluster_id"] == duo.DECODER]
                assert told == ["link.lost"] * ("control" in gone) + ["pull.failed"] * (
                    how is FaultKind.SWALLOW and "control" not in gone
                )

    api.run(body())


# --- 1.7 ---


@each_face
@each_path
def test_1_7_a_key_that_nobody_allocated_is_an_error_in_one_round_trip(api: Api, path: str) -> None:
    async def body() -> None:
        async with nodes(api, path) as two:
            await two.publish(first=100)
            cache = await two.destination()
            error = await two.fails(cache, 7)
            assert error.status_code is MISSING
            assert "req_id 7 of model 0 is not here: never published" in str(error)
            assert "req_id 100 of model 0" in str(error), "the keys nearest to it"
            assert duo.untouched(cache)
            assert two.decoder.counters.get("pulls_timed_out", 0) == 0
            await two.check_right(key=100)

    api.run(body())


# --- 1.8 ---


@faces_in_turn(path=PATHS)
def test_1_8_a_link_without_traffic_stays_as_it_is(api: Api, path: str) -> None:
    """A hundred heartbeats long, which is longer than anything that watches a link waits."""

    async def body() -> None:
        with event_log() as log:
            async with nodes(api, path, heartbeat_interval=20, heartbeat_timeout=1000) as two:
                await two.publish()
                await two.check_right()
                ends = [two.prompt, two.decoder]
                await api.until(lambda: not any("kvpull-call" in duo.engine_of(end).core.pending() for end in ends))
                tasks = [duo.engine_of(end).core.pending() for end in ends]
                give_up = time.monotonic() + 2.0
                await api.until(lambda: time.monotonic() > give_up)
                assert [duo.engine_of(end).core.pending() for end in ends] == tasks
                assert log.warnings == []
                await two.check_right(key=1)
                assert [end.counters["links_up"] for end in ends] == [1, 1]

    api.run(body())


# --- 1.9 ---


@each_face
@pytest.mark.parametrize("path", ["tcp", "inproc"])
def test_1_9_a_transfer_that_stands_still_says_with_whom_how_long_and_what_next(api: Api, path: str) -> None:
    async def body() -> None:
        with pytest.MonkeyPatch.context() as patch:
            memories = gated_memories(patch, after=1)
            async with nodes(api, path, settle_timeout=300) as two:
                await two.publish(duo.BIG)
                cache = await two.destination(duo.BIG)
                gate = memories[0].lending_gate if path == "tcp" else memories[1].landing_gate
                gate.close()
                error = await two.fails(cache, timeout=250)
                assert isinstance(error, LLMTimeoutError)
                assert isinstance(error, TimeoutError)
                assert error.status_code is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
                assert "250 ms" in str(error), "the limit"
                assert "while bytes came from" in str(error)
                assert error.elapsed_ms is not None
                assert 249 <= error.elapsed_ms < 1000 * SOON
                assert error.retry_safe is not error.destination_unsafe
                gate.open()
                await api.do(two.decoder.kv_cache_manager.settled, cache, duo.TIMEOUT_MS)
                await two.check_right(duo.BIG)

    api.run(body())
