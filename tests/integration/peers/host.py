"""A node in a process of its own, as `node`, on a host of its own: it links and pulls in the background and tells how
long that took, and it looks after the memory of its pulls once they have ended.

    python -m tests.integration.peers.host '{"role": "DECODER", "cluster": 2, "options": {...}}'
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from kvpull_async import CacheDesc, CacheKey, DataType, LLMDataDist, LLMException
from tests import duo
from tests.canaries import CANARY, set_canary
from tests.integration.peers.node import Peer, main, say
from tests.integration.processes import few_descriptors


class HostPeer(Peer):
    def __init__(self, node: LLMDataDist) -> None:
        super().__init__(node)
        self._ready: list[Any] = []
        self._ended: list[Any] = []
        self._scarcity = contextlib.ExitStack()

    async def begin_link(self, cluster: int, address: list[Any], timeout: int) -> None:
        self._pulls.add(asyncio.ensure_future(self._link(cluster, address, timeout)))
        say("linking")

    async def _link(self, cluster: int, address: list[Any], timeout: int) -> None:
        began = time.monotonic()
        info = duo.cluster(cluster, (address[0], address[1]))
        codes = duo.codes(await self._node.link_clusters([info], timeout))
        say("linked", codes=codes, ms=(time.monotonic() - began) * 1000)

    async def begin_pull(self, cluster: int, key: int, nbytes: int, timeout: float) -> None:
        """The key is kept. Its end is told when it comes."""
        cache = self._ready.pop() if self._ready else await self._destination(nbytes)
        self._pulls.add(asyncio.ensure_future(self._fetch(CacheKey(cluster, key), cache, timeout)))
        say("pulling")

    async def prepare(self, nbytes: int) -> None:
        """What the next pull goes into, made now."""
        self._ready.append(await self._destination(nbytes))
        say("prepared")

    async def _destination(self, nbytes: int) -> Any:
        cache = await self._node.kv_cache_manager.allocate_cache(CacheDesc(2, [1, nbytes], DataType.DT_UINT8))
        set_canary(cache)
        return cache

    async def _fetch(self, key: CacheKey, cache: Any, timeout: float) -> None:
        began = time.monotonic()
        told: dict[str, Any] = {"status": "", "reason": ""}
        try:
            await self._node.kv_cache_manager.pull_cache(key, cache, 0, src_cache_offset=0, timeout=timeout)
        except LLMException as error:
            told = {"status": error.status_code.name, "reason": str(error), "unsafe": error.destination_unsafe}
        ms = (time.monotonic() - began) * 1000
        right = duo.holds(cache, entry=0, source=key.req_id % 4)
        set_canary(cache)
        self._ended.append(cache)
        say("ended", ms=ms, right=right, key=key.req_id, cluster=key.cluster_id, **told)

    async def look(self) -> None:
        """Whether what was pulled into has been left alone since the pulls ended; then it is given back."""
        intact = all(bool((array == CANARY).all()) for cache in self._ended for array in duo.arrays(cache))
        for cache in self._ended:
            await self._node.kv_cache_manager.deallocate_cache(cache)
        self._ended.clear()
        say("looked", intact=intact)

    async def allocate(self, nbytes: int) -> None:
        """And give back at once."""
        told = {"status": "", "reason": ""}
        try:
            cache = await self._node.kv_cache_manager.allocate_cache(CacheDesc(1, [1, nbytes], DataType.DT_UINT8))
            await self._node.kv_cache_manager.deallocate_cache(cache)
        except LLMException as error:
            told = {"status": error.status_code.name, "reason": str(error)}
        say("allocated", **told)

    async def limit_memory(self, spare: int | None) -> None:
        """Of address space, this process gets no more than so many bytes; None: as much as it likes."""
        most = resource.RLIM_INFINITY if spare is None else address_space() + spare
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        say("limited")

    async def limit_descriptors(self, spare: int | None) -> None:
        """This process can open so many more; None: as many as at first."""
        if spare is None:
            self._scarcity.close()
        else:
            self._scarcity.enter_context(few_descriptors(spare))
        say("limited")

    async def counters(self) -> None:
        say("counters", **self._node.counters)


def address_space() -> int:
    """Bytes of it that this process has."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), HostPeer))
