"""The awaitable managers: each method checked here and run on the engine's core.

They must not contain logic of their own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from typing import Any, Final, TypeVar

from kvpull_async.entry import (
    DataDist,
    Engine,
    LayerPull,
    Manager,
    Operation,
    awaited,
    remap_registered_memory,
)
from kvpull_async.face_keys import Keys
from kvpull_async.face_layers import LandingLayers
from kvpull_async.face_tasks import Transferring
from kvpull_async.values import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    KvCache,
    MemInfo,
    Tensor,
)

__all__ = ["CacheManager", "KvCacheManager"]

T = TypeVar("T")
_HELD: Final = 0.001
"""Seconds of a caller's loop that small pulls may take before others have their turn."""


class _Manager(Transferring, Keys):
    """What the two managers share: the crossing."""

    def __init__(self, datadist: DataDist, kind: str) -> None:
        self._engine: Engine = datadist.engine
        self._manager: Manager = datadist.manager(kind, self)
        self._held = 0.0

    def _run(self, operation: Operation[T]) -> Coroutine[Any, Any, T]:
        return awaited(self._engine, operation)

    async def _rest(self, began: float) -> None:
        """Pulls that were done at once held the caller's loop since `began`: now and then it is others' turn."""
        self._held += time.perf_counter() - began
        if self._held > _HELD:
            self._held = 0.0
            await asyncio.sleep(0)


