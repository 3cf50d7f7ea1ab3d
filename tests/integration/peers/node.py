"""A node in a process of its own, which does what its parent's lines of JSON say and answers with lines of JSON.

    python -m tests.integration.peers.node '{"role": "PROMPT", "cluster": 1, "options": {...}}'

It must not end by itself: the parent closes its standard input, kills it, or stops it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from kvpull_async import CacheDesc, CacheKey, DataType, LLMDataDist, LLMException, LLMRole
from kvpull_async.testing.faults import GatedMemory
from tests import duo
from tests.integration.processes import sockets


def say(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


class Peer:
    def __init__(self, node: LLMDataDist) -> None:
        self._node = node
        self._kept: list[Any] = []
        self._gated: GatedMemory | None = None
        self._pulls: set[asyncio.Task[None]] = set()

    async def publish(self, nbytes: int, first: int) -> None:
        """A filled cache of two tensors with four entries, whose keys begin with `first`."""
        desc = CacheDesc(2, [4, nbytes], DataType.DT_UINT8)
        keys = [CacheKey(self._node.cluster_id, first + entry) for entry in range(4)]
        cache = await self._node.kv_cache_manager.allocate_cache(desc, keys)
        duo.fill(cache)
        self._kept.append(cache)
        say("published")

    async def link(self, cluster: int, address: list[Any]) -> None:
        info = duo.cluster(cluster, (address[0], address[1]))
        say("linked", codes=duo.codes(await self._node.link_clusters([info], duo.TIMEOUT_MS)))

    async def pull(self, cluster: int, key: int, nbytes: int, timeout: float, entries: int = 4) -> None:
        """Begin a pull; its end is told when it comes."""
        cache = await self._node.kv_cache_manager.allocate_cache(CacheDesc(2, [entries, nbytes], DataType.DT_UINT8))
        self._kept.append(cache)
        task = asyncio.ensure_future(self._pull(CacheKey(cluster, key), cache, timeout))
        self._pulls.add(task)
        say("pulling")

    async def _pull(self, key: CacheKey, cache: Any, timeout: float) -> None:
        try:
            await self._node.kv_cache_manager.pull_cache(key, cache, 0, src_cache_offset=0, timeout=timeout)
        except LLMException as error:
            say("failed", status=error.status_code.name)
        else:
            say("pulled", right=duo.holds(cache, entry=0, source=key.req_id % 4))

    async def hold(self, where: str) -> None:
        """From now on transfers stop in their middle, at this node's memory; "held" tells when one has."""
        if self._gated is None:
            self._gated = duo.gate(self._node)
        gate = self._gated.lending_gate if where == "lending" else self._gated.landing_gate
        gate.close()
        self._pulls.add(asyncio.ensure_future(self._held(gate.reached)))
        say("holding")

    async def _held(self, reached: Callable[..., Any]) -> None:
        await reached(timeout=60)
        say("held")

    async def let_go(self) -> None:
        assert self._gated is not None
        self._gated.lending_gate.open()
        self._gated.landing_gate.open()
        say("let_go")

    async def block(self, seconds: float, how: str) -> None:
        """Keep this process's own loop from running anything."""
        say("blocked")
        end = time.monotonic() + seconds
        if how == "asleep":
            time.sleep(seconds)  # noqa: ASYNC251  (the point)
        while time.monotonic() < end:
            sum(range(1000))
        say("unblocked")

    async def state(self) -> None:
        engine = duo.engine_of(self._node)
        say(
            "state",
            tasks=engine.core.pending(),
            threads=sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kvpull")),
            sockets=sockets(),
            counters=self._node.counters,
        )


async def main(config: dict[str, Any], make: type[Peer] = Peer) -> None:
    async with LLMDataDist(LLMRole[config["role"]], config["cluster"]) as node:
        await node.init(duo.options(**config["options"]))
        peer = make(node)
        say("ready", address=list(node.listen_address or ()))
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            await getattr(peer, command.pop("do"))(**command)
        await peer.let_go() if peer._gated is not None else None
    say("gone")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
