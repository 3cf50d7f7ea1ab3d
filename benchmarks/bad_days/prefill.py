"""A prefill process of a chaos run: offers caches, takes them away, writes them anew, and says what it has offered.

What is to be pulled is told through the *office*, a socket beside the library: a decode process asks there for a key,
or for a lock under which memory that is written in place stays as it is. It must not judge anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from bad_days import layout
from bad_days.content import Bytes, Identity, fill, rows
from bad_days.process import Voice, descriptors, holdings, leftovers
from kvpull_async import BlocksCacheKey, Cache, CacheKey, LLMDataDist, LLMException, LLMRole, allocate_shared

__all__ = ["prefill"]

_LIFE: Final = 4.0
"""Seconds that an offer is there, unless it is doomed to less."""
_YOUTH: Final = 5.0
"""Seconds before anything is written in place: locks of the process before this one are over by then."""
_REWRITE: Final = 0.4
_READERS: Final = 1.0
_IDLE: Final = 5.0
_SABOTAGED: Final = 20
"""One offer in so many is a stale one, when that is wanted."""


@dataclass
class Offer:
    number: int
    cache: Cache
    memory: list[Bytes]
    registered: bool


class Prefill:
    def __init__(self, setup: layout.PrefillSetup, voice: Voice) -> None:
        self.setup, self.voice = setup, voice
        self.node = LLMDataDist(LLMRole.PROMPT, layout.cluster_id(setup.number))
        self.generation = 0
        self._random = random.Random(f"prefill {setup.seed} {setup.number} {setup.incarnation}")
        self._numbers = itertools.count()
        self._offers: dict[int, Offer] = {}
        self._spare: dict[int, list[list[Bytes]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._callers: set[asyncio.StreamWriter] = set()
        self._readers = 0
        self._no_readers = asyncio.Event()
        self._no_readers.set()
        self._open = asyncio.Event()
        self._open.set()
        self._began = time.monotonic()
        self._paused = False
        self._closing = False
        self.base: list[Bytes] = [allocate_shared((layout.ROWS, layout.ROW)) for _ in range(layout.TENSORS)]
        self.blocks: list[Bytes] = [np.empty((layout.BLOCKS, layout.BLOCK), np.uint8) for _ in range(layout.TENSORS)]

    @property
    def manager(self) -> Any:
        return self.node.cache_manager

    async def open(self) -> None:
        """The memory is filled before it can be found, so that no reader sees it half written."""
        setup = self.setup
        self._write(first=0)
        where = {"listen_ip_info": f"127.0.0.1:{setup.port}", "enable_remote_cache_accessible": True}
        await self.node.init(layout.options(setup.path, setup.timing, **where))
        here, registered = layout.cluster_id(setup.number), {"remote_accessible": True}
        base, blocks = layout.desc(layout.ROWS, layout.ROW), layout.desc(layout.BLOCKS, layout.BLOCK)
        await self.manager.register_cache(base, _addresses(self.base), **registered)
        key = BlocksCacheKey(here, layout.BLOCKS_MODEL)
        await self.manager.register_blocks_cache(blocks, _addresses(self.blocks), key, **registered)
        self.slots = await self.manager.allocate_cache(layout.desc(setup.slots, layout.ROW))
        pages, key = layout.desc(setup.slots * layout.PAGES, layout.BLOCK), BlocksCacheKey(here, layout.PAGED_MODEL)
        self.pages = await self.manager.allocate_blocks_cache(pages, key)

    def _write(self, first: int = layout.STATIC) -> None:
        """A new generation in place of the one that is there."""
        number, incarnation = self.setup.number, self.setup.incarnation
        for tensor in range(layout.TENSORS):
            for row in range(first, layout.ROWS):
                fill(self.base[tensor][row], layout.base(number, incarnation, row, self.generation, tensor))
            for block in range(first, layout.BLOCKS):
                fill(self.blocks[tensor][block], layout.block(number, incarnation, block, self.generation, tensor))

    # -- offers -----------------------------------------------------------------------------------------------------

    def offer(self, size: int, registered: bool, late: float, doom: float) -> dict[str, int]:
        """A cache of one row under a key of its own, `late` s from now, for `doom` s (0: for its whole life)."""
        number = next(self._numbers)
        self.run(self._live(number, size, registered, late, doom or _LIFE))
        return {"number": number}

    async def publish(self, size: int, registered: bool, doom: float) -> dict[str, int]:
        """As `offer`, and there when the answer comes."""
        number = next(self._numbers)
        made = await self._make(number, size, registered)
        self.run(self._end(made, doom or _LIFE))
        return {"number": number, "cache_id": made.cache.cache_id}

    async def _live(self, number: int, size: int, registered: bool, late: float, life: float) -> None:
        await asyncio.sleep(late)
        if not self._paused:
            await self._end(await self._make(number, size, registered), life)

    async def _make(self, number: int, size: int, registered: bool) -> Offer:
        key = CacheKey(layout.cluster_id(self.setup.number), layout.req_id(self.setup.incarnation, number))
        desc = layout.desc(1, size)
        if registered:
            spare = self._spare.setdefault(size, [])
            memory = spare.pop() if spare else [np.empty((1, size), np.uint8) for _ in range(layout.TENSORS)]
            self._fill(memory, number)
            cache = await self.manager.register_cache(desc, _addresses(memory), [key], remote_accessible=True)
        else:
            cache = await self.manager.allocate_cache(desc)
            memory = rows(self.manager, cache)
            self._fill(memory, number)
            await self.manager.publish_cache(cache, [key])
        self._offers[number] = made = Offer(number, cache, memory, registered)
        return made

    def _fill(self, memory: list[Bytes], number: int) -> None:
        stale = self.setup.sabotage in ("stale", "all") and self._random.randrange(_SABOTAGED) == 0
        for tensor, array in enumerate(memory):
            said = number - 1 if stale and number else number
            fill(array[0], layout.keyed(self.setup.number, self.setup.incarnation, said, tensor))

    async def _end(self, made: Offer, life: float) -> None:
        give_up = time.monotonic() + life
        while time.monotonic() < give_up and not self._paused:  # noqa: ASYNC110  (either ends it)
            await asyncio.sleep(min(0.2, max(0.0, give_up - time.monotonic())))
        await self._take_back(made)

    async def _take_back(self, made: Offer) -> None:
        """What comes into its memory afterwards must be in nobody's pull."""
        for _ in range(10):
            try:
                if made.registered:
                    await self.manager.unregister_cache(made.cache.cache_id)
                else:
                    number = layout.req_id(self.setup.incarnation, made.number)
                    await self.manager.remove_cache_key(CacheKey(layout.cluster_id(self.setup.number), number))
                    await self.manager.deallocate_cache(made.cache)
                break
            except LLMException as error:
                self.voice.say("counts", counts={f"release: {error.status_code.name}": 1})
        else:
            self.voice.violation("release", f"prefill {self.setup.number}: {made.cache!r} cannot be released")
        del self._offers[made.number]
        if made.registered:
            for tensor, array in enumerate(made.memory):
                fill(array[0], Identity(layout.SPOILT, self.setup.number, self.setup.incarnation, 0, 0, tensor))
            self._spare[made.memory[0].size].append(made.memory)

    # -- memory that is written in place ------------------------------------------------------------------------------

    async def lock(self) -> dict[str, int]:
        """Nothing is written until as many `unlock`s have come."""
        await self._open.wait()
        self._readers += 1
        self._no_readers.clear()
        return {"generation": self.generation}

    def unlock(self, count: int = 1) -> None:
        self._readers -= count
        if self._readers == 0:
            self._no_readers.set()

    async def rewrite(self) -> None:
        while True:
            await asyncio.sleep(_REWRITE)
            if time.monotonic() < self._began + _YOUTH:
                continue
            self._open.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._no_readers.wait(), _READERS)
            if self._readers == 0:
                self.generation = (self.generation + 1) % 1024
                self._write()
            self._open.set()

    # -- the office -------------------------------------------------------------------------------------------------

    async def office(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One decode process; its locks end with its connection."""
        held = [0]
        self._callers.add(writer)
        try:
            while line := await reader.readline():
                self.run(self._answer(json.loads(line), writer, held))
        except (OSError, ValueError):
            pass
        finally:
            self._callers.discard(writer)
            self.unlock(held[0])
            writer.close()

    async def _answer(self, asked: dict[str, Any], writer: asyncio.StreamWriter, held: list[int]) -> None:
        request, what = asked.pop("id"), asked.pop("what")
        said: dict[str, Any] = {"incarnation": self.setup.incarnation}
        if what == "offer":
            said.update(self.offer(**asked))
        elif what == "publish":
            try:
                said.update(await self.publish(**asked))
            except LLMException as error:
                said["failed"] = str(error)
        elif what == "lock":
            said.update(await self.lock())
            held[0] += 1
        elif what == "unlock":
            held[0] -= 1
            self.unlock()
        elif what == "settle":
            said["settled"] = await self._settle(self.slots if asked["which"] == "slots" else self.pages)
        if not writer.is_closing():
            writer.write(json.dumps({"id": request, **said}).encode() + b"\n")
        elif what == "lock":
            held[0] -= 1
            self.unlock()

    async def _settle(self, cache: Cache) -> bool:
        """After a push that could not say whether it goes on: see P1 in docs/promises.md."""
        await asyncio.sleep(self.setup.timing.settle_timeout / 1000)
        try:
            await self.manager.settled(cache, 10_000)
        except LLMException:
            return False
        return True

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        if self._closing:  # the office hears what was asked before it closed
            coroutine.close()
            return
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.voice.violation("prefill", f"prefill {self.setup.number}: {task.exception()!r}")

    # -- ends -------------------------------------------------------------------------------------------------------

    async def quiet(self) -> dict[str, Any]:
        """Take all offers back, and say what is held then."""
        self._paused = True
        give_up = time.monotonic() + _IDLE
        while self._offers and time.monotonic() < give_up:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        self._spare.clear()
        while True:
            held = holdings([self.node])
            if not (held["busy"] or held["keys"]) or time.monotonic() > give_up:
                return {**held, "counters": self.node.counters}
            await asyncio.sleep(0.05)

    def resume(self) -> None:
        self._paused = False

    async def close(self) -> None:
        self._paused = self._closing = True
        for caller in tuple(self._callers):
            caller.close()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_IDLE)
        began = time.monotonic()
        await self.node.finalize()
        self.voice.say("finalized", seconds=time.monotonic() - began)


def _addresses(memory: list[Bytes]) -> list[int]:
    return [int(array.ctypes.data) for array in memory]


async def prefill(voice: Voice, setup: layout.PrefillSetup) -> None:
    """The whole life of the process, as the parent wants it."""
    before = descriptors()
    counters = await _live(voice, setup)  # all that it had is garbage then
    voice.say("finished", left=await leftovers(before), counters=counters)


async def _live(voice: Voice, setup: layout.PrefillSetup) -> dict[str, int]:
    made = Prefill(setup, voice)
    await made.open()
    Path(setup.office).unlink(missing_ok=True)  # noqa: ASYNC240
    office = await asyncio.start_unix_server(made.office, setup.office)
    made.run(made.rewrite())
    voice.say("ready", address=made.node.listen_address, at=time.monotonic())
    while True:
        command, _ = await voice.commands.get()
        if command == "quiet":
            voice.say("quiet", **await made.quiet())
        elif command == "resume":
            made.resume()
        elif command in ("leave", "finish"):
            break
    office.close()
    await made.close()
    return made.node.counters
