"""Keys: how their arguments bind, what they refuse, and that they compare by identity."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import INVALID_ID, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex

NONE = 2**64 - 1


def key(*args: Any, **kwargs: Any) -> tuple[int, int, int, int]:
    made = CacheKey(*args, **kwargs)
    return made.cluster_id, made.req_id, made.model_id, made.prefix_id


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((1, 2), {}, (1, 2, 0, NONE)),
        ((1, 2, 3, 4), {}, (1, 2, 3, 4)),
        ((), {"cluster_id": 1, "req_id": 2}, (1, 2, 0, NONE)),
        ((), {"prompt_cluster_id": 1, "req_id": 2, "model_id": 3}, (1, 2, 3, NONE)),
        ((1,), {"req_id": 2, "prefix_id": 4}, (1, 2, 0, 4)),
        ((1, 2), {"req_id": 9}, (1, 2, 0, NONE)),
        ((1, 2), {"prompt_cluster_id": 9}, (1, 2, 0, NONE)),
        ((), {"prompt_cluster_id": 9, "cluster_id": 1, "req_id": 2}, (1, 2, 0, NONE)),
        ((NONE, np.uint64(NONE)), {}, (NONE, NONE, 0, NONE)),
    ],
)
def test_cache_key_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert key(*args, **kwargs) == expected
    assert CacheKey(*args, **kwargs).prompt_cluster_id == expected[0]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1,), {}),
        ((), {"req_id": 1}),
        ((1, 2, 3, 4, 5), {}),
        ((1, 2), {"x": 1}),
        ((1, 2, 3), {"cluster_id": 1, "req_id": 2}),
    ],
)
def test_row_175_missing_surplus_and_unknown_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(LLMException) as caught:
        CacheKey(*args, **kwargs)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


@pytest.mark.parametrize("name", ["cluster_id", "req_id", "model_id", "prefix_id"])
@pytest.mark.parametrize(("value", "error"), [(None, TypeError), (True, TypeError), ("1", TypeError), (-1, ValueError)])
def test_cache_key_values_are_uint64(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        CacheKey(**{"cluster_id": 1, "req_id": 2, name: value})
    with pytest.raises(ValueError, match=name):
        CacheKey(**{"cluster_id": 1, "req_id": 2, name: 2**64})


def test_prefix_and_padding() -> None:
    request, prefix, padding, both = (
        CacheKey(1, 2),
        CacheKey(1, NONE, 0, 7),
        CacheKey(1, INVALID_ID),
        CacheKey(1, 2, 0, 7),
    )
    assert [k.is_prefix for k in (request, prefix, padding, both)] == [False, True, False, True]
    assert [k.is_padding for k in (request, prefix, padding, both)] == [False, False, True, False]


@pytest.mark.parametrize(
    "make", [lambda: CacheKey(1, 2), lambda: BlocksCacheKey(1), lambda: CacheKeyByIdAndIndex(1, 2)]
)
def test_row_176_keys_compare_by_identity_and_do_not_change(make: Any) -> None:
    one, other = make(), make()
    assert one != other
    assert len({one, other, one}) == 2
    assert repr(one) == repr(pickle.loads(pickle.dumps(one)))
    with pytest.raises(FrozenInstanceError):
        one.cluster_id = 3


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((1,), {}, (1, 0)),
        ((1, 2), {}, (1, 2)),
        ((), {"prompt_cluster_id": 1, "model_id": 2}, (1, 2)),
        ((), {"cluster_id": 1, "prompt_cluster_id": 9}, (1, 0)),
    ],
)
def test_blocks_cache_key_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], expected: tuple[int, ...]) -> None:
    made = BlocksCacheKey(*args, **kwargs)
    assert (made.cluster_id, made.model_id) == expected
    assert made.prompt_cluster_id == expected[0]


@pytest.mark.parametrize(
    ("args", "kwargs", "error"),
    [
        ((), {}, LLMException),
        ((1, 2, 3), {}, LLMException),
        ((1,), {"req_id": 1}, LLMException),
        ((None,), {}, TypeError),
        ((-1,), {}, ValueError),
        ((1, 2**64), {}, ValueError),
        ((1, True), {}, TypeError),
    ],
)
def test_blocks_cache_key_refusals(args: tuple[Any, ...], kwargs: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        BlocksCacheKey(*args, **kwargs)


def test_key_by_id() -> None:
    made = CacheKeyByIdAndIndex(np.uint32(1), -5)
    assert (made.cluster_id, made.cache_id, made.batch_index) == (1, -5, 0)
    assert type(made.cluster_id) is int


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((None, 1), TypeError),
        ((1, True), TypeError),
        ((-1, 1), ValueError),
        ((1, 2**63), ValueError),
        ((1, 1, -1), ValueError),
        ((1, 1, 2**32), ValueError),
    ],
)
def test_key_by_id_refusals(args: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        CacheKeyByIdAndIndex(*args)
