"""Two linked nodes of this process, one of which pushes to the other, by each way that bytes can go and either face."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpull_async import BlocksCacheKey, CacheDesc, CacheKeyByIdAndIndex, DataType, LLMException, LLMRole
from tests import duo, npu
from tests.conformance.api import Api
from tests.integration.content import content

WAYS = ("inproc", "tcp", "mapped", "read", "streamed")
"""The last three are shared memory: memory files; memory by address, read through the kernel; and where that may not be
read, sent.
"""
PUSHER, RECEIVER = 11, 12
CANARY: Final = 0xA5
SIZES = {"inline": 96, "large": 700_001}
"""Bytes of a batch entry of one tensor."""

Bytes = NDArray[np.uint8]


def options_for(way: str, **more: Any) -> dict[str, Any]:
    """Properties for `duo.options`: remote cache access, and the way."""
    shared = way not in ("inproc", "tcp")
    read = {"allow_process_vm_read": "off" if way == "streamed" else "auto"} if shared else {}
    given = {"transport": "shm" if shared else way, "enable_cache_manager": True, **read}
    return {**given, "enable_remote_cache_accessible": True, **more}


@dataclass
class Stock:
    """A cache and its memory: an array of (entries, bytes) for each tensor."""

    cache: Any
    arrays: Sequence[Bytes]

    @property
    def image(self) -> Bytes:
        """A copy of all of it, as (tensors, entries, bytes)."""
        return np.stack(self.arrays)

    def fill(self, seed: int) -> None:
        for tensor, array in enumerate(self.arrays):
            array[:] = content(seed, tensor, 0, nbytes=array.size).reshape(array.shape)

    def set_canary(self) -> None:
        for array in self.arrays:
            array[:] = CANARY

    @property
    def untouched(self) -> bool:
        return all(bool((array == CANARY).all()) for array in self.arrays)


def desc(nbytes: int, *, tensors: int = 4, entries: int = 3) -> CacheDesc:
    return CacheDesc(tensors, [entries, nbytes], DataType.DT_UINT8)


@dataclass
class Ends:
    """Both nodes, and what they hold."""

    api: Api
    way: str
    pusher: Any
    receiver: Any
    kept: list[Stock] = field(default_factory=list)

    async def source(self, shape: CacheDesc, *, blocks: bool = False, seed: int = 1, **options: Any) -> Stock:
        made = await self.stock(self.pusher, shape, blocks=blocks, **options)
        made.fill(seed)
        return made

    async def destination(self, shape: CacheDesc, *, blocks: bool = False, model: int = 0, **options: Any) -> Stock:
        made = await self.stock(self.receiver, shape, blocks=blocks, model=model, **options)
        made.set_canary()
        return made

    async def stock(
        self, node: Any, shape: CacheDesc, *, blocks: bool = False, model: int = 0, by_address: bool | None = None,
        **options: Any,
    ) -> Stock:  # fmt: skip
        """By default memory of the kind that the way is about."""
        manager, registers = node.cache_manager, by_address
        if registers is None:
            registers = self.way in ("read", "streamed")
        key = {"blocks_cache_key": BlocksCacheKey(node.cluster_id, model)} if blocks else {}
        if registers:
            arrays = [npu.room(shape.entries, shape.entry_nbytes) for _ in range(shape.num_tensors)]
            register = manager.register_blocks_cache if blocks else manager.register_cache
            cache = await self.api.do(register, shape, npu.addresses(arrays), **key, **options)
            made = Stock(cache, arrays)
        else:
            allocate = manager.allocate_blocks_cache if blocks else manager.allocate_cache
            cache = await self.api.do(allocate, shape, **key, **options)
            made = Stock(cache, duo.arrays(cache))
        self.kept.append(made)
        return made

    async def push(self, to: Stock, source: Stock, *where: Any, entry: int = 0, **options: Any) -> None:
        key = CacheKeyByIdAndIndex(self.receiver.cluster_id, to.cache.cache_id, entry)
        await self.api.do(self.pusher.cache_manager.push_cache, key, source.cache, *where, **options)

    async def push_blocks(self, source: Stock, *where: Any, model: int = 0, **options: Any) -> None:
        key = BlocksCacheKey(self.receiver.cluster_id, model)
        await self.api.do(self.pusher.cache_manager.push_blocks, key, source.cache, *where, **options)

    @staticmethod
    async def refused(call: Any, *args: Any, early: bool = False, **options: Any) -> LLMException:
        """The error of a call that must be refused. `early`: for its arguments alone, else every field is set."""
        with pytest.raises(LLMException) as caught:
            await call(*args, **options)
        error: LLMException = caught.value
        assert not error.destination_unsafe, error
        if not early:
            assert error.peer is not None, error
            assert error.operation in ("push_cache", "push_blocks"), error
            assert error.elapsed_ms is not None, error
        return error


@contextlib.asynccontextmanager
async def ends(api: Api, way: str, *, dials: str = "receiver", theirs: Any = None, **more: Any) -> AsyncIterator[Ends]:
    """`dials` says who dialled the link, "pusher" or "receiver"; `theirs` are options of the receiver alone."""
    nodes = [api.package.LLMDataDist(LLMRole.MIX, cluster) for cluster in (PUSHER, RECEIVER)]
    pusher, receiver = nodes
    made = Ends(api, way, pusher, receiver)
    try:
        await api.do(pusher.init, duo.options(listen=True, **options_for(way, **more)))
        await api.do(receiver.init, duo.options(listen=True, **options_for(way, **{**more, **(theirs or {})})))
        near, far = nodes if dials == "pusher" else nodes[::-1]
        info = duo.cluster(far.cluster_id, far.listen_address)
        assert await api.do(near.link_clusters, [info], duo.TIMEOUT_MS) == (duo.OK, [duo.OK])
        linked = duo.engine_of(pusher).links
        await api.until(lambda: linked.find(RECEIVER) is not None)
        yield made
    finally:
        for node in nodes:
            await api.do(node.finalize)
        made.kept.clear()  # not before, since registered memory is the caller's to keep


def laid(destination: Stock, pieces: Sequence[tuple[int, int, Bytes]]) -> Bytes:
    """What the destination must be: the canary, but for each (tensor, entry, bytes) put at that entry's beginning."""
    expected = np.full_like(destination.image, CANARY)
    for tensor, entry, piece in pieces:
        expected[tensor, entry, : piece.size] = piece
    return expected
