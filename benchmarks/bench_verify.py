"""What `verify` costs: pulls of 320 MiB and 64 KiB without a sum, with crc32 and with xxh3, over shared memory and TCP.

The three take turns on one link, so that they are compared in the same run; a figure is the median of the turns, and a
ratio that of the ratios of each turn. The source sums while the bytes travel, the puller when they have landed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from figures import Spread, judge, machine, parsed, print_table, save, standard_arguments
from kv_nodes import AwaitingNode, KvPuller, KvSource
from processes import Child
from quiet import Neighbours, quiet_ones
from workloads import FULL, MIB, QUICK, Shape, Workload, build, wrong_bytes

NAMES: Final = ("none", "crc32", *(["xxh3"] if importlib.util.find_spec("xxhash") is not None else []))
WORKS: Final = {"W1": 1, "W3": 200}
"""And how many pulls make one turn."""
TRANSPORTS: Final = ("shm", "tcp")
SEED: Final = 13
BOUNDS: Final = {"crc32": {"W1": 20.0, "W3": 3.0}, "xxh3": {"W1": 10.0, "W3": 3.0}}
"""Times as long as without a sum. Far from what is measured: they are there to notice what has gone wrong."""


@dataclass
class Turn:
    """Seconds of a pull by the name of its sum: the median of one turn each, right after one another."""

    seconds: dict[str, float] = field(default_factory=dict)
    others: float = 0.0


def source_side(shape: Shape, transport: str) -> Mapping[str, Callable[..., Any]]:
    source = KvSource(allocated=True, transfer_backend=transport)
    works = build(shape, seed=SEED)
    return {"open": lambda: source.open(shape, [works[name] for name in WORKS], seed=SEED), "close": source.close}


class Link:
    """A node that pulls from a source in another process."""

    def __init__(self, source: Child, shape: Shape, transport: str) -> None:
        self._shape = shape
        self._works = build(shape, seed=SEED)
        self._puller = KvPuller(AwaitingNode, allocated=True, transfer_backend=transport)
        self._cluster_id, address = source.ask("open")
        self._puller.open(shape, [self._works[name] for name in WORKS], told=(self._cluster_id, address))
        self._neighbours = Neighbours({os.getpid(), source.pid})

    def work(self, name: str) -> Workload:
        return self._works[name]

    def check(self) -> None:
        """Every byte is right with each sum; it also warms everything up."""
        for work in map(self.work, WORKS):
            for name in NAMES:
                arena = self._puller.arena(work)
                arena.poison()
                self._pulls(work, name, 1)
                if wrong := wrong_bytes(arena, work.pulls, shape=self._shape, seed=SEED):
                    raise RuntimeError(f"{wrong} wrong bytes after {work.name} with {name}")

    def turn(self, work: Workload, *, patience: float) -> Turn:
        turn, others = Turn(), list[float]()
        with self._neighbours.noted(others, patience=patience):
            for name in NAMES:
                turn.seconds[name] = statistics.median(self._pulls(work, name, WORKS[work.name]))
        turn.others = others[0]
        return turn

    def _pulls(self, work: Workload, name: str, count: int) -> list[float]:
        node, cache = self._puller.node, self._puller.entries
        calls = [node.call(pull, cache, cluster_id=self._cluster_id, verify=name) for pull in work.pulls]
        return node.repeat(calls, count, budget=work.budget)

    def close(self) -> None:
        self._puller.close()


def tell(turns: Mapping[tuple[str, str], list[Turn]], links: Mapping[str, Workload]) -> dict[str, tuple[float, float]]:
    rows, bounds = [], {}
    for (transport, work), every in turns.items():
        quiet, note = quiet_ones(every, [turn.others for turn in every])
        unit, digits, text = (1e3, 1, "ms") if links[work].nbytes > MIB else (1e6, 0, "us")
        cells = [Spread([unit * turn.seconds[name] for turn in quiet]).text(digits) for name in NAMES]
        ratios = {
            name: statistics.median(turn.seconds[name] / turn.seconds["none"] for turn in quiet) for name in NAMES
        }
        rows.append(
            [f"{transport}, {links[work].title}, {text}", *cells, *(f"{ratios[n]:.2f}" for n in NAMES[1:]), note]
        )
        for name in NAMES[1:]:
            bounds[f"{name} beside none, {transport}, {links[work].title}"] = (ratios[name], BOUNDS[name][work])
    print_table("One pull", ["", *NAMES, *(f"{name} / none" for name in NAMES[1:]), "quiet"], rows)
    return bounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    standard_arguments(parser)
    parser.add_argument("--turns", type=int, default=15, help="of each kind (15)")
    options = parsed(parser)
    shape, count = (QUICK, 2) if options.quick else (FULL, options.turns)
    turns: dict[tuple[str, str], list[Turn]] = {}
    works = build(shape, seed=SEED)
    for transport in TRANSPORTS:
        with Child(source_side, shape, transport) as source:
            link = Link(source, shape, transport)
            link.check()
            for name in WORKS:
                turns[transport, name] = [link.turn(link.work(name), patience=options.patience) for _ in range(count)]
            link.close()
    print(", ".join(f"{what} {value}" for what, value in machine().items()))
    if "xxh3" not in NAMES:
        print("not available: xxh3: pip install 'kvpull[verify]'")
    bounds = tell(turns, works)
    kept = {
        " ".join(kind): [{**turn.seconds, "others": turn.others} for turn in every] for kind, every in turns.items()
    }
    save(options.json, turns=kept)
    return judge(bounds, unit="times", quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
