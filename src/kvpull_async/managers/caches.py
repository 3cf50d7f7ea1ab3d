"""Making, finding and releasing local caches, and copying between them. It must not know links or peers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from kvpull_async import plan
from kvpull_async._deadline import Deadline, absorb
from kvpull_async._workers import Job, Workers, resolve
from kvpull_async.managers.dialect import Dialect
from kvpull_async.managers.node import Node
from kvpull_async.memory.base import PIECE_BYTES, Allocation, Region, Until, copy_batches
from kvpull_async.registry import Entry, key_id
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.transport.base import break_off
from kvpull_async.values import BlocksCacheKey, Cache, CacheDesc, CacheKey, KvCache, LLMRole, Placement
from kvpull_async.values import foreign as foreign_memory
from kvpull_async.values._check import INVALID_ID, instance, integers, require, type_error, uint64

__all__ = [
    "UNMANAGED",
    "allocate",
    "carry_out",
    "check_prompt_keys",
    "checked_clusters",
    "checked_keys",
    "copy",
    "foreign",
    "given_memory",
    "held",
    "last_places",
    "local",
    "publish",
    "register",
    "release",
]

_RANK_LIMIT: Final = 32
UNMANAGED: Final = -1
"""The id of a handle that no manager made."""
_AGAIN: Final = 0.005
"""Seconds between two attempts to allocate."""
_LOOK: Final = 5.0
"""Seconds between two looks whether a copy gets on. They are counted: a process that was stopped meanwhile has not been
slow.
"""
_LOOKS: Final = 7
"""So many in a row without a byte end it: later than whatever bounds the memory's own waits."""


def checked_keys(keys: object) -> list[CacheKey]:
    items: Sequence[Any] = instance("cache_keys", keys, list, tuple)
    return [instance(f"cache_keys[{i}]", key, CacheKey) for i, key in enumerate(items)]


def last_places(keys: Sequence[CacheKey]) -> list[CacheKey]:
    """LLM-DataDist documentation: the older manager takes a key twice, and it names its last place; the others are
    padding here.
    """
    last = {key_id(key): place for place, key in enumerate(keys)}
    places = enumerate(keys)
    return [key if last[key_id(key)] == place else CacheKey(key.cluster_id, INVALID_ID) for place, key in places]


def checked_addresses(desc: CacheDesc, addrs: object) -> list[int]:
    checked = integers("addrs", addrs, low=0, high=2**64 - 1, kinds=(list,))
    require(bool(checked), "addrs must not be empty")
    require(len(checked) == desc.num_tensors, f"addrs has {len(checked)} addresses for {desc.num_tensors} tensors")
    require(all(checked), "addrs must not hold the address 0")
    return checked


def check_layout(desc: CacheDesc) -> None:
    """LLM-DataDist documentation: at least one tensor, rank 1 to 31, every dimension above 0, no overflow."""
    require(desc.num_tensors > 0, "cache_desc.num_tensors must be above 0")
    shape = list(desc.shape)
    require(len(shape) < _RANK_LIMIT, f"cache_desc.shape has rank {len(shape)}, at most {_RANK_LIMIT - 1} is allowed")
    require(min(shape) > 0, f"cache_desc.shape must hold dimensions above 0, got {shape}")
    require(desc.size * desc.num_tensors < 2**63, "cache_desc describes more than 2**63 bytes")


def checked_clusters(clusters: object) -> frozenset[int] | None:
    """Whom a cache is for; None for all. An empty list is nobody."""
    if clusters is None:
        return None
    if isinstance(clusters, (str, bytes)) or not isinstance(clusters, Iterable):
        raise type_error("allowed_clusters", clusters, "an iterable of cluster ids, or None")
    return frozenset(uint64(f"allowed_clusters[{i}]", cluster) for i, cluster in enumerate(clusters))


def check_prompt_keys(node: Node, dialect: Dialect, keys: Sequence[object]) -> None:
    if dialect.prompt_keys_only and keys:
        require(node.role is LLMRole.PROMPT, f"cache keys are for role PROMPT, this node is {node.role.name}")


