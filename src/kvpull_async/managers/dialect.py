"""What tells the older manager (`KvCacheManager`) from the newer one (`CacheManager`): a table of codes, roles and
orders of checks. It must not contain behaviour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvpull_async.managers import checks
from kvpull_async.managers.checks import PullDraft
from kvpull_async.status import LLMStatusCode

__all__ = ["CACHE", "KV", "Dialect"]

Check = Callable[[PullDraft], None]


@dataclass(frozen=True)
class Dialect:
    """LLM-DataDist documentation: the order of checks decides which of several wrong arguments is reported."""

    name: str
    pull_checks: tuple[Check, ...]
    timeout_status: LLMStatusCode
    out_of_memory_status: LLMStatusCode
    key_bound_status: LLMStatusCode
    decoder_pulls_only: bool
    prompt_keys_only: bool
    prompt_transfers_only: bool
    last_key_counts: bool
    knows_remote_access: bool
    swap_names: tuple[str, str]
    """What `swap_blocks` calls its source and its destination."""
    negative_block: type[Exception]
    """What `copy_blocks` raises for a number that no block can have."""


KV: Final = Dialect(
    name="KvCacheManager",
    pull_checks=(
        checks.role,
        checks.key_type,
        checks.cache_type,
        checks.size_type,
        checks.batch_index,
        checks.size_value,
        checks.offsets,
        checks.key_value,
        checks.tensors_per_layer,
        checks.layer_ranges,
        checks.call_options,
    ),
    timeout_status=LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
    out_of_memory_status=LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
    key_bound_status=LLMStatusCode.LLM_FAILED,
    decoder_pulls_only=True,
    prompt_keys_only=True,
    prompt_transfers_only=True,
    last_key_counts=True,
    knows_remote_access=False,
    swap_names=("src", "dst"),
    negative_block=ValueError,
)

CACHE: Final = Dialect(
    name="CacheManager",
    pull_checks=(
        checks.key_type,
        checks.cache_type,
        checks.batch_index,
        checks.size_type,
        checks.not_blocks,
        checks.size_value,
        checks.tensors_per_layer,
        checks.key_value,
        checks.layer_ranges,
        checks.offsets,
        checks.call_options,
    ),
    timeout_status=LLMStatusCode.LLM_TIMEOUT,
    out_of_memory_status=LLMStatusCode.LLM_OUT_OF_MEMORY,
    key_bound_status=LLMStatusCode.LLM_PARAM_INVALID,
    decoder_pulls_only=False,
    prompt_keys_only=False,
    prompt_transfers_only=False,
    last_key_counts=False,
    knows_remote_access=True,
    swap_names=("src_cache", "dst_cache"),
    negative_block=TypeError,
)
