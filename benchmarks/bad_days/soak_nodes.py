"""The two processes of a soak: one offers, one pulls again and again. They must not know when the connection is cut."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from bad_days import layout
from bad_days.content import Bytes, fill, holds, refill, rows, story
from bad_days.process import holdings
from kvpull_async import BlocksCacheKey, CacheKey, LLMDataDist, LLMException, LLMRole

__all__ = ["puller_side", "source_side"]

_NO_ID: Final = 2**64 - 1
_PULL_MS: Final = 20_000
_TRIES: Final = 5
_BLOCKS: Final = 8
"""Blocks of a pull of blocks."""
_KINDS: Final = {"small": 5, "entry": 3, "blocks": 2}
_SMALL: Final = 4096
"""Bytes per tensor that ride on the control connection; what the others pull has a connection of its own over tcp."""


class _Events(logging.Handler):
    """Counts what is logged as a warning or worse."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.counts: Counter[str] = Counter()
        self.lines: dict[str, str] = {}
        """The last of each."""
        logger = logging.getLogger("kvpull")
        logger.setLevel(logging.WARNING)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "kvpull", {}).get("event", record.getMessage())
        self.counts[event] += 1
        self.lines[event] = record.getMessage()

    def told(self) -> dict[str, tuple[int, str]]:
        return {event: (count, self.lines[event]) for event, count in self.counts.items()}


def _prefix() -> CacheKey:
    """Of the entry: a prefix is not used up by a pull."""
    return CacheKey(layout.cluster_id(0), _NO_ID, 0, 7)


def source_side(path: str) -> Mapping[str, Callable[..., Any]]:
    """The answers of the source: "address", "held", "events", "close"."""
    events, loop = _Events(), asyncio.new_event_loop()
    node = LLMDataDist(LLMRole.PROMPT, layout.cluster_id(0))
    memory: list[list[Bytes]] = [
        [np.empty((number, nbytes), np.uint8) for _ in range(layout.TENSORS)]
        for number, nbytes in ((1, layout.ROW), (layout.BLOCKS, layout.BLOCK))
    ]

    async def opened() -> Any:
        await node.init(layout.options(path, layout.Timing(), listen_ip_info="127.0.0.1:0"))
        entry, paged = layout.desc(1, layout.ROW), layout.desc(layout.BLOCKS, layout.BLOCK)
        addresses = [[int(array.ctypes.data) for array in arrays] for arrays in memory]
        for tensor in range(layout.TENSORS):
            fill(memory[0][tensor][0], layout.base(0, 1, 0, 0, tensor))
            for number in range(layout.BLOCKS):
                fill(memory[1][tensor][number], layout.block(0, 1, number, 0, tensor))
        await node.cache_manager.register_cache(entry, addresses[0], [_prefix()])
        await node.cache_manager.register_blocks_cache(paged, addresses[1], BlocksCacheKey(layout.cluster_id(0)))
        return node.listen_address

    address = loop.run_until_complete(opened())
    return {
        "address": lambda: address,
        "memory": lambda: sum(array.nbytes for arrays in memory for array in arrays),  # keeps it while it is offered
        "held": lambda: holdings([node]),
        "events": events.told,
        "close": lambda: loop.run_until_complete(node.finalize()),
    }


class _Puller:
    def __init__(self, path: str, address: tuple[str, int], seed: int, callers: int) -> None:
        self.events, self.counts = _Events(), Counter[str]()
        self.wrong: list[str] = []
        self.loop = asyncio.new_event_loop()
        self.node = LLMDataDist(LLMRole.DECODER, 1000)
        self._random = random.Random(seed)
        self._callers = callers
        self._left = itertools.count()
        self._caches: list[tuple[Any, list[Bytes], Any, list[Bytes]]] = []
        self.loop.run_until_complete(self._open(path, address))

    async def _open(self, path: str, address: tuple[str, int]) -> None:
        await self.node.init(layout.options(path, layout.Timing()))
        await self.node.link_clusters([layout.cluster(0, address)], _PULL_MS, raise_on_error=True)
        manager = self.node.cache_manager
        for _ in range(self._callers):
            entry = await manager.allocate_cache(layout.desc(1, layout.ROW))
            blocks = await manager.allocate_blocks_cache(layout.desc(_BLOCKS, layout.BLOCK))
            self._caches.append((entry, rows(manager, entry), blocks, rows(manager, blocks)))

    def pull(self, count: int) -> dict[str, Any]:
        """So many pulls, by all callers together; what became of them."""
        self.counts.clear()
        self._left = itertools.count()
        self.loop.run_until_complete(self._all(count))
        return {"counts": dict(self.counts), "wrong": self.wrong[:5], "wrong_count": len(self.wrong)}

    async def _all(self, count: int) -> None:
        await asyncio.gather(*(self._caller(number, count) for number in range(self._callers)))

    async def _caller(self, number: int, count: int) -> None:
        while next(self._left) < count:
            kind = self._random.choices(list(_KINDS), list(_KINDS.values()))[0]
            for _ in range(_TRIES):
                if await self._one(number, kind):
                    break
            else:
                self.counts[f"given up after {_TRIES} tries"] += 1

    async def _one(self, number: int, kind: str) -> bool:
        entry, memory, paged, blocks = self._caches[number]
        size = _SMALL if kind == "small" else layout.ROW
        manager, src = self.node.cache_manager, self._random.sample(range(layout.BLOCKS), _BLOCKS)
        try:
            if kind == "blocks":
                key = BlocksCacheKey(layout.cluster_id(0))
                await manager.pull_blocks(key, paged, src, list(range(_BLOCKS)), timeout=_PULL_MS)
            else:
                await manager.pull_cache(_prefix(), entry, 0, size, timeout=_PULL_MS)
        except LLMException as error:
            self.counts[f"failed: {getattr(error.status_code, 'name', error.status_code)}"] += 1
            return False
        self.counts["ok"] += 1
        if kind == "blocks":
            for tensor, array in enumerate(blocks):
                for there, here in enumerate(src):
                    self._look(array[there], layout.block(0, 1, here, 0, tensor))
        else:
            for tensor, array in enumerate(memory):
                self._look(array[0, :size], layout.base(0, 1, 0, 0, tensor))
        return True

    def _look(self, found: Bytes, identity: Any) -> None:
        if not holds(found, identity):
            self.wrong.append(story(found, identity))
        refill(found)


def puller_side(path: str, address: tuple[str, int], seed: int, callers: int) -> Mapping[str, Callable[..., Any]]:
    """The answers of the puller: "pull", "held", "events", "close"."""
    puller = _Puller(path, address, seed, callers)
    return {
        "pull": puller.pull,
        "held": lambda: holdings([puller.node]),
        "events": puller.events.told,
        "counters": lambda: puller.node.counters,
        "close": lambda: puller.loop.run_until_complete(puller.node.finalize()),
    }
