"""Tensors of other libraries as plain memory: where it lies, what keeps it there, and whether it can be used as it is.

A numpy array is known by its class, a torch tensor by what it can be asked: torch is never imported, and the memory
never touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values._check import instance, require, type_error
from kvpull_async.values.desc import CacheDesc
from kvpull_async.values.enums import DataType

__all__ = ["Foreign", "device_of", "pointers", "read"]

_TORCH: Final = ("data_ptr", "is_contiguous", "device", "element_size", "numel", "dtype", "detach")

_PLACES: Final = ("cpu", "npu")

# By the name that both libraries give them (and ml_dtypes its bfloat16).
_FLOATS: Final = {
    "float32": DataType.DT_FLOAT,
    "float16": DataType.DT_FLOAT16,
    "bfloat16": DataType.DT_BF16,
    "float64": DataType.DT_DOUBLE,
}


@dataclass(frozen=True)
class Foreign:
    """The memory of one tensor: it stays where it is for as long as `owner` is held."""

    address: int
    nbytes: int
    dtype: str
    owner: object


def read(desc: CacheDesc, tensors: object) -> list[Foreign]:
    """The memory of `tensors`, one for each of the descriptor's and each of just its bytes.

    Errors: TypeError for what is neither a torch tensor nor a numpy array; LLMException with LLM_PARAM_INVALID for
    another number of tensors or bytes, memory that is not contiguous, neither the CPU's nor an NPU's, or read-only, and
    for one type of floating point given as another. Integers count as plain bytes: they may stand for any type, and
    for them any.
    """
    items: Sequence[Any] = instance("tensors", tensors, list, tuple)
    require(len(items) == desc.num_tensors, f"tensors has {len(items)} tensors for {desc.num_tensors} in cache_desc")
    found = []
    for i, item in enumerate(items):
        name = f"tensors[{i}]"
        memory = _reader(name, item)(name, item)
        require(memory.nbytes == desc.size, f"{name} has {memory.nbytes} bytes, cache_desc says {desc.size}")
        kind = _FLOATS.get(memory.dtype, desc.data_type)
        contradicts = kind is not desc.data_type and desc.data_type in _FLOATS.values()
        require(not contradicts, f"{name} holds {memory.dtype}, cache_desc says {desc.data_type.name}")
        found.append(memory)
    return found


def pointers(owners: Sequence[Any]) -> tuple[Callable[[], int], ...]:
    """For each owner what tells the address where its bytes are now; nothing at all if none of them would tell.

    torch may give a tensor other memory in place, and all that share it. An array stays where it is while it is held.
    """
    found = [getattr(owner, "data_ptr", None) for owner in owners]
    if not any(found):
        return ()
    return tuple(pointer or partial(_address, owner) for pointer, owner in zip(found, owners, strict=True))


def device_of(owner: object) -> int | None:
    """The NPU in whose memory the bytes of an owner are; None for the host's."""
    device: Any = getattr(owner, "device", None)
    return int(device.index or 0) if getattr(device, "type", None) == "npu" else None


def _address(array: np.ndarray[Any, Any]) -> int:
    return array.ctypes.data


def _reader(name: str, item: object) -> Callable[[str, Any], Foreign]:
    if isinstance(item, np.ndarray):
        return _of_array
    if all(hasattr(type(item), attribute) for attribute in _TORCH):
        return _of_tensor
    raise type_error(name, item, "a torch tensor or a numpy array")


def _of_array(name: str, array: np.ndarray[Any, Any]) -> Foreign:
    require(not array.dtype.hasobject, f"{name} holds Python objects, whose memory is elsewhere")
    require(array.flags.c_contiguous, f"{name} is not contiguous (numpy.ascontiguousarray makes a copy that is)")
    require(array.flags.writeable, f"{name} is read-only, and pulls write to registered memory")
    return Foreign(array.ctypes.data, array.nbytes, array.dtype.name, array)


def _of_tensor(name: str, tensor: Any) -> Foreign:
    where = tensor.device
    require(where.type in _PLACES, f"{name} is on {where}; only memory of the CPU or of an NPU can be registered")
    try:
        contiguous = tensor.is_contiguous()
        address = tensor.data_ptr() if contiguous else 0
    except RuntimeError as error:  # a sparse layout, or another that is not one piece of memory
        raise LLMException(
            f"{name} has no memory to register: {error}", status_code=LLMStatusCode.LLM_PARAM_INVALID
        ) from error
    require(contiguous, f"{name} is not contiguous (its method contiguous() makes a copy that is)")
    require(address != 0, f"{name} has no memory")
    nbytes = tensor.numel() * tensor.element_size()
    # Not the tensor itself: assigning to its `data` would let the memory go.
    return Foreign(address, nbytes, str(tensor.dtype).rpartition(".")[2], tensor.detach())
