"""Whether a stopped peer slows down the pulls from others.

One process pulls from seven sources at once, each over a link of its own, in two kinds of turns: calm, with the eighth
link idle, and with the eighth source stopped (SIGSTOP) while it is being pulled from, timeout after timeout. The median
time of the pulls on the seven links in the one is compared with that in the other, turn by turn.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from figures import Spread, judge, machine, parsed, percentile, print_table, save, standard_arguments
from kv_nodes import PULLER_CLUSTER, AwaitingNode
from kvpull_async import Cache, LLMException, LLMRole, LLMTimeoutError
from processes import Child
from quiet import Neighbours
from sources import prefill_side
from workloads import KIB, Arena, EntryPull, Shape, own_memory, wrong_bytes

BOUND: Final = 20.0
LINKS: Final = 8
SHAPE: Final = Shape(tensors=16, blocks=16, block_nbytes=32 * KIB)
PULLS: Final = {
    "4 MiB": EntryPull(range(SHAPE.tensors), range(SHAPE.tensors), SHAPE.entry_nbytes),
    "4 KiB": EntryPull(range(3, 4), range(4, 5), 4 * KIB),
}
STOPPED_TIMEOUT_MS: Final = 200
RECOVERY_MS: Final = 10_000
SEED: Final = 21
Times = dict[str, dict[str, list[list[float]]]]
"""Seconds of each pull, by size, kind of turn, and round."""


class Peer:
    """One source and this side's end of its link."""

    def __init__(self, node: AwaitingNode, source: Child, cluster_id: int) -> None:
        self.source = source
        self._node = node
        self._cluster_id = cluster_id
        self.memory: Arena = own_memory(SHAPE)
        self.memory.poison()
        self._cache: Cache = node.entries(self.memory)[0]
        _, address = source.ask("open")
        node.link(cluster_id, address)

    def call(self, size: str, **extra: Any) -> Callable[[], Any]:
        return self._node.call(PULLS[size], self._cache, cluster_id=self._cluster_id, **extra)

    async def pull_until(self, end: float, size: str) -> list[float]:
        """The seconds of each pull."""
        call, clock, seconds = self.call(size), time.perf_counter, []
        while time.monotonic() < end:
            began = clock()
            await call()
            seconds.append(clock() - began)
        return seconds

    async def pull_in_vain(self, end: float, size: str) -> int:
        """How many pulls timed out, as all should."""
        call, timeouts = self.call(size, timeout=STOPPED_TIMEOUT_MS), 0
        while time.monotonic() < end:
            try:
                await call()
            except LLMTimeoutError:
                timeouts += 1
            except LLMException:  # the link is given up for a while, which takes no time
                await asyncio.sleep(STOPPED_TIMEOUT_MS / 1000)
        return timeouts

    def check(self, size: str) -> None:
        self.memory.poison()
        self._node.do(self.call(size, timeout=RECOVERY_MS)())
        wrong = wrong_bytes(self.memory, [PULLS[size]], shape=SHAPE, seed=SEED + self._cluster_id)
        if wrong:
            raise RuntimeError(f"{wrong} wrong bytes from cluster {self._cluster_id}")


class Turns:
    """The two kinds of turns. Each returns the times of all pulls on the first seven links."""

    def __init__(self, node: AwaitingNode, peers: Sequence[Peer], *, seconds: float, patience: float) -> None:
        self._node = node
        self._others, self._stopped = peers[:-1], peers[-1]
        self._seconds = seconds
        self._patience = patience
        self._neighbours = Neighbours({os.getpid(), *(peer.source.pid for peer in peers)})
        self.timeouts = 0
        self.others: list[float] = []

    def calm(self, size: str) -> list[float]:
        with self._neighbours.noted(self.others, patience=self._patience):
            times: list[float] = self._node.do(self._pull(size))
        return times

    def disturbed(self, size: str) -> list[float]:
        try:
            with self._neighbours.noted(self.others, patience=self._patience):
                times: list[float] = self._node.do(self._pull_beside_stopped(size))
        finally:
            os.kill(self._stopped.source.pid, signal.SIGCONT)
        self._stopped.check(size)
        return times

    async def _pull(self, size: str) -> list[float]:
        end = time.monotonic() + self._seconds
        every = await asyncio.gather(*(peer.pull_until(end, size) for peer in self._others))
        return [seconds for times in every for seconds in times]

    async def _pull_beside_stopped(self, size: str) -> list[float]:
        vain = asyncio.create_task(self._stopped.pull_in_vain(time.monotonic() + self._seconds + 0.1, size))
        await asyncio.sleep(0.05)  # a pull is under way
        os.kill(self._stopped.source.pid, signal.SIGSTOP)
        times = await self._pull(size)
        self.timeouts += await vain
        return times


def measure(options: argparse.Namespace) -> tuple[Times, Turns]:
    """The times, and the turns that were taken."""
    rounds, seconds = (1, 0.3) if options.quick else (options.rounds, options.seconds)
    found: Times = {}
    with ExitStack() as stack:
        ids = range(1, LINKS + 1)
        sources = [stack.enter_context(Child(prefill_side, SHAPE, id_, SEED + id_)) for id_ in ids]
        node = AwaitingNode(LLMRole.DECODER, PULLER_CLUSTER, shape=SHAPE)
        peers = [Peer(node, source, cluster_id) for source, cluster_id in zip(sources, ids, strict=True)]
        turns = Turns(node, peers, seconds=seconds, patience=options.patience)
        for size in PULLS:
            found[size] = _rounds(turns, peers, size=size, rounds=rounds)
        node.close()
    return found, turns


def _rounds(turns: Turns, peers: Sequence[Peer], *, size: str, rounds: int) -> dict[str, list[list[float]]]:
    for peer in peers:
        peer.check(size)
    kinds = {"calm": partial(turns.calm, size), "beside a stopped peer": partial(turns.disturbed, size)}
    found: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind in kinds if number % 2 == 0 else reversed(kinds):
            found[kind].append(kinds[kind]())
    for peer in peers:
        peer.check(size)
    return found


def tell(found: Times) -> dict[str, tuple[float, float]]:
    """Print the tables; returns what is to be judged."""
    bounds = {}
    for size, kinds in found.items():
        rows = []
        for kind, rounds in kinds.items():
            mids = Spread([1e3 * statistics.median(times) for times in rounds])
            every = [seconds for times in rounds for seconds in times]
            rows.append([kind, mids.text(2), f"{1e3 * percentile(every, 99):.2f}", str(len(every))])
        print_table(f"Pulls of {size} on seven links at once", ["", "ms, median", "p99", "pulls"], rows)
        calm, disturbed = kinds.values()
        changes = Spread(
            [100 * (statistics.median(b) / statistics.median(a) - 1) for a, b in zip(calm, disturbed, strict=True)]
        )
        print(f"change of the median, round by round: {changes.text(1)} %")
        bounds[f"change of the median, {size}"] = (abs(changes.mid), BOUND)
    return bounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    standard_arguments(parser)
    parser.add_argument("--rounds", type=int, default=8, help="of a calm turn and a disturbed one (8)")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn (2)")
    options = parsed(parser)
    found, turns = measure(options)
    print(", ".join(f"{what} {value}" for what, value in machine().items()))
    bounds = tell(found)
    print(f"\n{turns.timeouts} pulls from the stopped peer timed out meanwhile")
    print(f"others used {Spread(turns.others).text(2)} cores during a turn")
    save(options.json, times=found, timeouts=turns.timeouts, others=turns.others)
    return judge(bounds, unit="%", quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
