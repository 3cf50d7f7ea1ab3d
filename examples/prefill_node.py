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
from kv_places import Contiguous, Paged
from kvpull_async import BlocksCacheKey, CacheKey, LLMConfig, LLMDataDist, LLMRole
from line_pipe import Message, Parent
from tiny_transformer import (
    ContiguousKV,
    KVMemory,
    PagedKV,
    TinyTransformer,
    encode,
    greedy,
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
    keys = [CacheKey(PREFILL_CLUSTER, req_id=request_id(number), model_id=MODEL_ID) for number in NUMBERS_BY_KEY]
    by_key = await Contiguous.allocate(datadist, len(keys), keys=keys)
    paged = Paged(datadist, PREFILL_BLOCKS, on_npu=by_key.on_npu)
    lengths = [len(encode(PROMPTS[number][0])) for number in NUMBERS_IN_BLOCKS]
    tables = scattered_tables(lengths, num_blocks=PREFILL_BLOCKS, seed=3)
    for entry, number in enumerate(NUMBERS_BY_KEY):
        await _prefill(model, number, kv=ContiguousKV(by_key.tensors, entry), parent=parent)
        await by_key.store(entry)
    for number, table in zip(NUMBERS_IN_BLOCKS, tables, strict=True):
        await _prefill(model, number, kv=PagedKV(paged.tensors, table), parent=parent, src_blocks=table)
    await paged.open(BlocksCacheKey(PREFILL_CLUSTER, MODEL_ID))
    await paged.store([block for table in tables for block in table])
    parent.say("published", on_npu=by_key.on_npu)
    await _serve(datadist, parent)
    await paged.close()


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
