"""The pulls of a stress test: one caller after another, each with destinations of his own, of which every byte is
checked after each pull. See `peers/stress.py` for what happens to the sources meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpull_async import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMException,
    LLMStatusCode,
    LLMTimeoutError,
)
from tests import duo
from tests.integration.content import content
from tests.integration.processes import Child

CANARY = 0xA5
PATIENCE_MS = 20_000
CHANGING = {LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, LLMStatusCode.LLM_PARAM_INVALID}
DYING = {*CHANGING, LLMStatusCode.LLM_LINK_FAILED}


@dataclass(frozen=True)
class Shape:
    """A cache of a source. Its key is never used again, so whatever is found under it must be this one."""

    key: int
    kind: str
    tensors: int
    entries: int
    nbytes: int
    cache_id: int


@dataclass
class Slot:
    """One cache of a source at a time; `changes` counts the beginnings and ends of replacing it."""

    shape: Shape
    changes: int = 0


@dataclass
class Source:
    cluster: int
    address: tuple[str, int] = ("", 0)
    process: Child | None = None
    losses: int = 0
    """Its deaths and returns."""
    keys: Iterator[int] = field(default_factory=lambda: itertools.count(100, 100))
    slots: list[Slot] = field(default_factory=list)
    used: set[int] = field(default_factory=set)
    """Keys that a pull may have used up."""
    keys_by_id: dict[int, list[int]] = field(default_factory=dict)
    """A source that was started anew counts its cache ids from 1 again."""
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)


@dataclass(frozen=True)
class Piece:
    """Bytes of the source that a pull brings, and where to."""

    tensor: int
    entry: int
    offset: int
    key: int
    source_tensor: int
    source_offset: int
    nbytes: int


@dataclass
class Target:
    """A destination, and its memory. Between pulls all of it is the canary."""

    cache: Any
    arrays: list[Any]

    def reset(self) -> None:
        for array in self.arrays:
            array[:] = CANARY

    def intact(self) -> bool:
        return all(bool((array == CANARY).all()) for array in self.arrays)

    def holds(self, pieces: list[Piece], shift: int = 0) -> bool:
        for tensor, array in enumerate(self.arrays):
            right = np.full_like(array, CANARY)
            for piece in pieces:
                if piece.tensor == tensor:
                    right[piece.entry, piece.offset : piece.offset + piece.nbytes] = content(
                        piece.key + shift, piece.source_tensor, 0, offset=piece.source_offset, nbytes=piece.nbytes
                    )
            if not np.array_equal(right, array):
                return False
        return True


class Worker:
    """One caller of a node, with destinations of his own."""

    def __init__(self, stress: Any, name: str) -> None:
        self.stress, self.name = stress, name
        self.random = stress.random
        self.manager = stress.nodes[name].cache_manager
        self.blocking = name == "blocking"
        self.targets: dict[tuple[Any, ...], Target] = {}

    async def call(self, function: Any, *args: Any, **more: Any) -> Any:
        if self.blocking:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.stress.threads, lambda: function(*args, **more))
        return await function(*args, **more)

    async def target(self, *, tensors: int, entries: int, nbytes: int, blocks: bool) -> Target:
        registered = self.random.random() < 0.3
        named = (tensors, entries, nbytes, blocks, registered)
        found = self.targets.get(named)
        if found is None:
            desc = CacheDesc(tensors, [entries, nbytes], DataType.DT_UINT8)
            arrays = [np.empty((entries, nbytes), np.uint8) for _ in range(tensors)]
            addresses = [int(array.ctypes.data) for array in arrays]
            if registered:
                register = self.manager.register_blocks_cache if blocks else self.manager.register_cache
                cache = await self.call(register, desc, addresses)
            else:
                allocate = self.manager.allocate_blocks_cache if blocks else self.manager.allocate_cache
                cache = await self.call(allocate, desc)
                arrays = duo.arrays(cache)
            found = self.targets[named] = Target(cache, arrays)
            found.reset()
        return found

    async def close(self) -> None:
        for (_, _, _, blocks, registered), target in self.targets.items():
            if registered:
                await self.call(self.manager.unregister_cache, target.cache.cache_id)
            elif blocks:
                await self.call(self.manager.deallocate_blocks_cache, target.cache)
            else:
                await self.call(self.manager.deallocate_cache, target.cache)
        self.targets.clear()

    async def pull(self) -> None:
        source = self.random.choice(self.stress.sources)
        if source.losses % 2:  # one that is not there refuses so fast that little else would happen
            await asyncio.sleep(0.02)
        slot = self.random.choice(source.slots)
        shape, changes, losses = slot.shape, slot.changes, source.losses
        changing = changes % 2 == 1 or (shape.kind == "blocks" and self.name == "remote access")
        target, pieces, start = await self.prepare(source, shape)
        gone = slot.shape is not shape
        began, held_up, fate = time.monotonic(), self.stress.held_up, self.fate()
        timeout = self.random.uniform(0.05, 4.0) if fate == "tiny timeout" else PATIENCE_MS
        error = await self.outcome(start, timeout, fate)
        took = time.monotonic() - began
        used = not source.used.isdisjoint(range(shape.key, shape.key + shape.entries))
        changed = changing or used or slot.changes != changes
        lost = source.losses != losses or losses % 2 == 1
        what = f"{self.name} {fate} cluster {source.cluster} {shape} {used=} {changed=} {lost=} {gone=}"
        if took > timeout / 1000 + 1.5 + self.stress.held_up - held_up:
            self.stress.counts["late"] += 1
        if error is None and gone:
            self.stress.note(f"it brought what was gone when it began: {what}")
        others = [0]
        if self.name == "remote access" and lost:
            ready = time.monotonic() + PATIENCE_MS / 1000
            # A new source may be read before it has said its ids.
            while source.losses % 2 and time.monotonic() < ready:  # noqa: ASYNC110  (the trouble tells nobody)
                await asyncio.sleep(0.01)
            others = [key - shape.key for key in source.keys_by_id[shape.cache_id]]
        await self.judge(
            error,
            target,
            pieces,
            what,
            others=others,
            fate=fate,
            allowed=DYING if lost else CHANGING if changed else set(),
        )

    def fate(self) -> str:
        chosen: str = self.random.choices(("", "cancelled", "tiny timeout"), (80, 0 if self.blocking else 10, 10))[0]
        return chosen

    async def outcome(self, start: Any, timeout: float, fate: str) -> BaseException | None:
        task = asyncio.ensure_future(start(timeout))
        if fate == "cancelled":
            await asyncio.sleep(self.random.choice((0, 0, 0.0002, 0.001, 0.003)))
            task.cancel()
        await asyncio.wait([task])
        return asyncio.CancelledError() if task.cancelled() else task.exception()

    async def judge(
        self,
        error: BaseException | None,
        target: Target,
        pieces: list[Piece],
        what: str,
        *,
        others: list[int],
        fate: str,
        allowed: set[LLMStatusCode],
    ) -> None:
        counts = self.stress.counts
        counts[f"pulls {self.name}"] += 1
        if error is None:
            counts["whole"] += 1
            counts["bytes"] += sum(piece.nbytes for piece in pieces)
            if not any(target.holds(pieces, shift) for shift in others):
                self.stress.note(f"wrong bytes: {what}")
            target.reset()
            return
        if isinstance(error, asyncio.CancelledError) and fate == "cancelled":
            counts["cancelled"] += 1
        elif isinstance(error, LLMTimeoutError) and fate == "tiny timeout":
            counts["out of time"] += 1
        elif isinstance(error, LLMException) and error.status_code in allowed:
            counts[f"failed: {error.status_code.name}"] += 1
        else:
            self.stress.note(f"unexpected {type(error).__name__} {error}: {what}")
        if getattr(target.cache, "quarantined", False):
            counts["quarantined"] += 1
            await self.call(self.manager.settled, target.cache)
        target.reset()
        await asyncio.sleep(self.random.choice((0, 0.001)))
        if not target.intact():
            self.stress.note(f"written after it had raised: {what}")
            target.reset()

    # -- the kinds of pull ------------------------------------------------------------------------------------------

    async def prepare(self, source: Source, shape: Shape) -> tuple[Target, list[Piece], Any]:
        if shape.kind == "blocks":
            if self.name == "remote access":
                return await self.whole(source, shape)  # refused, as it should be
            return await self.blocks(source, shape)
        kinds = [self.whole, self.part, self.layers]
        if not self.blocking and self.name != "remote access":
            kinds.append(self.landing)
        if self.name != "remote access" and shape.nbytes >= 4096:
            kinds.append(self.slices)
        made: tuple[Target, list[Piece], Any] = await self.random.choice(kinds)(source, shape)
        return made

    def key(self, source: Source, shape: Shape, entry: int) -> Any:
        if self.name == "remote access":
            return CacheKeyByIdAndIndex(source.cluster, shape.cache_id, entry)
        return CacheKey(source.cluster, shape.key + entry)

    async def whole(self, source: Source, shape: Shape) -> tuple[Target, list[Piece], Any]:
        entry, into = self.random.randrange(shape.entries), self.random.randrange(2)
        target = await self.target(tensors=shape.tensors, entries=2, nbytes=shape.nbytes, blocks=False)
        pieces = [Piece(t, into, 0, shape.key + entry, t, 0, shape.nbytes) for t in range(shape.tensors)]
        key = self.key(source, shape, entry)

        async def start(timeout: float) -> None:
            await self.call(self.manager.pull_cache, key, target.cache, into, src_cache_offset=0, timeout=timeout)

        return target, pieces, start

    async def part(self, source: Source, shape: Shape) -> tuple[Target, list[Piece], Any]:
        size = self.random.randint(1, shape.nbytes)
        src, room = self.random.randint(0, shape.nbytes - size), self.random.choice((0, 64, 4096))
        dst, entry = self.random.randint(0, room), self.random.randrange(shape.entries)
        target = await self.target(tensors=shape.tensors, entries=1, nbytes=shape.nbytes + room, blocks=False)
        pieces = [Piece(t, 0, dst, shape.key + entry, t, src, size) for t in range(shape.tensors)]
        key = self.key(source, shape, entry)

        async def start(timeout: float) -> None:
            offsets = {"src_cache_offset": src, "dst_cache_offset": dst}
            await self.call(self.manager.pull_cache, key, target.cache, 0, size, **offsets, timeout=timeout)

        return target, pieces, start

    async def layers(self, source: Source, shape: Shape) -> tuple[Target, list[Piece], Any]:
        count = self.random.randint(1, shape.tensors)
        first, into = self.random.randint(0, shape.tensors - count), self.random.randint(0, 4 - count)
        entry = self.random.randrange(shape.entries)
        target = await self.target(tensors=4, entries=1, nbytes=shape.nbytes, blocks=False)
        pieces = [Piece(into + i, 0, 0, shape.key + entry, first + i, 0, shape.nbytes) for i in range(count)]
        key = self.key(source, shape, entry)
        ranges = {"src_layer_range": range(first, first + count), "dst_layer_range": range(into, into + count)}

        async def start(timeout: float) -> None:
            more = {**ranges, "tensor_num_per_layer": 1, "src_cache_offset": 0, "timeout": timeout}
            await self.call(self.manager.pull_cache, key, target.cache, 0, **more)

        return target, pieces, start

    async def landing(self, source: Source, shape: Shape) -> tuple[Target, list[Piece], Any]:
        """A whole entry, and each tensor is looked at as soon as it is said to have landed."""
        entry = self.random.randrange(shape.entries)
        target = await self.target(tensors=shape.tensors, entries=2, nbytes=shape.nbytes, blocks=False)
        pieces = [Piece(t, 1, 0, shape.key + entry, t, 0, shape.nbytes) for t in range(shape.tensors)]
        key = self.key(source, shape, entry)

        async def start(timeout: float) -> None:
            more = {"tensor_num_per_layer": 1, "src_cache_offset": 0, "timeout": timeout}
            async with self.manager.pull_layers(key, target.cache, 1, **more) as layers:
                async for layer in layers:
                    self.stress.counts["layers landed"] += 1
                    if not np.array_equal(
                        target.arrays[layer][1], content(shape.key + entry, layer, 0, nbytes=shape.nbytes)
                    ):
                        self.stress.note(f"layer {layer} had not landed: {self.name} {shape}")

        return target, pieces, start

    async def slices(self, source: Source, shape: Shape) -> tuple[Target, list[Piece], Any]:
        block = max(100, shape.nbytes // self.random.randint(1, 12))
        count, entry = -(-shape.nbytes // block), self.random.randrange(shape.entries)
        target = await self.target(tensors=shape.tensors, entries=count + 2, nbytes=block, blocks=True)
        into = self.random.sample(range(count + 2), count)
        pieces = [
            Piece(t, where, 0, shape.key + entry, t, i * block, min(block, shape.nbytes - i * block))
            for t in range(shape.tensors)
            for i, where in enumerate(into)
        ]
        key = CacheKey(source.cluster, shape.key + entry)
        if shape.kind == "allocated":
            source.used.add(shape.key + entry)

        async def start(timeout: float) -> None:
            await self.call(self.manager.pull_blocks, key, target.cache, [], into, timeout=timeout)

        return target, pieces, start

    async def blocks(self, source: Source, shape: Shape) -> tuple[Target, list[Piece], Any]:
        count = self.random.randint(1, shape.entries)
        src, dst = self.random.sample(range(shape.entries), count), self.random.sample(range(9), count)
        target = await self.target(tensors=shape.tensors, entries=9, nbytes=shape.nbytes, blocks=True)
        pieces = [
            Piece(t, into, 0, shape.key + block, t, 0, shape.nbytes)
            for t in range(shape.tensors)
            for block, into in zip(src, dst, strict=True)
        ]
        key = BlocksCacheKey(source.cluster, shape.key)

        async def start(timeout: float) -> None:
            await self.call(self.manager.pull_blocks, key, target.cache, src, dst, timeout=timeout)

        return target, pieces, start
