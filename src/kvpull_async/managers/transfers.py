"""`transfer_cache_async`: what is checked when it is called, and its run, which pushes one layer after another.

It must not know how a layer travels; that is the business of `pushes`. Nor does it wait for whoever wants the results.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async import plan
from kvpull_async._deadline import Deadline, absorb
from kvpull_async.managers import caches, checks, pushes
from kvpull_async.managers.checks import invalid
from kvpull_async.managers.dialect import Dialect
from kvpull_async.managers.node import Node
from kvpull_async.managers.pushes import Aim, Parcel
from kvpull_async.managers.synchronizing import Asker, asker
from kvpull_async.observe import new_pull_id
from kvpull_async.registry import Entry
from kvpull_async.status import LLMStatusCode
from kvpull_async.values import (
    BlocksCacheKey,
    Cache,
    CacheKeyByIdAndIndex,
    KvCache,
    LayerSynchronizer,
    LLMRole,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from kvpull_async.values._check import UINT64_MAX, instance, integers, require, uint64

__all__ = ["Transfer", "prepare"]

OPERATION: Final = "transfer_cache_async"
_PER_LAYER: Final = 2
"""Tensors in a layer: keys and values. LLM-DataDist documentation: this call knows no other number."""
_SETTLE_MARGIN: Final = 1.0
"""Seconds on top of `settle_timeout` within which a push that is told to stop has ended."""

_Blocks = NDArray[np.int64]
_FIRST: Final[_Blocks] = np.zeros(1, np.int64)
"""Of a blocks cache without lists the first block goes. LLM-DataDist documentation: as its sample does it."""


@dataclass(frozen=True)
class Order:
    """One config, as it was at the call: the caller may change the object afterwards, and it is not changed here."""

    cluster_id: int
    layers: range
    src_index: int
    addresses: tuple[int, ...] = ()
    key: BlocksCacheKey | CacheKeyByIdAndIndex | None = None
    dst_layers: range = range(0)

    def aim(self, layer: int) -> Aim:
        at = layer - self.layers.start
        if self.key is None:
            addresses = self.addresses[at * _PER_LAYER : (at + 1) * _PER_LAYER]
            return Aim(self.cluster_id, "address", addresses=addresses)
        # Differs from the original, which looks the layer up by its absolute number.
        first = self.dst_layers[at] * _PER_LAYER
        if isinstance(self.key, BlocksCacheKey):
            return Aim(self.cluster_id, "blocks", model_id=self.key.model_id, first_tensor=first)
        key = self.key
        return Aim(self.cluster_id, "cache", identity=key.cache_id, entry=key.batch_index, first_tensor=first)


@dataclass(frozen=True)
class Blocks:
    """The block lists of a call. Without `dst` an entry is sent into an entry, without `src` an entry into blocks."""

    src: _Blocks | None
    dst: _Blocks | None
    nbytes: int
    """Of the receiver's blocks; 0 where they are as large as the source's."""


# -- checks ------------------------------------------------------------------------------------------------------------


def prepare(
    node: Node,
    dialect: Dialect,
    src_cache: object,
    layer_synchronizer: object,
    transfer_configs: object,
    *blocks: object,
    options: Mapping[str, Any],
    caller: asyncio.AbstractEventLoop | None,
) -> Transfer:
    """The checks that need no table, in the original's order; `blocks` are the last three arguments of the call.
    `caller` is the loop for a synchronizer that is a coroutine function.
    """
    if dialect.prompt_transfers_only:
        require(node.role is LLMRole.PROMPT, f"{OPERATION} is for role PROMPT, this node is {node.role.name}")
    cache: Any = instance("src_cache", src_cache, Cache, KvCache)
    lists = _blocks(*blocks)
    synchronizer: LayerSynchronizer = instance("layer_synchronizer", layer_synchronizer, LayerSynchronizer)  # type: ignore[type-abstract]
    transfer_id = f"{secrets.randbits(64):016x}"
    asking = asker(synchronizer, caller, name=f"kvpull-transfer-{transfer_id}")
    by_key = dialect.knows_remote_access and node.settings.remote_cache_access
    configs = _configs(transfer_configs, by_key=by_key)
    require(lists.dst is not None or not lists.nbytes, "dst_block_memory_size is for transfers into blocks")
    tensors = cache.cache_desc.num_tensors
    require(tensors % _PER_LAYER == 0, f"src_cache has {tensors} tensors; an even number is needed")
    layers = tensors // _PER_LAYER
    if lists.dst is None and getattr(cache._binding, "blocks", False):
        lists = Blocks(_FIRST, _FIRST, 0)
    orders = [_order(f"transfer_configs[{i}]", config, layers, lists) for i, config in enumerate(configs)]
    timeout, traceparent = checks.call_times(options, node.settings.sync_kv_timeout_ms)
    return Transfer(node, dialect, cache, asking, orders, lists, transfer_id, timeout_ms=timeout, parent=traceparent)


def _blocks(src_block_indices: object, dst_block_indices: object, dst_block_memory_size: object) -> Blocks:
    dst = _indices("dst_block_indices", dst_block_indices)
    src = _indices("src_block_indices", src_block_indices)
    size = None if dst_block_memory_size is None else uint64("dst_block_memory_size", dst_block_memory_size)
    if src:
        require(bool(dst), "src_block_indices without dst_block_indices: blocks cannot be sent into an entry")
        require(len(src) == len(dst), f"{len(src)} src_block_indices for {len(dst)} dst_block_indices")
    elif dst:
        require(bool(size), "dst_block_memory_size (bytes, above 0) is needed to send an entry into blocks")
    lists = Blocks(_table(src), _table(dst), size or 0)
    if lists.dst is not None:
        plan.check_block_pairs(np.arange(lists.dst.size) if lists.src is None else lists.src, lists.dst)
    return lists


def _indices(name: str, value: object) -> list[int]:
    return [] if value is None else integers(name, value, low=0, high=UINT64_MAX)


def _table(blocks: list[int]) -> _Blocks | None:
    """None for an empty list, which is the same as none."""
    if not blocks:
        return None
    require(max(blocks) < 2**63, f"block {max(blocks)} exists in no cache")
    return np.array(blocks, dtype=np.int64)


def _configs(value: object, *, by_key: bool) -> list[TransferConfig | TransferWithCacheKeyConfig]:
    items: Sequence[Any] = instance("transfer_configs", value, list, tuple)
    kind: type[Any] = TransferWithCacheKeyConfig if by_key else TransferConfig
    note = f" (remote cache access is {'on' if by_key else 'off'})"
    return [instance(f"transfer_configs[{i}]{note}", item, kind) for i, item in enumerate(items)]


def _order(name: str, config: TransferConfig | TransferWithCacheKeyConfig, layers: int, blocks: Blocks) -> Order:
    wanted = range(layers) if config.src_layer_range is None else config.src_layer_range
    index = config.src_batch_index
    require(blocks.src is None or index == 0, f"{name}.src_batch_index must be 0 for blocks, got {index}")
    inside = 0 <= wanted.start < wanted.stop <= layers
    require(inside, f"{name}.src_layer_range must lie in 0..{layers} and not be empty, got {wanted}")
    if isinstance(config, TransferConfig):
        addresses = tuple(config.dst_addrs)
        count = len(wanted) * _PER_LAYER
        require(len(addresses) == count, f"{name}.dst_addrs must hold {count} addresses, got {len(addresses)}")
        return Order(config.dst_cluster_id, wanted, index, addresses=addresses)
    config.check()
    key = config.cache_key
    whole = isinstance(key, BlocksCacheKey) and blocks.dst is None
    require(not whole, f"{name}.cache_key is a BlocksCacheKey, which needs dst_block_indices")
    return Order(key.cluster_id, wanted, index, key=key, dst_layers=config.dst_layer_range)


# -- the run -----------------------------------------------------------------------------------------------------------


class Transfer:
    """Runs once. Afterwards `statuses` and `exceptions` hold, config by config, how it ended; None in the former means
    that the transfer stopped before, at another config's failure.
    """

    def __init__(
        self,
        node: Node,
        dialect: Dialect,
        cache: Cache | KvCache,
        asking: Asker,
        orders: Sequence[Order],
        blocks: Blocks,
        transfer_id: str,
        *,
        timeout_ms: float,
        parent: str,
    ) -> None:
        self.running_status: LLMStatusCode = dialect.timeout_status
        """Stands for the status of a transfer that has not ended when its caller is done waiting."""
        self.statuses: list[LLMStatusCode | None] = [None] * len(orders)
        self.exceptions: list[BaseException | None] = [None] * len(orders)
        self._node = node
        self._cache: Cache | KvCache | None = cache
        self._asking = asking
        self._orders = orders
        self._blocks = blocks
        self._timeout_ms = timeout_ms
        self._send = partial(pushes.send, node, dialect, operation=OPERATION, traceparent=parent)
        self._transfer_id = transfer_id
        log = node.log.bind(transfer_id=transfer_id)
        self._log = log.bind(traceparent=parent) if parent else log
        self._layer = -1

    async def run(self) -> None:
        """On the core. Failures of configs are not raised; what is, concerns the transfer as a whole."""
        began = time.monotonic()
        assert self._cache is not None
        self._node.counters.add("transfers_started")
        self._log.debug("transfer.started", cache_id=self._cache.cache_id, configs=len(self.statuses))
        try:
            await self._run()
        except BaseException:
            self._node.counters.add("transfers_failed")
            raise
        finally:
            self._cache = None  # an exception that a caller keeps would keep it
            if not await self._asking.end():
                reason = "synchronize_layer has not returned, and its thread cannot be stopped"
                self._log.warning("transfer.synchronizer_stuck", layer=self._layer, reason=reason)
        elapsed = round((time.monotonic() - began) * 1000, 3)
        if self._failed:
            self._node.counters.add("transfers_failed")
        else:
            self._node.counters.add("transfers_finished")
            self._log.debug("transfer.finished", configs=len(self._orders), elapsed_ms=elapsed)

    def fail(self, error: BaseException) -> None:
        """The transfer as a whole has ended with this error."""
        for number, status in enumerate(self.statuses):
            if status is None:
                self._fail(number, error)

    async def _run(self) -> None:
        layers = sorted({layer for order in self._orders for layer in order.layers})
        for self._layer in layers:
            wanted = [number for number, order in enumerate(self._orders) if self._layer in order.layers]
            ready, error = await self._asking.ask(self._layer)
            if not ready:
                refusal = invalid(f"synchronize_layer refused layer {self._layer}")
                self._fail_all(wanted, refusal if error is None else error)
                return
            await self._send_to(wanted)
            if self._failed:
                return

    @property
    def _failed(self) -> bool:
        return any(error is not None for error in self.exceptions)

    async def _send_to(self, numbers: Iterable[int]) -> None:
        """This layer, to all clusters at once; to the configs of one cluster in turn, since they share its link."""
        by_cluster: dict[int, list[int]] = {}
        for number in numbers:
            by_cluster.setdefault(self._orders[number].cluster_id, []).append(number)
        sends = [asyncio.ensure_future(self._send_in_turn(turn)) for turn in by_cluster.values()]
        try:
            await asyncio.wait(sends)
        except asyncio.CancelledError:
            for send in sends:
                send.cancel()
            await absorb(sends, Deadline.after_ms(self._node.settings.settle_timeout_ms).later(_SETTLE_MARGIN))
            raise

    async def _send_in_turn(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            order, deadline, pull_id = self._orders[number], Deadline.after_ms(self._timeout_ms), ""
            part_of = {"transfer_id": self._transfer_id, "config": number, "layer": self._layer}
            try:
                parcel = [self._parcel(order)]  # popped, since a kept traceback keeps what this frame holds
                pull_id = new_pull_id()
                await self._send(parcel.pop(), pull_id=pull_id, deadline=deadline, part_of=part_of)
            except Exception as error:  # noqa: BLE001  (whatever it is: it becomes this config's status)
                traceback.clear_frames(error.__traceback__)  # a task that is kept must not keep memory
                self._fail(number, error, pull_id)
            else:
                if self._layer == order.layers[-1]:
                    self.statuses[number] = LLMStatusCode.LLM_SUCCESS

    def _parcel(self, order: Order) -> Parcel:
        assert self._cache is not None
        entry = caches.held(self._node, self._cache)
        if entry.blocks != (self._blocks.src is not None):
            raise invalid("src_block_indices are for a blocks cache, which cannot be sent without them")
        if order.key is not None and not entry.remote_accessible:
            raise invalid(f"the local cache {entry.cache_id} must be remote accessible to be sent by key")
        first = self._layer * _PER_LAYER
        return Parcel(
            source=entry,
            tensors=range(first, first + _PER_LAYER),
            aim=order.aim(self._layer),
            src_index=order.src_index,
            src_blocks=self._blocks.src,
            dst_blocks=self._blocks.dst,
            block_nbytes=self._block_nbytes(entry),
        )

    def _block_nbytes(self, entry: Entry) -> int:
        blocks = self._blocks
        if blocks.dst is None:
            return 0
        if blocks.src is not None and blocks.nbytes not in (0, entry.entry_nbytes):
            raise invalid(f"dst_block_memory_size {blocks.nbytes} is not that of the source, {entry.entry_nbytes}")
        return blocks.nbytes or entry.entry_nbytes

    def _fail_all(self, numbers: Iterable[int], error: BaseException) -> None:
        for number in numbers:
            self._fail(number, error)

    def _fail(self, number: int, error: BaseException, pull_id: str = "") -> None:
        """`pull_id` is of the push that failed, if it was one."""
        status = _status(error)
        self.statuses[number], self.exceptions[number] = status, error
        log = self._log.bind(pull_id=pull_id) if pull_id else self._log
        log.warning(
            "transfer.failed",
            cluster_id=self._orders[number].cluster_id,
            config=number,
            layer=self._layer,
            status=status.name,
            error=type(error).__name__,
            reason=str(error),
        )


def _status(error: BaseException) -> LLMStatusCode:
    """Never LLM_SUCCESS, which an LLMException has by default."""
    status = getattr(error, "status_code", None)
    known = isinstance(status, LLMStatusCode) and status is not LLMStatusCode.LLM_SUCCESS
    return status if known else LLMStatusCode.LLM_FAILED  # type: ignore[return-value]
