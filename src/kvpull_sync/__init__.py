"""kvpull, blocking: the `llm_datadist` API for programs without an event loop. Importing it starts no thread."""

import sys

from kvpull_async import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LlmConfig,
    LLMException,
    LLMRole,
    LLMStatusCode,
    LLMTimeoutError,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
    Status,
    Tensor,
    TensorDesc,
    TransferConfig,
    TransferWithCacheKeyConfig,
    allocate_shared,
)
from kvpull_sync.descriptions import fill_in
from kvpull_sync.face import CacheManager, CacheTask, KvCacheManager, LLMDataDist
from kvpull_sync.stand_in import install

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheManager",
    "CacheTask",
    "DataType",
    "KvCache",
    "KvCacheManager",
    "LLMClusterInfo",
    "LLMConfig",
    "LLMDataDist",
    "LLMException",
    "LLMRole",
    "LLMStatusCode",
    "LLMTimeoutError",
    "LayerSynchronizer",
    "LlmConfig",
    "MemInfo",
    "Memtype",
    "Placement",
    "RegisterMemStatus",
    "Status",
    "Tensor",
    "TensorDesc",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    "allocate_shared",
    "install_as_llm_datadist",
]


def install_as_llm_datadist() -> None:
    """Make `import llm_datadist` resolve to this package, for programs that are not to be edited.

    Call it before they are imported. Of the original's modules there are those that programs import from, with their
    public classes: `configs`, `data_type`, `status`, `v2.llm_types`, `v2.llm_datadist` and `v2.cache_manager`. Any
    other, such as `llm_datadist.utils`, is a ModuleNotFoundError.

    RuntimeError when another `llm_datadist` has been imported already.
    """
    install(sys.modules[__name__])


fill_in(LLMDataDist, KvCacheManager, CacheManager, CacheTask)
