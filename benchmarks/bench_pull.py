"""How fast pulls are, over TCP between two processes, with plain sockets beside them in the same run.

One repetition runs every contender once, each in two fresh processes (A B C ... A B C ...), so that drifts of the
machine and the luck of one page layout hit all alike. Memory is touched and connections are made before the clock runs.
After the timed pulls of a workload the destination is poisoned, pulled into once more, and compared to the last byte,
those that were not to be touched included. Wrong bytes make the exit status 1.

A block of timed pulls is done again, up to a limit, when other processes or the host used the cores meanwhile; what
stayed disturbed is counted in the tables.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from contenders import CONTENDERS, Task, crossing_side, puller_side, source_side
from figures import Spread, across, machine, parsed, percentile, print_table, save, standard_arguments
from processes import Child
from quiet import SHARE, Neighbours
from workloads import FULL, QUICK, Shape, Workload, build

NAMES: Final = ("W1", "W2", "W3", "W4", "W5")
YARDSTICK: Final = "tcp"
FLOOR: Final = "round trip + crossings"
CROSSINGS: Final = 2000


@dataclass
class Block:
    """The timed pulls of one workload in one session."""

    seconds: list[float]
    cpu: float
    others: float
    wrong: int = 0

    @property
    def quiet(self) -> bool:
        return self.others <= SHARE


@dataclass
class Run:
    """Everything measured: blocks by workload and contender, one per repetition."""

    shape: Shape
    blocks: dict[str, dict[str, list[Block]]] = field(default_factory=dict)
    crossings: list[dict[str, list[float]]] = field(default_factory=list)

    def add(self, work: str, contender: str, block: Block) -> None:
        self.blocks.setdefault(work, {}).setdefault(contender, []).append(block)

    @property
    def wrong(self) -> dict[str, int]:
        found = {
            f"{contender} {work}": sum(block.wrong for block in blocks)
            for work, contenders in self.blocks.items()
            for contender, blocks in contenders.items()
        }
        return {where: wrong for where, wrong in found.items() if wrong}


# --- measuring -------------------------------------------------------------------------------------------------------


def session(task: Task, run: Run, *, patience: float) -> None:
    """One contender in two fresh processes."""
    with Child(source_side, task) as source, Child(puller_side, task) as puller:
        puller.ask("open", source.ask("open"))
        neighbours = Neighbours({os.getpid(), source.pid, puller.pid})
        for name in task.works():
            block = _measure(name, source, puller, neighbours=neighbours, patience=patience)
            block.wrong = puller.ask("check", name)
            run.add(name, task.contender, block)


def _measure(name: str, source: Child, puller: Child, *, neighbours: Neighbours, patience: float) -> Block:
    """The quietest of a few attempts, or the first quiet one."""
    best: Block | None = None
    for _ in range(3 if patience else 1):
        neighbours.wait(patience)
        puller.ask("warm", name)
        before, spent = neighbours.look(), source.ask("cpu")
        seconds, cpu = puller.ask("timed", name)
        cpu += source.ask("cpu") - spent
        block = Block(seconds, cpu / len(seconds), neighbours.share(before))
        if best is None or block.others < best.others:
            best = block
        if best.quiet:
            break
    assert best is not None
    return best


def cross(run: Run, *, patience: float, count: int) -> None:
    with Child(crossing_side) as child:
        Neighbours({os.getpid(), child.pid}).wait(patience)
        run.crossings.append(child.ask("timed", count))


def measure(options: argparse.Namespace) -> Run:
    shape = QUICK if options.quick else FULL
    run, began = Run(shape), time.monotonic()
    for rep in range(options.reps):
        for name in options.only:
            task = Task(name, shape, options.workloads, 1000 + rep, options.pages == "huge", options.quick)
            session(task, run, patience=options.patience)
            spent = time.monotonic() - began
            print(f"[{spent:5.0f} s] repetition {rep + 1}/{options.reps}: {name}", file=sys.stderr, flush=True)
        cross(run, patience=options.patience, count=100 if options.quick else CROSSINGS)
    return run


# --- telling ---------------------------------------------------------------------------------------------------------


def tell(run: Run) -> None:
    for name, work in build(run.shape, seed=0).items():
        contenders = run.blocks.get(name)
        if contenders:
            _tell_latency(work, contenders, run) if work.is_latency else _tell_bulk(work, contenders)
    rows = []
    for face in ("awaiting", "blocking"):
        samples = [crossing[face] for crossing in run.crossings]
        p99 = percentile([s for rep in samples for s in rep], 99)
        rows.append([face, Spread([1e6 * mid for mid in across(samples)]).text(0), f"{1e6 * p99:.0f}"])
    print_table("To another thread's loop and back, nothing done there", ["", "us", "p99"], rows)


def _tell_bulk(work: Workload, contenders: dict[str, list[Block]]) -> None:
    rows = []
    for name, blocks in contenders.items():
        mids = across([block.seconds for block in blocks])
        rates = Spread([work.nbytes / mid / 1e9 for mid in mids])
        ratio = _ratio(contenders, mids, inverse=True)
        ms = f"{1e3 * Spread(mids).mid:.1f}"
        rows.append([CONTENDERS[name].title, rates.text(2), ratio, ms, *_cost(blocks, 1e3)])
    heads = ["", "GB/s", "rate / plain TCP", "ms", "CPU ms", "quiet"]
    print_table(f"{work.name}: {work.title}, {work.nbytes / 2**20:g} MiB", heads, rows)


def _tell_latency(work: Workload, contenders: dict[str, list[Block]], run: Run) -> None:
    rows = []
    for name, blocks in contenders.items():
        mids = across([block.seconds for block in blocks])
        p99 = percentile([s for block in blocks for s in block.seconds], 99)
        ratio = _ratio(contenders, mids, inverse=False)
        times = [Spread([1e6 * mid for mid in mids]).text(0), f"{1e6 * p99:.0f}"]
        rows.append([CONTENDERS[name].title, *times, ratio, *_cost(blocks, 1e6)])
    rows += _floor(contenders, run)
    heads = ["", "us p50", "p99", "time / plain TCP", "CPU us", "quiet"]
    print_table(f"{work.name}: {work.title}", heads, rows)


def _floor(contenders: dict[str, list[Block]], run: Run) -> Iterator[list[str]]:
    """What remains for an asyncio library on a thread of its own if everything else cost nothing."""
    if "asyncio" in contenders and run.crossings:
        trips = across([block.seconds for block in contenders["asyncio"]])
        over = across([crossing["awaiting"] for crossing in run.crossings])
        floor = [trip + crossing for trip, crossing in zip(trips, over, strict=True)]
        mids = Spread([1e6 * mid for mid in floor]).text(0)
        yield [FLOOR, mids, "", _ratio(contenders, floor, inverse=False), "", ""]


def _ratio(contenders: dict[str, list[Block]], mids: Sequence[float], *, inverse: bool) -> str:
    """To the yardstick of the same repetition: what drifts from one to the next cancels out."""
    if YARDSTICK not in contenders:
        return "-"
    yardstick = across([block.seconds for block in contenders[YARDSTICK]])
    pairs = zip(mids, yardstick, strict=True)
    return Spread([other / mine if inverse else mine / other for mine, other in pairs]).text(2)


def _cost(blocks: Sequence[Block], scale: float) -> list[str]:
    quiet = sum(block.quiet for block in blocks)
    return [f"{scale * Spread([block.cpu for block in blocks]).mid:.0f}", f"{quiet}/{len(blocks)}"]


def content(run: Run) -> dict[str, Any]:
    blocks = {
        work: {name: [asdict(block) for block in every] for name, every in contenders.items()}
        for work, contenders in run.blocks.items()
    }
    return {"shape": asdict(run.shape), "blocks": blocks, "crossings": run.crossings}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    standard_arguments(parser)
    parser.add_argument("--reps", type=int, help="repetitions (5)")
    parser.add_argument("--only", default=",".join(CONTENDERS), help=f"contenders, of {','.join(CONTENDERS)}")
    parser.add_argument("--workloads", default=",".join(NAMES))
    parser.add_argument("--pages", choices=("4k", "huge"), default="4k", help="of memory outside the library")
    options = parsed(parser, arguments)
    options.reps = options.reps or (1 if options.quick else 5)
    options.only, options.workloads = options.only.split(","), tuple(options.workloads.split(","))
    for given, known in ((options.only, CONTENDERS), (options.workloads, NAMES)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    return options


def main() -> int:
    options = parse()
    run = measure(options)
    about = machine()
    print(", ".join(f"{what} {value}" for what, value in about.items()), f"pages {options.pages}", sep=", ")
    tell(run)
    save(options.json, **content(run))
    for where, wrong in run.wrong.items():
        print(f"WRONG  {where}: {wrong} bytes")
    print(f"\nverdict: {'FAILED, wrong bytes' if run.wrong else 'every byte is right, those not asked for untouched'}")
    return 1 if run.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
