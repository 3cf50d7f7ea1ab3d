"""The demo's decode process: pulls the KV cache of prompts that it never saw, and continues them.

Its job: the destination side of the library (role DECODER), in five ways. It must not compute any prompt itself: all it
is told is a prompt's length and first generated token, the rest has to come through the pulls.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from demo_plan import (
    BLOCK_SIZE,
    CONFIG,
    DECODE_BLOCKS,
    DECODE_CLUSTER,
    LINK_TIMEOUT_MS,
    MODEL_ID,
    NEW_TOKENS,
    PREFILL_CLUSTER,
    PULL_TIMEOUT_MS,
    Way,
    blocks_for,
    checksum,
    request_id,
    scattered_tables,
)
from kv_places import Contiguous, Paged
from kvpull_async import (
    BlocksCacheKey,
    CacheKey,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)
from line_pipe import Message, Parent
from tiny_transformer import (
    ContiguousKV,
    KVMemory,
    PagedKV,
    TinyTransformer,
    contiguous_arrays,
    continue_greedily,
)

PAGED = (Way.KEY_TO_BLOCKS, Way.BLOCKS_TO_BLOCKS)


@dataclass(frozen=True)
class Request:
    """What the router tells a decode node about one prompt."""

    number: int
    way: Way
    length: int
    first_token: int
    src_blocks: list[int]

    @property
    def key(self) -> CacheKey:
        return CacheKey(PREFILL_CLUSTER, req_id=request_id(self.number), model_id=MODEL_ID)


class PullEvents(logging.Handler):
    """What the library's events tell: where the time of all pulls went (ms, by phase), by which transports, and why by
    those; and which memory the caches are in.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.phases: dict[str, float] = {}
        self.transports: set[str] = set()
        self.why = ""
        self.memory: dict[str, Any] = {}

    def note(self, fields: Mapping[str, Any]) -> None:
        """Add one event."""
        if fields.get("event") == "memory.chosen":
            self.memory = {name: fields.get(name) for name in ("backend", "reason", "device_id", "soc")}
        if fields.get("event") == "link.up":
            self.why = fields["why"]
        if fields.get("event") != "pull.finished":
            return
        self.transports.add(fields["path"])
        for phase in ("queue", "connect", "request", "copy", "settle"):
            spent = fields.get(f"{phase}_ms")
            if spent is not None:
                self.phases[phase] = self.phases.get(phase, 0.0) + spent

    def emit(self, record: logging.LogRecord) -> None:
        """For the standard library's logger ``kvpull``, where events go by default."""
        self.note(getattr(record, "kvpull", {}))

    def process(self, _logger: Any, _level: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """For structlog, where events go once the application has configured it, as ``--logs`` does."""
        self.note(fields)
        return fields

    @classmethod
    def listen(cls) -> PullEvents:
        """Hear every event from now on."""
        heard = cls()
        if structlog.is_configured():
            structlog.configure(processors=[heard.process, *structlog.get_config()["processors"]])
        logger = logging.getLogger("kvpull")
        logger.addHandler(heard)
        logger.setLevel(logging.DEBUG)
        return heard


class DecodeNode:
    """Two caches, a contiguous one and a paged one, and the pulls into them."""

    def __init__(self, datadist: LLMDataDist, requests: list[Request], *, entries: Contiguous, blocks: Paged) -> None:
        self._datadist, self._entries, self._blocks = datadist, entries, blocks
        self.on_npu = entries.on_npu
        contiguous, paged = _contiguous(requests), _paged(requests)
        # Entries in reverse: where a prompt lands here has nothing to do with where it lies at the source.
        self._entry = {request.number: entry for entry, request in enumerate(reversed(contiguous))}
        tables = scattered_tables([r.length + NEW_TOKENS for r in paged], num_blocks=DECODE_BLOCKS, seed=4)
        self._table = {request.number: table for request, table in zip(paged, tables, strict=True)}

    @classmethod
    async def open(cls, datadist: LLMDataDist, requests: list[Request]) -> DecodeNode:
        """Allocate the contiguous cache; the paged one is ours, where the host can reach it."""
        entries = await Contiguous.allocate(datadist, len(_contiguous(requests)))
        blocks = Paged(datadist, DECODE_BLOCKS, on_npu=entries.on_npu)
        await blocks.open()
        return cls(datadist, requests, entries=entries, blocks=blocks)

    async def close(self) -> None:
        """Give both caches back."""
        await self._blocks.close()
        await self._entries.close()

    def kv(self, request: Request) -> KVMemory:
        """The place of one prompt, as the model sees it."""
        if request.way in PAGED:
            return PagedKV(self._blocks.tensors, self._table[request.number])
        return ContiguousKV(self._entries.tensors, self._entry[request.number])

    async def load(self, request: Request) -> None:
        """What was pulled becomes readable for the model, if it is not so already."""
        if request.way in PAGED:
            await self._blocks.load(self._table[request.number][: blocks_for(request.length)])
        else:
            await self._entries.load(self._entry[request.number])

    async def pull(self, request: Request) -> int:
        """Fetch one prompt's KV; returns the number of bytes asked for."""
        if request.way is Way.WHOLE:
            return await self._pull_whole(request)
        if request.way is Way.LAYERS:
            return await self._pull_layers(request)
        if request.way is Way.HALVES:
            return await self._pull_halves(request)
        return await self._pull_blocks(request)

    async def _pull_whole(self, request: Request) -> int:
        """All tensors of the entry, used or not. This uses the key up: the source may then reuse the memory."""
        await self._datadist.kv_cache_manager.pull_cache(request.key, self._entries.cache, self._entry[request.number])
        return CONFIG.kv_tensors * CONFIG.max_seq * CONFIG.kv_row_bytes

    async def _pull_layers(self, request: Request) -> int:
        """Ranges count layers, each of two tensors (K and V). The key is used up when every layer has been fetched."""
        middle = CONFIG.layers // 2
        for layers in (range(middle, CONFIG.layers), range(middle)):
            await self._datadist.kv_cache_manager.pull_cache(
                request.key,
                self._entries.cache,
                self._entry[request.number],
                src_layer_range=layers,
                dst_layer_range=layers,
                tensor_num_per_layer=2,
            )
        return CONFIG.kv_tensors * CONFIG.max_seq * CONFIG.kv_row_bytes

    async def _pull_halves(self, request: Request) -> int:
        """Only the rows that the prompt fills, in two pieces; size and offsets are bytes in each tensor's entry."""
        used = request.length * CONFIG.kv_row_bytes
        first = request.length // 2 * CONFIG.kv_row_bytes
        for offset, size in ((0, first), (first, used - first)):
            await self._datadist.kv_cache_manager.pull_cache(
                request.key,
                self._entries.cache,
                self._entry[request.number],
                size,
                src_cache_offset=offset,
                dst_cache_offset=offset,
            )
        return CONFIG.kv_tensors * used

    async def _pull_blocks(self, request: Request) -> int:
        """Into the first blocks of our table: from the source's blocks, or from a contiguous entry cut into blocks."""
        dst_blocks = self._table[request.number][: blocks_for(request.length)]
        key = request.key if request.way is Way.KEY_TO_BLOCKS else BlocksCacheKey(PREFILL_CLUSTER, MODEL_ID)
        assert self._blocks.cache is not None
        await self._datadist.cache_manager.pull_blocks(
            key, self._blocks.cache, src_blocks=request.src_blocks, dst_blocks=dst_blocks
        )
        return CONFIG.kv_tensors * len(dst_blocks) * BLOCK_SIZE * CONFIG.kv_row_bytes

    def spoil(self, request: Request) -> None:
        """Flip one bit of what was pulled: the demo must notice, or its comparison proves nothing."""
        memory = self._blocks.tensors[-1] if request.way in PAGED else self._entries.tensors[-1]
        place = self._table[request.number][0] if request.way in PAGED else self._entry[request.number]
        memory[place].view(np.uint8)[0, 3] ^= 0x80


def _contiguous(requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.way not in PAGED]


def _paged(requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.way in PAGED]


async def run_decode() -> None:
    """Everything this process does."""
    parent = await Parent.connect()
    parent.say("ready", pid=os.getpid())
    job = await parent.hear()
    if job is None:
        return
    config = LLMConfig()
    config.sync_kv_timeout = PULL_TIMEOUT_MS
    events = PullEvents.listen()
    datadist = LLMDataDist(LLMRole.DECODER, DECODE_CLUSTER)
    await datadist.init(config.generate_options())
    async with datadist:
        cluster = await _link(datadist, job, parent=parent)
        requests = [Request(**{**item, "way": Way(item["way"])}) for item in job["requests"]]
        node = await DecodeNode.open(datadist, requests)
        await _pull_all(node, requests, parent=parent, spoiled=job["spoiled"])
        await _decode_all(node, requests, parent=parent)
        heard = {"phases": events.phases, "transports": sorted(events.transports), "why": events.why}
        parent.say("finished", memory=events.memory, on_npu=node.on_npu, **heard)
        await node.close()
        await datadist.unlink_clusters([cluster], timeout=LINK_TIMEOUT_MS)
    parent.say("bye")


async def _link(datadist: LLMDataDist, job: Message, *, parent: Parent) -> LLMClusterInfo:
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = PREFILL_CLUSTER
    cluster.append_local_ip_info("127.0.0.1", 0)
    cluster.append_remote_ip_info(job["ip"], job["port"])
    began = time.perf_counter()
    status, _ = await datadist.link_clusters([cluster], timeout=LINK_TIMEOUT_MS)
    if status != LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"linking to {job['ip']}:{job['port']} ended with {status}")
    parent.say("linked", seconds=time.perf_counter() - began)
    return cluster


