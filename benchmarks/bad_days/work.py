"""What the workers of a decode process do: every kind of pull, and the judgement of every byte that came.

It must not know faults; a call that may fail says so, and whoever reads the failures knows what happened meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from bad_days import layout
from bad_days.calls import AT_ONCE, Call, Place, Runner, place
from bad_days.content import Bytes, Identity, holds, identities, refill, story
from bad_days.lines import OfficeLine
from kvpull_async import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex

__all__ = ["Offer", "Piece", "Worker"]

_DOOMED: Final = 0.12
"""Share of the offers that are taken away within some ms."""
_LIFE: Final = 2.5
"""Seconds in which an offer is surely there."""
_SABOTAGED: Final = 50
_BLOCK_ROWS: Final = 66


@dataclass
class Offer:
    """A key that a source has told of."""

    source: int
    incarnation: int
    number: int
    size: int
    cache_id: int
    until: float
    doomed: bool

    @property
    def key(self) -> CacheKey:
        return CacheKey(layout.cluster_id(self.source), layout.req_id(self.incarnation, self.number))


@dataclass
class Piece:
    """Bytes that have come, what they must be, and where they lie in the row that they are from."""

    found: Bytes
    identity: Identity
    offset: int = 0


class Worker:
    def __init__(self, runner: Runner, managers: dict[str, Any], offices: list[OfficeLine], source_count: int) -> None:
        self.runner = runner
        self.random = runner.random
        self.offices = offices
        self._managers = managers
        self._sources = source_count
        self._stock: list[Offer] = []
        self._places: dict[tuple[Any, ...], Place] = {}

    # -- destinations -----------------------------------------------------------------------------------------------

    async def place(self, node: str, rows: int, nbytes: int, *, blocks: bool = False, what: str = "") -> Place:
        """One of its own, allocated or registered by chance, and used again and again."""
        named = (node, rows, nbytes, blocks, what)
        found = self._places.get(named)
        if found is None:
            registered = self.random.random() < 0.4
            manager = self._managers[node]
            found = await place(manager, number=rows, nbytes=nbytes, blocks=blocks, registered=registered)
            self._places[named] = found
        return found

    async def renew_cache(self, _: int) -> None:
        """Give a destination back; another one is made when it is needed."""
        if self._places:
            named = self.random.choice(list(self._places))
            found = self._places[named]
            if found.last is not None and not await found.intact():
                self.runner.changed(found)
            await found.close()
            del self._places[named]
            self.runner.counts["renew cache: ok"] += 1

    async def close(self) -> None:
        """Give all of them back."""
        for found in self._places.values():
            if found.last is not None and not await found.intact():
                self.runner.changed(found)
            await found.close()
        self._places.clear()

    # -- offers -----------------------------------------------------------------------------------------------------

    async def offer(self, source: int, *, registered: bool | None = None) -> Offer | None:
        """A fresh one; where none can be had, one that was kept, whose source may be away or another process by now."""
        sizes = layout.SIZES
        size = self.random.choices(list(sizes), list(sizes.values()))[0]
        doom = self.random.choice((0.0005, 0.002, 0.005, 0.02)) if self.random.random() < _DOOMED else 0.0
        wanted = self.random.random() < 0.4 if registered is None else registered
        now = asyncio.get_running_loop().time()
        told = await self.offices[source].ask("publish", size=size, registered=wanted, doom=doom)
        if told is None or "cache_id" not in told:
            kept = [offer for offer in self._stock if offer.source == source]
            if kept:
                self._stock.remove(kept[0])
            return kept[0] if kept else None
        made = Offer(source, told["incarnation"], told["number"], size, told["cache_id"], now + _LIFE, doom > 0)
        if self.random.random() < 0.1 and len(self._stock) < 8:
            self._stock.append(made)
            return None
        return made

    def _explained(self, offer: Offer) -> bool:
        return offer.doomed or offer.until < asyncio.get_running_loop().time() + 2.5

    def _back(self, call: Call, offer: Offer) -> None:
        """P2: what raised has consumed nothing, so the same key can be asked for again."""
        late = call.fate == "cancelled"
        if call.error is not None and not late and self.random.random() < 0.5 and len(self._stock) < 8:
            self._stock.append(offer)

    async def keyed(
        self, kind: str, offer: Offer | None, start: Callable[[Offer, Call, Place], Any], where: Place | None = None
    ) -> tuple[Call, Place] | None:
        """Make the call, and give the offer back to the stock where it failed."""
        if offer is None:
            return None
        used = where or await self.place("plain", 2, offer.size)
        call = self.runner.call(kind, offer.source, f"{offer}", explained=self._explained(offer))
        done = await self.runner.run(call, lambda: start(offer, call, used), used)
        self._back(call, offer)
        return (call, used) if done else None

    # -- judging ----------------------------------------------------------------------------------------------------

    async def judge(
        self, call: Call, used: Place, pieces: list[Piece], also: Callable[[Identity, Identity], bool]
    ) -> None:
        """All bytes that came are those asked for, all others are the canary still. `also(wanted, found)` says which
        other identity a piece may have as a whole; then all pieces must be of that incarnation.
        """
        if self.runner.sabotage in ("flip", "all") and self.random.randrange(_SABOTAGED) == 0:
            pieces[-1].found[-1] ^= 1
        if not await self._right(pieces) and not self._another(pieces, also):
            bad = next(piece for piece in pieces if not holds(piece.found, piece.identity, piece.offset))
            text = f"{call.text} timeout={call.timeout:.1f} fate={call.fate!r}\n{bad.offset=} {bad.identity}"
            self.runner.voice.violation("wrong bytes", f"{text}\n{story(bad.found, bad.identity, bad.offset)}")
        self.runner.counts["bytes checked"] += sum(piece.found.size for piece in pieces)
        for piece in pieces:
            refill(piece.found)
        if not await used.intact():
            self.runner.voice.violation("wrong bytes", f"{call.text}: bytes that nobody asked for: {used.where()}")
            used.refill()

    async def _right(self, pieces: list[Piece]) -> bool:
        """In pieces, so that the loop on which calls end is not held long."""
        looked = 0
        for piece in pieces:
            if not holds(piece.found, piece.identity, piece.offset):
                return False
            looked += piece.found.size
            if looked >= AT_ONCE:
                looked = 0
                await asyncio.sleep(0)
        return True

    def _another(self, pieces: list[Piece], also: Callable[[Identity, Identity], bool]) -> bool:
        incarnations = set()
        for piece in pieces:
            found = identities(piece.found, piece.offset) if piece.offset % 8 == 0 else {}
            whole = next(iter(found), None)
            if len(found) != 1 or whole is None or not also(piece.identity, whole):
                return False
            incarnations.add(whole.incarnation)
        self.runner.counts["answers of a restarted source"] += len(incarnations) == 1
        return len(incarnations) == 1

    # -- pulls by key: what is found under it can be one thing only ---------------------------------------------------

    async def pull_by_key(self, source: int) -> None:
        row = self.random.randrange(2)

        def start(offer: Offer, call: Call, used: Place) -> Any:
            return used.manager.pull_cache(offer.key, used.cache, row, timeout=call.timeout)

        offer = await self.offer(source)
        if (made := await self.keyed("pull by key", offer, start)) is not None and offer is not None:
            await self.judge(*made, _whole(made[1].memory, row, offer), _nothing_else)

    async def pull_a_part(self, source: int) -> None:
        """Of some tensors, from somewhere to somewhere; it uses up nothing."""
        offer = await self.offer(source)
        if offer is None:
            return
        size = self.random.randint(1, offer.size)
        src, dst = self.random.randint(0, offer.size - size), self.random.randint(0, offer.size - size)
        if self.random.random() < 0.5:
            size, src, dst = max(8, size // 8 * 8), src // 8 * 8, dst // 8 * 8
        count = self.random.randint(1, layout.TENSORS)
        first, into = (self.random.randint(0, layout.TENSORS - count) for _ in range(2))
        layers = {"src_layer_range": range(first, first + count), "dst_layer_range": range(into, into + count)}
        more = {"src_cache_offset": src, "dst_cache_offset": dst, **layers, "tensor_num_per_layer": 1}

        def start(offer: Offer, call: Call, used: Place) -> Any:
            return used.manager.pull_cache(offer.key, used.cache, 1, size, **more, timeout=call.timeout)

        made = await self.keyed("pull a part", offer, start)
        if made is not None:
            memory = made[1].memory
            pieces = [
                Piece(memory[into + i][1, dst : dst + size], _identity(offer, first + i), src) for i in range(count)
            ]
            await self.judge(*made, pieces, _nothing_else)

    async def pull_layers(self, source: int) -> None:
        """Each layer is looked at when it is said to be there."""
        offer = await self.offer(source)

        async def start(offer: Offer, call: Call, used: Place) -> None:
            more = {"tensor_num_per_layer": 1, "timeout": call.timeout}
            async with used.manager.pull_layers(offer.key, used.cache, 0, **more) as layers:
                async for layer in layers:
                    if not holds(used.memory[layer][0, : layout.BLOCK], _identity(offer, layer)):
                        text = f"{call.text}: layer {layer} had not landed"
                        self.runner.voice.violation("wrong bytes", text)

        if (made := await self.keyed("pull layers", offer, start)) is not None and offer is not None:
            await self.judge(*made, _whole(made[1].memory, 0, offer), _nothing_else)

    async def pull_into_blocks(self, source: int) -> None:
        offer = await self.offer(source)
        if offer is None:
            return
        count = offer.size // layout.BLOCK
        into = self.random.sample(range(_BLOCK_ROWS), count)
        used = await self.place("plain", _BLOCK_ROWS, layout.BLOCK, blocks=True)

        def start(offer: Offer, call: Call, used: Place) -> Any:
            return used.manager.pull_blocks(offer.key, used.cache, [], into, timeout=call.timeout)

        made = await self.keyed("pull into blocks", offer, start, used)
        if made is not None:
            pieces = [
                Piece(array[block], _identity(offer, tensor), number * layout.BLOCK)
                for tensor, array in enumerate(used.memory)
                for number, block in enumerate(into)
            ]
            await self.judge(*made, pieces, _nothing_else)

    async def wait_for_key(self, source: int) -> None:
        """It is published while the pull waits, or too late."""
        late, size = self.random.uniform(0.0, 0.4), min(layout.SIZES)
        asked = {"size": size, "registered": False, "late": late, "doom": 0.0}
        told = await self.offices[source].ask("offer", **asked)
        if told is None:
            return
        until = asyncio.get_running_loop().time() + late + _LIFE
        offer = Offer(source, told["incarnation"], told["number"], size, 0, until, doomed=False)

        def start(offer: Offer, call: Call, used: Place) -> Any:
            return used.manager.pull_cache(offer.key, used.cache, 0, wait_for_key=True, timeout=call.timeout)

        if (made := await self.keyed("wait for key", offer, start)) is not None:
            await self.judge(*made, _whole(made[1].memory, 0, offer), _nothing_else)

    # -- pulls of what may be another process' by now -----------------------------------------------------------------

    async def pull_by_id(self, source: int) -> None:
        """Of a cache that comes and goes. After a restart its id may be that of any other."""
        offer = await self.offer(source)
        if offer is None:
            return
        used = await self.place("remote", 2, offer.size)
        key = CacheKeyByIdAndIndex(layout.cluster_id(source), offer.cache_id, 0)

        def start(_: Offer, call: Call, used: Place) -> Any:
            return used.manager.pull_cache(key, used.cache, 1, timeout=call.timeout)

        made = await self.keyed("pull by id", offer, start, used)
        if made is not None:
            pieces = _whole(used.memory, 1, offer)
            if await self._right(pieces):
                await self.judge(*made, pieces, _nothing_else)
            elif await self.restarted(source, offer.incarnation):
                self.runner.counts["unjudged: the id is another cache's by now"] += 1
                used.refill()
            else:
                await self.judge(*made, pieces, _nothing_else)

    async def restarted(self, source: int, incarnation: int) -> bool:
        """Whether the source is another process now. Waits until it can say so."""
        for _ in range(20):
            told = await self.offices[source].ask("hello")
            if told is not None:
                return bool(told["incarnation"] != incarnation)
            await asyncio.sleep(0.5)
        return True

    async def read_by_id(self, source: int) -> None:
        """Of rows that are written in place: one generation, or all of a later process."""
        row = self.random.randrange(layout.STATIC, layout.ROWS)
        used = await self.place("remote", 2, layout.ROW)
        key = CacheKeyByIdAndIndex(layout.cluster_id(source), layout.BASE, row)
        async with self.offices[source].locked() as told:
            if told is None:
                return
            call = self.runner.call("read by id", source, f"{row=} {told}")
            done = await self.runner.run(
                call, lambda: used.manager.pull_cache(key, used.cache, 0, timeout=call.timeout), used
            )
        if done:
            pieces = [
                Piece(array[0], layout.base(source, told["incarnation"], row, told["generation"], tensor))
                for tensor, array in enumerate(used.memory)
            ]
            await self.judge(call, used, pieces, _younger)

    async def pull_blocks(self, source: int) -> None:
        count = self.random.randint(1, 24)
        src = self.random.sample(range(layout.STATIC, layout.BLOCKS), count)
        dst = self.random.sample(range(_BLOCK_ROWS), count)
        node = self.random.choice(("plain", "remote"))
        used = await self.place(node, _BLOCK_ROWS, layout.BLOCK, blocks=True)
        key = BlocksCacheKey(layout.cluster_id(source), layout.BLOCKS_MODEL)
        async with self.offices[source].locked() as told:
            if told is None:
                return
            call = self.runner.call("pull blocks", source, f"{node} {told} {src=} {dst=}")
            done = await self.runner.run(
                call, lambda: used.manager.pull_blocks(key, used.cache, src, dst, timeout=call.timeout), used
            )
        if done:
            pieces = [
                Piece(array[there], layout.block(source, told["incarnation"], here, told["generation"], tensor))
                for tensor, array in enumerate(used.memory)
                for here, there in zip(src, dst, strict=True)
            ]
            await self.judge(call, used, pieces, _younger)


def _identity(offer: Offer, tensor: int) -> Identity:
    return layout.keyed(offer.source, offer.incarnation, offer.number, tensor)


def _whole(memory: Iterable[Bytes], row: int, offer: Offer) -> list[Piece]:
    return [Piece(array[row], _identity(offer, tensor)) for tensor, array in enumerate(memory)]


def _nothing_else(_wanted: Identity, _found: Identity) -> bool:
    return False


def _younger(wanted: Identity, found: Identity) -> bool:
    """A process that was started later has written only its first generation by then."""
    return found.incarnation > wanted.incarnation and found == wanted._replace(
        incarnation=found.incarnation, generation=0
    )
