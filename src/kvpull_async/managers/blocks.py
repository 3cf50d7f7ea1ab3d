"""Copies of blocks within this node, `copy_blocks` and `swap_blocks`: what they check and what they copy.

All is checked before anything is copied. It must not know links or peers, nor how a copy is stopped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpull_async import plan
from kvpull_async.managers import caches, checks
from kvpull_async.managers.dialect import Dialect
from kvpull_async.managers.node import Node
from kvpull_async.memory.base import PIECE_BYTES, MemoryBackend, Region
from kvpull_async.registry import Entry
from kvpull_async.values import Cache, KvCache, Placement
from kvpull_async.values._check import UINT64_MAX, index, instance, require

__all__ = ["Prepared", "bound_here", "prepare_copy", "prepare_swap"]

Prepared = Callable[[], Coroutine[Any, Any, None]]
Handle = Cache | KvCache
_Given = NDArray[np.uint64]
"""Block numbers that may be outside the cache."""
_Blocks = NDArray[np.int64]


def prepare_copy(node: Node, dialect: Dialect, cache: object, copy_block_info: object) -> Prepared:
    """Check what needs no table. The dict maps each source block to the list of its destinations."""
    handle = _blocks_handle("cache", cache)
    copies = instance("copy_block_info", copy_block_info, dict)
    lists: list[list[Any]] = [instance(f"copy_block_info[{block}]", found, list) for block, found in copies.items()]
    named = _numbers("copy_block_info", list(copies), dialect.negative_block)
    destinations = _numbers("copy_block_info", list(chain.from_iterable(lists)), dialect.negative_block)
    return partial(_copy, node, handle, named, list(map(len, lists)), destinations)


def prepare_swap(node: Node, dialect: Dialect, src: object, dst: object, src_to_dst: object) -> Prepared:
    """Check what needs no table. The dict maps blocks of one cache to blocks of the other."""
    names = dialect.swap_names
    handles = _blocks_handle(names[0], src), _blocks_handle(names[1], dst)
    pairs = instance("src_to_dst", src_to_dst, dict)
    sources, destinations = (_numbers("src_to_dst", list(side), checks.invalid) for side in (pairs, pairs.values()))
    return partial(_swap, node, names, handles, sources, destinations)


def _blocks_handle(name: str, handle: object) -> Handle:
    checked: Any = instance(name, handle, Cache, KvCache)
    require(getattr(checked, "is_blocks_cache", True), f"{name} is not a blocks cache")
    known: Handle = checked
    return known


def _numbers(name: str, items: Sequence[Any], outside: Callable[[str], Exception]) -> _Given:
    """`outside` is for numbers that no block of any cache has."""
    if set(map(type, items)) != {int}:
        items = [index(f"{name}: a block", item) for item in items]
    if items and (min(items) < 0 or max(items) > UINT64_MAX):
        raise outside(f"{name}: blocks must be in 0..{UINT64_MAX}, got {min(items)}..{max(items)}")
    return np.array(items, np.uint64)


def _inside(name: str, blocks: _Given, entry: Entry) -> _Blocks:
    count = entry.desc.entries
    require(not (blocks >= count).any(), f"{name} has {count} blocks, so none is numbered {blocks.max(initial=0)}")
    return blocks.astype(np.int64)


# -- copy_blocks -------------------------------------------------------------------------------------------------------


async def _copy(node: Node, cache: Handle, named: _Given, repeats: list[int], destinations: _Given) -> None:
    entry = caches.held(node, cache)
    require(entry.blocks, "cache is not a blocks cache")
    src, dst = _inside("cache", named, entry).repeat(repeats), _inside("cache", destinations, entry)
    plan.check_block_pairs(src, dst)
    moving = src != dst
    if moving.any():
        dst, first = np.unique(dst[moving], return_index=True)
        steps = partial(_within, node.registry.backend, entry, src[moving][first], dst)
        await caches.carry_out(node, entry, entry, steps)


def _within(backend: MemoryBackend, entry: Entry, src: _Blocks, dst: _Blocks) -> Iterator[int]:
    """Every source is read as it was before. Those that are overwritten, too, are set aside, a tensor at a time."""
    regions, nbytes = entry.regions, entry.entry_nbytes
    early = np.isin(src, dst)
    if not early.any():
        yield from _between(backend, regions, regions, src, dst, nbytes)
        return
    kept = np.empty(np.count_nonzero(early) * nbytes, np.uint8)
    aside = backend.adopt([kept.ctypes.data], tensor_nbytes=kept.size, placement=Placement.HOST)
    places = np.arange(kept.size // nbytes)
    try:
        for region in regions:
            yield from _between(backend, [region], aside, src[early], places, nbytes)
            yield from _between(backend, [region], [region], src[~early], dst[~early], nbytes)
            yield from _between(backend, aside, [region], places, dst[early], nbytes)
    finally:
        backend.disown(aside)


def _between(
    backend: MemoryBackend, sources: Sequence[Region], destinations: Sequence[Region], src: _Blocks, dst: _Blocks,
    nbytes: int,
) -> Iterator[int]:  # fmt: skip
    """Blocks of `nbytes` bytes of every region. Runs of blocks on both sides are copied as one."""
    if src.size:
        tensors = range(len(sources))
        reading, writing = (plan.block_segments(tensors, blocks, block_nbytes=nbytes) for blocks in (src, dst))
        pairs = plan.cut(plan.pair(reading, writing), limit=PIECE_BYTES)
        yield from backend.copying(sources, destinations, pairs)


# -- swap_blocks -------------------------------------------------------------------------------------------------------


async def _swap(
    node: Node, names: tuple[str, str], handles: tuple[Handle, Handle], sources: _Given, destinations: _Given
) -> None:
    src, dst = (_either(node, name, handle) for name, handle in zip(names, handles, strict=True))
    placements = {src.desc.placement, dst.desc.placement}
    require(placements == {Placement.HOST, Placement.DEVICE}, f"one of {names} must be on HOST and one on DEVICE")
    counts = [entry.desc.num_tensors for entry in (src, dst)]
    require(counts[0] == counts[1], f"{names} have {counts} tensors, but need equally many")
    sizes = [entry.entry_nbytes for entry in (src, dst)]
    require(sizes[0] == sizes[1], f"{names} have blocks of {sizes} bytes, but need equally large ones")
    reading, writing = _inside(names[0], sources, src), _inside(names[1], destinations, dst)
    plan.check_block_pairs(reading, writing)
    if reading.size:
        backend = node.registry.backend
        steps = partial(_between, backend, src.regions, dst.regions, *_in_order(reading, writing), sizes[0])
        await caches.carry_out(node, src, dst, steps)


def _in_order(src: _Blocks, dst: _Blocks) -> tuple[_Blocks, _Blocks]:
    """By destination, so that runs are found however the dict was filled."""
    order = np.argsort(dst, kind="stable")
    return src[order], dst[order]


def _either(node: Node, name: str, handle: Handle) -> Entry:
    """A cache of this node, or memory of the caller: that is used by address, and no longer than the call."""
    addresses = handle.per_device_tensor_addrs if isinstance(handle, KvCache) else [handle.tensor_addrs]
    require(bool(addresses) and bool(addresses[0]), f"{name} has no addresses: it was deallocated")
    entry = (
        caches.held(node, handle) if handle.cache_id != caches.UNMANAGED else _callers(node, name, handle, addresses)
    )
    require(entry.blocks, f"{name} is not a blocks cache")
    return entry


def _callers(node: Node, name: str, handle: Handle, addresses: list[list[int]]) -> Entry:
    """Bound to the handle, which so tells whether something that could not be stopped may still write there."""
    require(len(addresses) == 1, f"{name} has addresses for {len(addresses)} devices, a cache of this node for one")
    require(all(addresses[0]), f"{name} must not have the address 0")
    bound, backend = bound_here(node, handle), node.registry.backend
    if bound is not None:
        bound.reached = False  # it may have been freed since the last call
        return bound
    desc = copy.copy(handle.cache_desc)
    regions = backend.adopt(addresses[0], tensor_nbytes=desc.size, placement=desc.placement)
    entry = Entry(
        caches.UNMANAGED, desc, regions, backend=backend, blocks=True, allocation=None, remote_accessible=False,
        dropped=_nothing,
    )  # fmt: skip
    handle._binding = entry
    return entry


def bound_here(node: Node, handle: Handle) -> Entry | None:
    """What is known of the caller's memory since the first call with it; None before, and for another node's."""
    bound = handle._binding
    return bound if isinstance(bound, Entry) and bound.belongs_to(node.registry.backend) else None


def _nothing(cache_id: int) -> None:
    """Memory of the caller does not go with its handle."""
