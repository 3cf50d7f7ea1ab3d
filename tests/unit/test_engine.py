"""The engine from `init` to `finalize`: threads, bounded ends, and the two ways across."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import structlog

from kvpull_async import CacheKey, LLMDataDist, LLMException, LLMRole, LLMStatusCode, LLMTimeoutError
from kvpull_async import engine as engine_module
from kvpull_async._deadline import Deadline
from kvpull_async.config import Settings
from kvpull_async.crossing import awaited, blocked
from kvpull_async.engine import Engine, end, end_awaited, live_engines
from kvpull_async.held import leaked
from kvpull_async.managers.manager import Operation
from kvpull_async.memory.choosing import Unopened
from kvpull_async.testing.faults import WrappedMemory
from kvpull_async.transport.tcp import TcpTransport
from tests.duo import DECODER, PROMPT, SMALL, cluster, duo, engine_of, frozen, holds, node, options
from tests.loop_nodes import event_log, eventually

BOUND = 20.0


def settings(**fields: Any) -> Settings:
    return Settings(LLMRole.DECODER, 7, **fields)


# -- threads -----------------------------------------------------------------------------------------------------------


def test_an_engine_is_live_until_it_is_asked_to_stop() -> None:
    engine = Engine(settings(), dropped=None)
    assert engine in live_engines()
    assert not engine.stopped
    assert blocked(engine, Operation("name", _name)) == "kvpull-core-7"
    end(engine)
    assert engine not in live_engines()
    assert engine.stopped


async def _name() -> str:
    return threading.current_thread().name


def test_asking_whether_it_is_stopped_stops_nothing() -> None:
    engine = Engine(settings(), dropped=None)
    for _ in range(3):
        assert not engine.stopped
        assert blocked(engine, Operation("name", _name)) == "kvpull-core-7"
    end(engine)


async def test_both_ways_across_return_and_raise_the_same() -> None:
    async def failing() -> None:
        raise LLMException("no", status_code=LLMStatusCode.LLM_FAILED)

    engine = Engine(settings(), dropped=None)
    try:
        assert await awaited(engine, Operation("name", _name)) == await asyncio.to_thread(
            blocked, engine, Operation("name", _name)
        )
        for crossing in (
            lambda: awaited(engine, Operation("failing", failing)),
            lambda: asyncio.to_thread(_block, failing),
        ):
            with pytest.raises(LLMException, match="no"):
                await crossing()
    finally:
        await end_awaited(engine)


def _block(make: Any) -> None:
    engine = live_engines()[0]
    blocked(engine, Operation("failing", make))


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_finalize_ends_every_kind_of_path_on_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    class Told(TcpTransport):
        async def aclose(self, deadline: Deadline) -> None:
            ended.append(threading.current_thread().name)

    monkeypatch.setattr("kvpull_async.routes.TcpTransport", Told)
    async with node(LLMRole.DECODER, DECODER):
        assert ended == []
    assert ended == [f"kvpull-core-{DECODER}"]


async def test_p8_finalize_is_bounded_when_the_peer_is_silent() -> None:
    async with duo(close_timeout=500, settle_timeout=200) as pair:
        with frozen(pair.prompt):
            began = time.monotonic()
            await pair.decoder.finalize()
            assert time.monotonic() - began < BOUND / 2


async def test_p8_finalize_is_bounded_when_the_core_itself_is_stuck() -> None:
    made = LLMDataDist(LLMRole.DECODER, DECODER)
    await made.init(options(close_timeout=200, settle_timeout=200))
    engine = engine_of(made)
    engine_module_patience, engine_module._PATIENCE = engine_module._PATIENCE, 0.2
    try:
        with frozen(made):
            began = time.monotonic()
            with pytest.raises(LLMTimeoutError):
                await made.finalize()
            assert time.monotonic() - began < BOUND / 2
    finally:
        engine_module._PATIENCE = engine_module_patience
    await eventually(lambda: engine.stopped, "the core ends once it can")


async def test_calls_that_wait_when_the_engine_ends_are_told_so() -> None:
    async with duo(settle_timeout=200) as pair:
        cache = await pair.destination()
        with frozen(pair.prompt):
            pulls = [
                asyncio.ensure_future(pair.decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT, number), cache))
                for number in range(3)
            ]
            counted = engine_of(pair.decoder).counters.snapshot
            await eventually(lambda: counted().get("pulls_started") == 3)
            await pair.decoder.finalize()
            errors = await asyncio.gather(*pulls, return_exceptions=True)
    assert all(isinstance(error, LLMException) for error in errors)
    assert [error.status_code for error in errors if isinstance(error, LLMException)] == [
        LLMStatusCode.LLM_ENGINE_FINALIZED
    ] * 3
    assert len({id(error) for error in errors}) == 3


async def test_p6_finalize_does_not_hold_the_callers_loop_however_slow_the_log_is() -> None:
    release = threading.Event()

    def slow(_: object, level: str, event: structlog.types.EventDict) -> str:
        if threading.current_thread().name == "kvpull-log":
            release.wait(BOUND)
        raise structlog.DropEvent

    structlog.configure(processors=[slow])
    try:
        async with node(LLMRole.PROMPT, PROMPT, listen=True, close_timeout=1000) as prompt:
            ending = asyncio.ensure_future(prompt.finalize())
            ticks = 0
            while not ending.done():
                await asyncio.sleep(0.01)
                ticks += 1
            await ending
        assert ticks > 20  # with the loop held for the whole second there would be one or two
    finally:
        release.set()
        structlog.reset_defaults()
        await eventually(lambda: not any(thread.name == "kvpull-log" for thread in threading.enumerate()))


async def test_memory_that_is_still_written_is_left_and_named() -> None:
    with event_log() as log:
        async with node(LLMRole.DECODER, DECODER, close_timeout=200) as decoder:
            cache = await decoder.kv_cache_manager.allocate_cache(SMALL)
            entry: Any = cache._binding
            loop = engine_of(decoder).core.loop
            loop.call_soon_threadsafe(lambda: entry.quarantine(loop.create_future()))
            await eventually(lambda: cache.quarantined)
        assert log.named("region.leaked", cache_id=cache.cache_id)
    assert entry in leaked
    leaked.remove(entry)


class SlowMemory(Unopened):
    """A device that takes its time to give its memory back."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def close(self) -> None:
        assert self.go_on.wait(BOUND)


