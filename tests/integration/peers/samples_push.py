"""The flows of the samples that push through the newer manager, in one direction, in both at once, after a switch of
roles, and layer by layer. See `samples_rig`.
"""

from __future__ import annotations

import time
from typing import Any

from kvpull_sync import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMConfig,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferWithCacheKeyConfig,
)
from tests.integration.peers.samples_rig import (
    Rig,
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

PROMPT, DECODER = 0, 1
DESC = CacheDesc(num_tensors=2, shape=[3, 10], data_type=DataType.DT_FLOAT, placement=Placement.DEVICE)
OURS = {role: known(role, DESC) for role in (PROMPT, DECODER)}


def node(rig: Rig, cluster_id: int, *, listen: bool = True) -> Any:
    role = LLMRole.PROMPT if cluster_id == PROMPT else LLMRole.DECODER
    return init(rig, role, cluster_id, local_comm_res="", **({"listen_ip_info": rig.here} if listen else {}))


def peer(rig: Rig, cluster_id: int) -> Any:
    return cluster_info(cluster_id, local=rig.here, remote=rig.there[0])


# -- push a batch entry ------------------------------------------------------------------------------------------------


def push_cache_prompt(rig: Rig) -> None:
    datadist = node(rig, PROMPT)
    held = tensors(rig, DESC).fill(PROMPT)
    cache = datadist.cache_manager.register_cache(DESC, held.addresses)
    barrier()  # registered
    barrier()  # pushed
    held.check(moved(OURS[PROMPT], OURS[DECODER], {0: 0}))
    barrier()  # unlinked
    datadist.cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


def push_cache_decoder(rig: Rig) -> None:
    datadist = node(rig, DECODER)
    ours = tensors(rig, DESC).fill(DECODER)
    cache_manager = datadist.cache_manager
    cache = cache_manager.register_cache(DESC, ours.addresses)
    barrier()  # registered
    link_clusters(datadist, peer(rig, PROMPT))
    cache_manager.push_cache(
        CacheKeyByIdAndIndex(cluster_id=PROMPT, cache_id=1, batch_index=0), cache, src_batch_index=0
    )
    ours.check(OURS[DECODER])
    barrier()  # pushed
    unlink_clusters(datadist, cluster_info(PROMPT, remote=rig.there[0]))
    barrier()  # unlinked
    cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


# -- push blocks -------------------------------------------------------------------------------------------------------


def push_blocks_prompt(rig: Rig) -> None:
    datadist = node(rig, PROMPT)
    held = tensors(rig, DESC).fill(PROMPT)
    cache_manager = datadist.cache_manager
    cache = cache_manager.register_blocks_cache(DESC, held.addresses, BlocksCacheKey(PROMPT, 0))
    barrier()  # registered
    barrier()  # pushed
    held.check(moved(OURS[PROMPT], OURS[DECODER], {0: 0, 1: 2}))
    unlink_clusters(datadist, cluster_info(DECODER), force=True)
    cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


def push_blocks_decoder(rig: Rig) -> None:
    datadist = node(rig, DECODER)
    ours = tensors(rig, DESC).fill(DECODER)
    cache_manager = datadist.cache_manager
    cache = cache_manager.register_blocks_cache(DESC, ours.addresses, BlocksCacheKey(DECODER, 0))
    barrier()  # registered
    link_clusters(datadist, peer(rig, PROMPT))
    cache_manager.push_blocks(BlocksCacheKey(PROMPT, 0), cache, src_blocks=[0, 1], dst_blocks=[0, 2])
    ours.check(OURS[DECODER])
    barrier()  # pushed
    unlink_clusters(datadist, cluster_info(PROMPT), force=True)
    cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


# -- both link, one pulls while the other pushes -----------------------------------------------------------------------


def both_ways_prompt(rig: Rig) -> None:
    datadist = node(rig, PROMPT)
    held = tensors(rig, DESC).fill(PROMPT)
    cache_manager = datadist.cache_manager
    cache = cache_manager.register_blocks_cache(DESC, held.addresses, BlocksCacheKey(PROMPT, 0))
    barrier()  # registered
    link_clusters(datadist, peer(rig, DECODER))
    cache_manager.pull_blocks(BlocksCacheKey(DECODER, 0), cache, src_blocks=[2], dst_blocks=[2])
    barrier()  # pulled and pushed
    held.check(OURS[DECODER])
    unlink_clusters(datadist, cluster_info(DECODER))
    barrier()  # unlinked
    cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


def both_ways_decoder(rig: Rig) -> None:
    datadist = node(rig, DECODER)
    ours = tensors(rig, DESC).fill(DECODER)
    cache_manager = datadist.cache_manager
    cache = cache_manager.register_blocks_cache(DESC, ours.addresses, BlocksCacheKey(DECODER, 0))
    barrier()  # registered
    time.sleep(rig.late_s)
    link_clusters(datadist, peer(rig, PROMPT))
    cache_manager.push_blocks(BlocksCacheKey(PROMPT, 0), cache, src_blocks=[0, 1], dst_blocks=[0, 1])
    barrier()  # pulled and pushed
    ours.check(OURS[DECODER])
    unlink_clusters(datadist, cluster_info(PROMPT))
    barrier()  # unlinked
    cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


# -- roles -------------------------------------------------------------------------------------------------------------


def switch_role_prompt(rig: Rig) -> None:
    datadist = node(rig, PROMPT)
    held = tensors(rig, DESC).fill(PROMPT)
    cache_manager = datadist.cache_manager
    cache = cache_manager.register_blocks_cache(DESC, held.addresses, BlocksCacheKey(PROMPT, 0))
    barrier()  # registered
    barrier()  # linked, to refuse a switch
    refused(LLMStatusCode.LLM_EXIST_LINK, datadist.switch_role, LLMRole.DECODER)
    barrier()  # refused
    barrier()  # pulled and unlinked
    datadist.switch_role(LLMRole.DECODER)
    barrier()  # the prompt node is a decoder node, and listens no more
    barrier()  # the decoder node is a prompt node, and listens
    link_clusters(datadist, peer(rig, DECODER))
    barrier()  # linked
    barrier()  # pushed
    held.check(moved(OURS[DECODER], OURS[PROMPT], {0: 0, 1: 2}))
    unlink_clusters(datadist, cluster_info(DECODER), force=True)
    cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


def switch_role_decoder(rig: Rig) -> None:
    datadist = node(rig, DECODER, listen=False)
    held = tensors(rig, DESC).fill(DECODER)
    cache_manager = datadist.cache_manager
    cache = cache_manager.register_blocks_cache(DESC, held.addresses, BlocksCacheKey(DECODER, 0))
    barrier()  # registered
    link_clusters(datadist, peer(rig, PROMPT))
    barrier()  # linked, to refuse a switch
    barrier()  # refused
    cache_manager.pull_blocks(BlocksCacheKey(PROMPT, 0), cache, src_blocks=[0, 1], dst_blocks=[0, 2])
    expected = moved(OURS[DECODER], OURS[PROMPT], {0: 0, 1: 2})
    held.check(expected)
    unlink_clusters(datadist, cluster_info(PROMPT, remote=rig.there[0]))
    barrier()  # pulled and unlinked
    barrier()  # the prompt node is a decoder node, and listens no more
    ret, _ = datadist.link_clusters([peer(rig, PROMPT)], 2000)
    assert ret == LLMStatusCode.LLM_LINK_FAILED, ret
    llm_config = LLMConfig()
    llm_config.listen_ip_info = rig.here
    datadist.switch_role(LLMRole.PROMPT, llm_config.generate_options())
    barrier()  # the decoder node is a prompt node, and listens
    barrier()  # linked
    cache_manager.push_blocks(
        BlocksCacheKey(PROMPT, 0),
        cache,
        src_blocks=[0, 1, 2],
        dst_blocks=[0, 1, 2],
        src_layer_range=range(0, 2),  # noqa: PIE808  (as it is written in the field)
        dst_layer_range=range(0, 2),  # noqa: PIE808
        tensor_num_per_layer=1,
    )
    held.check(expected)
    barrier()  # pushed
    unlink_clusters(datadist, cluster_info(PROMPT), force=True)
    cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


# -- layer by layer ----------------------------------------------------------------------------------------------------


class Ready(LayerSynchronizer):
    """Every layer has been computed."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int | None]] = []

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.asked.append((layer_index, timeout_in_millis))
        return True


def transfer_prompt(rig: Rig) -> None:
    datadist = remote_accessible(rig, PROMPT)
    ours = tensors(rig, DESC).fill(PROMPT)
    cache_manager = datadist.cache_manager
    cache = cache_manager.register_blocks_cache(DESC, ours.addresses, BlocksCacheKey(PROMPT, 0))
    barrier()  # registered
    link_clusters(datadist, peer(rig, DECODER))
    layers = Ready()
    transfer_config = TransferWithCacheKeyConfig(BlocksCacheKey(DECODER, 0), range(0, 1), range(0, 1))  # noqa: PIE808
    cache_task = cache_manager.transfer_cache_async(cache, layers, [transfer_config])
    assert cache_task.get_results() == [LLMStatusCode.LLM_SUCCESS]
    assert cache_task.synchronize() == LLMStatusCode.LLM_SUCCESS
    assert layers.asked == [(0, None)]
    barrier()  # transferred
    unlink_clusters(datadist, cluster_info(DECODER), force=True)
    cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


def transfer_decoder(rig: Rig) -> None:
    datadist = remote_accessible(rig, DECODER)
    held = tensors(rig, DESC).fill(DECODER)
    cache_manager = datadist.cache_manager
    cache = cache_manager.register_blocks_cache(DESC, held.addresses, BlocksCacheKey(DECODER, 0))
    barrier()  # registered
    barrier()  # transferred
    held.check(moved(OURS[DECODER], OURS[PROMPT], {0: 0}))
    unlink_clusters(datadist, cluster_info(PROMPT), force=True)
    cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


def remote_accessible(rig: Rig, cluster_id: int) -> Any:
    role = LLMRole.PROMPT if cluster_id == PROMPT else LLMRole.DECODER
    switches = {"enable_cache_manager": True, "enable_remote_cache_accessible": True}
    return init(rig, role, cluster_id, listen_ip_info=rig.here, **switches)


if __name__ == "__main__":
    main(
        {
            ("push_cache", "p"): push_cache_prompt,
            ("push_cache", "d"): push_cache_decoder,
            ("push_blocks", "p"): push_blocks_prompt,
            ("push_blocks", "d"): push_blocks_decoder,
            ("both_ways", "p"): both_ways_prompt,
            ("both_ways", "d"): both_ways_decoder,
            ("switch_role", "p"): switch_role_prompt,
            ("switch_role", "d"): switch_role_decoder,
            ("transfer", "p"): transfer_prompt,
            ("transfer", "d"): transfer_decoder,
        }
    )
