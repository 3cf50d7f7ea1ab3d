"""How keys are bound to batch entries and blocks when caches are allocated or registered."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvpull_async import BlocksCacheKey, CacheKey, LLMStatusCode
from tests.conformance.api import AWAITED, BLOCKING
from tests.conformance.row import PI, delivered, failure, is_error, key, lacks
from tests.conformance.rule import RuleCase, Rules
from tests.conformance.scene import INVALID_ID, NEW, OLD, SOURCE, Layout, Scene

RULES = Rules()
rule = RULES.rule

LAYER = {"src_layer_range": range(1), "dst_layer_range": range(1)}
OTHER_LAYER = {"src_layer_range": range(1, 2), "dst_layer_range": range(1, 2)}
BLOCKS = Layout(shape=(8, 64))  # of 128 bytes: four of them hold an entry of `s`
SMALL_POOL = (("llm.MemPoolConfig", json.dumps({"memory_size": 20 * 1024})),)
"""`s` takes 8 KiB of it; a second cache fits, a third does not."""


# -- how keys are bound ------------------------------------------------------------------------------------------------


@rule()
async def the_nth_key_names_the_nth_entry_and_later_entries_have_none(f: Scene) -> None:
    cache = await f.publish([key(41), key(42)])
    await delivered(f, key(42), cache, 1)
    await delivered(f, key(41), cache, 0)


@rule()
async def more_keys_than_entries_are_refused(f: Scene) -> None:
    error = await failure(lambda: f.publish([key(50 + number) for number in range(5)]))
    assert is_error(error, PI)
    await lacks(f, key(50))


@rule(OLD)
@rule(NEW, differs="padding-keys-may-repeat")
async def padding_keys_may_repeat(f: Scene) -> None:
    cache = await f.publish([key(INVALID_ID), key(51), key(INVALID_ID), key(52)])
    await delivered(f, key(51), cache, 1)
    await delivered(f, key(52), cache, 3)


@rule()
async def a_key_bound_elsewhere_is_refused_and_stays_where_it_is(f: Scene) -> None:
    error = await failure(lambda: f.publish([key(61), f.r[2]]))
    assert is_error(error, PI if f.setup.manager == NEW else LLMStatusCode.LLM_FAILED)
    await lacks(f, key(61))
    await delivered(f, f.r[2], f.s, 2)
    await lacks(f, f.r[2])
    cache = await f.publish([key(61), f.r[2]])  # consumed, so free again
    await delivered(f, f.r[2], cache, 1)


@rule(options=SMALL_POOL)
async def keys_that_were_refused_cost_no_memory(f: Scene) -> None:
    for _ in range(5):
        await failure(lambda: f.publish([f.r[0]]))
    await f.publish([key(61)])


@rule(NEW)
async def a_key_twice_in_one_call_is_refused(f: Scene) -> None:
    assert is_error(await failure(lambda: f.publish([key(71), key(71)])), PI)
    await lacks(f, key(71))


@rule(OLD)
async def a_key_twice_in_one_call_names_its_last_entry(f: Scene) -> None:
    cache = await f.publish([key(71), key(72), key(71)])
    await delivered(f, key(72), cache, 1)
    await delivered(f, key(71), cache, 2)
    await lacks(f, key(71))


@rule(differs="keys-do-not-collide")
async def equal_numbers_of_other_models_and_kinds_are_other_keys(f: Scene) -> None:
    prefix = key(INVALID_ID, prefix_id=80)
    cache = await f.publish([key(80), key(80, model_id=1), prefix, key(81, model_id=1)])
    await delivered(f, key(80, model_id=1), cache, 1)
    await lacks(f, key(80, model_id=1))
    await delivered(f, prefix, cache, 2)
    await delivered(f, key(80), cache, 0)
    await lacks(f, key(80))
    await delivered(f, key(81, model_id=1), cache, 3)
    await delivered(f, prefix, cache, 2)


@rule(NEW, differs="keys-do-not-collide")
async def padding_does_not_collide_with_a_blocks_key(f: Scene) -> None:
    source = await f.api.do(f.source.cache_manager.allocate_blocks_cache, BLOCKS.desc(), BlocksCacheKey(SOURCE, 0))
    cache = await f.publish([key(INVALID_ID), key(91)])
    await delivered(f, key(91), cache, 1)
    await f.api.do(f.source.cache_manager.deallocate_blocks_cache, source)


@rule()
async def a_key_with_both_ids_is_bound_as_a_prefix(f: Scene) -> None:
    cache = await f.publish([key(95, prefix_id=96)])
    await lacks(f, key(95))
    await delivered(f, key(INVALID_ID, prefix_id=96), cache)


@rule()
async def the_cluster_in_a_key_only_chooses_the_link(f: Scene) -> None:
    cache = await f.publish([CacheKey(99, 97)])
    await delivered(f, CacheKey(SOURCE, 97), cache)


@rule(NEW)
async def registering_a_key_again_changes_nothing(f: Scene) -> None:
    first = await f.register([key(21)])
    second = await f.register([key(21), key(22)])
    await delivered(f, key(21), first)
    await delivered(f, key(22), second, 1)


@rule(NEW)
async def registering_a_blocks_key_again_moves_it(f: Scene) -> None:
    blocks = BlocksCacheKey(SOURCE, 4)
    manager = f.source.cache_manager
    target = await f.api.do(f.destination.cache_manager.allocate_blocks_cache, BLOCKS.desc())
    for _ in range(2):
        source = await f.api.do(manager.register_blocks_cache, BLOCKS.desc(), f.memory(BLOCKS), blocks)
        f.fill(source)
        await f.pull_blocks(blocks, target, [1], [1])
        assert np.array_equal(f.content(target)[:, 1], f.image(source)[:, 1])


@rule(NEW)
async def ids_count_up_from_one(f: Scene) -> None:
    assert f.s.cache_id == 1
    registered = await f.register([])
    allocated = await f.publish([])
    assert 1 < registered.cache_id < allocated.cache_id


@pytest.mark.parametrize("case", RULES.cases(), ids=str)
async def test_rule_awaited(case: RuleCase) -> None:
    await case.play(AWAITED)


@pytest.mark.parametrize("case", RULES.cases(), ids=str)
def test_rule_blocking(case: RuleCase) -> None:
    BLOCKING.run(case.play(BLOCKING))
