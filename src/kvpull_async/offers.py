"""What a request asks for, found in the registry and checked against this node's own descriptor.

Nothing that the peer claims is believed. It must not send, wait or pin.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async import plan
from kvpull_async.protocol import frames
from kvpull_async.registry import Binding, Entry, Registry
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import CacheDesc, DataType

__all__ = ["Issued", "Offer", "PeerRecord", "consumes", "find", "layout_of"]

_ISSUED_LIMIT: Final = 4096


@dataclass(frozen=True)
class Issued:
    """What a grant may consume when its DONE comes."""

    generation: int
    tensors: range


@dataclass
class PeerRecord:
    """What one incarnation of a peer holds. It outlives connections, since a DONE may come on a later one."""

    issued: OrderedDict[bytes, Issued] = field(default_factory=OrderedDict)

    def issue(self, grant_id: bytes, issued: Issued) -> None:
        self.issued[grant_id] = issued
        if len(self.issued) > _ISSUED_LIMIT:
            self.issued.popitem(last=False)


@dataclass
class Offer:
    """A request that has been looked up and checked."""

    entry: Entry
    binding: Binding | None
    plan: Callable[[], NDArray[np.int64]]
    tensors: range
    per_tensor: int
    start: int = 0
    """Where in each tensor the bytes begin, unless they are blocks."""

    @property
    def nbytes(self) -> int:
        return len(self.tensors) * self.per_tensor

    @property
    def rows(self) -> int:
        """How many the plan has."""
        return len(self.tensors) * (self.per_tensor // self.entry.entry_nbytes if self.entry.blocks else 1)


def find(registry: Registry, request: frames.Request, tail: bytes, *, peer: int) -> Offer:
    """The offer for a request of that cluster; LLMException with the code that the puller will see."""
    registry.drain_drops()
    entry, binding, index = _look_up(registry, request, peer)
    entry.reach()
    if request.remote_access and not entry.remote_accessible:
        raise _invalid(f"cache {entry.cache_id} is not remote accessible")
    if entry.blocks != (request.key == "blocks"):
        kind = "a blocks cache" if entry.blocks else "not a blocks cache"
        raise _invalid(f"cache {entry.cache_id} is {kind}; ask for it with the matching kind of key")
    _check_layout(request, entry)
    tensors = _tensors(request, entry)
    if request.key == "blocks":
        return _blocks(request, tail, entry, tensors)
    if request.blocks:
        return _sliced(request, entry, binding, tensors, index)
    return _entry(request, entry, binding, tensors, index)


def _look_up(registry: Registry, request: frames.Request, peer: int) -> tuple[Entry, Binding | None, int]:
    if request.key == "blocks":
        blocks = registry.find_blocks(request.model_id, peer=peer)
        if blocks is None:
            raise _unknown(f"no blocks cache of model {request.model_id} here")
        return blocks, None, 0
    if request.key == "cache":
        found = registry.find_id(request.identity, request.entry, peer=peer)
        if found is None:
            raise _unknown(f"no cache {request.identity} with batch entry {request.entry} here")
        return found[0], found[1], request.entry
    if request.key not in ("request", "prefix"):
        raise _invalid(f"keys of kind {request.key!r} are unknown")
    name = (request.key, request.identity, request.model_id)
    binding = registry.find_key(name, peer=peer)
    if binding is None:
        raise _unknown(registry.missing(name, peer=peer))
    return binding.entry, binding, binding.index


def _check_layout(request: frames.Request, entry: Entry) -> None:
    """For a puller who wants more than bytes: the data type, and the shape of an entry unless it is cut into blocks."""
    if request.layout is None:
        return
    wanted, shape = request.layout
    dtype, held = layout_of(entry.desc)
    if (wanted, shape or held) != (dtype, held):
        raise _invalid(
            f"strict_layout: entries here are {_layout_text(dtype, held)}, the destination's "
            f"{_layout_text(wanted, shape or held)}"
        )


def layout_of(desc: CacheDesc) -> tuple[int, list[int]]:
    """Data type and shape of one entry, as a request says them."""
    return int(desc.data_type.value), list(desc.shape[1:])


def _layout_text(dtype: int, shape: list[int]) -> str:
    known = {member.value: member.name for member in DataType}
    return f"{known.get(dtype, 'of an unknown type')} {shape}"


def _tensors(request: frames.Request, entry: Entry) -> range:
    held = entry.desc.num_tensors
    first = max(request.first_tensor, 0)
    tensors = range(first, first + request.tensors)
    if request.first_tensor < 0 and request.tensors != held:
        raise _invalid(f"{request.tensors} tensors asked for, the source cache has {held}")
    if not tensors or tensors.stop > held:
        raise _invalid(f"tensors {first}..{tensors.stop - 1} asked for, the source cache has {held}")
    return tensors


def _entry(request: frames.Request, entry: Entry, binding: Binding | None, tensors: range, index: int) -> Offer:
    if not request.size or request.offset + request.size > entry.entry_nbytes:
        raise _invalid(
            f"bytes {request.offset}..{request.offset + request.size} asked for, a batch entry of the source has "
            f"{entry.entry_nbytes}"
        )
    segments = partial(
        plan.entry_segments,
        tensors,
        entry=index,
        entry_nbytes=entry.entry_nbytes,
        offset=request.offset,
        size=request.size,
    )
    return Offer(entry, binding, segments, tensors, request.size, index * entry.entry_nbytes + request.offset)


def _sliced(request: frames.Request, entry: Entry, binding: Binding | None, tensors: range, index: int) -> Offer:
    """A contiguous entry to be cut into `request.blocks` blocks of `request.size` bytes, the last maybe shorter."""
    held, block = entry.entry_nbytes, request.size
    if not block or (request.blocks - 1) * block >= held:
        raise _invalid(f"{request.blocks} blocks of {block} bytes asked for, the source's batch entry has {held} bytes")
    if block > held:
        raise _invalid(f"blocks of {block} bytes are larger than the source's batch entry of {held} bytes")
    nbytes = min(held, request.blocks * block)
    segments = partial(plan.entry_segments, tensors, entry=index, entry_nbytes=held, offset=0, size=nbytes)
    return Offer(entry, binding, segments, tensors, nbytes, index * held)


def _blocks(request: frames.Request, tail: bytes, entry: Entry, tensors: range) -> Offer:
    if request.size != entry.entry_nbytes:
        raise _invalid(f"blocks here have {entry.entry_nbytes} bytes, the destination's {request.size}")
    try:
        blocks = frames.decode_table(tail)
    except frames.FrameError as error:
        raise _invalid(str(error)) from error
    if not blocks.size or int(blocks.min()) < 0 or int(blocks.max()) >= entry.desc.entries:
        raise _invalid(f"source blocks must be in 0..{entry.desc.entries - 1}")
    segments = partial(plan.block_segments, tensors, blocks, block_nbytes=entry.entry_nbytes)
    return Offer(entry, None, segments, tensors, int(blocks.size) * entry.entry_nbytes)


def consumes(request: frames.Request, offer: Offer) -> Issued | None:
    """What the pull ticks off when it is done: nothing for prefixes, registered caches, offset pulls, remote access."""
    binding = offer.binding
    if binding is None or binding.key[0] == "prefix" or offer.entry.registered:
        return None
    if request.offset_pull or request.remote_access:
        return None
    return Issued(binding.generation, offer.tensors)


def _invalid(message: str) -> LLMException:
    return LLMException(message, status_code=LLMStatusCode.LLM_PARAM_INVALID)


def _unknown(message: str) -> LLMException:
    return LLMException(message, status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
