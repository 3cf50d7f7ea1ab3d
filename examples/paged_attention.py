"""Paged attention over blocks that another process has filled: block tables on both sides, and one pull per request.

Its job: a toy block allocator, block tables, and attention that reads keys and values through a table. The prefill
process sends a request's table, the decode process reserves blocks of its own, pulls into them, and computes the same
numbers; then it goes on with a token of its own. It must not need anything but kvpull and numpy.

    python examples/paged_attention.py
"""

from __future__ import annotations

import multiprocessing
import sys
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpull_sync import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole

PREFILL, DECODE = 1, 2
LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM = 3, 24, 16, 4, 32
DESC = CacheDesc(2 * LAYERS, [BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM], DataType.DT_FLOAT)
PROMPTS = {"a": 70, "b": 16, "c": 33}  # tokens of each request
SECONDS = 120.0
LINK_TIMEOUT_MS = 30_000

F32 = NDArray[np.float32]


class Pool:
    """The blocks of one process: which are free, and the cache's memory, tensor by tensor."""

    def __init__(self, datadist: LLMDataDist, key: BlocksCacheKey | None = None) -> None:
        manager = datadist.cache_manager
        self.cache = manager.allocate_blocks_cache(DESC, key)
        # Views of the cache's memory, one of (block, token in the block, head, number) per tensor.
        self.tensors: list[Any] = [manager.get_cache_tensors(self.cache, t)[0].numpy() for t in range(2 * LAYERS)]
        self.free = list(range(BLOCKS))

    def reserve(self) -> int:
        """A free block; IndexError when there is none."""
        return self.free.pop()

    def release(self, blocks: list[int]) -> None:
        """Gives blocks back. They come out again in another order: after a while, tables look random."""
        self.free[:0] = blocks


