"""The flows of the samples that pull through the newer manager: whole entries, blocks, an entry into blocks, and blocks
of several prompt nodes by several decoder nodes. See `samples_rig`.
"""

from __future__ import annotations

import ipaddress

from kvpull_sync import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from tests.integration.peers.samples_rig import (
    Rig,
    at,
    barrier,
    cluster_info,
    init,
    known,
    link,
    link_clusters,
    main,
    moved,
    refused,
    tensors,
    unlink_clusters,
)

PROMPT, DECODER = 1, 2
ENTRIES = CacheDesc(num_tensors=4, shape=[2, 1024 * 1024], data_type=DataType.DT_FLOAT16, placement=Placement.DEVICE)
BLOCKS = CacheDesc(num_tensors=1, shape=[2, 1024 * 1024], data_type=DataType.DT_FLOAT, placement=Placement.DEVICE)
HOST_BLOCKS = CacheDesc(num_tensors=1, shape=[2, 1024 * 1024], data_type=DataType.DT_FLOAT, placement=Placement.HOST)
FEW = CacheDesc(num_tensors=1, shape=[3, 10], data_type=DataType.DT_FLOAT, placement=Placement.DEVICE)
POOL = '{"memory_size": 1073741824}'
KEYS = [CacheKey(prompt_cluster_id=PROMPT, req_id=request, model_id=0) for request in range(2)]


# -- whole entries: allocated from a pool, after linking by rank table -------------------------------------------------


def pull_cache_prompt(rig: Rig) -> None:
    datadist = init(rig, LLMRole.PROMPT, PROMPT, enable_cache_manager=True, mem_pool_cfg=POOL)
    comm_id = link(rig, datadist)
    cache_manager = datadist.cache_manager
    cache = cache_manager.allocate_cache(ENTRIES, KEYS)
    at(rig, ENTRIES, cache.tensor_addrs).fill(PROMPT)
    barrier()  # prepared
    barrier()  # pulled
    for key in KEYS:
        cache_manager.remove_cache_key(key)  # nothing to do: the pulls have used them up
    cache_manager.deallocate_cache(cache)
    datadist.unlink(comm_id)
    datadist.finalize()


def pull_cache_decoder(rig: Rig) -> None:
    datadist = init(rig, LLMRole.DECODER, DECODER, enable_cache_manager=True, mem_pool_cfg=POOL)
    comm_id = link(rig, datadist)
    cache_manager = datadist.cache_manager
    cache = cache_manager.allocate_cache(ENTRIES)
    held = at(rig, ENTRIES, cache.tensor_addrs).fill(DECODER)
    barrier()  # prepared
    cache_manager.pull_cache(KEYS[0], cache, batch_index=0)
    theirs, before = known(PROMPT, ENTRIES), known(DECODER, ENTRIES)
    held.check(moved(before, theirs, {0: 0}))
    cache_manager.pull_cache(KEYS[1], cache, batch_index=1)
    held.check(theirs)
    refused(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, cache_manager.pull_cache, KEYS[0], cache, batch_index=0)
    held.check(theirs)
    barrier()  # pulled
    cache_manager.deallocate_cache(cache)
    datadist.unlink(comm_id)
    datadist.finalize()


# -- blocks: the caller's memory, registered before linking by rank table ----------------------------------------------


def pull_blocks_prompt(rig: Rig) -> None:
    datadist = init(rig, LLMRole.PROMPT, PROMPT, enable_cache_manager=True)
    ours = tensors(rig, BLOCKS).fill(PROMPT)
    datadist.cache_manager.register_blocks_cache(BLOCKS, ours.addresses, BlocksCacheKey(PROMPT, 0))
    comm_id = link(rig, datadist)
    barrier()  # prepared
    barrier()  # pulled
    ours.check(known(PROMPT, BLOCKS))
    datadist.unlink(comm_id)
    datadist.finalize()


def pull_blocks_decoder(rig: Rig) -> None:
    datadist = init(rig, LLMRole.DECODER, DECODER, enable_cache_manager=True)
    held = tensors(rig, BLOCKS).fill(DECODER)
    cache_manager = datadist.cache_manager
    cache = cache_manager.register_blocks_cache(BLOCKS, held.addresses)
    comm_id = link(rig, datadist)
    barrier()  # prepared
    cache_manager.pull_blocks(BlocksCacheKey(PROMPT, 0), cache, src_blocks=[0, 1], dst_blocks=[0, 1])
    held.check(known(PROMPT, BLOCKS))
    out_and_in(rig, datadist, cache)
    held.check(known(PROMPT, BLOCKS))
    barrier()  # pulled
    datadist.unlink(comm_id)
    datadist.finalize()


