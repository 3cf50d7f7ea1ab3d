"""Memory for programs that register their own: arrays that other processes of this host can read at memory speed.

It must not know caches or peers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from kvpull_async.memory.shared import SharedFile
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values._check import index

__all__ = ["allocate_shared"]


def allocate_shared(shape: int | Sequence[int], dtype: DTypeLike = np.uint8) -> NDArray[Any]:
    """A zeroed, contiguous array of `shape` whose memory peers on this host map instead of reading it piecemeal.

    Register its address (`array.ctypes.data`, or `torch.from_numpy(array).data_ptr()`) with `register_cache` or
    `register_blocks_cache`; parts of it will do as well. Without it registered memory works too, slower. The memory
    lives as long as the array, views of it, and tensors made of it do. For bfloat16 take `numpy.uint16` and view it.
    Unlike other arrays it is not copied by a fork: parent and child then write to the same memory.

    Ours: the original has nothing of the kind. Errors: TypeError; ValueError for a shape without elements;
    LLMException with LLM_OUT_OF_MEMORY.
    """
    dims = [shape] if not isinstance(shape, Sequence) else list(shape)
    sizes = [index("shape", dim) for dim in dims]
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"dtype must be of plain numbers, got {kind}")
    if not sizes or min(sizes) < 1:
        raise ValueError(f"shape must hold dimensions of at least 1, got {shape}")
    count = 1
    for size in sizes:
        count *= size
    nbytes = count * kind.itemsize
    try:
        file = SharedFile(nbytes)
    except (OSError, OverflowError) as error:
        raise LLMException(
            f"{nbytes} bytes could not be allocated: {error}", status_code=LLMStatusCode.LLM_OUT_OF_MEMORY
        ) from error
    memory = (ctypes.c_char * nbytes).from_address(file.address)
    memory._kvpull_owner = file  # type: ignore[attr-defined]  # the array keeps the memory alive
    return np.frombuffer(memoryview(memory), kind).reshape(sizes)
