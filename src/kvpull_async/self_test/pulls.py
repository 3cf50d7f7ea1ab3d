"""The checks of pulls between caches in the memory of the device, through the public API alone.

Caches are filled by way of host memory, pulled, and read back by way of it: inside this process, and out of a second
one. It must not know AscendCL.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    KvCache,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    Placement,
)
from kvpull_async.self_test.copies import compare
from kvpull_async.self_test.lines import Steps

__all__ = ["ENTRY", "KEY", "PULLS", "TENSORS", "Address", "a_node", "check_pulls", "linked", "pattern", "serve"]

PULLS: Final = 7
Bytes = NDArray[np.uint8]
Address = tuple[str, int]
_SOURCE, _HERE = 1, 2
TENSORS = 4
ENTRY = 2 * 1024 * 1024 + 96
"""Bytes of one tensor's batch entry: not a whole number of slots."""
_BLOCKS, _BLOCK = 16, 64 * 1024
_FROM, _INTO = [3, 7, 4, 5, 15], [0, 1, 14, 9, 2]
KEY = CacheKey(_SOURCE, req_id=1)
_BLOCKS_KEY = BlocksCacheKey(_SOURCE, 0)
_EMPTY = 0x5A


def check_pulls(steps: Steps, *, device: int, source: Address, patience: float) -> None:
    """Inside this process; then from the process that serves at `source`, by the best path, and over TCP."""
    heard = _Paths()
    logging.getLogger("kvpull").addHandler(heard)
    logging.getLogger("kvpull").setLevel(logging.DEBUG)

    def run(work: Coroutine[Any, Any, int]) -> str:
        began = time.perf_counter()
        heard.paths.clear()
        nbytes = asyncio.run(work)
        paths = " and ".join(sorted(heard.paths))
        return (
            f"pull_cache and pull_blocks over {paths}, {nbytes / 2**20:.1f} MiB, every byte is right; with filling and "
            f"reading back {time.perf_counter() - began:.2f} s"
        )

    def across(backend: str) -> str:
        return run(_across(device, limit, source, backend))

    limit = int(patience * 1000)
    steps.run(PULLS, "inside one process", lambda: run(_inside(device, limit)))
    for name, backend in (("between two processes", "auto"), ("between two processes, over TCP", "tcp")):
        steps.run(PULLS, name, partial(across, backend))


async def serve(steps: Steps, *, device: int, patience: float) -> None:
    """The second process: what is to be pulled, until standard input ends. Tells its address first."""
    async with a_node(LLMRole.PROMPT, _SOURCE, device, limit=int(patience * 1000)) as node:
        await _publish(node)
        assert node.listen_address is not None
        steps.note("address", f"{node.listen_address[0]}:{node.listen_address[1]}")
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


