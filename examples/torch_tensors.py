"""Tensors of torch as KV cache, between two processes: registered as they are, pulled into, and views of allocated
memory. Needs torch, of which the CPU build will do.

Its job: the three ways in which torch and the library share memory without a copy, checked bit by bit. It must not use
asyncio.

    python examples/torch_tensors.py
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from kvpull_sync import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole

if TYPE_CHECKING:
    import torch
else:
    try:
        import torch
    except ImportError:
        torch = None

PREFILL, DECODE = 1, 2
LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM = 4, 32, 16, 2, 64
SHAPE = (BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM)
DESC = CacheDesc(2 * LAYERS, SHAPE, DataType.DT_BF16)
SECONDS = 120.0
LINK_TIMEOUT_MS = 30_000

SOURCE_BLOCKS = [3, 17, 4, 30]
TABLE = [9, 0, 25, 8]  # where the decode process has free blocks


def known_values(index: int) -> torch.Tensor:
    """What the prefill process computes as tensor ``index``, and the decode process expects."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(SHAPE, generator=generator).to(torch.bfloat16)


def started(role: LLMRole, cluster_id: int, *, listen: bool) -> LLMDataDist:
    """A node of this process."""
    config = LLMConfig()
    config.device_backend = "host"  # torch on the CPU reads and writes the caches: not in the memory of an NPU
    config.enable_cache_manager = True
    config.sync_kv_timeout = 30_000
    if listen:
        config.listen_ip_info = "127.0.0.1:0"
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(config.generate_options())
    return datadist


def prefill_process(pipe: Connection) -> None:
    """Registers its tensors, drops its own references, and waits until the other side is done."""
    datadist = started(LLMRole.PROMPT, PREFILL, listen=True)
    tensors = [known_values(index) for index in range(DESC.num_tensors)]
    cache = datadist.cache_manager.register_blocks_cache(
        DESC, blocks_cache_key=BlocksCacheKey(PREFILL, 0), tensors=tensors
    )
    # By address, `[tensor.data_ptr() for tensor in tensors]`, they would have to be kept here.
    del tensors
    gc.collect()
    pipe.send(datadist.listen_address)
    pipe.poll(SECONDS)
    datadist.cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


def decode_process(ip: str, port: int) -> bool:
    """Links, pulls into tensors of both kinds, compares; True when all bits are right."""
    datadist = started(LLMRole.DECODER, DECODE, listen=False)
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = PREFILL
    cluster.append_remote_ip_info(ip, port)
    datadist.link_clusters([cluster], LINK_TIMEOUT_MS, raise_on_error=True)
    right = into_registered_tensors(datadist)
    right = into_allocated_memory(datadist) and right
    datadist.unlink_clusters([cluster], LINK_TIMEOUT_MS)
    datadist.finalize()
    return right


def into_registered_tensors(datadist: LLMDataDist) -> bool:
    """The tensors that a model computes with are the cache itself."""
    manager = datadist.cache_manager
    tensors = [torch.zeros(SHAPE, dtype=torch.bfloat16) for _ in range(DESC.num_tensors)]
    cache = manager.register_blocks_cache(DESC, tensors=tensors)
    manager.pull_blocks(BlocksCacheKey(PREFILL, 0), cache, SOURCE_BLOCKS, TABLE)
    manager.unregister_cache(cache.cache_id)
    return checked("registered tensors", tensors)


def into_allocated_memory(datadist: LLMDataDist) -> bool:
    """The library's memory, which other processes of this host can map, and tensors over it."""
    manager = datadist.cache_manager
    cache = manager.allocate_blocks_cache(DESC)
    # bfloat16 comes as the bits that it is: looking at them as bfloat16 costs nothing.
    tensors = [
        torch.from_dlpack(manager.get_cache_tensors(cache, index)[0]).view(torch.bfloat16)
        for index in range(DESC.num_tensors)
    ]
    manager.pull_blocks(BlocksCacheKey(PREFILL, 0), cache, SOURCE_BLOCKS, TABLE)
    manager.deallocate_blocks_cache(cache)  # the tensors keep the memory
    return checked("allocated memory", tensors)


def checked(what: str, tensors: list[Any]) -> bool:
    """Compares every bit: the blocks of the table, and zeros around them."""
    right = True
    for index, tensor in enumerate(tensors):
        expected = torch.zeros(SHAPE, dtype=torch.bfloat16)
        expected[TABLE] = known_values(index)[SOURCE_BLOCKS]
        right = right and torch.equal(tensor.view(torch.int16), expected.view(torch.int16))
    print(f"{what}: {'right' if right else 'WRONG'}")
    return right


def main() -> int:
    """Starts the prefill process; the decode process is this one."""
    if torch is None:
        print("This example passes tensors of torch, which is not installed: pip install torch, or its CPU build.")
        return 2
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=prefill_process, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # only then is the other process's end also the end of the pipe
    if not ours.poll(SECONDS):
        raise RuntimeError("the prefill process did not start")
    ip, port = ours.recv()
    right = decode_process(ip, port)
    ours.send("done")
    process.join(SECONDS)
    if right and process.exitcode == 0:
        print("OK: every bit arrived where it was asked for, and no other changed")
        return 0
    print(f"FAILED: see above (the prefill process ended with exit code {process.exitcode})")
    return 1


if __name__ == "__main__":
    sys.exit(main())
