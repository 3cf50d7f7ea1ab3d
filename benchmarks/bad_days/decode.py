"""A decode process of a chaos run: links two nodes to every source, lets workers loose, and tells what became of it.

Node "plain" pulls by key, node "remote" has remote cache access. Probes pull a little from every source all the time:
they say when it is there again. It must not know faults, but for restarts: what was published before one is stale.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any, Final

from bad_days import layout
from bad_days.calls import Place, Runner, place
from bad_days.content import Identity, identities, story
from bad_days.lines import OfficeLine
from bad_days.process import Voice, descriptors, holdings, leftovers
from bad_days.pushes import Pusher
from kvpull_async import BlocksCacheKey, CacheKeyByIdAndIndex, LLMDataDist, LLMException, LLMRole, LLMStatusCode

__all__ = ["NODES", "decode"]

NODES: Final = ("plain", "remote")
_PROBE: Final = 8 * 1024
_PROBE_MS: Final = 500
_PROBE_PAUSE: Final = 0.03
_TELL: Final = 0.5
_LAG: Final = 0.02
_IDLE: Final = 30.0
_LINK_MS: Final = 2000
_AWAY: Final = 0.03
"""Seconds that a worker rests after a failure: a source that is away refuses so fast that little else would happen."""


class Decode:
    def __init__(self, setup: layout.DecodeSetup, voice: Voice) -> None:
        self.setup, self.voice = setup, voice
        self.sources = len(setup.addresses)
        seed = f"decode {setup.seed} {setup.number} {setup.incarnation}"
        who = f"decode {setup.number}.{setup.incarnation}"
        self.runner = Runner(who, voice, setup.sabotage, self._stacks, random.Random(seed))
        self.offices = [OfficeLine(path) for path in setup.offices]
        self.nodes = [LLMDataDist(LLMRole.DECODER, 1000 * (1 + kind) + setup.number) for kind in range(len(NODES))]
        self.known = [0] * self.sources
        """The incarnation of each source that is surely there: no pull that begins now brings anything older."""
        self.probes: list[tuple[int, int, float, float]] = []
        self._linked: set[tuple[int, int]] = set()
        self._running = asyncio.Event()
        self._over = False
        self._busy = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._pushers: list[Pusher] = []
        self._places: list[Place] = []

    async def open(self) -> None:
        options = [{}, {"enable_remote_cache_accessible": True}]
        for node, more in zip(self.nodes, options, strict=True):
            await node.init(layout.options(self.setup.path, self.setup.timing, **more))
        managers = {name: node.cache_manager for name, node in zip(NODES, self.nodes, strict=True)}
        workers = self.setup.workers
        for number in range(workers):
            row = self.setup.number * workers + number
            who = Identity(0, self.setup.number, self.setup.incarnation, number << 18, 0, 0)
            self._pushers.append(Pusher(self.runner, managers, self.offices, self.sources, who=who, row=row))
        for kind in range(len(NODES)):
            for source in range(self.sources):
                self._start(self._link(kind, source))
                self._start(self._probe(kind, source))
        for pusher in self._pushers:
            self._start(self._work(pusher))
        self._start(self._lag())
        self._start(self._tell())
        self._running.set()

    def _start(self, coroutine: Any) -> None:
        self._tasks.append(asyncio.ensure_future(coroutine))

    # -- links ------------------------------------------------------------------------------------------------------

    async def _link(self, kind: int, source: int) -> None:
        """Until it is linked; from then on the link comes back by itself."""
        info = layout.cluster(source, self.setup.addresses[source])
        while not self._over:
            began = time.monotonic()
            overall, codes = await self.nodes[kind].link_clusters([info], _LINK_MS)
            if overall == LLMStatusCode.LLM_SUCCESS or codes == [LLMStatusCode.LLM_ALREADY_LINK]:
                self._linked.add((kind, source))
                self.voice.say("linked", source=source, ms=(time.monotonic() - began) * 1000)
                return
            self.runner.counts[f"link: {overall.name}"] += 1
            await asyncio.sleep(0.2)

    def _stacks(self) -> str:
        engines = [node._core.engine for node in self.nodes]
        return f"pending on the cores: {[engine.core.pending() for engine in engines]}; {engines!r}"

    # -- work -------------------------------------------------------------------------------------------------------

    async def _work(self, pusher: Pusher) -> None:
        rng, kinds = self.runner.random, layout.CALL_KINDS
        calls = {kind: getattr(pusher, kind.replace(" ", "_")) for kind in kinds}
        while True:
            await self._running.wait()
            if self._over:
                return
            source = rng.randrange(self.sources)
            if not all((kind, source) in self._linked for kind in range(len(NODES))):
                await asyncio.sleep(_AWAY)
                continue
            kind = rng.choices(list(kinds), list(kinds.values()))[0]
            before, self._busy = self.runner.counts["status: LLM_LINK_FAILED"], self._busy + 1
            try:
                await calls[kind](source)
            except Exception as error:  # noqa: BLE001  (what is not foreseen is told, and the others go on)
                self.voice.violation("unforeseen", f"{self.runner.who} {kind} prefill {source}: {error!r}")
            self._busy -= 1
            failed = self.runner.counts["status: LLM_LINK_FAILED"] > before
            await asyncio.sleep(rng.uniform(0.0, self.setup.pause) + (_AWAY if failed else 0.0))

    # -- probes -----------------------------------------------------------------------------------------------------

    async def _probe(self, kind: int, source: int) -> None:
        manager = self.nodes[kind].cache_manager
        plain = NODES[kind] == "plain"
        nbytes = layout.BLOCK if plain else _PROBE
        used = await place(manager, number=1, nbytes=nbytes, blocks=plain)
        self._places.append(used)
        cluster, newest = layout.cluster_id(source), 0
        while True:
            await self._running.wait()
            if self._over:
                return
            if (kind, source) in self._linked:
                self._busy += 1
                known, began = max(newest, self.known[source]), time.monotonic()
                try:
                    if plain:
                        key = BlocksCacheKey(cluster, layout.BLOCKS_MODEL)
                        await manager.pull_blocks(key, used.cache, [0], [0], timeout=_PROBE_MS)
                    else:
                        row = CacheKeyByIdAndIndex(cluster, layout.BASE, 0)
                        await manager.pull_cache(row, used.cache, 0, nbytes, timeout=_PROBE_MS)
                except LLMException:
                    self.runner.counts["probe: failed"] += 1
                else:
                    self.probes.append((source, kind, began, time.monotonic()))
                    newest = self._seen(used, kind, source, known)
                used.refill()
                self._busy -= 1
            await asyncio.sleep(_PROBE_PAUSE)

    def _seen(self, used: Place, kind: int, source: int, known: int) -> int:
        """The incarnation that a probe has found: one, and none that is known to be over."""
        make = layout.block if NODES[kind] == "plain" else layout.base
        found = {who for array in used.memory for who in identities(array[0])}
        incarnations = {who.incarnation for who in found}
        newest = max(incarnations)
        wanted = {make(source, newest, 0, 0, tensor) for tensor in range(layout.TENSORS)}
        self.runner.counts["probe: ok"] += 1
        if found != wanted or newest < known:
            wrong = make(source, max(known, 1), 0, 0, 0)
            text = f"{self.runner.who} probe {NODES[kind]} of prefill {source}, {known=}: {found}"
            self.voice.violation("wrong bytes", f"{text}\n{story(used.memory[0][0], wrong)}")
            return known
        return newest

    # -- what is told -----------------------------------------------------------------------------------------------

    async def _lag(self) -> None:
        """How late this loop is, as whole ms: what a busy machine and the judging here add to every end of a call."""
        while not self._over:
            began = time.monotonic()
            await asyncio.sleep(_LAG)
            self.runner.counts[f"lag: {int((time.monotonic() - began - _LAG) * 1000)}"] += 1

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(_TELL)
            self.tell()

    def tell(self) -> None:
        runner = self.runner
        late, cancels, failures = runner.late[:], runner.cancels[:], runner.failures[:]
        self.voice.say(
            "work", counts=dict(runner.counts), late=late, cancels=cancels, failures=failures, probes=self.probes
        )
        runner.counts.clear()
        del runner.late[: len(late)], runner.cancels[: len(cancels)], runner.failures[: len(failures)]
        self.probes = []
        while self.voice.links:
            at, line = self.voice.links.popleft()
            self.voice.say("link", at=at, line=line)

    async def quiet(self) -> dict[str, Any]:
        """Let all calls end, give the workers' memory back, and say what is held then."""
        await self._still()
        for pusher in self._pushers:
            await pusher.close()
        held = holdings(self.nodes)
        if held["caches"] != len(self._places):
            text = f"{self.runner.who}: {held['caches']} caches are held instead of {len(self._places)}"
            self.voice.violation("leak", text)
        return {**held, "counters": [node.counters for node in self.nodes]}

    async def _still(self) -> None:
        self._running.clear()
        give_up = time.monotonic() + _IDLE
        while self._busy and time.monotonic() < give_up:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        if self._busy:
            self.voice.violation("hang", f"{self.runner.who}: {self._busy} calls do not end. {self._stacks()}")

    def resume(self) -> None:
        self._running.set()

    async def close(self) -> None:
        await self._still()
        self._over = True
        self._running.set()
        await asyncio.wait(self._tasks[:-1], timeout=_IDLE)
        self.tell()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=1.0)
        for pusher in self._pushers:
            await pusher.close()
        for used in self._places:
            await used.close()
        for office in self.offices:
            await office.close()
        for node in self.nodes:
            began = time.monotonic()
            await node.finalize()
            self.voice.say("finalized", seconds=time.monotonic() - began)


async def decode(voice: Voice, setup: layout.DecodeSetup) -> None:
    """The whole life of the process, as the parent wants it."""
    before = descriptors()
    counters = await _live(voice, setup)
    voice.say("finished", left=await leftovers(before), counters=counters)


async def _live(voice: Voice, setup: layout.DecodeSetup) -> list[dict[str, int]]:
    made = Decode(setup, voice)
    await made.open()
    voice.say("ready", at=time.monotonic())
    while True:
        command, fields = await voice.commands.get()
        if command == "quiet":
            voice.say("quiet", **await made.quiet())
        elif command == "resume":
            made.resume()
        elif command == "restarted":
            made.known[fields["source"]] = fields["incarnation"]
        elif command in ("leave", "finish"):
            break
    await made.close()
    return [node.counters for node in made.nodes]
