"""The arguments of `transfer_cache_async`: mistakes in the documented order, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpull_async import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from tests.transferring import Ready, ReadyLater
from tests.unit.side import Side, status

PARAM_INVALID = LLMStatusCode.LLM_PARAM_INVALID
DESC = CacheDesc(4, [3, 64], DataType.DT_UINT8)
ADDRESSES = [16, 32, 48, 64]
KEY = CacheKeyByIdAndIndex(2, 1)

NAMES = (
    "src_cache", "layer_synchronizer", "transfer_configs", "src_block_indices", "dst_block_indices",
    "dst_block_memory_size",
)  # fmt: skip


class Asked:
    """A call's arguments, right unless changed."""

    def __init__(self, side: Side, cache: Any, config: Any) -> None:
        self.side = side
        self.given: dict[str, Any] = dict.fromkeys(NAMES)
        self.given.update(src_cache=cache, layer_synchronizer=Ready(), transfer_configs=[config])

    def __call__(self, **changed: Any) -> Any:
        given = {**self.given, **changed}
        arguments, options = [given.pop(name) for name in NAMES], given
        return self.side.manager.transfer_cache_async(*arguments, options=options, caller=None)

    def refuses(self, error: type[Exception], text: str, **changed: Any) -> None:
        with pytest.raises(error, match=text) as caught:
            self(**changed)
        if isinstance(caught.value, LLMException):
            assert caught.value.status_code is PARAM_INVALID


@pytest.fixture(params=["kv", "cache"])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    made = Side(request.param, LLMRole.PROMPT)
    yield made
    made.close()


@pytest.fixture
def asked(side: Side) -> Iterator[Asked]:
    made = Asked(side, side.allocate(DESC), TransferConfig(2, ADDRESSES))
    yield made
    made.given.clear()  # it keeps the cache's memory


@pytest.fixture
def by_key() -> Iterator[Asked]:
    """With remote cache access on."""
    side = Side("cache", LLMRole.PROMPT, enable_cache_manager=True, enable_remote_cache_accessible=True)
    made = Asked(side, side.allocate(DESC), TransferWithCacheKeyConfig(KEY, range(2), range(2)))
    yield made
    made.given.clear()
    side.close()


# Each step puts one argument right, and the next mistake is reported: {what is put right: (error, text before that)}.
STEPS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"src_cache": "a cache"}, TypeError, "src_cache"),
    ({"dst_block_indices": [0]}, TypeError, "dst_block_indices"),
    ({"src_block_indices": [0, 1]}, TypeError, "src_block_indices"),
    ({"dst_block_memory_size": 64}, TypeError, "dst_block_memory_size"),
    ({"src_block_indices": [0]}, LLMException, "2 src_block_indices for 1 dst_block_indices"),
    ({"layer_synchronizer": Ready()}, TypeError, "layer_synchronizer"),
    ({"transfer_configs": []}, TypeError, "transfer_configs"),
]


def test_mistakes_are_reported_in_the_documented_order(side: Side) -> None:
    given: dict[str, Any] = dict.fromkeys(NAMES, "wrong")
    asked = Asked(side, None, None)
    for right, error, text in STEPS:
        asked.refuses(error, text, **given)
        given.update(right)
        if right.get("src_cache"):
            given["src_cache"] = side.allocate(DESC)
    asked(**given)


def test_later_mistakes_come_later(side: Side) -> None:
    """Size without blocks, then tensors, then the configs."""
    odd = side.allocate(CacheDesc(3, [3, 64], DataType.DT_UINT8))
    even = side.allocate(DESC)
    wrong = TransferConfig(2, ADDRESSES[:3])
    asked = Asked(side, odd, wrong)
    asked.refuses(TypeError, "transfer_configs", transfer_configs=[None], dst_block_memory_size=8)
    asked.refuses(LLMException, "dst_block_memory_size", dst_block_memory_size=8)
    asked.refuses(LLMException, "3 tensors", dst_block_memory_size=0)
    asked.refuses(LLMException, r"transfer_configs\[0\].dst_addrs must hold 4 addresses, got 3", src_cache=even)