class _Paths(logging.Handler):
    """By which paths pulls went."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.paths: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        fields: dict[str, Any] = getattr(record, "kvpull", {})
        if fields.get("event") == "pull.finished":
            self.paths.add(str(fields.get("path")))


async def _inside(device: int, limit: int) -> int:
    async with (
        a_node(LLMRole.PROMPT, _SOURCE, device, limit=limit) as source,
        a_node(LLMRole.DECODER, _HERE, device, limit=limit) as here,
    ):
        await _publish(source)
        assert source.listen_address is not None
        return await _pull(here, source.listen_address, limit=limit)


async def _across(device: int, limit: int, source: Address, backend: str) -> int:
    async with a_node(LLMRole.DECODER, _HERE, device, limit=limit, backend=backend) as here:
        return await _pull(here, source, limit=limit)


@contextlib.asynccontextmanager
async def a_node(
    role: LLMRole, cluster: int, device: int, *, limit: int, backend: str = "auto"
) -> AsyncIterator[LLMDataDist]:
    """A node that insists on the device; one of role PROMPT listens. `limit` (ms) bounds its pulls."""
    config = LLMConfig()
    config.device_backend, config.device_id, config.sync_kv_timeout = "acl", device, limit
    config.transfer_backend = backend
    if role is LLMRole.PROMPT:
        config.listen_ip_info = "127.0.0.1:0"
    node = LLMDataDist(role, cluster)
    await node.init(config.generate_options())
    async with node:
        yield node


@contextlib.asynccontextmanager
async def linked(node: LLMDataDist, source: Address, *, limit: int) -> AsyncIterator[None]:
    """With the node that serves there."""
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = _SOURCE
    cluster.append_remote_ip_info(*source)
    await node.link_clusters([cluster], timeout=limit, raise_on_error=True)
    yield
    await node.unlink_clusters([cluster], timeout=limit)


def _entries(placement: Placement) -> CacheDesc:
    return CacheDesc(TENSORS, [2, ENTRY], DataType.DT_UINT8, placement=placement)


def _blocks(placement: Placement) -> CacheDesc:
    return CacheDesc(TENSORS, [_BLOCKS, _BLOCK], DataType.DT_UINT8, placement=placement)


def pattern(tensor: int, kind: int, shape: tuple[int, ...]) -> Bytes:
    """What is published: of the entries (0), of the blocks (1)."""
    return np.random.default_rng([tensor, kind]).integers(0, 256, shape, np.uint8)


def _views(node: LLMDataDist, cache: KvCache | Cache) -> list[Bytes]:
    manager: Any = node.kv_cache_manager if isinstance(cache, KvCache) else node.cache_manager
    return [manager.get_cache_tensors(cache, tensor)[0].numpy() for tensor in range(TENSORS)]


async def _publish(node: LLMDataDist) -> None:
    """A cache of two entries, the second one under a key, and blocks; they end with the node."""
    entries, blocks = await _caches(node, published=True)
    host_entries = await node.kv_cache_manager.allocate_cache(_entries(Placement.HOST))
    host_blocks = await node.cache_manager.allocate_blocks_cache(_blocks(Placement.HOST))
    for tensor, (entry, block) in enumerate(zip(_views(node, host_entries), _views(node, host_blocks), strict=True)):
        entry[1] = pattern(tensor, 0, (ENTRY,))
        block[:] = pattern(tensor, 1, (_BLOCKS, _BLOCK))
    await node.kv_cache_manager.copy_cache(entries, host_entries, 1, 1)
    await node.cache_manager.swap_blocks(host_blocks, blocks, {block: block for block in range(_BLOCKS)})


async def _caches(node: LLMDataDist, *, published: bool) -> tuple[KvCache, Cache]:
    keys = [CacheKey(_SOURCE, req_id=0), KEY] if published else []
    entries = await node.kv_cache_manager.allocate_cache(_entries(Placement.DEVICE), keys)
    blocks = await node.cache_manager.allocate_blocks_cache(
        _blocks(Placement.DEVICE), _BLOCKS_KEY if published else None
    )
    return entries, blocks


async def _pull(node: LLMDataDist, source: Address, *, limit: int) -> int:
    """How many bytes were pulled. The key stays, for the next one."""
    entries, blocks = await _caches(node, published=False)
    host_entries = await node.kv_cache_manager.allocate_cache(_entries(Placement.HOST))
    host_blocks = await node.cache_manager.allocate_blocks_cache(_blocks(Placement.HOST))
    for view in (*_views(node, host_entries), *_views(node, host_blocks)):
        view[:] = _EMPTY
    everything = {block: block for block in range(_BLOCKS)}
    for entry in range(2):
        await node.kv_cache_manager.copy_cache(entries, host_entries, entry, entry)
    await node.cache_manager.swap_blocks(host_blocks, blocks, everything)
    async with linked(node, source, limit=limit):
        await node.kv_cache_manager.pull_cache(KEY, entries, 0, src_cache_offset=0, dst_cache_offset=0)
        await node.cache_manager.pull_blocks(_BLOCKS_KEY, blocks, _FROM, _INTO)
    for entry in range(2):
        await node.kv_cache_manager.copy_cache(host_entries, entries, entry, entry)
    await node.cache_manager.swap_blocks(blocks, host_blocks, everything)
    _compare(_views(node, host_entries), _views(node, host_blocks))
    return TENSORS * (ENTRY + len(_FROM) * _BLOCK)


def _compare(entries: list[Bytes], blocks: list[Bytes]) -> None:
    """What was pulled is there, and nothing else has changed."""
    for tensor, (entry, block) in enumerate(zip(entries, blocks, strict=True)):
        expected = np.full((_BLOCKS, _BLOCK), _EMPTY, np.uint8)
        expected[_INTO] = pattern(tensor, 1, (_BLOCKS, _BLOCK))[_FROM]
        compare(entry[0], pattern(tensor, 0, (ENTRY,)), f"tensor {tensor} after pull_cache")
        compare(entry[1], np.full(ENTRY, _EMPTY, np.uint8), f"tensor {tensor}, the entry beside it")
        compare(block.reshape(-1), expected.reshape(-1), f"tensor {tensor} after pull_blocks")
