"""What a pull does to the key it used, and what keeps a cache alive."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvpull_async import BlocksCacheKey, LLMException
from tests.conformance.api import AWAITED, BLOCKING
from tests.conformance.row import KNE, PI, by_id, delivered, failure, is_error, keeps, key, lacks
from tests.conformance.rule import RuleCase, Rules
from tests.conformance.scene import INVALID_ID, NEW, OLD, SOURCE, Layout, Scene, stalled

RULES = Rules()
rule = RULES.rule

LAYER = {"src_layer_range": range(1), "dst_layer_range": range(1)}
OTHER_LAYER = {"src_layer_range": range(1, 2), "dst_layer_range": range(1, 2)}
BLOCKS = Layout(shape=(8, 64))  # of 128 bytes: four of them hold an entry of `s`
SMALL_POOL = (("llm.MemPoolConfig", json.dumps({"memory_size": 20 * 1024})),)
"""`s` takes 8 KiB of it; a second cache fits, a third does not."""


async def memory_is_free(f: Scene) -> bool:
    """Whether the pool of `SMALL_POOL` has room for two caches, as it has when `s` is gone."""
    manager = f.of(f.source)
    first = await f.api.do(manager.allocate_cache, Layout().desc())
    try:
        second = await f.api.do(manager.allocate_cache, Layout().desc())
    except LLMException:
        return False
    else:
        await f.api.do(manager.deallocate_cache, second)
        return True
    finally:
        await f.api.do(manager.deallocate_cache, first)


# -- what consumes a key -----------------------------------------------------------------------------------------------


@rule()
async def a_whole_pull_consumes_its_key_and_no_other(f: Scene) -> None:
    await delivered(f, f.r[1], f.s, 1)
    await lacks(f, f.r[1])
    for number in (0, 2, 3):
        await keeps(f, f.r[number])


@rule()
async def a_pull_by_id_consumes_the_key_of_that_entry(f: Scene) -> None:
    await delivered(f, by_id(f.s, 3), f.s, 3)
    await lacks(f, f.r[3])
    await keeps(f, f.r[2])


@rule()
async def a_pull_by_id_of_an_entry_without_key_consumes_nothing(f: Scene) -> None:
    cache = await f.publish([key(11)])
    await delivered(f, by_id(cache, 1), cache, 1)
    await delivered(f, by_id(cache, 1), cache, 1)
    await keeps(f, key(11))


@rule()
async def few_bytes_consume_as_well_as_all(f: Scene) -> None:
    await f.pull(f.r[0], f.d, size=1)
    await lacks(f, f.r[0])


@rule()
async def a_prefix_key_stays_until_it_is_removed(f: Scene) -> None:
    prefix = key(INVALID_ID, prefix_id=7)
    cache = await f.publish([prefix])
    for _ in range(2):
        await delivered(f, prefix, cache)
    await f.api.do(f.of(f.source).remove_cache_key, prefix)
    await lacks(f, prefix)


@rule(NEW)
async def a_registered_cache_keeps_its_keys(f: Scene) -> None:
    cache = await f.register([key(21)])
    for _ in range(2):
        await delivered(f, key(21), cache)
    await f.api.do(f.source.cache_manager.remove_cache_key, key(21))
    await delivered(f, key(21), cache)
    await f.api.do(f.source.cache_manager.unregister_cache, cache.cache_id)
    await lacks(f, key(21))


@rule()
async def a_blocks_key_is_not_consumed(f: Scene) -> None:
    blocks = BlocksCacheKey(SOURCE, 3)
    source = await f.api.do(f.of(f.source).allocate_blocks_cache, BLOCKS.desc(), blocks)
    f.fill(source)
    target = await f.api.do(f.of(f.destination).allocate_blocks_cache, BLOCKS.desc())
    for _ in range(2):
        await f.pull_blocks(blocks, target, [1, 2], [5, 6])
    assert np.array_equal(f.content(target)[:, 5:7], f.image(source)[:, 1:3])
    for cache, node in ((source, f.source), (target, f.destination)):
        manager = f.of(node)
        await f.api.do(getattr(manager, "deallocate_blocks_cache", manager.deallocate_cache), cache)


@rule(NEW)
async def cutting_an_entry_into_blocks_consumes_its_key(f: Scene) -> None:
    target = await f.api.do(f.destination.cache_manager.allocate_blocks_cache, BLOCKS.desc())
    await f.pull_blocks(f.r[0], target, [], [7, 0, 3, 1])
    entry = f.image(f.s)[:, 0].reshape(4, 4, 128)
    assert np.array_equal(f.content(target)[:, [7, 0, 3, 1]], entry)
    await lacks(f, f.r[0])
    await f.api.do(f.destination.cache_manager.deallocate_blocks_cache, target)


@rule()
async def layers_are_ticked_off_until_all_were_pulled(f: Scene) -> None:
    await f.pull(f.r[0], f.d, **LAYER)
    await f.pull(f.r[0], f.d, **LAYER)
    await keeps(f, f.r[0])
    await f.pull(f.r[0], f.d, **OTHER_LAYER)
    await lacks(f, f.r[0])


@rule()
async def layers_are_ticked_off_by_id_too(f: Scene) -> None:
    await f.pull(by_id(f.s), f.d, **LAYER)
    await f.pull(f.r[0], f.d, **OTHER_LAYER)
    await lacks(f, f.r[0])


@rule(OLD)
@rule(NEW, differs="layers-are-ticked-off-per-key")
async def each_key_has_its_own_ticks(f: Scene) -> None:
    await f.pull(f.r[0], f.d)
    await f.pull(f.r[1], f.d, **LAYER)
    await keeps(f, f.r[1])
    await f.pull(f.r[2], f.d, **OTHER_LAYER)
    await keeps(f, f.r[2])
    await f.pull(f.r[1], f.d, **OTHER_LAYER)
    await lacks(f, f.r[1])


@rule()
async def a_whole_pull_consumes_whatever_was_ticked_off_before(f: Scene) -> None:
    await f.pull(f.r[0], f.d, **LAYER)
    await delivered(f, f.r[0], f.s)
    await lacks(f, f.r[0])


@rule(s=Layout(tensors=2))
async def a_destination_range_alone_pulls_the_whole_source(f: Scene) -> None:
    target = await f.allocate(Layout(tensors=4))
    await f.pull(f.r[0], target, dst_layer_range=range(1, 2))
    assert np.array_equal(f.content(target)[2:, 0], f.image(f.s)[:, 0])
    await lacks(f, f.r[0])


@rule(OLD)
@rule(NEW, differs="offsets-work-in-both-managers")
async def an_offset_even_of_zero_consumes_nothing(f: Scene) -> None:
    for offsets in ({"src_cache_offset": 0}, {"dst_cache_offset": 0}, {"src_cache_offset": 8, "dst_cache_offset": 8}):
        await f.pull(f.r[0], f.d, **offsets)
    await f.pull(f.r[0], f.d, src_cache_offset=0, **OTHER_LAYER)
    await f.pull(f.r[0], f.d, **LAYER)
    await keeps(f, f.r[0])
    await f.pull(f.r[0], f.d, src_cache_offset=None, dst_cache_offset=None)
    await lacks(f, f.r[0])


@rule(NEW, remote_access=True)
async def remote_access_consumes_nothing(f: Scene) -> None:
    for _ in range(2):
        await delivered(f, by_id(f.s, 1), f.s, 1)
    # Keys themselves are refused in this mode, so that the key is still there shows at the source only.
    error = await failure(lambda: f.publish([f.r[1]]))
    assert is_error(error, PI), "the key was consumed"


@rule()
async def a_refused_pull_consumes_nothing(f: Scene) -> None:
    for refused in ({"size": 513}, {"batch_index": 4}, {"dst_layer_range": range(1)}, {"src_cache_offset": 512}):
        error = await failure(lambda refused=refused: f.pull(f.r[0], f.d, **refused))  # type: ignore[misc]
        assert is_error(error, PI)
    await delivered(f, f.r[0], f.s)


@rule(differs="confirmed-key-consumption")
async def a_pull_that_timed_out_consumes_nothing(f: Scene) -> None:
    with stalled(f.source):
        error = await failure(lambda: f.pull(f.r[0], f.d, timeout=100))
        assert isinstance(error, TimeoutError)
    await delivered(f, f.r[0], f.s)
    await lacks(f, f.r[0])


# -- what keeps a cache alive ------------------------------------------------------------------------------------------


@rule(options=SMALL_POOL)
async def keys_keep_a_deallocated_cache_until_the_last_is_pulled(f: Scene) -> None:
    await f.api.do(f.of(f.source).deallocate_cache, f.s)
    await delivered(f, f.r[0], f.s)
    await delivered(f, by_id(f.s, 1), f.s, 1)
    await delivered(f, f.r[2], f.s, 2)
    await lacks(f, f.r[2])
    assert not await memory_is_free(f)
    await delivered(f, by_id(f.s, 2), f.s, 2)  # by id even where the entry's own key has gone
    await delivered(f, f.r[3], f.s, 3)
    await lacks(f, f.r[3])
    assert await memory_is_free(f)
    await lacks(f, by_id(f.s, 3))


@rule(options=SMALL_POOL)
async def removing_the_last_key_releases_a_deallocated_cache(f: Scene) -> None:
    manager = f.of(f.source)
    await f.api.do(manager.deallocate_cache, f.s)
    for number, used in enumerate(f.r):
        assert not await memory_is_free(f), number
        await f.api.do(manager.remove_cache_key, used)
    assert await memory_is_free(f)


@rule(options=SMALL_POOL)
async def a_cache_outlives_its_keys_until_it_is_deallocated(f: Scene) -> None:
    for used in f.r:
        await f.pull(used, f.d)
    await lacks(f, f.r[3])
    assert not await memory_is_free(f)
    await delivered(f, by_id(f.s, 3), f.s, 3)
    await f.api.do(f.of(f.source).deallocate_cache, f.s)
    assert await memory_is_free(f)
    await lacks(f, by_id(f.s, 3))


@rule(options=SMALL_POOL)
async def padding_keeps_nothing_alive(f: Scene) -> None:
    cache = await f.publish([key(INVALID_ID), key(INVALID_ID)])
    await f.api.do(f.of(f.source).deallocate_cache, cache)
    await lacks(f, by_id(cache))
    for used in f.r:
        await f.api.do(f.of(f.source).remove_cache_key, used)
    await f.api.do(f.of(f.source).deallocate_cache, f.s)
    assert await memory_is_free(f)


@rule()
async def a_removed_key_forgets_its_ticks(f: Scene) -> None:
    cache = await f.publish([key(31)])
    await f.pull(key(31), f.d, **LAYER)
    await f.api.do(f.of(f.source).remove_cache_key, key(31))
    await lacks(f, key(31))
    await f.publish([key(31)])
    await f.pull(key(31), f.d, **OTHER_LAYER)
    await keeps(f, key(31))
    await f.api.do(f.of(f.source).deallocate_cache, cache)


@rule(NEW)
async def a_blocks_cache_goes_at_once_and_its_key_with_it(f: Scene) -> None:
    manager = f.source.cache_manager
    blocks = BlocksCacheKey(SOURCE, 3)
    source = await f.api.do(manager.allocate_blocks_cache, BLOCKS.desc(), blocks)
    target = await f.api.do(f.destination.cache_manager.allocate_blocks_cache, BLOCKS.desc())
    await f.pull_blocks(blocks, target, [0], [0])
    await f.api.do(manager.deallocate_blocks_cache, source)
    assert is_error(await failure(lambda: f.pull_blocks(blocks, target, [0], [0])), KNE)


@rule(NEW)
async def deallocating_leaves_registered_caches_alone(f: Scene) -> None:
    cache = await f.register([key(21)])
    await f.api.do(f.source.cache_manager.deallocate_cache, cache)
    assert cache.tensor_addrs == []
    await keeps(f, key(21))


@rule(NEW)
async def unregistering_leaves_allocated_caches_alone(f: Scene) -> None:
    await f.api.do(f.source.cache_manager.unregister_cache, f.s.cache_id)
    await delivered(f, f.r[0], f.s)


@pytest.mark.parametrize("case", RULES.cases(), ids=str)
async def test_rule_awaited(case: RuleCase) -> None:
    await case.play(AWAITED)


@pytest.mark.parametrize("case", RULES.cases(), ids=str)
def test_rule_blocking(case: RuleCase) -> None:
    BLOCKING.run(case.play(BLOCKING))
