"""How late the event loops are while a process pulls 320 MiB again and again: the caller's, and the library's own two.

The bound is on the 99th percentile of the two loops in the pulling process. Pulls of scattered blocks, whose plans have
thousands of rows, are measured too. Beside them stands the lag of the same loops at rest, most of which is the kernel's
timer, and that of a loop whose program moves the same bytes through plain sockets in a thread: what is in there is the
interpreter's lock and a machine with few cores.

With `--device` the pulling node has an emulated NPU: pulls into its memory stand beside pulls into host memory, and
copies from the one to the other are made, too. The emulator copies with the processor, as fast as it can, or at a pace.

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
from devices import AwaitingNpu, emulator, npu_environ
from figures import judge, machine, parsed, percentile, print_table, save, standard_arguments
from kv_nodes import PULLER_CLUSTER, SOURCE_CLUSTER, AwaitingNode
from kvpull_async import Cache, LLMRole, Placement
from lag import LagMeter
from processes import Child, Unavailable
from quiet import Neighbours, quiet_ones
from sources import prefill_side
from workloads import FULL, KIB, QUICK, Arena, Shape, build, wrong_bytes
from yardsticks import SocketPuller

BOUND_MS: Final = 5.0
SEED: Final = 11
HALF: Final = Shape(tensors=80, blocks=128, block_nbytes=32 * KIB)
"""With a device: there are twice as many caches."""
PACE: Final = 500
"""MB/s of the emulated copies that have one."""
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

    def __init__(self, sources: Sequence[Child], shape: Shape, *, device: bool, transport: str) -> None:
        self._source, sockets = sources
        self._shape = shape
        self._neighbours = Neighbours({os.getpid(), *(source.pid for source in sources)})
        make, backend = (AwaitingNpu, "acl") if device else (AwaitingNode, "host")
        said = {"device_backend": backend, "transfer_backend": transport}
        self.node = make(LLMRole.DECODER, PULLER_CLUSTER, shape=shape, **said)
        self._works = build(shape, seed=SEED)
        self.kinds: list[tuple[Kind, Call]] = []
        every = (CALLER, CORE, SOURCE)
        self._add(Kind("at rest", every, judged=False), partial(asyncio.sleep, 0.1))
        self.node.link(*self._source.ask("open"))
        if device:
            self._add_device(every)
        else:
            self._add_pulls(every, Placement.DEVICE, "")
        for name, call in self._moves(sockets).items():
            self._add(Kind(f"plain sockets in a thread, {self._about(name)}", (CALLER,), judged=False), call)

    def _add_pulls(self, loops: tuple[str, ...], placement: Placement, where: str) -> tuple[Cache, Call]:
        """The cache of the first workload, and its pull."""
        node, calls = self.node, list[Call]()
        caches = node.entries(None, placement=placement), node.blocks(None, placement=placement)
        for name, (cache, arena) in zip(NAMES, caches, strict=True):
            calls.append(node.call(self._works[name].pulls[0], cache, cluster_id=SOURCE_CLUSTER))
            self._check(name, calls[-1], arena)
            self._add(Kind(f"pulls of {self._about(name)}{where}", loops, judged=True), calls[-1])
        return caches[0][0], calls[0]

    def _add_device(self, loops: tuple[str, ...]) -> None:
        self._device = emulator()
        host, _ = self._add_pulls(loops, Placement.HOST, " into host memory")
        npu, pull = self._add_pulls(loops, Placement.DEVICE, " into the NPU")
        about = self._about(NAMES[0])
        self._add(Kind(f"pulls of {about} into the NPU at {PACE} MB/s", loops, judged=True), partial(self._paced, pull))
        for direction, src, dst in (("into", host, npu), ("out of", npu, host)):
            call = partial(self.node.manager.copy_cache, dst, src)
            self._add(Kind(f"copies of {about} {direction} the NPU", loops, judged=True), call)

    async def _paced(self, call: Call) -> None:
        self._device.configure(bandwidth=PACE * 10**6)
        try:
            await call()
        finally:
            self._device.configure(bandwidth=0)

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
    full = HALF if options.device else FULL
    shape, turns, seconds = (QUICK, 1, 0.2) if options.quick else (full, options.turns, 1.0)
    if options.device:
        os.environ.update(npu_environ(checks=options.quick))
    with ExitStack() as stack:
        kv = stack.enter_context(Child(prefill_side, shape, SOURCE_CLUSTER, SEED, options.transport, True))
        task = Task("tcp", shape, NAMES, SEED, huge=False, quick=False)
        sources = [kv, stack.enter_context(Child(source_side, task))]
        bench = Bench(sources, shape, device=options.device, transport=options.transport)
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
    parser.add_argument("--device", action="store_true", help="pull into the memory of an emulated NPU, too")
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
