"""Argument checks: the exception for a wrong type, a wrong range and a wrong combination.

A wrong type is a TypeError, an integer out of range a ValueError, a forbidden combination an LLMException with
LLM_PARAM_INVALID, as in the original. Differs from the original: None and bool are wrong types, and whatever has
``__index__`` (numpy integers) is an integer. This module knows no value type of the package.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar, overload

from kvpull_async.status import LLMException, LLMStatusCode

T = TypeVar("T")
IntCheck = Callable[[str, object], int]

UINT64_MAX = 2**64 - 1
INVALID_ID = UINT64_MAX
"""The id that means "none": a request id or prefix id that is not used."""


def type_error(name: str, value: object, allowed: str) -> TypeError:
    """The TypeError for argument *name*, to be raised by the caller."""
    return TypeError(f"{name} must be {allowed}, got {type(value).__name__}")


def require(condition: bool, message: str, *, status_code: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID) -> None:
    """Raise LLMException (LLM_PARAM_INVALID unless told otherwise) when *condition* does not hold."""
    if not condition:
        raise LLMException(message, status_code=status_code)


def instance(name: str, value: object, *types: type[T]) -> T:
    """*value*, which must be an instance of one of *types*; None never is."""
    for kind in types:
        if isinstance(value, kind):
            return value
    raise type_error(name, value, " or ".join(kind.__name__ for kind in types))


def index(name: str, value: object) -> int:
    """*value* as a Python int of any size."""
    # numpy 1 still lets its own bool pass as an index, with a warning.
    if isinstance(value, bool) or type(value).__name__ == "bool_":
        raise type_error(name, value, "an integer")
    try:
        return operator.index(value)  # type: ignore[arg-type]  # what it does not take is answered below
    except TypeError:
        raise type_error(name, value, "an integer") from None


def integer(name: str, value: object, *, low: int, high: int) -> int:
    """*value* as a Python int in ``low..high``."""
    number = index(name, value)
    if not low <= number <= high:
        raise ValueError(f"{name} must be in {low}..{high}, got {number}")
    return number


uint8: IntCheck = partial(integer, low=0, high=2**8 - 1)
uint16: IntCheck = partial(integer, low=0, high=2**16 - 1)
uint32: IntCheck = partial(integer, low=0, high=2**32 - 1)
uint64: IntCheck = partial(integer, low=0, high=UINT64_MAX)
int32: IntCheck = partial(integer, low=-(2**31), high=2**31 - 1)
int64: IntCheck = partial(integer, low=-(2**63), high=2**63 - 1)


def integers(
    name: str, value: object, *, low: int, high: int, kinds: tuple[type[Sequence[Any]], ...] = (list, tuple)
) -> list[int]:
    """A new list of the integers in *value*, a list or tuple (``kinds`` narrows that), each in ``low..high``."""
    items: Sequence[Any] = instance(name, value, *kinds)
    # Block lists run to many thousands: the usual case is judged as a whole, and only a doubtful one item by item.
    if set(map(type, items)) == {int} and low <= min(items) and max(items) <= high:
        return list(items)
    return [integer(f"{name}[{i}]", item, low=low, high=high) for i, item in enumerate(items)]


def layer_range(name: str, value: object) -> range:
    """*value*, which must be a range with step 1 whose layers are uint32; an empty one passes.

    LLM-DataDist documentation: TypeError for another type, LLM_PARAM_INVALID for another step (even if empty) or a
    negative first layer, ValueError for a layer above uint32.
    """
    layers = instance(name, value, range)
    require(layers.step == 1, f"{name} must have step 1, got {layers}")
    if layers:
        require(layers[0] >= 0, f"{name} must not start below 0, got {layers}")
        uint32(f"{name}'s first layer", layers[0])
        uint32(f"{name}'s last layer", layers[-1])
    return layers


class Checked(Generic[T]):
    """An attribute whose every assignment, the constructor's included, passes *check*; *default* until then."""

    def __init__(self, check: Callable[[str, object], T], *, default: Any = None) -> None:
        self._check = check
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, obj: None, owner: type) -> Checked[T]: ...
    @overload
    def __get__(self, obj: object, owner: type) -> T: ...
    def __get__(self, obj: object | None, owner: type) -> Checked[T] | T:
        if obj is None:
            return self
        value: T = vars(obj).get(self._name, self.default)
        return value

    def __set__(self, obj: object, value: T) -> None:
        vars(obj)[self._name] = self._check(self._name, value)
