"""Whether a stopped peer slows down the pulls from others.

One process pulls from seven sources at once, each over a link of its own, in two kinds of turns: calm, with the eighth
link idle, and with the eighth source stopped (SIGSTOP) while it is being pulled from, timeout after timeout. The median
time of the pulls on the seven links in the one is compared with that in the other, round by round. Rounds that other
processes disturbed are left out where enough others remain.
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
from dataclasses import asdict, dataclass
from typing import Any, Final

from figures import Spread, across, judge, machine, parsed, percentile, print_table, save, standard_arguments
from kv_nodes import PULLER_CLUSTER, AwaitingNode
from kvpull_async import Cache, LLMException, LLMRole, LLMTimeoutError
from processes import Child
from quiet import Neighbours, quiet_ones
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


@dataclass
class Round:
    """One turn of each kind: the seconds of every pull on the first seven links, and the cores that others used."""

    calm: list[float]
    disturbed: list[float]
    others: float

    @property
    def change(self) -> float:
        """Of the median, in per cent."""
        return 100 * (statistics.median(self.disturbed) / statistics.median(self.calm) - 1)


class Turns:
    """The two kinds of turns, one after the other."""

    def __init__(self, node: AwaitingNode, peers: Sequence[Peer], *, seconds: float, patience: float) -> None:
        self._node = node
        self._rest, self._stopped = peers[:-1], peers[-1]
        self._seconds = seconds
        self._patience = patience
        self._neighbours = Neighbours({os.getpid(), *(peer.source.pid for peer in peers)})
        self.timeouts = 0

    def round(self, size: str, *, calm_first: bool) -> Round:
        others: list[float] = []
        found: dict[str, list[float]] = {}
        kinds = {"calm": self._calm, "disturbed": self._disturbed}
        for kind in kinds if calm_first else reversed(kinds):
            found[kind] = kinds[kind](size, others)
        return Round(found["calm"], found["disturbed"], max(others))

    def _calm(self, size: str, others: list[float]) -> list[float]:
        with self._neighbours.noted(others, patience=self._patience):
            times: list[float] = self._node.do(self._pull(size))
        return times

    def _disturbed(self, size: str, others: list[float]) -> list[float]:
        try:
            with self._neighbours.noted(others, patience=self._patience):
                times: list[float] = self._node.do(self._pull_beside_stopped(size))
        finally:
            os.kill(self._stopped.source.pid, signal.SIGCONT)
        self._stopped.check(size)
        return times

    async def _pull(self, size: str) -> list[float]:
        end = time.monotonic() + self._seconds
        every = await asyncio.gather(*(peer.pull_until(end, size) for peer in self._rest))
        return [seconds for times in every for seconds in times]

    async def _pull_beside_stopped(self, size: str) -> list[float]:
        vain = asyncio.create_task(self._stopped.pull_in_vain(time.monotonic() + self._seconds + 0.1, size))
        await asyncio.sleep(0.05)  # a pull is under way
        os.kill(self._stopped.source.pid, signal.SIGSTOP)
        times = await self._pull(size)
        self.timeouts += await vain
        return times


def measure(options: argparse.Namespace) -> tuple[dict[str, list[Round]], int]:
    """The rounds by size, and how many pulls from the stopped peer timed out."""
    rounds, seconds = (1, 0.3) if options.quick else (options.rounds, options.seconds)
    found: dict[str, list[Round]] = {}
    with ExitStack() as stack:
        ids = range(1, LINKS + 1)
        sources = [stack.enter_context(Child(prefill_side, SHAPE, id_, SEED + id_)) for id_ in ids]
        node = AwaitingNode(LLMRole.DECODER, PULLER_CLUSTER, shape=SHAPE)
        peers = [Peer(node, source, cluster_id) for source, cluster_id in zip(sources, ids, strict=True)]
        turns = Turns(node, peers, seconds=seconds, patience=options.patience)
        for size in PULLS:
            for peer in peers:
                peer.check(size)
            found[size] = [turns.round(size, calm_first=number % 2 == 0) for number in range(rounds)]
            for peer in peers:
                peer.check(size)
        node.close()
    return found, turns.timeouts


def tell(found: dict[str, list[Round]]) -> dict[str, tuple[float, float]]:
    """Print the tables; returns what is to be judged."""
    bounds = {}
    for size, every in found.items():
        rounds, quiet = quiet_ones(every, [one.others for one in every])
        kinds = {"calm": [one.calm for one in rounds], "beside a stopped peer": [one.disturbed for one in rounds]}
        rows = []
        for kind, turns in kinds.items():
            pulls = [seconds for times in turns for seconds in times]
            mids = Spread([1e3 * mid for mid in across(turns)])
            rows.append([kind, mids.text(2), f"{1e3 * percentile(pulls, 99):.2f}", str(len(pulls)), quiet])
        print_table(f"Pulls of {size} on seven links at once", ["", "ms, median", "p99", "pulls", "quiet"], rows)
        change = Spread([one.change for one in rounds])
        print(f"change of the median, round by round: {change.text(1)} %")
        bounds[f"change of the median, {size}"] = (abs(change.mid), BOUND)
    return bounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    standard_arguments(parser)
    parser.add_argument("--rounds", type=int, default=10, help="of a calm turn and a disturbed one (10)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each turn (1.5)")
    options = parsed(parser)
    found, timeouts = measure(options)
    print(", ".join(f"{what} {value}" for what, value in machine().items()))
    bounds = tell(found)
    print(f"\n{timeouts} pulls from the stopped peer timed out meanwhile")
    save(options.json, rounds={size: [asdict(one) for one in every] for size, every in found.items()})
    return judge(bounds, unit="%", quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
