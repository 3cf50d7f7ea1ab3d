"""How late the event loops are while a process pulls 320 MiB again and again: the caller's, and the library's own two.

The bound is on the 99th percentile of the two loops in the pulling process. Pulls of scattered blocks, whose plans have
thousands of rows, are measured too. Beside them stands the lag of the same loops at rest, most of which is the kernel's
timer, and that of a loop whose program moves the same bytes through plain sockets in a thread: what is in there is the
interpreter's lock and a machine with few cores.

All of these take turns of a second each. Turns that other processes disturbed are left out where enough others remain.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

from contenders import Task, source_side
from figures import judge, machine, parsed, percentile, print_table, save, standard_arguments
from kv_nodes import PULLER_CLUSTER, AwaitingNode
from kvpull_async import LLMRole
from lag import LagMeter
from processes import Child, Unavailable
from quiet import Neighbours, quiet_ones
from sources import prefill_side
from workloads import FULL, QUICK, Arena, Shape, build, wrong_bytes
from yardsticks import SocketPuller

BOUND_MS: Final = 5.0
SEED: Final = 11
NAMES: Final = ("W1", "W2")
CALLER, CORE, SOURCE = "the caller's loop", "the core's loop", "the source's core"
Call = Callable[[], Awaitable[object]]
Lags = dict[str, list[float]]


@dataclass
class Kind:
    """Something done again and again on the caller's loop, and the lags of some loops in each turn of it."""

    title: str
    loops: tuple[str, ...]
    judged: bool
    turns: list[Lags] = field(default_factory=list)
    others: list[float] = field(default_factory=list)


class Bench:
    """A node that pulls two workloads, its source, and plain sockets that move the same bytes."""

    def __init__(self, sources: Sequence[Child], shape: Shape, *, transport: str) -> None:
        self._source, sockets = sources
        self._shape = shape
        self._neighbours = Neighbours({os.getpid(), *(source.pid for source in sources)})
        self.node = AwaitingNode(LLMRole.DECODER, PULLER_CLUSTER, shape=shape, transfer_backend=transport)
        self._works = build(shape, seed=SEED)
        self.kinds: list[tuple[Kind, Call]] = []
        every = (CALLER, CORE, SOURCE)
        self._add(Kind("at rest", every, judged=False), partial(asyncio.sleep, 0.1))
        for name, (call, arena) in self._pulls().items():
            self._check(name, call, arena)
            self._add(Kind(f"pulls of {self._about(name)}", every, judged=True), call)
        for name, call in self._moves(sockets).items():
            self._add(Kind(f"plain sockets in a thread, {self._about(name)}", (CALLER,), judged=False), call)

    def _pulls(self) -> dict[str, tuple[Call, Arena]]:
        node = self.node
        cluster_id, address = self._source.ask("open")
        node.link(cluster_id, address)
        pulls = {}
        for name, (cache, arena) in {"W1": node.entries(None), "W2": node.blocks(None)}.items():
            pulls[name] = node.call(self._works[name].pulls[0], cache, cluster_id=cluster_id), arena
        return pulls

    def _moves(self, source: Child) -> dict[str, Call]:
        self._puller = puller = SocketPuller(socket.AF_INET)
        works = [self._works[name] for name in NAMES]
        puller.open(self._shape, works, told=source.ask("open"))
        puller.arena(works[0]).poison()
        return {work.name: partial(asyncio.to_thread, puller.pull, work, 1) for work in works}

    def _add(self, kind: Kind, call: Call) -> None:
        self.kinds.append((kind, call))

    def _about(self, name: str) -> str:
        work = self._works[name]
        return f"{work.nbytes / 2**20:g} MiB ({work.title})"

    def _check(self, name: str, call: Call, arena: Arena) -> None:
        arena.poison()
        self.node.do(call())
        wrong = wrong_bytes(arena, self._works[name].pulls, shape=self._shape, seed=SEED)
        if wrong:
            raise RuntimeError(f"{wrong} wrong bytes after {name}")

    def turn(self, kind: Kind, call: Call, *, seconds: float, patience: float) -> None:
        """Note the lags while a call is made again and again."""
        with self._neighbours.noted(kind.others, patience=patience):
            meters = {CALLER: LagMeter(self.node.loop), CORE: LagMeter(self.node.core_loop)}
            self._source.ask("start_lag")
            self.node.do(_again_and_again(call, seconds))
            lags = {where: meter.stop() for where, meter in meters.items()}
            lags[SOURCE] = self._source.ask("stop_lag")
        kind.turns.append({where: lags[where] for where in kind.loops})

    def close(self) -> None:
        self._puller.close()
        self.node.do(self.node.loop.shutdown_default_executor())
        self.node.close()


async def _again_and_again(call: Call, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await call()


def measure(options: argparse.Namespace) -> list[Kind]:
    shape, turns, seconds = (QUICK, 1, 0.2) if options.quick else (FULL, options.turns, 1.0)
    with ExitStack() as stack:
        kv = stack.enter_context(Child(prefill_side, shape, 1, SEED, options.transport, True))
        task = Task("tcp", shape, NAMES, SEED, huge=False, quick=False)
        bench = Bench([kv, stack.enter_context(Child(source_side, task))], shape, transport=options.transport)
        for _ in range(turns):
            for kind, call in bench.kinds:
                bench.turn(kind, call, seconds=seconds, patience=options.patience)
        bench.close()
    return [kind for kind, _ in bench.kinds]


def tell(kinds: Sequence[Kind]) -> dict[str, tuple[float, float]]:
    """Print the tables; returns what is to be judged."""
    bounds = {}
    for kind in kinds:
        turns, quiet = quiet_ones(kind.turns, kind.others)
        rows = []
        for where in kind.loops:
            samples = [lag for turn in turns for lag in turn[where]]
            p50, p99, most = (1e3 * percentile(samples, q) for q in (50, 99, 100))
            rows.append([where, f"{p50:.2f}", f"{p99:.2f}", f"{most:.2f}", str(len(samples)), quiet])
            if kind.judged and where != SOURCE:
                bounds[f"p99 of {where}, {kind.title}"] = (p99, BOUND_MS)
        print_table(f"Lag in ms: {kind.title}", ["", "p50", "p99", "max", "samples", "quiet"], rows)
    return bounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    standard_arguments(parser)
    parser.add_argument("--turns", type=int, default=12, help="of a second each, of every kind (12)")
    parser.add_argument("--transport", choices=("shm", "tcp"), default="tcp", help="of the pulls (tcp)")
    options = parsed(parser)
    try:
        kinds = measure(options)
    except Unavailable as why:
        print(f"not available: {why}")
        return 1
    print(
        ", ".join(f"{what} {value}" for what, value in machine().items()), f"pulls over {options.transport}", sep=", "
    )
    bounds = tell(kinds)
    content: list[dict[str, Any]] = [asdict(kind) for kind in kinds]
    save(options.json, transport=options.transport, kinds=content)
    return judge(bounds, unit="ms", quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
