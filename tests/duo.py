"""Two nodes of this process, linked: a prompt node that publishes caches of known bytes, and a decoder node that pulls
them. For tests of what stands above the links.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpull_async import (
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    KvCache,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)
from kvpull_async.engine import Engine
from kvpull_async.testing.faults import GatedMemory
from tests import npu

PROMPT, DECODER = 1, 2
TIMEOUT_MS = 30_000
"""Deadline of pulls that are to succeed, however slow the machine is."""
SMALL = CacheDesc(4, [4, 1024], DataType.DT_UINT8)
"""Its pulls ride inside the answer."""
BIG = CacheDesc(4, [4, 1024 * 1024], DataType.DT_UINT8)
"""Its pulls are streamed, in more than one piece."""
OK = LLMStatusCode.LLM_SUCCESS


def options(*, listen: bool = False, transport: str = "tcp", **properties: Any) -> dict[str, str]:
    """Options as a program makes them; `properties` are those of `LLMConfig`."""
    config = LLMConfig()
    config.sync_kv_timeout = TIMEOUT_MS
    config.transfer_backend = transport
    if listen:
        config.listen_ip_info = "127.0.0.1:0"
    for name, value in properties.items():
        setattr(config, name, value)
    return dict(config.generate_options())


def cluster(cluster_id: int, address: tuple[str, int] | None) -> LLMClusterInfo:
    assert address is not None
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_remote_ip_info(*address)
    return info


def engine_of(datadist: Any) -> Engine:
    engine = datadist._core.engine
    assert isinstance(engine, Engine)
    return engine


def keys(desc: CacheDesc, *, first: int = 0) -> list[CacheKey]:
    """One request key per batch entry of the prompt node."""
    return [CacheKey(PROMPT, first + entry) for entry in range(desc.entries)]


def arrays(cache: Cache | KvCache) -> list[NDArray[np.uint8]]:
    """The tensors' memory: one array of (entries, bytes) each."""
    return [tensor.reshape(cache.cache_desc.entries, -1) for tensor in npu.tensors(cache)]


def pattern(tensor: int, entry: int) -> int:
    """The byte of which that entry of that tensor is made on the prompt node; never 0."""
    return 1 + 16 * tensor + entry


def fill(cache: Cache | KvCache) -> None:
    for tensor, array in enumerate(arrays(cache)):
        for entry, row in enumerate(array):
            row[:] = pattern(tensor, entry)


def holds(cache: Cache | KvCache, *, entry: int, source: int) -> bool:
    """Whether that entry of the destination holds all of entry `source` of a filled cache."""
    return all(bool((array[entry] == pattern(tensor, source)).all()) for tensor, array in enumerate(arrays(cache)))


def untouched(cache: Cache | KvCache) -> bool:
    return not any(array.any() for array in arrays(cache))


@dataclass
class Duo:
    """Its caches are kept until it is gone, so that none is dropped without being deallocated."""

    prompt: LLMDataDist
    decoder: LLMDataDist
    kept: list[KvCache] = field(default_factory=list)

    async def publish(self, desc: CacheDesc = SMALL, *, first: int = 0) -> KvCache:
        """A filled cache with a key for each entry."""
        cache = await self.prompt.kv_cache_manager.allocate_cache(desc, keys(desc, first=first))
        fill(cache)
        self.kept.append(cache)
        return cache

    async def destination(self, desc: CacheDesc = SMALL) -> KvCache:
        cache = await self.decoder.kv_cache_manager.allocate_cache(desc)
        self.kept.append(cache)
        return cache

    async def link(self) -> None:
        info = cluster(PROMPT, self.prompt.listen_address)
        assert await self.decoder.link_clusters([info], TIMEOUT_MS) == (OK, [OK])

    def gate(self) -> GatedMemory:
        """From now on the prompt node's sending, after its first piece, stops where the returned memory's gate is."""
        return gate(self.prompt)


def gate(datadist: Any, *, after: int = 1) -> GatedMemory:
    """Lay a gate around the memory of a node; caches made before and after have it."""
    registry = engine_of(datadist).registry
    registry.backend = gated = GatedMemory(registry.backend, after=after)
    for entry in tuple(registry._entries.values()):
        entry.direct = False
    return gated


@contextlib.asynccontextmanager
async def node(role: LLMRole, cluster_id: int, **properties: Any) -> AsyncIterator[LLMDataDist]:
    async with LLMDataDist(role, cluster_id) as made:
        await made.init(options(**properties))
        yield made


@contextlib.asynccontextmanager
async def duo(**properties: Any) -> AsyncIterator[Duo]:
    """Both nodes, linked."""
    async with (
        node(LLMRole.PROMPT, PROMPT, listen=True, **properties) as prompt,
        node(LLMRole.DECODER, DECODER, **properties) as decoder,
    ):
        pair = Duo(prompt, decoder)
        await pair.link()
        yield pair


@contextlib.contextmanager
def frozen(*nodes: Any) -> Iterator[None]:
    """Meanwhile the nodes' cores do nothing: their peers see connections that are open and silent."""
    resume = threading.Event()
    try:
        for frozen_node in nodes:
            asleep = threading.Event()

            def sleep(asleep: threading.Event = asleep) -> None:
                asleep.set()
                resume.wait(TIMEOUT_MS / 1000)

            engine_of(frozen_node).core.loop.call_soon_threadsafe(sleep)
            assert asleep.wait(TIMEOUT_MS / 1000)
        yield
    finally:
        resume.set()


def codes(result: tuple[LLMStatusCode, Sequence[LLMStatusCode]]) -> list[str]:
    return [result[0].name, *(code.name for code in result[1])]
