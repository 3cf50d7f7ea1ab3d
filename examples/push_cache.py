"""A prefill process pushes its KV cache into the caches of a decode process, which checks every byte.

Its job: ``push_cache`` (a whole batch entry, and one layer at a time as a model would) and ``push_blocks`` between two
processes. It must not pull: here the side that has the bytes decides when they go.

    python examples/push_cache.py
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpull_async import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
)
from line_pipe import Child, Parent

PREFILL, DECODE, MODEL = 1, 2, 0
LAYERS, PER_LAYER = 4, 2  # each layer has a tensor of keys and one of values
SHAPE = [2, 64, 128]  # of one tensor: batch entries, tokens, width
BLOCKS = [32, 16, 128]  # of one paged tensor: blocks, tokens in a block, width
MILLISECONDS = 30_000
F32 = NDArray[np.float32]


def config(*, listens: bool) -> dict[str, str]:
    """Both sides need remote cache access: a push names the receiver's memory."""
    made = LLMConfig()
    made.device_backend = "host"  # numpy reads and writes the caches: not in the memory of an NPU
    made.enable_cache_manager = True
    made.enable_remote_cache_accessible = True
    made.sync_kv_timeout = MILLISECONDS
    if listens:
        made.listen_ip_info = "127.0.0.1:0"
    return dict(made.generate_options())


def desc(shape: list[int]) -> CacheDesc:
    return CacheDesc(LAYERS * PER_LAYER, shape, DataType.DT_FLOAT)


def views(node: LLMDataDist, cache: Any) -> list[F32]:
    """The cache's memory, not copies of it."""
    manager = node.cache_manager
    return [manager.get_cache_tensors(cache, tensor)[0].numpy() for tensor in range(LAYERS * PER_LAYER)]


def known_values(tensor: int, shape: list[int], *, seed: int) -> F32:
    """What the prefill process puts there, and the decode process expects."""
    return np.random.default_rng([seed, tensor]).random(shape, np.float32)


# The same numbers on both sides: which block of the prefill node goes into which one of the decode node.
SRC_BLOCKS = np.random.default_rng(1).permutation(BLOCKS[0])[:12].tolist()
DST_BLOCKS = np.random.default_rng(2).permutation(BLOCKS[0])[:12].tolist()


async def decode() -> None:
    """Makes room, says where, and looks at what has come each time it is told that something has."""
    parent = await Parent.connect()
    async with LLMDataDist(LLMRole.DECODER, DECODE) as node:
        await node.init(config(listens=True))
        cache = await node.cache_manager.allocate_cache(desc(SHAPE))
        paged = await node.cache_manager.allocate_blocks_cache(desc(BLOCKS), BlocksCacheKey(DECODE, MODEL))
        found, found_paged = views(node, cache), views(node, paged)
        expected = [np.zeros(SHAPE, np.float32) for _ in found]
        expected_paged = [np.zeros(BLOCKS, np.float32) for _ in found_paged]
        assert node.listen_address is not None  # it was told to listen
        parent.say("ready", address=list(node.listen_address), cache_id=cache.cache_id)
        while (message := await parent.hear()) is not None:
            for tensor in range(message["first_tensor"], message["end_tensor"]):
                if message["do"] == "look_at_blocks":
                    blocks = known_values(tensor, BLOCKS, seed=2)
                    expected_paged[tensor][DST_BLOCKS] = blocks[SRC_BLOCKS]
                else:
                    source = known_values(tensor, SHAPE, seed=1)
                    expected[tensor][message["entry"]] = source[message["src_entry"]]
            right = all(map(np.array_equal, found + found_paged, expected + expected_paged))
            parent.say("looked", right=right)


