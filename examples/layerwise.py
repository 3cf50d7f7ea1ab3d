"""Sending each layer of a KV cache while the next one is being computed.

Its job: ``transfer_cache_async`` between two processes. This one is the decode node: it offers a cache and waits. The
other one, which it starts, is the prefill node: it computes layer after layer, each of which goes to the decode node
while the next one is computed. At the end the two compare checksums, which alone decide the verdict; what was gained is
printed as it was measured, and depends on the machine. It needs nothing but kvpull and numpy.

    python examples/layerwise.py
"""

from __future__ import annotations

import asyncio
import sys
import time
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpull_async import (
    Cache,
    CacheDesc,
    CacheManager,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    TransferConfig,
)
from line_pipe import Child, Message, Parent

PREFILL, DECODE = 1, 2
LAYERS, TOKENS, WIDTH = 12, 512, 512
DESC = CacheDesc(num_tensors=2 * LAYERS, shape=[2, TOKENS, WIDTH], data_type=DataType.DT_FLOAT)  # 1 MiB per entry
F32 = NDArray[np.float32]


async def start(node: LLMDataDist, *, listen: bool) -> CacheManager:
    config = LLMConfig()
    config.device_backend = "host"  # numpy reads and writes the caches: not in the memory of an NPU
    config.enable_cache_manager = True
    config.sync_kv_timeout = 30_000
    if listen:
        config.listen_ip_info = "127.0.0.1:0"
    await node.init(config.generate_options())
    return node.cache_manager


def arrays(manager: CacheManager, cache: Cache) -> list[F32]:
    """The memory of the cache: for each tensor (entries, tokens, width)."""
    return [manager.get_cache_tensors(cache, index)[0].numpy() for index in range(DESC.num_tensors)]


def checksums(tensors: list[F32], entry: int) -> list[int]:
    return [zlib.crc32(tensor[entry].tobytes()) for tensor in tensors]


# -- the prefill node --------------------------------------------------------------------------------------------------


class Computed(LayerSynchronizer):
    """Says when a layer may be sent: when it has been computed. It is asked for one layer after the other."""

    def __init__(self) -> None:
        self.done = [asyncio.Event() for _ in range(LAYERS)]
        self.gone = 0

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.gone = layer_index  # those before it have arrived
        await self.done[layer_index].wait()
        return True


def compute(layer: int, hidden: F32, tensors: list[F32], entry: int) -> F32:
    """What stands for a layer of a model: its keys, its values, and what the next layer goes on with."""
    noise = np.random.default_rng(layer)
    weights = [noise.standard_normal((WIDTH, WIDTH), np.float32) / np.float32(WIDTH**0.5) for _ in range(3)]
    tensors[2 * layer][entry] = hidden @ weights[0]
    tensors[2 * layer + 1][entry] = hidden @ weights[1]
    following: F32 = np.tanh(hidden @ weights[2])
    return following


async def compute_all(computed: Computed, tensors: list[F32], entry: int) -> None:
    hidden = np.random.default_rng(99 + entry).standard_normal((TOKENS, WIDTH), np.float32)
    for layer in range(LAYERS):
        hidden = await asyncio.to_thread(compute, layer, hidden, tensors, entry)
        computed.done[layer].set()


def times(began: float, computed: float) -> list[float]:
    """Milliseconds that computing took, and after it the arrival of what was missing."""
    return [1000 * (computed - began), 1000 * (time.perf_counter() - computed)]


async def prefill(parent: Parent, job: Message) -> None:
    async with LLMDataDist(LLMRole.PROMPT, PREFILL) as node:
        manager = await start(node, listen=False)
        cluster = LLMClusterInfo()
        cluster.remote_cluster_id = DECODE
        cluster.append_remote_ip_info(job["ip"], job["port"])
        await node.link_clusters([cluster], raise_on_error=True)
        cache = await manager.allocate_cache(DESC)
        tensors = arrays(manager, cache)

        for entry in range(2):  # once without the clock: memory that is used for the first time is slow
            await compute_all(Computed(), tensors, entry)
        for tensor in tensors:
            tensor[:] = 0  # so that what is sent too early is wrong

        # Entry 0: sent while it is computed.
        computed, began = Computed(), time.perf_counter()
        task = manager.transfer_cache_async(cache, computed, [TransferConfig(DECODE, job["addresses"][0])])
        await compute_all(computed, tensors, 0)
        gone, beside = computed.gone, time.perf_counter()
        status = await task
        overlapped = times(began, beside)

        # Entry 1: computed, and then sent.
        computed, began = Computed(), time.perf_counter()
        await compute_all(computed, tensors, 1)
        alone = time.perf_counter()
        config = TransferConfig(DECODE, job["addresses"][1], src_batch_index=1)
        later = await manager.transfer_cache_async(cache, computed, [config])
        one_by_one = times(began, alone)

        sums = [checksums(tensors, entry) for entry in range(2)]
        statuses = [status.name, later.name]
        parent.say("sent", statuses=statuses, checksums=sums, gone=gone, overlapped=overlapped, one_by_one=one_by_one)
        await manager.deallocate_cache(cache)


async def run_prefill() -> None:
    parent = await Parent.connect()
    job = await parent.hear()
    if job is not None:
        await prefill(parent, job)


# -- the decode node ---------------------------------------------------------------------------------------------------


def tell(told: Message) -> None:
    (computing, rest), (alone, sending) = told["overlapped"], told["one_by_one"]
    print(f"Overlapped: {LAYERS} layers were computed in {computing:.1f} ms.")
    print(f"{told['gone']} of them had arrived by then, the rest {rest:.1f} ms later.")
    print(f"One by one: they were computed in {alone:.1f} ms, and then sent in {sending:.1f} ms.")
    saved = alone + sending - computing - rest
    if saved > 0:
        print(f"Overlapping took {saved:.1f} ms less in all.")
    else:
        print(f"Overlapping did not help this time: it took {-saved:.1f} ms more in all.")


async def run_decode() -> bool:
    child: Child | None = None
    async with LLMDataDist(LLMRole.DECODER, DECODE) as node:
        manager = await start(node, listen=True)
        cache = await manager.allocate_cache(DESC)
        tensors = arrays(manager, cache)
        # A config names the memory of each tensor: here that of entry 0, and that of entry 1 behind it.
        addresses = [[address + entry * DESC.entry_nbytes for address in cache.tensor_addrs] for entry in range(2)]
        assert node.listen_address is not None
        ip, port = node.listen_address
        try:
            child = await Child.start("prefill", __file__, "--prefill")
            await child.say("send", ip=ip, port=port, addresses=addresses)
            told: dict[str, Any] = await child.hear("sent")
        finally:
            stopped = await child.stop() if child is not None else 1
        tell(told)
        right = [checksums(tensors, entry) for entry in range(2)] == told["checksums"]
        await manager.deallocate_cache(cache)
    return right and told["statuses"] == [LLMStatusCode.LLM_SUCCESS.name] * 2 and stopped == 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--prefill"]:
        asyncio.run(run_prefill())
    else:
        ok = asyncio.run(run_decode())
        print("OK: every layer arrived as it was computed" if ok else "FAILED: what arrived is not what was computed")
        sys.exit(not ok)
