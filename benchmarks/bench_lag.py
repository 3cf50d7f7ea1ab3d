"""How late the event loops are while a process pulls 320 MiB again and again: the caller's, and the library's own two.

The bound is on the 99th percentile of the two loops in the pulling process. Pulls of scattered blocks, whose plans have
thousands of rows, are measured too. Beside them stands the lag of the same loops at rest, most of which is the kernel's
timer, and that of a loop whose program moves the same bytes through plain sockets in a thread: what is in there is the
interpreter's lock and a machine with few cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from contenders import Task, source_side
from figures import judge, machine, parsed, percentile, print_table, save, standard_arguments
from kv_nodes import PULLER_CLUSTER, AwaitingNode
from kvpull_async import LLMRole
from lag import LagMeter
from processes import Child
from quiet import Neighbours
from sources import prefill_side
from workloads import FULL, QUICK, Arena, Shape, Workload, build, own_memory, wrong_bytes
from yardsticks import SocketPuller

BOUND_MS: Final = 5.0
SEED: Final = 11
NAMES: Final = ("W1", "W2")
CALLER, CORE, SOURCE = "the caller's loop", "the core's loop", "the source's core"
Lags = dict[str, list[float]]


@dataclass
class Measured:
    """The lags of some loops, by loop."""

    title: str
    lags: Lags
    others: float
    judged: bool


class Bench:
    """A node that pulls two workloads, and its source."""

    def __init__(self, source: Child, shape: Shape, *, patience: float) -> None:
        self._source = source
        self._patience = patience
        self._shape = shape
        self.node = node = AwaitingNode(LLMRole.DECODER, PULLER_CLUSTER, shape=shape)
        self._memory: Arena = own_memory(shape)
        self._memory.poison()
        cluster_id, address = source.ask("open")
        node.link(cluster_id, address)
        self._works = build(shape, seed=SEED)
        caches = {"W1": node.entries(self._memory)[0], "W2": node.blocks(self._memory)[0]}
        self._calls = {
            name: node.call(self._works[name].pulls[0], cache, cluster_id=cluster_id) for name, cache in caches.items()
        }

    def rest(self, seconds: float) -> Measured:
        return self._watch("at rest", partial(asyncio.sleep, seconds), seconds, judged=False)

    def pull(self, name: str, seconds: float) -> Measured:
        self._check(name)
        return self._watch(f"pulls of {_about(self._works[name])}", self._calls[name], seconds, judged=True)

    def _watch(self, title: str, call: Callable[[], Awaitable[object]], seconds: float, *, judged: bool) -> Measured:
        """The lags while a call is made again and again."""
        others: list[float] = []
        with Neighbours({os.getpid(), self._source.pid}).noted(others, patience=self._patience):
            meters = {CALLER: LagMeter(self.node.loop), CORE: LagMeter(self.node.core_loop)}
            self._source.ask("start_lag")
            self.node.do(_again_and_again(call, seconds))
            lags = {where: meter.stop() for where, meter in meters.items()}
            lags[SOURCE] = self._source.ask("stop_lag")
        return Measured(title, lags, others[0], judged)

    def _check(self, name: str) -> None:
        self._memory.poison()
        self.node.do(self._calls[name]())
        wrong = wrong_bytes(self._memory, self._works[name].pulls, shape=self._shape, seed=SEED)
        if wrong:
            raise RuntimeError(f"{wrong} wrong bytes after {name}")


def beside_sockets(name: str, shape: Shape, seconds: float, *, patience: float) -> Measured:
    """The lag of a loop while a thread of its program receives the same bytes from plain sockets."""
    task = Task("tcp", shape, (name,), SEED, huge=False, quick=False)
    work = task.works()[name]
    puller = SocketPuller(socket.AF_INET)
    with Child(source_side, task) as source:
        puller.open(shape, [work], told=source.ask("open"))
        puller.arena(work).poison()

        async def watched() -> list[float]:
            meter = LagMeter(asyncio.get_running_loop())
            await _again_and_again(partial(asyncio.to_thread, puller.pull, work, 1), seconds)
            return meter.stop()

        others: list[float] = []
        with Neighbours({os.getpid(), source.pid}).noted(others, patience=patience):
            lags = asyncio.run(watched())
        puller.close()
    return Measured(f"plain sockets in a thread, {_about(work)}", {CALLER: lags}, others[0], judged=False)


async def _again_and_again(call: Callable[[], Awaitable[object]], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await call()


def _about(work: Workload) -> str:
    return f"{work.nbytes / 2**20:g} MiB ({work.title})"


def measure(options: argparse.Namespace) -> list[Measured]:
    shape, seconds = (QUICK, 0.2) if options.quick else (FULL, options.seconds)
    with Child(prefill_side, shape, 1, SEED) as source:
        bench = Bench(source, shape, patience=options.patience)
        found = [bench.rest(seconds), *(bench.pull(name, seconds) for name in NAMES)]
        bench.node.close()
    return found + [beside_sockets(name, shape, seconds, patience=options.patience) for name in NAMES]


def tell(found: list[Measured]) -> dict[str, tuple[float, float]]:
    """Print the tables; returns what is to be judged."""
    bounds = {}
    for measured in found:
        rows = []
        for where, samples in measured.lags.items():
            p50, p99, most = (1e3 * percentile(samples, q) for q in (50, 99, 100))
            rows.append([where, f"{p50:.2f}", f"{p99:.2f}", f"{most:.2f}", str(len(samples))])
            if measured.judged and where != SOURCE:
                bounds[f"p99 of {where}, {measured.title}"] = (p99, BOUND_MS)
        title = f"Lag in ms: {measured.title}; others used {measured.others:.2f} cores"
        print_table(title, ["", "p50", "p99", "max", "samples"], rows)
    return bounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    standard_arguments(parser)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (10)")
    options = parsed(parser)
    found = measure(options)
    print(", ".join(f"{what} {value}" for what, value in machine().items()))
    bounds = tell(found)
    content: list[dict[str, Any]] = [asdict(measured) for measured in found]
    save(options.json, measured=content)
    return judge(bounds, unit="ms", quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
