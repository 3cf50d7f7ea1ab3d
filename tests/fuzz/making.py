"""Messages out of a fuzzer's bytes: every field takes one byte, which chooses among values at and around its limits.

A message is built from the types that the protocol declares, so a new kind or field is covered the day it is made. When
the bytes run out, each field has its ordinary value.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

_EDGES: Final = (
    0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 511, 1023, 1024, 4095, 4096, 4097, 65535,
    65536, 2**20, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33, 2**53, 2**60, 2**61, 2**62, 2**63 - 2, 2**63 - 1,
    2**63, 2**64 - 8, 2**64 - 1, -1, -2, -8, -(2**31), -(2**63),
)  # fmt: skip
_LENGTHS: Final = (0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 511, 512, 513, 1023, 1024, 1025)
_TEXTS: Final = ("", "a", "tcp", "shm", "request", "prefix", "cache", "blocks", "address", "\0", "é" * 40, "%s{0}\n")
_EXPLICIT: Final = 0xF0
"""From this selector on the value itself is among the bytes."""
_U64: Final = struct.Struct("<Q")

Maker = Callable[["Input"], Any]


class Input:
    """The fuzzer's bytes, and what messages may refer to: `numbers` are request ids, `ids` the ids of grants."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self.numbers: list[int] = [1]
        self.ids: list[bytes] = [bytes(range(16))]

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def byte(self) -> int:
        """Zero after the end."""
        at = self._at
        if at >= len(self._data):
            return 0
        self._at = at + 1
        return self._data[at]

    def take(self, n: int) -> bytes:
        """At most n bytes."""
        taken = self._data[self._at : self._at + n]
        self._at += len(taken)
        return taken

    def number(self) -> int:
        return _U64.unpack(self.take(8).ljust(8, b"\0"))[0]

    def one_of(self, values: Sequence[Any]) -> Any:
        return values[self.byte() % len(values)]


def message_maker(kind: type[Any], preferred: Mapping[str, Sequence[Any]] = {}) -> Maker:
    """Makes messages of that kind. `preferred` are values by field name, the first being the ordinary one."""
    makers = []
    for field in msgspec.structs.fields(kind):
        if field.name == "request_id":
            makers.append(_request_id)
        elif field.name == "grant_id":
            makers.append(_grant_id)
        else:
            described = msgspec.inspect.type_info(field.type)
            makers.append(_maker(described, tuple(preferred.get(field.name, ()))))

    def make(given: Input) -> Any:
        return kind(*[maker(given) for maker in makers])

    return make


def _request_id(given: Input) -> int:
    selector = given.byte()
    if selector < 0x80:  # mostly the next one
        number = given.numbers[-1] + 1 + selector // 0x40
        given.numbers.append(number)
        return number
    if selector < _EXPLICIT:
        return given.numbers[selector % len(given.numbers)]
    return given.number()


def _grant_id(given: Input) -> bytes:
    selector = given.byte()
    if selector < _EXPLICIT:
        return given.ids[-1 - selector % len(given.ids)]
    return given.take(16).ljust(16, b"\0")


def _maker(kind: Any, preferred: tuple[Any, ...]) -> Maker:
    """For one described type."""
    inspect = msgspec.inspect
    if isinstance(kind, inspect.IntType):
        return _int_maker(kind, preferred)
    if isinstance(kind, inspect.BoolType):
        return lambda given: bool(given.byte() & 1)
    if isinstance(kind, inspect.StrType):
        return _text_maker(kind, preferred)
    if isinstance(kind, inspect.BytesType):
        return _bytes_maker(kind, preferred)
    if isinstance(kind, inspect.UnionType):
        options = [_maker(option, preferred) for option in kind.types if not isinstance(option, inspect.NoneType)]
        return _chosen([lambda _: None, *options])
    if isinstance(kind, inspect.ListType):
        return _list_maker(kind, _maker(kind.item_type, preferred))
    if isinstance(kind, inspect.TupleType):
        items = [_maker(item, ()) for item in kind.item_types]
        return lambda given: tuple([item(given) for item in items])
    raise NotImplementedError(kind)


def _chosen(makers: Sequence[Maker]) -> Maker:
    return lambda given: makers[given.byte() % len(makers)](given)


def _int_maker(kind: Any, preferred: tuple[Any, ...]) -> Maker:
    low = kind.ge if kind.ge is not None else -(2**63)
    high = kind.le if kind.le is not None else 2**64 - 1
    allowed = [value for value in (*_EDGES, low, high) if low <= value <= high]
    wrong = [value for value in (low - 1, high + 1) if -(2**63) <= value < 2**64]
    values = tuple(dict.fromkeys((*preferred, *allowed, *wrong)))[:_EXPLICIT]

    def make(given: Input) -> int:
        selector = given.byte()
        return values[selector % len(values)] if selector < _EXPLICIT else given.number()

    return make


def _text_maker(kind: Any, preferred: tuple[Any, ...]) -> Maker:
    most = kind.max_length or 64
    values = tuple(dict.fromkeys((*preferred, *(text[:most] for text in _TEXTS), "x" * most, "x" * (most + 1))))

    def make(given: Input) -> str:
        selector = given.byte()
        if selector < _EXPLICIT:
            return values[selector % len(values)]
        return given.take(given.byte() % 64).decode("utf-8", "ignore")

    return make


def _bytes_maker(kind: Any, preferred: tuple[Any, ...]) -> Maker:
    low, high = kind.min_length or 0, kind.max_length or 64
    lengths = [low, *(n for n in _LENGTHS if low < n < high), high, high + 1, max(low - 1, 0)]
    values = tuple(dict.fromkeys((*preferred, *(bytes(range(256)).ljust(n, b"z")[:n] for n in lengths))))

    def make(given: Input) -> bytes:
        selector = given.byte()
        return values[selector % len(values)] if selector < _EXPLICIT else given.take(given.byte())

    return make


def _list_maker(kind: Any, item: Maker) -> Maker:
    most = min(kind.max_length or 8, 70)
    counts = (0, 1, 2, 3, 4, most, most + 1)

    def make(given: Input) -> list[Any]:
        return [item(given) for _ in range(given.one_of(counts))]

    return make