@dataclass
class Sequence:
    """A request: how many tokens it has, and its block table: token ``t`` is in ``table[t // BLOCK_SIZE]``."""

    pool: Pool
    length: int = 0
    table: list[int] = field(default_factory=list)

    def grow(self, tokens: int) -> None:
        """Room for so many more tokens, in new blocks where the last one is full."""
        self.length += tokens
        while len(self.table) * BLOCK_SIZE < self.length:
            self.table.append(self.pool.reserve())

    def append(self, layer: int, keys: F32, values: F32) -> None:
        """Writes the newest tokens of a layer; both arrays are (tokens, heads, numbers)."""
        for tensor, rows in zip(self.pool.tensors[2 * layer : 2 * layer + 2], (keys, values), strict=True):
            for row, token in zip(rows, range(self.length - len(rows), self.length), strict=True):
                tensor[self.table[token // BLOCK_SIZE], token % BLOCK_SIZE] = row

    def attend(self, layer: int, query: F32) -> F32:
        """Attention of one query, (heads, numbers), over all tokens, read through the table."""
        keys, values = (
            tensor[self.table].reshape(-1, HEADS, HEAD_DIM)[: self.length]
            for tensor in self.pool.tensors[2 * layer : 2 * layer + 2]
        )
        return attention(query, keys, values)


def attention(query: F32, keys: F32, values: F32) -> F32:
    """The plain one: keys and values are (tokens, heads, numbers)."""
    scores = np.einsum("hd,thd->ht", query, keys) / np.float32(HEAD_DIM**0.5)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    mixed: F32 = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values)
    return mixed


def numbers(name: str, layer: int, tokens: int) -> F32:
    """Stand-ins for what a model computes, (3, tokens, heads, numbers): queries, keys, values."""
    seed = [*name.encode(), layer]
    return np.random.default_rng(seed).standard_normal((3, tokens, HEADS, HEAD_DIM), np.float32)


def started(role: LLMRole, cluster_id: int, *, listen: bool) -> LLMDataDist:
    """A node of this process."""
    config = LLMConfig()
    config.device_backend = "host"  # numpy reads and writes the caches: not in the memory of an NPU
    config.enable_cache_manager = True
    config.sync_kv_timeout = 30_000
    if listen:
        config.listen_ip_info = "127.0.0.1:0"
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(config.generate_options())
    return datadist


def prefill_process(pipe: Connection) -> None:
    """Fills the blocks of several requests that grow in turns, and tells their tables and its own results."""
    datadist = started(LLMRole.PROMPT, PREFILL, listen=True)
    pool = Pool(datadist, BlocksCacheKey(PREFILL, 0))
    requests = {name: Sequence(pool) for name in PROMPTS}
    for begin in range(0, max(PROMPTS.values()), BLOCK_SIZE):
        for name, sequence in requests.items():
            chunk = min(BLOCK_SIZE, PROMPTS[name] - begin)  # a prompt is computed in chunks, between those of others
            if chunk > 0:
                sequence.grow(chunk)
                for layer in range(LAYERS):
                    _, keys, values = numbers(name, layer, PROMPTS[name])[:, begin : begin + chunk]
                    sequence.append(layer, keys, values)
    results = {
        name: [sequence.attend(layer, numbers(name, layer, sequence.length)[0, -1]) for layer in range(LAYERS)]
        for name, sequence in requests.items()
    }
    tables = {name: sequence.table for name, sequence in requests.items()}
    pipe.send((datadist.listen_address, tables, results))
    pipe.poll(SECONDS)  # until the blocks have been pulled
    datadist.cache_manager.deallocate_blocks_cache(pool.cache)
    datadist.finalize()


def decode_process(address: tuple[str, int], tables: dict[str, list[int]], results: dict[str, list[F32]]) -> bool:
    """Pulls each request's blocks into blocks of its own, and goes on with them; True when all numbers are right."""
    datadist = started(LLMRole.DECODER, DECODE, listen=False)
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = PREFILL
    cluster.append_remote_ip_info(*address)
    datadist.link_clusters([cluster], LINK_TIMEOUT_MS, raise_on_error=True)
    pool, right = Pool(datadist), True
    earlier = Sequence(pool)
    earlier.grow(5 * BLOCK_SIZE)
    for block in earlier.table:
        for tensor in pool.tensors:
            tensor[block] = -7.0  # another request's numbers, which no pull may change
    for name, theirs in tables.items():
        ours = Sequence(pool)
        ours.grow(PROMPTS[name])
        datadist.cache_manager.pull_blocks(BlocksCacheKey(PREFILL, 0), pool.cache, theirs, ours.table)
        print(f"request {name}: {PROMPTS[name]} tokens, blocks {theirs} into {ours.table}")
        right = pulled_well(name, ours, results[name]) and right
        right = goes_on_well(name, ours) and right
        pool.release(ours.table[::-1])
    right = all((tensor[earlier.table] == -7.0).all() for tensor in pool.tensors) and right
    datadist.cache_manager.deallocate_blocks_cache(pool.cache)
    datadist.unlink_clusters([cluster], LINK_TIMEOUT_MS)
    datadist.finalize()
    return right


def pulled_well(name: str, sequence: Sequence, results: list[F32]) -> bool:
    """The last token's query gives what it gave in the other process, bit for bit."""
    queries = [numbers(name, layer, sequence.length)[0, -1] for layer in range(LAYERS)]
    outputs = [sequence.attend(layer, query) for layer, query in enumerate(queries)]
    right = all(map(np.array_equal, outputs, results))
    print(f"  attention over the pulled blocks: {'the same' if right else 'WRONG'}")
    return right


def goes_on_well(name: str, sequence: Sequence) -> bool:
    """One more token, whose keys and values go behind the pulled ones: as without blocks."""
    sequence.grow(1)
    right = True
    for layer in range(LAYERS):
        _, keys, values = numbers(name, layer, sequence.length - 1)
        query, key, value = numbers(name + "'", layer, 1)[:, 0]
        sequence.append(layer, key[None], value[None])
        plain = attention(query, np.concatenate([keys, key[None]]), np.concatenate([values, value[None]]))
        right = right and np.array_equal(sequence.attend(layer, query), plain)
    print(f"  attention with a token of our own: {'the same' if right else 'WRONG'}")
    return right


def main() -> int:
    """Starts the prefill process; the decode process is this one."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=prefill_process, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # only then is the other process's end also the end of the pipe
    if not ours.poll(SECONDS):
        raise RuntimeError("the prefill process did not start")
    right = decode_process(*ours.recv())
    ours.send("done")
    process.join(SECONDS)
    if right and process.exitcode == 0:
        print("OK: attention through either block table gives the same numbers, bit for bit")
        return 0
    print(f"FAILED: see above (the prefill process ended with exit code {process.exitcode})")
    return 1


if __name__ == "__main__":
    sys.exit(main())
