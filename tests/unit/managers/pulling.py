"""A node with caches and a link that answers by itself, for tests of pulls from their arguments to the link."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kvpull_async import (
    CacheDesc,
    CacheKey,
    DataType,
    KvCache,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from kvpull_async._workers import Workers
from kvpull_async.config import Settings
from kvpull_async.managers import pulls
from kvpull_async.managers.dialect import KV, Dialect
from kvpull_async.managers.node import Node
from kvpull_async.memory.host import HostMemory
from kvpull_async.observe import Counters, Log
from kvpull_async.protocol import frames
from kvpull_async.registry import Registry
from tests.pull_link import LoopLink

PARAM_INVALID = LLMStatusCode.LLM_PARAM_INVALID
STRIDE = 100
KEY, OWN, UNLINKED = CacheKey(1, 7, 3), CacheKey(2, 7), CacheKey(9, 7)


class Table:
    """A node with one entry cache and one blocks cache (both 4 tensors of 3 x 100 bytes) and a link to cluster 1."""

    def __init__(self, dialect: Dialect = KV, **settings: Any) -> None:
        self.link = LoopLink()
        self.dialect = dialect
        self.memory = np.zeros((2, 4, 3, STRIDE), np.uint8)
        self.registry = Registry(HostMemory())
        self.counters = Counters()
        self.node = Node(
            LLMRole.DECODER,
            Settings(LLMRole.DECODER, 2, **settings),
            self.registry,
            Workers(1),
            self.counters,
            Log(),
            asyncio.get_running_loop(),
            lambda cluster_id: self.link if cluster_id == 1 else None,  # type: ignore[arg-type,return-value]
        )
        self.entries, self.blocks = self.handle(0, blocks=False), self.handle(1, blocks=True)

    def handle(self, number: int, *, blocks: bool) -> KvCache:
        desc = CacheDesc(4, [3, STRIDE], DataType.DT_UINT8)
        addresses = [tensor.ctypes.data for tensor in self.memory[number]]
        regions = self.registry.backend.adopt(addresses, tensor_nbytes=desc.size, placement=Placement.HOST)
        entry = self.registry.add(desc, regions, blocks=blocks)
        handle = KvCache(entry.cache_id, desc, [addresses], None)
        handle._binding = entry
        return handle

    async def pull(self, key: Any = KEY, cache: Any = None, index: int = 0, size: int = -1, **options: Any) -> None:
        given = pulls.draft(self.node, self.dialect, key, self.entries if cache is None else cache, options)
        given.batch_index, given.size = index, size
        await pulls.run(self.node, self.dialect, pulls.prepare_cache(self.dialect, given))

    async def pull_blocks(self, key: Any, src: Any, dst: Any, cache: Any = None, **options: Any) -> None:
        given = pulls.draft(self.node, self.dialect, key, self.blocks if cache is None else cache, options)
        await pulls.run(self.node, self.dialect, pulls.prepare_blocks(given, src, dst))

    @property
    def asked(self) -> frames.Request:
        return self.link.lane.requests[-1]

    def landed(self, number: int = 0) -> list[tuple[int, int, int, int]]:
        """(tensor, entry, first byte, bytes) of what was written."""
        found = []
        for tensor in range(4):
            for entry in range(3):
                (where,) = np.nonzero(self.memory[number, tensor, entry])
                if where.size:
                    assert where.tolist() == list(range(where[0], where[0] + where.size))
                    found.append((tensor, entry, int(where[0]), int(where.size)))
        return found

    def close(self) -> None:
        self.node.workers.close(5.0)
        self.link.workers.close(5.0)


async def refused(call: Any, status: LLMStatusCode = PARAM_INVALID, *, text: str | None = None) -> LLMException:
    with pytest.raises(LLMException, match=text) as caught:
        await call
    assert caught.value.status_code == status
    return caught.value