async def _pull_all(node: DecodeNode, requests: list[Request], *, parent: Parent, spoiled: int | None) -> None:
    for request in requests:
        began = time.perf_counter()
        nbytes = await node.pull(request)
        seconds = time.perf_counter() - began
        await node.load(request)
        if request.number == spoiled:
            node.spoil(request)
        parent.say(
            "pulled",
            number=request.number,
            bytes=nbytes,
            seconds=seconds,
            checksum=checksum(node.kv(request), request.length),
        )
        if request.way is Way.HALVES:
            # A pull with offsets leaves the key bound, so that more pieces can follow: say when it was the last one.
            parent.say("release", number=request.number)


async def _decode_all(node: DecodeNode, requests: list[Request], *, parent: Parent) -> None:
    model = await asyncio.to_thread(TinyTransformer, CONFIG)
    empty = ContiguousKV(contiguous_arrays(CONFIG, 1), 0)
    parent.say("control", number=requests[-1].number, tokens=_decode(model, requests[-1], empty))
    for request in requests:
        began = time.perf_counter()
        tokens = await asyncio.to_thread(_decode, model, request, node.kv(request))
        parent.say("decoded", number=request.number, tokens=tokens, seconds=time.perf_counter() - began)


def _decode(model: TinyTransformer, request: Request, kv: KVMemory) -> list[int]:
    return continue_greedily(model, request.first_token, length=request.length, count=NEW_TOKENS, kv=kv)
