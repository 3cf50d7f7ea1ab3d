"""What `pull_layers` refuses, when, and how the awaitable object is to be used."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import pytest

from kvpull_async import BlocksCacheKey, CacheKeyByIdAndIndex, LLMException, LLMRole, LLMStatusCode
from tests import duo
from tests.layered import FLAT, LAYERS, key
from tests.loop_nodes import event_log, eventually

PARAM_INVALID = LLMStatusCode.LLM_PARAM_INVALID


def manager_of(node: Any, kind: str) -> Any:
    return node.kv_cache_manager if kind == "kv" else node.cache_manager


@pytest.mark.parametrize("kind", ["kv", "cache"])
async def test_what_needs_no_table_is_checked_by_the_call_itself(kind: str) -> None:
    async with duo.node(LLMRole.DECODER, duo.DECODER) as node:
        manager = manager_of(node, kind)
        cache = await manager.allocate_cache(FLAT)
        with pytest.raises(TypeError, match=r"pull_layers\(\) got an unexpected keyword argument 'layers'"):
            manager.pull_layers(key(), cache, layers=3)
        for wrong in ((None, cache), (key(), None), (BlocksCacheKey(1, 1), cache), (key(), cache, True)):
            with pytest.raises(TypeError):
                manager.pull_layers(*wrong)
        for options in ({"size": 0}, {"tensor_num_per_layer": 0}, {"src_layer_range": range(0, 4, 2)}):
            with pytest.raises(LLMException) as caught:
                manager.pull_layers(key(), cache, **options)
            assert caught.value.status_code is PARAM_INVALID
        assert node.counters.get("pulls_started") is None
        await manager.deallocate_cache(cache)


async def test_only_a_decoder_pulls_with_the_older_manager() -> None:
    async with duo.node(LLMRole.PROMPT, duo.PROMPT) as node:
        cache = await node.kv_cache_manager.allocate_cache(FLAT)
        with pytest.raises(LLMException) as caught:
            node.kv_cache_manager.pull_layers(key(), cache)
        assert caught.value.status_code is PARAM_INVALID
        await node.kv_cache_manager.deallocate_cache(cache)


@pytest.mark.parametrize("kind", ["kv", "cache"])
@pytest.mark.parametrize("options", [{"tensor_num_per_layer": 3}, {"batch_index": 4}, {"dst_layer_range": range(9)}])
async def test_what_needs_the_table_is_raised_by_the_iteration(kind: str, options: dict[str, Any]) -> None:
    async with duo.duo() as pair:
        await pair.publish(FLAT)
        manager = manager_of(pair.decoder, kind)
        cache = await manager.allocate_cache(FLAT)
        async with manager.pull_layers(key(), cache, **options) as layers:
            with pytest.raises(LLMException) as caught:
                await layers.__anext__()
        assert (caught.value.status_code, caught.value.operation) == (PARAM_INVALID, "pull_layers")
        assert duo.untouched(cache)
        await manager.deallocate_cache(cache)


async def test_a_blocks_cache_is_refused_at_the_moment_at_which_pull_cache_does() -> None:
    async with duo.duo() as pair:
        newer, older = pair.decoder.cache_manager, pair.decoder.kv_cache_manager
        blocks = await newer.allocate_blocks_cache(FLAT)
        with pytest.raises(LLMException, match="blocks cache"):
            newer.pull_layers(key(), blocks)
        await newer.deallocate_blocks_cache(blocks)
        older_blocks = await older.allocate_blocks_cache(FLAT)
        async with older.pull_layers(key(), older_blocks) as layers:
            with pytest.raises(LLMException, match="blocks cache"):
                await layers.__anext__()
        await older.deallocate_cache(older_blocks)


async def test_with_remote_cache_access_only_by_id_and_no_key_is_consumed() -> None:
    async with duo.duo(enable_cache_manager=True, enable_remote_cache_accessible=True) as pair:
        source = await pair.prompt.cache_manager.allocate_cache(FLAT)
        duo.fill(source)
        manager = pair.decoder.cache_manager
        cache = await manager.allocate_cache(FLAT)
        with pytest.raises(TypeError):
            manager.pull_layers(key(), cache)
        for _ in range(2):
            async with manager.pull_layers(CacheKeyByIdAndIndex(duo.PROMPT, source.cache_id, 2), cache) as layers:
                assert [layer async for layer in layers] == list(range(LAYERS))
        assert duo.holds(cache, entry=0, source=2)
        await manager.deallocate_cache(cache)
        await pair.prompt.cache_manager.deallocate_cache(source)


async def test_it_is_entered_before_it_is_iterated_and_once() -> None:
    async with duo.duo() as pair:
        await pair.publish(FLAT)
        cache = await pair.destination(FLAT)
        layers = pair.decoder.kv_cache_manager.pull_layers(key(), cache)
        with pytest.raises(RuntimeError, match=r"async with manager\.pull_layers"):
            await layers.__anext__()
        with pytest.raises(RuntimeError, match=r"async with manager\.pull_layers"):
            aiter(layers)
        async with layers:
            with pytest.raises(RuntimeError, match="call pull_layers again"):
                await layers.__aenter__()
            assert [layer async for layer in layers] == list(range(LAYERS))
        with pytest.raises(RuntimeError, match="call pull_layers again"):
            await layers.__aenter__()


async def test_one_that_is_never_entered_asks_nobody() -> None:
    async with duo.duo() as pair:
        await pair.publish(FLAT)
        cache = await pair.destination(FLAT)
        pair.decoder.kv_cache_manager.pull_layers(key(), cache)
        await pair.decoder.kv_cache_manager.pull_cache(key(), cache)
        assert pair.decoder.counters["pulls_started"] == 1


async def test_the_deadline_counts_from_the_block_and_not_from_the_call() -> None:
    async with duo.duo() as pair:
        await pair.publish(FLAT)
        cache = await pair.destination(FLAT)
        layers = pair.decoder.kv_cache_manager.pull_layers(key(), cache, timeout=3000)
        prepared = layers._pull._begin
        await asyncio.sleep(0.05)
        before = asyncio.get_running_loop().time()
        report = prepared().report
        assert report is not None
        assert report.started >= before
        async with layers:
            assert [layer async for layer in layers] == list(range(LAYERS))


async def test_a_layer_given_up_by_wait_for_is_not_lost() -> None:
    async with duo.duo() as pair:
        await pair.publish(FLAT)
        cache = await pair.destination(FLAT)
        layers = pair.decoder.kv_cache_manager.pull_layers(key(), cache)
        async with contextlib.AsyncExitStack() as stack:
            with duo.frozen(pair.prompt):
                await stack.enter_async_context(layers)
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(layers.__anext__(), 0.02)
            assert [layer async for layer in layers] == list(range(LAYERS))


def test_a_loop_that_is_closed_under_the_block_leaves_an_event_and_a_usable_link() -> None:
    async def consume(manager: Any, cache: Any) -> None:
        async with manager.pull_layers(key(1), cache) as layers:
            async for _ in layers:
                pass

    own, gone = asyncio.new_event_loop(), asyncio.new_event_loop()
    gone.set_exception_handler(lambda *_: None)  # it complains of the task that it left behind
    run, making = own.run_until_complete, duo.duo()
    with event_log() as log:
        pair = run(making.__aenter__())
        run(pair.publish(FLAT))
        cache = run(pair.destination(FLAT))
        with duo.frozen(pair.prompt):
            consumer = gone.create_task(consume(pair.decoder.kv_cache_manager, cache))
            gone.run_until_complete(eventually(lambda: pair.decoder.counters.get("pulls_started") == 1))
            gone.close()
            run(eventually(lambda: pair.decoder.counters.get("pulls_cancelled") == 1))
        assert not consumer.done()
        run(eventually(lambda: bool(log.named("pull.orphaned"))))
        (event,) = log.named("pull.orphaned")
        assert event["operation"] == "pull_layers"
        run(consume(pair.decoder.kv_cache_manager, cache))
        assert duo.holds(cache, entry=0, source=1)
        del consumer
        gc.collect()
        run(making.__aexit__(None, None, None))
    own.close()
