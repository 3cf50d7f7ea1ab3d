"""The blocking managers: each method blocks its thread until the core has answered.

They must not contain logic of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from kvpull_async import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    KvCache,
    MemInfo,
    Tensor,
)
from kvpull_async.entry import (
    DataDist,
    Engine,
    LayerPull,
    Manager,
    Operation,
    blocked,
    remap_registered_memory,
)
from kvpull_sync.face_keys import Keys
from kvpull_sync.face_layers import LandingLayers
from kvpull_sync.face_tasks import Transferring

__all__ = ["CacheManager", "KvCacheManager"]

T = TypeVar("T")


class _Manager(Transferring, Keys):
    """What the two managers share: the crossing."""

    def __init__(self, datadist: DataDist, kind: str) -> None:
        self._engine: Engine = datadist.engine
        self._manager: Manager = datadist.manager(kind, self)

    def _run(self, operation: Operation[T]) -> T:
        return blocked(self._engine, operation)


class KvCacheManager(_Manager):
    """The older manager. PROMPT nodes allocate caches with keys, DECODER nodes pull them."""

    def is_initialized(self) -> bool:
        """As `kvpull_async.KvCacheManager.is_initialized`, blocking."""
        return not self._engine.stopped

    def allocate_cache(
        self, cache_desc: CacheDesc, cache_keys: Any = (), *, allowed_clusters: Iterable[int] | None = None
    ) -> KvCache:
        """As `kvpull_async.KvCacheManager.allocate_cache`, blocking."""
        handle: KvCache = self._run(self._manager.allocate_cache(cache_desc, cache_keys, allowed_clusters))
        return handle

    def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None, *,
        allowed_clusters: Iterable[int] | None = None,
    ) -> KvCache:  # fmt: skip
        """As `kvpull_async.KvCacheManager.allocate_blocks_cache`, blocking."""
        handle: KvCache = self._run(self._manager.allocate_blocks_cache(cache_desc, blocks_cache_key, allowed_clusters))
        return handle

    def deallocate_cache(self, cache: KvCache) -> None:
        """As `kvpull_async.KvCacheManager.deallocate_cache`, blocking."""
        self._run(self._manager.deallocate(cache, blocks=None))

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        kv_cache: KvCache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        """As `kvpull_async.KvCacheManager.pull_cache`, blocking."""
        self._run(self._manager.pull_cache(cache_key, kv_cache, batch_index, size, kwargs))

    def pull_layers(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        kv_cache: KvCache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> LandingLayers:
        """As `kvpull_async.KvCacheManager.pull_layers`, blocking: an iterator and context manager."""
        asked = self._manager.pull_layers(cache_key, kv_cache, batch_index, size, kwargs)
        return LandingLayers(LayerPull(self._engine, asked))

    def pull_blocks(
        self, prompt_cache_key: BlocksCacheKey, decoder_kv_cache: KvCache, prompt_blocks: Any, decoder_blocks: Any,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """As `kvpull_async.KvCacheManager.pull_blocks`, blocking."""
        operation = self._manager.pull_blocks(prompt_cache_key, decoder_kv_cache, prompt_blocks, decoder_blocks, kwargs)
        self._run(operation)

    def copy_cache(
        self, dst: KvCache, src: KvCache, dst_batch_index: int = 0, src_batch_index: int = 0, offset: int = 0,
        size: int = -1, req_id: int | None = None,
    ) -> None:  # fmt: skip
        """As `kvpull_async.KvCacheManager.copy_cache`, blocking."""
        self._run(self._manager.copy_cache(dst, src, dst_batch_index, src_batch_index, offset, size, req_id))

    def get_cache_tensors(self, kv_cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """As `kvpull_async.KvCacheManager.get_cache_tensors`, blocking."""
        return self._manager.get_cache_tensors(kv_cache, tensor_index)

    def settled(self, cache: KvCache, timeout: float | None = None) -> None:
        """As `kvpull_async.KvCacheManager.settled`, blocking."""
        self._run(self._manager.settled(cache, timeout))

    def copy_blocks(self, cache: KvCache, copy_block_info: dict[int, list[int]]) -> None:
        """As `kvpull_async.KvCacheManager.copy_blocks`, blocking."""
        self._run(self._manager.copy_blocks(cache, copy_block_info))

    def swap_blocks(self, src: KvCache, dst: KvCache, src_to_dst: dict[int, int]) -> None:
        """As `kvpull_async.KvCacheManager.swap_blocks`, blocking."""
        self._run(self._manager.swap_blocks(src, dst, src_to_dst))


class CacheManager(_Manager):
    """The newer manager: any role, memory of the caller, blocks."""

    def allocate_cache(
        self, cache_desc: CacheDesc, cache_keys: Any = (), *, allowed_clusters: Iterable[int] | None = None
    ) -> Cache:
        """As `kvpull_async.CacheManager.allocate_cache`, blocking."""
        handle: Cache = self._run(self._manager.allocate_cache(cache_desc, cache_keys, allowed_clusters))
        return handle

    def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None, *,
        allowed_clusters: Iterable[int] | None = None,
    ) -> Cache:  # fmt: skip
        """As `kvpull_async.CacheManager.allocate_blocks_cache`, blocking."""
        handle: Cache = self._run(self._manager.allocate_blocks_cache(cache_desc, blocks_cache_key, allowed_clusters))
        return handle

    def deallocate_cache(self, cache: Cache) -> None:
        """As `kvpull_async.CacheManager.deallocate_cache`, blocking."""
        self._run(self._manager.deallocate(cache, blocks=False))

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """As `kvpull_async.CacheManager.deallocate_blocks_cache`, blocking."""
        self._run(self._manager.deallocate(cache, blocks=True))

    def register_cache(
        self, cache_desc: CacheDesc, addrs: list[int] | None = None, cache_keys: Any = (),
        remote_accessible: bool | None = None, *, tensors: list[Any] | tuple[Any, ...] | None = None,
        allowed_clusters: Iterable[int] | None = None,
    ) -> Cache:  # fmt: skip
        """As `kvpull_async.CacheManager.register_cache`, blocking."""
        given = (cache_keys, remote_accessible, tensors, allowed_clusters)
        handle: Cache = self._run(self._manager.register_cache(cache_desc, addrs, *given))
        return handle

    def register_blocks_cache(
        self, cache_desc: CacheDesc, addrs: list[int] | None = None, blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None, *, tensors: list[Any] | tuple[Any, ...] | None = None,
        allowed_clusters: Iterable[int] | None = None,
    ) -> Cache:  # fmt: skip
        """As `kvpull_async.CacheManager.register_blocks_cache`, blocking."""
        given = (blocks_cache_key, remote_accessible, tensors, allowed_clusters)
        handle: Cache = self._run(self._manager.register_blocks_cache(cache_desc, addrs, *given))
        return handle

    def unregister_cache(self, cache_id: int) -> None:
        """As `kvpull_async.CacheManager.unregister_cache`, blocking."""
        self._run(self._manager.unregister_cache(cache_id))

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        """As `kvpull_async.CacheManager.pull_cache`, blocking."""
        if not self._manager.pull_now(cache_key, cache, batch_index, size, kwargs):
            self._run(self._manager.pull_cache(cache_key, cache, batch_index, size, kwargs))

    def pull_layers(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> LandingLayers:
        """As `kvpull_async.CacheManager.pull_layers`, blocking: an iterator and context manager."""
        asked = self._manager.pull_layers(cache_key, cache, batch_index, size, kwargs)
        return LandingLayers(LayerPull(self._engine, asked))

    def pull_blocks(
        self,
        src_cache_key: BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex,
        dst_cache: Cache,
        src_blocks: Any = (),
        dst_blocks: Any = (),
        **kwargs: Any,
    ) -> None:
        """As `kvpull_async.CacheManager.pull_blocks`, blocking."""
        self._run(self._manager.pull_blocks(src_cache_key, dst_cache, src_blocks, dst_blocks, kwargs))

    def copy_cache(
        self, dst: Cache, src: Cache, dst_batch_index: int = 0, src_batch_index: int = 0, offset: int = 0,
        size: int = -1, req_id: int | None = None,
    ) -> None:  # fmt: skip
        """As `kvpull_async.CacheManager.copy_cache`, blocking."""
        self._run(self._manager.copy_cache(dst, src, dst_batch_index, src_batch_index, offset, size, req_id))

    def get_cache_tensors(self, cache: Cache, tensor_index: int = 0) -> list[Tensor]:
        """As `kvpull_async.CacheManager.get_cache_tensors`, blocking."""
        return self._manager.get_cache_tensors(cache, tensor_index)

    def settled(self, cache: Cache, timeout: float | None = None) -> None:
        """As `kvpull_async.CacheManager.settled`, blocking."""
        self._run(self._manager.settled(cache, timeout))

    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """As `kvpull_async.CacheManager.copy_blocks`, blocking."""
        self._run(self._manager.copy_blocks(cache, copy_block_info))

    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> None:
        """As `kvpull_async.CacheManager.swap_blocks`, blocking."""
        self._run(self._manager.swap_blocks(src_cache, dst_cache, src_to_dst))

    def push_cache(
        self, dst_cache_key: CacheKeyByIdAndIndex, src_cache: Cache, src_batch_index: int = 0,
        src_layer_range: range | None = None, dst_layer_range: range | None = None, size: int = -1,
        tensor_num_per_layer: int = 2, *, timeout: float | None = None, traceparent: str | None = None,
        verify: str | None = None,
    ) -> None:  # fmt: skip
        """As `kvpull_async.CacheManager.push_cache`, blocking."""
        options = {"timeout": timeout, "traceparent": traceparent, "verify": verify}
        where = (src_batch_index, src_layer_range, dst_layer_range, size, tensor_num_per_layer)
        self._run(self._manager.push_cache(dst_cache_key, src_cache, *where, options))

    def push_blocks(
        self, dst_cache_key: BlocksCacheKey, src_cache: Cache, src_blocks: Any = (), dst_blocks: Any = (),
        src_layer_range: range | None = None, dst_layer_range: range | None = None, tensor_num_per_layer: int = 2, *,
        timeout: float | None = None, traceparent: str | None = None, verify: str | None = None,
    ) -> None:  # fmt: skip
        """As `kvpull_async.CacheManager.push_blocks`, blocking."""
        options = {"timeout": timeout, "traceparent": traceparent, "verify": verify}
        where = (src_blocks, dst_blocks, src_layer_range, dst_layer_range, tensor_num_per_layer)
        self._run(self._manager.push_blocks(dst_cache_key, src_cache, *where, options))

    def remap_registered_memory(self, mem_infos: MemInfo | list[MemInfo]) -> None:
        """As `kvpull_async.CacheManager.remap_registered_memory`, blocking."""
        remap_registered_memory(mem_infos)
