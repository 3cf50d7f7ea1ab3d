"""One `pull_layers` without the waiting: begun once, its layers and its end told once, its end in the log."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvpull_async import LLMException, LLMStatusCode
from kvpull_async.layers import LayerPull
from tests import duo
from tests.layered import FLAT, LAYERS, key
from tests.loop_nodes import event_log, eventually


class Asked:
    """A pull through one of two linked nodes, and what it has signalled."""

    def __init__(self, pair: duo.Duo, cache: Any, entry: int = 0, **options: Any) -> None:
        self.engine = duo.engine_of(pair.decoder)
        manager = pair.decoder.kv_cache_manager._manager
        self.pull = LayerPull(self.engine, manager.pull_layers(key(entry), cache, 0, -1, options))
        self.ended = threading.Event()

    def begin(self) -> None:
        self.pull.begin(bool, self._end)

    def _end(self) -> bool:
        self.ended.set()
        return True

    async def end(self) -> None:
        await eventually(self.ended.is_set)
        assert self.pull.ended


async def test_every_layer_is_taken_once_and_then_it_is_over() -> None:
    async with duo.duo() as pair:
        await pair.publish(FLAT)
        asked = Asked(pair, await pair.destination(FLAT))
        assert not asked.pull.begun
        with event_log() as log:
            asked.begin()
            await asked.end()
            assert [asked.pull.take() for _ in range(LAYERS)] == list(range(LAYERS))
            assert asked.pull.all_taken
            assert log.named("pull.finished") == []
            assert asked.pull.take() is None
            assert asked.pull.over
            asked.pull.leave()  # nothing more to say
        (started,), (finished,) = log.named("pull.started"), log.named("pull.finished")
        assert started["operation"] == finished["operation"] == "pull_layers"
        assert started["pull_id"] == finished["pull_id"]
        assert finished["bytes"] == 2 * LAYERS * 1024


async def test_the_time_in_the_log_is_that_of_the_pull_and_not_of_its_consumer() -> None:
    async with duo.duo() as pair:
        await pair.publish(FLAT)
        asked = Asked(pair, await pair.destination(FLAT))
        with event_log() as log:
            asked.begin()
            await asked.end()
            threading.Event().wait(0.2)
            asked.pull.leave()
        (finished,) = log.named("pull.finished")
        phases = sum(finished[name] for name in finished if name.endswith("_ms") and name != "elapsed_ms")
        assert finished["elapsed_ms"] - phases < 200
        assert "cancelled_late" not in finished


async def test_a_failure_is_raised_once_before_any_layer() -> None:
    async with duo.duo() as pair:
        asked = Asked(pair, await pair.destination(FLAT), 9)
        with event_log() as log:
            asked.begin()
            await asked.end()
            with pytest.raises(LLMException) as caught:
                asked.pull.take()
            assert asked.pull.over
        assert (caught.value.operation, caught.value.status_code) == (
            "pull_layers",
            LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        )
        (failed,) = log.named("pull.failed")
        assert failed["operation"] == "pull_layers"


async def test_a_failure_that_nobody_took_is_in_the_log() -> None:
    async with duo.duo() as pair:
        asked = Asked(pair, await pair.destination(FLAT), 9)
        with event_log() as log:
            asked.begin()
            await asked.end()
            asked.pull.cancel()
            asked.pull.leave()
        (failed,) = log.named("pull.failed")
        assert failed["status"] == "LLM_KV_CACHE_NOT_EXIST"


async def test_leaving_a_cancelled_pull_says_that_it_was_cancelled() -> None:
    async with duo.duo() as pair:
        await pair.publish(FLAT)
        asked = Asked(pair, await pair.destination(FLAT))
        with event_log() as log:
            with duo.frozen(pair.prompt):
                asked.begin()
                await eventually(lambda: pair.decoder.counters.get("pulls_started") == 1)
                asked.pull.cancel()
                await asked.end()
            asked.pull.leave()
        (failed,) = log.named("pull.failed")
        assert failed["error"] == "CancelledError"
        assert pair.decoder.counters["pulls_cancelled"] == 1


async def test_a_pull_that_is_dropped_on_its_way_is_cancelled() -> None:
    async with duo.duo() as pair:
        await pair.publish(FLAT)
        asked = Asked(pair, await pair.destination(FLAT))
        with event_log() as log:
            with duo.frozen(pair.decoder):
                asked.begin()
                asked.pull.drop()
            await asked.end()
            asked.pull.leave()
        (failed,) = log.named("pull.failed")
        assert failed["error"] == "CancelledError"


async def test_a_blocking_consumer_on_the_cores_own_thread_is_refused() -> None:
    async with duo.duo() as pair:
        asked = Asked(pair, await pair.destination(FLAT))
        raised: list[BaseException] = []

        def begin() -> None:
            try:
                asked.begin()
            except RuntimeError as error:
                raised.append(error)
            asked.ended.set()

        asked.engine.core.loop.call_soon_threadsafe(begin)
        await eventually(asked.ended.is_set)
        assert "core's own thread" in str(raised[0])
        assert not asked.pull.begun


async def test_it_says_how_far_it_is() -> None:
    async with duo.duo() as pair:
        asked = Asked(pair, await pair.destination(FLAT))
        assert "0 of 0 layers" in repr(asked.pull)
