"""The checks of a pull's arguments, one small function each. They look at values only: no cache table, no link.

Which of them run, and in what order, is in the managers' table. A draft collects what the arguments mean.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async import plan, sums
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import BlocksCacheKey, Cache, CacheKey, CacheKeyByIdAndIndex, KvCache, LLMRole
from kvpull_async.values._check import INVALID_ID, instance, int64, integers, require, uint32

__all__ = ["PULL_NAMES", "PullDraft", "known_names", "plain"]

_RANGES: Final = ("src_layer_range", "dst_layer_range", "tensor_num_per_layer")
_CALL: Final = ("wait_for_key", "strict_layout", "verify", "timeout", "traceparent")
PULL_NAMES: Final = (*_RANGES, "src_cache_offset", "dst_cache_offset", *_CALL)
BLOCKS_NAMES: Final = (*_RANGES, *_CALL)
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_INT64_MAX: Final = 2**63 - 1
_NO_BLOCKS: Final[NDArray[np.int64]] = np.empty(0, np.int64)


@dataclass
class PullDraft:
    """Arguments as given, then what they mean."""

    key: Any
    cache: Any
    batch_index: Any
    size: Any
    options: Mapping[str, Any]
    role: LLMRole
    decoder_only: bool
    remote_access: bool
    default_timeout_ms: int
    verify: str = ""
    """The sum that both sides make of the bytes, "" for none; that of the node, unless the call says another."""
    began: float = field(default_factory=time.monotonic)
    src_blocks: NDArray[np.int64] = field(default_factory=lambda: _NO_BLOCKS)
    dst_blocks: NDArray[np.int64] = field(default_factory=lambda: _NO_BLOCKS)
    src_offset: int = 0
    dst_offset: int = 0
    offset_pull: bool = False
    per_layer: int = 2
    src_tensors: range | None = None
    dst_tensors: range | None = None
    wait_for_key: bool = False
    strict_layout: bool = False
    timeout_ms: float = 0.0
    traceparent: str = ""


def plain(draft: PullDraft) -> bool:
    """Whether nothing is wrong with the arguments, seen at a glance: the usual call, for which the checks below would
    find nothing and change nothing. False says nothing.
    """
    key, size, index = draft.key, draft.size, draft.batch_index
    if draft.options or draft.decoder_only or type(size) is not int or type(index) is not int:
        return False
    if type(draft.cache) is not Cache or draft.cache.is_blocks_cache:
        return False
    if type(key) is CacheKey:
        known = not draft.remote_access and (key.req_id == INVALID_ID) != (key.prefix_id == INVALID_ID)
    else:
        known = type(key) is CacheKeyByIdAndIndex
    draft.timeout_ms = draft.default_timeout_ms
    return known and (size == -1 or 0 < size < 2**63) and 0 <= index < 2**32


def known_names(call: str, options: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    """Differs from the original, which ignores misspelt keyword arguments."""
    for name in options:
        if name not in allowed:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}; allowed are {', '.join(allowed)}")


def role(draft: PullDraft) -> None:
    if draft.decoder_only and draft.role is not LLMRole.DECODER:
        raise invalid(f"pull_cache is for role DECODER, this node is {draft.role.name}")


def key_type(draft: PullDraft) -> None:
    if draft.remote_access:
        draft.key = instance("cache_key (with remote cache access enabled)", draft.key, CacheKeyByIdAndIndex)
    else:
        draft.key = instance("cache_key", draft.key, CacheKey, CacheKeyByIdAndIndex)


def cache_type(draft: PullDraft) -> None:
    draft.cache = instance("cache", draft.cache, Cache, KvCache)


def batch_index(draft: PullDraft) -> None:
    draft.batch_index = uint32("batch_index", draft.batch_index)


def size_type(draft: PullDraft) -> None:
    draft.size = int64("size", draft.size)


def size_value(draft: PullDraft) -> None:
    require(draft.size == -1 or draft.size > 0, f"size must be -1 or above 0 (bytes), got {draft.size}")


def not_blocks(draft: PullDraft) -> None:
    require(not getattr(draft.cache, "is_blocks_cache", False), "cache is a blocks cache; use pull_blocks")


def offsets(draft: PullDraft) -> None:
    """An offset, 0 included, makes an offset pull, which never consumes the key. None means not given."""
    src, dst = draft.options.get("src_cache_offset"), draft.options.get("dst_cache_offset")
    draft.offset_pull = src is not None or dst is not None
    draft.src_offset = _offset("src_cache_offset", src)
    draft.dst_offset = _offset("dst_cache_offset", dst)


def _offset(name: str, value: object) -> int:
    offset = 0 if value is None else int64(name, value)
    if offset < 0:
        raise ValueError(f"{name} must be 0 or above (bytes), got {offset}")
    return offset


def key_value(draft: PullDraft) -> None:
    key = draft.key
    if isinstance(key, CacheKey):
        require(not key.is_padding, "cache_key has neither req_id nor prefix_id; give exactly one of them")
        both = key.is_prefix and key.req_id != 2**64 - 1
        require(not both, "cache_key has both req_id and prefix_id; give exactly one of them")


def tensors_per_layer(draft: PullDraft) -> None:
    draft.per_layer = uint32("tensor_num_per_layer", draft.options.get("tensor_num_per_layer", 2))
    require(draft.per_layer > 0, "tensor_num_per_layer must be above 0")


def layer_ranges(draft: PullDraft) -> None:
    """Both types before both steps and values, as in the original."""
    names = ("src_layer_range", "dst_layer_range")
    given = [draft.options.get(name) for name in names]
    for name, value in zip(names, given, strict=True):
        if value is not None:
            instance(name, value, range)
    for name, value in zip(names, given, strict=True):
        require(value is None or value.step == 1, f"{name} must have step 1, got {value}")
    draft.src_tensors = plan.layer_tensors(names[0], given[0], tensors_per_layer=draft.per_layer)
    draft.dst_tensors = plan.layer_tensors(names[1], given[1], tensors_per_layer=draft.per_layer)


def call_options(draft: PullDraft) -> None:
    """Ours: whether to wait for the key, whether layouts must agree, the sum that verifies the bytes, `timeout` (ms)
    instead of `sync_kv_timeout`, and the W3C trace parent.
    """
    draft.wait_for_key = instance("wait_for_key", draft.options.get("wait_for_key", False), bool)
    draft.strict_layout = instance("strict_layout", draft.options.get("strict_layout", False), bool)
    draft.verify = sum_name(draft.options.get("verify"), draft.verify)
    draft.timeout_ms, draft.traceparent = call_times(draft.options, draft.default_timeout_ms)


def call_times(options: Mapping[str, Any], default_ms: int) -> tuple[float, str]:
    """The timeout (ms) and the trace parent of a call, "" for none."""
    timeout, parent = options.get("timeout"), options.get("traceparent")
    if parent is None:
        parent = ""
    elif not _TRACEPARENT.fullmatch(instance("traceparent", parent, str)):
        raise ValueError(f"traceparent must look like 00-<32 hex>-<16 hex>-<2 hex>, got {parent!r}")
    return default_ms if timeout is None else timeout_ms("timeout", timeout), parent


def sum_name(value: object, default: str) -> str:
    """The sum that a call asks for, "" for none; `default` if it says nothing. LLM_FEATURE_NOT_ENABLED where it cannot
    be made.
    """
    if value is None:
        return default
    name = instance("verify", value, str)
    if name not in sums.NAMES:
        raise ValueError(f"verify must be one of {', '.join(sums.NAMES)}, got {name!r}")
    sums.need(name, where="this side")
    return "" if name == sums.NONE else name


def timeout_ms(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number of milliseconds, got {type(value).__name__}")
    if not 0 < value <= 2**31 - 1:  # nor is NaN
        raise ValueError(f"{name} must be above 0 and at most {2**31 - 1} ms, got {value}")
    return float(value)


def block_keys(draft: PullDraft) -> None:
    draft.key = instance("src_cache_key", draft.key, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex)


def block_lists(draft: PullDraft, src_blocks: object, dst_blocks: object) -> None:
    draft.src_blocks = blocks("src_blocks", src_blocks)
    draft.dst_blocks = blocks("dst_blocks", dst_blocks)


def block_rules(draft: PullDraft) -> None:
    """From blocks: as many source as destination blocks. From a contiguous entry: no source blocks."""
    cache = draft.cache
    require(getattr(cache, "is_blocks_cache", True), "dst_cache is not a blocks cache; use pull_cache")
    src, dst = draft.src_blocks, draft.dst_blocks
    require(dst.size > 0, "dst_blocks must not be empty")
    if isinstance(draft.key, BlocksCacheKey):
        require(src.size > 0, "src_blocks must not be empty for a BlocksCacheKey")
        plan.check_block_pairs(src, dst)
    else:
        key_value(draft)
        require(src.size == 0, "src_blocks must be empty for a key of a contiguous cache")
        plan.check_block_pairs(np.arange(dst.size, dtype=np.int64), dst)
    lowest = min(int(dst.min()), int(src.min()) if src.size else 0)
    require(lowest >= 0, f"block indices must be 0 or above, got {lowest}")


def blocks(name: str, value: object) -> NDArray[np.int64]:
    """Block numbers: a list or tuple of int as in the original, or (ours) an array of one dimension."""
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu":
        if value.dtype.kind == "u" and value.size and int(value.max()) > _INT64_MAX:
            raise ValueError(f"{name} holds {value.max()}, at most {_INT64_MAX} is allowed")
        return value.astype(np.int64)
    if isinstance(value, (list, tuple)) and set(map(type, value)) == {int}:
        with contextlib.suppress(OverflowError):  # the items are looked at one by one below
            return np.array(value, np.int64)
    return np.array(integers(name, value, low=-_INT64_MAX - 1, high=_INT64_MAX), dtype=np.int64)


def invalid(message: str) -> LLMException:
    return LLMException(message, status_code=LLMStatusCode.LLM_PARAM_INVALID)
