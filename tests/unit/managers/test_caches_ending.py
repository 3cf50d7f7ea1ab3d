"""How copies between caches end when the memory fails: as an error that keeps none of it, after a stop in order."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from kvpull_async import CacheDesc, DataType, LLMException, LLMRole, LLMStatusCode, LLMTimeoutError
from kvpull_async._workers import Job
from kvpull_async.crossing import awaited
from kvpull_async.managers import caches
from kvpull_async.testing.faults import GatedMemory
from tests.loop_nodes import event_log
from tests.orders import endings
from tests.unit.side import Side

BIG = CacheDesc(2, [2, 3 * 1024 * 1024], DataType.DT_UINT8)


class Held:
    """As the memory that a thread works with."""


@pytest.mark.parametrize("kind", [LLMException, MemoryError])
def test_p7_an_error_that_is_kept_keeps_nothing_of_the_thread_that_copied(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    made, seen = Side("cache", LLMRole.MIX), []

    def fail(*_: object) -> Iterator[int]:
        held = Held()
        seen.append(weakref.ref(held))
        yield 0
        raise kind("broken")

    monkeypatch.setattr(caches, "copy_batches", fail)
    try:
        with pytest.raises(LLMException, match="broken") as caught:
            made.run(made.copy(made.allocate(), made.allocate()))
        assert seen[0]() is None, f"kept by {caught.value!r}"
    finally:
        made.close()


async def test_p1_a_copy_is_aborted_before_its_memory_is_told_to_wait_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made, heard = Side("cache", LLMRole.MIX), endings(monkeypatch, Job)
    gated = made.engine.registry.backend = GatedMemory(made.engine.memory)
    try:
        dst, src = made.allocate(BIG), made.allocate(BIG)
        gated.landing_gate.close()
        copying: asyncio.Future[Any] = asyncio.ensure_future(awaited(made.engine, made.copy(dst, src)))
        await gated.landing_gate.reached()
        copying.cancel()
        gated.landing_gate.open()
        with pytest.raises(asyncio.CancelledError):
            await copying
        assert heard == ["abort", "stop"]
    finally:
        gated.landing_gate.open()
        await asyncio.to_thread(made.close)


@pytest.mark.parametrize(
    ("kind", "status"),
    [("kv", LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT), ("cache", LLMStatusCode.LLM_TIMEOUT)],
)
async def test_p3_a_copy_that_gets_on_no_more_and_cannot_be_stopped_does_not_hold_its_caller(
    monkeypatch: pytest.MonkeyPatch, kind: str, status: LLMStatusCode
) -> None:
    monkeypatch.setattr(caches, "_LOOK", 0.01)
    made = Side(kind, LLMRole.PROMPT, settle_timeout=20)
    gated = made.engine.registry.backend = GatedMemory(made.engine.memory)
    try:
        dst, src = made.allocate(BIG), made.allocate(BIG)
        gated.landing_gate.close()
        with event_log() as events:
            with pytest.raises(LLMTimeoutError, match="has not got on for") as caught:
                await awaited(made.engine, made.copy(dst, src))
            await events.first("region.quarantined", cache_id=dst.cache_id)
        error = caught.value
        assert (error.status_code, error.destination_unsafe, error.retry_safe) == (status, True, False)
        assert dst.quarantined
        gated.landing_gate.open()
        await awaited(made.engine, made.manager.settled(dst, None))
        assert not dst.quarantined
    finally:
        gated.landing_gate.open()
        await asyncio.to_thread(made.close)


async def test_a_copy_that_gets_on_slowly_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made, steps = Side("cache", LLMRole.MIX), 60
    monkeypatch.setattr(caches, "_LOOK", 0.01)

    def slow(*_: object) -> Iterator[int]:
        for _ in range(steps):
            time.sleep(0.01)
            yield 1

    monkeypatch.setattr(caches, "copy_batches", slow)
    try:
        await awaited(made.engine, made.copy(made.allocate(), made.allocate()))
    finally:
        await asyncio.to_thread(made.close)
