"""The deliberate differences of `transfer_cache_async`. See test_differences.py for the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvpull_async import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from tests.conformance.api import AWAITED, BLOCKING
from tests.conformance.row import PI, failure, is_error
from tests.conformance.rule import RuleCase, Rules
from tests.conformance.scene import DESTINATION, NEW, Layout, Scene
from tests.transferring import Held, Ready

RULES = Rules()
rule = RULES.rule

SUCCESS = LLMStatusCode.LLM_SUCCESS
REMOTE = {"remote_access": True}
FOUR_LAYERS = {"s": Layout(tensors=8), "d": Layout(tensors=8)}


def addresses(cache: Any, layers: range = range(2), *, entry: int = 0) -> list[int]:
    """Of that entry in the tensors of these layers, for a cache of either manager."""
    found = getattr(cache, "tensor_addrs", None) or cache.per_device_tensor_addrs[0]
    return [found[tensor] + entry * 512 for tensor in range(2 * layers.start, 2 * layers.stop)]


def begun(f: Scene, configs: Sequence[Any], *blocks: Any, cache: Any = None, ready: Any = None) -> Any:
    manager = f.of(f.source)
    return manager.transfer_cache_async(f.s if cache is None else cache, ready or Ready(), configs, *blocks)


async def results(f: Scene, configs: Sequence[Any], *blocks: Any, cache: Any = None) -> Any:
    return await f.api.do(begun(f, configs, *blocks, cache=cache).get_results)


@rule(differs="transfer-results-are-per-config")
async def two_configs_of_one_cluster(f: Scene) -> None:
    last = TransferConfig(DESTINATION, addresses(f.d, range(1, 2)), range(1, 2))
    bad = TransferConfig(DESTINATION, [16, 32], range(1, 2))
    first, *others = await results(f, [last, bad, last])
    assert (first, others[1]) == (SUCCESS, SUCCESS)
    assert others[0] not in (SUCCESS, None)
    assert np.array_equal(f.content(f.d)[2:, 0], f.image(f.s)[2:, 0])


@rule(differs="transfer-configs-stay-the-callers")
async def changed_meanwhile(f: Scene) -> None:
    held, config = Held(), TransferConfig(DESTINATION, addresses(f.d, entry=1))
    task = begun(f, [config], ready=held)
    config.dst_addrs, config.dst_cluster_id, config.src_batch_index = [16], 99, 3
    held.let_go()
    assert await f.api.do(task.synchronize) is SUCCESS
    assert config.src_layer_range is None
    assert np.array_equal(f.content(f.d)[:, 1], f.image(f.s)[:, 0])


@rule(NEW, differs="transfer-layers-by-key", **REMOTE, **FOUR_LAYERS)
async def ranges_that_do_not_begin_at_0(f: Scene) -> None:
    key = CacheKeyByIdAndIndex(DESTINATION, f.d.cache_id, 3)
    assert await results(f, [TransferWithCacheKeyConfig(key, range(1, 4), range(1, 4), 2)]) == [SUCCESS]
    assert np.array_equal(f.content(f.d)[2:, 3], f.image(f.s)[2:, 2])
    assert not f.content(f.d)[:2].any()
    assert not f.content(f.d)[:, :3].any()


@rule(differs="transfer-addresses-are-checked")
async def addresses_outside_of_caches(f: Scene) -> None:
    heap = np.zeros(1024, np.uint8)
    good = addresses(f.d, entry=3)
    for wrong in (heap.ctypes.data, good[3] + 1, 4096):
        (status,) = await results(f, [TransferConfig(DESTINATION, [*good[:3], wrong])])
        assert status not in (SUCCESS, None)
    assert not heap.any()
    assert not f.content(f.d)[2:].any(), "nothing of a layer lands of which one address is wrong"
    assert await results(f, [TransferConfig(DESTINATION, good)]) == [SUCCESS]


@rule(NEW, differs="transfers-into-blocks-name-them", **REMOTE)
async def a_blocks_key_without_a_table(f: Scene) -> None:
    async def call() -> Any:
        return begun(f, [TransferWithCacheKeyConfig(BlocksCacheKey(DESTINATION), range(2), range(2))])

    assert is_error(await failure(call), PI)


@rule(NEW, **REMOTE)
async def the_first_block_without_a_table(f: Scene) -> None:
    """As in the original, between blocks caches."""
    source = await f.api.do(f.source.cache_manager.allocate_blocks_cache, Layout().desc())
    f.fill(source)
    blocks = await f.api.do(f.destination.cache_manager.allocate_blocks_cache, Layout().desc(), BlocksCacheKey(2))
    config = TransferWithCacheKeyConfig(BlocksCacheKey(DESTINATION), range(2), range(2))
    assert await results(f, [config], cache=source) == [SUCCESS]
    assert np.array_equal(f.content(blocks)[:, 0], f.image(source)[:, 0])
    assert not f.content(blocks)[:, 1:].any()


@rule(NEW, differs="one-source-per-destination-block")
async def two_sources_for_one_block(f: Scene) -> None:
    async def call() -> Any:
        return begun(f, [TransferConfig(DESTINATION, addresses(f.d))], None, [2, 2], 128)

    assert is_error(await failure(call), PI)


@rule(differs="none-is-a-type-error")
async def none_as_an_argument(f: Scene) -> None:
    manager, configs = f.of(f.source), [TransferConfig(DESTINATION, addresses(f.d))]
    for arguments in ((None, Ready(), configs), (f.s, None, configs), (f.s, Ready(), None), (f.s, Ready(), [None])):

        async def call(arguments: Any = arguments) -> Any:
            return manager.transfer_cache_async(*arguments)

        assert type(await failure(call)) is TypeError


@pytest.mark.parametrize("case", RULES.cases(), ids=str)
async def test_difference_awaited(case: RuleCase) -> None:
    await case.play(AWAITED)


@pytest.mark.parametrize("case", RULES.cases(), ids=str)
def test_difference_blocking(case: RuleCase) -> None:
    BLOCKING.run(case.play(BLOCKING))
