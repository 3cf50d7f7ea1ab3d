"""Argument checks: which exception, and that it names argument, value and what is allowed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import _check
from kvpull_async.values._check import Checked, instance, integer, integers, layer_range, require, uint32, uint64


@pytest.mark.parametrize("value", [None, True, False, 1.0, "1", np.bool_(True), np.float32(1), [1], np.array([1, 2])])
def test_what_is_no_integer_is_a_type_error_naming_it(value: object) -> None:
    with pytest.raises(TypeError, match=rf"batch_index must be an integer, got {type(value).__name__}"):
        integer("batch_index", value, low=0, high=9)


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.array(3)])
def test_numpy_integers_become_python_integers(value: object) -> None:
    number = integer("n", value, low=0, high=9)
    assert number == 3
    assert type(number) is int


@pytest.mark.parametrize("value", [-1, 10])
def test_out_of_range_is_a_value_error_naming_the_range(value: int) -> None:
    with pytest.raises(ValueError, match=rf"n must be in 0\.\.9, got {value}"):
        integer("n", value, low=0, high=9)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("uint8", 0, 2**8 - 1),
        ("uint16", 0, 2**16 - 1),
        ("uint32", 0, 2**32 - 1),
        ("uint64", 0, 2**64 - 1),
        ("int32", -(2**31), 2**31 - 1),
        ("int64", -(2**63), 2**63 - 1),
    ],
)
def test_sized_integers_take_exactly_their_range(name: str, low: int, high: int) -> None:
    check = getattr(_check, name)
    assert (check("n", low), check("n", high)) == (low, high)
    for outside in (low - 1, high + 1):
        with pytest.raises(ValueError, match="n must be in"):
            check("n", outside)


def test_instance_never_takes_none_and_names_every_type() -> None:
    assert instance("x", "text", int, str) == "text"
    with pytest.raises(TypeError, match="x must be int or str, got NoneType"):
        instance("x", None, int, str)


@pytest.mark.parametrize("value", [[], [0, 9], (0, 9), [np.int64(4)], (np.uint8(1), 2)])
def test_integers_gives_a_new_list(value: Any) -> None:
    numbers = integers("blocks", value, low=0, high=9)
    assert numbers == list(value)
    assert numbers is not value
    assert all(type(number) is int for number in numbers)


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (None, TypeError, "blocks must be list or tuple"),
        (range(2), TypeError, "blocks must be list or tuple"),
        ([0, True], TypeError, r"blocks\[1\] must be an integer"),
        ([0, None], TypeError, r"blocks\[1\] must be an integer"),
        ([0, 10], ValueError, r"blocks\[1\] must be in 0\.\.9, got 10"),
        ((-1,), ValueError, r"blocks\[0\] must be in 0\.\.9, got -1"),
    ],
)
def test_integers_names_the_bad_item(value: object, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        integers("blocks", value, low=0, high=9)


def test_integers_may_insist_on_a_list() -> None:
    with pytest.raises(TypeError, match="addrs must be list, got tuple"):
        integers("addrs", (1, 2), low=0, high=9, kinds=(list,))


def test_require_raises_param_invalid_unless_told_otherwise() -> None:
    require(True, "fine")
    with pytest.raises(LLMException, match="bad") as caught:
        require(False, "bad")
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    with pytest.raises(LLMException) as caught:
        require(False, "bad", status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)
    assert caught.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED


@pytest.mark.parametrize("layers", [range(0), range(5, 5), range(3, 1), range(2), range(2**32 - 1, 2**32)])
def test_layer_range_accepts(layers: range) -> None:
    assert layer_range("r", layers) is layers


@pytest.mark.parametrize(
    ("layers", "error"),
    [
        (None, TypeError),
        ([0, 1], TypeError),
        (range(0, 2, 2), LLMException),
        (range(0, 0, 2), LLMException),
        (range(-1, 1), LLMException),
        (range(2**32, 2**32 + 1), ValueError),
        (range(1, 2**32 + 1), ValueError),
    ],
)
def test_layer_range_refuses(layers: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="r"):
        layer_range("r", layers)


def test_checked_attributes_check_every_assignment() -> None:
    class Thing:
        count = Checked["int | None"](uint32)
        size = Checked[int](uint64, default=8)

    thing = Thing()
    assert (thing.count, thing.size) == (None, 8)
    thing.count = 3
    assert (thing.count, Thing().count) == (3, None)
    with pytest.raises(TypeError, match="count must be an integer"):
        thing.count = None
    assert thing.count == 3
    assert isinstance(Thing.count, Checked)
