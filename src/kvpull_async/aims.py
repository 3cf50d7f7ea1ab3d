"""Where the bytes of a peer's offer are to land, found in the registry and checked against this node's own descriptors.

Nothing that the peer claims is believed: an address that it names is looked up among the caches here, and anything else
is refused. It must not send, wait, pin or touch memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async import plan
from kvpull_async.memory.base import Region
from kvpull_async.protocol import frames
from kvpull_async.registry import Entry, Registry
from kvpull_async.status import LLMException, LLMStatusCode

__all__ = ["Place", "find"]

Numbers = NDArray[np.int64]
_WORD: Final = 8
_NONE: Final = np.zeros(0, np.int64)
_ADDRESSES_LIMIT: Final = 2**8
"""Most addresses in one offer, which are looked up on the loop; a transfer names the two of one layer."""


@dataclass(frozen=True)
class Place:
    """The memory for an offer: `rows` of `regions`, and the rows of the sender's tensors from which they are filled."""

    entries: tuple[Entry, ...]
    regions: tuple[Region, ...]
    rows: Callable[[], Numbers]
    source: Callable[[], Numbers]
    nbytes: int
    most_rows: int
    payload: memoryview
    start: int | None
    """Where the bytes go in each region, if they stay together there."""


@dataclass(frozen=True)
class _Tables:
    addresses: Numbers
    blocks: Numbers
    src_blocks: Numbers
    payload: memoryview


def find(registry: Registry, offer: frames.Offer, tail: bytes, *, peer: int, by_key: bool) -> Place:
    """The place of that cluster's offer; LLMException with the code that the sender will see. Without `by_key`, which
    is remote cache access, only addresses may be named.
    """
    registry.drain_drops()
    tables = _split(offer, tail)
    _check_sizes(offer, tables)
    if offer.key == "address":
        entries, regions = _by_address(registry, offer, tables, peer)
    else:
        if not by_key:
            raise _invalid("remote cache access is off here, so caches cannot be named by key")
        entry = _by_key(registry, offer, tables, peer)
        entries = (entry,)
        regions = entry.regions[offer.first_tensor : offer.first_tensor + offer.tensors]
    for entry in entries:
        entry.reach(writing=True)
    start = offer.entry * entries[0].entry_nbytes if offer.key == "cache" and not offer.blocks else 0
    return Place(
        entries=entries,
        regions=regions,
        rows=_rows(offer, tables.blocks, start),
        source=_source(offer, tables.src_blocks),
        nbytes=offer.tensors * offer.per_tensor,
        most_rows=offer.tensors * max(1, offer.blocks),
        payload=tables.payload,
        start=None if offer.blocks else start,
    )


def _split(offer: frames.Offer, tail: bytes) -> _Tables:
    counts = (offer.tensors if offer.key == "address" else 0, offer.blocks, offer.src_blocks)
    if sum(counts) * _WORD > len(tail):
        raise _invalid(f"{sum(counts)} numbers are to be in {len(tail)} bytes")
    table = np.frombuffer(tail, "<i8", sum(counts)).astype(np.int64, copy=False) if sum(counts) else _NONE
    first, second = counts[0], counts[0] + counts[1]
    payload = memoryview(tail)[sum(counts) * _WORD :]
    expected = offer.tensors * offer.per_tensor if offer.inline else 0
    if expected > frames.INLINE_MOST:
        raise _invalid(f"{expected} bytes came with the offer, at most {frames.INLINE_MOST} may")
    if len(payload) != expected:
        raise _invalid(f"{len(payload)} bytes came with the offer, {expected} were to")
    return _Tables(table[:first], table[first:second], table[second:], payload)


def _check_sizes(offer: frames.Offer, tables: _Tables) -> None:
    if not offer.tensors or not offer.per_tensor:
        raise _invalid("an offer of no bytes")
    for blocks in (tables.blocks, tables.src_blocks):
        if blocks.size and int(blocks.min()) < 0:
            raise _invalid(f"block {blocks.min()} does not exist")
    if offer.blocks and not 0 <= offer.blocks * offer.block_nbytes - offer.per_tensor < offer.block_nbytes:
        raise _invalid(f"{offer.per_tensor} bytes do not fill {offer.blocks} blocks of {offer.block_nbytes} bytes")
    if offer.src_blocks and offer.src_blocks * offer.block_nbytes != offer.per_tensor:
        raise _invalid(f"{offer.src_blocks} blocks of {offer.block_nbytes} bytes are not {offer.per_tensor} bytes")


