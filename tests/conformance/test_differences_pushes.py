"""The deliberate differences of `push_cache` and `push_blocks`. See test_differences.py for the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpull_async import BlocksCacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from tests.conformance.api import AWAITED, BLOCKING
from tests.conformance.row import PI, failure, is_error
from tests.conformance.rule import RuleCase, Rules
from tests.conformance.scene import DESTINATION, NEW, Layout, Scene, stalled

RULES = Rules()
rule = RULES.rule

REMOTE = {"remote_access": True}
FOUR_LAYERS = {"s": Layout(tensors=8), "d": Layout(tensors=8)}


def to(cache: Any, entry: int = 0) -> CacheKeyByIdAndIndex:
    return CacheKeyByIdAndIndex(DESTINATION, cache.cache_id, entry)


async def push(f: Scene, key: Any, cache: Any, *args: Any, **options: Any) -> None:
    await f.api.do(f.source.cache_manager.push_cache, key, cache, *args, **options)


async def refused(f: Scene, expected: LLMStatusCode, *args: Any, **options: Any) -> Any:
    error = await failure(lambda: push(f, *args, **options))
    assert is_error(error, expected), error
    return error


@rule(NEW, differs="pushes-go-as-one", **REMOTE, **FOUR_LAYERS)
async def one_answer_for_all_layers(f: Scene) -> None:
    await refused(f, PI, to(f.d, 1), f.s, 2, range(4), range(1, 5))  # only the last layer has no place
    assert not f.content(f.d).any(), "an earlier layer of a refused push was written"
    await push(f, to(f.d, 1), f.s, 2)
    assert np.array_equal(f.content(f.d)[:, 1], f.image(f.s)[:, 2])
    counted = f.source.counters, f.destination.counters
    assert counted[0]["pushes_finished"] == counted[1]["receives"] == 1


@rule(NEW, differs="pushes-need-whole-layers", **REMOTE)
async def tensors_that_make_no_whole_layers(f: Scene) -> None:
    for number in (3, 5, 99):
        await refused(f, PI, to(f.d), f.s, tensor_num_per_layer=number)
    assert not f.content(f.d).any()
    await push(f, to(f.d), f.s, tensor_num_per_layer=4)
    assert np.array_equal(f.content(f.d)[:, 0], f.image(f.s)[:, 0])


@rule(NEW, differs="pushes-stay-inside-the-entry", d=Layout(shape=(4, 128)), **REMOTE)
async def an_entry_that_is_smaller(f: Scene) -> None:
    await refused(f, PI, to(f.d, 1), f.s)
    assert not f.content(f.d).any()


@rule(NEW, differs="pushes-stay-inside-the-entry", d=Layout(shape=(4, 300)), **REMOTE)
async def an_entry_that_is_larger(f: Scene) -> None:
    await push(f, to(f.d, 1), f.s)
    content = f.content(f.d)
    assert np.array_equal(content[:, 1, :512], f.image(f.s)[:, 0])
    assert not content[:, 1, 512:].any()
    assert not content[:, [0, 2, 3]].any()


@rule(NEW, differs="receivers-fetch-what-is-pushed", **REMOTE)
async def caches_that_come_and_go(f: Scene) -> None:
    await push(f, to(f.d), f.s)
    later = await f.allocate()
    await push(f, to(later, 3), f.s, 1)
    assert np.array_equal(f.content(later)[:, 3], f.image(f.s)[:, 1])
    await f.api.do(f.destination.cache_manager.deallocate_cache, f.d)
    await refused(f, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, to(f.d), f.s)


@rule(NEW, differs="receivers-fetch-what-is-pushed", **REMOTE)
async def a_receiver_that_says_nothing(f: Scene) -> None:
    with stalled(f.destination):
        error = await refused(f, LLMStatusCode.LLM_TIMEOUT, to(f.d), f.s, timeout=100)
    assert error.destination_unsafe
    await push(f, to(f.d, 1), f.s)
    assert np.array_equal(f.content(f.d)[:, 1], f.image(f.s)[:, 0])


@rule(NEW, differs="one-source-per-destination-block", **REMOTE)
async def two_sources_for_one_block(f: Scene) -> None:
    source = await f.api.do(f.source.cache_manager.allocate_blocks_cache, Layout().desc())
    key = BlocksCacheKey(DESTINATION)
    target = await f.api.do(f.destination.cache_manager.allocate_blocks_cache, Layout().desc(), key)
    f.fill(source)
    push_blocks = f.source.cache_manager.push_blocks
    error = await failure(lambda: f.api.do(push_blocks, key, source, [0, 1], [2, 2]))
    assert is_error(error, PI)
    assert not f.content(target).any()
    await f.api.do(push_blocks, key, source, [1, 1, 1], [2, 2, 3])
    assert np.array_equal(f.content(target)[:, 2:], f.image(source)[:, [1, 1]])


@pytest.mark.parametrize("case", RULES.cases(), ids=str)
async def test_difference_awaited(case: RuleCase) -> None:
    await case.play(AWAITED)


@pytest.mark.parametrize("case", RULES.cases(), ids=str)
def test_difference_blocking(case: RuleCase) -> None:
    BLOCKING.run(case.play(BLOCKING))
