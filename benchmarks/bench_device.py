"""Pulls that land in the memory of an NPU, and that come from there: does the copy hide behind the wire?

The NPU is emulated, and so is the wire: the source sends at the speed at which the NPU copies. What is pulled while it
is copied ("pipelined") is compared with receiving all of it in host memory and copying it then, and with copying all of
it to host memory first and sending it from there, turn by turn. Every byte is checked after every turn.

The second part has neither pace: pulls into memory of the NPU and out of it beside pulls into host memory, which shows
what the way through page-locked memory costs on this machine. It is not judged.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from devices import BATCHES, NpuPuller, WireSource, npu_environ
from figures import Spread, judge, machine, parsed, print_table, save, standard_arguments
from processes import Child, Unavailable
from quiet import Neighbours, quiet_ones
from workloads import KIB, QUICK, Shape, Workload, build

BOUND: Final = 0.65
"""Of the time of both steps one after the other."""
ALONE: Final = 1.2
"""Times the slower step alone. The socket's buffers hide much of a copy by themselves, which the first bound allows."""
PACED: Final = Shape(tensors=80, blocks=256, block_nbytes=16 * KIB)
FREE: Final = Shape(tensors=64, blocks=128, block_nbytes=16 * KIB)
SEED: Final = 31
BULK: Final = ("W1", "W2")
NAMES: Final = (*BULK, "W3", "W4")
TRANSPORTS: Final = ("tcp", "shm")
PARTS: Final = ("paced", "free")
HOST, NPU, ONE_BY_ONE = "host", "NPU", "NPU, rows one by one"
"""Where a side's memory is. The last is an NPU whose runtime has no copies of many rows in one call."""


# --- the processes ---------------------------------------------------------------------------------------------------


def works_of(shape: Shape) -> dict[str, Workload]:
    found = build(shape, seed=SEED)
    quick = shape == QUICK
    return {name: replace(found[name], warmup=1, count=3) if quick else found[name] for name in NAMES}


def source_side(shape: Shape, cluster_id: int, npu: bool, rate: int, transport: str) -> dict[str, Callable[..., Any]]:
    source = WireSource(npu=npu, rate=rate, cluster_id=cluster_id, transfer_backend=transport)
    works = list(works_of(shape).values())
    return {"open": lambda: source.open(shape, works, seed=SEED), "copy": source.copy_out, "close": source.close}


def puller_side(shape: Shape, transport: str) -> dict[str, Callable[..., Any]]:
    puller = NpuPuller(shape, works_of(shape), seed=SEED, transfer_backend=transport)
    return {
        "link": puller.link,
        "pull": puller.pull,
        "pull_copied": puller.pull_copied,
        "copy": puller.copy_in,
        "check": puller.check,
        "close": puller.close,
    }


# --- with a pace -----------------------------------------------------------------------------------------------------


@dataclass
class Turn:
    """Seconds of one pull while it is copied, and of the two steps one after the other."""

    pipelined: float
    first: float
    second: float

    @property
    def ratio(self) -> float:
        return self.pipelined / (self.first + self.second)

    @property
    def alone(self) -> float:
        return self.pipelined / max(self.first, self.second)


@dataclass
class Paced:
    """One direction."""

    title: str
    steps: tuple[str, str]
    turns: list[Turn] = field(default_factory=list)
    others: list[float] = field(default_factory=list)


def into_the_npu(_: Child, puller: Child, *, pipelined_first: bool) -> Turn:
    def pipelined() -> float:
        (seconds,) = puller.ask("pull", "W1", 1, True)
        return _checked(seconds, puller, on_npu=True)

    def in_turn() -> tuple[float, float]:
        (received,) = puller.ask("pull", "W1", 1, False)
        copied = puller.ask("copy")
        puller.ask("check", "W1", False)
        return received, _checked(copied, puller, on_npu=True)

    return _both(pipelined, in_turn, pipelined_first=pipelined_first)


def out_of_the_npu(source: Child, puller: Child, *, pipelined_first: bool) -> Turn:
    def pipelined() -> float:
        (seconds,) = puller.ask("pull", "W1", 1, False)
        return _checked(seconds, puller, on_npu=False)

    def in_turn() -> tuple[float, float]:
        copied = source.ask("copy")
        (received,) = puller.ask("pull_copied", 1)
        return copied, _checked(received, puller, on_npu=False)

    return _both(pipelined, in_turn, pipelined_first=pipelined_first)


def _checked(seconds: float, puller: Child, *, on_npu: bool) -> float:
    puller.ask("check", "W1", on_npu)
    return seconds


def _both(pipelined: Callable[[], float], in_turn: Callable[[], tuple[float, float]], *, pipelined_first: bool) -> Turn:
    if pipelined_first:
        return Turn(pipelined(), *in_turn())
    first, second = in_turn()
    return Turn(pipelined(), first, second)


def paced(options: argparse.Namespace) -> list[Paced]:
    shape, turns = (QUICK, 2) if options.quick else (PACED, options.turns)
    rate = options.bandwidth * 10**6
    npu = npu_environ(bandwidth=rate, checks=options.quick)
    kinds = [
        (Paced("into the NPU", ("receive", "copy in")), False, into_the_npu),
        (Paced("out of the NPU", ("copy out", "receive")), True, out_of_the_npu),
    ]
    for kind, source_has_npu, turn in kinds:
        with (
            Child(source_side, shape, 1, source_has_npu, rate, "tcp", env=npu) as source,
            Child(puller_side, shape, "tcp", env=npu) as puller,
        ):
            puller.ask("link", *source.ask("open"))
            neighbours = Neighbours({os.getpid(), source.pid, puller.pid})
            turn(source, puller, pipelined_first=True)
            for number in range(turns):
                with neighbours.noted(kind.others, patience=options.patience):
                    kind.turns.append(turn(source, puller, pipelined_first=number % 2 == 0))
    return [kind for kind, _, _ in kinds]


