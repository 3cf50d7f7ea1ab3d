"""What the workers of a decode process push, and how it is read again. P1 of docs/promises.md says when a place at the
receiver may be used for something else after a push that failed: that is kept here, and everything else is not waited
for, so a push that goes on although it said otherwise spoils the next one, and is seen.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any, Final

from bad_days import layout
from bad_days.calls import HANG, Call, Place, Runner
from bad_days.content import Bytes, Identity, blank, fill, holds, story
from bad_days.lines import OfficeLine
from bad_days.work import Worker
from kvpull_async import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    LLMException,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)

__all__ = ["Pusher"]

_READ_MS: Final = 2500.0
_MARGIN: Final = 0.1


@dataclass
class Slot:
    """A worker's own place at one source."""

    source: int
    row: int
    which: str
    unsafe_until: float | None = None
    """A push there could not say whether it goes on."""


class AtOnce(LayerSynchronizer):
    """Every layer has been computed already."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


class Pusher(Worker):
    def __init__(
        self, runner: Runner, managers: dict[str, Any], offices: list[OfficeLine], source_count: int, *, who: Identity,
        row: int,
    ) -> None:  # fmt: skip
        super().__init__(runner, managers, offices, source_count)
        self._slots = [Slot(source, row, "slots") for source in range(source_count)]
        self._pages = [Slot(source, row, "pages") for source in range(source_count)]
        self._who = who
        """Its number says which worker this is, in the upper bits; the lower ones count what is pushed."""
        self._pushed = itertools.count()

    def _fresh(self, kind: int) -> Identity:
        return self._who._replace(kind=kind, number=self._who.number | next(self._pushed) % (1 << 18))

    async def _free(self, slot: Slot) -> bool:
        """Whether nothing writes there any more."""
        if slot.unsafe_until is None:
            return True
        if asyncio.get_running_loop().time() < slot.unsafe_until:
            return False
        told = await self.offices[slot.source].ask("settle", which=slot.which, seconds=12.0)
        if told is None:
            return False
        if not told["settled"]:
            self.runner.voice.violation("hang", f"{slot}: the receiver's quarantine does not end")
        slot.unsafe_until = None
        return True

    def _mark(self, slot: Slot, call: Call) -> None:
        if call.unsafe:
            settle = layout.Timing().settle_timeout / 1000
            slot.unsafe_until = max(call.ended, call.deadline) + settle + _MARGIN
            self.runner.counts["pushes that could not say"] += 1

    # -- whole rows -------------------------------------------------------------------------------------------------

    async def push(self, source: int) -> None:
        slot = self._slots[source]
        if not await self._free(slot):
            return
        identity, incarnation = self._fresh(layout.PUSHED), self.offices[source].incarnation
        ship = await self.place("remote", 1, layout.ROW, what="ship")
        for tensor, array in enumerate(ship.memory):
            fill(array[0], identity._replace(tensor=tensor))
        key = CacheKeyByIdAndIndex(layout.cluster_id(source), layout.SLOTS, slot.row)
        call = self.runner.call("push", source, f"{slot} {identity}")
        done = await self.runner.run(
            call, lambda: ship.manager.push_cache(key, ship.cache, timeout=call.timeout), ship, pushes=True
        )
        self._mark(slot, call)
        if done:
            await self._look(call, slot, identity, incarnation)
        elif not call.unsafe and self.random.random() < 0.5:
            await self._still(call, slot)

    async def transfer(self, source: int) -> None:
        """To one or two sources at once, layer by layer."""
        other = self.random.randrange(self._sources)
        slots = [self._slots[number] for number in sorted({source, other})]
        for slot in slots:
            if not await self._free(slot):
                return
        identity, before = self._fresh(layout.PUSHED), [self.offices[slot.source].incarnation for slot in slots]
        ship = await self.place("remote", 1, layout.ROW, what="ship")
        for tensor, array in enumerate(ship.memory):
            fill(array[0], identity._replace(tensor=tensor))
        layers = range(layout.TENSORS // 2)
        keys = [CacheKeyByIdAndIndex(layout.cluster_id(slot.source), layout.SLOTS, slot.row) for slot in slots]
        configs = [TransferWithCacheKeyConfig(key, layers, layers) for key in keys]
        call = self.runner.call("transfer", source, f"{slots} {identity}", cancel=False)
        call.began = asyncio.get_running_loop().time()
        task = ship.manager.transfer_cache_async(ship.cache, AtOnce(), configs, timeout=call.timeout)
        bound = len(layers) * call.timeout + HANG * 1000
        results = await task.get_results(round(bound))
        call.ended = asyncio.get_running_loop().time()
        if not task.done():
            self.runner.voice.violation("hang", f"{call.text}: {task!r}")
            return
        ship.refill()
        for slot, status, error, incarnation in zip(slots, results, task.exceptions, before, strict=True):
            name = "not asked for" if status is None else status.name
            self.runner.counts[f"transfer: {'ok' if name == 'LLM_SUCCESS' else name}"] += 1
            call.error = error
            self._mark(slot, call)
            if status == LLMStatusCode.LLM_SUCCESS:
                await self._look(call, slot, identity, incarnation)

    async def _look(self, call: Call, slot: Slot, identity: Identity, incarnation: int) -> None:
        """What was pushed is there as a whole, unless the receiver was started anew since."""
        used = await self.place("remote", 2, layout.ROW)
        if not await self._read(slot, used, 0):
            return
        found = [array[0] for array in used.memory]
        wanted = [identity._replace(tensor=tensor) for tensor in range(layout.TENSORS)]
        await self._judge(call, slot, found, wanted, incarnation)
        used.refill()

    async def _judge(
        self, call: Call, slot: Slot, found: list[Bytes], wanted: list[Identity], incarnation: int
    ) -> None:
        self.runner.counts["bytes checked"] += sum(row.size for row in found)
        if self.runner.sabotage in ("flip", "all") and self.random.randrange(50) == 0:
            found[0][7] ^= 1
        if all(holds(row, identity) for row, identity in zip(found, wanted, strict=True)):
            return
        if all(blank(row) for row in found) and await self.restarted(slot.source, incarnation):
            self.runner.counts["pushed to a source that was restarted"] += 1
            return
        row, identity = next((r, i) for r, i in zip(found, wanted, strict=True) if not holds(r, i))
        text = f"{call.text}: pushed ({call.status()}), and read again:\n{story(row, identity)}"
        self.runner.voice.violation("wrong bytes", text)

    async def _read(self, slot: Slot, used: Place, row: int) -> bool:
        key = CacheKeyByIdAndIndex(layout.cluster_id(slot.source), layout.SLOTS, slot.row)
        try:
            await used.manager.pull_cache(key, used.cache, row, timeout=_READ_MS)
        except LLMException as error:
            self.runner.counts[f"read again: {getattr(error.status_code, 'name', error.status_code)}"] += 1
            used.refill()  # some of it may have come
            return False
        self.runner.counts["read again: ok"] += 1
        return True

    async def _still(self, call: Call, slot: Slot) -> None:
        """P1 of a push that raised and did not say otherwise: nothing is written there any more."""
        incarnation = self.offices[slot.source].incarnation
        used = await self.place("remote", 2, layout.ROW)
        first = await self._read(slot, used, 0)
        await asyncio.sleep(self.random.choice((0.001, 0.005, 0.02)))
        if first and await self._read(slot, used, 1):
            same = all(bool((array[0] == array[1]).all()) for array in used.memory)
            if not same and not await self.restarted(slot.source, incarnation):
                self.runner.voice.violation("settled", f"{call.text}: {call.status()}, and its place still changes")
        used.refill()

    # -- blocks -----------------------------------------------------------------------------------------------------

    async def push_blocks(self, source: int) -> None:
        slot = self._pages[source]
        if not await self._free(slot):
            return
        there = [layout.PAGES * slot.row + page for page in range(layout.PAGES)]
        mine = self.random.sample(range(2 * layout.PAGES), layout.PAGES)
        identities, incarnation = [self._fresh(layout.PUSHED_BLOCK) for _ in mine], self.offices[source].incarnation
        ship = await self.place("remote", 2 * layout.PAGES, layout.BLOCK, blocks=True, what="ship")
        for tensor, array in enumerate(ship.memory):
            for block, identity in zip(mine, identities, strict=True):
                fill(array[block], identity._replace(tensor=tensor))
        key = BlocksCacheKey(layout.cluster_id(source), layout.PAGED_MODEL)
        call = self.runner.call("push blocks", source, f"{slot} {mine=} {identities[0]}")
        done = await self.runner.run(
            call,
            lambda: ship.manager.push_blocks(key, ship.cache, mine, there, timeout=call.timeout),
            ship,
            pushes=True,
        )
        self._mark(slot, call)
        if not done:
            return
        try:
            await ship.manager.pull_blocks(key, ship.cache, there, mine, timeout=_READ_MS)
        except LLMException as error:
            self.runner.counts[f"read again: {getattr(error.status_code, 'name', error.status_code)}"] += 1
        else:
            self.runner.counts["read again: ok"] += 1
            found = [array[block] for array in ship.memory for block in mine]
            wanted = [identity._replace(tensor=tensor) for tensor in range(layout.TENSORS) for identity in identities]
            await self._judge(call, slot, found, wanted, incarnation)
        ship.refill()