def _by_key(registry: Registry, offer: frames.Offer, tables: _Tables, peer: int) -> Entry:
    if offer.key == "cache":
        entry, name = registry.local(offer.identity, peer=peer), f"cache {offer.identity}"
    elif offer.key == "blocks":
        entry, name = registry.find_blocks(offer.model_id, peer=peer), f"a blocks cache of model {offer.model_id}"
    else:
        raise _invalid(f"keys of kind {offer.key!r} are unknown")
    if entry is None:
        raise LLMException(f"{name} is not here", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
    if not entry.remote_accessible:
        raise _invalid(f"cache {entry.cache_id} is not remote accessible")
    if entry.blocks != bool(offer.blocks):
        raise _invalid(f"cache {entry.cache_id} is {'a' if entry.blocks else 'not a'} blocks cache")
    held = entry.desc.num_tensors
    if offer.first_tensor + offer.tensors > held:
        last = offer.first_tensor + offer.tensors - 1
        raise _invalid(f"tensors {offer.first_tensor}..{last} are to be filled, the receiver's cache has {held}")
    if offer.blocks:
        _check_blocks(offer, entry, tables.blocks)
    elif offer.entry >= entry.desc.entries:
        raise _invalid(f"batch entry {offer.entry}: the receiver's cache has {entry.desc.entries}")
    elif offer.per_tensor > entry.entry_nbytes:
        raise _invalid(f"{offer.per_tensor} bytes do not fit the receiver's batch entry of {entry.entry_nbytes} bytes")
    return entry


def _check_blocks(offer: frames.Offer, entry: Entry, blocks: Numbers) -> None:
    if offer.block_nbytes != entry.entry_nbytes:
        raise _invalid(f"the receiver's blocks have {entry.entry_nbytes} bytes, the sender's {offer.block_nbytes}")
    if int(blocks.max()) >= entry.desc.entries:
        raise _invalid(f"block {blocks.max()}: the receiver's cache has {entry.desc.entries} blocks")


def _by_address(
    registry: Registry, offer: frames.Offer, tables: _Tables, peer: int
) -> tuple[tuple[Entry, ...], tuple[Region, ...]]:
    """Each address must be inside one tensor of one cache, with all that is to be written from there on."""
    if offer.tensors > _ADDRESSES_LIMIT:
        raise _invalid(f"{offer.tensors} addresses in one offer, at most {_ADDRESSES_LIMIT} may be")
    nbytes = (int(tables.blocks.max()) + 1) * offer.block_nbytes if offer.blocks else offer.per_tensor
    entries: dict[int, Entry] = {}
    regions = []
    addresses = tables.addresses.tolist()
    places = registry.find_addresses(tables.addresses, nbytes, peer=peer)
    for address, found in zip(addresses, places, strict=True):
        if found is None:
            raise _invalid(f"no remote accessible cache of the receiver has {nbytes} bytes at {address:#x}")
        entry, region = found
        if offer.blocks and entry.blocks:
            if entry.cache_id not in entries:
                _check_blocks(offer, entry, tables.blocks)
            if address != region.address:
                raise _invalid(f"{address:#x} is inside a tensor of a blocks cache of the receiver, not its beginning")
        entries[entry.cache_id] = entry
        regions.append(Region(address, nbytes, region.placement, region.owner, region.device))
    if any(after - before < nbytes for before, after in itertools.pairwise(sorted(addresses))):
        raise _invalid(f"two of the addresses are less than the {nbytes} bytes apart that are to be written at each")
    return tuple(entries.values()), tuple(regions)


def _rows(offer: frames.Offer, blocks: Numbers, start: int) -> Callable[[], Numbers]:
    tensors = range(offer.tensors)
    if offer.blocks:
        return partial(
            plan.slice_segments, tensors, blocks, block_nbytes=offer.block_nbytes, per_tensor=offer.per_tensor
        )
    return partial(plan.run_segments, tensors, start=start, size=offer.per_tensor)


def _source(offer: frames.Offer, src_blocks: Numbers) -> Callable[[], Numbers]:
    tensors = range(offer.src_tensor, offer.src_tensor + offer.tensors)
    if offer.src_blocks:
        return partial(plan.block_segments, tensors, src_blocks, block_nbytes=offer.block_nbytes)
    return partial(plan.run_segments, tensors, start=offer.start, size=offer.per_tensor)


def _invalid(message: str) -> LLMException:
    return LLMException(message, status_code=LLMStatusCode.LLM_PARAM_INVALID)
