"""Value types of the public API: descriptors, keys, handles and configurations that check themselves.

They hold no memory, know no network, and import no asyncio, socket, ctypes or threading.
"""

from kvpull_async.values._check import INVALID_ID
from kvpull_async.values.caches import Cache, CacheBinding, KvCache
from kvpull_async.values.cluster import LLMClusterInfo, int_to_ip, ip_to_int
from kvpull_async.values.desc import CacheDesc
from kvpull_async.values.enums import DataType, LLMRole, Memtype, Placement, RegisterMemStatus
from kvpull_async.values.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from kvpull_async.values.tensor import Tensor, TensorDesc
from kvpull_async.values.transfer import (
    LayerSynchronizer,
    MemInfo,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

__all__ = [
    "INVALID_ID",
    "BlocksCacheKey",
    "Cache",
    "CacheBinding",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "DataType",
    "KvCache",
    "LLMClusterInfo",
    "LLMRole",
    "LayerSynchronizer",
    "MemInfo",
    "Memtype",
    "Placement",
    "RegisterMemStatus",
    "Tensor",
    "TensorDesc",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    "int_to_ip",
    "ip_to_int",
]