@pytest.mark.parametrize("name", ["src_cache", "layer_synchronizer", "transfer_configs"])
def test_what_must_be_given_may_not_be_none(asked: Asked, name: str) -> None:
    asked.refuses(TypeError, name, **{name: None})


@pytest.mark.parametrize("name", ["src_block_indices", "dst_block_indices"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({0: 1}, TypeError),
        (np.array([0]), TypeError),
        ([True], TypeError),
        ([None], TypeError),
        ([0.0], TypeError),
        ([-1], ValueError),
        ([2**64], ValueError),
    ],
)
def test_block_lists_are_lists_of_uint64(asked: Asked, name: str, value: Any, error: type[Exception]) -> None:
    both = {"src_block_indices": [0], "dst_block_indices": [0]}
    asked.refuses(error, name, **{**both, name: value})


def test_numpy_integers_are_integers(asked: Asked) -> None:
    asked(src_block_indices=(np.uint8(0),), dst_block_indices=[np.int64(1)], dst_block_memory_size=np.int32(64))


@pytest.mark.parametrize(
    ("value", "error"), [(True, TypeError), (1.0, TypeError), (-1, ValueError), (2**64, ValueError)]
)
def test_the_memory_size_is_a_uint64(asked: Asked, value: Any, error: type[Exception]) -> None:
    asked.refuses(error, "dst_block_memory_size", dst_block_indices=[0], dst_block_memory_size=value)


def test_blocks_cannot_be_sent_into_an_entry(asked: Asked) -> None:
    for nothing in (None, [], ()):
        asked.refuses(LLMException, "without dst_block_indices", src_block_indices=[0], dst_block_indices=nothing)


def test_an_entry_needs_to_know_the_size_of_the_blocks(asked: Asked) -> None:
    for size in (None, 0):
        asked.refuses(LLMException, "dst_block_memory_size", dst_block_indices=[0], dst_block_memory_size=size)
    asked(dst_block_indices=[0], dst_block_memory_size=64)


def test_an_empty_block_list_is_none(asked: Asked) -> None:
    asked(src_block_indices=[], dst_block_indices=())
    asked(src_block_indices=[], dst_block_indices=[3], dst_block_memory_size=8)


def test_one_block_has_one_source(asked: Asked) -> None:
    asked.refuses(LLMException, "block", src_block_indices=[0, 1], dst_block_indices=[2, 2])
    asked.refuses(LLMException, "block", dst_block_indices=[2, 2], dst_block_memory_size=8)
    asked.refuses(LLMException, "exists in no cache", src_block_indices=[0], dst_block_indices=[2**63])
    asked(src_block_indices=[0, 0], dst_block_indices=[2, 2])


def test_a_coroutine_needs_a_loop(asked: Asked) -> None:
    asked.refuses(TypeError, "awaitable API", layer_synchronizer=ReadyLater())


@pytest.mark.parametrize(
    "config",
    [
        TransferConfig(2, ADDRESSES, range(0)),
        TransferConfig(2, ADDRESSES, range(1, 3)),
        TransferConfig(2, ADDRESSES, range(2, 2)),
        TransferConfig(2, ADDRESSES, range(1)),
        TransferConfig(2, ADDRESSES[:2]),
        TransferConfig(2, []),
    ],
)
def test_ranges_lie_inside_and_addresses_match_them(asked: Asked, config: TransferConfig) -> None:
    asked.refuses(LLMException, r"transfer_configs\[1\]", transfer_configs=[TransferConfig(2, ADDRESSES), config])


def test_good_configs(asked: Asked) -> None:
    asked(transfer_configs=())
    asked(transfer_configs=(TransferConfig(2, ADDRESSES), TransferConfig(3, ADDRESSES[:2], range(1, 2))))


