"""Sums over bytes, by name: what tells whether two sides have the same bytes. It must not know caches, or wait.

A sum finds damage. It does not keep out somebody who means it: who can change the bytes can mostly change the sum too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol, cast

from kvpull_async.status import LLMException, LLMStatusCode

__all__ = ["NAMES", "NONE", "Sum", "asked", "begin", "need", "steps", "sum_of"]

NONE: Final = "none"
NAMES: Final = (NONE, "crc32", "xxh3")
"""What `verify` may be. The second comes with Python; the third is some ten times as fast, and a package of its own."""

Pieces = Iterable[Sequence[memoryview]]


class Sum(Protocol):
    """A sum that grows with the bytes."""

    def update(self, data: memoryview, /) -> object: ...

    def digest(self) -> bytes: ...


class _Crc32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: memoryview, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


def _xxh3() -> Sum:
    from xxhash import xxh3_64  # noqa: PLC0415  (an extra that may be missing)

    return cast("Sum", xxh3_64())


_MAKERS: Final[dict[str, Callable[[], Sum]]] = {"crc32": _Crc32, "xxh3": _xxh3}


def begin(name: str, *, where: str) -> Sum:
    """A new sum. LLM_FEATURE_NOT_ENABLED without the package that it needs, LLM_PARAM_INVALID for a name that is none;
    `where` says on which side, for people.
    """
    maker = _MAKERS.get(name)
    if maker is None:
        known = ", ".join(_MAKERS)
        raise LLMException(f"sums are {known}, not {name!r}", status_code=LLMStatusCode.LLM_PARAM_INVALID)
    try:
        return maker()
    except ImportError as error:
        reason = f"verify={name!r} needs the package xxhash on {where}: pip install 'kvpull[verify]' there"
        raise LLMException(reason, status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED) from error


def asked(name: str, *, where: str) -> Sum | None:
    """What a peer asks for: a new sum, or None if that is none (""). Raises as `begin`."""
    return begin(name, where=where) if name else None


def need(name: str, *, where: str) -> None:
    """Raises as `begin`, unless there is nothing to sum: "" or "none"."""
    if name not in ("", NONE):
        begin(name, where=where)


def steps(growing: Sum, pieces: Pieces) -> Iterator[int]:
    """Add the pieces, a batch at a time; each step yields its bytes. As long as a piece is added others may run."""
    for batch in pieces:
        added = 0
        for piece in batch:
            growing.update(piece)
            added += piece.nbytes
        yield added


def sum_of(growing: Sum, pieces: Pieces) -> bytes:
    """The sum over all of the pieces, here and now: for few bytes."""
    for _ in steps(growing, pieces):
        pass
    return growing.digest()
