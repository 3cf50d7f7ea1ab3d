"""Every operation of both managers as a checked step: what is refused at once, what is done, and by which handle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpull_async import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    KvCache,
    LLMException,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
)
from kvpull_async.crossing import awaited
from kvpull_async.managers.manager import not_enabled, remap_registered_memory
from tests.unit.side import DESC, Side, quarantine, status

PARAM_INVALID, NOT_EXIST = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


@pytest.fixture(params=["kv", "cache"])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    made = Side(request.param, LLMRole.PROMPT)
    yield made
    made.close()


@pytest.fixture
def newer() -> Iterator[Side]:
    made = Side("cache", LLMRole.MIX)
    yield made
    made.close()


# -- handles -----------------------------------------------------------------------------------------------------------


def test_each_manager_makes_its_own_kind_of_handle(side: Side) -> None:
    cache = side.allocate()
    assert type(cache) is (KvCache if side.manager._dialect.name == "KvCacheManager" else Cache)
    assert cache.cache_id == 1
    assert cache._manager is side
    addresses = cache.tensor_addrs if isinstance(cache, Cache) else cache.per_device_tensor_addrs[0]
    assert len(addresses) == 2
    assert all(addresses)


def test_the_kinds_of_caches_are_told_apart(newer: Side) -> None:
    array = np.zeros(2 * DESC.size, np.uint8)
    made = [newer.allocate(), newer.blocks(), newer.register(array)]
    assert [(cache.is_blocks_cache, cache.is_registered) for cache in made] == [
        (False, False),
        (True, False),
        (False, True),
    ]


def test_a_cache_is_zeroed_memory_that_can_be_seen(side: Side) -> None:
    cache = side.allocate()
    view = side.tensor(cache, 1)
    assert view.shape == (3, 64)
    assert not view.any()
    view[2] = 7
    assert side.tensor(cache, 1)[2, 63] == 7
    assert not side.tensor(cache, 0).any()


def test_the_callers_descriptor_is_not_kept(side: Side) -> None:
    desc = CacheDesc(1, [2, 8], DataType.DT_UINT8)
    cache = side.allocate(desc)
    desc.update_dim(1, 4096)
    assert side.tensor(cache, 0).shape == (2, 8)


@pytest.mark.parametrize(
    ("index", "error"), [(2, LLMException), (-1, LLMException), (None, TypeError), (True, TypeError)]
)
def test_a_tensor_that_does_not_exist_has_no_view(side: Side, index: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        side.manager.get_cache_tensors(side.allocate(), index)


def test_after_deallocation_there_are_no_views_and_no_addresses(side: Side) -> None:
    cache = side.allocate()
    side.run(side.manager.deallocate(cache, blocks=None))
    assert status(side.manager.get_cache_tensors, cache, 0) == NOT_EXIST
    assert (cache.tensor_addrs if isinstance(cache, Cache) else cache.per_device_tensor_addrs) == []
    side.run(side.manager.deallocate(cache, blocks=None))  # once more is harmless


def test_after_unregistering_the_memory_is_not_looked_at_any_more(newer: Side) -> None:
    array = np.zeros(2 * DESC.size, np.uint8)
    cache = newer.register(array)
    assert newer.tensor(cache, 0).shape == (3, 64)
    newer.run(newer.manager.unregister_cache(cache.cache_id))
    assert status(newer.manager.get_cache_tensors, cache, 0) == NOT_EXIST
    newer.run(newer.manager.unregister_cache(cache.cache_id))
    newer.run(newer.manager.unregister_cache(12345))


def test_deallocating_leaves_registered_memory_and_unregistering_leaves_allocated(newer: Side) -> None:
    array = np.zeros(2 * DESC.size, np.uint8)
    registered, allocated = newer.register(array), newer.allocate()
    newer.run(newer.manager.deallocate(registered, blocks=False))
    newer.run(newer.manager.unregister_cache(allocated.cache_id))
    registry = newer.engine.registry
    assert registry.local(registered.cache_id) is not None
    assert registry.local(allocated.cache_id) is not None


@pytest.mark.parametrize("blocks", [False, True])
def test_each_kind_has_its_own_way_to_go(newer: Side, *, blocks: bool) -> None:
    cache = newer.blocks() if blocks else newer.allocate()
    assert status(lambda: newer.manager.deallocate(cache, blocks=not blocks)) == PARAM_INVALID
    newer.run(newer.manager.deallocate(cache, blocks=blocks))
    assert newer.engine.registry.find(cache.cache_id) is None


@pytest.mark.parametrize("wrong", [None, 1, "cache", DESC])
def test_what_is_no_handle_is_a_type_error(side: Side, wrong: Any) -> None:
    for call in (
        lambda: side.manager.deallocate(wrong, blocks=None),
        lambda: side.manager.get_cache_tensors(wrong, 0),
        lambda: side.manager.settled(wrong, None),
        lambda: side.copy(wrong, side.allocate()),
        lambda: side.copy(side.allocate(), wrong),
    ):
        with pytest.raises(TypeError):
            call()


# -- handles of another engine, or of this one before it was initialised again -----------------------------------------


def test_a_handle_of_another_engine_names_nothing_here(side: Side) -> None:
    own = side.allocate()
    other = Side("kv", LLMRole.PROMPT)
    theirs = other.allocate()
    try:
        assert own.cache_id == theirs.cache_id
        assert status(side.run, side.copy(own, theirs)) == NOT_EXIST
        assert status(side.run, side.copy(theirs, own)) == NOT_EXIST
        side.run(side.manager.settled(theirs, None))  # it is
        theirs._binding._quarantine.add(object())
        assert status(side.run, side.manager.settled(theirs, None)) == NOT_EXIST
        theirs._binding._quarantine.clear()
        side.run(side.manager.deallocate(theirs, blocks=None))  # as any unknown cache
        assert side.tensor(own, 0).shape == (3, 64)
        assert other.tensor(theirs, 0).shape == (3, 64)
    finally:
        other.close()


def test_a_handle_made_by_hand_goes_by_its_number(newer: Side) -> None:
    cache, other = newer.allocate(), newer.allocate()
    newer.tensor(other, 0)[1] = 9
    by_hand = Cache(cache.cache_id, DESC, cache.tensor_addrs, None, False, False)
    newer.run(newer.copy(by_hand, other, 0, 1))
    assert (newer.tensor(cache, 0)[0] == 9).all()


async def test_a_cache_that_could_not_be_released_at_once_is_settled_and_then_gone(side: Side) -> None:
    made = Side(side.kind, LLMRole.PROMPT, settle_timeout=10)
    try:
        cache = made.allocate()
        writer = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(quarantine(cache), made.engine.core.loop))
        with pytest.raises(LLMException) as caught:
            await awaited(made.engine, made.manager.deallocate(cache, blocks=None))
        assert caught.value.status_code == LLMStatusCode.LLM_TIMEOUT
        assert caught.value.destination_unsafe
        assert cache.quarantined
        waiting = asyncio.ensure_future(awaited(made.engine, made.manager.settled(cache, None)))
        made.engine.core.loop.call_soon_threadsafe(writer.set_result, None)
        await waiting
        await awaited(made.engine, made.manager.settled(cache, None))
        await awaited(made.engine, made.manager.deallocate(cache, blocks=None))
        assert cache._binding is None
    finally:
        await asyncio.to_thread(made.close)


# -- making ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("desc", [None, "desc", [2, [3, 64]]])
def test_a_descriptor_is_a_cache_desc(side: Side, desc: Any) -> None:
    for call in (
        lambda: side.manager.allocate_cache(desc, ()),
        lambda: side.manager.allocate_blocks_cache(desc, None),
        lambda: side.manager.register_cache(desc, [4096], (), None),
        lambda: side.manager.register_blocks_cache(desc, [4096], None, None),
    ):
        with pytest.raises(TypeError, match="cache_desc"):
            call()


@pytest.mark.parametrize("keys", [None, "keys", [1], [BlocksCacheKey(1, 0)], CacheKey(1, 1)])
def test_keys_are_a_list_of_cache_keys(side: Side, keys: Any) -> None:
    with pytest.raises(TypeError, match="cache_keys"):
        side.manager.allocate_cache(DESC, keys)


@pytest.mark.parametrize("key", [CacheKey(1, 1), 7])
def test_a_blocks_key_is_one(side: Side, key: Any) -> None:
    with pytest.raises(TypeError, match="blocks_cache_key"):
        side.manager.allocate_blocks_cache(DESC, key)


@pytest.mark.parametrize("addrs", [None, (4096, 8192), "addrs", 4096])
def test_addresses_are_a_list(newer: Side, addrs: Any) -> None:
    for call in (newer.manager.register_cache, newer.manager.register_blocks_cache):
        with pytest.raises(TypeError, match="addrs"):
            call(DESC, addrs, None if call is newer.manager.register_blocks_cache else (), None)


def test_older_decoders_give_and_remove_no_keys() -> None:
    made = Side("kv", LLMRole.DECODER)
    try:
        for call in (
            lambda: made.manager.allocate_cache(DESC, [CacheKey(1, 1)]),
            lambda: made.manager.allocate_blocks_cache(DESC, BlocksCacheKey(1, 0)),
            lambda: made.manager.remove_cache_key(CacheKey(1, 1)),
        ):
            assert status(call) == PARAM_INVALID
        made.allocate()
        made.blocks()
    finally:
        made.close()


def test_a_removed_key_can_be_given_again(side: Side) -> None:
    side.allocate(keys=[CacheKey(1, 5)])
    taken = LLMStatusCode.LLM_FAILED if side.manager._dialect.prompt_keys_only else PARAM_INVALID
    assert status(side.allocate, DESC, [CacheKey(1, 5)]) == taken
    side.run(side.manager.remove_cache_key(CacheKey(1, 5)))
    side.run(side.manager.remove_cache_key(CacheKey(1, 5)))
    side.allocate(keys=[CacheKey(1, 5)])


# -- what has no end yet -----------------------------------------------------------------------------------------------


async def test_settled_returns_at_once_for_what_is_quiet_and_ends_in_time_for_what_is_not(side: Side) -> None:
    cache = side.allocate()
    await awaited(side.engine, side.manager.settled(cache, None))
    loop = side.engine.core.loop
    writer = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(quarantine(cache), loop))
    with pytest.raises(TimeoutError) as caught:
        await awaited(side.engine, side.manager.settled(cache, 10))
    assert caught.value.destination_unsafe  # type: ignore[attr-defined]
    assert caught.value.operation == "settled"  # type: ignore[attr-defined]
    waiting = asyncio.ensure_future(awaited(side.engine, side.manager.settled(cache, None)))
    loop.call_soon_threadsafe(writer.set_result, None)
    await waiting
    assert not cache.quarantined


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 2**31])
def test_settled_takes_a_sensible_bound(side: Side, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        side.manager.settled(side.allocate(), timeout)


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(LLMException, match="some_name is not available") as caught:
        not_enabled("some_name")
    assert caught.value.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    assert caught.value.operation == "some_name"


def test_memory_is_never_mapped_again_and_what_is_given_is_checked_first() -> None:
    good = MemInfo(Memtype.MEM_TYPE_DEVICE, 4096, 64)
    wrong = [
        MemInfo(Memtype.MEM_TYPE_HOST, 4096, 64),
        MemInfo(Memtype.MEM_TYPE_DEVICE, 0, 64),
        MemInfo(Memtype.MEM_TYPE_DEVICE, 4096, 0),
        None,
        4096,
    ]
    for infos in (*wrong, *([good, info] for info in wrong), [], (good,)):
        with pytest.raises(LLMException) as caught:
            remap_registered_memory(infos)
        assert caught.value.status_code == PARAM_INVALID, infos
    for reserved in (good, [good], [good, good]):
        with pytest.raises(LLMException) as caught:
            remap_registered_memory(reserved)
        assert caught.value.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
        assert caught.value.operation == "remap_registered_memory"