async def allocate(
    node: Node,
    dialect: Dialect,
    desc: CacheDesc,
    *,
    keys: Sequence[CacheKey] = (),
    blocks_key: BlocksCacheKey | None = None,
    blocks: bool = False,
    allowed: frozenset[int] | None = None,
) -> Entry:
    """Memory from the backend, on a worker since it takes time; the keys are checked before and after."""
    registry = node.registry
    registry.drain_drops()
    check_layout(desc)
    registry.check_keys(desc, keys, bound_status=dialect.key_bound_status)
    size, placement = desc.size, desc.placement
    allocation = await _with_patience(
        node,
        lambda: registry.backend.allocate(tensors=desc.num_tensors, tensor_nbytes=size, placement=placement),
        dialect,
        placement,
    )
    try:
        registry.check_keys(desc, keys, bound_status=dialect.key_bound_status)
    except LLMException:
        registry.backend.free(allocation)
        raise
    entry = registry.add(desc, allocation.regions, blocks=blocks, allocation=allocation, allowed=allowed)
    registry.bind(entry, keys)
    if blocks_key is not None:
        registry.bind_blocks(entry, blocks_key)
    node.log.debug("cache.allocated", cache_id=entry.cache_id, bytes=allocation.nbytes, keys=len(keys))
    return entry


async def _with_patience(
    node: Node, make: Callable[[], Allocation], dialect: Dialect, placement: Placement
) -> Allocation:
    """As long as others are only to unmap what was released here, it may yet fit."""
    backend, patience = node.registry.backend, Deadline.after_ms(node.settings.settle_timeout_ms)
    while True:
        worth_it = backend.returning(placement)  # before: what comes back meanwhile comes too late for this attempt
        try:
            workers = node.workers.fit(direct=not backend.waits(placement))
            return await _in_worker(workers, make, backend.free, dialect)
        except LLMException as error:
            full = error.status_code == dialect.out_of_memory_status
            if not full or patience.expired or not (worth_it or backend.returning(placement)):
                raise
        await asyncio.sleep(_AGAIN)


async def _in_worker(
    workers: Workers, make: Callable[[], Allocation], undo: Callable[[Allocation], None], dialect: Dialect
) -> Allocation:
    """Run `make` on a worker. When the caller is cancelled meanwhile, what it makes is given back."""
    try:
        job = asyncio.get_running_loop().run_in_executor(workers, make)
    except RuntimeError as error:  # no thread to be had
        raise LLMException(f"there is no memory: {error}", status_code=dialect.out_of_memory_status) from error
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        job.add_done_callback(lambda made: None if made.cancelled() or made.exception() else undo(made.result()))
        raise
    except LLMException as error:
        if error.status_code == LLMStatusCode.LLM_OUT_OF_MEMORY:
            raise LLMException(*error.args, status_code=dialect.out_of_memory_status) from error
        raise


def given_memory(desc: CacheDesc, addrs: object, tensors: object) -> tuple[list[Any], list[object]]:
    """The addresses of what is to be registered, and what has to be held meanwhile; nothing for plain addresses."""
    if tensors is None:
        return list(instance("addrs", addrs, list)), []
    require(addrs is None, "addrs and tensors are both given; one of them says where the memory is")
    found = foreign_memory.read(desc, tensors)
    return [memory.address for memory in found], [memory.owner for memory in found]


def register(
    node: Node,
    desc: CacheDesc,
    addrs: object,
    *,
    owners: Sequence[object] = (),
    keys: Sequence[CacheKey] = (),
    blocks_key: BlocksCacheKey | None = None,
    blocks: bool = False,
    remote_accessible: object = None,
    allowed: frozenset[int] | None = None,
) -> Entry:
    """Memory of the caller, by address. It is not touched, and stays the caller's until `unregister_cache` returned."""
    checked = checked_addresses(desc, addrs)
    check_layout(desc)
    if remote_accessible is not None and not isinstance(remote_accessible, bool):
        raise TypeError(f"remote_accessible must be a bool or None, got {type(remote_accessible).__name__}")
    require(not (node.ranked and remote_accessible), "remote_accessible must not be True after link()")
    usual = desc.placement is Placement.DEVICE and not node.ranked
    accessible = usual if remote_accessible is None else remote_accessible
    require(len(keys) <= desc.entries, f"cache_keys: {len(keys)} keys for {desc.entries} batch entries")
    registry = node.registry
    regions = registry.backend.adopt(checked, tensor_nbytes=desc.size, placement=desc.placement, owners=owners)
    _check_devices(desc, regions, owners)
    entry = registry.add(desc, regions, blocks=blocks, remote_accessible=accessible, allowed=allowed)
    registry.bind(entry, keys)
    if blocks_key is not None:
        registry.bind_blocks(entry, blocks_key)
    node.log.debug("cache.registered", cache_id=entry.cache_id, keys=len(keys))
    return entry


