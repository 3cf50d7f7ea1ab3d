"""A source in a process of its own: caches of three kinds of memory, every byte of which can be foretold, and what it
does to them while they are read. Lines of JSON both ways, as with `node`.

    python -m tests.integration.peers.source '{"role": "PROMPT", "cluster": 1, "options": {...}, "user": null}'

It must not end by itself: the parent closes its standard input, kills it, or stops it.
"""

from __future__ import annotations

import asyncio
import codecs
import concurrent.futures.thread  # noqa: F401  (another user may not be able to import it later)
import contextlib
import ctypes
import json
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from kvpull_async import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMDataDist, LLMException, LLMRole
from kvpull_async.memory.copying import ACCELERATED
from tests import duo, npu
from tests.integration.content import SPOILT, content
from tests.integration.processes import descriptors, few_descriptors, mappings

PR_SET_DUMPABLE = 4
codecs.lookup("ascii")  # another user may not be able to import it later


def say(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


@dataclass
class Published:
    cache: Any
    arrays: list[Any]
    kind: str
    keys: list[CacheKey]


class Source:
    def __init__(self, node: LLMDataDist, heard: list[str]) -> None:
        self._node = node
        self._heard = heard
        self._published: dict[int, Published] = {}
        self._gated: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._scarcity = contextlib.ExitStack()

    async def publish(
        self, key: int, nbytes: int, *, kind: str = "allocated", tensors: int = 2, entries: int = 1, generation: int = 0
    ) -> None:
        """A cache whose entry i has key `key + i` (kind "blocks": a paged one, of model `key`)."""
        try:
            made = await self._make(key, CacheDesc(tensors, [entries, nbytes], DataType.DT_UINT8), kind, generation)
        except LLMException as error:
            say("failed", status=error.status_code.name, reason=str(error))
            return
        self._published[key] = made
        say("published", cache_id=made.cache.cache_id)

    async def _make(self, key: int, desc: CacheDesc, kind: str, generation: int) -> Published:
        manager = self._node.cache_manager
        keys = [CacheKey(self._node.cluster_id, key + entry) for entry in range(desc.entries)]
        if kind == "registered":
            memory = [npu.room(desc.entries, desc.entry_nbytes) for _ in range(desc.num_tensors)]
            self._fill(memory, key, generation)
            cache = await manager.register_cache(desc, npu.addresses(memory), keys)
            return Published(cache, memory, kind, keys)
        if kind == "blocks":
            blocks = await manager.allocate_blocks_cache(desc, BlocksCacheKey(self._node.cluster_id, key))
            arrays = duo.arrays(blocks)
            self._fill(arrays, key, generation)
            return Published(blocks, arrays, kind, [])
        older = await self._node.kv_cache_manager.allocate_cache(desc, keys)
        arrays = duo.arrays(older)
        self._fill(arrays, key, generation)
        return Published(older, arrays, kind, keys)

    @staticmethod
    def _fill(arrays: list[Any], key: int, generation: int) -> None:
        for tensor, array in enumerate(arrays):
            for entry, row in enumerate(array):
                row[:] = content(key + entry, tensor, generation, nbytes=row.size)

    async def spoil(self, key: int) -> None:
        """Take the cache away, and as soon as that is done write something else to its memory."""
        gone = self._published.pop(key)
        try:
            await self._take_back(gone)
        except LLMException as error:
            self._published[key] = gone
            say("failed", status=error.status_code.name, reason=str(error))
            return
        for array in gone.arrays:
            array[:] = SPOILT
        say("spoiled")

    async def _take_back(self, gone: Published) -> None:
        manager = self._node.cache_manager
        if gone.kind == "registered":
            await manager.unregister_cache(gone.cache.cache_id)
        elif gone.kind == "blocks":
            await manager.deallocate_blocks_cache(gone.cache)
        else:
            for key in gone.keys:
                await self._node.kv_cache_manager.remove_cache_key(key)
            await self._node.kv_cache_manager.deallocate_cache(gone.cache)

    async def again(self, key: int, of: int) -> None:
        """Register the memory of an allocated cache under another key."""
        first = self._published[of]
        keys = [CacheKey(self._node.cluster_id, key)]
        addresses = npu.addresses(first.arrays)
        cache = await self._node.cache_manager.register_cache(first.cache.cache_desc, addresses, keys)
        self._published[key] = Published(cache, [], "registered", keys)
        say("published", cache_id=cache.cache_id)

    async def unregister(self, key: int) -> None:
        await self._take_back(self._published.pop(key))
        say("unregistered")

    async def fetch(self, cluster: int, address: list[Any], key: int, nbytes: int) -> None:
        """The other way round: link, pull a key of such a source, and look at the bytes."""
        info = duo.cluster(cluster, (address[0], address[1]))
        linked = duo.codes(await self._node.link_clusters([info], duo.TIMEOUT_MS))
        cache = await self._node.kv_cache_manager.allocate_cache(CacheDesc(2, [1, nbytes], DataType.DT_UINT8))
        await self._node.kv_cache_manager.pull_cache(CacheKey(cluster, key), cache, 0, src_cache_offset=0)
        right = [
            bool((array[0] == content(key, tensor, 0, nbytes=nbytes)).all())
            for tensor, array in enumerate(duo.arrays(cache))
        ]
        await self._node.kv_cache_manager.deallocate_cache(cache)
        say("fetched", linked=linked, right=right)

    async def hold(self) -> None:
        """From now on streamed transfers stop in their middle; "held" tells when one has."""
        self._gated = self._gated or duo.gate(self._node)
        self._gated.lending_gate.close()
        self._tasks.add(asyncio.ensure_future(self._held()))
        say("holding")

    async def _held(self) -> None:
        await self._gated.lending_gate.reached(timeout=60)
        say("held")

    async def let_go(self) -> None:
        self._gated.lending_gate.open()
        say("let_go")

    async def limit(self, spare: int | None) -> None:
        """Leave so many descriptors to be had; None: as many as at first."""
        if spare is None:
            self._scarcity.close()
        else:
            self._scarcity.enter_context(few_descriptors(spare))
        say("limited")

    async def spent(self) -> None:
        say("spent", cpu=time.process_time())

    async def state(self) -> None:
        engine = duo.engine_of(self._node)
        say(
            "state",
            descriptors=descriptors(),
            mappings=mappings(),
            threads=len([thread for thread in threading.enumerate() if thread.name.startswith("kvpull")]),
            tasks=len(engine.core.pending()),
            busy=[entry.cache_id for entry in engine.registry.entries() if entry.busy],
            used=npu.used(engine.memory),
            accelerated=ACCELERATED,
        )

    async def heard(self) -> None:
        say("heard", events=self._heard)


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def become(user: int) -> None:
    """Another user. The kernel then hides the process from that user too, until told otherwise, as after an exec."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


async def main(config: dict[str, Any]) -> None:
    logger, heard = logging.getLogger("kvpull"), Heard()
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    if config["user"] is not None:
        become(config["user"])
    async with LLMDataDist(LLMRole[config["role"]], config["cluster"]) as node:
        await node.init(duo.options(**config["options"]))
        source = Source(node, heard.lines)
        say("ready", address=list(node.listen_address or ()))
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            await getattr(source, command.pop("do"))(**command)
        if source._gated is not None:
            await source.let_go()
    say("gone")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
