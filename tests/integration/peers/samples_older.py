"""The flows of the samples and the manual for the older manager: whole entries, blocks, layers computed one after
another, and a switch of roles. Both nodes have the same cluster id, as there. See `samples_rig`.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from kvpull_sync import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    DataType,
    KvCache,
    LayerSynchronizer,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferConfig,
)
from tests.integration.peers.samples_rig import (
    PATIENCE_S,
    Rig,
    Tensors,
    at,
    barrier,
    cluster_info,
    init,
    known,
    link_clusters,
    main,
    moved,
    refused,
    tensors,
    unlink_clusters,
)

BOTH = 0
PROMPT_SEED, DECODER_SEED = 1, 2
ENTRIES = CacheDesc(num_tensors=4, shape=[4, 4, 8], data_type=DataType.DT_FLOAT16)
BLOCKS = CacheDesc(num_tensors=4, shape=[10, 128], data_type=DataType.DT_FLOAT16)
HOST_BLOCKS = CacheDesc(num_tensors=4, shape=[10, 128], data_type=DataType.DT_FLOAT16, placement=Placement.HOST)
KEYS = [CacheKey(prompt_cluster_id=BOTH, req_id=request, model_id=0) for request in range(4)]


def prompt(rig: Rig, **properties: Any) -> LLMDataDist:
    return init(rig, LLMRole.PROMPT, BOTH, listen_ip_info=rig.here, **properties)


def decoder(rig: Rig, **properties: Any) -> LLMDataDist:
    return init(rig, LLMRole.DECODER, BOTH, **properties)


def link(rig: Rig, datadist: LLMDataDist) -> Any:
    cluster = cluster_info(BOTH, local=rig.here.split(":")[0] + ":0", remote=rig.there[0])
    link_clusters(datadist, cluster)
    assert datadist.check_link_status(remote_cluster_id=BOTH) is None  # type: ignore[func-returns-value]
    return cluster


def seen(rig: Rig, cache: KvCache, seed: int) -> Tensors:
    return at(rig, cache.cache_desc, cache.per_device_tensor_addrs[0]).fill(seed)


# -- whole entries -----------------------------------------------------------------------------------------------------


def pull_cache_prompt(rig: Rig) -> None:
    datadist = prompt(rig, ge_options={"ge.flowGraphMemMaxSize": "1073741824"})
    kv_cache_manager = datadist.kv_cache_manager
    kv_cache = kv_cache_manager.allocate_cache(ENTRIES, KEYS)
    seen(rig, kv_cache, PROMPT_SEED)
    barrier()  # computed
    kv_cache_manager.deallocate_cache(kv_cache)  # lives on until its keys are gone
    barrier()  # deallocated
    barrier()  # pulled
    kv_cache_manager.remove_cache_key(KEYS[0])
    kv_cache_manager.remove_cache_key(KEYS[2])
    barrier()  # removed
    barrier()  # unlinked
    datadist.finalize()


def pull_cache_decoder(rig: Rig) -> None:
    datadist = decoder(rig, ge_options={"ge.flowGraphMemMaxSize": "1073741824"})
    barrier()  # computed
    cluster = link(rig, datadist)
    kv_cache_manager = datadist.kv_cache_manager
    kv_cache = kv_cache_manager.allocate_cache(ENTRIES)
    held = seen(rig, kv_cache, DECODER_SEED)
    barrier()  # deallocated
    kv_cache_manager.pull_cache(KEYS[1], kv_cache, batch_index=1)
    kv_cache_manager.pull_cache(KEYS[3], kv_cache, batch_index=0)
    expected = moved(known(DECODER_SEED, ENTRIES), known(PROMPT_SEED, ENTRIES), {1: 1, 3: 0})
    held.check(expected)
    barrier()  # pulled
    barrier()  # removed
    for key in KEYS:  # pulled, or removed
        refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, kv_cache_manager.pull_cache, key, kv_cache, batch_index=2)
    held.check(expected)
    kv_cache_manager.deallocate_cache(kv_cache)
    unlink_clusters(datadist, cluster)
    barrier()  # unlinked
    datadist.finalize()


# -- blocks ------------------------------------------------------------------------------------------------------------


def pull_blocks_prompt(rig: Rig) -> None:
    datadist = prompt(rig)
    kv_cache_manager = datadist.kv_cache_manager
    kv_cache = kv_cache_manager.allocate_blocks_cache(BLOCKS, BlocksCacheKey(prompt_cluster_id=BOTH, model_id=0))
    ours = seen(rig, kv_cache, PROMPT_SEED)
    barrier()  # computed
    barrier()  # pulled
    ours.check(known(PROMPT_SEED, BLOCKS))
    kv_cache_manager.deallocate_cache(kv_cache)
    barrier()  # unlinked
    datadist.finalize()


def pull_blocks_decoder(rig: Rig) -> None:
    datadist = decoder(rig)
    barrier()  # computed
    cluster = link(rig, datadist)
    kv_cache_manager = datadist.kv_cache_manager
    kv_cache = kv_cache_manager.allocate_blocks_cache(BLOCKS)
    held = seen(rig, kv_cache, DECODER_SEED)
    kv_cache_manager.pull_blocks(BlocksCacheKey(prompt_cluster_id=BOTH, model_id=0), kv_cache, [0, 1], [2, 3])
    expected = moved(known(DECODER_SEED, BLOCKS), known(PROMPT_SEED, BLOCKS), {0: 2, 1: 3})
    held.check(expected)
    kv_cache_manager.copy_blocks(kv_cache, {2: [0, 1]})
    for target in (0, 1):
        expected = moved(expected, expected, {2: target})
    held.check(expected)
    values = kv_cache_manager.get_cache_tensors(kv_cache, 0)[0].numpy()
    assert values[:2].tobytes() == expected[0][:2].tobytes()
    host = tensors(rig, HOST_BLOCKS).fill(77)
    cpu_cache = KvCache.create_cpu_cache(HOST_BLOCKS, host.addresses)
    kv_cache_manager.swap_blocks(kv_cache, cpu_cache, {0: 0, 1: 1})
    host.check(moved(known(77, HOST_BLOCKS), expected, {0: 0, 1: 1}))
    kv_cache_manager.swap_blocks(cpu_cache, kv_cache, {0: 0, 1: 1})
    held.check(expected)
    kv_cache_manager.deallocate_cache(kv_cache)
    barrier()  # pulled
    unlink_clusters(datadist, cluster)
    barrier()  # unlinked
    datadist.finalize()


# -- layers, each computed while the one before it travels -------------------------------------------------------------


class Computed(LayerSynchronizer):
    """A layer may go when its event is set."""

    def __init__(self, layers: int) -> None:
        self.events = [threading.Event() for _ in range(layers)]

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return self.events[layer_index].wait(PATIENCE_S)


def transfer_prompt(rig: Rig) -> None:
    """An entry into an entry, then blocks into blocks, by the addresses that the decoder node has told."""
    datadist = prompt(rig)
    manager = datadist.kv_cache_manager
    entries, blocks = manager.allocate_cache(ENTRIES), manager.allocate_blocks_cache(BLOCKS)
    barrier()  # allocated, and listening
    (_, told) = barrier()  # linked
    for kv_cache, addresses, lists in ((entries, told[0], ()), (blocks, told[1], ([0, 1], [2, 3]))):
        desc = kv_cache.cache_desc
        ours = seen(rig, kv_cache, 77)
        layers = Computed(desc.num_tensors // 2)
        cache_task = manager.transfer_cache_async(kv_cache, layers, [TransferConfig(BOTH, addresses)], *lists)
        for layer, event in enumerate(layers.events):
            for index in (2 * layer, 2 * layer + 1):
                ours.rows[index][...] = known(PROMPT_SEED, desc)[index]
            event.set()
            time.sleep(0.02)  # so that the transfer waits for the next
        assert cache_task.synchronize() == LLMStatusCode.LLM_SUCCESS
        assert cache_task.get_results() == [LLMStatusCode.LLM_SUCCESS]
    barrier()  # transferred
    barrier()  # unlinked
    manager.deallocate_cache(entries)
    manager.deallocate_cache(blocks)
    datadist.finalize()


def transfer_decoder(rig: Rig) -> None:
    datadist = decoder(rig)
    manager = datadist.kv_cache_manager
    entries, blocks = manager.allocate_cache(ENTRIES), manager.allocate_blocks_cache(BLOCKS)
    held = [seen(rig, kv_cache, DECODER_SEED) for kv_cache in (entries, blocks)]
    barrier()  # allocated, and listening
    cluster = link(rig, datadist)
    barrier([kv_cache.per_device_tensor_addrs[0] for kv_cache in (entries, blocks)])  # linked
    barrier()  # transferred
    for view, rows in zip(held, ({0: 0}, {0: 2, 1: 3}), strict=True):
        view.check(moved(known(DECODER_SEED, view.desc), known(PROMPT_SEED, view.desc), rows))
    unlink_clusters(datadist, cluster)
    barrier()  # unlinked
    manager.deallocate_cache(entries)
    manager.deallocate_cache(blocks)
    datadist.finalize()


# -- roles -------------------------------------------------------------------------------------------------------------


def switch_role_prompt(rig: Rig) -> None:
    datadist = prompt(rig, enable_switch_role=True)
    manager = datadist.kv_cache_manager
    kv_cache = manager.allocate_cache(ENTRIES, KEYS[:1])
    held = seen(rig, kv_cache, PROMPT_SEED)
    barrier()  # computed
    barrier()  # pulled and unlinked
    refused(LLMStatusCode.LLM_PARAM_INVALID, datadist.switch_role, LLMRole.PROMPT)  # what it is already
    datadist.switch_role(LLMRole.DECODER)
    refused(LLMStatusCode.LLM_PARAM_INVALID, manager.allocate_cache, ENTRIES, KEYS[:1])  # a decoder node has no keys
    barrier()  # both have switched
    cluster = link(rig, datadist)
    manager.pull_cache(KEYS[3], kv_cache, batch_index=2)
    held.check(moved(known(PROMPT_SEED, ENTRIES), known(DECODER_SEED, ENTRIES), {0: 2}))
    unlink_clusters(datadist, cluster)
    barrier()  # pulled and unlinked again
    manager.deallocate_cache(kv_cache)
    datadist.finalize()


def switch_role_decoder(rig: Rig) -> None:
    datadist = decoder(rig, enable_switch_role=True)
    manager = datadist.kv_cache_manager
    barrier()  # computed
    cluster = link(rig, datadist)
    kv_cache = manager.allocate_cache(ENTRIES)
    held = seen(rig, kv_cache, 77)
    manager.pull_cache(KEYS[0], kv_cache, batch_index=3)
    held.check(moved(known(77, ENTRIES), known(PROMPT_SEED, ENTRIES), {0: 3}))
    unlink_clusters(datadist, cluster)
    barrier()  # pulled and unlinked
    refused(LLMStatusCode.LLM_PARAM_INVALID, datadist.switch_role, LLMRole.PROMPT)  # without an address to listen on
    datadist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": rig.here})
    offered = manager.allocate_cache(ENTRIES, [KEYS[3]])
    seen(rig, offered, DECODER_SEED)
    refused(LLMStatusCode.LLM_PARAM_INVALID, manager.pull_cache, KEYS[0], kv_cache)  # a prompt node does not pull
    barrier()  # both have switched
    barrier()  # pulled and unlinked again
    for cache in (kv_cache, offered):
        manager.deallocate_cache(cache)
    datadist.finalize()


if __name__ == "__main__":
    main(
        {
            ("pull_cache", "p"): pull_cache_prompt,
            ("pull_cache", "d"): pull_cache_decoder,
            ("pull_blocks", "p"): pull_blocks_prompt,
            ("pull_blocks", "d"): pull_blocks_decoder,
            ("transfer", "p"): transfer_prompt,
            ("transfer", "d"): transfer_decoder,
            ("switch_role", "p"): switch_role_prompt,
            ("switch_role", "d"): switch_role_decoder,
        }
    )
