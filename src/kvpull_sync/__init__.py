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

    Call it before they are imported. The original's modules that programs import from are there as well. RuntimeError
    when another `llm_datadist` has been imported already.
    """
    install(sys.modules[__name__])
