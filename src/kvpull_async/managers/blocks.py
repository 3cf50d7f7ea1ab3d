"""Copies of blocks within this node, `copy_blocks` and `swap_blocks`: what they check and what they copy.

All is checked before anything is copied: types by the call, tables by a worker, since large ones take longer than an
event loop may be held. It must not know links or peers, nor how a copy is stopped.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from kvpull_async import plan
from kvpull_async._deadline import Deadline
from kvpull_async.managers import caches, checks
from kvpull_async.managers.dialect import Dialect
from kvpull_async.managers.node import Node
from kvpull_async.memory.base import PIECE_BYTES, MemoryBackend, Region, Until
from kvpull_async.registry import Entry
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.values import Cache, KvCache, Placement
from kvpull_async.values._check import UINT64_MAX, index, instance, require

__all__ = ["Prepared", "prepare_copy", "prepare_swap", "settled"]

Prepared = Callable[[], Coroutine[Any, Any, None]]
Handle = Cache | KvCache
_Given = NDArray[np.int64] | NDArray[np.uint64]
"""Block numbers that may be outside the cache."""
_Inside = NDArray[np.int64]
"""Block numbers that the cache has."""
_POLL: Final = 0.005
"""Seconds between two looks at what other nodes do with the caller's memory: their loops cannot wake this one."""


def prepare_copy(node: Node, dialect: Dialect, cache: object, copy_block_info: object) -> Prepared:
    """Check what needs no table. The dict maps each source block to the list of its destinations."""
    handle = _blocks_handle("cache", cache)
    copies = instance("copy_block_info", copy_block_info, dict)
    lists = list(copies.values())
    if set(map(type, lists)) - {list}:  # the usual case is judged as a whole
        lists = [instance(f"copy_block_info[{block}]", found, list) for block, found in copies.items()]
    named = _numbers("copy_block_info", list(copies), dialect.negative_block)
    destinations = _numbers("copy_block_info", list(chain.from_iterable(lists)), dialect.negative_block)
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    return partial(_copy, node, dialect, cache=handle, named=named, lengths=lengths, destinations=destinations)


def prepare_swap(node: Node, dialect: Dialect, src: object, dst: object, src_to_dst: object) -> Prepared:
    """Check what needs no table. The dict maps blocks of one cache to blocks of the other."""
    names = dialect.swap_names
    handles = _blocks_handle(names[0], src), _blocks_handle(names[1], dst)
    pairs = instance("src_to_dst", src_to_dst, dict)
    sources, destinations = (_numbers("src_to_dst", list(side), checks.invalid) for side in (pairs, pairs.values()))
    return partial(_swap, node, dialect, handles=handles, sources=sources, destinations=destinations)


def _blocks_handle(name: str, handle: object) -> Handle:
    checked: Any = instance(name, handle, Cache, KvCache)
    require(getattr(checked, "is_blocks_cache", True), f"{name} is not a blocks cache")
    known: Handle = checked
    return known


def _numbers(name: str, items: Sequence[Any], outside: Callable[[str], Exception]) -> _Given:
    """`outside` is for numbers that no block of any cache has."""
    if set(map(type, items)) - {int}:
        items = [index(f"{name}: a block", item) for item in items]
    try:
        numbers: _Given = np.array(items, np.int64)
    except OverflowError:
        if min(items) >= 0 and max(items) <= UINT64_MAX:
            return np.array(items, np.uint64)
    else:
        if numbers.min(initial=0) >= 0:
            return numbers
    raise outside(f"{name}: blocks must be in 0..{UINT64_MAX}, got {min(items)}..{max(items)}")


def _inside(name: str, blocks: _Given, entry: Entry) -> _Inside:
    count = entry.desc.entries
    require(not (blocks >= count).any(), f"{name} has {count} blocks, so none is numbered {blocks.max(initial=0)}")
    return blocks.astype(np.int64, copy=False)


