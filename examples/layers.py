"""Computing on the first layers of a KV cache while the others are still on their way.

Its job: ``pull_layers``, awaited, with a decode node that works on each layer as it lands and checks that the layer was
complete by then. Both nodes stand in this process, over TCP. It must not need anything but kvpull and numpy.

    python examples/layers.py
"""

from __future__ import annotations

import asyncio
import sys
import time

import numpy as np

from kvpull_async import CacheDesc, CacheKey, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole

LAYERS = 16
DESC = CacheDesc(num_tensors=2 * LAYERS, shape=[1, 1024 * 1024], data_type=DataType.DT_FLOAT)  # 4 MiB per tensor
KEY = CacheKey(1, req_id=0)


async def start(node: LLMDataDist, *, listen: bool) -> None:
    config = LLMConfig()
    config.device_backend = "host"  # numpy reads and writes the caches: not in the memory of an NPU
    config.transfer_backend = "tcp"
    config.sync_kv_timeout = 30_000
    if listen:
        config.listen_ip_info = "127.0.0.1:0"
    await node.init(config.generate_options())


async def decode(node: LLMDataDist) -> bool:
    """Pull, and add up each layer as soon as it is there; True when every sum is right."""
    manager = node.kv_cache_manager
    cache = await manager.allocate_cache(DESC)
    tensors = [manager.get_cache_tensors(cache, index)[0].numpy() for index in range(DESC.num_tensors)]
    began = time.perf_counter()
    landed: list[float] = []
    right = True
    async with manager.pull_layers(KEY, cache) as layers:
        async for layer in layers:
            landed.append(time.perf_counter() - began)
            sums = [float(np.sum(tensor, dtype=np.float64)) for tensor in tensors[2 * layer : 2 * layer + 2]]
            right = right and sums == [(2 * layer + i + 1) * tensors[0].size for i in range(2)]
    ended = time.perf_counter() - began
    print(f"The first of {len(landed)} layers was there after {landed[0] * 1000:.1f} ms,")
    print(f"the last one after {landed[-1] * 1000:.1f} ms; all was added up after {ended * 1000:.1f} ms.")
    await manager.deallocate_cache(cache)
    return right and len(landed) == LAYERS


async def main() -> bool:
    async with LLMDataDist(LLMRole.PROMPT, 1) as prefill, LLMDataDist(LLMRole.DECODER, 2) as decoder:
        await start(prefill, listen=True)
        await start(decoder, listen=False)
        source = await prefill.kv_cache_manager.allocate_cache(DESC, [KEY])
        for index in range(DESC.num_tensors):
            prefill.kv_cache_manager.get_cache_tensors(source, index)[0].numpy()[:] = index + 1
        assert prefill.listen_address is not None
        cluster = LLMClusterInfo()
        cluster.remote_cluster_id = 1
        cluster.append_remote_ip_info(*prefill.listen_address)
        await decoder.link_clusters([cluster], raise_on_error=True)
        right = await decode(decoder)
        await prefill.kv_cache_manager.deallocate_cache(source)
    return right


if __name__ == "__main__":
    ok = asyncio.run(main())
    print(
        "OK: every layer was complete when it was given" if ok else "FAILED: a layer was given before it was complete"
    )
    sys.exit(not ok)
