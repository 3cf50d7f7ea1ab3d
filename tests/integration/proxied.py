"""Two processes with a fault proxy between them: this one pulls from the other, or pushes to it, over tcp."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from kvpull_async import CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, LLMDataDist, LLMException, LLMRole
from kvpull_async import LLMStatusCode as Status
from kvpull_async.linkage import LinkState
from kvpull_async.testing.proxy import FaultProxy, Planner
from tests import duo
from tests.canaries import set_canary
from tests.integration.content import content
from tests.integration.own_loop import outcome, within
from tests.integration.processes import Child, child
from tests.loop_nodes import eventually

OVER = 5.0
"""Seconds that a call may end after its deadline on a machine that has too much to do; promised are 0.1 on another one,
and `benchmarks/bench_deadline.py` measures that. Whatever waits for something else waits for longer.
"""
QUICK: dict[str, Any] = {"heartbeat_interval": 100, "heartbeat_timeout": 900, "handshake_timeout": 600}
"""(A machine that has a lot to do must not be taken for a dead peer.)"""
SIZES = {"inline": 1024, "streamed": 3 * 1024 * 1024}
FAILURES = {Status.LLM_LINK_FAILED, Status.LLM_WAIT_PROCESS_TIMEOUT, Status.LLM_TIMEOUT}
KEYS = {"inline": 0, "streamed": 100}
"""The first of four keys of the source, for each size."""


def begin(coroutine: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


class Proxied:
    """The node of this process, linked to the child through the proxy."""

    def __init__(self, node: LLMDataDist, there: Child, proxy: FaultProxy) -> None:
        self.node, self.there, self.proxy = node, there, proxy
        self._kept: list[Any] = []

    async def link(self, timeout: int = duo.TIMEOUT_MS) -> bool:
        info = duo.cluster(duo.PROMPT, self.proxy.address)
        codes = duo.codes(await self.node.link_clusters([info], timeout))
        return codes[0] == "LLM_SUCCESS" or "LLM_ALREADY_LINK" in codes

    async def begin_anew(self) -> None:
        """No more harm, and no connection that has suffered any."""
        self.proxy.heal()
        link, losses = duo.engine_of(self.node).links.find(duo.PROMPT), self.losses
        up = link is not None and link.state is LinkState.READY
        self.proxy.cut()
        if up:
            await eventually(lambda: self.losses > losses)

    @property
    def losses(self) -> int:
        """How often the link was lost."""
        return int(self.node.counters.get("links_lost", 0))

    async def cache(self, nbytes: int) -> Any:
        """Filled with the canary."""
        cache = await self.node.kv_cache_manager.allocate_cache(CacheDesc(2, [4, nbytes], DataType.DT_UINT8))
        self._kept.append(cache)
        set_canary(cache)
        return cache

    async def drop(self) -> None:
        for cache in self._kept:
            await self.node.kv_cache_manager.deallocate_cache(cache)
        self._kept.clear()

    def pull(self, cache: Any, key: int, *, timeout: float = duo.TIMEOUT_MS) -> Any:
        """Entry 0. The key is kept, since an offset is given."""
        return self.node.kv_cache_manager.pull_cache(
            CacheKey(duo.PROMPT, key), cache, 0, src_cache_offset=0, timeout=timeout
        )

    async def try_to_pull(self, size: str, *, timeout: float, source: int = 0) -> tuple[Any, LLMException | None]:
        """One pull that may fail, but only so: in time, with a reason, leaving its destination alone."""
        cache = await self.cache(SIZES[size])
        began = time.monotonic()
        error = await outcome(begin(self.pull(cache, KEYS[size] + source, timeout=timeout)))
        took = time.monotonic() - began
        assert took < timeout / 1000 + OVER, f"P3: it took {took:.3f} s, {self.proxy.describe()}"
        if error is None:
            assert duo.holds(cache, entry=0, source=source), f"P2: wrong bytes, {self.proxy.describe()}"
        else:
            check_failure(error)
            if cache.quarantined:  # it could not stop in time, on a machine that has too much to do, and says so
                await self.node.kv_cache_manager.settled(cache, duo.TIMEOUT_MS)
            assert not cache.quarantined
        set_canary(cache)
        return cache, error  # type: ignore[return-value]

    async def check_right(self, size: str, *, source: int = 3) -> None:
        """P4: the next pull on the link, without linking again."""
        cache = await self.cache(SIZES[size])
        try:
            await within(self.pull(cache, KEYS[size] + source))
        except (LLMException, asyncio.TimeoutError) as error:
            raise AssertionError(f"P4: {error!r}; {self.proxy.describe()}") from error
        assert duo.holds(cache, entry=0, source=source), f"P2: wrong bytes, {self.proxy.describe()}"


def check_failure(error: BaseException) -> None:
    assert isinstance(error, LLMException), repr(error)
    assert error.status_code in FAILURES, error
    assert str(error)
    assert error.peer
    assert error.retry_safe is not error.destination_unsafe


@contextlib.asynccontextmanager
async def source(**more: Any) -> AsyncIterator[Child]:
    """With four keys for each size."""
    options: dict[str, Any] = {"transport": "tcp", "listen": True, **QUICK, **more}
    async with child("PROMPT", duo.PROMPT, **options) as there:
        for size, nbytes in SIZES.items():
            await there.ask("publish", "published", nbytes=nbytes, first=KEYS[size])
        yield there


@contextlib.asynccontextmanager
async def puller(there: Child, *, plans: Planner | None = None, **more: Any) -> AsyncIterator[Proxied]:
    """Not linked yet."""
    options: dict[str, Any] = {"transport": "tcp", **QUICK, **more}
    with FaultProxy(there.address, plans=plans) as made:
        async with duo.node(LLMRole.DECODER, duo.DECODER, **options) as node:
            yield Proxied(node, there, made)


@contextlib.asynccontextmanager
async def proxied(*, here: Mapping[str, Any] | None = None, **there: Any) -> AsyncIterator[Proxied]:
    """Linked, and both kinds of connection are there. The two sides may have options of their own."""
    async with source(**there) as other, puller(other, **(here or {})) as made:
        assert await made.link()
        for size in SIZES:
            await made.check_right(size)
        yield made


class Pushed:
    """A source here, and a cache of the child to which it is pushed through the proxy."""

    SEED = 5

    def __init__(self, node: LLMDataDist, there: Child, proxy: FaultProxy) -> None:
        self.node, self.there, self.proxy = node, there, proxy
        self._source: Any = None
        self._to = 0

    async def open(self, nbytes: int) -> None:
        manager = self.node.cache_manager
        self._source = await manager.allocate_cache(CacheDesc(2, [2, nbytes], DataType.DT_UINT8))
        for tensor, array in enumerate(duo.arrays(self._source)):
            array[:] = content(self.SEED, tensor, 0, nbytes=array.size).reshape(array.shape)
        self._to = (await self.there.ask("hold_stock", "stock", nbytes=nbytes, by_address=False))["cache_id"]
        info = duo.cluster(duo.PROMPT, self.proxy.address)
        await self.node.link_clusters([info], duo.TIMEOUT_MS, raise_on_error=True)

    async def push(self, *, timeout: float = duo.TIMEOUT_MS) -> BaseException | None:
        key = CacheKeyByIdAndIndex(duo.PROMPT, self._to, 0)
        began = time.monotonic()
        error = await outcome(begin(self.node.cache_manager.push_cache(key, self._source, 1, timeout=timeout)))
        assert time.monotonic() - began < timeout / 1000 + OVER
        return error

    async def set_canary(self) -> None:
        await self.there.ask("set_canary", "canary", cache_id=self._to)

    async def see(self) -> dict[str, Any]:
        return await self.there.ask("look", "seen", cache_id=self._to, seed=self.SEED, entry=0)


@contextlib.asynccontextmanager
async def pushed(nbytes: int) -> AsyncIterator[Pushed]:
    options: dict[str, Any] = {"transport": "tcp", "enable_cache_manager": True, **QUICK}
    options["enable_remote_cache_accessible"] = True
    async with child("MIX", duo.PROMPT, program="pushing", listen=True, **options) as there:
        with FaultProxy(there.address) as proxy:
            async with duo.node(LLMRole.MIX, duo.DECODER, **options) as node:
                made = Pushed(node, there, proxy)
                await made.open(nbytes)
                yield made
