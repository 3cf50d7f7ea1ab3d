"""Layers as they land, awaited: in order, each whole when it is given; settled when they are left early."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvpull_async import LLMException, LLMStatusCode
from tests import duo
from tests.canaries import set_canary
from tests.integration.held_layers import SOME, begin, held, some
from tests.integration.own_loop import outcome, within
from tests.layered import FLAT, LAYERED, LAYERS, key, layer_holds
from tests.loop_nodes import eventually

pytestmark = pytest.mark.smoke

PATHS = ("tcp", "inproc")
SIZES = {"inline": FLAT, "streamed": LAYERED}
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


# --- to the end ---


@pytest.mark.parametrize("path", [*PATHS, "shm"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["kv", "cache"])
async def test_layers_come_in_order_and_each_is_whole_when_it_is_given(path: str, size: str, kind: str) -> None:
    async with duo.duo(transport=path) as pair:
        await pair.publish(SIZES[size])
        manager: Any = pair.decoder.kv_cache_manager if kind == "kv" else pair.decoder.cache_manager
        cache = await manager.allocate_cache(SIZES[size])
        seen = []
        async with manager.pull_layers(key(1), cache, 2) as layers:
            async for layer in layers:
                assert type(layer) is int
                assert layer_holds(cache, layer, entry=2, source=1)
                seen.append(layer)
            with pytest.raises(StopAsyncIteration):
                await layers.__anext__()
        assert seen == list(range(LAYERS))
        counters = pair.decoder.counters
        assert (counters["pulls_started"], counters["pulls_finished"]) == (1, 1)
        assert counters["bytes_pulled"] == 2 * LAYERS * duo.arrays(cache)[0].shape[1]
        with pytest.raises(LLMException) as caught:
            await manager.pull_cache(key(1), cache)  # consumed, now that all has landed
        assert caught.value.status_code is NOT_EXIST
        await manager.pull_cache(key(2), cache)
        assert duo.holds(cache, entry=0, source=2)
        await manager.deallocate_cache(cache)


@pytest.mark.parametrize("path", PATHS)
async def test_the_numbers_are_those_of_the_destination(path: str) -> None:
    async with duo.duo(transport=path) as pair:
        await pair.publish(LAYERED)
        cache = await pair.destination(LAYERED)
        ranges: Any = {"src_layer_range": range(1, 3), "dst_layer_range": range(2, 4)}
        async with pair.decoder.kv_cache_manager.pull_layers(key(3), cache, **ranges) as layers:
            seen = [(layer, layer_holds(cache, layer, source=3, from_layer=layer - 1)) async for layer in layers]
        assert seen == [(2, True), (3, True)]


async def test_one_tensor_may_be_a_layer() -> None:
    async with duo.duo() as pair:
        await pair.publish(LAYERED)
        cache = await pair.destination(LAYERED)
        async with pair.decoder.kv_cache_manager.pull_layers(key(), cache, tensor_num_per_layer=1) as layers:
            assert [layer async for layer in layers] == list(range(2 * LAYERS))


@pytest.mark.parametrize("path", PATHS)
async def test_layers_are_given_while_others_have_yet_to_land(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    async with held(monkeypatch, path) as made:
        cache = await made.pair.destination(LAYERED)
        async with made.manager.pull_layers(key(), cache) as layers:
            await some(layers)
            assert all(layer_holds(cache, layer, source=0) for layer in range(SOME))
            await made.gate.reached()
            assert not duo.arrays(cache)[-1].any()
            coming = begin(layers.__anext__())
            done, _ = await asyncio.wait([coming], timeout=0.1)
            assert not done
            made.gate.open()
            assert await within(coming) == SOME
            assert [layer async for layer in layers] == list(range(SOME + 1, LAYERS))
        assert duo.holds(cache, entry=0, source=0)


# --- consumers that do as they like ---


@pytest.mark.parametrize("path", PATHS)
async def test_a_slow_consumer_holds_up_neither_the_transfer_nor_the_next_pull(path: str) -> None:
    async with duo.duo(transport=path) as pair:
        await pair.publish(LAYERED)
        cache, other = await pair.destination(LAYERED), await pair.destination(LAYERED)
        manager = pair.decoder.kv_cache_manager
        async with manager.pull_layers(key(), cache) as layers:
            assert await within(layers.__anext__()) == 0
            await eventually(lambda: pair.decoder.counters.get("pulls_finished") == 1)
            await within(manager.pull_cache(key(1), other))
            assert [layer async for layer in layers] == list(range(1, LAYERS))
        assert duo.holds(cache, entry=0, source=0)
        assert duo.holds(other, entry=0, source=1)


@pytest.mark.parametrize("path", PATHS)
async def test_a_consumer_that_holds_its_loop_delays_nothing(path: str) -> None:
    async with duo.duo(transport=path) as pair:
        await pair.publish(LAYERED)
        cache = await pair.destination(LAYERED)
        async with pair.decoder.kv_cache_manager.pull_layers(key(), cache) as layers:
            give_up = time.monotonic() + 20
            while not pair.decoder.counters.get("pulls_finished"):
                time.sleep(0.001)  # noqa: ASYNC251  (the point)
                assert time.monotonic() < give_up
            assert [layer async for layer in layers] == list(range(LAYERS))


@pytest.mark.parametrize("path", PATHS)
async def test_a_consumer_that_never_iterates_gets_the_whole_cache(path: str) -> None:
    async with duo.duo(transport=path) as pair:
        await pair.publish(LAYERED)
        cache = await pair.destination(LAYERED)
        manager = pair.decoder.kv_cache_manager
        async with manager.pull_layers(key(), cache):
            await eventually(lambda: pair.decoder.counters.get("pulls_finished") == 1)
        assert duo.holds(cache, entry=0, source=0)
        with pytest.raises(LLMException) as caught:
            await manager.pull_cache(key(), cache)
        assert caught.value.status_code is NOT_EXIST


@pytest.mark.parametrize("path", PATHS)
def test_consumers_on_loops_of_several_threads(path: str) -> None:
    right: list[bool] = []

    async def consume(pair: duo.Duo, entry: int) -> None:
        cache = await pair.destination(LAYERED)
        async with pair.decoder.kv_cache_manager.pull_layers(key(entry), cache) as layers:
            right.extend([layer_holds(cache, layer, source=entry) async for layer in layers])

    async def run() -> None:
        async with duo.duo(transport=path) as pair:
            await pair.publish(LAYERED)
            consumers = [asyncio.to_thread(asyncio.run, consume(pair, entry)) for entry in range(4)]
            await within(asyncio.gather(*consumers))

    asyncio.run(run())
    assert right == [True] * 4 * LAYERS


# --- leaving early: settled, and the key kept ---


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("taken", [0, 1, SOME])
async def test_p1_leaving_early_cancels_and_settles(monkeypatch: pytest.MonkeyPatch, path: str, taken: int) -> None:
    async with held(monkeypatch, path) as made:
        cache = await made.pair.destination(LAYERED)
        async with made.manager.pull_layers(key(), cache) as layers:
            for layer in range(taken):
                assert await within(layers.__anext__()) == layer
            await made.gate.reached()
            made.open_soon()
        set_canary(cache)
        assert made.pair.decoder.counters["pulls_cancelled"] == 1
        with pytest.raises(StopAsyncIteration):
            await layers.__anext__()
        await made.check_next(cache)


@pytest.mark.parametrize("path", PATHS)
async def test_p1_a_body_that_raises_keeps_its_exception(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    async with held(monkeypatch, path) as made:
        cache = await made.pair.destination(LAYERED)

        async def consume() -> None:
            async with made.manager.pull_layers(key(), cache) as layers:
                await some(layers)
                await made.gate.reached()
                made.open_soon()
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await consume()
        set_canary(cache)
        await made.check_next(cache)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("again", [False, True], ids=["once", "repeatedly"])
async def test_p1_a_cancelled_consumer_gets_its_cancellation_once_all_is_settled(
    monkeypatch: pytest.MonkeyPatch, path: str, again: bool
) -> None:
    async with held(monkeypatch, path) as made:
        cache = await made.pair.destination(LAYERED)

        async def consume() -> None:
            async with made.manager.pull_layers(key(), cache) as layers:
                async for _ in layers:
                    pass

        task = begin(consume())
        await made.gate.reached()
        task.cancel()
        made.open_soon()
        while again and not task.done():
            await asyncio.sleep(0)
            task.cancel()
        assert isinstance(await outcome(task), asyncio.CancelledError)
        set_canary(cache)
        await made.check_next(cache)


async def test_p1_cancelled_while_it_leaves_it_returns_no_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    async with held(monkeypatch, "inproc") as made:
        cache = await made.pair.destination(LAYERED)

        async def consume() -> None:
            async with made.manager.pull_layers(key(), cache) as layers:
                await some(layers)
                await made.gate.reached()
                leaving.set()

        leaving = asyncio.Event()
        task = begin(consume())
        await within(leaving.wait())
        for _ in range(3):
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=0.05)
            assert not done, "it left while a copy could still write"
        made.gate.open()
        assert isinstance(await outcome(task), asyncio.CancelledError)
        set_canary(cache)
        await made.check_next(cache)


@pytest.mark.parametrize("path", PATHS)
async def test_a_generator_around_the_block_settles_when_it_is_closed(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    async with held(monkeypatch, path) as made:
        cache = await made.pair.destination(LAYERED)

        async def generate() -> AsyncIterator[int]:
            async with made.manager.pull_layers(key(), cache) as layers:
                async for layer in layers:
                    yield layer

        generator: Any = generate()
        assert await within(generator.__anext__()) == 0
        await made.gate.reached()
        made.open_soon()
        await within(generator.aclose())
        set_canary(cache)
        await made.check_next(cache)
