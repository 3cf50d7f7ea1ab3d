"""The checks of a pull's arguments: what each accepts, and what it raises for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpull_async import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMException,
    LLMRole,
)
from kvpull_async.managers import checks
from kvpull_async.managers.checks import PullDraft
from kvpull_async.status import LLMStatusCode
from kvpull_async.values import INVALID_ID

DESC = CacheDesc(4, [4, 8], DataType.DT_INT8)
KEY, BY_ID, BLOCKS_KEY = CacheKey(1, 7), CacheKeyByIdAndIndex(1, 3, 0), BlocksCacheKey(1, 0)
ENTRIES = Cache(1, DESC, [16] * 4, None, False, False)
BLOCKS = Cache(1, DESC, [16] * 4, None, False, True)
OLDER = KvCache(1, DESC, [[16] * 4], None)


def draft(**fields: Any) -> PullDraft:
    usual: dict[str, Any] = {
        "key": KEY,
        "cache": ENTRIES,
        "batch_index": 0,
        "size": -1,
        "options": {},
        "role": LLMRole.DECODER,
        "decoder_only": True,
        "remote_access": False,
        "default_timeout_ms": 1000,
    }
    return PullDraft(**{**usual, **fields})


def refuses(
    check: Callable[..., None], error: type[Exception], *args: Any, text: str | None = None, **fields: Any
) -> None:
    with pytest.raises(error, match=text) as caught:
        check(draft(**fields), *args)
    if isinstance(caught.value, LLMException):
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID


def test_unknown_names_are_refused_and_the_known_ones_told() -> None:
    checks.known_names("pull_cache", {"timeout": 1}, checks.PULL_NAMES)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'src_offset'; allowed are .*src_cache_offset"):
        checks.known_names("pull_cache", {"src_offset": 1}, checks.PULL_NAMES)


def test_the_role_matters_where_only_decoders_pull() -> None:
    checks.role(draft())
    checks.role(draft(role=LLMRole.MIX, decoder_only=False))
    for role in (LLMRole.PROMPT, LLMRole.MIX):
        refuses(checks.role, LLMException, role=role, text=role.name)


@pytest.mark.parametrize("key", [None, BLOCKS_KEY, 7, "key", (1, 7)])
def test_keys_of_the_wrong_kind(key: object) -> None:
    refuses(checks.key_type, TypeError, key=key)


def test_with_remote_access_only_ids_are_keys() -> None:
    checks.key_type(draft(key=BY_ID, remote_access=True))
    refuses(checks.key_type, TypeError, key=KEY, remote_access=True, text="cache_key")


@pytest.mark.parametrize("cache", [None, DESC, 1])
def test_a_cache_is_a_handle(cache: object) -> None:
    checks.cache_type(draft(cache=OLDER))
    refuses(checks.cache_type, TypeError, cache=cache)


@pytest.mark.parametrize("value", [0, 3, 2**32 - 1, np.int8(3), np.uint64(5)])
def test_a_batch_index_is_a_uint32_of_any_integer_type(value: Any) -> None:
    checked = draft(batch_index=value)
    checks.batch_index(checked)
    assert checked.batch_index == value
    assert type(checked.batch_index) is int


@pytest.mark.parametrize(
    ("value", "error"), [(-1, ValueError), (2**32, ValueError), (True, TypeError), (1.0, TypeError), (None, TypeError)]
)
def test_what_is_no_batch_index(value: object, error: type[Exception]) -> None:
    refuses(checks.batch_index, error, batch_index=value, text="batch_index")


@pytest.mark.parametrize(
    ("value", "error"),
    [(2**63, ValueError), (-(2**63) - 1, ValueError), (False, TypeError), (1.5, TypeError), (None, TypeError)],
)
def test_what_is_no_size(value: object, error: type[Exception]) -> None:
    refuses(checks.size_type, error, size=value, text="size")


@pytest.mark.parametrize("value", [0, -2, -(2**63)])
def test_a_size_is_minus_one_or_positive(value: int) -> None:
    checks.size_value(draft(size=1))
    checks.size_value(draft(size=-1))
    refuses(checks.size_value, LLMException, size=value, text="above 0")


def test_blocks_caches_have_a_call_of_their_own() -> None:
    checks.not_blocks(draft(cache=ENTRIES))
    checks.not_blocks(draft(cache=OLDER))
    refuses(checks.not_blocks, LLMException, cache=BLOCKS, text="pull_blocks")


# -- offsets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "marked", "offsets"),
    [
        ({}, False, (0, 0)),
        ({"src_cache_offset": None, "dst_cache_offset": None}, False, (0, 0)),
        ({"src_cache_offset": 0}, True, (0, 0)),
        ({"dst_cache_offset": np.int64(5)}, True, (0, 5)),
        ({"src_cache_offset": 3, "dst_cache_offset": 4}, True, (3, 4)),
    ],
)
def test_any_offset_that_is_given_makes_an_offset_pull(options: Any, marked: bool, offsets: tuple[int, int]) -> None:
    checked = draft(options=options)
    checks.offsets(checked)
    assert checked.offset_pull is marked
    assert (checked.src_offset, checked.dst_offset) == offsets


@pytest.mark.parametrize("name", ["src_cache_offset", "dst_cache_offset"])
@pytest.mark.parametrize(
    ("value", "error"), [(-1, ValueError), (2**63, ValueError), (True, TypeError), ("1", TypeError)]
)
def test_what_is_no_offset(name: str, value: object, error: type[Exception]) -> None:
    refuses(checks.offsets, error, options={name: value}, text=name)


# -- keys --------------------------------------------------------------------------------------------------------------


def test_a_key_names_a_request_or_a_prefix() -> None:
    for key in (KEY, BY_ID, CacheKey(cluster_id=1, req_id=INVALID_ID, prefix_id=4)):
        checks.key_value(draft(key=key))
    refuses(checks.key_value, LLMException, key=CacheKey(1, INVALID_ID), text="neither")
    refuses(checks.key_value, LLMException, key=CacheKey(cluster_id=1, req_id=4, prefix_id=4), text="both")


# -- layers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "error"), [(0, LLMException), (-1, ValueError), (2**32, ValueError), (None, TypeError), (2.0, TypeError)]
)
def test_what_is_no_number_of_tensors(value: object, error: type[Exception]) -> None:
    refuses(checks.tensors_per_layer, error, options={"tensor_num_per_layer": value}, text="tensor_num_per_layer")


def test_layers_become_tensors() -> None:
    checked = draft(options={"src_layer_range": range(1, 3), "dst_layer_range": range(2), "tensor_num_per_layer": 3})
    checks.tensors_per_layer(checked)
    checks.layer_ranges(checked)
    assert (checked.src_tensors, checked.dst_tensors) == (range(3, 9), range(6))


@pytest.mark.parametrize("value", [None, range(0), range(5, 5), range(3, 1)])
def test_an_empty_range_is_as_good_as_none(value: Any) -> None:
    checked = draft(options={"src_layer_range": value, "dst_layer_range": value})
    checks.layer_ranges(checked)
    assert checked.src_tensors is None
    assert checked.dst_tensors is None


@pytest.mark.parametrize("name", ["src_layer_range", "dst_layer_range"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        ([0, 1], TypeError),
        ((0, 1), TypeError),
        (1, TypeError),
        (slice(0, 1), TypeError),
        (range(0, 4, 2), LLMException),
        (range(4, 0, -1), LLMException),
        (range(0, 0, 2), LLMException),
        (range(-1, 1), LLMException),
        (range(2**32, 2**32 + 1), ValueError),
    ],
)
def test_what_is_no_layer_range(name: str, value: object, error: type[Exception]) -> None:
    refuses(checks.layer_ranges, error, options={name: value})


@pytest.mark.parametrize(
    ("src", "dst", "error"),
    [
        (range(0, 4, 2), [0], TypeError),  # both types before any step
        (range(-1, 1), range(0, 4, 2), LLMException),
        (range(2**32, 2**32 + 1), range(0, 4, 2), LLMException),  # both steps before any value
    ],
)
def test_of_two_wrong_ranges_types_come_before_steps_before_values(src: Any, dst: Any, error: type[Exception]) -> None:
    refuses(checks.layer_ranges, error, options={"src_layer_range": src, "dst_layer_range": dst})


# -- options of one call -----------------------------------------------------------------------------------------------

TRACE = "00-" + "4b" * 16 + "-" + "0f" * 8 + "-01"


@pytest.mark.parametrize(("options", "expected"), [({}, 1000.0), ({"timeout": None}, 1000.0), ({"timeout": 0.5}, 0.5)])
def test_a_timeout_of_its_own_or_the_usual_one(options: Any, expected: float) -> None:
    checked = draft(options=options)
    checks.call_options(checked)
    assert checked.timeout_ms == expected


@pytest.mark.parametrize("value", [1, 2**31 - 1, 0.001, np.int32(5), np.float64(2.5)])
def test_a_timeout_is_any_positive_number(value: Any) -> None:
    assert checks.timeout_ms("timeout", value) == float(value)


@pytest.mark.parametrize("value", [0, -1, 2**31, 10**400, float("nan"), float("inf"), -0.0])
def test_a_timeout_out_of_range(value: Any) -> None:
    with pytest.raises(ValueError, match="timeout must be above 0"):
        checks.timeout_ms("timeout", value)


@pytest.mark.parametrize("value", [True, "1", None, [1], 1j])
def test_a_timeout_of_the_wrong_type(value: Any) -> None:
    with pytest.raises(TypeError, match="timeout must be a number of milliseconds"):
        checks.timeout_ms("timeout", value)


def test_a_trace_parent_is_a_w3c_trace_context() -> None:
    checked = draft(options={"traceparent": TRACE})
    checks.call_options(checked)
    assert checked.traceparent == TRACE
    for value in ("", TRACE.upper(), TRACE + "-x", TRACE[:-1], TRACE + "\n"):
        refuses(checks.call_options, ValueError, options={"traceparent": value}, text="traceparent")
    refuses(checks.call_options, TypeError, options={"traceparent": TRACE.encode()}, text="traceparent")


# -- blocks ------------------------------------------------------------------------------------------------------------


def blocks(key: Any, cache: Any, src: Any, dst: Any) -> PullDraft:
    checked = draft(key=key, cache=cache)
    checks.block_keys(checked)
    checks.block_lists(checked, src, dst)
    checks.block_rules(checked)
    return checked


@pytest.mark.parametrize("make", [list, tuple, np.array])
def test_block_lists_are_integers_of_any_type(make: Any) -> None:
    if make is np.array:
        values: Any = [np.int32(1), np.uint8(3)]
    else:
        values = make((1, 3))
    checked = blocks(BLOCKS_KEY, BLOCKS, values, values)
    assert checked.src_blocks.tolist() == checked.dst_blocks.tolist() == [1, 3]


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.uint64])
def test_block_lists_may_be_arrays_which_stay_as_they_are(dtype: type) -> None:
    given = np.array([1, 3], dtype)
    checked = blocks(BLOCKS_KEY, BLOCKS, given, given)
    given[:] = 0
    assert checked.src_blocks.tolist() == checked.dst_blocks.tolist() == [1, 3]
    assert checked.src_blocks.dtype == np.int64


@pytest.mark.parametrize("big", [[2**63], [1, 2**64], [-(2**63) - 1], np.array([2**63], np.uint64)])
def test_block_numbers_beyond_int64_are_value_errors(big: Any) -> None:
    with pytest.raises(ValueError, match="src_blocks"):
        checks.block_lists(draft(), big, [1])


@pytest.mark.parametrize(
    "value",
    [None, 1, "12", [1.0], [None], ["1"], [True], [1, True], np.ones(2), np.ones((1, 2), int), np.ones(2, bool)],
)
def test_block_lists_of_the_wrong_type(value: Any) -> None:
    with pytest.raises(TypeError, match="src_blocks"):
        checks.block_lists(draft(), value, [1])
    with pytest.raises(TypeError, match="dst_blocks"):
        checks.block_lists(draft(), [1], value)


@pytest.mark.parametrize(
    ("key", "cache", "src", "dst", "text"),
    [
        (BLOCKS_KEY, ENTRIES, [0], [0], "not a blocks cache"),
        (BLOCKS_KEY, BLOCKS, [0], [], "dst_blocks must not be empty"),
        (BLOCKS_KEY, BLOCKS, [], [0], "src_blocks must not be empty"),
        (BLOCKS_KEY, BLOCKS, [0, 1], [0], "block"),
        (BLOCKS_KEY, BLOCKS, [0, 1], [2, 2], "block"),
        (BLOCKS_KEY, BLOCKS, [0, -1], [2, 3], "0 or above"),
        (BLOCKS_KEY, BLOCKS, [0, 1], [2, -3], "0 or above"),
        (KEY, BLOCKS, [0], [0], "src_blocks must be empty"),
        (BY_ID, BLOCKS, [0], [0], "src_blocks must be empty"),
        (KEY, BLOCKS, [], [1, 1], "block"),
        (CacheKey(1, INVALID_ID), BLOCKS, [], [1], "neither"),
    ],
)
def test_what_no_pull_of_blocks_can_be(key: Any, cache: Any, src: Any, dst: Any, text: str) -> None:
    with pytest.raises(LLMException, match=text) as caught:
        blocks(key, cache, src, dst)
    assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID


@pytest.mark.parametrize(
    ("key", "src", "dst"),
    [(BLOCKS_KEY, [0, 0], [1, 2]), (BLOCKS_KEY, [5, 5], [1, 1]), (KEY, [], [3, 1]), (BY_ID, (), (0,))],
)
def test_what_a_pull_of_blocks_can_be(key: Any, src: Any, dst: Any) -> None:
    checked = blocks(key, BLOCKS, src, dst)
    assert checked.dst_blocks.tolist() == list(dst)


@pytest.mark.parametrize("key", [None, 7, "key"])
def test_keys_of_the_wrong_kind_for_blocks(key: object) -> None:
    refuses(checks.block_keys, TypeError, key=key)


def test_the_sum_is_that_of_the_call_or_else_that_of_the_node() -> None:
    for given, default, expected in [
        ({}, "", ""), ({}, "xxh3", "xxh3"), ({"verify": None}, "crc32", "crc32"), ({"verify": "none"}, "crc32", ""),
        ({"verify": "crc32"}, "", "crc32"), ({"verify": "xxh3"}, "crc32", "xxh3"),
    ]:  # fmt: skip
        checked = draft(options=given, verify=default)
        checks.call_options(checked)
        assert checked.verify == expected
    for value in ("", "CRC32", "md5"):
        refuses(checks.call_options, ValueError, options={"verify": value}, text="none, crc32, xxh3")
    for wrong in (True, 1, b"crc32", np.array(["none", "crc32"])):
        refuses(checks.call_options, TypeError, options={"verify": wrong}, text="verify")
