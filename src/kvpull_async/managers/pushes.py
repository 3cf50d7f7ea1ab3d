"""A push from its arguments to the link: what is checked here, and the offer that is made to the receiver.

It must not wait for anything but the link; how a push runs and ends is the business of `kvpull_async.push`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async import plan
from kvpull_async._deadline import Deadline
from kvpull_async.managers import caches, checks, peers
from kvpull_async.managers.checks import invalid
from kvpull_async.managers.destinations import key_of
from kvpull_async.managers.dialect import Dialect
from kvpull_async.managers.node import Node
from kvpull_async.observe import Report, key_text, new_pull_id
from kvpull_async.protocol import frames
from kvpull_async.push import Outgoing, Push
from kvpull_async.registry import Entry
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import BlocksCacheKey, Cache, CacheKeyByIdAndIndex
from kvpull_async.values._check import instance, int64, require, uint32

__all__ = ["Aim", "Parcel", "Prepared", "prepare_blocks", "prepare_cache", "run", "send"]

Blocks = NDArray[np.int64]
_UNSET: Final = bytes(16)


@dataclass(frozen=True)
class Aim:
    """Where at the receiver the bytes go.

    `kind` "cache": batch entry `entry` of the cache `identity`; "blocks": the blocks cache of `model_id`; both from the
    tensor `first_tensor` on. "address": `addresses` has one for each tensor, of its first byte, or of its block 0; the
    receiver looks them up among its caches.
    """

    cluster_id: int
    kind: str
    identity: int = 0
    model_id: int = 0
    entry: int = 0
    first_tensor: int = 0
    addresses: tuple[int, ...] = ()

    def text(self) -> str:
        """As events name it: of several addresses by the first."""
        return key_text(self.kind, self.addresses[0] if self.addresses else self.identity, self.model_id, self.entry)


@dataclass(frozen=True)
class Parcel:
    """What is pushed, and whereto: of each of `tensors` of `source` the batch entry `src_index`, or the `src_blocks`.

    Without `dst_blocks` it lands as one run, with them in blocks of `block_nbytes` bytes each.
    """

    source: Entry
    tensors: range
    aim: Aim
    src_index: int = 0
    src_blocks: Blocks | None = None
    dst_blocks: Blocks | None = None
    block_nbytes: int = 0


@dataclass(frozen=True)
class Prepared:
    """Checked arguments of a push by key, ready to cross to the core."""

    handle: Cache
    key: CacheKeyByIdAndIndex | BlocksCacheKey
    src_layers: range
    dst_layers: range
    per_layer: int
    src_index: int
    src_blocks: Blocks | None
    dst_blocks: Blocks | None
    deadline: Deadline
    report: Report
    verify: str


def prepare_cache(
    node: Node, key: object, cache: object, src_batch_index: object, src_layers: object, dst_layers: object,
    size: object, tensor_num_per_layer: object, options: Mapping[str, Any],
) -> Prepared:  # fmt: skip
    """The checks of `push_cache` that need no table, on the caller's thread, in the original's order."""
    began = time.monotonic()
    _require_mode(node, "push_cache")
    key = instance("dst_cache_key", key, CacheKeyByIdAndIndex)
    handle = instance("src_cache", cache, Cache)
    index = uint32("src_batch_index", src_batch_index)
    require(not handle.is_blocks_cache, "src_cache is a blocks cache; use push_blocks")
    src, dst, per_layer = _layers(handle, tensor_num_per_layer, src_layers, dst_layers)
    nbytes = int64("size", size)
    require(nbytes == -1, f"size must be -1 (a push moves whole batch entries), got {nbytes}")
    return _prepared(node, "push_cache", began, options, handle, key, src, dst, per_layer, index, None, None)


def prepare_blocks(
    node: Node, key: object, cache: object, src_blocks: object, dst_blocks: object, src_layers: object,
    dst_layers: object, tensor_num_per_layer: object, options: Mapping[str, Any],
) -> Prepared:  # fmt: skip
    """The same for `push_blocks`."""
    began = time.monotonic()
    _require_mode(node, "push_blocks")
    key = instance("dst_cache_key", key, BlocksCacheKey)
    handle = instance("src_cache", cache, Cache)
    require(handle.is_blocks_cache, "src_cache is not a blocks cache; use push_cache")
    src, dst = checks.blocks("src_blocks", src_blocks), checks.blocks("dst_blocks", dst_blocks)
    require(dst.size > 0, "dst_blocks must not be empty")
    require(src.size > 0, "src_blocks must not be empty")
    of, to, per_layer = _layers(handle, tensor_num_per_layer, src_layers, dst_layers)
    plan.check_block_pairs(src, dst)
    lowest = min(int(src.min()), int(dst.min()))
    require(lowest >= 0, f"block indices must be 0 or above, got {lowest}")
    return _prepared(node, "push_blocks", began, options, handle, key, of, to, per_layer, 0, src, dst)


def _require_mode(node: Node, name: str) -> None:
    require(node.settings.remote_cache_access, f"{name} needs remote cache access (llm.EnableRemoteCacheAccessible)")


def _layers(handle: Cache, per_layer: object, src: object, dst: object) -> tuple[range, range, int]:
    number = uint32("tensor_num_per_layer", per_layer)
    require(number > 0, "tensor_num_per_layer must be above 0")
    held = handle.cache_desc.num_tensors
    require(held % number == 0, f"tensor_num_per_layer {number} does not divide the source's {held} tensors")
    source, destination = (_layer_range(name, value, held // number) for name, value in (("src", src), ("dst", dst)))
    require(
        len(source) == len(destination),
        f"src_layer_range names {len(source)} layers, dst_layer_range {len(destination)}",
    )
    return source, destination, number


def _layer_range(side: str, value: object, layers: int) -> range:
    name = f"{side}_layer_range"
    if value is None:
        return range(layers)
    given = instance(name, value, range)
    require(given.step == 1 and 0 <= given.start < given.stop, f"{name} must be a range of layers, got {given}")
    require(given.stop <= 2**32, f"{name} reaches layer {given.stop - 1}, no cache has so many")
    require(side == "dst" or given.stop <= layers, f"{name} reaches layer {given.stop - 1}, the source has {layers}")
    return given


def _prepared(
    node: Node, operation: str, began: float, options: Mapping[str, Any], handle: Cache,
    key: CacheKeyByIdAndIndex | BlocksCacheKey, src: range, dst: range, per_layer: int, index: int,
    src_blocks: Blocks | None, dst_blocks: Blocks | None,
) -> Prepared:  # fmt: skip
    verify = checks.sum_name(options.get("verify"), node.settings.sum_name)
    timeout, traceparent = checks.call_times(options, node.settings.sync_kv_timeout_ms)
    report = Report(operation, new_pull_id(), traceparent, key.cluster_id, push=True)
    report.local_cluster_id, report.key = node.settings.cluster_id, partial(key_of, key)
    report.started = began  # checking the arguments spends the deadline too
    deadline = Deadline(began + timeout / 1000)
    return Prepared(handle, key, src, dst, per_layer, index, src_blocks, dst_blocks, deadline, report, verify)


async def run(node: Node, dialect: Dialect, prepared: Prepared) -> None:
    """A push by key, on the core."""
    parcel = partial(_parcel, node, prepared)
    await _counted(node, dialect, prepared.report, parcel, prepared.deadline, prepared.verify)


async def send(
    node: Node, dialect: Dialect, parcel: Parcel, *, pull_id: str, operation: str, deadline: Deadline,
    part_of: Mapping[str, Any], traceparent: str = "",
) -> None:  # fmt: skip
    """One push on the core, as a part of something that tells of its failure; `part_of` names it in the push's events.
    LLMException with every field set; it waits for the link's slot inside the deadline.
    """
    report = Report(operation, pull_id, traceparent, parcel.aim.cluster_id, push=True)
    report.local_cluster_id, report.key, report.part_of = node.settings.cluster_id, parcel.aim.text, part_of
    try:
        await _counted(node, dialect, report, lambda: parcel, deadline, node.settings.sum_name)
    except Exception as error:
        node.log.info("push.failed", **report.failed_fields(error))
        raise
    if node.log.debugging:
        node.log.debug("push.finished", **report.fields())


async def _counted(
    node: Node, dialect: Dialect, report: Report, made: Callable[[], Parcel], deadline: Deadline, verify: str
) -> None:
    node.counters.add("pushes_started")
    try:
        parcel = made()
        outgoing = _outgoing(node, parcel, deadline, report, verify)
        await Push(peers.link_to(node, parcel.aim.cluster_id), outgoing).run()
    except asyncio.CancelledError:
        node.counters.add("pushes_cancelled")
        raise
    except LLMException as error:
        peers.count_failure(node, error, push=True)
        raise peers.described(error, dialect, report) from error.__cause__
    node.counters.add("pushes_finished")
    node.counters.add("bytes_pushed", report.bytes)


def _parcel(node: Node, prepared: Prepared) -> Parcel:
    entry, key, per_layer = caches.held(node, prepared.handle), prepared.key, prepared.per_layer
    first = prepared.dst_layers.start * per_layer
    if isinstance(key, CacheKeyByIdAndIndex):
        aim = Aim(key.cluster_id, "cache", identity=key.cache_id, entry=key.batch_index, first_tensor=first)
    else:
        aim = Aim(key.cluster_id, "blocks", model_id=key.model_id, first_tensor=first)
    tensors = range(prepared.src_layers.start * per_layer, prepared.src_layers.stop * per_layer)
    if not entry.remote_accessible:
        raise invalid(f"the local cache {entry.cache_id} must be remote accessible to be pushed")
    size = entry.entry_nbytes if entry.blocks else 0
    return Parcel(entry, tensors, aim, prepared.src_index, prepared.src_blocks, prepared.dst_blocks, size)


def _outgoing(node: Node, parcel: Parcel, deadline: Deadline, report: Report, verify: str) -> Outgoing:
    """The parcel checked against the cache that it is from, and its offer."""
    entry, tensors, aim = parcel.source, parcel.tensors, parcel.aim
    _check_source(parcel)
    stride, dst = entry.entry_nbytes, parcel.dst_blocks
    if parcel.src_blocks is not None:
        per_tensor, start = int(parcel.src_blocks.size) * stride, 0
        rows = partial(plan.block_segments, tensors, parcel.src_blocks, block_nbytes=stride)
        most_rows = len(tensors) * int(parcel.src_blocks.size)
    else:
        per_tensor, start = _sliced(parcel), parcel.src_index * stride
        rows = partial(plan.run_segments, tensors, start=start, size=per_tensor)
        most_rows = len(tensors)
    if first := aim.first_tensor:
        require(first + len(tensors) <= 2**32, f"dst_layer_range reaches tensor {first + len(tensors) - 1}")
    offer = frames.Offer(
        0, _UNSET, report.pull_id, report.traceparent, 0, aim.kind, aim.identity, aim.model_id, aim.entry,
        aim.first_tensor, len(tensors), per_tensor, 0 if dst is None else int(dst.size), parcel.block_nbytes,
        tensors.start, start, 0 if parcel.src_blocks is None else int(parcel.src_blocks.size),
        inline=False, begun=False, verify=verify,
    )  # fmt: skip
    table = [_addresses(aim), frames.encode_table(dst) if dst is not None else b""]
    differs = partial(_differs, node, report, verify) if verify else None
    src_table = b"" if parcel.src_blocks is None else frames.encode_table(parcel.src_blocks)
    return Outgoing(
        entry, node.registry.backend, rows, most_rows, len(tensors) * per_tensor, offer, b"".join(table), src_table,
        deadline, report, differs,
    )  # fmt: skip


def _differs(node: Node, report: Report, verify: str, source: bytes, destination: bytes) -> LLMException:
    return peers.mismatch(node, report, verify, source=source, destination=destination)


def _check_source(parcel: Parcel) -> None:
    entry, tensors, blocks = parcel.source, parcel.tensors, parcel.src_blocks
    held, size = entry.desc.num_tensors, entry.desc.entries
    if tensors.stop > held:
        raise invalid(f"src_layer_range reaches tensor {tensors.stop - 1}, the source has {held}")
    if blocks is not None and int(blocks.max()) >= size:
        raise invalid(f"src_blocks holds {blocks.max()}, the source has {size} blocks")
    if blocks is None and parcel.src_index >= size:
        raise invalid(f"src_batch_index {parcel.src_index}: the source has {size} batch entries")


def _sliced(parcel: Parcel) -> int:
    """How many bytes of the entry go: all, or what the blocks that are named hold of it."""
    stride, dst, block = parcel.source.entry_nbytes, parcel.dst_blocks, parcel.block_nbytes
    if dst is None:
        return stride
    if (int(dst.size) - 1) * block >= stride:
        raise invalid(f"{dst.size} blocks of {block} bytes are named, the batch entry has {stride} bytes")
    return min(stride, int(dst.size) * block)


def _addresses(aim: Aim) -> bytes:
    for address in aim.addresses:
        if not 0 < address < 2**63:
            raise LLMException(f"no cache is at {address:#x}", status_code=LLMStatusCode.LLM_PARAM_INVALID)
    return frames.encode_table(np.array(aim.addresses, np.int64)) if aim.addresses else b""
