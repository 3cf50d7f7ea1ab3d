"""Nodes as a whole, in both faces: looking at them changes nothing, and they end in any order and leave no memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvpull_async import LLMRole
from tests.conformance.api import AWAITED, BLOCKING, Api
from tests.conformance.row import all_there, by_id, keeps
from tests.conformance.scene import DESTINATION, NEW, OLD, SOURCE, Scene, Setup, scene

FACES = pytest.mark.parametrize("api", [AWAITED, BLOCKING], ids=lambda api: api.name)
TRANSPORTS = pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])


def looked_at(thing: Any) -> None:
    """Read every public attribute that is no method, and its text."""
    assert repr(thing)
    for name in dir(type(thing)):
        if not name.startswith("_") and not callable(getattr(type(thing), name)):
            getattr(thing, name)


@FACES
@TRANSPORTS
@pytest.mark.parametrize("manager", [OLD, NEW])
def test_looking_at_nodes_managers_and_caches_changes_nothing(api: Api, transport: str, manager: str) -> None:
    async def body() -> None:
        async with scene(api, Setup(manager, transport)) as f:
            for _ in range(3):
                for node in (f.source, f.destination):
                    for thing in (node, node.kv_cache_manager, node.cache_manager, f.of(node), f.s, f.d):
                        looked_at(thing)
                    assert node.kv_cache_manager.is_initialized()
                await keeps(f, f.r[0])
            await all_there(f)

    api.run(body())


@FACES
@TRANSPORTS
@pytest.mark.parametrize("first", [SOURCE, DESTINATION])
def test_p8_nodes_end_in_any_order_while_the_other_one_dials(api: Api, transport: str, first: int) -> None:
    async def body() -> None:
        for _ in range(5):
            async with scene(api, Setup(NEW, transport)) as f:
                await keeps(f, f.r[0])
                await api.do((f.source if first == SOURCE else f.destination).finalize)

    api.run(body())


@FACES
@TRANSPORTS
def test_p8_memory_goes_with_the_node_and_the_handles(api: Api, transport: str) -> None:
    """At once, that is, and not when the garbage collector happens to come."""

    async def body() -> None:
        async with scene(api, Setup(NEW, transport)) as f:
            await all_there(f)
            assert cache_mappings() == 3

    with no_collector():
        api.run(body())
        assert cache_mappings() == 0


@FACES
@TRANSPORTS
@pytest.mark.parametrize("inline_limit", ["0", "65536"])
def test_p8_deallocated_memory_goes_although_the_node_stays(api: Api, transport: str, inline_limit: str) -> None:
    async def body() -> None:
        async with scene(api, Setup(NEW, transport, options=(("kvpull.InlineLimit", inline_limit),))) as f:
            await served_and_released(f)
            await api.until(lambda: cache_mappings() == 0)

    with no_collector():
        api.run(body())


async def served_and_released(f: Scene) -> None:
    await all_there(f)
    await f.pull(by_id(f.s), f.d)  # the source has heard by now that the pulls before it have ended
    for node, cache in ((f.source, f.s), (f.destination, f.d), (f.destination, f._kept[-1])):
        await f.api.do(f.of(node).deallocate_cache, cache)


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def cache_mappings() -> int:
    """Caches' memory mapped into this process."""
    return sum("/memfd:kvpull-cache" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_second_init_does_nothing() -> None:
    """The node keeps its engine, its caches and its address."""

    async def body() -> None:
        async with scene(BLOCKING, Setup(NEW, "tcp")) as f:
            address = f.source.listen_address
            await f.api.do(f.source.init, f.options(listen=True))
            assert f.source.listen_address == address
            assert f.source.cluster_id == SOURCE
            await all_there(f)

    BLOCKING.run(body())


def test_use_before_init_and_after_finalize_is_a_runtime_error() -> None:
    for api in (AWAITED, BLOCKING):
        node = api.package.LLMDataDist(LLMRole.MIX, 3)
        for _ in range(2):
            for name in ("cache_manager", "kv_cache_manager", "listen_address"):
                with pytest.raises(RuntimeError, match="init"):
                    getattr(node, name)
            for call in (lambda node=node: node.link_clusters([]), lambda node=node: node.switch_role(LLMRole.MIX)):
                with pytest.raises(RuntimeError, match="init"):
                    api.run(api.do(call))
            assert node.cluster_id == 3
            api.run(cycle(api, node))


async def cycle(api: Api, node: Any) -> None:
    await api.do(node.init, {})
    await api.do(node.finalize)
    await api.do(node.finalize)