def out_and_in(rig: Rig, datadist: LLMDataDist, cache: Cache) -> None:
    """Both blocks are swapped out to plain memory, and back."""
    host = tensors(rig, HOST_BLOCKS).fill(77)
    cpu_cache = Cache.create_cpu_cache(HOST_BLOCKS, host.addresses)
    datadist.cache_manager.swap_blocks(cache, cpu_cache, {0: 0, 1: 1})
    host.check(known(PROMPT, BLOCKS))
    datadist.cache_manager.swap_blocks(cpu_cache, cache, {0: 0, 1: 1})


# -- an entry into blocks ----------------------------------------------------------------------------------------------


def cache_to_blocks_prompt(rig: Rig) -> None:
    datadist = init(rig, LLMRole.PROMPT, PROMPT, enable_cache_manager=True, mem_pool_cfg=POOL)
    comm_id = link(rig, datadist)
    cache_manager = datadist.cache_manager
    cache = cache_manager.allocate_cache(ENTRIES, KEYS[:1])
    at(rig, ENTRIES, cache.tensor_addrs).fill(PROMPT)
    barrier()  # prepared
    barrier()  # pulled
    datadist.unlink(comm_id)
    barrier()  # unlinked
    cache_manager.remove_cache_key(KEYS[0])
    cache_manager.deallocate_cache(cache)
    datadist.finalize()


def cache_to_blocks_decoder(rig: Rig) -> None:
    datadist = init(rig, LLMRole.DECODER, DECODER, enable_cache_manager=True, mem_pool_cfg=POOL)
    held = tensors(rig, ENTRIES).fill(DECODER)
    cache_manager = datadist.cache_manager
    cache = cache_manager.register_blocks_cache(ENTRIES, held.addresses)
    comm_id = link(rig, datadist)
    barrier()  # prepared
    cache_manager.pull_blocks(KEYS[0], cache, src_blocks=[], dst_blocks=[0])
    held.check(moved(known(DECODER, ENTRIES), known(PROMPT, ENTRIES), {0: 0}))
    barrier()  # pulled
    datadist.unlink(comm_id)  # the peer's own may have come first
    barrier()  # unlinked
    datadist.finalize()


# -- several of each ---------------------------------------------------------------------------------------------------


def number_of(address: str) -> int:
    """The cluster id that the sample makes of an address: 32 bits of it, then 16 of the port."""
    ip, port = address.split(":")
    return int(ipaddress.IPv4Address(ip)) << 16 | int(port)


def xpyd_prompt(rig: Rig) -> None:
    cluster_id = number_of(rig.here)
    datadist = init(rig, LLMRole.PROMPT, cluster_id, local_comm_res="", listen_ip_info=rig.here)
    ours = tensors(rig, FEW).fill(cluster_id)
    cache_manager = datadist.cache_manager
    cache = cache_manager.register_blocks_cache(FEW, ours.addresses, BlocksCacheKey(cluster_id, 0))
    barrier()  # prepared
    barrier()  # pulled
    ours.check(known(cluster_id, FEW))
    cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


def xpyd_decoder(rig: Rig) -> None:
    cluster_id = number_of(rig.here)
    datadist = init(rig, LLMRole.DECODER, cluster_id, local_comm_res="")
    held = tensors(rig, FEW).fill(cluster_id)
    cache_manager = datadist.cache_manager
    cache = cache_manager.register_blocks_cache(FEW, held.addresses, BlocksCacheKey(cluster_id, 0))
    barrier()  # prepared
    local = rig.here.split(":")[0] + ":0"
    clusters = [cluster_info(number_of(remote), local=local, remote=remote) for remote in rig.there]
    link_clusters(datadist, *clusters)
    expected = known(cluster_id, FEW)
    for remote in rig.there:
        key = BlocksCacheKey(number_of(remote), 0)
        cache_manager.pull_blocks(key, cache, src_blocks=[0, 1], dst_blocks=[0, 2])
        expected = moved(expected, known(number_of(remote), FEW), {0: 0, 1: 2})
        held.check(expected)
    unlink_clusters(datadist, *clusters)
    cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()
    barrier()  # pulled


if __name__ == "__main__":
    main(
        {
            ("pull_cache", "p"): pull_cache_prompt,
            ("pull_cache", "d"): pull_cache_decoder,
            ("pull_blocks", "p"): pull_blocks_prompt,
            ("pull_blocks", "d"): pull_blocks_decoder,
            ("cache_to_blocks", "p"): cache_to_blocks_prompt,
            ("cache_to_blocks", "d"): cache_to_blocks_decoder,
            ("xpyd", "p"): xpyd_prompt,
            ("xpyd", "d"): xpyd_decoder,
        }
    )