def _check_devices(desc: CacheDesc, regions: Sequence[Region], owners: Sequence[object]) -> None:
    """Tensors say where they are; of plain addresses that is found out at their first use."""
    for i, (region, owner) in enumerate(zip(regions, owners)):  # noqa: B905  (addresses alone have no owners)
        there, here = foreign_memory.device_of(owner), region.device
        caches = f"caches of Placement.{desc.placement.name} are in {_memory_of(here)}"
        require(there == here, f"tensors[{i}] is in {_memory_of(there)}, and {caches} here")


def _memory_of(device: int | None) -> str:
    return "host memory" if device is None else f"the memory of NPU {device}"


def publish(node: Node, dialect: Dialect, entry: Entry, keys: Sequence[CacheKey], *, lease: int | None) -> None:
    """Bind the i-th key to batch entry i, now that its bytes are there, each for `lease` ms, if that is given."""
    require(not entry.blocks, f"cache {entry.cache_id} is a blocks cache, whose key is given when it is made")
    node.registry.check_keys(entry.desc, keys, bound_status=dialect.key_bound_status)
    taken = [i for i, key in enumerate(keys) if not key.is_padding and node.registry.bound(entry, i) is not None]
    require(not taken, f"cache_keys: batch entries {taken} of cache {entry.cache_id} have a key already")
    node.registry.bind(entry, keys, lease=None if lease is None else lease / 1000)
    node.log.debug("cache.published", cache_id=entry.cache_id, keys=len(keys))


async def release(node: Node, cache_id: int) -> None:
    """Give up the id. Returns when nothing uses the memory any more: transfers are waited for (bounded), then cut.

    Keys of an allocated cache keep its memory; then there is nothing to wait for but transfers into it.
    LLM_TIMEOUT with `destination_unsafe` when a transfer cannot be stopped: the memory is still being written.
    """
    entry = node.registry.find(cache_id)
    if entry is None:
        return
    if entry.alive:
        node.registry.release(entry)
    if entry.referenced or not entry.busy:
        return
    patience = node.settings.settle_timeout_ms / 1000
    if await entry.idle(Deadline.after_ms(patience * 1000)):
        return
    entry.cut_pins()
    if not await entry.idle(Deadline.after_ms(patience * 1000)):
        raise LLMException(
            f"cache {cache_id} is still in use by a transfer that cannot be stopped; do not free its memory",
            status_code=LLMStatusCode.LLM_TIMEOUT,
            destination_unsafe=True,
            retry_safe=True,
        )


def local(node: Node, cache_id: int) -> Entry:
    entry = node.registry.local(cache_id)
    if entry is None:
        raise LLMException(
            f"cache {cache_id} does not exist on this node", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        )
    return entry


def held(node: Node, handle: Cache | KvCache) -> Entry:
    """The cache behind a handle. One of another engine (or of this node before it was initialised again) names nothing
    here, whatever its number is.
    """
    entry = local(node, handle.cache_id)
    if handle._binding is not None and handle._binding is not entry:
        raise foreign(handle)
    return entry


def foreign(handle: Cache | KvCache) -> LLMException:
    return LLMException(
        f"cache {handle.cache_id} belongs to another LLMDataDist", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    )


