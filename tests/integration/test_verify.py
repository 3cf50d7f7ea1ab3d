"""Verified pulls, by every way that bytes can go and either face: right bytes pass, one bit that differs is found."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvpull_async import CacheKey, LLMException, LLMRole, LLMStatusCode
from tests import duo
from tests.conformance.api import AWAITED, BLOCKING, Api
from tests.integration.pushing import PUSHER, SIZES, WAYS, Ends, Stock, desc, ends, laid
from tests.integration.verifying import (
    BLOCKS,
    SUMS,
    by_id,
    check_mismatch,
    damage,
    flip,
    keyed,
    mend,
    pull,
    pull_blocks,
)
from tests.loop_nodes import event_log

ways = pytest.mark.parametrize("way", WAYS)
sizes = pytest.mark.parametrize("size", SIZES)
sums = pytest.mark.parametrize("name", SUMS)
NO_REMOTE: dict[str, Any] = {"enable_remote_cache_accessible": False}


async def on_both_faces(body: Any, way: str, *args: Any, **options: Any) -> None:
    async def on(api: Api) -> None:
        async with ends(api, way, **options) as e:
            await body(e, *args)

    await on(AWAITED)
    BLOCKING.run(on(BLOCKING))


async def refused(call: Any) -> LLMException:
    with pytest.raises(LLMException) as caught:
        await call
    return caught.value


def check(to: Stock, *pieces: tuple[int, int, Any]) -> None:
    assert np.array_equal(to.image, laid(to, pieces))
    to.set_canary()


# --- the right bytes ---


@ways
@sizes
async def test_p2_verified_pulls_of_every_kind_deliver_the_bytes(way: str, size: str) -> None:
    async def body(e: Ends) -> None:
        shape = desc(SIZES[size])
        source, to = await e.source(shape), await e.destination(shape)
        image = source.image
        for name in (*SUMS, "none"):
            await pull(e, by_id(source, 2), to, 1, verify=name)
            check(to, *[(tensor, 1, image[tensor, 2]) for tensor in range(4)])
        await pull(e, by_id(source, 1), to, size=50, src_cache_offset=7, verify="crc32")
        check(to, *[(tensor, 0, image[tensor, 1, 7:57]) for tensor in range(4)])
        layers: Any = {"src_layer_range": range(1, 2), "dst_layer_range": range(1)}
        await pull(e, by_id(source), to, **layers, verify="xxh3")
        check(to, *[(tensor, 0, image[tensor + 2, 0]) for tensor in range(2)])
        blocks = await e.source(desc(SIZES[size], entries=9), blocks=True, seed=2)
        paged = await e.destination(desc(SIZES[size], entries=7), blocks=True)
        src, dst = [8, 1, 2, 3, 0], [0, 6, 4, 5, 2]
        await pull_blocks(e, BLOCKS, paged, src, dst, verify="xxh3")
        moved = [(t, d, blocks.image[t, s]) for t in range(4) for s, d in zip(src, dst, strict=True)]
        check(paged, *moved)
        smaller = await e.destination(desc(SIZES[size] // 3, entries=6), blocks=True, model=1)
        await pull_blocks(e, by_id(source, 1), smaller, (), [4, 1, 0], verify="crc32")
        step = SIZES[size] // 3
        check(smaller, *[(t, d, image[t, 1, i * step :][:step]) for t in range(4) for i, d in enumerate([4, 1, 0])])
        assert "verify_failed" not in e.receiver.counters
        assert e.receiver.counters["pulls_finished"] == 7

    await on_both_faces(body, way)


@pytest.mark.parametrize("way", ["inproc", "tcp", "mapped"])
@sizes
async def test_layers_come_when_all_have_been_verified(way: str, size: str) -> None:
    async with ends(AWAITED, way, **NO_REMOTE) as e:
        shape = desc(SIZES[size])
        key, other = CacheKey(PUSHER, 1), CacheKey(PUSHER, 2)
        source, to = await keyed(e, shape, key, other), await e.destination(shape)
        manager, seen = e.receiver.cache_manager, []
        async with manager.pull_layers(key, to.cache, verify="xxh3") as layers:
            async for layer in layers:
                assert np.array_equal(to.image[:, 0], source.image[:, 0])  # the others, too
                seen.append(layer)
        assert seen == [0, 1]
        damage(e.receiver, before=flip(to))
        async with manager.pull_layers(other, to.cache, verify="crc32") as layers:
            error = await refused(anext(layers))
        check_mismatch(error, "crc32", e.receiver)


async def test_a_pull_that_waits_for_its_key_is_verified_too() -> None:
    async with ends(AWAITED, "tcp", **NO_REMOTE) as e:
        shape, key = desc(SIZES["large"]), CacheKey(PUSHER, 5)
        to = await e.destination(shape)
        running = AWAITED.start(lambda: pull(e, key, to, wait_for_key=True, verify="xxh3"))
        await AWAITED.until(lambda: e.receiver.counters.get("pulls_started", 0) == 1)
        source = await keyed(e, shape)
        await e.pusher.cache_manager.publish_cache(source.cache, [key])
        assert await running.outcome() is None
        assert np.array_equal(to.image[:, 0], source.image[:, 0])


async def test_the_option_counts_for_calls_that_say_nothing_and_reads_ask_the_source_then() -> None:
    async with ends(AWAITED, "mapped", verify="xxh3") as e:
        shape = desc(SIZES["inline"])
        source, to = await e.source(shape), await e.destination(shape)
        for _ in range(3):
            await pull(e, by_id(source), to)
        assert e.pusher.counters["serves"] == 3  # none of them by itself
        damage(e.receiver, before=flip(to))
        check_mismatch(await refused(pull(e, by_id(source), to)), "xxh3", e.receiver)
        damage(e.receiver, before=flip(to))
        for _ in range(3):
            await pull(e, by_id(source), to, verify="none")
        assert e.pusher.counters["serves"] == 5  # once it was asked, the source need not be


# --- other bytes ---


@ways
@sizes
@sums
async def test_p2_p4_a_byte_that_changes_in_the_destination_fails_the_pull(way: str, size: str, name: str) -> None:
    async def body(e: Ends) -> None:
        key, shape = CacheKey(PUSHER, 1), desc(SIZES[size])
        source, to = await keyed(e, shape, key), await e.destination(shape)
        damage(e.receiver, before=flip(to, at=SIZES[size] - 1))
        error = await refused(pull(e, key, to, verify=name))
        check_mismatch(error, name, e.receiver)
        assert not to.cache.quarantined
        assert "keys_consumed" not in e.pusher.counters
        await pull(e, key, to, verify=name)  # the key is there still, and the link
        assert np.array_equal(to.image[:, 0], source.image[:, 0])
        assert e.receiver.counters["pulls_failed"] == 1
        error = await refused(pull(e, key, to, verify=name))
        assert error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST

    await on_both_faces(body, way, **NO_REMOTE)


@ways
@sums
async def test_p2_p4_bytes_that_the_source_sends_and_sums_must_be_the_same(way: str, name: str) -> None:
    """Either what was sent or copied, or what was summed, had one bit changed."""

    async def body(e: Ends) -> None:
        shape = desc(SIZES["large"])
        source, to = await e.source(shape), await e.destination(shape)
        for number in (1, 2):
            damage(e.pusher)
            check_mismatch(await refused(pull(e, by_id(source), to, verify=name)), name, e.receiver, count=number)
            mend(e.pusher)
        await pull(e, by_id(source), to, verify=name)
        assert np.array_equal(to.image[:, 0], source.image[:, 0])

    await on_both_faces(body, way)


@ways
async def test_a_pull_of_blocks_finds_a_byte_in_any_of_them(way: str) -> None:
    async with ends(AWAITED, way) as e:
        source = await e.source(desc(4096, entries=300), blocks=True)
        to = await e.destination(desc(4096, entries=300), blocks=True)
        order = np.random.default_rng(5).permutation(300)
        back = order[::-1].copy()
        for number, block in enumerate((order[0], order[150], order[299]), 1):
            damage(e.receiver, before=flip(to, tensor=3, entry=int(block), at=4095))
            error = await refused(pull_blocks(e, BLOCKS, to, back, order, verify="xxh3"))
            check_mismatch(error, "xxh3", e.receiver, count=number)
        await pull_blocks(e, BLOCKS, to, back, order, verify="xxh3")
        assert np.array_equal(to.image[:, order], source.image[:, back])


async def test_the_event_names_both_sums_and_the_peer() -> None:
    with event_log() as log:
        async with ends(AWAITED, "tcp") as e:
            shape = desc(SIZES["large"])
            source, to = await e.source(shape), await e.destination(shape)
            damage(e.receiver, before=flip(to))
            error = await refused(pull(e, by_id(source), to, verify="crc32"))
        event = await log.first("verify.failed")
        assert (event["sum"], event["cluster_id"], event["operation"]) == ("crc32", PUSHER, "pull_cache")
        assert event["source"] != event["destination"]
        assert len(event["source"]) == 8
        assert event["source"] in str(error)
        assert event["destination"] in str(error)
        assert event["peer"] == error.peer
        failed = await log.first("pull.failed")
        assert failed["pull_id"] == event["pull_id"]
        assert failed["verify_ms"] >= 0


# --- what may be asked for ---


@contextlib.asynccontextmanager
async def two() -> AsyncIterator[tuple[Ends, Stock, Stock]]:
    async with ends(AWAITED, "inproc") as e:
        shape = desc(SIZES["inline"])
        yield e, await e.source(shape), await e.destination(shape)


async def test_other_sums_are_refused_before_anything_is_asked() -> None:
    async with two() as (e, source, to):
        for value, error in ((5, TypeError), ("md5", ValueError), ("", ValueError), (b"crc32", TypeError)):
            with pytest.raises(error, match="verify"):
                await pull(e, by_id(source), to, verify=value)
            with pytest.raises(error, match="verify"):
                await e.push(to, source, verify=value)
        with pytest.raises(ValueError, match="verify"):
            duo.options(verify="md5")
        await pull(e, by_id(source), to, verify=None)
        assert e.receiver.counters["pulls_started"] == 1


async def test_p10_without_the_package_the_call_and_init_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two() as (e, source, to):
        monkeypatch.setitem(sys.modules, "xxhash", None)
        for call in (pull(e, by_id(source), to, verify="xxh3"), e.push(to, source, verify="xxh3")):
            error = await refused(call)
            assert error.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED
            assert "xxhash on this side" in str(error)
            assert "kvpull[verify]" in str(error)
        await pull(e, by_id(source), to, verify="crc32")
    with pytest.raises(LLMException) as caught:
        async with duo.node(LLMRole.MIX, 5, verify="xxh3"):
            pass
    assert caught.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED
