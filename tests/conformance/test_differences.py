"""The deliberate differences that no conformance row shows: arguments, blocks, caches.

Each rule names the entry of docs/coming-from-llm_datadist.md that it holds to.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import kvpull_async
from kvpull_async import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    KvCache,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from tests.conformance.api import AWAITED, BLOCKING
from tests.conformance.row import PI, all_there, failure, is_error
from tests.conformance.rule import RuleCase, Rules
from tests.conformance.scene import BOTH, NEW, OLD, SOURCE, Layout, Scene

RULES = Rules()
rule = RULES.rule

NOTHING = {"nodes": False}
UNLINKED = {"linked": False}
HOST = Layout(placement=Placement.HOST)


# -- arguments ---------------------------------------------------------------------------------------------------------


@rule(differs="numpy-integers-are-integers")
async def numpy_integers(f: Scene) -> None:
    await f.pull(f.r[1], f.d, np.int64(2), np.uint16(64), tensor_num_per_layer=np.int8(2), src_cache_offset=np.int32(8))
    assert np.array_equal(f.content(f.d)[:, 2, :64], f.image(f.s)[:, 1, 8:72])


@rule(NEW, differs="none-is-a-type-error", **UNLINKED)
async def none_as_an_object(f: Scene) -> None:
    manager = f.source.cache_manager
    for call, *arguments in (
        (manager.allocate_cache, None),
        (manager.allocate_cache, Layout().desc(), None),
        (manager.register_cache, Layout().desc(), None),
        (manager.remove_cache_key, None),
        (manager.copy_cache, None, f.s),
        (manager.pull_blocks, None, f.s, [], [0]),
        (f.source.switch_role, None),
        (f.source.link_clusters, None),
    ):
        error = await failure(lambda call=call, arguments=arguments: f.api.do(call, *arguments))  # type: ignore[misc]
        assert type(error) is TypeError, (call, error)


@rule(differs="unknown-keywords-are-refused")
async def unknown_keywords_of_blocks(f: Scene) -> None:
    call = lambda: f.pull_blocks(BlocksCacheKey(SOURCE), f.d, [0], [0], src_cache_offset=0)  # noqa: E731
    assert type(await failure(call)) is TypeError


@rule(NEW, differs="unknown-options-are-refused", **NOTHING)
async def unknown_options(f: Scene) -> None:
    node = f.api.package.LLMDataDist(LLMRole.MIX, 1)
    error = await failure(lambda: f.api.do(node.init, {"LLM.listenIpInfo": "127.0.0.1:0"}))
    assert is_error(error, PI)
    assert "llm.listenIpInfo" in str(error)
    await f.node(LLMRole.MIX, 1, **{"ge.whatever": "1"})


@rule(NEW, differs="switches-are-1-or-0", **NOTHING)
async def values_of_options(f: Scene) -> None:
    node = f.api.package.LLMDataDist(LLMRole.MIX, 1)
    wrong = {f"llm.Enable{name}": "true" for name in ("CacheManager", "RemoteCacheAccessible", "SwitchRole")}
    wrong |= {"llm.RdmaServiceLevel": "high", "llm.MemoryUtilization": "2", "llm.ClusterInfo": "{"}
    for name, text in wrong.items():
        error = await failure(lambda name=name, text=text: f.api.do(node.init, {name: text}))  # type: ignore[misc]
        assert is_error(error, PI)
        assert name in str(error)


@rule(NEW, differs="numbers-of-keys-are-checked-at-once", **NOTHING)
async def numbers_of_blocks_keys(f: Scene) -> None:
    for wrong, error in ((-1, ValueError), (2**64, ValueError), (None, TypeError), ("1", TypeError)):
        with pytest.raises(error):
            BlocksCacheKey(1, wrong)  # type: ignore[arg-type]


@rule(NEW, differs="sizes-without-meaning-are-invalid", **NOTHING)
async def impossible_size(f: Scene) -> None:
    with pytest.raises(kvpull_async.LLMException) as raised:
        _ = CacheDesc(1, [-1, 4], DataType.DT_INT8).size
    assert raised.value.status_code == PI


@rule(NEW, differs="cpu-cache-addresses-are-counted", **NOTHING)
async def addresses_of_cpu_caches(f: Scene) -> None:
    for addresses in ([1, 2, 3], [[1, 2, 3, 4], [1, 2, 3]]):
        with pytest.raises(kvpull_async.LLMException) as raised:
            KvCache.create_cpu_cache(HOST.desc(), addresses)  # type: ignore[arg-type]
        assert raised.value.status_code == PI
    assert KvCache.create_cpu_cache(HOST.desc(), [[1, 2, 3, 4]] * 2).per_device_tensor_addrs == [[1, 2, 3, 4]] * 2


@rule(differs="offsets-stay-inside-the-entry")
async def offsets_at_the_edge(f: Scene) -> None:
    for wrong in ({"dst_cache_offset": 513}, {"src_cache_offset": 512, "size": 1}, {"size": 2**31 - 1}):
        error = await failure(lambda wrong=wrong: f.pull(f.r[0], f.d, **wrong))  # type: ignore[misc]
        assert is_error(error, PI)
    await f.pull(f.r[0], f.d, src_cache_offset=511, dst_cache_offset=511)
    assert np.array_equal(f.content(f.d)[:, 0, 511], f.image(f.s)[:, 0, 511])
    await all_there(f)


# -- blocks ------------------------------------------------------------------------------------------------------------


async def blocks_on_both_sides(f: Scene, src: Layout, dst: Layout) -> tuple[Any, Any]:
    source = await f.api.do(f.source.cache_manager.allocate_blocks_cache, src.desc(), BlocksCacheKey(SOURCE))
    target = await f.api.do(f.destination.cache_manager.allocate_blocks_cache, dst.desc())
    f.fill(source)
    return source, target


@rule(NEW, differs="block-sizes-must-match")
async def blocks_of_other_sizes(f: Scene) -> None:
    _, target = await blocks_on_both_sides(f, Layout(shape=(8, 64)), Layout(shape=(8, 32)))
    error = await failure(lambda: f.pull_blocks(BlocksCacheKey(SOURCE), target, [0], [0]))
    assert is_error(error, PI)
    assert not f.content(target).any()


@rule(NEW, differs="one-source-per-destination-block")
async def two_sources_for_one_block(f: Scene) -> None:
    source, target = await blocks_on_both_sides(f, Layout(shape=(8, 64)), Layout(shape=(8, 64)))
    error = await failure(lambda: f.pull_blocks(BlocksCacheKey(SOURCE), target, [0, 1], [2, 2]))
    assert is_error(error, PI)
    assert not f.content(target).any()
    await f.pull_blocks(BlocksCacheKey(SOURCE), target, [3, 3], [2, 2])
    assert np.array_equal(f.content(target)[:, 2], f.image(source)[:, 3])


async def filled_blocks(f: Scene) -> Any:
    """A blocks cache of the destination, whose blocks are all different, and what is in it."""
    cache = await f.api.do(f.of(f.destination).allocate_blocks_cache, Layout().desc())
    f.fill(cache)
    return cache, f.content(cache)


@rule(BOTH, differs="block-copies-are-checked-first", **UNLINKED)
async def block_copies_change_all_or_nothing(f: Scene) -> None:
    copy = f.of(f.destination).copy_blocks
    cache, before = await filled_blocks(f)
    for wrong in ({0: [1], 1: [4]}, {0: [1], 4: [2]}):
        assert is_error(await failure(lambda wrong=wrong: f.api.do(copy, cache, wrong)), PI)  # type: ignore[misc]
        assert np.array_equal(f.content(cache), before)
    await f.api.do(copy, cache, {})
    assert np.array_equal(f.content(cache), before)
    await f.api.do(copy, cache, {2: [0, 3]})
    assert np.array_equal(f.content(cache), before[:, [2, 1, 2, 2]])


@rule(BOTH, differs="block-copies-are-checked-first", **UNLINKED)
async def destinations_of_a_swap_are_integers(f: Scene) -> None:
    manager, kind = f.of(f.destination), KvCache if f.setup.manager == OLD else Cache
    cache, before = await filled_blocks(f)
    cpu = kind.create_cpu_cache(HOST.desc(), f.memory(HOST))
    for wrong in (None, "1", 1.0, [1]):
        error = await failure(lambda wrong=wrong: f.api.do(manager.swap_blocks, cpu, cache, {0: wrong}))  # type: ignore[misc]
        assert type(error) is TypeError
    assert np.array_equal(f.content(cache), before)


@rule(BOTH, differs="block-copies-read-first", **UNLINKED)
async def blocks_that_are_read_and_overwritten(f: Scene) -> None:
    copy = f.of(f.destination).copy_blocks
    for copies, order in (({0: [1], 1: [2]}, [0, 0, 1, 3]), ({3: [0], 0: [3]}, [3, 1, 2, 0])):
        cache, before = await filled_blocks(f)
        await f.api.do(copy, cache, copies)
        assert np.array_equal(f.content(cache), before[:, order])
    cache, before = await filled_blocks(f)
    assert is_error(await failure(lambda: f.api.do(copy, cache, {0: [2], 1: [2]})), PI)
    assert np.array_equal(f.content(cache), before)


@rule(NEW, differs="blocks-from-an-entry-stop-at-its-end")
async def last_block_of_an_entry(f: Scene) -> None:
    """Entry 1 of 512 bytes into blocks of 200: the third holds 112 of them, and nothing of entry 2."""
    target = await f.api.do(f.destination.cache_manager.allocate_blocks_cache, Layout(shape=(5, 100)).desc())
    await f.pull_blocks(f.r[1], target, [], [4, 0, 2])
    entry, got = f.image(f.s)[:, 1], f.content(target)
    assert np.array_equal(got[:, 4], entry[:, :200])
    assert np.array_equal(got[:, 0], entry[:, 200:400])
    assert np.array_equal(got[:, 2, :112], entry[:, 400:])
    assert not got[:, 2, 112:].any()
    assert not got[:, [1, 3]].any()
    error = await failure(lambda: f.pull_blocks(f.r[2], target, [], [0, 1, 2, 3]))
    assert is_error(error, PI), "the fourth block would get nothing"
    await f.pull_blocks(f.r[2], target, [], [3, 1])
    assert np.array_equal(f.content(target)[:, 1], f.image(f.s)[:, 2, 200:400]), "a part of the entry fills its blocks"


# -- caches ------------------------------------------------------------------------------------------------------------


@rule(differs="every-placement-works", s=HOST, d=HOST)
async def host_to_host(f: Scene) -> None:
    await f.pull(f.r[0], f.d)
    device = await f.allocate(Layout())
    await f.pull(f.r[1], device)
    assert np.array_equal(f.content(f.d)[:, 0], f.image(f.s)[:, 0])
    assert np.array_equal(f.content(device)[:, 0], f.image(f.s)[:, 1])


@rule(differs="bfloat16-without-a-copy", d=Layout(data_type=DataType.DT_BF16))
async def view_of_bfloat16(f: Scene) -> None:
    await f.pull(f.r[0], f.d)
    tensor = f.of(f.destination).get_cache_tensors(f.d, 3)[0]
    view, widened = tensor.view(), tensor.numpy()
    assert view.dtype == np.uint16
    assert view.tobytes() == f.content(f.d)[3].tobytes()
    assert np.array_equal(widened.view(np.uint32) >> 16, view)
    view[0, 0] ^= 1
    assert view[0, 0] == f.content(f.d)[3].view(np.uint16)[0, 0], "the view is the memory itself"


@rule(NEW, differs="descriptors-stay-the-callers")
async def reused_descriptor(f: Scene) -> None:
    shape = [4, 256]
    desc = CacheDesc(4, shape, DataType.DT_FLOAT16)
    manager = f.destination.cache_manager
    blocks = await f.api.do(manager.allocate_blocks_cache, desc)
    cache = await f.api.do(manager.allocate_cache, desc)
    shape[0] = 1
    desc.update_dim(0, 2)
    assert desc.batch_size == 2
    for made, is_blocks in ((blocks, True), (cache, False)):
        assert made.is_blocks_cache is is_blocks
        assert list(made.cache_desc.shape) == [4, 256]
    await f.pull(f.r[0], cache, 3)
    assert np.array_equal(f.content(cache)[:, 3], f.image(f.s)[:, 0])


@rule(OLD, differs="dropped-handles", options=(("llm.MemPoolConfig", json.dumps({"memory_size": 12 * 1024})),))
async def dropped_handle(f: Scene) -> None:
    """`s` leaves room for no other cache of its size, but for a smaller one, which is dropped and made again."""
    manager = f.source.kv_cache_manager
    desc = Layout(tensors=2).desc()
    if f.api is BLOCKING:
        for _ in range(3):
            await f.api.do(manager.allocate_cache, desc)
    else:
        handles = [await f.api.do(manager.allocate_cache, desc)]
        with pytest.warns(ResourceWarning, match="deallocate_cache"):
            handles.clear()
        error = await failure(lambda: f.api.do(manager.allocate_cache, desc))
        assert is_error(error, LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY)


@rule(NEW, differs="deallocating-an-unknown-cache", **UNLINKED)
async def unknown_caches(f: Scene) -> None:
    for manager in (f.source.cache_manager, f.source.kv_cache_manager):
        stranger = Cache(999, Layout().desc(), [1, 2, 3, 4], manager, False, False)
        await f.api.do(manager.deallocate_cache, stranger)
        assert stranger.tensor_addrs == []


# -- running them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RULES.cases(), ids=str)
async def test_difference_awaited(case: RuleCase) -> None:
    await case.play(AWAITED)


@pytest.mark.parametrize("case", RULES.cases(), ids=str)
def test_difference_blocking(case: RuleCase) -> None:
    BLOCKING.run(case.play(BLOCKING))
