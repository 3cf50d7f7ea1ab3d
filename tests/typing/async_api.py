"""What type checkers see of the awaitable API. Checked by `make type` and never run.

A `type: ignore` here is an expectation too: without the error it is unused, which is an error of its own.
"""

from __future__ import annotations

import numpy as np
from typing_extensions import assert_type

from kvpull_async import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheManager,
    CacheTask,
    DataType,
    KvCache,
    KvCacheManager,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LlmConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    LLMTimeoutError,
    Placement,
    Tensor,
    TransferConfig,
    TransferWithCacheKeyConfig,
)


def values() -> None:
    config = LLMConfig()
    config.sync_kv_timeout = 1000
    config.device_id = [0, 1]
    config.link_secret = "secret"
    config.sync_kv_timeout = [1]  # type: ignore[assignment]
    assert_type(config.generate_options(), dict[str, str])
    LlmConfig().listen_ip_info = "127.0.0.1:0"
    desc = CacheDesc(2, (4, 16), DataType.DT_FLOAT16, Placement.HOST, seq_len_dim_index=1)
    assert_type(desc.entry_nbytes, int)
    CacheDesc("2", (4, 16), DataType.DT_FLOAT16)  # type: ignore[arg-type]
    info = LLMClusterInfo()
    info.remote_cluster_id = 1
    info.append_remote_ip_info("127.0.0.1", 4000)


async def life(datadist: LLMDataDist) -> None:
    await datadist.init(LLMConfig().generate_options())
    await datadist.init(None)  # type: ignore[arg-type]
    assert_type(datadist.kv_cache_manager, KvCacheManager)
    assert_type(datadist.cache_manager, CacheManager)
    assert_type(datadist.listen_address, tuple[str, int] | None)
    assert_type(datadist.counters, dict[str, int])
    result = await datadist.link_clusters([LLMClusterInfo()], timeout=3000, raise_on_error=True)
    assert_type(result, tuple[LLMStatusCode, list[LLMStatusCode]])
    await datadist.link_clusters([LLMClusterInfo()], 3000, True)  # type: ignore[call-arg]
    await datadist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:0"})
    datadist.finalize()  # type: ignore[unused-coroutine]
    async with LLMDataDist(LLMRole.DECODER, 1) as entered:
        assert_type(entered, LLMDataDist)


async def older(manager: KvCacheManager, desc: CacheDesc) -> None:
    cache = await manager.allocate_cache(desc, [CacheKey(1, 2)])
    assert_type(cache, KvCache)
    await manager.pull_cache(CacheKey(1, 2), cache, 0, size=-1, src_layer_range=range(2), timeout=50.0)
    await manager.pull_cache(CacheKeyByIdAndIndex(1, 2), cache, batch_index=1)
    await manager.pull_cache(BlocksCacheKey(1, 2), cache)  # type: ignore[arg-type]
    async with manager.pull_layers(CacheKey(1, 2), cache, tensor_num_per_layer=1) as layers:
        async for layer in layers:
            assert_type(layer, int)
    await manager.pull_layers(CacheKey(1, 2), cache)  # type: ignore[misc]
    await manager.pull_cache(CacheKey(1, 2), desc)  # type: ignore[arg-type]
    assert_type(manager.get_cache_tensors(cache), list[Tensor])
    assert_type(cache.quarantined, bool)
    assert_type(cache.per_device_tensor_addrs, list[list[int]])
    await manager.settled(cache, timeout=100)
    await manager.publish_cache(cache, [CacheKey(1, 2)], lease=1000)
    await manager.publish_cache(cache, [CacheKey(1, 2)], 1000)  # type: ignore[call-arg]
    await manager.renew_key(CacheKey(1, 2), 1000, timeout=50)
    await manager.release_key(CacheKey(1, 2))
    await manager.release_key(CacheKeyByIdAndIndex(1, 2))  # type: ignore[arg-type]
    await manager.deallocate_cache(cache)


class Computed(LayerSynchronizer):
    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return layer_index >= 0


async def transfers(manager: CacheManager, cache: Cache) -> None:
    task = manager.transfer_cache_async(cache, Computed(), [TransferConfig(2, [16, 32])], None, (0,), 4096, timeout=50)
    _ = assert_type(task, CacheTask)
    assert_type(await task, LLMStatusCode)
    assert_type(await task.synchronize(timeout_in_millis=10), LLMStatusCode)
    assert_type(await task.get_results(), list[LLMStatusCode | None])
    assert_type(task.exceptions, list[BaseException | None])
    by_key = TransferWithCacheKeyConfig(BlocksCacheKey(2), range(1), range(1))
    _ = manager.transfer_cache_async(cache, Computed(), (by_key,), [0], [0])
    _ = manager.transfer_cache_async(cache, None, [])  # type: ignore[arg-type]


async def newer(manager: CacheManager, desc: CacheDesc) -> None:
    array = np.zeros((2, 4, 16), np.float16)
    cache = await manager.register_blocks_cache(desc, [array.ctypes.data], BlocksCacheKey(1, 0), remote_accessible=True)
    assert_type(cache, Cache)
    assert_type(cache.tensor_addrs, list[int])
    await manager.pull_blocks(BlocksCacheKey(1, 0), cache, [1], (2,), traceparent="00-...")
    await manager.pull_cache(CacheKey(1, 2), cache=cache)
    await manager.register_cache(desc, cache_keys=[CacheKey(1, 2)], tensors=(array,))
    await manager.unregister_cache(cache.cache_id)
    await manager.deallocate_cache(await manager.allocate_cache(desc, allowed_clusters=[1, 2]))
    await manager.allocate_cache(desc, allowed_clusters=7)  # type: ignore[arg-type]


def errors(error: LLMException) -> None:
    assert_type(error.retry_safe, bool)
    assert_type(error.destination_unsafe, bool)
    assert_type(error.elapsed_ms, float | None)
    assert_type(error.operation, str | None)
    assert_type(error.peer, int | str | None)
    timeout: TimeoutError = LLMTimeoutError("late")
    raise timeout
