"""What every byte of a chaos run has to be: a function of who made it, for what, when, of which tensor, and its place.

A word of memory is `table[its index] ^ mixed(identity)`, so whole arrays are written and compared fast, and what was
found can be turned back into the identities that it consists of. It must not know pulls or processes.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["CANARY", "MOST", "Identity", "blank", "fill", "holds", "identities", "intact", "refill", "rows", "story"]

Bytes = NDArray[np.uint8]
MOST: Final = 1024 * 1024
"""Bytes that one row of a tensor may have."""
CANARY: Final = 0xA5
_MASK: Final = 2**64 - 1
_FIRST, _SECOND, _STEP = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15
_SHOWN: Final = 4
_LOOKED_AT: Final = 4096
"""Words around the first wrong one that are turned back."""


class Identity(NamedTuple):
    """Whose bytes these are. `number` names a cache, a block or a push of that source (or pusher) and incarnation."""

    kind: int
    source: int
    incarnation: int
    number: int
    generation: int
    tensor: int

    def packed(self) -> int:
        value = 0
        for part, bits in zip(self, _BITS, strict=True):
            if not 0 <= part < 1 << bits:
                raise ValueError(f"{self}: {part} has no room in {bits} bits")
            value = value << bits | part
        return value


_BITS: Final = (4, 8, 12, 24, 10, 6)
KINDS: Final = ("?", "key", "block", "slot", "pushed slot", "pushed block", "spoilt")


def _mixed(value: int) -> int:
    """A bijection of 64 bits in which every bit of the result hangs on every bit given."""
    value = (value + _STEP) & _MASK
    value = (value ^ value >> 30) * _FIRST & _MASK
    value = (value ^ value >> 27) * _SECOND & _MASK
    return value ^ value >> 31


def _unshifted(value: int, by: int) -> int:
    found = value
    for _ in range(64 // by):
        found = value ^ found >> by
    return found


def _unmixed(value: int) -> int:
    value = _unshifted(value, 31) * pow(_SECOND, -1, 1 << 64) & _MASK
    value = _unshifted(value, 27) * pow(_FIRST, -1, 1 << 64) & _MASK
    return (_unshifted(value, 30) - _STEP) & _MASK


def _table() -> NDArray[np.uint64]:
    value = np.arange(1, MOST // 8 + 2, dtype=np.uint64) * np.uint64(_STEP)
    value = (value ^ value >> np.uint64(30)) * np.uint64(_FIRST)
    value = (value ^ value >> np.uint64(27)) * np.uint64(_SECOND)
    mixed: NDArray[np.uint64] = value ^ value >> np.uint64(31)
    return mixed


_TABLE: Final = _table()


def _unpacked(value: int) -> Identity:
    parts = []
    for bits in reversed(_BITS):
        parts.append(value & (1 << bits) - 1)
        value >>= bits
    return Identity(*reversed(parts))


def fill(row: Bytes, identity: Identity) -> None:
    """Write a whole row; its bytes are a multiple of 8, at most `MOST`."""
    words = row.view(np.uint64)
    np.bitwise_xor(_TABLE[: words.size], np.uint64(_mixed(identity.packed())), out=words)


def _expected(identity: Identity, offset: int, nbytes: int) -> Bytes:
    first, last = offset // 8, -(-(offset + nbytes) // 8)
    words = _TABLE[first:last] ^ np.uint64(_mixed(identity.packed()))
    expected: Bytes = words.view(np.uint8)[offset - 8 * first :][:nbytes]
    return expected


def holds(found: Bytes, identity: Identity, offset: int = 0) -> bool:
    """Whether these are the bytes that such a row has from `offset` on."""
    return bool((found == _expected(identity, offset, found.size)).all())


def identities(found: Bytes, offset: int = 0) -> dict[Identity, int]:
    """Of which identities these bytes consist (`offset` a multiple of 8), and how many words each has. Words that were
    never written so show as identities that nobody has.
    """
    words = found[: found.size // 8 * 8].view(np.uint64) ^ _TABLE[offset // 8 :][: found.size // 8]
    values, counts = np.unique(words, return_counts=True)
    order = np.argsort(counts)[::-1][:_SHOWN]
    return {_unpacked(_unmixed(int(values[i]))): int(counts[i]) for i in order}


def story(found: Bytes, identity: Identity, offset: int = 0) -> str:
    """Where bytes differ from what they must be, and what is there instead."""
    right = _expected(identity, offset, found.size)
    wrong = np.flatnonzero(found != right)
    if not wrong.size:
        return "no byte differs (any more)"
    first, last = int(wrong[0]), int(wrong[-1])
    start = max(0, first // 8 * 8)
    lines = [
        f"{wrong.size} of {found.size} bytes differ, the first at {first}, the last at {last}; expected {identity}",
        f"  expected {right[start : start + 32].tobytes().hex(' ', 8)}",
        f"  found    {found[start : start + 32].tobytes().hex(' ', 8)}",
    ]
    if offset % 8 == 0:
        around = found[start : start + 8 * _LOOKED_AT].copy()
        for who, count in identities(around, offset + start).items():
            lines.append(f"  from there on {count} words of {_named(who, around)}")
    return "\n".join(lines)


def _named(who: Identity, around: Bytes) -> str:
    if 0 < who.kind < len(KINDS):
        return f"{KINDS[who.kind]}: {who}"
    if intact(around[:8]):
        return "the canary"
    return "zeros" if not around[:8].any() else "nothing that anybody wrote"


def refill(array: Bytes) -> None:
    """Nothing of it is anybody's now."""
    array.fill(CANARY)


def intact(array: Bytes) -> bool:
    """Whether it is the canary still."""
    return bool((array == CANARY).all())


def blank(array: Bytes) -> bool:
    """Whether it is zeros, as memory that was just allocated."""
    return not array.any()


def rows(manager: Any, cache: Any) -> list[Bytes]:
    """The memory of a cache, as one array of (rows, bytes) for each tensor."""
    desc = cache.cache_desc
    arrays = [manager.get_cache_tensors(cache, tensor)[0].numpy() for tensor in range(desc.num_tensors)]
    return [array.reshape(-1).view(np.uint8).reshape(desc.shape[0], -1) for array in arrays]