# -- copy_blocks -------------------------------------------------------------------------------------------------------


async def _copy(
    node: Node, dialect: Dialect, *, cache: Handle, named: _Given, lengths: NDArray[np.int64], destinations: _Given
) -> None:
    entry = caches.held(node, cache)
    require(entry.blocks, "cache is not a blocks cache")
    copying = partial(_copying, node.registry.backend, entry, named=named, lengths=lengths, destinations=destinations)
    await caches.carry_out(node, dialect, entry, entry, copying)


def _copying(
    backend: MemoryBackend, entry: Entry, until: Until,
    *, named: _Given, lengths: NDArray[np.int64], destinations: _Given,
) -> Iterator[int]:  # fmt: skip
    """The steps of a copy; nothing is copied in the first one."""
    src, dst = _inside("cache", named, entry).repeat(lengths), _inside("cache", destinations, entry)
    plan.check_block_pairs(src, dst)
    moving = src != dst
    yield 0
    if moving.any():
        dst, first = np.unique(dst[moving], return_index=True)
        yield from _within(backend, entry, until, src=src[moving][first], dst=dst)


def _within(backend: MemoryBackend, entry: Entry, until: Until, *, src: _Inside, dst: _Inside) -> Iterator[int]:
    """Every source is read as it was before. Those that are overwritten, too, are set aside, a tensor at a time."""
    regions, between = entry.regions, partial(_between, backend, nbytes=entry.entry_nbytes, until=until)
    early = np.isin(src, dst)
    if not early.any():
        yield from between(regions, regions, src=src, dst=dst)
        return
    kept = np.empty(np.count_nonzero(early) * entry.entry_nbytes, np.uint8)
    aside = backend.adopt([kept.ctypes.data], tensor_nbytes=kept.size, placement=Placement.HOST)
    places = np.arange(np.count_nonzero(early))
    try:
        for region in regions:
            yield from between([region], aside, src=src[early], dst=places)
            yield from between([region], [region], src=src[~early], dst=dst[~early])
            yield from between(aside, [region], src=places, dst=dst[early])
    finally:
        backend.disown(aside)


def _between(
    backend: MemoryBackend, sources: Sequence[Region], destinations: Sequence[Region],
    *, src: _Inside, dst: _Inside, nbytes: int, until: Until,
) -> Iterator[int]:  # fmt: skip
    """Blocks of `nbytes` bytes of every region. Runs of blocks on both sides are copied as one."""
    if src.size:
        tensors = range(len(sources))
        reading, writing = (plan.block_segments(tensors, blocks, block_nbytes=nbytes) for blocks in (src, dst))
        pairs = plan.cut(plan.pair(reading, writing), limit=PIECE_BYTES)
        yield from backend.copying(sources, destinations, pairs, until=until)


# -- swap_blocks -------------------------------------------------------------------------------------------------------


async def _swap(
    node: Node, dialect: Dialect, *, handles: tuple[Handle, Handle], sources: _Given, destinations: _Given
) -> None:
    names, patience = dialect.swap_names, Deadline.after_ms(node.settings.settle_timeout_ms)
    src, dst = [await _either(node, name, handle, patience) for name, handle in zip(names, handles, strict=True)]
    placements = {src.desc.placement, dst.desc.placement}
    require(placements == {Placement.HOST, Placement.DEVICE}, f"one of {names} must be on HOST and one on DEVICE")
    counts = [entry.desc.num_tensors for entry in (src, dst)]
    require(counts[0] == counts[1], f"{names} have {counts} tensors, but need equally many")
    sizes = [entry.entry_nbytes for entry in (src, dst)]
    require(sizes[0] == sizes[1], f"{names} have blocks of {sizes} bytes, but need equally large ones")
    backend = node.registry.backend
    swapping = partial(_swapping, backend, src, dst, names=names, sources=sources, destinations=destinations)
    await caches.carry_out(node, dialect, src, dst, swapping)


