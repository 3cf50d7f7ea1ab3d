"""Many pulls of every kind from sources in other processes, which release and replace their caches and are killed
meanwhile; pulls are cancelled and run out of time. Every byte of every destination is checked, and what is left at the
end. The parent reads one line of JSON.

    python -m tests.integration.peers.stress '{"pulls": 1000, "seed": 1, "sources": 3, "kills": 5}'
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import kvpull_sync
from kvpull_async import LLMDataDist, LLMRole
from kvpull_async.memory.copying import ACCELERATED
from tests import duo
from tests.integration.processes import child, descriptors, mappings
from tests.integration.stress_pulls import PATIENCE_MS, Shape, Slot, Source, Worker
from tests.loop_nodes import eventually

SIZES = (1, 100, 4096, 65_536, 300_000, 2 * 1024 * 1024)
WEIGHTS = (2, 3, 6, 6, 3, 1)
TICK = 0.01
SLOTS = 8
"""Caches of each source at a time."""
NODES: dict[str, dict[str, Any]] = {
    "auto": {},
    "streamed": {"allow_process_vm_read": "off"},
    "remote access": {"local_comm_res": ""},
    "blocking": {},
}


class Stress:
    def __init__(self, pulls: int, seed: int, sources: int, kills: int) -> None:
        self.left = pulls
        self.kills = kills
        self.random = random.Random(seed)
        self.sources = [Source(number + 1) for number in range(sources)]
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.pulls = pulls
        self.nodes: dict[str, Any] = {}
        self.threads = ThreadPoolExecutor(3)
        self.held_up = 0.0
        """Seconds that this process's loop has lost so far to other work, its own and the machine's."""

    async def watch(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK)
            self.held_up += time.monotonic() - began - TICK

    # -- the sources ------------------------------------------------------------------------------------------------

    async def start(self, source: Source) -> None:
        options: dict[str, Any] = {"transport": "shm", "settle_timeout": 200, "lease_margin": 200}
        if source.address[1]:
            options["listen_ip_info"] = f"{source.address[0]}:{source.address[1]}"
        else:
            options["listen"] = True
        source.process = await source.stack.enter_async_context(
            child("PROMPT", source.cluster, program="source", **options)
        )
        source.address = source.process.address
        shapes = [await self.publish(source) for _ in range(SLOTS)]
        if source.slots:
            for slot, shape in zip(source.slots, shapes, strict=True):
                slot.shape = shape
        else:
            source.slots = [Slot(shape) for shape in shapes]

    async def publish(self, source: Source) -> Shape:
        assert source.process is not None
        kind = self.random.choice(("allocated", "registered", "blocks"))
        tensors, nbytes = self.random.choice((2, 4)), self.random.choices(SIZES, WEIGHTS)[0]
        entries = self.random.choice((4, 9)) if kind == "blocks" else self.random.choice((1, 3))
        key = next(source.keys)
        what = {"kind": kind, "tensors": tensors, "entries": entries, "nbytes": nbytes}
        said = await source.process.ask("publish", "published", key=key, **what)
        source.keys_by_id.setdefault(said["cache_id"], []).append(key)
        return Shape(key, kind, tensors, entries, nbytes, said["cache_id"])

    async def change(self, source: Source) -> None:
        """Another cache in place of one of them; what was in its memory is overwritten."""
        slot = self.random.choice(source.slots)
        assert source.process is not None
        slot.changes += 1
        source.process.tell("spoil", key=slot.shape.key)
        said = await source.process.hear("spoiled", "failed")
        if said["event"] == "failed":
            self.counts["release timed out"] += 1
            source.used.update(range(slot.shape.key, slot.shape.key + slot.shape.entries))
        else:
            self.counts["caches changed"] += 1
            slot.shape = await self.publish(source)
        slot.changes += 1

    async def restart(self, source: Source) -> None:
        assert source.process is not None
        source.losses += 1
        source.process.kill()
        await source.stack.aclose()
        self.counts["sources killed"] += 1
        await self.start(source)
        source.losses += 1

    async def cut(self, source: Source) -> None:
        """One connection of one link breaks, which comes back by itself."""
        engine = duo.engine_of(self.nodes[self.random.choice([name for name in NODES if name != "blocking"])])
        link = engine.links.find(source.cluster)
        if link is not None:
            source.losses += 1
            self.counts["connections cut"] += 1
            engine.core.loop.call_soon_threadsafe(link._lanes[self.random.randrange(2)].abort, "cut by the test")
            await asyncio.sleep(0.1)
            source.losses += 1

    async def trouble(self, source: Source) -> None:
        """What happens to a source as long as pulls go on."""
        share = self.pulls // (self.kills + 1) if self.kills else 0
        next_kill = self.left - self.random.randrange(share // 2, share) if share > 1 else -1
        while self.left > 0:
            await asyncio.sleep(self.random.uniform(0.0, 0.05))
            if self.left <= next_kill and self.kills > 0:
                self.kills -= 1
                next_kill = self.left - len(self.sources) * self.random.randrange(share // 2, share)
                await self.restart(source)
            elif self.random.random() < 0.03:
                await self.cut(source)
            else:
                await self.change(source)

    # -- the pulls --------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        infos = [duo.cluster(source.cluster, source.address) for source in self.sources]
        for number, (name, more) in enumerate(NODES.items()):
            options = duo.options(transport="shm", enable_cache_manager=True, reconnect_grace=500, **more)
            if name == "blocking":
                blocking = kvpull_sync.LLMDataDist(LLMRole.DECODER, 1000 + number)
                blocking.init(options)
                blocking.link_clusters(infos, PATIENCE_MS, raise_on_error=True)
                self.nodes[name] = blocking
            else:
                node = LLMDataDist(LLMRole.DECODER, 1000 + number)
                await node.init(options)
                await node.link_clusters(infos, PATIENCE_MS, raise_on_error=True)
                self.nodes[name] = node

    async def close(self) -> None:
        for name, node in self.nodes.items():
            if name == "blocking":
                node.finalize()
            else:
                await node.finalize()
        self.nodes.clear()

    async def work(self, name: str) -> None:
        worker = Worker(self, name)
        while self.left > 0:
            self.left -= 1
            await worker.pull()
        await worker.close()

    def note(self, what: str) -> None:
        if len(self.wrong) < 20:
            self.wrong.append(what)
        self.counts["WRONG"] += 1


async def main(pulls: int, seed: int, sources: int, kills: int) -> None:
    began = time.monotonic()
    stress = Stress(pulls, seed, sources, kills)
    before = descriptors(), mappings()
    await asyncio.gather(*(stress.start(source) for source in stress.sources))
    up = descriptors()
    await stress.open()
    workers = [stress.work(name) for name in NODES for _ in range(3)]
    watching = asyncio.create_task(stress.watch())
    await asyncio.gather(*workers, *(stress.trouble(source) for source in stress.sources))
    watching.cancel()
    await stress.close()
    gc.collect()
    with contextlib.suppress(AssertionError):
        await eventually(lambda: mappings() <= before[1] and descriptors() <= up)
    left: dict[str, Any] = {"mappings": mappings() - before[1], "descriptors": descriptors() - up}
    for source in stress.sources:
        assert source.process is not None
        for slot in source.slots:
            await source.process.ask("spoil", "spoiled", key=slot.shape.key)
        state = await source.process.ask("state", "state")
        left[f"source {source.cluster}"] = {name: state[name] for name in ("mappings", "used", "busy", "descriptors")}
        await source.stack.aclose()
    stress.threads.shutdown()
    result = {
        "counts": stress.counts,
        "wrong": stress.wrong,
        "left": left,
        "accelerated": ACCELERATED,
        "seconds": round(time.monotonic() - began, 1),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