@pytest.mark.parametrize("awaitable", [True, False])
async def test_p8_memory_that_does_not_close_is_left_and_named(*, awaitable: bool) -> None:
    engine, memory = Engine(settings(close_timeout_ms=100), dropped=None), SlowMemory()
    with event_log() as log:
        await awaited(engine, Operation("init", engine.open))
        engine.memory.close()
        engine.memory = memory
        began = time.monotonic()
        if awaitable:
            await end_awaited(engine)
        else:
            await asyncio.to_thread(end, engine)
        assert time.monotonic() - began < BOUND / 2
    told = [(event["workers"], event["core"], event["memory"]) for event in log.named("engine.stuck")]
    assert told == [(0, False, True)]
    memory.go_on.set()
    assert engine.memory_closed(BOUND)


async def test_what_has_ended_when_it_is_looked_at_is_not_said_to_be_stuck() -> None:
    engine = Engine(settings(), dropped=None)
    engine.ask_to_stop()
    assert engine.ended(BOUND)
    assert engine.memory_closed(BOUND)
    with event_log() as log:
        engine.stuck()
        engine.events.close(BOUND)
    assert log.named("engine.stuck") == []


class LeakyMemory(WrappedMemory):
    def __init__(self, inner: Any) -> None:
        super().__init__(inner, kind="leaky")
        self.leaked: list[Any] = []

    def leak(self, regions: Any) -> None:
        self.leaked += regions
        super().leak(regions)


async def test_p1_the_memory_hears_what_it_must_never_give_back() -> None:
    async with node(LLMRole.DECODER, DECODER, close_timeout=200, settle_timeout=50) as decoder:
        engine = engine_of(decoder)
        engine.registry.backend = memory = LeakyMemory(engine.memory)
        caches = [await decoder.kv_cache_manager.allocate_cache(SMALL) for _ in range(2)]
        entry: Any = caches[0]._binding
        engine.core.loop.call_soon_threadsafe(lambda: entry.quarantine(engine.core.loop.create_future()))
        await eventually(lambda: caches[0].quarantined)
    assert memory.leaked == list(entry.regions)
    leaked.remove(entry)


async def test_an_interrupted_finalize_still_ends_the_threads() -> None:
    async with duo() as pair:
        engine = engine_of(pair.decoder)
        task = asyncio.ensure_future(pair.decoder.finalize())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: engine.stopped)


# -- what outlives a call ----------------------------------------------------------------------------------------------


