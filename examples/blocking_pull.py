"""The blocking API, in the style of existing programs: one star import, plain calls, no event loop in sight.

Its job: the three forms of ``pull_cache`` (plain, by layer ranges, with offsets) between two processes, checked byte by
byte. It must not use asyncio, nor anything that programs written for the original do not know.

    python examples/blocking_pull.py
"""
# ruff: noqa: F403, F405, PIE808 - the star import and range(0, 2) are what existing programs write

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

from kvpull_sync import *

PROMPT_CLUSTER, DECODER_CLUSTER = 0, 1
NUM_TENSORS = 8  # four layers, each with a tensor of keys and one of values
SHAPE = [3, 64, 128]
SECONDS = 120.0
LINK_TIMEOUT_MS = 30_000


def known_values(tensor: int, entry: int) -> NDArray[np.float32]:
    """What the prompt process puts there, and the decoder process expects."""
    size = SHAPE[1] * SHAPE[2]
    start = (tensor * SHAPE[0] + entry) * size
    return np.arange(start, start + size, dtype=np.float32).reshape(SHAPE[1:])


def prompt_process(pipe: Connection) -> None:
    """Allocates, fills, publishes under keys, and waits until the other side is done."""
    llm_config = LLMConfig()
    llm_config.device_backend = "host"  # numpy reads and writes the caches: not in the memory of an NPU
    llm_config.listen_ip_info = "127.0.0.1:0"
    datadist = LLMDataDist(LLMRole.PROMPT, PROMPT_CLUSTER)
    datadist.init(llm_config.generate_options())
    kv_cache_manager = datadist.kv_cache_manager
    cache_keys = [CacheKey(PROMPT_CLUSTER, req_id, 0) for req_id in range(SHAPE[0])]
    cache = kv_cache_manager.allocate_cache(CacheDesc(NUM_TENSORS, SHAPE, DataType.DT_FLOAT), cache_keys)
    for index in range(NUM_TENSORS):
        view = kv_cache_manager.get_cache_tensors(cache, index)[0].numpy()
        for entry in range(SHAPE[0]):
            view[entry] = known_values(index, entry)
    pipe.send(datadist.listen_address)
    pipe.poll(SECONDS)
    # A pull with offsets does not use its key up, so this one is still there.
    kv_cache_manager.remove_cache_key(cache_keys[2])
    kv_cache_manager.deallocate_cache(cache)
    datadist.finalize()


def decoder_process(ip: str, port: int) -> bool:
    """Links, pulls in three ways, compares; True when all bytes are right."""
    llm_config = LLMConfig()
    llm_config.device_backend = "host"  # numpy reads and writes the caches: not in the memory of an NPU
    llm_config.sync_kv_timeout = 30_000
    datadist = LLMDataDist(LLMRole.DECODER, DECODER_CLUSTER)
    datadist.init(llm_config.generate_options())
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = PROMPT_CLUSTER
    cluster.append_local_ip_info("127.0.0.1", 0)
    cluster.append_remote_ip_info(ip, port)
    ret, rets = datadist.link_clusters([cluster], LINK_TIMEOUT_MS)
    if ret != LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"link_clusters: {ret}, {rets}")
    kv_cache_manager = datadist.kv_cache_manager
    cache = kv_cache_manager.allocate_cache(CacheDesc(NUM_TENSORS, SHAPE, DataType.DT_FLOAT))
    expected = Expected(kv_cache_manager, cache)
    right = pull_plain(kv_cache_manager, cache, expected)
    right = pull_layers(kv_cache_manager, cache, expected) and right
    right = pull_offsets(kv_cache_manager, cache, expected) and right
    kv_cache_manager.deallocate_cache(cache)
    ret, rets = datadist.unlink_clusters([cluster], LINK_TIMEOUT_MS)
    datadist.finalize()
    return right and ret == LLMStatusCode.LLM_SUCCESS


class Expected:
    """What the destination must hold, every byte of it: zeros, and what has been pulled so far."""

    def __init__(self, manager: KvCacheManager, cache: KvCache) -> None:
        # Views of the cache's memory, not copies: they show what a pull has delivered.
        self._found = [manager.get_cache_tensors(cache, index)[0].numpy() for index in range(NUM_TENSORS)]
        self.tensors = [np.zeros(SHAPE, np.float32) for _ in range(NUM_TENSORS)]

    def check(self, what: str) -> bool:
        """Compares the whole cache, says the result."""
        right = all(map(np.array_equal, self._found, self.tensors))
        print(f"{what}: {'right' if right else 'WRONG'}")
        return right


def pull_plain(manager: KvCacheManager, cache: KvCache, expected: Expected) -> bool:
    """The whole entry of request 0 into batch entry 0; its key is then used up, and asking again is refused."""
    manager.pull_cache(CacheKey(PROMPT_CLUSTER, 0, 0), cache, 0)
    for index, tensor in enumerate(expected.tensors):
        tensor[0] = known_values(index, 0)
    right = expected.check("plain")
    try:
        manager.pull_cache(CacheKey(PROMPT_CLUSTER, 0, 0), cache, 0)
    except LLMException as error:
        refused = error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        print(f"the same key again: {'refused, as it must be' if refused else 'WRONG'}: {error.status_code}")
        return right and refused
    print("the same key again: WRONG, it was not refused")
    return False


def pull_layers(manager: KvCacheManager, cache: KvCache, expected: Expected) -> bool:
    """Layers 0 and 1 of request 1 into layers 2 and 3 of batch entry 1: tensors 0..3 into 4..7."""
    key = CacheKey(PROMPT_CLUSTER, 1, 0)
    manager.pull_cache(key, cache, 1, src_layer_range=range(0, 2), dst_layer_range=range(2, 4))
    for index, tensor in enumerate(expected.tensors[4:]):
        tensor[1] = known_values(index, 1)
    return expected.check("layers 0, 1 into layers 2, 3")


def pull_offsets(manager: KvCacheManager, cache: KvCache, expected: Expected) -> bool:
    """Request 2 into batch entry 2: everything from offset 0, then row 5 over row 7. Offsets and sizes are bytes."""
    key, row = CacheKey(PROMPT_CLUSTER, 2, 0), SHAPE[2] * 4
    manager.pull_cache(key, cache, 2, src_cache_offset=0, dst_cache_offset=0)
    for index, tensor in enumerate(expected.tensors):
        tensor[2] = known_values(index, 2)
    right = expected.check("offsets 0, 0")
    manager.pull_cache(key, cache, 2, row, src_cache_offset=5 * row, dst_cache_offset=7 * row)
    for index, tensor in enumerate(expected.tensors):
        tensor[2, 7] = known_values(index, 2)[5]
    return expected.check("row 5 into row 7") and right


def main() -> int:
    """Starts the prompt process; the decoder is this one."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=prompt_process, args=(theirs,), daemon=True)
    process.start()
    # Our copy of their end must go: only then is the other process's end also the end of the pipe.
    theirs.close()
    if not ours.poll(SECONDS):
        raise RuntimeError("the prompt process did not start")
    ip, port = ours.recv()
    right = decoder_process(ip, port)
    ours.send("done")
    process.join(SECONDS)
    if right and process.exitcode == 0:
        print("OK: every byte arrived where it was asked for, and no other byte changed")
        return 0
    print(f"FAILED: see above (the prompt process ended with exit code {process.exitcode})")
    return 1


if __name__ == "__main__":
    sys.exit(main())
