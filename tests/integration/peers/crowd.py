"""Many callers of one node at once: threads of the blocking API or tasks of the awaitable one, on four links, each with
memory of its own here and there. Whatever it moves it compares. One line of JSON at the end.

    python -m tests.integration.peers.crowd '{"api": "threads", "workers": 16, "seconds": 3, "path": "shm", "seed": 1}'
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

import kvpull_async
import kvpull_sync
from kvpull_async import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LLMRole,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from tests import duo
from tests.integration.peers.crowd_peer import BLOCKS, CLUSTERS, ENTRY, PAGES, SLOT, TENSORS, byte_of, threads
from tests.integration.processes import descriptors, mappings

HERE = 100
STUCK = 60.0
"""Seconds that a caller may take for one round after the time is over."""
Steps = Generator[Callable[[], Any], Any, None]


class AtOnce(kvpull_async.LayerSynchronizer):
    """Every layer has been computed already."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


class Caller:
    """What one thread or task does, as steps: each is called, awaited where that is the API's way, and answered."""

    def __init__(self, number: int, node: Any, seed: int, until: float) -> None:
        self.number = number
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._node = node
        self._manager = node.cache_manager
        self._random = random.Random(f"{seed} {number}")
        self._until = until
        self._stamp = number % 251

    def steps(self) -> Steps:
        make = self._manager.allocate_cache
        self._entry = yield lambda: make(CacheDesc(TENSORS, [2, ENTRY], DataType.DT_UINT8))
        self._slot = yield lambda: make(CacheDesc(TENSORS, [2, SLOT], DataType.DT_UINT8))
        pages = self._manager.allocate_blocks_cache
        self._pages = yield lambda: pages(CacheDesc(TENSORS, [2 * PAGES, BLOCKS], DataType.DT_UINT8))
        kinds = [self.pull, self.push, self.push_pages, self.transfer, self.allocate, self.register]
        while time.monotonic() < self._until:
            kind = self._random.choice(kinds)
            yield from kind(self._random.choice(CLUSTERS))
            self.counts[kind.__name__] += 1
        yield lambda: self._manager.deallocate_cache(self._entry)
        yield lambda: self._manager.deallocate_cache(self._slot)
        yield lambda: self._manager.deallocate_blocks_cache(self._pages)

    def pull(self, cluster: int) -> Steps:
        entry = self._random.randrange(8)
        key = CacheKeyByIdAndIndex(cluster, 1, entry)
        duo.arrays(self._entry)[0][0] = 0
        yield lambda: self._manager.pull_cache(key, self._entry)
        self._look("pull", [array[0] for array in duo.arrays(self._entry)], cluster, entry)

    def push(self, cluster: int) -> Steps:
        there = CacheKeyByIdAndIndex(cluster, 2, self.number)
        self._mark(self._slot)
        yield lambda: self._manager.push_cache(there, self._slot)
        yield from self._back("push", there)

    def push_pages(self, cluster: int) -> Steps:
        there = [PAGES * self.number + page for page in range(PAGES)]
        mine = list(range(PAGES))
        self._random.shuffle(there)
        self._mark(self._pages, rows=PAGES)
        key = BlocksCacheKey(cluster)
        yield lambda: self._manager.push_blocks(key, self._pages, mine, there)
        back = [PAGES + page for page in mine]
        yield lambda: self._manager.pull_blocks(key, self._pages, there, back)
        for tensor, array in enumerate(duo.arrays(self._pages)):
            if not (array[PAGES:] == array[:PAGES]).all():
                self.wrong.append(f"pages of tensor {tensor} by cluster {cluster}")

    def transfer(self, cluster: int) -> Steps:
        keys = [CacheKeyByIdAndIndex(other, 2, self.number) for other in {cluster, self._random.choice(CLUSTERS)}]
        layers = range(TENSORS // 2)
        configs = [TransferWithCacheKeyConfig(key, layers, layers) for key in keys]
        self._mark(self._slot)
        task = self._manager.transfer_cache_async(self._slot, AtOnce(), configs)
        status = yield task.synchronize
        if status != LLMStatusCode.LLM_SUCCESS:
            raise RuntimeError(f"transfer: {status!r} {task.exceptions}")
        for key in keys:
            yield from self._back("transfer", key)

    def allocate(self, cluster: int) -> Steps:
        cache = yield lambda: self._manager.allocate_cache(CacheDesc(TENSORS, [2, ENTRY], DataType.DT_UINT8))
        key = CacheKeyByIdAndIndex(cluster, 1, 3)
        yield lambda: self._manager.pull_cache(key, cache, 1)
        yield lambda: self._manager.copy_cache(cache, cache, 0, 1)
        self._look("allocate", [array[0] for array in duo.arrays(cache)], cluster, 3)
        yield lambda: self._manager.deallocate_cache(cache)

    def register(self, cluster: int) -> Steps:
        memory = [np.zeros((1, SLOT), np.uint8) for _ in range(TENSORS)]
        desc = CacheDesc(TENSORS, [1, SLOT], DataType.DT_UINT8)
        addresses = [int(array.ctypes.data) for array in memory]
        cache = yield lambda: self._manager.register_cache(desc, addresses)
        key = CacheKeyByIdAndIndex(cluster, 1, 5)
        yield lambda: self._manager.pull_cache(key, cache)
        yield lambda: self._manager.unregister_cache(cache.cache_id)
        self._look("register", [array[0] for array in memory], cluster, 5)

    def _mark(self, cache: Any, *, rows: int = 1) -> None:
        self._stamp = (self._stamp + 7) % 251
        for tensor, array in enumerate(duo.arrays(cache)):
            for row in range(rows):
                array[row] = (self._stamp + 3 * tensor + 5 * row) % 256

    def _back(self, what: str, key: CacheKeyByIdAndIndex) -> Steps:
        """What was sent there, read again."""
        yield lambda: self._manager.pull_cache(key, self._slot, 1)
        for tensor, array in enumerate(duo.arrays(self._slot)):
            if not (array[1] == array[0]).all():
                self.wrong.append(f"{what}: tensor {tensor} by cluster {key.cluster_id}")

    def _look(self, what: str, rows: list[Any], cluster: int, entry: int) -> None:
        for tensor, row in enumerate(rows):
            if not (row == byte_of(cluster, tensor, entry)).all():
                self.wrong.append(f"{what}: tensor {tensor}, entry {entry} of cluster {cluster}")


def block(caller: Caller) -> None:
    steps, answer = caller.steps(), None
    try:
        while True:
            answer = steps.send(answer)()
    except StopIteration:
        return
    except Exception as error:  # noqa: BLE001  (the test judges it)
        caller.wrong.append(repr(error))


async def wait(caller: Caller) -> None:
    steps, answer = caller.steps(), None
    try:
        while True:
            answer = await steps.send(answer)()
    except StopIteration:
        return
    except Exception as error:  # noqa: BLE001
        caller.wrong.append(repr(error))


def run_threads(config: dict[str, Any], addresses: dict[int, Any]) -> tuple[list[Caller], int]:
    node = kvpull_sync.LLMDataDist(LLMRole.DECODER, HERE)
    node.init(options(config))
    infos = [duo.cluster(cluster, address) for cluster, address in addresses.items()]
    assert node.link_clusters(infos, 10_000)[0] == LLMStatusCode.LLM_SUCCESS
    until = time.monotonic() + config["seconds"]
    callers = [Caller(number, node, config["seed"], until) for number in range(config["workers"])]
    running = [threading.Thread(target=block, args=(caller,), daemon=True) for caller in callers]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(max(0.0, until + STUCK - time.monotonic()))
    stuck = sum(thread.is_alive() for thread in running)
    node.finalize()
    return callers, stuck


async def run_tasks(config: dict[str, Any], addresses: dict[int, Any]) -> tuple[list[Caller], int]:
    async with kvpull_async.LLMDataDist(LLMRole.DECODER, HERE) as node:
        await node.init(options(config))
        infos = [duo.cluster(cluster, address) for cluster, address in addresses.items()]
        assert (await node.link_clusters(infos, 10_000))[0] == LLMStatusCode.LLM_SUCCESS
        until = time.monotonic() + config["seconds"]
        callers = [Caller(number, node, config["seed"], until) for number in range(config["workers"])]
        tasks = [asyncio.ensure_future(wait(caller)) for caller in callers]
        _, stuck = await asyncio.wait(tasks, timeout=config["seconds"] + STUCK)
        for task in stuck:
            task.cancel()
    return callers, len(stuck)


def options(config: dict[str, Any]) -> dict[str, str]:
    remote = {"enable_cache_manager": True, "enable_remote_cache_accessible": True}
    return duo.options(transport=config["path"], **remote)


def main() -> None:
    config = json.loads(sys.argv[1])
    before = descriptors()
    peers = {cluster: started(cluster, config["path"]) for cluster in CLUSTERS}
    addresses = {cluster: tuple(json.loads(said(peer))) for cluster, peer in peers.items()}
    if config["api"] == "threads":
        callers, stuck = run_threads(config, addresses)
    else:
        callers, stuck = asyncio.run(run_tasks(config, addresses))
    there = []
    for peer in peers.values():
        assert peer.stdin is not None
        peer.stdin.close()
        there.append(json.loads(said(peer)))
        assert peer.stdout is not None
        peer.stdout.close()
        peer.wait(20)
    counts: Counter[str] = sum((caller.counts for caller in callers), Counter())
    wrong = [text for caller in callers for text in caller.wrong]
    del callers
    gc.collect()
    left = {"threads": threads(), "descriptors": descriptors() - before, "mappings": mappings()}
    result = {"counts": counts, "wrong": wrong[:20], "stuck": stuck, "left": left, "left there": there}
    sys.stdout.write(json.dumps(result) + "\n")


def started(cluster: int, path: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.integration.peers.crowd_peer", str(cluster), path]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(peer: subprocess.Popen[str]) -> str:
    assert peer.stdout is not None
    return peer.stdout.readline()


if __name__ == "__main__":
    main()
