"""Layers as they land, of a pull that fails: raised once, the layers given before are right, the key is kept."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from kvpull_async import CacheDesc, CacheKey, DataType, LLMException, LLMRole, LLMStatusCode, LLMTimeoutError
from kvpull_async.managers import pulls
from tests import duo
from tests.canaries import intact, set_canary
from tests.inject import gated_memories
from tests.integration.held_layers import SOME, begin, held, some
from tests.integration.own_loop import outcome, within
from tests.integration.processes import child
from tests.layered import FLAT, LAYERED, LAYERS, key, layer_holds
from tests.loop_nodes import eventually

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


@pytest.mark.parametrize("kind", ["kv", "cache"])
async def test_p3_the_deadline_passes_in_the_middle(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    async with held(monkeypatch, "tcp") as made:
        newer = kind == "cache"
        manager: Any = made.pair.decoder.cache_manager if newer else made.manager
        cache = await manager.allocate_cache(LAYERED)
        async with manager.pull_layers(key(), cache, timeout=1000) as layers:
            await some(layers)
            with pytest.raises(LLMTimeoutError) as caught:
                await within(layers.__anext__())
            assert all(layer_holds(cache, layer, source=0) for layer in range(SOME))
            with pytest.raises(StopAsyncIteration):  # once
                await layers.__anext__()
        error = caught.value
        code = LLMStatusCode.LLM_TIMEOUT if newer else LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
        assert (error.status_code, error.operation, error.destination_unsafe) == (code, "pull_layers", False)
        set_canary(cache)
        await made.check_next(cache)
        await manager.deallocate_cache(cache)


async def test_the_source_is_killed_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that is held at the destination, so that some layers have landed when the source dies."""
    memories, nbytes = gated_memories(monkeypatch, after=9), 8 * 1024 * 1024
    async with (
        child("PROMPT", duo.PROMPT, listen=True) as source,
        duo.node(LLMRole.DECODER, duo.DECODER) as decoder,
    ):
        memories[0].direct = True
        await source.ask("publish", "published", nbytes=nbytes, first=0)
        info = duo.cluster(duo.PROMPT, source.address)
        assert await decoder.link_clusters([info], duo.TIMEOUT_MS) == (duo.OK, [duo.OK])
        manager, gate = decoder.kv_cache_manager, memories[0].landing_gate
        cache = await manager.allocate_cache(CacheDesc(2, [4, nbytes], DataType.DT_UINT8))
        gate.close()
        async with manager.pull_layers(key(), cache, tensor_num_per_layer=1) as layers:
            assert await within(layers.__anext__()) == 0
            assert bool((duo.arrays(cache)[0][0] == duo.pattern(0, 0)).all())
            await gate.reached()
            source.kill()
            gate.open()
            with pytest.raises(LLMException) as caught:
                await within(layers.__anext__())
        assert caught.value.status_code is LLMStatusCode.LLM_LINK_FAILED
        set_canary(cache)
        await asyncio.sleep(0.1)
        assert intact(cache)
        await manager.deallocate_cache(cache)


async def test_a_refused_pull_raises_out_of_the_iteration() -> None:
    async with duo.duo() as pair:
        cache = await pair.destination(FLAT)
        set_canary(cache)
        async with pair.decoder.kv_cache_manager.pull_layers(key(9), cache) as layers:
            with pytest.raises(LLMException) as caught:
                await within(layers.__anext__())
        assert caught.value.status_code is NOT_EXIST
        assert intact(cache)


async def test_p10_a_failure_that_nobody_iterated_to_is_raised_where_the_block_is_left() -> None:
    async with duo.duo() as pair:
        cache = await pair.destination(LAYERED)
        layers = pair.decoder.kv_cache_manager.pull_layers(CacheKey(duo.PROMPT, 999), cache)
        with pytest.raises(LLMException) as caught:
            async with layers:
                await eventually(lambda: layers._pull.failed)
        assert caught.value.status_code == NOT_EXIST
        layers = pair.decoder.kv_cache_manager.pull_layers(CacheKey(duo.PROMPT, 999), cache)
        with pytest.raises(ZeroDivisionError):  # what the block itself raises goes first
            await _failing_itself(layers)


async def _failing_itself(layers: Any) -> None:
    async with layers:
        await eventually(lambda: layers._pull.failed)
        raise ZeroDivisionError


async def test_finalize_ends_the_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    async with held(monkeypatch, "tcp") as made:
        cache = await made.pair.destination(LAYERED)

        async def consume() -> None:
            async with made.manager.pull_layers(key(), cache) as layers:
                async for _ in layers:
                    pass

        task = begin(consume())
        await made.gate.reached()
        await within(made.pair.decoder.finalize())
        assert isinstance(await outcome(task), LLMException)


async def test_a_failure_after_the_last_layer_is_raised_where_the_block_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the source cannot prove that it still held what was read."""
    run, taken = pulls._run, threading.Event()

    async def failing(*args: Any) -> None:
        await run(*args)
        await asyncio.to_thread(taken.wait, 20)
        raise LLMException("not proven", status_code=NOT_EXIST)

    async with duo.duo() as pair:
        await pair.publish(LAYERED)
        cache = await pair.destination(LAYERED)
        monkeypatch.setattr(pulls, "_run", failing)

        async def consume() -> None:
            async with pair.decoder.kv_cache_manager.pull_layers(key(), cache) as layers:
                async for layer in layers:
                    if layer == LAYERS - 1:
                        taken.set()
                        break

        with pytest.raises(LLMException, match="not proven"):
            await within(consume())
