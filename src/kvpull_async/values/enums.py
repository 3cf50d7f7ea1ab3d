"""The small enumerations of the public API, with the original's values. No behaviour beyond names and sizes."""

from __future__ import annotations

from enum import Enum

from kvpull_async.status import NamedIntEnum


class DataType(Enum):
    """Element type of a cache's tensors. LLM-DataDist documentation: GE's numbers, and no IntEnum."""

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_INT8 = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT32 = 8
    DT_INT64 = 9
    DT_UINT64 = 10
    DT_DOUBLE = 11
    DT_BOOL = 12
    DT_STRING = 13
    DT_BF16 = 27

    @property
    def nbytes(self) -> int:
        """Bytes of one element."""
        return _NBYTES[self]


_NBYTES = {
    DataType.DT_FLOAT: 4,
    DataType.DT_FLOAT16: 2,
    DataType.DT_INT8: 1,
    DataType.DT_INT32: 4,
    DataType.DT_UINT8: 1,
    DataType.DT_INT16: 2,
    DataType.DT_UINT16: 2,
    DataType.DT_UINT32: 4,
    DataType.DT_INT64: 8,
    DataType.DT_UINT64: 8,
    DataType.DT_DOUBLE: 8,
    DataType.DT_BOOL: 1,
    DataType.DT_STRING: 16,
    DataType.DT_BF16: 2,
}


class Placement(NamedIntEnum):
    """Where a cache's memory lives. On a machine without an NPU, DEVICE is served from host memory."""

    HOST = 0
    DEVICE = 1


class LLMRole(NamedIntEnum):
    """What a node does: prefill (PROMPT), decode (DECODER) or both (MIX)."""

    PROMPT = 1
    DECODER = 2
    MIX = 3


class RegisterMemStatus(Enum):
    """Progress of ``link()``: memory registered (OK), under way (PREPARING) or FAILED."""

    OK = 0
    PREPARING = 1
    FAILED = 2


class Memtype(Enum):
    """Kind of memory in a MemInfo."""

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1
