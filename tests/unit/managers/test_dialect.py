"""The table that tells the two managers apart: orders of checks, roles, codes."""

from __future__ import annotations

from typing import Any

import pytest

from kvpull_async import Cache, CacheDesc, CacheKey, DataType, KvCache, LLMException, LLMRole, LLMStatusCode
from kvpull_async.managers import dialect
from kvpull_async.managers.dialect import CACHE, KV, Dialect
from kvpull_async.values import INVALID_ID
from tests.unit.managers.test_checks import draft

DESC = CacheDesc(4, [4, 8], DataType.DT_INT8)

# One argument at a time is put right, in the order in which the original reports them.
RIGHT: dict[str, tuple[str, Any]] = {
    "role": ("role", LLMRole.DECODER),
    "key's type": ("key", CacheKey(1, INVALID_ID)),
    "cache's type": ("cache", Cache(1, DESC, [16] * 4, None, False, True)),
    "size's type": ("size", 0),
    "batch_index": ("batch_index", 0),
    "cache's kind": ("cache", KvCache(1, DESC, [[16] * 4], None)),
    "size": ("size", -1),
    "offsets": ("dst_cache_offset", 0),
    "key": ("key", CacheKey(1, 1)),
    "tensor_num_per_layer": ("tensor_num_per_layer", 2),
    "ranges": ("dst_layer_range", range(1)),
    "timeout": ("timeout", 1),
}
WRONG = {
    "role": LLMRole.PROMPT,
    "key": None,
    "cache": None,
    "size": None,
    "batch_index": -1,
    "dst_cache_offset": -1,
    "tensor_num_per_layer": 0,
    "dst_layer_range": [0],
    "timeout": "soon",
}
REPORTED = {
    "role": (LLMException, "role"),
    "key's type": (TypeError, "cache_key"),
    "cache's type": (TypeError, "cache must be"),
    "size's type": (TypeError, "size"),
    "batch_index": (ValueError, "batch_index"),
    "cache's kind": (LLMException, "blocks cache"),
    "size": (LLMException, "size"),
    "offsets": (ValueError, "dst_cache_offset"),
    "key": (LLMException, "neither"),
    "tensor_num_per_layer": (LLMException, "tensor_num_per_layer"),
    "ranges": (TypeError, "dst_layer_range"),
    "timeout": (TypeError, "timeout"),
}
ORDERS = {
    KV: [
        "role", "key's type", "cache's type", "size's type", "batch_index", "size", "offsets", "key",
        "tensor_num_per_layer", "ranges", "timeout",
    ],
    CACHE: [
        "key's type", "cache's type", "batch_index", "size's type", "cache's kind", "size", "tensor_num_per_layer",
        "key", "ranges", "offsets", "timeout",
    ],
}  # fmt: skip


@pytest.mark.parametrize("manager", ORDERS, ids=lambda manager: manager.name)
def test_of_several_wrong_arguments_the_originals_first_one_is_reported(manager: Dialect) -> None:
    given: dict[str, Any] = dict(WRONG)
    for argument in ORDERS[manager]:
        error, text = REPORTED[argument]
        with pytest.raises(error, match=text):
            _check(manager, given)
        name, value = RIGHT[argument]
        given[name] = value
    _check(manager, given)


def _check(manager: Dialect, given: dict[str, Any]) -> None:
    fields = {name: value for name, value in given.items() if name in ("role", "key", "cache", "size", "batch_index")}
    options = {name: value for name, value in given.items() if name not in fields}
    checked = draft(**fields, options=options, decoder_only=manager.decoder_pulls_only)
    for check in manager.pull_checks:
        check(checked)


def test_the_codes_of_the_two_managers() -> None:
    names = ("timeout_status", "out_of_memory_status", "key_bound_status")
    assert [getattr(KV, name) for name in names] == [
        LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
        LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
        LLMStatusCode.LLM_FAILED,
    ]
    assert [getattr(CACHE, name) for name in names] == [
        LLMStatusCode.LLM_TIMEOUT,
        LLMStatusCode.LLM_OUT_OF_MEMORY,
        LLMStatusCode.LLM_PARAM_INVALID,
    ]


def test_both_managers_check_the_same_things_in_orders_of_their_own() -> None:
    assert set(CACHE.pull_checks) - set(KV.pull_checks) == {dialect.checks.not_blocks}
    assert set(KV.pull_checks) - set(CACHE.pull_checks) == {dialect.checks.role}
