"""Verified pushes and transfers, by every way that bytes can go and either face."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpull_async import (
    CacheKeyByIdAndIndex,
    LLMException,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from tests.conformance.api import AWAITED, BLOCKING, Api
from tests.integration.pushing import RECEIVER, SIZES, WAYS, Ends, desc, ends, laid
from tests.integration.transfers import BY_ADDRESS, addresses, sent
from tests.integration.verifying import FAILED, SUMS, check_mismatch, damage, flip, mend
from tests.loop_nodes import event_log

ways = pytest.mark.parametrize("way", WAYS)
sizes = pytest.mark.parametrize("size", SIZES)


async def on_both_faces(body: Any, way: str, **options: Any) -> None:
    async def on(api: Api) -> None:
        async with ends(api, way, **options) as e:
            await body(e)

    await on(AWAITED)
    BLOCKING.run(on(BLOCKING))


async def refused(call: Any) -> LLMException:
    with pytest.raises(LLMException) as caught:
        await call
    return caught.value


@ways
@sizes
async def test_p2_verified_pushes_of_both_kinds_deliver_the_bytes(way: str, size: str) -> None:
    async def body(e: Ends) -> None:
        shape = desc(SIZES[size])
        source, to = await e.source(shape), await e.destination(shape)
        for name in (*SUMS, "none"):
            await e.push(to, source, 2, entry=1, verify=name)
            assert np.array_equal(to.image, laid(to, [(t, 1, source.arrays[t][2]) for t in range(4)]))
            to.set_canary()
        blocks = await e.source(desc(SIZES[size], entries=5), blocks=True)
        paged = await e.destination(desc(SIZES[size], entries=7), blocks=True)
        src, dst = [4, 0, 1, 2], [6, 2, 3, 0]
        await e.push_blocks(blocks, src, dst, verify="xxh3")
        moved = [(t, d, blocks.arrays[t][s]) for t in range(4) for s, d in zip(src, dst, strict=True)]
        assert np.array_equal(paged.image, laid(paged, moved))
        assert "verify_failed" not in e.pusher.counters
        assert e.pusher.counters["pushes_finished"] == 4

    await on_both_faces(body, way)


@ways
@sizes
@pytest.mark.parametrize("name", SUMS)
async def test_p2_p4_a_byte_that_changes_at_the_receiver_fails_the_push(way: str, size: str, name: str) -> None:
    async def body(e: Ends) -> None:
        shape = desc(SIZES[size])
        source, to = await e.source(shape), await e.destination(shape)
        damage(e.receiver, before=flip(to, tensor=2, at=SIZES[size] // 2))
        error = await refused(e.push(to, source, verify=name))
        check_mismatch(error, name, e.pusher)
        assert f"destination at {error.peer}" in str(error)
        assert not np.array_equal(to.image[:, 0], source.image[:, 0])
        mend(e.receiver)
        await e.push(to, source, verify=name)
        assert np.array_equal(to.image[:, 0], source.image[:, 0])
        counters = e.pusher.counters
        assert (counters["pushes_failed"], counters["pushes_finished"]) == (1, 1)

    await on_both_faces(body, way)


@ways
async def test_p2_p4_bytes_that_are_sent_and_summed_here_must_be_the_same(way: str) -> None:
    async def body(e: Ends) -> None:
        shape = desc(SIZES["large"])
        source, to = await e.source(shape), await e.destination(shape)
        for number, name in enumerate(SUMS, 1):
            damage(e.pusher)
            check_mismatch(await refused(e.push(to, source, verify=name)), name, e.pusher, count=number)
            mend(e.pusher)
        await e.push(to, source, verify="xxh3")
        assert np.array_equal(to.image[:, 0], source.image[:, 0])

    await on_both_faces(body, way)


@pytest.mark.parametrize("way", ["inproc", "tcp", "mapped"])
@pytest.mark.parametrize("by_address", [False, True])
async def test_transfers_are_verified_as_the_option_says(way: str, by_address: bool) -> None:
    access: dict[str, Any] = {**BY_ADDRESS} if by_address else {}
    with event_log() as log:
        async with ends(AWAITED, way, verify="xxh3", **access) as e:
            shape = desc(SIZES["large"])
            source, to = await e.source(shape), await e.destination(shape, remote_accessible=True, by_address=True)
            if by_address:
                config: Any = TransferConfig(RECEIVER, addresses(to))
            else:
                config = TransferWithCacheKeyConfig(
                    cache_key=CacheKeyByIdAndIndex(RECEIVER, to.cache.cache_id, 0), src_layer_range=range(2),
                    dst_layer_range=range(2),
                )  # fmt: skip
            assert await sent(e, source, [config]) == [LLMStatusCode.LLM_SUCCESS]
            assert np.array_equal(to.image[:, 0], source.image[:, 0])
            damage(e.receiver, before=flip(to))
            assert await sent(e, source, [config]) == [FAILED]
            assert e.pusher.counters["verify_failed"] == 1
        failed, event = await log.first("transfer.failed"), await log.first("verify.failed")
        assert failed["pull_id"] == event["pull_id"]
        assert "wrong bytes" in failed["reason"]


async def test_blocks_that_are_pushed_in_any_order_are_summed_in_that_order() -> None:
    async with ends(AWAITED, "tcp") as e:
        source = await e.source(desc(4096, entries=200), blocks=True)
        to = await e.destination(desc(4096, entries=200), blocks=True)
        order = np.random.default_rng(7).permutation(200)
        await e.push_blocks(source, order, order[::-1].copy(), verify="crc32")
        assert np.array_equal(to.image[:, order[::-1]], source.image[:, order])
        damage(e.receiver, before=flip(to, entry=int(order[3]), at=17))
        error = await refused(e.push_blocks(source, order, order[::-1].copy(), verify="crc32"))
        check_mismatch(error, "crc32", e.pusher)