class KvCacheManager(_Manager):
    """The older manager. PROMPT nodes allocate caches with keys, DECODER nodes pull them."""

    def is_initialized(self) -> bool:
        """Whether the engine of this manager is running."""
        return not self._engine.stopped

    async def allocate_cache(
        self, cache_desc: CacheDesc, cache_keys: Any = (), *, allowed_clusters: Iterable[int] | None = None
    ) -> KvCache:
        """A cache of `num_tensors` zeroed tensors; the i-th key (role PROMPT only) names batch entry i.

        Errors: TypeError; LLMException with LLM_PARAM_INVALID (layout, number of keys), LLM_FAILED (a key is bound
        already), LLM_DEVICE_OUT_OF_MEMORY. Release it with `deallocate_cache`; its keys keep the data until pulled.

        `allowed_clusters`: ids of the clusters for which it exists (an empty list: for none); None is all that are
        linked. New here. To all others it is a cache that is not there, whatever they ask, push or wait for.
        """
        handle: KvCache = await self._run(self._manager.allocate_cache(cache_desc, cache_keys, allowed_clusters))
        return handle

    async def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None, *,
        allowed_clusters: Iterable[int] | None = None,
    ) -> KvCache:  # fmt: skip
        """A paged cache: `shape[0]` blocks. Errors as for `allocate_cache`."""
        handle: KvCache = await self._run(
            self._manager.allocate_blocks_cache(cache_desc, blocks_cache_key, allowed_clusters)
        )
        return handle

    async def deallocate_cache(self, cache: KvCache) -> None:
        """Give up the cache. Unknown ones are harmless (as documented; the original's code raises).

        Returns when nothing writes to the memory any more. LLM_TIMEOUT with `destination_unsafe` when a transfer
        cannot be stopped: call it again later.
        """
        await self._run(self._manager.deallocate(cache, blocks=None))

    async def pull_cache(
        self, cache_key: CacheKey | CacheKeyByIdAndIndex, kv_cache: KvCache, batch_index: int = 0, size: int = -1,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Pull one batch entry of a remote cache into entry `batch_index` of `kv_cache`. Role DECODER only.

        Args:
            cache_key: which entry of which linked cluster.
            kv_cache: the destination. Its dtype and shape need not be the source's: bytes count.
            batch_index: entry of the destination.
            size: bytes per tensor; -1 is the destination's entry minus `dst_cache_offset`.
            src_layer_range, dst_layer_range: `range` of layers, step 1; empty or absent is all of them.
            tensor_num_per_layer: tensors in one layer, default 2.
            src_cache_offset, dst_cache_offset: bytes into the entry; giving one, 0 included, keeps the key.
            wait_for_key: True to wait, inside the timeout, for a key that the source has not yet (see `publish_cache`);
                the link is free for others meanwhile.
            strict_layout: True to insist on the source's data type and entry shape, else LLM_PARAM_INVALID.
            verify: "crc32" or "xxh3": both sides sum the bytes, and other sums are LLM_FAILED; "none"; default: option.
            timeout: ms for this call instead of `sync_kv_timeout`; queueing and connecting count.
            traceparent: W3C trace context, to be found in the log events of both sides.
            **kwargs: the names from `src_layer_range` on; others are a TypeError.

        Errors: TypeError, ValueError; LLMException with LLM_PARAM_INVALID, LLM_KV_CACHE_NOT_EXIST, LLM_NOT_YET_LINK,
        LLM_LINK_FAILED, LLM_LINK_BUSY; LLMTimeoutError with LLM_WAIT_PROCESS_TIMEOUT. After any of them, and after a
        cancellation, the key is kept, the link usable, and nothing writes to the destination, unless
        `kv_cache.quarantined`: then wait for `settled(kv_cache)` before using or freeing it.
        """
        await self._run(self._manager.pull_cache(cache_key, kv_cache, batch_index, size, kwargs))

    def pull_layers(
        self, cache_key: CacheKey | CacheKeyByIdAndIndex, kv_cache: KvCache, batch_index: int = 0, size: int = -1,
        **kwargs: Any,
    ) -> LandingLayers:  # fmt: skip
        """As `pull_cache`, giving each layer when it has landed. New here: the original has no such call.

            async with manager.pull_layers(key, cache) as layers:
                async for layer in layers:
                    ...

        A layer is `tensor_num_per_layer` tensors, its number an int: that of the destination, `dst_layer_range` counts.
        Layers come in order, each once, when all of their tensors are there; their bytes are final and may be read.

        It is one pull: one request, one deadline, and the key is consumed when all has landed. Entering the block
        starts both the pull and its deadline; neither waits for the iteration. Leaving early cancels the pull and waits
        until nothing writes any more.

        Arguments and errors as for `pull_cache`; with `verify` no layer comes before all are verified. With
        `dst_blocks=` (and `src_blocks=` for a `BlocksCacheKey`) it is a `pull_blocks`, without `batch_index`, `size`
        and offsets.
        What needs no table is checked by this call, before the block; the rest is raised by the iteration. Also
        LLM_PARAM_INVALID for tensors that do not make whole layers; RuntimeError for iterating outside `async with` and
        for entering twice.
        """
        asked = self._manager.pull_layers(cache_key, kv_cache, batch_index, size, kwargs)
        return LandingLayers(LayerPull(self._engine, asked))

    async def pull_blocks(
        self, prompt_cache_key: BlocksCacheKey, decoder_kv_cache: KvCache, prompt_blocks: Any, decoder_blocks: Any,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Pull blocks of a remote paged cache: `prompt_blocks[i]` into `decoder_blocks[i]`, for every tensor.

        Keyword arguments, as for `pull_cache`: `src_layer_range`, `dst_layer_range`, `tensor_num_per_layer`,
        `wait_for_key`, `strict_layout`, `verify`, `timeout` (ms), `traceparent`. Errors as there.
        """
        operation = self._manager.pull_blocks(prompt_cache_key, decoder_kv_cache, prompt_blocks, decoder_blocks, kwargs)
        await self._run(operation)

    async def copy_cache(
        self, dst: KvCache, src: KvCache, dst_batch_index: int = 0, src_batch_index: int = 0, offset: int = 0,
        size: int = -1, req_id: int | None = None,
    ) -> None:  # fmt: skip
        """Copy one batch entry between two local caches: `size` bytes (-1: the source's rest) from `offset` on in both.

        Errors: TypeError, ValueError; LLMException with LLM_KV_CACHE_NOT_EXIST, LLM_PARAM_INVALID. It never truncates.
        """
        await self._run(self._manager.copy_cache(dst, src, dst_batch_index, src_batch_index, offset, size, req_id))

    def get_cache_tensors(self, kv_cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """The tensor's memory, without a copy: a list with one `Tensor`.

        Of a cache in the memory of an NPU it is a read-only copy, and the call blocks, the loop too, until that is
        here, at most `sync_kv_timeout`: where it is large or often done, `copy_cache` it to a cache of Placement.HOST.
        """
        return self._manager.get_cache_tensors(kv_cache, tensor_index)

    async def settled(self, cache: KvCache, timeout: float | None = None) -> None:
        """Wait (at most `timeout` ms) until the cache is not quarantined. LLMTimeoutError when it still is."""
        await self._run(self._manager.settled(cache, timeout))

    async def copy_blocks(self, cache: KvCache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks inside one blocks cache, in every tensor: each key's block to all blocks of its list.

        Every block is read as it was before the call, also when it is overwritten, too. Nothing is copied for an empty
        dict, nor onto itself. After a cancellation part may have been copied.

        Errors: TypeError; ValueError for a negative block; LLMException with LLM_PARAM_INVALID (a block outside the
        cache, two sources for one block), LLM_KV_CACHE_NOT_EXIST.
        """
        await self._run(self._manager.copy_blocks(cache, copy_block_info))

    async def swap_blocks(self, src: KvCache, dst: KvCache, src_to_dst: dict[int, int]) -> None:
        """Copy blocks out to HOST memory or back in: block k of every tensor of `src` to `src_to_dst[k]` of `dst`.

        One of the blocks caches is on HOST and one on DEVICE. Either may be a handle from `create_cpu_cache`: its
        memory is the caller's and is used until the call has ended; not longer, unless `quarantined` then says so.

        Errors: TypeError; LLMException with LLM_PARAM_INVALID (also for different block sizes or numbers of tensors,
        blocks outside a cache, two sources for one block, a deallocated cache).
        """
        await self._run(self._manager.swap_blocks(src, dst, src_to_dst))


class CacheManager(_Manager):
    """The newer manager: any role, memory of the caller, blocks."""

    async def allocate_cache(
        self, cache_desc: CacheDesc, cache_keys: Any = (), *, allowed_clusters: Iterable[int] | None = None
    ) -> Cache:
        """As `KvCacheManager.allocate_cache`, in any role. A bound key is LLM_PARAM_INVALID here."""
        handle: Cache = await self._run(self._manager.allocate_cache(cache_desc, cache_keys, allowed_clusters))
        return handle

    async def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None, *,
        allowed_clusters: Iterable[int] | None = None,
    ) -> Cache:  # fmt: skip
        """A paged cache of `shape[0]` blocks, offered to peers under `blocks_cache_key`."""
        handle: Cache = await self._run(
            self._manager.allocate_blocks_cache(cache_desc, blocks_cache_key, allowed_clusters)
        )
        return handle

    async def deallocate_cache(self, cache: Cache) -> None:
        """Give up an allocated cache, as `KvCacheManager.deallocate_cache`. It leaves a registered one alone, which is
        taken back by `unregister_cache`. A blocks cache is LLM_PARAM_INVALID, also a registered one.
        """
        await self._run(self._manager.deallocate(cache, blocks=False))

    async def deallocate_blocks_cache(self, cache: Cache) -> None:
        """As `deallocate_cache`, for a blocks cache and its key; any other cache is LLM_PARAM_INVALID."""
        await self._run(self._manager.deallocate(cache, blocks=True))

    async def register_cache(
        self, cache_desc: CacheDesc, addrs: list[int] | None = None, cache_keys: Any = (),
        remote_accessible: bool | None = None, *, tensors: list[Any] | tuple[Any, ...] | None = None,
        allowed_clusters: Iterable[int] | None = None,
    ) -> Cache:  # fmt: skip
        """Offer memory of your own. Its bytes are not changed here; pulls never consume its keys.

        Either `addrs`, one address (int) per tensor: the memory stays yours, do not free it before `unregister_cache`
        has returned. Or `tensors`, a list of torch tensors on the CPU (`Placement.DEVICE`: on the node's NPU, if it has
        one) or numpy arrays, contiguous, writable and of `cache_desc.size` bytes each: they are kept alive until then,
        even if you drop yours.
        An integer type may stand for any other of as many bytes; a type of floating point must be the descriptor's.

        Until then do not give them other memory: no `share_memory_()`, no queue or pipe of `torch.multiprocessing`
        (which calls it), no resize; do that before. It frees the registered memory. A tensor found elsewhere at the
        next use is LLM_PARAM_INVALID; a transfer under way, and a peer on this host that reads without asking, do not
        notice. Nor is it noticed of a numpy array that shows a tensor's memory: register the tensor.

        Memory is looked at when it is first used: LLM_PARAM_INVALID there if it cannot be read, or, for what writes
        here, is read-only (of each tensor the first and the last page are tried). It may be read-only if nothing does.
        Errors: TypeError (a tuple of addresses, too), ValueError; LLMException with LLM_PARAM_INVALID.
        """
        given = (cache_keys, remote_accessible, tensors, allowed_clusters)
        handle: Cache = await self._run(self._manager.register_cache(cache_desc, addrs, *given))
        return handle

    async def register_blocks_cache(
        self, cache_desc: CacheDesc, addrs: list[int] | None = None, blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None, *, tensors: list[Any] | tuple[Any, ...] | None = None,
        allowed_clusters: Iterable[int] | None = None,
    ) -> Cache:  # fmt: skip
        """Offer a paged cache in memory of your own, given as for `register_cache`.

        A key registered again moves to the newer cache.
        """
        given = (blocks_cache_key, remote_accessible, tensors, allowed_clusters)
        handle: Cache = await self._run(self._manager.register_blocks_cache(cache_desc, addrs, *given))
        return handle

    async def unregister_cache(self, cache_id: int) -> None:
        """Take registered memory back; unknown ids are harmless.

        Returns when nothing reads or writes it any more: running transfers are waited for (bounded), then cut.
        LLM_TIMEOUT with `destination_unsafe` when one cannot be stopped: do not free the memory, call again.
        """
        await self._run(self._manager.unregister_cache(cache_id))

    async def pull_cache(
        self, cache_key: CacheKey | CacheKeyByIdAndIndex, cache: Cache, batch_index: int = 0, size: int = -1,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """As `KvCacheManager.pull_cache`, in any role; expiry is LLM_TIMEOUT.

        Its keyword arguments: `src_layer_range`, `dst_layer_range`, `tensor_num_per_layer`, `src_cache_offset`,
        `dst_cache_offset`, `wait_for_key`, `strict_layout`, `verify`, `timeout` (ms), `traceparent`.
        With remote cache access on, only `CacheKeyByIdAndIndex` is accepted, both caches must be remote accessible,
        and no key is consumed. Differs from the original: offsets work.
        """
        began = time.perf_counter()
        if self._manager.pull_now(cache_key, cache, batch_index, size, kwargs):
            await self._rest(began)
        else:
            await self._run(self._manager.pull_cache(cache_key, cache, batch_index, size, kwargs))

    def pull_layers(
        self, cache_key: CacheKey | CacheKeyByIdAndIndex, cache: Cache, batch_index: int = 0, size: int = -1,
        **kwargs: Any,
    ) -> LandingLayers:  # fmt: skip
        """As `KvCacheManager.pull_layers`, in any role; expiry is LLM_TIMEOUT. Into a blocks cache with `dst_blocks=`.

        Keyword arguments as for `pull_cache`; with `dst_blocks=` (and `src_blocks=`) as for `pull_blocks`.
        """
        asked = self._manager.pull_layers(cache_key, cache, batch_index, size, kwargs)
        return LandingLayers(LayerPull(self._engine, asked))

    async def pull_blocks(
        self, src_cache_key: BlocksCacheKey | CacheKey | CacheKeyByIdAndIndex, dst_cache: Cache, src_blocks: Any = (),
        dst_blocks: Any = (), **kwargs: Any,
    ) -> None:  # fmt: skip
        """Pull into the blocks `dst_blocks` of every tensor of `dst_cache`.

        From a `BlocksCacheKey`: block `src_blocks[i]` into `dst_blocks[i]`; blocks must have the same size in bytes.
        From another key: the i-th block-sized slice of its contiguous entry into `dst_blocks[i]`, the last maybe
        shorter; `src_blocks` stays empty. Other blocks stay untouched.
        Keyword arguments, as for `pull_cache`: `src_layer_range`, `dst_layer_range`, `tensor_num_per_layer`,
        `wait_for_key`, `strict_layout`, `verify`, `timeout` (ms), `traceparent`. Errors as there; also
        LLM_PARAM_INVALID for two source blocks that go to one destination block.
        """
        await self._run(self._manager.pull_blocks(src_cache_key, dst_cache, src_blocks, dst_blocks, kwargs))

    async def copy_cache(
        self, dst: Cache, src: Cache, dst_batch_index: int = 0, src_batch_index: int = 0, offset: int = 0,
        size: int = -1, req_id: int | None = None,
    ) -> None:  # fmt: skip
        """As `KvCacheManager.copy_cache`."""
        await self._run(self._manager.copy_cache(dst, src, dst_batch_index, src_batch_index, offset, size, req_id))

    def get_cache_tensors(self, cache: Cache, tensor_index: int = 0) -> list[Tensor]:
        """As `KvCacheManager.get_cache_tensors`. Our own: the original offers it on the older manager only."""
        return self._manager.get_cache_tensors(cache, tensor_index)

    async def settled(self, cache: Cache, timeout: float | None = None) -> None:
        """Wait (at most `timeout` ms) until the cache is not quarantined. LLMTimeoutError when it still is."""
        await self._run(self._manager.settled(cache, timeout))

    async def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """As `KvCacheManager.copy_blocks`; a negative block is a TypeError here."""
        await self._run(self._manager.copy_blocks(cache, copy_block_info))

    async def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> None:
        """As `KvCacheManager.swap_blocks`."""
        await self._run(self._manager.swap_blocks(src_cache, dst_cache, src_to_dst))

    async def push_cache(
        self, dst_cache_key: CacheKeyByIdAndIndex, src_cache: Cache, src_batch_index: int = 0,
        src_layer_range: range | None = None, dst_layer_range: range | None = None, size: int = -1,
        tensor_num_per_layer: int = 2, *, timeout: float | None = None, traceparent: str | None = None,
        verify: str | None = None,
    ) -> None:  # fmt: skip
        """Push a batch entry of `src_cache` into the remote cache and batch entry that `dst_cache_key` names.

        Needs remote cache access on both sides, and both caches remote accessible. The whole entry goes, `size` is -1;
        it must fit the receiver's, whose bytes behind it stay. Layer ranges are not empty, absent is all layers.
        The receiver fetches the bytes, so it alone writes its memory. Differs from the original: it is one transfer for
        all layers, and refuses tensors that do not make whole layers.

        Errors: TypeError, ValueError; LLMException with LLM_PARAM_INVALID, LLM_KV_CACHE_NOT_EXIST (either side),
        LLM_NOT_YET_LINK, LLM_LINK_FAILED, LLM_LINK_BUSY; LLMTimeoutError with LLM_TIMEOUT. With `destination_unsafe`
        the receiver has not said that nothing writes there any more. `timeout` (ms), `traceparent`, `verify`: as pulls.
        """
        options = {"timeout": timeout, "traceparent": traceparent, "verify": verify}
        where = (src_batch_index, src_layer_range, dst_layer_range, size, tensor_num_per_layer)
        await self._run(self._manager.push_cache(dst_cache_key, src_cache, *where, options))

    async def push_blocks(
        self, dst_cache_key: BlocksCacheKey, src_cache: Cache, src_blocks: Any = (), dst_blocks: Any = (),
        src_layer_range: range | None = None, dst_layer_range: range | None = None, tensor_num_per_layer: int = 2, *,
        timeout: float | None = None, traceparent: str | None = None, verify: str | None = None,
    ) -> None:  # fmt: skip
        """Push block `src_blocks[i]` of `src_cache` into block `dst_blocks[i]` of the remote blocks cache of that key.

        Blocks must have the same size in bytes on both sides. The rest as for `push_cache`.
        """
        options = {"timeout": timeout, "traceparent": traceparent, "verify": verify}
        where = (src_blocks, dst_blocks, src_layer_range, dst_layer_range, tensor_num_per_layer)
        await self._run(self._manager.push_blocks(dst_cache_key, src_cache, *where, options))

    async def remap_registered_memory(self, mem_infos: MemInfo | list[MemInfo]) -> None:
        """Reserved, as in the original: LLMException with LLM_FEATURE_NOT_ENABLED, and no memory here needs it.

        Before that LLM_PARAM_INVALID for anything but a `MemInfo` or a list of them, each of MEM_TYPE_DEVICE with an
        address and a size above 0.
        """
        remap_registered_memory(mem_infos)
