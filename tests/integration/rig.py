"""What the field tests and others share: two linked nodes of this process behind either face, and how calls end.

It must hold no test and no report.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from kvpull_async import CacheDesc, CacheKey, LLMException, LLMRole, LLMStatusCode
from kvpull_async.testing.proxy import FaultProxy
from tests import duo
from tests.conformance.api import AWAITED, BLOCKING, Api
from tests.integration.processes import Child

SOON = 8.0
"""Seconds in which a call has ended that does not use up its deadline (30 s), on a slow machine too."""
FAILED, OK = LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_SUCCESS
MISSING = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
PATHS = ("tcp", "inproc", "shm")
BETWEEN_PROCESSES = ("tcp", "shm")
QUICK: dict[str, Any] = {"heartbeat_interval": 50, "heartbeat_timeout": 400, "handshake_timeout": 400}
"""A peer that says nothing is given up after 0.4 s."""
STEADY: dict[str, Any] = {**QUICK, "heartbeat_timeout": 1500}
"""The same where peers that are only slow, on a busy machine, must not be given up."""

each_face = pytest.mark.parametrize("api", [AWAITED, BLOCKING], ids=lambda api: api.name)
each_path = pytest.mark.parametrize("path", PATHS)
each_process_path = pytest.mark.parametrize("path", BETWEEN_PROCESSES)


def faces_in_turn(**kinds: Iterable[Any]) -> pytest.MarkDecorator:
    """All of these with all of those, each with one of the two faces: the faces forward to the same code."""
    rows = []
    for row in product(*(enumerate(values) for values in kinds.values())):
        api = (AWAITED, BLOCKING)[sum(at for at, _ in row) % 2]
        names = [getattr(value, "value", value) for _, value in row]
        names = ["+".join(name) if isinstance(name, tuple) else str(name) for name in names]
        rows.append(pytest.param(api, *(value for _, value in row), id="-".join([api.name, *names])))
    return pytest.mark.parametrize(("api", *kinds), rows)


each_size = pytest.mark.parametrize("desc", [duo.SMALL, duo.BIG], ids=["inline", "streamed"])


@dataclass
class Nodes:
    """A prompt node and a decoder node, linked, behind the face of `api`."""

    api: Api
    prompt: Any
    decoder: Any
    kept: list[Any] = field(default_factory=list)
    proxy: FaultProxy = field(init=False)
    """Through which they are linked, if they are linked `through` one."""

    async def publish(self, desc: CacheDesc = duo.SMALL, *, first: int = 0) -> Any:
        """A filled cache with a key for each entry."""
        cache = await self.api.do(self.prompt.kv_cache_manager.allocate_cache, desc, duo.keys(desc, first=first))
        duo.fill(cache)
        self.kept.append(cache)
        return cache

    async def destination(self, desc: CacheDesc = duo.SMALL) -> Any:
        cache = await self.api.do(self.decoder.kv_cache_manager.allocate_cache, desc)
        self.kept.append(cache)
        return cache

    async def pull(self, cache: Any, key: int = 0, *, entry: int = 0, **options: Any) -> None:
        """The key is kept, since an offset is given."""
        pull = self.decoder.kv_cache_manager.pull_cache
        await self.api.do(pull, CacheKey(duo.PROMPT, key), cache, entry, src_cache_offset=0, **options)

    async def fails(self, cache: Any, key: int = 0, *, within: float = SOON, **options: Any) -> LLMException:
        """The error of a pull that must fail in time."""
        began = time.monotonic()
        with pytest.raises(LLMException) as caught:
            await self.pull(cache, key, **options)
        assert time.monotonic() - began < within
        return complete(caught.value)

    async def check_right(self, desc: CacheDesc = duo.SMALL, *, key: int = 3) -> None:
        """The next pull, without linking again."""
        cache = await self.destination(desc)
        await self.pull(cache, key)
        assert duo.holds(cache, entry=0, source=key % 4)
        self.kept.remove(cache)
        await self.api.do(self.decoder.kv_cache_manager.deallocate_cache, cache)

    async def counted(self, name: str, at_least: int = 1) -> None:
        """Wait until that counter of the decoder node is there."""
        await self.api.until(lambda: self.decoder.counters.get(name, 0) >= at_least)


@contextlib.asynccontextmanager
async def nodes(
    api: Api, path: str = "tcp", *, linked: bool = True, through: bool = False, **properties: Any
) -> AsyncIterator[Nodes]:
    prompt = api.package.LLMDataDist(LLMRole.PROMPT, duo.PROMPT)
    decoder = api.package.LLMDataDist(LLMRole.DECODER, duo.DECODER)
    made, stack = Nodes(api, prompt, decoder), contextlib.ExitStack()
    try:
        await api.do(prompt.init, duo.options(listen=True, transport=path, **properties))
        await api.do(decoder.init, duo.options(transport=path, **properties))
        address = prompt.listen_address
        if through:
            made.proxy = stack.enter_context(FaultProxy(address))
            address = made.proxy.address
        if linked:
            info = duo.cluster(duo.PROMPT, address)
            assert await api.do(decoder.link_clusters, [info], duo.TIMEOUT_MS) == (OK, [OK])
        yield made
    finally:
        for node in (decoder, prompt):
            await api.do(node.finalize)
        stack.close()
        made.kept.clear()


def complete(error: LLMException) -> LLMException:
    """An error that says all that its caller needs to go on."""
    assert error.status_code is not OK, error
    assert error.operation, error
    assert error.peer is not None, error
    assert error.elapsed_ms is not None, error
    return error


def link_failed(error: BaseException | None) -> LLMException:
    """The pull lost its peer: nothing was consumed, nothing is written any more, and it may be repeated."""
    assert isinstance(error, LLMException), error
    assert error.status_code is FAILED, error
    assert error.retry_safe, error
    assert not error.destination_unsafe, error
    return complete(error)


def begin(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


def links_of(node: Any) -> list[Any]:
    return list(duo.engine_of(node).links.all())


@dataclass
class Here:
    """The decode node of this process, which pulls from prefill nodes in other processes; awaitable."""

    node: Any
    kept: list[Any] = field(default_factory=list)

    async def cache(self, nbytes: int) -> Any:
        desc = CacheDesc(2, [4, nbytes], duo.SMALL.data_type)
        self.kept.append(await self.node.kv_cache_manager.allocate_cache(desc))
        return self.kept[-1]

    async def link(self, prefill: Child, cluster: int = duo.PROMPT) -> None:
        info = duo.cluster(cluster, prefill.address)
        await self.node.link_clusters([info], duo.TIMEOUT_MS, raise_on_error=True)

    def pull(self, cache: Any, key: int = 0, *, cluster: int = duo.PROMPT, timeout: float = duo.TIMEOUT_MS) -> Any:
        """Begun. The key is kept."""
        manager = self.node.kv_cache_manager
        return begin(manager.pull_cache(CacheKey(cluster, key), cache, 0, src_cache_offset=0, timeout=timeout))

    async def check_right(self, nbytes: int, key: int = 3, *, cluster: int = duo.PROMPT) -> None:
        cache = await self.cache(nbytes)
        await self.pull(cache, key, cluster=cluster)
        assert duo.holds(cache, entry=0, source=key % 4)
        self.kept.remove(cache)
        await self.node.kv_cache_manager.deallocate_cache(cache)
