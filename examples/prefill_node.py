"""The demo's prefill process: reads the prompts, publishes their KV cache, then only answers for it.

Its job: the source side of the library (role PROMPT). It never generates text, and it must not know how, or by whom,
its cache is fetched: publishing under a key is all it does.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from demo_plan import (
    BLOCK_SIZE,
    CONFIG,
    MODEL_ID,
    PREFILL_BLOCKS,
    PREFILL_CLUSTER,
    PROMPTS,
    PULL_TIMEOUT_MS,
    Way,
    checksum,
    request_id,
    scattered_tables,
)
from kvpull_async import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMConfig, LLMDataDist, LLMRole, Placement
from line_pipe import Message, Parent
from tiny_transformer import (
    ContiguousKV,
    KVMemory,
    PagedKV,
    TinyTransformer,
    encode,
    greedy,
    paged_arrays,
)

NUMBERS_BY_KEY = [number for number, (_, way) in enumerate(PROMPTS) if way is not Way.BLOCKS_TO_BLOCKS]
NUMBERS_IN_BLOCKS = [number for number, (_, way) in enumerate(PROMPTS) if way is Way.BLOCKS_TO_BLOCKS]


async def run_prefill() -> None:
    """Everything this process does, from start to end of its parent's pipe."""
    parent = await Parent.connect()
    config = LLMConfig()
    config.listen_ip_info = "127.0.0.1:0"
    config.sync_kv_timeout = PULL_TIMEOUT_MS
    datadist = LLMDataDist(LLMRole.PROMPT, PREFILL_CLUSTER)
    await datadist.init(config.generate_options())
    async with datadist:
        assert datadist.listen_address is not None  # it was told to listen
        ip, port = datadist.listen_address
        parent.say("listening", pid=os.getpid(), ip=ip, port=port)
        await _publish_and_serve(datadist, parent)
    parent.say("bye")


async def _publish_and_serve(datadist: LLMDataDist, parent: Parent) -> None:
    model = await asyncio.to_thread(TinyTransformer, CONFIG)
    by_key = await _contiguous_caches(datadist)
    arrays = paged_arrays(CONFIG, PREFILL_BLOCKS, block_size=BLOCK_SIZE)
    lengths = [len(encode(PROMPTS[number][0])) for number in NUMBERS_IN_BLOCKS]
    tables = scattered_tables(lengths, num_blocks=PREFILL_BLOCKS, seed=3)
    for number, kv in by_key.items():
        await _prefill(model, number, kv=kv, parent=parent)
    for number, table in zip(NUMBERS_IN_BLOCKS, tables, strict=True):
        await _prefill(model, number, kv=PagedKV(arrays, table), parent=parent, src_blocks=table)
    desc = CacheDesc(len(arrays), list(arrays[0].shape), DataType.DT_FLOAT, placement=Placement.DEVICE)
    blocks = await datadist.cache_manager.register_blocks_cache(
        desc, [array.ctypes.data for array in arrays], BlocksCacheKey(PREFILL_CLUSTER, MODEL_ID)
    )
    parent.say("published")
    await _serve(datadist, parent)
    # The arrays are ours: they may be freed only after the library has let go of their addresses.
    await datadist.cache_manager.unregister_cache(blocks.cache_id)


async def _contiguous_caches(datadist: LLMDataDist) -> dict[int, KVMemory]:
    """One cache for the batch, its i-th entry bound to the i-th key; and a view of each entry for the model."""
    shape = [len(NUMBERS_BY_KEY), CONFIG.max_seq, CONFIG.kv_width]
    desc = CacheDesc(CONFIG.kv_tensors, shape, DataType.DT_FLOAT, placement=Placement.DEVICE)
    keys = [CacheKey(PREFILL_CLUSTER, req_id=request_id(number), model_id=MODEL_ID) for number in NUMBERS_BY_KEY]
    manager = datadist.kv_cache_manager
    cache = await manager.allocate_cache(desc, cache_keys=keys)
    tensors = [manager.get_cache_tensors(cache, index)[0].numpy() for index in range(CONFIG.kv_tensors)]
    return {number: ContiguousKV(tensors, entry) for entry, number in enumerate(NUMBERS_BY_KEY)}


async def _prefill(model: TinyTransformer, number: int, *, kv: KVMemory, parent: Parent, **extra: Any) -> None:
    """Read one prompt. What a router would pass on is said: length and first token, never the text."""
    tokens = encode(PROMPTS[number][0])
    began = time.perf_counter()
    logits = await asyncio.to_thread(model.prefill, tokens, kv)
    parent.say(
        "prefilled",
        number=number,
        length=len(tokens),
        first_token=greedy(logits),
        seconds=time.perf_counter() - began,
        checksum=checksum(kv, len(tokens)),
        **extra,
    )


async def _serve(datadist: LLMDataDist, parent: Parent) -> None:
    """Wait while the library serves pulls in the background; take back the keys that pulls by offset do not use up."""
    message: Message | None = await parent.hear()
    while message is not None and message["do"] == "release":
        key = CacheKey(PREFILL_CLUSTER, req_id=request_id(message["number"]), model_id=MODEL_ID)
        await datadist.kv_cache_manager.remove_cache_key(key)
        parent.say("released", number=message["number"])
        message = await parent.hear()
