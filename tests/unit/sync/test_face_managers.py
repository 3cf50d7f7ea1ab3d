"""The blocking managers: the documented calls as written, handles that go by themselves, and threads."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpull_sync import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    LLMTimeoutError,
    MemInfo,
    Memtype,
)
from tests.duo import (
    DECODER,
    OK,
    PROMPT,
    SMALL,
    arrays,
    cluster,
    engine_of,
    fill,
    frozen,
    holds,
    keys,
    options,
    pattern,
)

BOUND = 30.0


class Pair:
    """Two blocking nodes, linked."""

    def __init__(self, transport: str = "tcp", **properties: Any) -> None:
        self.prompt = LLMDataDist(LLMRole.PROMPT, PROMPT)
        self.decoder = LLMDataDist(LLMRole.DECODER, DECODER)
        self.prompt.init(options(listen=True, transport=transport, **properties))
        self.decoder.init(options(transport=transport, **properties))
        assert self.decoder.link_clusters([cluster(PROMPT, self.prompt.listen_address)]) == (OK, [OK])

    def publish(self) -> Any:
        cache = self.prompt.kv_cache_manager.allocate_cache(SMALL, keys(SMALL))
        fill(cache)
        return cache

    def close(self) -> None:
        self.decoder.finalize()
        self.prompt.finalize()


@pytest.fixture(params=["tcp", "inproc"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.close()


@pytest.mark.smoke
def test_the_documented_calls_deliver_what_was_published(pair: Pair) -> None:
    source = pair.publish()
    kv_cache_manager = pair.decoder.kv_cache_manager
    cache = kv_cache_manager.allocate_cache(SMALL)
    assert kv_cache_manager.pull_cache(CacheKey(PROMPT, 1), cache, 0) is None  # type: ignore[func-returns-value]
    assert holds(cache, entry=0, source=1)
    kv_cache_manager.pull_cache(CacheKey(PROMPT, 2), cache, 1, src_layer_range=range(1), dst_layer_range=range(1, 2))
    assert [array[1, 0] for array in arrays(cache)] == [0, 0, pattern(0, 2), pattern(1, 2)]
    kv_cache_manager.pull_cache(CacheKey(PROMPT, 3), cache, 2, src_cache_offset=0, dst_cache_offset=0)
    assert holds(cache, entry=2, source=3)
    kv_cache_manager.copy_cache(cache, cache, 3, 2)
    assert holds(cache, entry=3, source=3)
    kv_cache_manager.settled(cache, 1000)
    kv_cache_manager.deallocate_cache(cache)
    pair.prompt.kv_cache_manager.deallocate_cache(source)
    pair.prompt.kv_cache_manager.remove_cache_key(CacheKey(PROMPT, 0))


def test_blocks_of_memory_of_its_own(pair: Pair) -> None:
    desc = CacheDesc(2, [8, 512], DataType.DT_UINT8)
    memory = np.zeros((2, 2, 8, 512), np.uint8)
    memory[0] = np.arange(8, dtype=np.uint8)[None, :, None] + 1
    source, target = [
        node.cache_manager.register_blocks_cache(desc, [tensor.ctypes.data for tensor in array], BlocksCacheKey(number))
        for node, array, number in ((pair.prompt, memory[0], PROMPT), (pair.decoder, memory[1], DECODER))
    ]
    pair.decoder.cache_manager.pull_blocks(BlocksCacheKey(PROMPT), target, [1, 2], [6, 0])
    assert memory[1, :, :, 0].tolist() == [[3, 0, 0, 0, 0, 0, 2, 0]] * 2
    pair.decoder.cache_manager.unregister_cache(target.cache_id)
    pair.prompt.cache_manager.unregister_cache(source.cache_id)


def test_a_timeout_leaves_the_link_usable(pair: Pair) -> None:
    source = pair.publish()
    manager = pair.decoder.kv_cache_manager
    cache = manager.allocate_cache(SMALL)
    with frozen(pair.prompt), pytest.raises(LLMTimeoutError) as caught:
        manager.pull_cache(CacheKey(PROMPT, 1), cache, timeout=50)
    assert caught.value.status_code == LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
    manager.pull_cache(CacheKey(PROMPT, 1), cache)
    assert holds(cache, entry=0, source=1)
    manager.deallocate_cache(cache)
    pair.prompt.kv_cache_manager.deallocate_cache(source)


def test_threads_on_one_link_wait_for_each_other_and_get_their_own_bytes(pair: Pair) -> None:
    source = pair.publish()
    manager = pair.decoder.kv_cache_manager
    wrong: list[Any] = []

    def work(entry: int) -> None:
        cache = manager.allocate_cache(SMALL)
        for _ in range(10):
            for array in arrays(cache):
                array[:] = 0
            manager.pull_cache(CacheKeyByIdAndIndex(PROMPT, source.cache_id, entry), cache, entry, src_cache_offset=0)
            if not holds(cache, entry=entry, source=entry):
                wrong.append(entry)
        manager.deallocate_cache(cache)

    threads = [threading.Thread(target=work, args=(number % 4,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND)
    assert wrong == []
    assert pair.decoder.counters["pulls_finished"] == 160


# -- handles that are dropped ------------------------------------------------------------------------------------------


def test_a_dropped_cache_gives_its_memory_back_in_time_for_the_next() -> None:
    made = LLMDataDist(LLMRole.DECODER, DECODER)
    made.init(options(mem_pool_cfg=f'{{"memory_size": {SMALL.size * SMALL.num_tensors}}}'))
    manager = made.kv_cache_manager
    for _ in range(3):
        cache = manager.allocate_cache(SMALL)  # the pool has room for one
        with pytest.raises(LLMException) as caught:
            manager.allocate_cache(SMALL)
        assert caught.value.status_code == LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
        del cache
        gc.collect()
    manager.deallocate_cache(manager.allocate_cache(SMALL))
    made.finalize()


def test_a_dropped_cache_is_gone_for_peers_unless_keys_keep_it(pair: Pair) -> None:
    plain, keyed = pair.prompt.kv_cache_manager.allocate_cache(SMALL), pair.publish()
    numbers = plain.cache_id, keyed.cache_id
    del plain, keyed
    gc.collect()
    manager = pair.decoder.kv_cache_manager
    cache = manager.allocate_cache(SMALL)
    with pytest.raises(LLMException) as caught:
        manager.pull_cache(CacheKeyByIdAndIndex(PROMPT, numbers[0], 0), cache)
    assert caught.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    manager.pull_cache(CacheKeyByIdAndIndex(PROMPT, numbers[1], 2), cache)
    assert holds(cache, entry=0, source=2)
    manager.deallocate_cache(cache)


def test_dropping_never_waits_for_the_core() -> None:
    made = LLMDataDist(LLMRole.DECODER, DECODER)
    made.init(options())
    cache: Any = made.kv_cache_manager.allocate_cache(SMALL)
    with frozen(made):
        began = time.monotonic()
        del cache
        gc.collect()
        assert time.monotonic() - began < BOUND / 2
    assert engine_of(made).registry.local(1) is not None
    made.kv_cache_manager.deallocate_cache(made.kv_cache_manager.allocate_cache(SMALL))
    assert engine_of(made).registry.local(1) is None
    made.finalize()


def test_a_cache_dropped_after_the_end_is_nobodys_business() -> None:
    made = LLMDataDist(LLMRole.DECODER, DECODER)
    made.init(options())
    cache = made.kv_cache_manager.allocate_cache(SMALL)
    made.finalize()
    made.init(options())
    later = made.kv_cache_manager.allocate_cache(SMALL)
    assert later.cache_id == cache.cache_id
    del cache
    gc.collect()
    made.kv_cache_manager.copy_cache(later, later, 1, 0)  # it is not the one that was dropped
    made.kv_cache_manager.deallocate_cache(later)
    made.finalize()


# -- what is reserved --------------------------------------------------------------------------------------------------


def test_what_is_reserved_never_seems_to_succeed() -> None:
    with LLMDataDist(LLMRole.PROMPT, PROMPT) as made:
        made.init(options())
        with pytest.raises(LLMException, match="remap_registered_memory is not available") as caught:
            made.cache_manager.remap_registered_memory(MemInfo(Memtype.MEM_TYPE_DEVICE, 4096, 64))
        assert caught.value.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