def tell_paced(kinds: Sequence[Paced], *, rate: int, nbytes: int) -> dict[str, tuple[float, float]]:
    rows, bounds = [], {}
    for kind in kinds:
        turns, quiet = quiet_ones(kind.turns, kind.others)
        parts = ("pipelined", "first", "second")
        pipelined, *steps = (Spread([1e3 * getattr(turn, part) for turn in turns]).text(1) for part in parts)
        ratio, alone = Spread([turn.ratio for turn in turns]), Spread([turn.alone for turn in turns])
        steps = [f"{name} {text}" for name, text in zip(kind.steps, steps, strict=True)]
        rows.append([kind.title, pipelined, *steps, ratio.text(3), alone.text(3), quiet])
        bounds[f"{kind.title}, pipelined beside one after the other"] = (ratio.mid, BOUND)
        bounds[f"{kind.title}, pipelined beside the slower step alone"] = (alone.mid, ALONE)
    each = 1e3 * nbytes / (rate * 1e6)
    title = f"{nbytes / 2**20:g} MiB at {rate} MB/s on the wire and between host and NPU, {each:.1f} ms each"
    print_table(title, ["", "pipelined, ms", "first", "then", "/ both", "/ slower", "quiet"], rows)
    return bounds


# --- without one -----------------------------------------------------------------------------------------------------


@dataclass
class Way:
    """A source and a destination, and seconds by workload: of each turn the median."""

    source: str
    destination: str
    turns: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in NAMES})


WAYS: Final = (
    *((HOST, HOST), (HOST, NPU), (HOST, ONE_BY_ONE)),
    *((NPU, HOST), (ONE_BY_ONE, HOST), (NPU, NPU)),
)


def free(transport: str, options: argparse.Namespace) -> list[Way]:
    shape, turns = (QUICK, 1) if options.quick else (FREE, options.turns)
    environs = {
        NPU: npu_environ(checks=options.quick),
        ONE_BY_ONE: npu_environ(checks=options.quick, without=BATCHES),
    }
    ways = [Way(*way) for way in WAYS]
    clusters = {HOST: 1, NPU: 2, ONE_BY_ONE: 3}
    with ExitStack() as stack:
        pullers = {
            name: stack.enter_context(Child(puller_side, shape, transport, env=environ))
            for name, environ in environs.items()
        }
        for name, cluster_id in clusters.items():
            said = (shape, cluster_id, name != HOST, 0, transport)
            source = stack.enter_context(Child(source_side, *said, env=environs.get(name)))
            told = source.ask("open")
            for puller in pullers.values():
                puller.ask("link", *told)
        works = works_of(shape)
        for way in ways:
            _time(way, pullers, clusters, works, warming=True)
        for _ in range(turns):
            for way in ways:
                _time(way, pullers, clusters, works, warming=False)
    return ways


def _time(
    way: Way,
    pullers: Mapping[str, Child],
    clusters: Mapping[str, int],
    works: Mapping[str, Workload],
    *,
    warming: bool,
) -> None:
    on_npu = way.destination != HOST
    puller = pullers.get(way.destination, pullers[NPU])
    for name, work in works.items():
        count = work.warmup if warming else work.count if work.is_latency else 2
        seconds = puller.ask("pull", name, clusters[way.source], on_npu, count)
        puller.ask("check", name, on_npu)
        if not warming:
            way.turns[name].append(Spread(seconds).mid)


def tell_free(transport: str, ways: Sequence[Way], shape: Shape) -> None:
    works = works_of(shape)
    rows = []
    for way in ways:
        row = [f"{way.source} -> {way.destination}"]
        for name, work in works.items():
            of_host = Spread([one / other for one, other in zip(way.turns[name], ways[0].turns[name], strict=True)])
            if work.is_latency:
                row.append(Spread([1e6 * seconds for seconds in way.turns[name]]).text(0))
            else:
                row.append(Spread([work.nbytes / seconds / 1e9 for seconds in way.turns[name]]).text(2))
            row.append(f"{of_host.mid:.2f}")
        rows.append(row)
    heads = [f"{name} {'us' if works[name].is_latency else 'GB/s'}" for name in NAMES]
    titles = ", ".join(f"{name} {work.title}" for name, work in works.items())
    columns = [column for head in heads for column in (head, "time / host's")]
    print_table(f"{transport}, as fast as this machine can: {titles}", ["", *columns], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    standard_arguments(parser)
    parser.add_argument("--turns", type=int, default=9, help="of each kind (9)")
    parser.add_argument("--bandwidth", type=int, default=500, help="MB/s of the wire and of the copies (500)")
    parser.add_argument("--parts", default=",".join(PARTS), help="which of them (%(default)s)")
    options = parsed(parser)
    bounds: dict[str, tuple[float, float]] = {}
    kept: dict[str, Any] = {}
    print(", ".join(f"{what} {value}" for what, value in machine().items()))
    try:
        if "paced" in options.parts:
            kinds = paced(options)
            kept["paced"] = [asdict(kind) for kind in kinds]
            nbytes = works_of(QUICK if options.quick else PACED)["W1"].nbytes
            bounds |= tell_paced(kinds, rate=options.bandwidth, nbytes=nbytes)
        for transport in TRANSPORTS if "free" in options.parts else ():
            ways = free(transport, options)
            kept[transport] = [asdict(way) for way in ways]
            tell_free(transport, ways, QUICK if options.quick else FREE)
    except Unavailable as why:
        print(f"not available: {why}")
        return 1
    save(options.json, **kept)
    return judge(bounds, unit="times", quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
