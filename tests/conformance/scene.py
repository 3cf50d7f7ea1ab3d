"""The fixtures of the conformance rows: a source and a destination node, linked or not, and one cache on each.

A source cache `s` is filled with bytes that differ everywhere, so that a byte from the wrong place shows; its keys
`r[i]` lead to batch entry i. The destination `d` is all zeros.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpull_async import CacheDesc, CacheKey, DataType, LLMClusterInfo, LLMConfig, LLMRole, LLMStatusCode, Placement
from tests import npu
from tests.conformance.api import PATIENCE_S, Api

OLD, NEW, BOTH = "old", "new", "both"
SOURCE, DESTINATION = 1, 2
"""Cluster ids."""

INVALID_ID = 2**64 - 1
TIMEOUT_MS = 20_000
"""Where no timeout is the point of a test: nothing here takes long, but a busy machine may."""


@dataclass(frozen=True)
class Layout:
    """What a CacheDesc says; by default 4 tensors (2 layers) of 4 entries of 512 bytes."""

    tensors: int = 4
    shape: tuple[int, ...] = (4, 256)
    data_type: DataType = DataType.DT_FLOAT16
    placement: Placement = Placement.DEVICE

    def desc(self) -> CacheDesc:
        return CacheDesc(self.tensors, list(self.shape), self.data_type, self.placement)


@dataclass(frozen=True)
class Setup:
    """How a scene begins. Without `linked` there is no link, without `nodes` nothing at all.

    `local` puts `d` beside `s` on the source. `options` go to both nodes.
    """

    manager: str
    transport: str
    nodes: bool = True
    linked: bool = True
    remote_access: bool = False
    local: bool = False
    s: Layout = Layout()
    d: Layout = Layout()
    keys: tuple[CacheKey, ...] | None = None
    options: tuple[tuple[str, str], ...] = ()


class Scene:
    """Made by `scene`, which also takes everything down again."""

    source: Any
    destination: Any
    s: Any
    d: Any
    address: Any
    """Of a source that a row is about to end."""

    def __init__(self, api: Api, setup: Setup) -> None:
        self.api = api
        self.setup = setup
        self.r = [CacheKey(SOURCE, i) for i in range(4)] if setup.keys is None else list(setup.keys)
        self._nodes: list[Any] = []
        self._kept: list[object] = []
        self._images: dict[int, NDArray[np.uint8]] = {}

    async def begin(self) -> None:
        if not self.setup.nodes:
            return
        self.source = await self.node(LLMRole.PROMPT, SOURCE, listen=True)
        self.destination = await self.node(LLMRole.DECODER, DESTINATION)
        self.s = await self.publish(self.r, self.setup.s)
        self.d = await self.allocate(self.setup.d, node=self.source if self.setup.local else self.destination)
        if self.setup.linked:
            await self.link(self.destination, self.source)

    async def end(self) -> None:
        for node in reversed(self._nodes):
            await self.api.do(node.finalize)

    # -- nodes and links --------------------------------------------------------------------------------------------

    def options(self, *, listen: bool = False, **more: str) -> dict[str, str]:
        config = LLMConfig()
        config.sync_kv_timeout = TIMEOUT_MS
        config.enable_cache_manager = self.setup.manager == NEW
        config.transfer_backend = self.setup.transport
        if self.setup.remote_access:
            config.enable_remote_cache_accessible = True
        if listen:
            config.listen_ip_info = "127.0.0.1:0"
        return {**config.generate_options(), **dict(self.setup.options), **more}

    async def node(self, role: LLMRole, cluster_id: int, *, listen: bool = False, **more: str) -> Any:
        """A node of this scene, initialised."""
        node = self.api.package.LLMDataDist(role, cluster_id)
        self._nodes.append(node)
        await self.api.do(node.init, self.options(listen=listen, **more))
        return node

    def of(self, node: Any) -> Any:
        """The manager under test."""
        return node.kv_cache_manager if self.setup.manager == OLD else node.cache_manager

    async def link(self, dialler: Any, listener: Any) -> None:
        info = cluster_info(listener.cluster_id, listener.listen_address)
        result = await self.api.do(dialler.link_clusters, [info], timeout=TIMEOUT_MS)
        success = LLMStatusCode.LLM_SUCCESS
        assert result == (success, [success]), result

    # -- caches -----------------------------------------------------------------------------------------------------

    async def allocate(self, layout: Layout = Layout(), keys: Sequence[CacheKey] = (), *, node: Any = None) -> Any:
        """A cache, by default on the destination."""
        manager = self.of(self.destination if node is None else node)
        cache = await self.api.do(manager.allocate_cache, layout.desc(), list(keys))
        self._kept.append(cache)
        return cache

    async def allocate_blocks(self, layout: Layout = Layout(), *, node: Any = None) -> Any:
        """A blocks cache without a key, by default on the destination."""
        manager = self.of(self.destination if node is None else node)
        cache = await self.api.do(manager.allocate_blocks_cache, layout.desc())
        self._kept.append(cache)
        return cache

    async def publish(self, keys: Sequence[CacheKey], layout: Layout = Layout()) -> Any:
        """A filled cache on the source, under these keys."""
        cache = await self.allocate(layout, keys, node=self.source)
        self.fill(cache)
        return cache

    async def register(self, keys: Sequence[CacheKey], layout: Layout = Layout(), **more: Any) -> Any:
        """As `publish`, in memory of the test's own."""
        cache = await self.api.do(
            self.source.cache_manager.register_cache, layout.desc(), self.memory(layout), list(keys), **more
        )
        self.fill(cache)
        return cache

    def memory(self, layout: Layout) -> list[int]:
        """Addresses of ordinary heap memory, one tensor each, kept until the scene ends."""
        arrays = [npu.room(layout.desc().size) for _ in range(layout.tensors)]
        self._kept.append(arrays)
        return npu.addresses(arrays)

    def fill(self, cache: Any) -> None:
        noise = np.random.default_rng(len(self._images))
        for view in self._views(cache):
            view[...] = noise.integers(0, 256, view.shape, np.uint8)
        self._images[id(cache)] = self.content(cache)
        self._kept.append(cache)  # so that its id stays its own

    def image(self, cache: Any) -> NDArray[np.uint8]:
        """What `fill` put there: (tensor, entry, byte)."""
        return self._images[id(cache)]

    def content(self, cache: Any) -> NDArray[np.uint8]:
        """A copy of what is there now: (tensor, entry, byte)."""
        return np.array(self._views(cache))

    @staticmethod
    def _views(cache: Any) -> list[NDArray[np.uint8]]:
        return [tensor.reshape(cache.cache_desc.entries, -1) for tensor in npu.tensors(cache)]

    # -- the call that most rows are about --------------------------------------------------------------------------

    async def pull(self, key: Any, cache: Any, *args: Any, **kwargs: Any) -> Any:
        return await self.api.do(self.of(self.destination).pull_cache, key, cache, *args, **kwargs)

    async def pull_blocks(self, *args: Any, **kwargs: Any) -> Any:
        return await self.api.do(self.of(self.destination).pull_blocks, *args, **kwargs)


@asynccontextmanager
async def scene(api: Api, setup: Setup) -> AsyncIterator[Scene]:
    made = Scene(api, setup)
    try:
        await made.begin()
        yield made
    finally:
        await made.end()


def cluster_info(cluster_id: int, *addresses: tuple[str, int]) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    for ip, port in addresses:
        info.append_remote_ip_info(ip, port)
    return info


@contextmanager
def stalled(node: Any) -> Iterator[None]:
    """Meanwhile the node answers nobody, as one that the scheduler starves: its connections stay open."""
    resume, asleep = threading.Event(), threading.Event()

    def sleep() -> None:
        asleep.set()
        resume.wait(PATIENCE_S)

    node._core.engine.core.loop.call_soon_threadsafe(sleep)
    assert asleep.wait(PATIENCE_S)
    try:
        yield
    finally:
        resume.set()
