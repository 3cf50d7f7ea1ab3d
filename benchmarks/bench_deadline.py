"""How late a pull ends that runs into its deadline, whatever its peer does: the overshoot over hundreds of timeouts.

silent         the peer greets and answers heartbeats, and never answers a request
stopped        the peer's process is stopped (SIGSTOP) before the pulls begin
mid-transfer   the peer's process is stopped while bytes flow; it goes on afterwards, and a small pull must then work on
               the same link before the next one is timed

Each through the awaitable and the blocking API. A pull that ends with anything but LLMTimeoutError, and one that leaves
its destination quarantined, is counted beside.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Final

from figures import judge, machine, parsed, percentile, print_table, save, standard_arguments
from kv_nodes import PULLER_CLUSTER, AwaitingNode, BlockingNode, Node
from kvpull_async import Cache, LLMException, LLMRole, LLMTimeoutError
from processes import Child
from quiet import Neighbours
from sources import prefill_side
from workloads import FULL, KIB, Arena, EntryPull, Pull, Shape, own_memory

BOUND_MS: Final = 100.0
TIMEOUTS_MS: Final = (10.0, 60.0)
"""Of pulls that no byte comes for; every one has another."""
FLOWING_MS: Final = (60.0, 120.0)
"""Of pulls that are under way: long enough for bytes to flow, too short for all of them once the peer is stopped."""
RECOVERY_MS: Final = 10_000
SEED: Final = 5
SMALL: Final = EntryPull(range(1), range(1), 4 * KIB)
QUICK_SHAPE: Final = Shape(tensors=8, blocks=256, block_nbytes=32 * KIB)


@dataclass
class Case:
    """What one kind of peer did to one face's pulls."""

    overshoot_ms: list[float] = field(default_factory=list)
    otherwise: Counter[str] = field(default_factory=Counter)
    quarantined: int = 0
    others: list[float] = field(default_factory=list)


class Bench:
    """One source, one node that pulls from it, and the pull that is going to time out."""

    def __init__(self, source: Child, shape: Shape, make: type[AwaitingNode | BlockingNode]) -> None:
        self.source = source
        self.node: Node = make(LLMRole.DECODER, PULLER_CLUSTER, shape=shape, heartbeat_timeout=600_000)
        self.memory: Arena = own_memory(shape)
        self.memory.poison()
        self.cache: Cache = self.node.entries(self.memory)[0]
        self.cluster_id, address = source.ask("open")
        self.node.link(self.cluster_id, address)
        self.whole = EntryPull(range(shape.tensors), range(shape.tensors), shape.entry_nbytes)
        self.pull(self.whole, 60_000)

    def pull(self, pull: Pull, timeout_ms: float) -> None:
        self.node.do(self.node.call(pull, self.cache, cluster_id=self.cluster_id, timeout=timeout_ms)())

    def time_out(self, case: Case, pull: Pull, timeout_ms: float) -> None:
        """One pull and how it ended."""
        began = time.perf_counter()
        try:
            self.pull(pull, timeout_ms)
        except LLMTimeoutError:
            case.overshoot_ms.append(1000 * (time.perf_counter() - began) - timeout_ms)
        except LLMException as error:
            case.otherwise[str(error.status_code)] += 1
        else:
            case.otherwise["finished in time"] += 1
        case.quarantined += self.cache.quarantined

    def stop_peer(self) -> None:
        os.kill(self.source.pid, signal.SIGSTOP)

    def wake_peer(self) -> None:
        os.kill(self.source.pid, signal.SIGCONT)


def silent(bench: Bench, case: Case, count: int) -> None:
    bench.source.ask("mute")
    for timeout in _timeouts(TIMEOUTS_MS, count):
        bench.time_out(case, bench.whole if timeout > sum(TIMEOUTS_MS) / 2 else SMALL, timeout)


def stopped(bench: Bench, case: Case, count: int) -> None:
    bench.stop_peer()
    try:
        for timeout in _timeouts(TIMEOUTS_MS, count):
            bench.time_out(case, bench.whole if timeout > sum(TIMEOUTS_MS) / 2 else SMALL, timeout)
    finally:
        bench.wake_peer()


def mid_transfer(bench: Bench, case: Case, count: int) -> None:
    for timeout in _timeouts(FLOWING_MS, 2 * count):
        bench.memory.poison()
        with _stops_when_bytes_come(bench):
            bench.time_out(case, bench.whole, timeout)
        bench.pull(SMALL, RECOVERY_MS)
        if len(case.overshoot_ms) >= count:
            return


def _timeouts(span: tuple[float, float], count: int) -> Iterator[float]:
    rng = random.Random(SEED)
    return (rng.uniform(*span) for _ in range(count))


@contextmanager
def _stops_when_bytes_come(bench: Bench) -> Iterator[None]:
    """Stop the peer once a tenth of the tensors has come; let it go on in the end."""
    tensor = bench.memory.tensors[len(bench.memory.tensors) // 10]
    poisoned, over = tensor[:16].tobytes(), threading.Event()

    def watch() -> None:
        while not over.is_set():
            if tensor[:16].tobytes() != poisoned:
                bench.stop_peer()
                return
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        bench.wake_peer()


PEERS: Final[dict[str, Callable[[Bench, Case, int], None]]] = {
    "silent": silent,
    "stopped": stopped,
    "mid-transfer": mid_transfer,
}
FACES: Final[dict[str, type[AwaitingNode | BlockingNode]]] = {"awaited": AwaitingNode, "blocking": BlockingNode}


def measure(options: argparse.Namespace) -> dict[str, Case]:
    shape = QUICK_SHAPE if options.quick else FULL
    found: dict[str, Case] = {}
    for peer, misbehave in PEERS.items():
        for face, make in FACES.items():
            case = found[f"{peer}, {face}"] = Case()
            with Child(prefill_side, shape, 1, SEED) as source:
                bench = Bench(source, shape, make)
                with Neighbours({os.getpid(), source.pid}).noted(case.others, patience=options.patience):
                    misbehave(bench, case, options.count)
                bench.node.close()
            print(f"{peer}, {face}: done", file=sys.stderr, flush=True)
    return found


def tell(found: dict[str, Case], count: int) -> dict[str, tuple[float, float]]:
    """Print the table; returns what is to be judged. Less than `count` timeouts are as bad as late ones."""
    rows, bounds = [], {}
    for name, case in found.items():
        p50, p99, most = (percentile(case.overshoot_ms, q) if case.overshoot_ms else math.inf for q in (50, 99, 100))
        others = ", ".join(f"{count} {ending}" for ending, count in case.otherwise.items()) or "-"
        shown = [f"{value:.2f}" for value in (p50, p99, most)]
        rows.append([name, str(len(case.overshoot_ms)), *shown, str(case.quarantined), others, f"{case.others[0]:.2f}"])
        bounds[f"p99 of the overshoot, {name}"] = (p99 if len(case.overshoot_ms) >= count else math.inf, BOUND_MS)
    heads = ["", "timeouts", "p50", "p99", "max", "quarantined", "ended otherwise", "others' cores"]
    print_table("Overshoot of the deadline in ms", heads, rows)
    return bounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    standard_arguments(parser)
    parser.add_argument("--count", type=int, default=200, help="timeouts of each kind (200)")
    options = parsed(parser)
    options.count = 3 if options.quick else options.count
    found = measure(options)
    print(", ".join(f"{what} {value}" for what, value in machine().items()))
    bounds = tell(found, options.count)
    save(options.json, cases={name: asdict(case) for name, case in found.items()})
    return judge(bounds, unit="ms", quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
