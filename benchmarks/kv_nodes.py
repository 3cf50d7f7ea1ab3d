"""The library as a contender: a node that offers caches, and nodes that pull through the awaitable or the blocking API.

It must not measure anything itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import numpy as np

import kvpull_async
import kvpull_sync
from kvpull_async import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from kvpull_async.memory.copying import ACCELERATED
from processes import Unavailable
from sides import Puller, Source, repeat, repeat_awaiting
from workloads import Arena, BlocksPull, EntryPull, Pull, Shape, Workload, own_memory

__all__ = [
    "COPIES",
    "NO_ID",
    "PULLER_CLUSTER",
    "SOURCE_CLUSTER",
    "AwaitingNode",
    "BlockingNode",
    "KvPuller",
    "KvSource",
    "LocalPuller",
    "MakeNode",
    "Node",
    "entry_key",
    "options",
]

SOURCE_CLUSTER: Final = 1
PULLER_CLUSTER: Final = 1000
NO_ID: Final = 2**64 - 1
COPIES: Final = "C extension" if ACCELERATED else "numpy"
"""What copies in the library, in this environment."""
LINK_MS: Final = 30_000
PULL_MS: Final = 60_000


def entry_key(cluster_id: int) -> CacheKey:
    """Of the entry that sources offer. A prefix is not used up by a pull, so pulls can repeat."""
    return CacheKey(cluster_id, NO_ID, 0, 7)


def options(**properties: Any) -> dict[str, str]:
    """For `init`: the newer manager, in host memory and over TCP unless another backend is among what is given."""
    config = LLMConfig()
    config.enable_cache_manager = True
    config.transfer_backend = "tcp"
    config.device_backend = "host"
    config.sync_kv_timeout = PULL_MS
    for name, value in properties.items():
        if not hasattr(LLMConfig, name):
            raise Unavailable(f"this version has no option {name}")
        setattr(config, name, value)
    return config.generate_options()


@contextmanager
def _known_features() -> Iterator[None]:
    """What this version or this machine does not have is no failure of the benchmark."""
    try:
        yield
    except LLMException as error:
        if error.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED:
            raise Unavailable(str(error)) from error
        raise


class Node:
    """One `LLMDataDist` of either face, and its caches over one shape of memory.

    `do` takes what a method of the face returned and makes it the result: that is all in which the faces differ here.
    """

    def __init__(self, datadist: Any, shape: Shape) -> None:
        self.datadist = datadist
        self._shape = shape

    def do(self, returned: Any) -> Any:
        raise NotImplementedError

    def repeat(self, calls: Sequence[Callable[[], Any]], count: int, *, budget: float) -> list[float]:
        raise NotImplementedError

    def consume(self, layers: Any, count: int) -> Any:
        """Take all `count` layers as they land, from what `pull_layers` returned."""
        raise NotImplementedError

    @property
    def manager(self) -> Any:
        return self.datadist.cache_manager

    @property
    def core_loop(self) -> asyncio.AbstractEventLoop:
        """The engine's own loop, which no public name leads to."""
        loop: asyncio.AbstractEventLoop = self.datadist._core.engine.core.loop
        return loop

    def entries(
        self, memory: Arena | None, *keys: CacheKey, placement: Placement = Placement.DEVICE
    ) -> tuple[Cache, Arena]:
        """A contiguous cache, in the caller's memory or else in the library's."""
        shape = self._shape
        desc = CacheDesc(shape.tensors, [2, shape.entry_nbytes // 2], DataType.DT_FLOAT16, placement)
        if memory is None:
            return self._with_arena(self.do(self.manager.allocate_cache(desc, keys)))
        return self.do(self.manager.register_cache(desc, memory.addresses, keys)), memory

    def blocks(
        self, memory: Arena | None, key: BlocksCacheKey | None = None, *, placement: Placement = Placement.DEVICE
    ) -> tuple[Cache, Arena]:
        """A paged cache, in the caller's memory or else in the library's."""
        shape = self._shape
        desc = CacheDesc(shape.tensors, [shape.blocks, shape.block_nbytes // 2], DataType.DT_FLOAT16, placement)
        if memory is None:
            return self._with_arena(self.do(self.manager.allocate_blocks_cache(desc, key)))
        return self.do(self.manager.register_blocks_cache(desc, memory.addresses, key)), memory

    def _with_arena(self, cache: Cache) -> tuple[Cache, Arena]:
        """A cache of the library, and its bytes."""
        tensors = [self.manager.get_cache_tensors(cache, i)[0].numpy() for i in range(self._shape.tensors)]
        return cache, Arena([tensor.reshape(-1).view(np.uint8) for tensor in tensors])

    def link(self, cluster_id: int, address: tuple[str, int]) -> None:
        info = LLMClusterInfo()
        info.remote_cluster_id = cluster_id
        info.append_remote_ip_info(*address)
        self.do(self.datadist.link_clusters([info], LINK_MS, raise_on_error=True))

    def call(self, pull: Pull, cache: Cache, *, cluster_id: int, **extra: Any) -> Callable[[], Any]:
        """The call of the API that makes this pull."""
        if isinstance(pull, BlocksPull):
            key, src, dst = BlocksCacheKey(cluster_id), list(pull.src_blocks), list(pull.dst_blocks)
            return partial(self.manager.pull_blocks, key, cache, src, dst, **extra)
        layers = pull.layers() if len(pull.src) < self._shape.tensors else {}
        return partial(self.manager.pull_cache, entry_key(cluster_id), cache, 0, pull.nbytes, **layers, **extra)

    def layers_call(self, cache: Cache, *, nbytes: int, per_layer: int, cluster_id: int) -> Callable[[], Any]:
        """A call that pulls a whole entry in one transfer, and takes its layers as they land."""
        if not hasattr(self.manager, "pull_layers"):
            raise Unavailable("this version has no pull_layers")
        count, key, extra = self._shape.tensors // per_layer, entry_key(cluster_id), {"tensor_num_per_layer": per_layer}
        return lambda: self.consume(self.manager.pull_layers(key, cache, 0, nbytes, **extra), count)

    def close(self) -> None:
        self.do(self.datadist.finalize())


class AwaitingNode(Node):
    """Through `kvpull_async`, on a loop of the main thread."""

    def __init__(self, role: LLMRole, cluster_id: int, *, shape: Shape, **properties: Any) -> None:
        super().__init__(kvpull_async.LLMDataDist(role, cluster_id), shape)
        self.loop = asyncio.new_event_loop()
        with _known_features():
            self.do(self.datadist.init(options(**properties)))

    def do(self, returned: Any) -> Any:
        return self.loop.run_until_complete(returned)

    def repeat(self, calls: Sequence[Callable[[], Any]], count: int, *, budget: float) -> list[float]:
        return self.loop.run_until_complete(repeat_awaiting(calls, count, budget=budget))

    async def consume(self, layers: Any, count: int) -> None:
        async with layers as landing:
            _all_there([layer async for layer in landing], count)

    def close(self) -> None:
        super().close()
        self.loop.close()


class BlockingNode(Node):
    """Through `kvpull_sync`."""

    def __init__(self, role: LLMRole, cluster_id: int, *, shape: Shape, **properties: Any) -> None:
        super().__init__(kvpull_sync.LLMDataDist(role, cluster_id), shape)
        with _known_features():
            self.datadist.init(options(**properties))

    def do(self, returned: Any) -> Any:
        return returned

    def repeat(self, calls: Sequence[Callable[[], Any]], count: int, *, budget: float) -> list[float]:
        return repeat(calls, count, budget=budget)

    def consume(self, layers: Any, count: int) -> None:
        with layers as landing:
            _all_there(list(landing), count)


MakeNode = type[AwaitingNode] | type[BlockingNode]


def _all_there(layers: Sequence[int], count: int) -> None:
    if sorted(layers) != list(range(count)):
        raise RuntimeError(f"{count} layers were to land, and {list(layers)} did")


class KvSource(Source):
    """A prefill node. Which face it uses makes no difference: its core answers the pulls."""

    def __init__(
        self,
        make: type[BlockingNode] = BlockingNode,
        *,
        allocated: bool = False,
        huge: bool = False,
        cluster_id: int = SOURCE_CLUSTER,
        **properties: Any,
    ) -> None:
        self._make = make
        self._allocated = allocated
        self._huge = huge
        self._cluster_id = cluster_id
        self._properties = properties
        self.node: BlockingNode | None = None
        self._arenas: list[Arena] = []

    def open(self, shape: Shape, works: Sequence[Workload], *, seed: int) -> Any:
        node = self._listen(shape)
        memory = None if self._allocated else own_memory(shape, huge=self._huge)
        # Kept for as long as it is offered: the library has only the addresses.
        arenas = self._arenas
        if not all(work.in_blocks for work in works):
            arenas.append(node.entries(memory, entry_key(self._cluster_id))[1])
        if any(work.in_blocks for work in works):
            arenas.append(node.blocks(memory, BlocksCacheKey(self._cluster_id))[1])
        for arena in self.arenas():
            arena.fill(seed)
        return self._cluster_id, tuple(node.datadist.listen_address)

    def _listen(self, shape: Shape) -> BlockingNode:
        where = {"listen_ip_info": "127.0.0.1:0", **self._properties}
        self.node = self._make(LLMRole.PROMPT, self._cluster_id, shape=shape, **where)
        return self.node

    def arenas(self) -> Sequence[Arena]:
        return self._arenas if self._allocated else self._arenas[:1]

    def close(self) -> None:
        if self.node is not None:
            self.node.close()


class KvPuller(Puller):
    """A decode node with one link. Mode "layers" takes layers as they land instead of pulling one by one."""

    def __init__(self, make: MakeNode, *, allocated: bool = False, huge: bool = False, **properties: Any) -> None:
        self._make = make
        self._allocated = allocated
        self._huge = huge
        self._properties = properties
        self._caches: dict[bool, tuple[Cache, Arena]] = {}

    def open(self, shape: Shape, works: Sequence[Workload], *, told: Any) -> None:
        self._cluster_id, address = told[:2]
        self.node: Node = self._make(LLMRole.DECODER, PULLER_CLUSTER, shape=shape, **self._properties)
        memory = None if self._allocated else own_memory(shape, huge=self._huge)
        if not all(work.in_blocks for work in works):
            self._caches[False] = self.node.entries(memory)
        if any(work.in_blocks for work in works):
            self._caches[True] = self.node.blocks(memory)
        with _known_features():
            self.node.link(self._cluster_id, address)

    def arena(self, work: Workload) -> Arena:
        return self._caches[work.in_blocks][1]

    @property
    def entries(self) -> Cache:
        """The contiguous cache."""
        return self._caches[False][0]

    def pull(self, work: Workload, count: int, mode: str = "") -> list[float]:
        return self.node.repeat(self._calls(work, mode), count, budget=work.budget)

    def _calls(self, work: Workload, mode: str) -> list[Callable[[], Any]]:
        cache, first = self._caches[work.in_blocks][0], work.pulls[0]
        if mode == "layers":
            assert isinstance(first, EntryPull)
            how = {"nbytes": first.nbytes, "per_layer": first.per_layer}
            return [self.node.layers_call(cache, cluster_id=self._cluster_id, **how)]
        return [self.node.call(pull, cache, cluster_id=self._cluster_id) for pull in work.pulls]

    def close(self) -> None:
        self.node.close()


class LocalPuller(KvPuller):
    """Prefill and decode in one process: the source's node stands beside the puller's."""

    def open(self, shape: Shape, works: Sequence[Workload], *, told: Any) -> None:
        self._source = KvSource(allocated=self._allocated, huge=self._huge, **self._properties)
        super().open(shape, works, told=self._source.open(shape, works, seed=told))

    def close(self) -> None:
        super().close()
        self._source.close()