class Baggage:
    """Something that a request carries in its context."""


variable: contextvars.ContextVar[Baggage | None] = contextvars.ContextVar("baggage", default=None)


async def test_lasting_tasks_do_not_keep_the_context_of_the_call_that_began_them() -> None:
    async def begin() -> weakref.ref[Baggage]:
        variable.set(Baggage())
        carried = variable.get()
        assert carried is not None
        await prompt.init(options(listen=True))
        await decoder.init(options())
        await decoder.link_clusters([cluster(PROMPT, prompt.listen_address)])
        return weakref.ref(carried)

    async with LLMDataDist(LLMRole.PROMPT, PROMPT) as prompt, LLMDataDist(LLMRole.DECODER, DECODER) as decoder:
        gone = await asyncio.ensure_future(begin())
        await eventually(lambda: gc.collect() >= 0 and gone() is None, "the context went with its call")


async def test_a_pull_runs_in_a_copy_of_its_callers_context() -> None:
    async with duo() as pair:
        await pair.publish()
        cache = await pair.destination()
        seen: list[Baggage | None] = []
        engine = engine_of(pair.decoder)
        find = engine.node.find_link

        def spy(cluster_id: int) -> Any:
            seen.append(variable.get())
            return find(cluster_id)

        engine.node.find_link = spy
        carried = Baggage()
        token = variable.set(carried)
        await pair.decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT, 2), cache)
        variable.reset(token)
        assert seen == [carried]
        assert holds(cache, entry=0, source=2)


# -- the last event of a pull ------------------------------------------------------------------------------------------


async def test_each_pull_that_started_also_ended_in_the_log() -> None:
    with event_log() as log:
        async with duo() as pair:
            await pair.publish()
            cache = await pair.destination()
            manager = pair.decoder.kv_cache_manager
            await manager.pull_cache(CacheKey(PROMPT, 0), cache)
            with pytest.raises(LLMException):
                await manager.pull_cache(CacheKey(PROMPT, 99), cache)
        with pytest.raises(LLMException) as caught:
            await manager.pull_cache(CacheKey(PROMPT, 1), cache)  # the engine has ended, the manager was kept
        assert caught.value.status_code == LLMStatusCode.LLM_ENGINE_FINALIZED
        started = [event["pull_id"] for event in log.named("pull.started")]
        ended = [event["pull_id"] for name in ("pull.finished", "pull.failed") for event in log.named(name)]
        assert len(started) == 3
        assert sorted(started) == sorted(ended)


async def test_a_cancellation_that_came_too_late_finishes_and_says_so() -> None:
    with event_log() as log:
        async with duo() as pair:
            await pair.publish()
            cache = await pair.destination()
            pull = asyncio.ensure_future(pair.decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT, 0), cache))
            await asyncio.sleep(0)  # it has crossed
            finished = engine_of(pair.decoder).counters.snapshot
            give_up = time.monotonic() + BOUND
            while finished().get("pulls_finished") != 1:  # without giving this loop a chance to notice
                assert time.monotonic() < give_up
                time.sleep(0.001)  # noqa: ASYNC251  (the point: this loop is busy)
            pull.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pull
            assert holds(cache, entry=0, source=0)
        (event,) = log.named("pull.finished")
        assert event["cancelled_late"] is True
        assert not log.named("pull.failed")


def test_the_text_of_an_engine_says_what_it_holds() -> None:
    engine = Engine(settings(), dropped=None)
    assert repr(engine).startswith("<Engine cluster=7 <Links")
    end(engine)


@pytest.mark.allow_leak(r"memfd:kvpull-cache")  # P8: memory still in use at `finalize` is kept on purpose
async def test_p7_memory_that_is_still_read_at_the_end_is_kept_and_named() -> None:
    """A peer of this process may be in the middle of a piece; unmapping it would kill the process."""
    with event_log() as events:
        made = LLMDataDist(LLMRole.PROMPT, PROMPT)
        await made.init(options(settle_timeout=30))
        engine = engine_of(made)
        cache = await made.kv_cache_manager.allocate_cache(SMALL)
        entry = engine.registry.find(cache.cache_id)
        assert entry is not None
        entry.pin(lambda: None)
        await made.finalize()
        assert [event["cache_id"] for event in events.named("region.leaked")] == [cache.cache_id]
    assert engine.counters.snapshot()["regions_leaked"] == 1
    assert any(kept is entry for kept in leaked)
    leaked.clear()