class Prefill:
    """The node that pushes, and the process that it pushes to."""

    def __init__(self, node: LLMDataDist, child: Child, *, cache_id: int) -> None:
        self._node, self._child, self._cache_id = node, child, cache_id
        self.right = True

    async def run(self) -> None:
        cache = await self._node.cache_manager.allocate_cache(desc(SHAPE))
        tensors = views(self._node, cache)
        await self._push_layers(cache, tensors)
        await self._push_entry(cache)
        await self._push_blocks()
        await self._push_nowhere(cache)
        await self._node.cache_manager.deallocate_cache(cache)

    async def _push_layers(self, cache: Any, tensors: list[F32]) -> None:
        """Each layer goes as soon as it has been computed; the decode node can look at it already."""
        for layer in range(LAYERS):
            some = range(layer * PER_LAYER, (layer + 1) * PER_LAYER)
            for tensor in some:
                tensors[tensor][:] = known_values(tensor, SHAPE, seed=1)
            this = range(layer, layer + 1)
            await self._node.cache_manager.push_cache(
                CacheKeyByIdAndIndex(DECODE, self._cache_id, 1), cache, 0, src_layer_range=this, dst_layer_range=this
            )
            await self._look("look", f"layer {layer} of entry 0 into entry 1", some, src_entry=0, entry=1)

    async def _push_entry(self, cache: Any) -> None:
        await self._node.cache_manager.push_cache(CacheKeyByIdAndIndex(DECODE, self._cache_id, 0), cache, 1)
        await self._look("look", "all of entry 1 into entry 0", range(LAYERS * PER_LAYER), src_entry=1, entry=0)

    async def _push_blocks(self) -> None:
        manager = self._node.cache_manager
        paged = await manager.allocate_blocks_cache(desc(BLOCKS), BlocksCacheKey(PREFILL, MODEL))
        for tensor, view in enumerate(views(self._node, paged)):
            view[:] = known_values(tensor, BLOCKS, seed=2)
        await manager.push_blocks(BlocksCacheKey(DECODE, MODEL), paged, SRC_BLOCKS, DST_BLOCKS)
        await self._look("look_at_blocks", f"{len(SRC_BLOCKS)} blocks pairwise", range(LAYERS * PER_LAYER))
        await manager.deallocate_blocks_cache(paged)

    async def _push_nowhere(self, cache: Any) -> None:
        """A cache that the decode node does not have is refused, and nothing there changes."""
        try:
            await self._node.cache_manager.push_cache(CacheKeyByIdAndIndex(DECODE, 10**6, 0), cache)
        except LLMException as error:
            print(f"a cache that is not there: refused, as it must be: {error.status_code}")
        else:
            self.right = False
        await self._look("look", "and nothing has changed", range(0))

    async def _look(self, do: str, what: str, tensors: range, **where: int) -> None:
        await self._child.say(do, first_tensor=tensors.start, end_tensor=tensors.stop, **where)
        right = (await self._child.hear("looked"))["right"]
        print(f"{what}: {'right' if right else 'WRONG'}")
        self.right = self.right and right


async def prefill() -> int:
    """Starts the decode process, links to it and pushes; the exit status."""
    child = await Child.start("decode", __file__, "--decode")
    try:
        ready = await child.hear("ready")
        async with LLMDataDist(LLMRole.PROMPT, PREFILL) as node:
            await node.init(config(listens=False))
            cluster = LLMClusterInfo()
            cluster.remote_cluster_id = DECODE
            cluster.append_remote_ip_info(*ready["address"])
            await node.link_clusters([cluster], MILLISECONDS, raise_on_error=True)
            pushing = Prefill(node, child, cache_id=ready["cache_id"])
            await pushing.run()
            moved = node.counters["bytes_pushed"]
    finally:
        status = await child.stop()
    if pushing.right and status == 0:
        print(f"OK: {moved} bytes were pushed, each is where it was meant to go, and no other byte changed")
        return 0
    print(f"FAILED: see above (the decode process ended with exit code {status})")
    return 1


def main() -> int:
    """With ``--decode`` this is the child."""
    if sys.argv[1:] == ["--decode"]:
        asyncio.run(decode())
        return 0
    return asyncio.run(prefill())


if __name__ == "__main__":
    sys.exit(main())