def _swapping(
    backend: MemoryBackend, src: Entry, dst: Entry, until: Until,
    *, names: tuple[str, str], sources: _Given, destinations: _Given,
) -> Iterator[int]:  # fmt: skip
    """The steps of a swap; nothing is copied in the first one."""
    reading, writing = _inside(names[0], sources, src), _inside(names[1], destinations, dst)
    plan.check_block_pairs(reading, writing)
    order = np.argsort(writing, kind="stable")  # so that runs are found however the dict was filled
    yield 0
    yield from _between(
        backend, src.regions, dst.regions,
        src=reading[order], dst=writing[order], nbytes=src.entry_nbytes, until=until,
    )  # fmt: skip


async def _either(node: Node, name: str, handle: Handle, patience: Deadline) -> Entry:
    """A cache of this node, or memory of the caller: that is used by address, and no longer than the call."""
    addresses = handle.per_device_tensor_addrs if isinstance(handle, KvCache) else [handle.tensor_addrs]
    require(bool(addresses) and bool(addresses[0]), f"{name} has no addresses: it was deallocated")
    if handle.cache_id != caches.UNMANAGED:
        entry = caches.held(node, handle)
        require(entry.blocks, f"{name} is not a blocks cache")
        return entry
    require(len(addresses) == 1, f"{name} has addresses for {len(addresses)} devices, a cache of this node for one")
    require(all(addresses[0]), f"{name} must not have the address 0")
    if not await settled(handle, patience):
        raise LLMTimeoutError(f"{name} is quarantined", destination_unsafe=True, retry_safe=True)
    return _lent(node, handle, addresses[0])


# -- memory of the caller ----------------------------------------------------------------------------------------------


@final
class _Uses:
    """What a handle that no manager made is bound to: every copy that uses its memory, of whatever node.

    A copy holds its entry until nothing of it runs any more, so the weak references are those that may still write.
    """

    alive: Final = True
    """No node releases it."""

    def __init__(self) -> None:
        self._entries: tuple[weakref.ref[Entry], ...] = ()

    def add(self, entry: Entry) -> None:
        self._entries = (*[known for known in self._entries if known() is not None], weakref.ref(entry))

    def _running(self) -> list[Entry]:
        found = [known() for known in self._entries]
        return [entry for entry in found if entry is not None]

    @property
    def quarantined(self) -> bool:
        return any(entry.quarantined for entry in self._running())

    def abandon(self) -> None:
        for entry in self._running():
            entry.abandon()

    def views(self) -> NoReturn:
        raise LLMException(
            "the memory of a handle from create_cpu_cache is the caller's, who has views of it",
            status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        )

    def dropped(self) -> None:
        """Memory of the caller does not go with its handle."""


_adding: Final = threading.Lock()
"""Several nodes may begin to use one handle at once, each on its own loop."""


def _lent(node: Node, handle: Handle, addresses: list[int]) -> Entry:
    """Made anew for each call: the memory may have been freed since the last one."""
    desc, backend = copy.copy(handle.cache_desc), node.registry.backend
    regions = backend.adopt(addresses, tensor_nbytes=desc.size, placement=desc.placement)
    entry = Entry(
        caches.UNMANAGED, desc, regions, backend=backend, blocks=True, allocation=None, remote_accessible=False,
        dropped=_nothing,
    )  # fmt: skip
    with _adding:
        uses = handle._binding if isinstance(handle._binding, _Uses) else _Uses()
        uses.add(entry)
        handle._binding = uses
    return entry


async def settled(handle: Handle, deadline: Deadline) -> bool:
    """Wait until no copy of any node may still write to the memory of a handle from `create_cpu_cache`; False when the
    deadline came first.
    """
    while handle.quarantined:
        if deadline.expired:
            return False
        await asyncio.sleep(_POLL)
    return True


def _nothing(cache_id: int) -> None:
    """Memory of the caller does not go with its handle."""
