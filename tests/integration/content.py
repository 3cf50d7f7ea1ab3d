"""What the bytes of a cache are in tests that check every byte: a function of key, tensor, generation and offset."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["SPOILT", "content"]

SPOILT: Final = 0xEE
"""What a source writes over memory that it has taken back."""
_STEP: Final = np.uint32(2_654_435_761)


def content(key: int, tensor: int, generation: int, *, offset: int = 0, nbytes: int) -> NDArray[np.uint8]:
    """The bytes from `offset` on. No two caches, tensors, generations or places of one have much in common."""
    seed = np.uint32((key * 1_000_003 + tensor * 7_919 + generation * 104_729 + 12_345) % 2**32)
    first, last = offset // 4, -(-(offset + nbytes) // 4)
    words = np.arange(first, last, dtype=np.uint32) * _STEP ^ seed
    found: NDArray[np.uint8] = words.view(np.uint8)[offset - 4 * first :][:nbytes]
    return found
