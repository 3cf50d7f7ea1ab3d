"""Pushes between real nodes: every byte, the bytes around them, and every refusal, over each way and by both faces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from kvpull_async import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, LLMStatusCode, Placement
from tests.conformance.api import AWAITED, BLOCKING, Api
from tests.integration.pushing import RECEIVER, SIZES, WAYS, Ends, Stock, desc, ends, laid

PI, GONE = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
BLOCK = {"inline": 40, "large": 20_004}

each_way = pytest.mark.parametrize("way", WAYS)
each_size = pytest.mark.parametrize("size", SIZES)
each_face = pytest.mark.parametrize("api", [AWAITED, BLOCKING], ids=lambda api: api.name)
either_dials = pytest.mark.parametrize("dials", ["pusher", "receiver"])


def check(destination: Stock, *pieces: tuple[int, int, Any]) -> None:
    assert np.array_equal(destination.image, laid(destination, pieces))
    destination.set_canary()


# -- what lands --------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@each_way
@each_size
@each_face
@either_dials
def test_p2_a_push_fills_its_entry_and_nothing_else(way: str, size: str, api: Api, dials: str) -> None:
    async def body() -> None:
        async with ends(api, way, dials=dials) as e:
            shape = desc(SIZES[size])
            source, destination = await e.source(shape), await e.destination(shape)
            before = source.image
            for src, dst in ((0, 0), (2, 1), (1, 2)):
                await e.push(destination, source, src, entry=dst)
                check(destination, *((tensor, dst, source.arrays[tensor][src]) for tensor in range(4)))
            assert np.array_equal(source.image, before)
            counted = e.pusher.counters, e.receiver.counters
            assert counted[0]["pushes_finished"] == counted[1]["receives"] == 3
            assert counted[0]["bytes_pushed"] == counted[1]["bytes_received"] == 3 * 4 * SIZES[size]

    api.run(body())


@each_way
@each_size
@each_face
def test_p2_layers_go_to_the_layers_that_are_named(way: str, size: str, api: Api) -> None:
    async def body() -> None:
        async with ends(api, way) as e:
            source, destination = await e.source(desc(SIZES[size])), await e.destination(desc(SIZES[size], tensors=6))
            cases = [
                ((range(1), range(2, 3), -1), {}, {0: 4, 1: 5}),
                ((range(2), range(1, 3), -1), {}, {0: 2, 1: 3, 2: 4, 3: 5}),
                ((range(1, 4), range(3)), {"tensor_num_per_layer": 1}, {1: 0, 2: 1, 3: 2}),
                ((None, range(1)), {"tensor_num_per_layer": 4}, {0: 0, 1: 1, 2: 2, 3: 3}),
                ((), {}, {0: 0, 1: 1, 2: 2, 3: 3}),
            ]
            for ranges, options, tensors in cases:
                await e.push(destination, source, 1, *ranges, entry=2, **options)
                check(destination, *((dst, 2, source.arrays[src][1]) for src, dst in tensors.items()))

    api.run(body())


@each_way
@each_size
def test_p2_a_smaller_entry_leaves_the_rest_of_a_larger_one(way: str, size: str) -> None:
    """And a larger one, which would overrun it, is refused."""

    async def body() -> None:
        async with ends(AWAITED, way) as e:
            small, large = desc(SIZES[size]), desc(SIZES[size] + 100)
            source, destination = await e.source(small), await e.destination(large)
            await e.push(destination, source, entry=1)
            check(destination, *((tensor, 1, source.arrays[tensor][0]) for tensor in range(4)))
            source, destination = await e.source(large), await e.destination(small)
            error = await e.refused(e.push, destination, source)
            assert error.status_code is PI
            assert destination.untouched

    AWAITED.run(body())


@each_way
@each_size
@each_face
@either_dials
def test_p2_blocks_go_pairwise_in_any_order(way: str, size: str, api: Api, dials: str) -> None:
    async def body() -> None:
        async with ends(api, way, dials=dials) as e:
            source = await e.source(desc(BLOCK[size], entries=60), blocks=True)
            destination = await e.destination(desc(BLOCK[size], entries=90), blocks=True, model=7)
            random = np.random.default_rng(7)
            src, dst = random.permutation(60)[:40].tolist(), random.permutation(90)[:40].tolist()
            await e.push_blocks(source, src, dst, model=7)
            pairs = list(zip(src, dst, strict=True))
            check(destination, *((t, to, source.arrays[t][of]) for t in range(4) for of, to in pairs))
            await e.push_blocks(source, src, dst, range(1), range(1, 2), model=7)
            check(destination, *((t + 2, to, source.arrays[t][of]) for t in range(2) for of, to in pairs))
            await e.push_blocks(source, [5, 5], [0, 89], range(3, 4), range(1), tensor_num_per_layer=1, model=7)
            check(destination, (0, 0, source.arrays[3][5]), (0, 89, source.arrays[3][5]))

    api.run(body())


@each_way
def test_many_pushes_in_turn_use_one_link(way: str) -> None:
    async def body() -> None:
        async with ends(AWAITED, way) as e:
            source = await e.source(desc(70_001, entries=8))
            destination = await e.destination(desc(70_001, entries=8))
            for number in range(24):
                await e.push(destination, source, number % 8, entry=(3 * number) % 8)
                check(destination, *((t, (3 * number) % 8, source.arrays[t][number % 8]) for t in range(4)))
            assert e.pusher.counters["links_up"] == e.receiver.counters["links_up"] == 1

    AWAITED.run(body())


@each_way
def test_a_push_into_memory_by_address_and_from_memory_of_the_library(way: str) -> None:
    async def body() -> None:
        async with ends(AWAITED, way) as e:
            shape = desc(SIZES["large"])
            for by_address in (True, False):
                source = await e.source(shape, by_address=by_address)
                destination = await e.destination(shape, by_address=not by_address)
                await e.push(destination, source, 2, entry=1)
                check(destination, *((tensor, 1, source.arrays[tensor][2]) for tensor in range(4)))

    AWAITED.run(body())


# -- what is refused ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def scene(
    api: Api, way: str, *, blocks: bool = False, **options: Any
) -> AsyncIterator[tuple[Ends, Stock, Stock]]:
    """A source and a destination that are as they were once everything has been refused, on a link that still works."""
    async with ends(api, way, **options) as e:
        shape = desc(SIZES["large"] // 100)
        source = await e.source(shape, blocks=blocks)
        destination = await e.destination(shape, blocks=blocks)
        yield e, source, destination
        assert destination.untouched, "a refused push wrote to the destination"
        if blocks:
            await e.push_blocks(source, [1], [2])
            check(destination, *((tensor, 2, source.arrays[tensor][1]) for tensor in range(4)))
        else:
            await e.push(destination, source, 1, entry=2)
            check(destination, *((tensor, 2, source.arrays[tensor][1]) for tensor in range(4)))
        assert e.pusher.counters["links_up"] == 1


async def check_refusals(cases: dict[str, tuple[LLMStatusCode, Callable[[], Any]]], *, early: bool = False) -> None:
    for name, (status, call) in cases.items():
        error = await Ends.refused(call, early=early)
        assert error.status_code is status, (name, error)


@each_face
@pytest.mark.parametrize("way", ["tcp", "mapped"])
def test_p10_a_push_that_cannot_be_says_why(way: str, api: Api) -> None:
    async def body() -> None:
        async with scene(api, way) as (e, source, destination):
            key, push = CacheKeyByIdAndIndex, e.pusher.cache_manager.push_cache
            there, here = destination.cache.cache_id, source.cache
            host = CacheDesc(4, [3, SIZES["large"] // 100], DataType.DT_UINT8, placement=Placement.HOST)
            closed = await e.destination(desc(64), remote_accessible=False, by_address=True)
            closed_source = await e.source(desc(64), remote_accessible=False, by_address=True)
            on_host = await e.source(host, by_address=True)
            paged, gone = await e.destination(desc(64), blocks=True), await e.source(desc(64))
            await api.do(e.pusher.cache_manager.deallocate_cache, gone.cache)
            gone_there = await e.destination(desc(64))
            await api.do(e.receiver.cache_manager.deallocate_cache, gone_there.cache)

            def to(cluster: int, cache_id: int, entry: int, *where: Any, of: Any = here, **options: Any) -> Any:
                return lambda: api.do(push, key(cluster, cache_id, entry), of, *where, **options)

            await check_refusals(
                {
                    "unknown cluster": (LLMStatusCode.LLM_NOT_YET_LINK, to(99, there, 0)),
                    "own cluster": (PI, to(e.pusher.cluster_id, there, 0)),
                    "unknown cache": (GONE, to(RECEIVER, 10**9, 0)),
                    "released there": (GONE, to(RECEIVER, gone_there.cache.cache_id, 0)),
                    "released here": (GONE, to(RECEIVER, there, 0, of=gone.cache)),
                    "closed there": (PI, to(RECEIVER, closed.cache.cache_id, 0)),
                    "closed here": (PI, to(RECEIVER, there, 0, of=closed_source.cache)),
                    "on the host": (PI, to(RECEIVER, there, 0, of=on_host.cache)),
                    "blocks there": (PI, to(RECEIVER, paged.cache.cache_id, 0)),
                    "entry there": (PI, to(RECEIVER, there, 3)),
                    "entry here": (PI, to(RECEIVER, there, 0, 3)),
                    "layer there": (PI, to(RECEIVER, there, 0, 0, range(2), range(1, 3))),
                },
            )
            await check_refusals(
                {
                    "layer here": (PI, to(RECEIVER, there, 0, 0, range(1, 3), range(2))),
                    "far layer": (PI, to(RECEIVER, there, 0, 0, range(1), range(2**40, 2**40 + 1))),
                    "no layers": (PI, to(RECEIVER, there, 0, 0, range(0), range(0))),
                    "steps": (PI, to(RECEIVER, there, 0, 0, range(0, 2, 2), range(1))),
                    "other count": (PI, to(RECEIVER, there, 0, 0, range(2), range(1))),
                    "size": (PI, to(RECEIVER, there, 0, size=64)),
                    "no tensors": (PI, to(RECEIVER, there, 0, tensor_num_per_layer=0)),
                    "parts of layers": (PI, to(RECEIVER, there, 0, tensor_num_per_layer=3)),
                    "fewer tensors": (PI, to(RECEIVER, there, 0, tensor_num_per_layer=8)),
                },
                early=True,
            )
            for wrong in (None, CacheKey(RECEIVER, 1), BlocksCacheKey(RECEIVER)):
                with pytest.raises(TypeError):
                    await api.do(push, wrong, here)
            for arguments in ((None,), (here, True), (here, 1.0), (here, 0, 3), (here, 0, None, None, -1, "2")):
                with pytest.raises(TypeError):
                    await api.do(push, key(RECEIVER, there, 0), *arguments)
            with pytest.raises(ValueError, match="src_batch_index"):
                await api.do(push, key(RECEIVER, there, 0), here, -1)

    api.run(body())


@each_face
@pytest.mark.parametrize("way", ["tcp", "mapped"])
def test_p10_blocks_that_cannot_be_pushed_are_refused(way: str, api: Api) -> None:
    async def body() -> None:
        async with scene(api, way, blocks=True) as (e, source, _):
            push = e.pusher.cache_manager.push_blocks
            plain, other = await e.source(desc(64)), await e.source(desc(64), blocks=True)

            def to(src: Any, dst: Any, *where: Any, model: int = 0, of: Any = source.cache, **options: Any) -> Any:
                return lambda: api.do(push, BlocksCacheKey(RECEIVER, model), of, src, dst, *where, **options)

            await check_refusals(
                {
                    "unknown model": (GONE, to([0], [0], model=5)),
                    "unknown cluster": (
                        LLMStatusCode.LLM_NOT_YET_LINK,
                        lambda: api.do(push, BlocksCacheKey(99), source.cache, [0], [0]),
                    ),
                    "block here": (PI, to([3], [0])),
                    "block there": (PI, to([0], [3])),
                    "other size": (PI, to([0], [0], of=other.cache)),
                    "layer there": (PI, to([0], [0], range(1), range(2, 3))),
                },
            )
            await check_refusals(
                {
                    "not blocks": (PI, to([0], [0], of=plain.cache)),
                    "no destination": (PI, to([0], [])),
                    "no source": (PI, to([], [0])),
                    "other count": (PI, to([0, 1], [0])),
                    "below 0": (PI, to([-1], [0])),
                    "twice": (PI, to([0, 1], [2, 2])),
                    "no layers": (PI, to([0], [0], range(0), range(0))),
                    "parts of layers": (PI, to([0], [0], tensor_num_per_layer=3)),
                },
                early=True,
            )
            for wrong in (None, CacheKeyByIdAndIndex(RECEIVER, 1, 0)):
                with pytest.raises(TypeError):
                    await api.do(push, wrong, source.cache, [0], [0])

    api.run(body())


@each_face
@pytest.mark.parametrize("off", ["pusher", "receiver"])
def test_p7_pushing_needs_remote_access_on_both_sides(api: Api, off: str) -> None:
    async def body() -> None:
        without = {"enable_remote_cache_accessible": False}
        options = {
            **(without if off == "pusher" else {}),
            "theirs": {"enable_remote_cache_accessible": off == "pusher"},
        }
        async with ends(api, "tcp", **options) as e:
            for blocks in (False, True):
                source = await e.source(desc(64), blocks=blocks)
                destination = await e.destination(desc(64), blocks=blocks)
                push = (e.push_blocks, source, [0], [0]) if blocks else (e.push, destination, source)
                error = await e.refused(*push, early=off == "pusher")
                assert error.status_code is PI
                assert "remote" in str(error)
                assert destination.untouched

    api.run(body())
