"""Caches of several layers, and what a test asks about one layer of them."""

from __future__ import annotations

from typing import Any

from kvpull_async import CacheDesc, CacheKey, DataType
from tests import duo

LAYERS = 4
LAYERED = CacheDesc(2 * LAYERS, [4, 1024 * 1024], DataType.DT_UINT8)
"""Its pulls are streamed, two pieces of 1 MiB a layer."""
FLAT = CacheDesc(2 * LAYERS, [4, 1024], DataType.DT_UINT8)
"""Its pulls ride inside the answer."""


def key(entry: int = 0) -> CacheKey:
    return CacheKey(duo.PROMPT, entry)


def layer_holds(cache: Any, layer: int, *, source: int, entry: int = 0, from_layer: int | None = None) -> bool:
    """Whether that layer of that entry holds the same layer (or `from_layer`) of entry `source` of a filled cache."""
    shift = 0 if from_layer is None else 2 * (from_layer - layer)
    arrays = duo.arrays(cache)
    tensors = (2 * layer, 2 * layer + 1)
    return all(bool((arrays[tensor][entry] == duo.pattern(tensor + shift, source)).all()) for tensor in tensors)
