"""CacheDesc: the layout of a cache. It describes bytes and owns none.

Sizes follow the original: a *tensor* is ``product(shape) * element bytes``, a batch *entry* is a tensor's bytes divided
by ``shape[0]``, whatever ``batch_dim_index`` says. For a cache of blocks an entry is a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvpull_async.values._check import index, instance, int32, int64, require, uint32
from kvpull_async.values.enums import DataType, Placement

_MAX_BYTES = 2**63 - 1


class CacheDesc:
    """Layout of a cache: ``num_tensors`` tensors of one shape and type.

    Errors: TypeError for a wrong type, ValueError for an integer out of range (``num_tensors`` uint32, dimensions
    int64), LLMException(LLM_PARAM_INVALID) for a ``batch_dim_index`` or ``seq_len_dim_index`` outside the shape.
    Dimensions of 0 or below pass here, as in the original, and are refused where memory is involved.

    Differs from the original: ``data_type`` and ``placement`` may not be None, the shape is copied, and
    ``batch_size`` follows ``update_dim``. ``copy.copy(desc)`` is an independent snapshot.
    """

    def __init__(
        self,
        num_tensors: int,
        shape: Sequence[int],
        data_type: DataType,
        placement: Placement = Placement.DEVICE,
        batch_dim_index: int = 0,
        seq_len_dim_index: int = -1,
        kv_tensor_format: str | None = None,
    ) -> None:
        self._num_tensors = uint32("num_tensors", num_tensors)
        dims = [index(f"shape[{i}]", dim) for i, dim in enumerate(instance("shape", shape, list, tuple))]
        self._data_type = instance("data_type", data_type, DataType)
        self._placement = instance("placement", placement, Placement)
        self._batch_dim = index("batch_dim_index", batch_dim_index)
        self._seq_len_dim = int32("seq_len_dim_index", seq_len_dim_index)
        if kv_tensor_format is not None:
            instance("kv_tensor_format", kv_tensor_format, str)
        self._format = kv_tensor_format
        self._check_dim("batch_dim_index", self._batch_dim, rank=len(dims))
        if self._seq_len_dim != -1:
            self._check_dim("seq_len_dim_index", self._seq_len_dim, rank=len(dims))
        self._dims = tuple(int64(f"shape[{i}]", dim) for i, dim in enumerate(dims))
        self._as_list = isinstance(shape, list)

    @staticmethod
    def _check_dim(name: str, dim: int, *, rank: int) -> None:
        require(0 <= dim < rank, f"{name} must be inside the shape's {rank} dimensions, got {dim}")

    @property
    def num_tensors(self) -> int:
        """Number of tensors: keys and values of all layers, K, V, K, V, ..."""
        return self._num_tensors

    @property
    def shape(self) -> Sequence[int]:
        """Shape of one tensor: a new list if a list was given, else a tuple."""
        return list(self._dims) if self._as_list else self._dims

    @property
    def data_type(self) -> DataType:
        """Element type."""
        return self._data_type

    @property
    def placement(self) -> Placement:
        """HOST or DEVICE."""
        return self._placement

    @property
    def batch_dim(self) -> int:
        """The ``batch_dim_index`` given. Only ``batch_size`` looks at it; bytes are laid out by dimension 0."""
        return self._batch_dim

    @property
    def batch_size(self) -> int:
        """``shape[batch_dim]``."""
        return self._dims[self._batch_dim]

    @property
    def seq_len_dim_index(self) -> int:
        """The ``seq_len_dim_index`` given, -1 for none."""
        return self._seq_len_dim

    @property
    def kv_tensor_format(self) -> str | None:
        """The ``kv_tensor_format`` given."""
        return self._format

    @property
    def size(self) -> int:
        """Bytes of one tensor. LLMException(LLM_PARAM_INVALID) for a negative dimension or a size above int64.

        Differs from the original, where that exception carries LLM_SUCCESS.
        """
        nbytes = math.prod(self._dims) * self._data_type.nbytes
        require(min(self._dims) >= 0 and nbytes <= _MAX_BYTES, f"shape {list(self._dims)} has no size in bytes")
        return nbytes

    @property
    def entries(self) -> int:
        """Number of batch entries (or blocks): ``shape[0]``."""
        return self._dims[0]

    @property
    def entry_nbytes(self) -> int:
        """Bytes of one batch entry (or block) of one tensor. Raises as ``size`` does, also for ``shape[0] == 0``."""
        require(self._dims[0] > 0, f"shape {list(self._dims)} has no batch entries")
        return self.size // self._dims[0]

    def update_dim(self, dim_index: int, dim_value: int) -> None:
        """Set one dimension. A cache made from this descriptor keeps the layout that it was made with.

        Errors: TypeError, LLMException(LLM_PARAM_INVALID) for a ``dim_index`` outside the shape, ValueError for a
        ``dim_value`` above int64.
        """
        dim = index("dim_index", dim_index)
        self._check_dim("dim_index", dim, rank=len(self._dims))
        self._dims = (*self._dims[:dim], int64("dim_value", dim_value), *self._dims[dim + 1 :])

    def __repr__(self) -> str:
        return f"CacheDesc({self._num_tensors} x {list(self._dims)} {self._data_type.name} {self._placement.name})"
