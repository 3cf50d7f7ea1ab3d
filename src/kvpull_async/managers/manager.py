"""Every public operation of both managers, as a checked step that a face runs on the core.

The checks that need no table run at once, on the caller's thread. It must not wait, and must not know the faces.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar, cast

from kvpull_async._deadline import NEVER, Deadline
from kvpull_async.managers import blocks, caches, checks, direct, leases, pulls, pushes, transfers
from kvpull_async.managers.dialect import Dialect
from kvpull_async.managers.landed import Landed
from kvpull_async.managers.node import Node
from kvpull_async.managers.tensors import tensor_bytes
from kvpull_async.observe import Report
from kvpull_async.registry import Entry
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.values import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    KvCache,
    LLMRole,
    MemInfo,
    Memtype,
    Tensor,
    TensorDesc,
)
from kvpull_async.values._check import instance, int32, int64, require, uint32, uint64

__all__ = ["LayersAsked", "Manager", "Operation", "not_enabled", "remap_registered_memory"]

T = TypeVar("T")
Handle = Cache | KvCache


@dataclass(slots=True)
class Operation(Generic[T]):
    """The public call `name`: `start` makes the coroutine that runs on the core. A pull has a report, and the handle
    it fills. A `lasting` one begins tasks that outlive it, which must not keep its caller's context. `undo` takes back
    what was made for a caller who was cancelled too late to stop it. For `prompt` see `CoreLoop.call`. A pull is one of
    those `underway` to its cluster from before it is sent to the core until its caller has heard of its end.
    """

    name: str
    start: Callable[[], Coroutine[Any, Any, T]]
    report: Report | None = None
    cache: Handle | None = None
    lasting: bool = False
    undo: Callable[[T], None] | None = None
    prompt: bool = False
    underway: set[object] = field(default_factory=set)


@dataclass(frozen=True)
class LayersAsked:
    """A checked `pull_layers`: `begin` makes its operation, whose deadline counts from then; `landed` hears of its
    layers.
    """

    begin: Callable[[], Operation[None]]
    landed: Landed


class Manager:
    """One per manager of the public API; `wrap` makes its kind of handle."""

    def __init__(self, node: Node, dialect: Dialect, wrap: Callable[[Entry], Any]) -> None:
        self._node = node
        self._dialect = dialect
        self._wrap = wrap

    # -- pulls ------------------------------------------------------------------------------------------------------

    def pull_cache(
        self, cache_key: object, cache: object, batch_index: object, size: object, options: dict[str, Any]
    ) -> Operation[None]:
        given = pulls.draft(self._node, self._dialect, cache_key, cache, options)
        given.batch_index, given.size = batch_index, size
        return self._pull(pulls.prepare_cache(self._dialect, given))

    def pull_layers(
        self, cache_key: object, cache: object, batch_index: object, size: object, options: dict[str, Any]
    ) -> LayersAsked:
        given, landed = pulls.draft(self._node, self._dialect, cache_key, cache, options), Landed()
        given.batch_index, given.size = batch_index, size
        begun = pulls.prepare_layers(self._dialect, given, landed)
        return LayersAsked(lambda: self._pull(begun()), landed)

    def pull_now(self, key: object, cache: object, batch_index: object, size: object, options: dict[str, Any]) -> bool:
        """Do a small pull on this thread, where the peer need not be asked; False: it is to be done as any other."""
        if not (self._dialect.knows_remote_access and self._node.settings.remote_cache_access):
            return False
        return direct.pull_now(self._node, key, cache, batch_index, size, options) > 0

    def pull_blocks(
        self, key: object, cache: object, src_blocks: object, dst_blocks: object, options: dict[str, Any]
    ) -> Operation[None]:
        given = pulls.draft(self._node, self._dialect, key, cache, options)
        return self._pull(pulls.prepare_blocks(given, src_blocks, dst_blocks))

    def _pull(self, prepared: pulls.Prepared) -> Operation[None]:
        report = prepared.report
        report.local_cluster_id = self._node.settings.cluster_id
        start = partial(pulls.run, self._node, self._dialect, prepared)
        underway = self._node.underway.setdefault(report.cluster_id, set())
        return Operation(report.operation, start, report, prepared.draft.cache, prompt=True, underway=underway)

    # -- pushes -----------------------------------------------------------------------------------------------------

    def push_cache(
        self, key: object, cache: object, src_batch_index: object, src_layers: object, dst_layers: object, size: object,
        tensor_num_per_layer: object, options: dict[str, Any],
    ) -> Operation[None]:  # fmt: skip
        where = (src_batch_index, src_layers, dst_layers, size, tensor_num_per_layer)
        return self._push(pushes.prepare_cache(self._node, key, cache, *where, options))

    def push_blocks(
        self, key: object, cache: object, src_blocks: object, dst_blocks: object, src_layers: object,
        dst_layers: object, tensor_num_per_layer: object, options: dict[str, Any],
    ) -> Operation[None]:  # fmt: skip
        where = (src_blocks, dst_blocks, src_layers, dst_layers, tensor_num_per_layer)
        return self._push(pushes.prepare_blocks(self._node, key, cache, *where, options))

    def _push(self, prepared: pushes.Prepared) -> Operation[None]:
        report = prepared.report
        start = partial(pushes.run, self._node, self._dialect, prepared)
        underway = self._node.underway.setdefault(report.cluster_id, set())
        return Operation(report.operation, start, report, prompt=True, underway=underway)

    def transfer_cache_async(
        self, *arguments: object, options: dict[str, Any], caller: asyncio.AbstractEventLoop | None
    ) -> transfers.Transfer:
        return transfers.prepare(self._node, self._dialect, *arguments, options=options, caller=caller)

    # -- making and releasing ---------------------------------------------------------------------------------------

    def allocate_cache(self, cache_desc: object, cache_keys: object, allowed_clusters: object = None) -> Operation[Any]:
        desc = copy.copy(instance("cache_desc", cache_desc, CacheDesc))
        keys = caches.checked_keys(cache_keys)
        if self._dialect.last_key_counts:
            keys = caches.last_places(keys)
        caches.check_prompt_keys(self._node, self._dialect, keys)
        allowed = caches.checked_clusters(allowed_clusters)
        make = partial(caches.allocate, self._node, self._dialect, desc, keys=keys, allowed=allowed)
        return self._made("allocate_cache", make)

    def allocate_blocks_cache(
        self, cache_desc: object, blocks_cache_key: object, allowed_clusters: object = None
    ) -> Operation[Any]:
        desc = copy.copy(instance("cache_desc", cache_desc, CacheDesc))
        key = _optional_blocks_key(blocks_cache_key)
        caches.check_prompt_keys(self._node, self._dialect, [key] if key is not None else [])
        allowed = caches.checked_clusters(allowed_clusters)
        allocate = partial(caches.allocate, self._node, self._dialect, desc, blocks_key=key, blocks=True)
        make = partial(allocate, allowed=allowed)
        return self._made("allocate_blocks_cache", make)

    def register_cache(
        self,
        cache_desc: object,
        addrs: object,
        cache_keys: object,
        remote_accessible: object,
        tensors: object = None,
        allowed_clusters: object = None,
    ) -> Operation[Any]:
        desc = copy.copy(instance("cache_desc", cache_desc, CacheDesc))
        addresses, owners = caches.given_memory(desc, addrs, tensors)
        keys = caches.checked_keys(cache_keys)
        allowed = caches.checked_clusters(allowed_clusters)
        options = {"keys": keys, "remote_accessible": remote_accessible, "owners": owners, "allowed": allowed}
        return self._registered("register_cache", desc, addresses, **options)

    def register_blocks_cache(
        self,
        cache_desc: object,
        addrs: object,
        blocks_cache_key: object,
        remote_accessible: object,
        tensors: object = None,
        allowed_clusters: object = None,
    ) -> Operation[Any]:
        desc = copy.copy(instance("cache_desc", cache_desc, CacheDesc))
        addresses, owners = caches.given_memory(desc, addrs, tensors)
        key = _optional_blocks_key(blocks_cache_key)
        allowed = caches.checked_clusters(allowed_clusters)
        options = {"blocks_key": key, "blocks": True, "remote_accessible": remote_accessible, "owners": owners}
        options["allowed"] = allowed
        return self._registered("register_blocks_cache", desc, addresses, **options)

    def _registered(self, name: str, desc: CacheDesc, addresses: list[Any], **options: Any) -> Operation[Any]:
        async def run() -> Entry:
            return caches.register(self._node, desc, addresses, **options)

        return self._made(name, run)

    def _made(self, name: str, make: Callable[[], Coroutine[Any, Any, Entry]]) -> Operation[Any]:
        async def run() -> Any:
            return self._wrap(await make())

        return Operation(name, run, undo=self._unmake)

    def _unmake(self, handle: Handle) -> None:
        entry = self._node.registry.find(handle.cache_id)
        if entry is not None and handle._binding is entry:
            self._node.registry.discard(entry)
        handle._release()

    def deallocate(self, cache: object, *, blocks: bool | None) -> Operation[None]:
        """Unknown ids are harmless. `blocks` is the kind the caller's method is for; None accepts both."""
        handle: Any = instance("cache", cache, Cache, KvCache)
        kind = getattr(handle, "is_blocks_cache", blocks)
        right = "deallocate_blocks_cache" if kind else "deallocate_cache"
        right = "unregister_cache" if getattr(handle, "is_registered", False) else right
        require(blocks is None or kind == blocks, f"cache is {'a' if kind else 'not a'} blocks cache; use {right}")

        async def run() -> None:
            entry = self._node.registry.find(handle.cache_id)
            if handle._binding is not None and handle._binding is not entry and handle._binding.alive:
                return  # of another engine, or of this node before it was initialised again
            if entry is not None and not (entry.registered and entry.alive):
                await caches.release(self._node, handle.cache_id)
            handle._release()

        return Operation("deallocate_cache" if not blocks else "deallocate_blocks_cache", run, cache=handle)

    def unregister_cache(self, cache_id: object) -> Operation[None]:
        number = int64("cache_id", cache_id)

        async def run() -> None:
            entry = self._node.registry.find(number)
            if entry is None or entry.registered:
                await caches.release(self._node, number)

        return Operation("unregister_cache", run)

    def publish_cache(self, cache: object, cache_keys: object, lease: object = None) -> Operation[None]:
        handle: Any = instance("cache", cache, Cache, KvCache)
        keys = caches.checked_keys(cache_keys)
        caches.check_prompt_keys(self._node, self._dialect, keys)
        require(bool(keys), "cache_keys must not be empty")
        until = None if lease is None else leases.lease_ms(lease)

        async def run() -> None:
            caches.publish(self._node, self._dialect, caches.held(self._node, handle), keys, lease=until)

        return Operation("publish_cache", run)

    def remove_cache_key(self, cache_key: object) -> Operation[None]:
        key = instance("cache_key", cache_key, CacheKey)
        if self._dialect.prompt_keys_only:
            require(
                self._node.role is LLMRole.PROMPT, f"remove_cache_key is for role PROMPT, not {self._node.role.name}"
            )

        async def run() -> None:
            self._node.registry.remove_key(key)

        return Operation("remove_cache_key", run)

    def renew_key(self, cache_key: object, lease: object, timeout: object) -> Operation[None]:
        return self._lease("renew_key", cache_key, leases.lease_ms(lease), timeout)

    def release_key(self, cache_key: object, timeout: object) -> Operation[None]:
        return self._lease("release_key", cache_key, 0, timeout)

    def _lease(self, name: str, cache_key: object, lease: int, timeout: object) -> Operation[None]:
        given = leases.asked(self._node, name, cache_key, lease, timeout)
        return Operation(name, partial(leases.run, self._node, self._dialect, given))

    # -- copies and views -------------------------------------------------------------------------------------------

    def copy_cache(
        self, dst: object, src: object, dst_batch_index: object, src_batch_index: object, offset: object, size: object,
        req_id: object,
    ) -> Operation[None]:  # fmt: skip
        dst_handle: Any = instance("dst", dst, Cache, KvCache)
        src_handle: Any = instance("src", src, Cache, KvCache)
        dst_index = uint32("dst_batch_index", dst_batch_index)
        src_index = uint32("src_batch_index", src_batch_index)
        start, nbytes = uint64("offset", offset), int64("size", size)
        for name, handle in (("src", src_handle), ("dst", dst_handle)):
            require(not getattr(handle, "is_blocks_cache", False), f"{name} is a blocks cache")
        require(nbytes == -1 or nbytes > 0, f"size must be -1 or above 0 (bytes), got {nbytes}")
        if req_id is not None:
            uint64("req_id", req_id)

        async def run() -> None:
            source = caches.held(self._node, src_handle)
            target = caches.held(self._node, dst_handle)
            await caches.copy(
                self._node, self._dialect, target, source, dst_index=dst_index, src_index=src_index, offset=start,
                size=nbytes,
            )  # fmt: skip

        return Operation("copy_cache", run, cache=dst_handle)

    def copy_blocks(self, cache: object, copy_block_info: object) -> Operation[None]:
        copying = blocks.prepare_copy(self._node, self._dialect, cache, copy_block_info)
        return Operation("copy_blocks", copying, cache=cast("Handle", cache))

    def swap_blocks(self, src: object, dst: object, src_to_dst: object) -> Operation[None]:
        swapping = blocks.prepare_swap(self._node, self._dialect, src, dst, src_to_dst)
        return Operation("swap_blocks", swapping, cache=cast("Handle", dst))

    def get_cache_tensors(self, cache: object, tensor_index: object) -> list[Tensor]:
        """Plain in both faces: a view, without a copy and without a crossing; of device memory a copy."""
        handle: Any = instance("kv_cache", cache, KvCache, Cache)
        index = int32("tensor_index", tensor_index)
        desc = handle.cache_desc
        require(0 <= index < desc.num_tensors, f"tensor_index must be in 0..{desc.num_tensors - 1}, got {index}")
        if handle._binding is None:
            raise LLMException(
                f"cache {handle.cache_id} was released", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
            )
        began = time.monotonic()
        try:
            view = tensor_bytes(self._node, self._dialect, handle._binding, index)
        except LLMException as error:
            error.operation, error.elapsed_ms = "get_cache_tensors", round((time.monotonic() - began) * 1000, 3)
            raise
        return [Tensor.from_buffer(view, TensorDesc(desc.data_type, list(desc.shape)))]

    def settled(self, cache: object, timeout: object) -> Operation[None]:
        handle: Any = instance("cache", cache, Cache, KvCache)
        deadline = NEVER if timeout is None else Deadline.after_ms(checks.timeout_ms("timeout", timeout))

        async def run() -> None:
            if handle.cache_id == caches.UNMANAGED:
                idle = await blocks.settled(handle, deadline)
            else:
                entry = self._node.registry.find(handle.cache_id)
                if handle.quarantined and handle._binding is not entry:
                    raise caches.foreign(handle)
                idle = entry is None or await entry.idle(deadline, writers_only=True)
            if not idle:
                raise LLMTimeoutError(
                    f"cache {handle.cache_id} is still quarantined",
                    status_code=self._dialect.timeout_status,
                    destination_unsafe=True,
                    retry_safe=True,
                )

        return Operation("settled", run)


def remap_registered_memory(mem_infos: object) -> NoReturn:
    """Reserved: the checks of the original, then LLM_FEATURE_NOT_ENABLED. Here no memory has to be mapped again."""
    infos: list[Any] = mem_infos if isinstance(mem_infos, list) else [mem_infos]
    require(len(infos) > 0, "mem_infos must not be empty")
    for info in infos:
        require(isinstance(info, MemInfo), f"mem_infos must be a MemInfo or a list of them, got {info!r}")
        require(info.mem_type is Memtype.MEM_TYPE_DEVICE, f"mem_infos: mem_type must be DEVICE, got {info.mem_type}")
        require(info.addr != 0 and info.size > 0, f"mem_infos: addr and size must be above 0, got {info}")
    not_enabled("remap_registered_memory")


def _optional_blocks_key(key: object) -> BlocksCacheKey | None:
    return None if key is None else instance("blocks_cache_key", key, BlocksCacheKey)


def not_enabled(name: str) -> NoReturn:
    """For names of the original that exist here before their time; they never pretend to succeed."""
    raise LLMException(
        f"{name} is not available in this version of kvpull",
        status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        operation=name,
    )