def test_blocks_have_no_batch_index(asked: Asked) -> None:
    config = TransferConfig(2, ADDRESSES, src_batch_index=1)
    blocks = {"src_block_indices": [0], "dst_block_indices": [0]}
    asked.refuses(LLMException, "src_batch_index must be 0", transfer_configs=[config], **blocks)
    asked(transfer_configs=[config])


@pytest.mark.parametrize(
    ("option", "error"),
    [({"timeout": 0}, ValueError), ({"timeout": "1"}, TypeError), ({"traceparent": "00-1"}, ValueError)],
)
def test_our_own_options_are_checked_last(asked: Asked, option: dict[str, Any], error: type[Exception]) -> None:
    asked.refuses(error, next(iter(option)), **option)
    asked.refuses(LLMException, "dst_addrs", transfer_configs=[TransferConfig(2, [])], **option)


def test_configs_are_not_changed(asked: Asked) -> None:
    config = TransferConfig(2, ADDRESSES)
    asked(transfer_configs=[config])
    assert config.src_layer_range is None


def test_host_caches_may_be_sent(side: Side) -> None:
    host = side.allocate(CacheDesc(4, [3, 64], DataType.DT_UINT8, Placement.HOST))
    Asked(side, host, TransferConfig(2, ADDRESSES))()


def test_only_a_prompt_node_transfers_with_the_older_manager() -> None:
    side = Side("kv", LLMRole.DECODER)
    try:
        asked = Asked(side, side.allocate(DESC), TransferConfig(2, ADDRESSES))
        asked.refuses(LLMException, "role PROMPT", src_cache=None)
    finally:
        side.close()


@pytest.mark.parametrize("role", LLMRole)
def test_any_node_transfers_with_the_newer_manager(role: LLMRole) -> None:
    side = Side("cache", role)
    try:
        Asked(side, side.allocate(DESC), TransferConfig(2, ADDRESSES))()
    finally:
        side.close()


# -- by key ------------------------------------------------------------------------------------------------------------


def test_the_mode_decides_the_kind_of_config(asked: Asked, by_key: Asked) -> None:
    key, address = TransferWithCacheKeyConfig(KEY, range(2), range(2)), TransferConfig(2, ADDRESSES)
    asked.refuses(TypeError, "TransferConfig, got TransferWithCacheKeyConfig", transfer_configs=[key])
    by_key.refuses(TypeError, "TransferWithCacheKeyConfig, got TransferConfig", transfer_configs=[address])
    by_key()


def test_the_older_manager_knows_no_remote_access() -> None:
    side = Side("kv", LLMRole.PROMPT, enable_cache_manager=True, enable_remote_cache_accessible=True)
    try:
        Asked(side, side.allocate(DESC), TransferConfig(2, ADDRESSES))()
    finally:
        side.close()


def test_what_joins_two_attributes_of_a_config_is_tested_again(by_key: Asked) -> None:
    config = TransferWithCacheKeyConfig(KEY, range(2), range(2))
    config.dst_layer_range = range(3)
    by_key.refuses(LLMException, "equally long", transfer_configs=[config])
    config.dst_layer_range = range(7, 9)
    by_key(transfer_configs=[config])
    config.src_layer_range = range(1, 3)
    by_key.refuses(LLMException, "src_layer_range", transfer_configs=[config])


def test_a_blocks_key_needs_blocks(by_key: Asked) -> None:
    config = TransferWithCacheKeyConfig(BlocksCacheKey(2, 5), range(2), range(2))
    by_key.refuses(LLMException, "needs dst_block_indices", transfer_configs=[config])
    by_key(transfer_configs=[config], dst_block_indices=[0], dst_block_memory_size=8)


def test_a_refused_call_has_no_thread_and_no_count(asked: Asked) -> None:
    assert status(lambda: asked(transfer_configs=[TransferConfig(2, [])])) is PARAM_INVALID
    asked()
    assert "transfers_started" not in asked.side.engine.snapshot()
