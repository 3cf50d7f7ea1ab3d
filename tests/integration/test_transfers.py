"""`transfer_cache_async` between real nodes: every byte and those around, and layers as they are computed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvpull_async import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from tests import duo, npu
from tests.conformance.api import AWAITED, BLOCKING, Api
from tests.integration.content import content
from tests.integration.pushing import CANARY, PUSHER, RECEIVER, SIZES, WAYS, Ends, desc, ends, options_for
from tests.integration.transfers import BY_ADDRESS, OK, PI, addresses, check, sent, transfer
from tests.transferring import Held, Ready, ReadyLater

BLOCK = {"inline": 40, "large": 200_000}
"""Two and a half to an entry, three and a half."""
THIRD = 13

each_size = pytest.mark.parametrize("size", SIZES)
each_way = pytest.mark.parametrize("way", WAYS)
each_face = pytest.mark.parametrize("api", [AWAITED, BLOCKING], ids=lambda api: api.name)


def entry_slices(row: Any, block: int) -> list[Any]:
    return [row[at : at + block] for at in range(0, row.size, block)]


# -- what lands --------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@each_way
@each_size
@each_face
def test_an_entry_lands_at_the_addresses(way: str, size: str, api: Api) -> None:
    async def body() -> None:
        async with ends(api, way, **BY_ADDRESS) as e:
            source, destination = await e.source(desc(SIZES[size])), await e.destination(desc(SIZES[size], tensors=6))
            assert await sent(e, source, [TransferConfig(RECEIVER, addresses(destination, entry=1))]) == [OK]
            check(destination, *((tensor, 1, source.arrays[tensor][0]) for tensor in range(4)))
            one = TransferConfig(RECEIVER, addresses(destination, range(2, 3), entry=2), range(1, 2), 2)
            assert await sent(e, source, [one]) == [OK]
            check(destination, *((2 + tensor, 2, source.arrays[tensor][2]) for tensor in (2, 3)))

    api.run(body())


@each_way
@each_size
@each_face
def test_an_entry_lands_in_blocks_the_last_of_which_may_be_short(way: str, size: str, api: Api) -> None:
    async def body() -> None:
        async with ends(api, way, **BY_ADDRESS) as e:
            block = BLOCK[size]
            source = await e.source(desc(SIZES[size]))
            destination = await e.destination(desc(block, entries=6), blocks=True)
            blocks = [4, 0, 2, 5][: -(-SIZES[size] // block)]
            config = TransferConfig(RECEIVER, addresses(destination), src_batch_index=1)
            assert await sent(e, source, [config], None, blocks, block) == [OK]
            slices = [entry_slices(array[1], block) for array in source.arrays]
            assert slices[0][-1].size < block
            check(
                destination,
                *((t, number, piece) for t in range(4) for number, piece in zip(blocks, slices[t], strict=True)),
            )
            assert await sent(e, source, [config], (), blocks[:1], block) == [OK], "a part of the entry"
            check(destination, *((tensor, blocks[0], slices[tensor][0]) for tensor in range(4)))
            too_many = [*blocks, 1]
            assert await sent(e, source, [config], None, too_many, block) == [PI]
            assert destination.untouched

    api.run(body())


@each_way
@each_size
@each_face
def test_blocks_land_in_blocks(way: str, size: str, api: Api) -> None:
    async def body() -> None:
        async with ends(api, way, **BY_ADDRESS) as e:
            block = BLOCK[size]
            source = await e.source(desc(block, entries=5), blocks=True)
            destination = await e.destination(desc(block, entries=6), blocks=True)
            src, dst = [3, 4, 0], [1, 2, 5]
            config = TransferConfig(RECEIVER, addresses(destination))
            for nbytes in (None, block):
                assert await sent(e, source, [config], src, dst, nbytes) == [OK]
                check(
                    destination,
                    *((t, to, source.arrays[t][of]) for t in range(4) for of, to in zip(src, dst, strict=True)),
                )
            for wrong in (([3, 4, 5], dst), (src, [1, 2, 6])):
                assert await sent(e, source, [config], *wrong) == [PI]
                assert destination.untouched

    api.run(body())


@each_way
@each_size
@each_face
def test_by_key_into_an_entry_and_the_layers_that_are_named(way: str, size: str, api: Api) -> None:
    async def body() -> None:
        async with ends(api, way) as e:
            source = await e.source(desc(SIZES[size], tensors=8))
            destination = await e.destination(desc(SIZES[size], tensors=8))
            key = CacheKeyByIdAndIndex(RECEIVER, destination.cache.cache_id, 2)
            config = TransferWithCacheKeyConfig(key, range(1, 3), range(2, 4), 1)
            assert await sent(e, source, [config]) == [OK]
            check(destination, *((tensor + 2, 2, source.arrays[tensor][1]) for tensor in range(2, 6)))
            beyond = TransferWithCacheKeyConfig(key, range(2), range(4, 6), 1)
            assert await sent(e, source, [beyond]) == [PI]
            assert destination.untouched

    api.run(body())


@each_way
@each_face
def test_by_key_into_blocks(way: str, api: Api) -> None:
    async def body() -> None:
        async with ends(api, way) as e:
            block = BLOCK["inline"]
            entries, blocks = await e.source(desc(96)), await e.source(desc(block, entries=5), blocks=True)
            destination = await e.destination(desc(block, entries=6), blocks=True, model=3)
            config = TransferWithCacheKeyConfig(BlocksCacheKey(RECEIVER, 3), range(1, 2), range(1))
            assert await sent(e, blocks, [config], [3, 1], [0, 5]) == [OK]
            pairs = ((3, 0), (1, 5))
            check(destination, *((t - 2, to, blocks.arrays[t][of]) for t in (2, 3) for of, to in pairs))
            assert await sent(e, entries, [config], [], [5, 1, 2], block) == [OK]
            slices = [entry_slices(array[0], block) for array in entries.arrays]
            placed = [(t - 2, to, slices[t][i]) for t in (2, 3) for i, to in enumerate((5, 1, 2))]
            check(destination, *placed)

    api.run(body())


@each_face
def test_host_caches_are_sent_like_any_other(api: Api) -> None:
    async def body() -> None:
        async with ends(api, "tcp", **BY_ADDRESS) as e:
            shape = desc(96)
            host = type(shape)(4, list(shape.shape), shape.data_type, Placement.HOST)
            source, destination = await e.source(host), await e.destination(host)
            assert await sent(e, source, [TransferConfig(RECEIVER, addresses(destination))]) == [OK]
            check(destination, *((tensor, 0, source.arrays[tensor][0]) for tensor in range(4)))

    api.run(body())


# -- several configs ---------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def third(e: Ends, way: str, **more: Any) -> AsyncIterator[Any]:
    """One more node, which has dialled the pusher."""
    node = e.api.package.LLMDataDist(LLMRole.MIX, THIRD)
    try:
        await e.api.do(node.init, duo.options(**options_for(way, **more)))
        info = duo.cluster(PUSHER, e.pusher.listen_address)
        assert await e.api.do(node.link_clusters, [info], duo.TIMEOUT_MS) == (duo.OK, [duo.OK])
        await e.api.until(lambda: duo.engine_of(e.pusher).links.find(THIRD) is not None)
        yield node
    finally:
        await e.api.do(node.finalize)


@each_way
@each_face
def test_one_layer_goes_to_two_clusters(way: str, api: Api) -> None:
    async def body() -> None:
        async with ends(api, way, **BY_ADDRESS) as e, third(e, way, **BY_ADDRESS) as other:
            source, here = await e.source(desc(96)), await e.destination(desc(96))
            there = await e.stock(other, desc(96))
            there.set_canary()
            ready = Ready()
            configs = [
                TransferConfig(RECEIVER, addresses(here, entry=1)),
                TransferConfig(THIRD, addresses(there, range(1, 2), entry=2), range(1, 2), 1),
            ]
            assert await sent(e, source, configs, ready=ready) == [OK, OK]
            assert ready.layers == [0, 1]
            check(here, *((tensor, 1, source.arrays[tensor][0]) for tensor in range(4)))
            check(there, *((tensor, 2, source.arrays[tensor][1]) for tensor in (2, 3)))

    api.run(body())


@each_way
@each_face
def test_two_configs_of_one_cluster_have_their_own_ends(way: str, api: Api) -> None:
    async def body() -> None:
        async with ends(api, way, **BY_ADDRESS) as e:
            source, destination = await e.source(desc(96)), await e.destination(desc(96))
            one = TransferConfig(RECEIVER, addresses(destination, entry=0), src_batch_index=1)
            two = TransferConfig(RECEIVER, addresses(destination, entry=2))
            assert await sent(e, source, [one, two]) == [OK, OK]
            placed = [(t, to, source.arrays[t][of]) for t in range(4) for of, to in ((1, 0), (0, 2))]
            check(destination, *placed)
            bad = TransferConfig(RECEIVER, addresses(destination), src_batch_index=3)
            assert await sent(e, source, [one, bad, two]) == [None, PI, None], "all of layer 0 went, and no more"
            check(destination, *(piece for piece in placed if piece[0] < 2))

    api.run(body())


# -- while it is computed ----------------------------------------------------------------------------------------------


@each_way
@each_size
@each_face
def test_a_layer_is_sent_when_it_has_been_computed_and_not_before(way: str, size: str, api: Api) -> None:
    """Each layer is made while it is asked for; by then the one before has landed, whole."""

    async def body() -> None:
        async with ends(api, way, **BY_ADDRESS) as e:
            source, destination = await e.source(desc(SIZES[size])), await e.destination(desc(SIZES[size]))
            landed: list[bool] = []

            def compute(layer: int) -> bool:
                if layer:
                    before = range(2 * layer - 2, 2 * layer)
                    landed.append(all(np.array_equal(destination.arrays[t][0], source.arrays[t][0]) for t in before))
                for tensor in range(2 * layer, 2 * layer + 2):
                    source.arrays[tensor][0] = content(7, tensor, 0, nbytes=SIZES[size])
                return True

            config = TransferConfig(RECEIVER, addresses(destination))
            assert await sent(e, source, [config], ready=Ready(compute)) == [OK]
            assert landed == [True]
            check(destination, *((t, 0, content(7, t, 0, nbytes=SIZES[size])) for t in range(4)))

    api.run(body())


@each_way
async def test_a_coroutine_may_say_when_a_layer_is_ready(way: str) -> None:
    async with ends(AWAITED, way, **BY_ADDRESS) as e:
        source, destination = await e.source(desc(96)), await e.destination(desc(96))
        gates = [asyncio.Event(), asyncio.Event()]

        class Computed(ReadyLater):
            async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
                await gates[layer_index].wait()
                return True

        task = transfer(e, source, [TransferConfig(RECEIVER, addresses(destination))], ready=Computed())
        gates[0].set()
        await AWAITED.until(lambda: np.array_equal(destination.arrays[1][0], source.arrays[1][0]))
        assert (destination.arrays[2][0] == CANARY).all(), "layer 1 is not ready"
        assert await task.synchronize(1) is LLMStatusCode.LLM_TIMEOUT
        gates[1].set()
        assert await task is OK
        check(destination, *((tensor, 0, source.arrays[tensor][0]) for tensor in range(4)))


@each_way
@each_face
def test_the_older_manager_sends_from_a_prompt_node(way: str, api: Api) -> None:
    async def body() -> None:
        nodes = [api.package.LLMDataDist(role, number) for role, number in ((LLMRole.PROMPT, 1), (LLMRole.DECODER, 2))]
        prompt, decoder = nodes
        try:
            backend = way if way in ("inproc", "tcp") else "shm"
            await api.do(prompt.init, duo.options(listen=True, transport=backend))
            await api.do(decoder.init, duo.options(transport=backend))
            info = duo.cluster(1, prompt.listen_address)
            assert await api.do(decoder.link_clusters, [info], duo.TIMEOUT_MS) == (duo.OK, [duo.OK])
            source = await api.do(prompt.kv_cache_manager.allocate_cache, duo.SMALL)
            destination = await api.do(decoder.kv_cache_manager.allocate_cache, duo.SMALL)
            duo.fill(source)
            place = [npu.address(array[3]) for array in duo.arrays(destination)]
            held = Held()
            send = prompt.kv_cache_manager.transfer_cache_async
            task = send(source, held, [TransferConfig(2, place, src_batch_index=1)])
            assert await api.do(task.synchronize, 1) is LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
            held.let_go()
            assert await api.do(task.synchronize) is OK
            assert duo.holds(destination, entry=3, source=1)
            assert not any(array[:3].any() for array in duo.arrays(destination))
            await api.do(prompt.kv_cache_manager.deallocate_cache, source)
            await api.do(decoder.kv_cache_manager.deallocate_cache, destination)
        finally:
            for node in nodes:
                await api.do(node.finalize)

    api.run(body())
