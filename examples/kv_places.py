"""The demo's caches of Placement.DEVICE, and how a model that computes with numpy gets at what is in them.

Without an NPU they are memory of the host, and the model works on that memory itself. On an NPU the host cannot touch
them: the model then works on memory of the host beside them, which is *stored* to the device once it is computed, and
*loaded* from there once it was pulled. (A model that runs on the NPU needs neither.) It must not know who pulls.
"""

from __future__ import annotations

from collections.abc import Sequence

from demo_plan import BLOCK_SIZE, CONFIG
from kvpull_async import BlocksCacheKey, Cache, CacheDesc, CacheKey, DataType, KvCache, LLMDataDist, Placement
from tiny_transformer import F32, paged_arrays


def _desc(shape: Sequence[int], placement: Placement) -> CacheDesc:
    return CacheDesc(CONFIG.kv_tensors, shape, DataType.DT_FLOAT, placement=placement)


def _tensors(datadist: LLMDataDist, cache: KvCache) -> list[F32]:
    """Views, not copies, of memory that the host can reach; a copy that nobody can write to of what it cannot."""
    manager = datadist.kv_cache_manager
    return [manager.get_cache_tensors(cache, index)[0].numpy() for index in range(CONFIG.kv_tensors)]


class Contiguous:
    """A cache of batch entries, allocated by the library. `tensors` is what the model works on."""

    def __init__(self, datadist: LLMDataDist, cache: KvCache, on_host: KvCache | None) -> None:
        self.cache = cache
        self.on_npu = on_host is not None
        self.tensors = _tensors(datadist, on_host or cache)
        self._manager, self._on_host = datadist.kv_cache_manager, on_host

    @classmethod
    async def allocate(cls, datadist: LLMDataDist, batch: int, *, keys: Sequence[CacheKey] = ()) -> Contiguous:
        """`batch` entries, the i-th bound to the i-th key."""
        shape, manager = [batch, CONFIG.max_seq, CONFIG.kv_width], datadist.kv_cache_manager
        cache = await manager.allocate_cache(_desc(shape, Placement.DEVICE), list(keys))
        if manager.get_cache_tensors(cache)[0].numpy().flags.writeable:
            return cls(datadist, cache, None)
        return cls(datadist, cache, await manager.allocate_cache(_desc(shape, Placement.HOST)))

    async def store(self, entry: int) -> None:
        """What the model has written is in the cache."""
        if self._on_host is not None:
            await self._manager.copy_cache(self.cache, self._on_host, entry, entry)

    async def load(self, entry: int) -> None:
        """What is in the cache can be read by the model."""
        if self._on_host is not None:
            await self._manager.copy_cache(self._on_host, self.cache, entry, entry)

    async def close(self) -> None:
        """Give the memory back."""
        self.tensors.clear()
        for cache in filter(None, (self.cache, self._on_host)):
            await self._manager.deallocate_cache(cache)


class Paged:
    """A cache of blocks. `tensors` is what the model works on, and ours."""

    def __init__(self, datadist: LLMDataDist, blocks: int, *, on_npu: bool) -> None:
        self.tensors = paged_arrays(CONFIG, blocks, block_size=BLOCK_SIZE)
        self.cache: Cache | None = None
        self._manager, self._on_npu = datadist.cache_manager, on_npu
        addresses = [tensor.ctypes.data for tensor in self.tensors]
        self._on_host = Cache.create_cpu_cache(_desc(self.tensors[0].shape, Placement.HOST), addresses)

    async def open(self, key: BlocksCacheKey | None = None) -> Cache:
        """Make the library know the blocks: ours by their addresses, or as many of its own on the NPU."""
        desc = _desc(self.tensors[0].shape, Placement.DEVICE)
        if self._on_npu:
            self.cache = await self._manager.allocate_blocks_cache(desc, key)
        else:
            self.cache = await self._manager.register_blocks_cache(desc, self._on_host.tensor_addrs, key)
        return self.cache

    async def store(self, blocks: Sequence[int]) -> None:
        """What the model has written to these blocks is in the cache."""
        if self._on_npu and self.cache is not None:
            await self._manager.swap_blocks(self._on_host, self.cache, {block: block for block in blocks})

    async def load(self, blocks: Sequence[int]) -> None:
        """What is in these blocks of the cache can be read by the model."""
        if self._on_npu and self.cache is not None:
            await self._manager.swap_blocks(self.cache, self._on_host, {block: block for block in blocks})

    async def close(self) -> None:
        """The library lets go of the addresses: only then may the arrays be freed."""
        if self.cache is None:
            return
        if self._on_npu:
            await self._manager.deallocate_blocks_cache(self.cache)
        else:
            await self._manager.unregister_cache(self.cache.cache_id)
