"""Tensor and TensorDesc: a cache's tensor as a numpy array. They share the memory they are given and free nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpull_async.values._check import index, instance, int64
from kvpull_async.values.enums import DataType

# numpy has no bfloat16: its bits travel as uint16.
_STORAGE: dict[DataType, np.dtype[Any]] = {
    DataType.DT_FLOAT: np.dtype(np.float32),
    DataType.DT_FLOAT16: np.dtype(np.float16),
    DataType.DT_INT8: np.dtype(np.int8),
    DataType.DT_INT32: np.dtype(np.int32),
    DataType.DT_UINT8: np.dtype(np.uint8),
    DataType.DT_INT16: np.dtype(np.int16),
    DataType.DT_UINT16: np.dtype(np.uint16),
    DataType.DT_UINT32: np.dtype(np.uint32),
    DataType.DT_INT64: np.dtype(np.int64),
    DataType.DT_UINT64: np.dtype(np.uint64),
    DataType.DT_DOUBLE: np.dtype(np.float64),
    DataType.DT_BOOL: np.dtype(np.bool_),
    DataType.DT_STRING: np.dtype("S16"),
    DataType.DT_BF16: np.dtype(np.uint16),
}
_NATURAL = {dtype: data_type for data_type, dtype in _STORAGE.items() if data_type is not DataType.DT_BF16}


class TensorDesc:
    """Type and shape of a Tensor. Errors: TypeError; ValueError for a dimension above int64."""

    def __init__(self, dtype: DataType, shape: Sequence[int]) -> None:
        self._dtype = instance("dtype", dtype, DataType)
        self._shape = [int64(f"shape[{i}]", dim) for i, dim in enumerate(instance("shape", shape, list, tuple))]

    @property
    def dtype(self) -> DataType:
        """Element type."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """Shape, as a new list."""
        return list(self._shape)

    def __repr__(self) -> str:
        return f"TensorDesc({self._dtype.name}, {self._shape})"


class Tensor:
    """A tensor over memory that it shares: a contiguous array, another Tensor, or one int.

    Without ``tensor_desc`` type and shape are the data's. Errors: TypeError for other data; RuntimeError for an array
    that is not contiguous, has no matching DataType, or disagrees with ``tensor_desc``.

    Other libraries take it without a copy: ``torch.from_dlpack(tensor)``, ``numpy.from_dlpack(tensor)``, and from
    Python 3.12 on whatever takes a buffer. Both sides see each other's writes, and allocated memory stays while any of
    them holds it, also after its cache was released. The bits of DT_BF16 come as uint16, since numpy has no such type:
    ``torch.from_dlpack(tensor).view(torch.bfloat16)`` is the tensor itself.
    """

    def __init__(self, data: NDArray[Any] | Tensor | int, tensor_desc: TensorDesc | None = None) -> None:
        desc = None if tensor_desc is None else instance("tensor_desc", tensor_desc, TensorDesc)
        if isinstance(data, Tensor):
            desc = desc or TensorDesc(data.dtype, data.shape)
            _require(desc.dtype == data.dtype, f"tensor_desc says {desc.dtype}, the tensor has {data.dtype}")
        self._array = _as_array(data, desc)
        self._desc = desc or TensorDesc(_data_type(self._array), self._array.shape)
        _check_array(self._array, self._desc)

    @classmethod
    def from_buffer(cls, buffer: memoryview, tensor_desc: TensorDesc) -> Tensor:
        """A tensor over a buffer of exactly its bytes, without a copy. RuntimeError when the sizes differ."""
        try:
            array = np.frombuffer(buffer, _STORAGE[tensor_desc.dtype]).reshape(tensor_desc.shape)
        except ValueError as error:
            raise RuntimeError(f"{buffer.nbytes} bytes do not hold {tensor_desc}") from error
        return cls(array, tensor_desc)

    @property
    def dtype(self) -> DataType:
        """Element type."""
        return self._desc.dtype

    @property
    def shape(self) -> list[int]:
        """Shape, as a new list."""
        return self._desc.shape

    def view(self) -> NDArray[Any]:
        """The memory itself, without a copy; the bits of DT_BF16 as uint16. Our own: the original has no such form."""
        return self._array

    def numpy(self, copy: bool = False) -> NDArray[Any]:
        """The values as an array: the memory itself, or with ``copy`` a copy of it.

        DT_BF16 is widened to float32, always a copy. DT_STRING needs ``copy=True``, else RuntimeError.
        """
        if self.dtype is DataType.DT_BF16:
            widened: NDArray[np.float32] = (self._array.astype(np.uint32) << np.uint32(16)).view(np.float32)
            return widened
        _require(copy or self.dtype is not DataType.DT_STRING, "string data needs copy=True")
        return self._array.copy() if copy else self._array

    def __dlpack__(self, **asked: Any) -> Any:
        """The array's own answer, with what its numpy knows of the protocol. BufferError for DT_STRING."""
        return self._array.__dlpack__(**asked)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The CPU, always."""
        kind, number = self._array.__dlpack_device__()
        return int(kind), int(number)

    def __buffer__(self, flags: int, /) -> memoryview:
        """For Python 3.12 and newer, which ask for it."""
        return self._array.data

    def __repr__(self) -> str:
        return f"Tensor({self.dtype.name}, {self.shape})"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _as_array(data: object, desc: TensorDesc | None) -> NDArray[Any]:
    if isinstance(data, Tensor):
        return data.view()
    if isinstance(data, np.ndarray):
        return data
    return np.array(index("data", data), _STORAGE[desc.dtype] if desc else np.int64)


def _data_type(array: NDArray[Any]) -> DataType:
    if array.dtype.kind in "SU":
        return DataType.DT_STRING
    found = _NATURAL.get(array.dtype)
    if found is None:
        raise RuntimeError(f"no DataType for arrays of {array.dtype}")
    return found


def _check_array(array: NDArray[Any], desc: TensorDesc) -> None:
    _require(array.flags.c_contiguous, "the array must be contiguous")
    _require(list(array.shape) == desc.shape, f"tensor_desc says shape {desc.shape}, the array has {list(array.shape)}")
    fits = array.dtype.kind in "SU" if desc.dtype is DataType.DT_STRING else array.dtype == _STORAGE[desc.dtype]
    _require(fits, f"tensor_desc says {desc.dtype}, the array has {array.dtype}")
