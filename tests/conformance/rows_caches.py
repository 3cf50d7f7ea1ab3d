"""Section 7.5: allocating, registering, releasing and copying caches."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from kvpull_async import Cache, CacheDesc, DataType, KvCache, LLMStatusCode, Placement
from tests.conformance.row import (
    PI,
    Move,
    Row,
    delivers,
    failure,
    for_manager,
    is_error,
    key,
    lacks,
    raises,
    succeeds,
)
from tests.conformance.scene import BOTH, INVALID_ID, NEW, Layout, Scene

LOCAL = {"local": True, "linked": False}
UNLINKED = {"linked": False}
SMALLER = {**LOCAL, "d": Layout(shape=(4, 128))}

ONE_CACHE_FITS = {**UNLINKED, "options": (("llm.MemPoolConfig", json.dumps({"memory_size": 12 * 1024})),)}
"""`s` and `d` take 8 KiB of their node's pool each."""


def released(cache: Any) -> bool:
    return (cache.tensor_addrs if isinstance(cache, Cache) else cache.per_device_tensor_addrs) == []


async def allocates_without_a_pool(f: Scene) -> None:
    assert "llm.MemPoolConfig" not in f.options()
    cache = await f.allocate()
    assert not f.content(cache).any(), "memory comes zeroed"


async def allocates_an_empty_dimension(f: Scene) -> Any:
    desc = CacheDesc(1, (0, 4), DataType.DT_INT8)
    return await f.api.do(f.of(f.source).allocate_cache, desc)


async def binds_a_key_again(f: Scene) -> Any:
    return await f.publish([f.r[0]])


async def pads(f: Scene) -> None:
    cache = await f.publish([key(11), key(INVALID_ID), key(13)])
    await f.pull(key(11), f.d, 0)
    await f.pull(key(13), f.d, 2)
    for entry in (0, 2):
        assert np.array_equal(f.content(f.d)[:, entry], f.image(cache)[:, entry])
    await lacks(f, key(11))
    await lacks(f, key(13))


async def exhausts_the_pool(f: Scene) -> Any:
    return await f.allocate()


async def deallocates_twice(f: Scene) -> None:
    for _ in range(2):
        assert await f.api.do(f.of(f.destination).deallocate_cache, f.d) is None
        assert released(f.d)


def registers(addrs: Any) -> Any:
    return lambda f: f.api.do(f.source.cache_manager.register_cache, Layout(tensors=2).desc(), addrs)


def copies(**kwargs: Any) -> Any:
    return lambda f: f.api.do(f.of(f.source).copy_cache, f.d, f.s, **kwargs)


def refuses_swap(src_to_dst: dict[int, int], *, host: bool) -> Any:
    """From host or device blocks into those of a device cache. The next swap on them is right."""

    async def call(f: Scene) -> None:
        swap, kind = f.of(f.source).swap_blocks, Cache if f.setup.manager == NEW else KvCache
        device, other = [await f.allocate_blocks(node=f.source) for _ in range(2)]
        desc, memory = Layout(placement=Placement.HOST).desc(), np.full((4, 4, 512), 7, np.uint8)
        cpu = kind.create_cpu_cache(desc, [tensor.ctypes.data for tensor in memory])
        error = await failure(lambda: f.api.do(swap, cpu if host else other, device, src_to_dst))
        assert is_error(error, PI), repr(error)
        assert not f.content(device).any(), "a refused swap wrote to the destination"
        assert await f.api.do(swap, cpu, device, {1: 3, 2: 0}) is None
        assert (f.content(device)[:, [0, 3]] == 7).all()
        assert not f.content(device)[:, [1, 2]].any()

    return call


ROWS = [
    Row(94, BOTH, allocates_without_a_pool, succeeds(), differs="pools-are-optional", setup=UNLINKED),
    Row(98, BOTH, allocates_an_empty_dimension, raises(PI), setup=UNLINKED),
    Row(100, BOTH, binds_a_key_again, raises(PI, old=LLMStatusCode.LLM_FAILED), setup=UNLINKED),
    Row(101, BOTH, pads, succeeds()),
    Row(
        103, BOTH, exhausts_the_pool,
        raises(LLMStatusCode.LLM_OUT_OF_MEMORY, old=LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY), setup=ONE_CACHE_FITS,
    ),
    *for_manager(
        Row(104, BOTH, deallocates_twice, succeeds(), setup=UNLINKED), old_differs="deallocating-an-unknown-cache"
    ),
    Row(107, NEW, registers((1, 2)), raises(TypeError), setup=UNLINKED),
    Row(108, NEW, tuple(map(registers, ([1], [], [0, 1]))), raises(PI), setup=UNLINKED),
    Row(
        109, NEW, lambda f: f.api.do(f.source.cache_manager.unregister_cache, 12345), succeeds(), setup=UNLINKED,
    ),
    Row(111, BOTH, lambda f: f.api.do(f.of(f.source).remove_cache_key, key(999)), succeeds(), setup=UNLINKED),
    Row(
        112, BOTH, copies(dst_batch_index=1, src_batch_index=2), delivers(Move(src_entry=2, dst_entry=1)), setup=LOCAL,
    ),
    Row(113, BOTH, copies(offset=500, size=12), delivers(Move(src_at=500, dst_at=500, size=12)), setup=LOCAL),
    Row(113, BOTH, copies(offset=500, size=13), raises(PI), setup=LOCAL),
    Row(115, BOTH, copies(), raises(PI), setup=SMALLER),
    Row(116, BOTH, copies(size=0), raises(PI), setup=LOCAL),
    Row(116, BOTH, (copies(offset=-1), copies(req_id=-1)), raises(ValueError), setup=LOCAL),
    Row(120, BOTH, refuses_swap({0: 0}, host=False), succeeds(), setup=LOCAL),
    Row(121, BOTH, refuses_swap({0: 5}, host=True), succeeds(), setup=LOCAL),
]  # fmt: skip
