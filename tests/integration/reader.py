"""The side that pulls, in the test's own process, from a `peers/source.py`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvpull_async import CacheDesc, CacheKey, DataType, KvCache, LLMDataDist, LLMException, LLMStatusCode
from kvpull_async.values import LLMRole
from tests import duo
from tests.integration.content import content
from tests.integration.own_loop import outcome
from tests.integration.processes import Child, child, descriptors, mappings

TENSORS = 2
NBYTES = 8 * 1024 * 1024
"""Of an entry of one tensor: a pull of it is copied in four pieces."""
KINDS = ("mapped", "read", "streamed")
"""Memory files; memory by address, read through the kernel; the same where that is forbidden."""


def options_for(kind: str, **more: Any) -> dict[str, Any]:
    return {**more, "transport": "shm", "allow_process_vm_read": "off" if kind == "streamed" else "auto"}


def source_kind(kind: str) -> str:
    return "allocated" if kind == "mapped" else "registered"


@contextlib.asynccontextmanager
async def source(**properties: Any) -> AsyncIterator[Child]:
    async with child("PROMPT", duo.PROMPT, program="source", **{"listen": True, **properties}) as made:
        yield made


async def fields(peer: Child) -> dict[str, Any]:
    return await peer.ask("state", "state")


async def comes_to(peer: Child, condition: Callable[[dict[str, Any]], bool]) -> None:
    """Ask the peer for its fields until they are so."""
    give_up = time.monotonic() + 15
    while not condition(state := await fields(peer)):
        assert time.monotonic() < give_up, state
        await asyncio.sleep(0.01)


class Reader:
    def __init__(self, node: LLMDataDist) -> None:
        self.node = node
        self._kept: list[KvCache] = []

    async def cache(self, nbytes: int = NBYTES, *, tensors: int = TENSORS) -> KvCache:
        desc = CacheDesc(tensors, [1, nbytes], DataType.DT_UINT8)
        self._kept.append(await self.node.kv_cache_manager.allocate_cache(desc))
        return self._kept[-1]

    async def drop(self, cache: KvCache) -> None:
        self._kept.remove(cache)
        await self.node.kv_cache_manager.deallocate_cache(cache)

    async def link(self, source: Child) -> None:
        info = duo.cluster(duo.PROMPT, source.address)
        await self.node.link_clusters([info], duo.TIMEOUT_MS, raise_on_error=True)

    async def unlink(self, source: Child, *, force: bool = False) -> None:
        await self.node.unlink_clusters([duo.cluster(duo.PROMPT, source.address)], duo.TIMEOUT_MS, force)

    def pull(self, cache: KvCache, key: int, *, timeout: float = duo.TIMEOUT_MS) -> asyncio.Task[None]:
        """Begun. The key is kept, since an offset is given."""
        pull = self.node.kv_cache_manager.pull_cache(
            CacheKey(duo.PROMPT, key), cache, 0, src_cache_offset=0, timeout=timeout
        )
        return asyncio.get_running_loop().create_task(pull)

    async def check_right(self, key: int, *, generation: int = 0, nbytes: int = NBYTES) -> None:
        """The next pull, without linking again."""
        cache = await self.cache(nbytes)
        error = await outcome(self.pull(cache, key))
        assert error is None, error
        assert whole(cache, key, generation=generation)
        await self.drop(cache)


@contextlib.asynccontextmanager
async def reader(**properties: Any) -> AsyncIterator[Reader]:
    async with duo.node(LLMRole.DECODER, duo.DECODER, **properties) as node:
        yield Reader(node)


def whole(cache: KvCache, key: int, *, generation: int = 0) -> bool:
    return all(
        bool((array[0] == content(key, tensor, generation, nbytes=array[0].size)).all())
        for tensor, array in enumerate(duo.arrays(cache))
    )


def refused(error: BaseException | None, *codes: LLMStatusCode) -> LLMException:
    assert isinstance(error, LLMException), error
    assert error.status_code in codes, error
    assert not error.destination_unsafe
    assert error.operation
    assert error.peer
    return error


def held_memory() -> dict[str, int]:
    """What could be left of other processes' memory in this one."""
    return {"mappings": mappings(), "descriptors": descriptors()}
