"""What ``transfer_cache_async`` and ``remap_registered_memory`` take and give. Nothing here moves a byte."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass

from kvpull_async.values._check import (
    UINT64_MAX,
    Checked,
    instance,
    integers,
    layer_range,
    require,
    type_error,
    uint32,
    uint64,
)
from kvpull_async.values.enums import Memtype
from kvpull_async.values.keys import BlocksCacheKey, CacheKeyByIdAndIndex


@dataclass(frozen=True, eq=False)
class MemInfo:
    """A piece of registered memory: kind, address and bytes (both uint64). Errors: TypeError, ValueError."""

    mem_type: Memtype
    addr: int
    size: int

    def __post_init__(self) -> None:
        instance("mem_type", self.mem_type, Memtype)
        vars(self).update(addr=uint64("addr", self.addr), size=uint64("size", self.size))


class LayerSynchronizer(ABC):
    """The caller's gate before each layer of a ``transfer_cache_async``. Subclass it."""

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool | Awaitable[bool]:
        """Wait until the layer may be sent; False ends the transfer with LLM_PARAM_INVALID.

        Called once for each layer that is to be sent, in order, with None for the timeout, on a thread of that
        transfer: it may block. What it raises becomes the status of the configs that want the layer. In the awaitable
        API it may be a coroutine function (``async def``); it then runs on the loop that called.
        """


def _addresses(name: str, value: object) -> list[int]:
    return integers(name, value, low=0, high=UINT64_MAX)


def _optional_layers(name: str, value: object) -> range | None:
    return None if value is None else layer_range(name, value)


def _cache_key(name: str, value: object) -> BlocksCacheKey | CacheKeyByIdAndIndex:
    if isinstance(value, (BlocksCacheKey, CacheKeyByIdAndIndex)):
        return value
    raise type_error(name, value, "BlocksCacheKey or CacheKeyByIdAndIndex")


class TransferConfig:
    """Where ``transfer_cache_async`` sends layers, by address. Every assignment is checked, as in the constructor.

    ``dst_addrs`` (list or tuple of uint64) has two addresses per layer of ``src_layer_range``: the transfer checks it.
    """

    dst_cluster_id: Checked[int] = Checked(uint64)
    dst_addrs: Checked[list[int]] = Checked(_addresses)
    src_layer_range: Checked[range | None] = Checked(_optional_layers)
    dst_layer_range: Checked[range | None] = Checked(_optional_layers)
    src_batch_index: Checked[int] = Checked(uint32)

    def __init__(
        self,
        dst_cluster_id: int,
        dst_addrs: list[int] | tuple[int, ...],
        src_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        self.dst_cluster_id = dst_cluster_id
        self.dst_addrs = _addresses("dst_addrs", dst_addrs)
        self.src_layer_range = src_layer_range
        self.src_batch_index = src_batch_index
        self.dst_layer_range = None


class TransferWithCacheKeyConfig:
    """Where ``transfer_cache_async`` sends layers, by key (remote cache access mode).

    Errors: TypeError (None included: both ranges must be given), ValueError, LLMException(LLM_PARAM_INVALID) for
    ranges of different lengths or a ``src_batch_index`` other than 0 with a BlocksCacheKey. Attributes may be assigned
    one by one, so the rules that join two of them are tested again by the transfer, through ``check``.
    """

    cache_key: Checked[BlocksCacheKey | CacheKeyByIdAndIndex] = Checked(_cache_key)
    src_layer_range: Checked[range] = Checked(layer_range)
    dst_layer_range: Checked[range] = Checked(layer_range)
    src_batch_index: Checked[int] = Checked(uint32)

    def __init__(
        self,
        cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        self.cache_key = cache_key
        self.src_layer_range = layer_range("src_layer_range", src_layer_range)
        self.dst_layer_range = layer_range("dst_layer_range", dst_layer_range)
        self.src_batch_index = src_batch_index
        self.check()

    @property
    def dst_cluster_id(self) -> int:
        """The key's cluster. Differs from the original, where it stays behind when ``cache_key`` is replaced."""
        return self.cache_key.cluster_id

    def check(self) -> None:
        """Raise LLMException(LLM_PARAM_INVALID) unless ranges and batch index fit each other and the key."""
        src, dst = self.src_layer_range, self.dst_layer_range
        require(len(src) == len(dst), f"src_layer_range {src} and dst_layer_range {dst} must be equally long")
        if isinstance(self.cache_key, BlocksCacheKey):
            require(self.src_batch_index == 0, f"src_batch_index must be 0 for blocks, got {self.src_batch_index}")
