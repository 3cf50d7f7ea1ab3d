"""A node in a process of its own, as `node`, which also pushes, and is pushed to.

python -m tests.integration.peers.pushing '{"role": "MIX", "cluster": 1, "options": {...}}'
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np

from kvpull_async import CacheDesc, CacheKeyByIdAndIndex, DataType, LLMException
from tests import duo, npu
from tests.integration.content import SPOILT
from tests.integration.peers.node import Peer, main, say
from tests.integration.pushing import Stock


class PushingPeer(Peer):
    def __init__(self, node: Any) -> None:
        super().__init__(node)
        self._stocks: dict[int, Stock] = {}

    async def hold_stock(self, nbytes: int, by_address: bool, seed: int | None = None) -> None:
        """A cache of two tensors with two entries, of the bytes of `seed`, or of the canary."""
        desc, manager = CacheDesc(2, [2, nbytes], DataType.DT_UINT8), self._node.cache_manager
        if by_address:
            arrays = [npu.room(2, nbytes) for _ in range(2)]
            made = Stock(await manager.register_cache(desc, npu.addresses(arrays)), arrays)
        else:
            cache = await manager.allocate_cache(desc)
            made = Stock(cache, duo.arrays(cache))
        self._stocks[made.cache.cache_id] = made
        made.set_canary() if seed is None else made.fill(seed)
        say("stock", cache_id=made.cache.cache_id)

    async def set_canary(self, cache_id: int) -> None:
        self._stocks[cache_id].set_canary()
        say("canary")

    async def look(self, cache_id: int, seed: int, entry: int) -> None:
        """Whether that entry is entry 1 of the source of that seed, whether nothing was written, and the quarantine."""
        held = self._stocks[cache_id]
        source = Stock(None, [np.empty_like(array) for array in held.arrays])
        source.fill(seed)
        right = all(bool((held.arrays[t][entry] == source.arrays[t][1]).all()) for t in range(2))
        say("seen", right=right, untouched=held.untouched, quarantined=held.cache.quarantined)

    async def push(self, cluster: int, cache_id: int, of: int, entry: int, timeout: float) -> None:
        """Begin a push of entry 1; its end is told when it comes."""
        work = self._push(CacheKeyByIdAndIndex(cluster, cache_id, entry), self._stocks[of].cache, timeout)
        self._pulls.add(asyncio.ensure_future(work))
        say("pushing")

    async def _push(self, key: CacheKeyByIdAndIndex, cache: Any, timeout: float) -> None:
        try:
            await self._node.cache_manager.push_cache(key, cache, 1, timeout=timeout)
        except LLMException as error:
            say("failed", status=error.status_code.name, unsafe=error.destination_unsafe)
        else:
            say("pushed")

    async def spoil(self, cache_id: int) -> None:
        """Take the cache back, and as soon as that is done write something else to its memory."""
        held, manager = self._stocks[cache_id], self._node.cache_manager
        try:
            await manager.unregister_cache(cache_id)
            await manager.deallocate_cache(held.cache)  # of the two, what it is not is left alone
        except LLMException as error:
            say("kept", status=error.status_code.name)
        else:
            for array in held.arrays:
                array[:] = SPOILT
            say("spoiled")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1]), PushingPeer))