async def copy(
    node: Node, dialect: Dialect, dst: Entry, src: Entry, *, dst_index: int, src_index: int, offset: int, size: int
) -> None:
    """Copy one batch entry of every tensor. A cancelled call returns once the running piece has ended."""
    require(
        src.desc.num_tensors == dst.desc.num_tensors,
        f"src has {src.desc.num_tensors} tensors, dst {dst.desc.num_tensors}",
    )
    require(src_index < src.desc.entries, f"src_batch_index {src_index}: src has {src.desc.entries} batch entries")
    require(dst_index < dst.desc.entries, f"dst_batch_index {dst_index}: dst has {dst.desc.entries} batch entries")
    shorter = min(src.entry_nbytes, dst.entry_nbytes)
    require(offset == 0 or offset < shorter, f"offset {offset} must be below the entries' {shorter} bytes")
    nbytes = src.entry_nbytes - offset if size == -1 else size
    require(offset + nbytes <= shorter, f"{nbytes} bytes from offset {offset} on do not fit {shorter} bytes")
    tensors = range(src.desc.num_tensors)
    segments = partial(plan.entry_segments, tensors, offset=offset, size=nbytes)
    reading = segments(entry=src_index, entry_nbytes=src.entry_nbytes)
    writing = segments(entry=dst_index, entry_nbytes=dst.entry_nbytes)
    backend = node.registry.backend

    def copying(until: Until) -> Iterator[int]:
        if src.direct or dst.direct:
            lending = backend.lending(src.regions, reading, until=until)
            yield from copy_batches(lending, backend.landing(dst.regions, writing, until=until))
        elif src is not dst or src_index != dst_index:
            pairs = plan.cut(plan.pair(reading, writing), limit=PIECE_BYTES)
            yield from backend.copying(src.regions, dst.regions, pairs, until=until)

    await carry_out(node, dialect, src, dst, copying)


async def carry_out(
    node: Node, dialect: Dialect, src: Entry, dst: Entry, copying: Callable[[Until], Iterable[int]]
) -> None:
    """Run the bounded steps of a copy between two caches, which stay until the last one has ended. `dst` is quarantined
    when a copy that was cancelled, or has not got on for long, does not stop in time.
    """
    patience = Deadline.after_ms(node.settings.settle_timeout_ms)
    if dst.quarantined and not await dst.idle(patience, writers_only=True):
        raise LLMTimeoutError(f"dst, cache {dst.cache_id}, is quarantined", destination_unsafe=True, retry_safe=True)
    for entry in (src, dst):
        if entry.cache_id != UNMANAGED:
            local(node, entry.cache_id)  # released while this waited?
        entry.reach(writing=entry is dst)
    until = Until()
    try:
        job = Job(node.workers.fit(direct=src.direct and dst.direct), copying(until))
    except RuntimeError as error:  # no thread to be had
        raise LLMException(f"nothing can be copied: {error}", status_code=dialect.out_of_memory_status) from error
    released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    pins = [entry.pin(partial(resolve, released)) for entry in (src, dst)]

    def unpin(_: asyncio.Future[None]) -> None:
        """Not before the last step has ended: the source is read for as long as the destination is written."""
        for pin in pins:
            pin.release()

    try:
        await _copied(job, released, dialect)
    except BaseException as error:
        break_off(job, until)
        if not await absorb([job.settled], Deadline.after_ms(node.settings.settle_timeout_ms)):
            dst.quarantine(job.settled)
            node.counters.add("regions_quarantined")
            node.log.warning("region.quarantined", cache_id=dst.cache_id)
            if isinstance(error, LLMException):
                error.destination_unsafe, error.retry_safe = True, False
        raise
    finally:
        job.settled.add_done_callback(unpin)


async def _copied(job: Job, released: asyncio.Future[None], dialect: Dialect) -> None:
    """Wait for the copy, unless a cache is released or the copy gets on no more: a device that can be neither waited
    for nor stopped must not hold its caller. Raises what made it fail.
    """
    both: list[asyncio.Future[Any]] = [job.done, released]
    looks, total = 0, -1
    while not (await asyncio.wait(both, timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED))[0]:
        looks, total = 0 if job.total != total else looks + 1, job.total
        if looks == _LOOKS:
            reason = f"the copy has not got on for {_LOOK * _LOOKS:g} s"
            raise LLMTimeoutError(reason, status_code=dialect.timeout_status)
    if released.done():
        raise LLMException("a cache was released during the copy", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
    try:
        job.done.result()
    except MemoryError as error:
        reason, cause = f"no memory to copy: {error}", error.with_traceback(None)
        raise LLMException(reason, status_code=dialect.out_of_memory_status) from cause
    except LLMException as error:  # without the thread that copied: who keeps it would keep the memory
        raise error.with_traceback(None)  # noqa: B904
