"""What type checkers see of the blocking API. Checked by `make type` and never run; see `async_api.py`."""

from __future__ import annotations

from typing_extensions import assert_type

import kvpull_async
from kvpull_sync import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheManager,
    CacheTask,
    KvCache,
    KvCacheManager,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Tensor,
    TransferConfig,
    install_as_llm_datadist,
)


def life(datadist: LLMDataDist) -> None:
    install_as_llm_datadist()
    datadist.init(LLMConfig().generate_options())
    datadist.init([])  # type: ignore[arg-type]
    assert_type(datadist.kv_cache_manager, KvCacheManager)
    assert_type(datadist.cache_manager, CacheManager)
    assert_type(datadist.listen_address, tuple[str, int] | None)
    result = datadist.link_clusters([LLMClusterInfo()], timeout=3000)
    assert_type(result, tuple[LLMStatusCode, list[LLMStatusCode]])
    assert_type(datadist.unlink_clusters([], 3000, force=True)[0], LLMStatusCode)
    with LLMDataDist(LLMRole.DECODER, 1) as entered:
        assert_type(entered, LLMDataDist)


def older(manager: KvCacheManager, desc: CacheDesc) -> None:
    cache = manager.allocate_cache(desc, cache_keys=[CacheKey(1, 2)])
    assert_type(cache, KvCache)
    manager.pull_cache(CacheKey(1, 2), cache, 0, -1, src_cache_offset=0, dst_cache_offset=0)
    manager.pull_cache(CacheKeyByIdAndIndex(1, 2, 0), kv_cache=cache)
    manager.pull_cache("key", cache)  # type: ignore[arg-type]
    with manager.pull_layers(CacheKey(1, 2), cache, timeout=50) as layers:
        assert_type(list(layers), list[int])
        layers.close()
    assert_type(manager.get_cache_tensors(cache, 1), list[Tensor])
    assert_type(manager.is_initialized(), bool)
    manager.copy_cache(cache, cache, 1, 0)
    manager.publish_cache(cache, [CacheKey(1, 2)], lease=None)
    manager.renew_key(CacheKey(1, 2), lease=1000)
    manager.renew_key(CacheKey(1, 2))  # type: ignore[call-arg]
    manager.release_key(CacheKey(1, 2), timeout=50)
    manager.deallocate_cache(cache)


class Computed(LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return layer_index >= 0


def transfers(manager: KvCacheManager, cache: KvCache) -> None:
    task = manager.transfer_cache_async(cache, Computed(), [TransferConfig(2, [16, 32])])
    assert_type(task, CacheTask)
    assert_type(task.synchronize(10), LLMStatusCode)
    assert_type(task.get_results(timeout_in_millis=None), list[LLMStatusCode | None])
    assert_type(task.exceptions, list[BaseException | None])


def newer(manager: CacheManager, desc: CacheDesc) -> None:
    cache = manager.register_cache(desc, [4096], [CacheKey(1, 2)], remote_accessible=None)
    assert_type(cache, Cache)
    manager.register_cache(desc, (4096,))  # type: ignore[arg-type]
    manager.register_blocks_cache(desc, blocks_cache_key=BlocksCacheKey(1, 0), tensors=[bytearray(8)])
    manager.register_cache(desc, tensors=bytearray(8))  # type: ignore[arg-type]
    manager.register_cache(desc, [4096], allowed_clusters={1})
    manager.pull_blocks(BlocksCacheKey(1, 0), cache, [0], [1])
    manager.pull_cache(CacheKey(1, 2), cache)
    manager.settled(cache)
    manager.unregister_cache(cache.cache_id)


def the_same_values(error: LLMException, desc: CacheDesc) -> None:
    shared_error: kvpull_async.LLMException = error
    shared_desc: kvpull_async.CacheDesc = desc
    assert_type(shared_error.retry_safe, bool)
    assert_type(shared_desc.size, int)
