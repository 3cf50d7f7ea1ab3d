"""How much of a large `pull_blocks` over shared memory is not the copy: arguments, plan, request and answer.

16,384 blocks in random order, from and into memory of the callers (read through the kernel) and caches of the library
(mapped), through both APIs. The copy lasts from the first byte of the first thread to the last one of the last.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from figures import Spread, judge, machine, parsed, print_table, save, standard_arguments
from kv_nodes import AwaitingNode, BlockingNode, KvPuller, KvSource, MakeNode
from kvpull_async.transport.shm.remote import Mapped, Private
from processes import Child
from quiet import Neighbours, quiet_ones
from workloads import KIB, BlocksPull, Shape, Workload, wrong_bytes

BOUND: Final = 10.0
SHAPE: Final = Shape(tensors=8, blocks=16_384, block_nbytes=8 * KIB)
"""Four layers. What is not the copy hardly grows with the tensors, so that it is a smaller part of larger models."""
QUICK_SHAPE: Final = Shape(tensors=2, blocks=256, block_nbytes=4 * KIB)
SEED: Final = 9
MEMORY: Final = {"memory of the callers": False, "caches of the library": True}
FACES: Final[Mapping[str, MakeNode]] = {"awaited": AwaitingNode, "blocking": BlockingNode}


@dataclass
class Timed:
    """One pull: seconds in all, before the copy, and after it."""

    total: float
    before: float
    after: float
    others: float = 0.0

    @property
    def outside(self) -> float:
        """Percent of the time."""
        return 100 * (self.before + self.after) / self.total


@contextmanager
def noted_copies(spans: list[tuple[float, float]]) -> Iterator[None]:
    """Meanwhile every piece that a thread copies is noted, with its begin and its end."""
    kept = {kind: kind.copy for kind in (Mapped, Private)}

    def noting(copy: Callable[..., int]) -> Callable[..., int]:
        def noted(*args: Any) -> int:
            began = time.perf_counter()
            try:
                return copy(*args)
            finally:
                spans.append((began, time.perf_counter()))

        return noted

    for kind, copy in kept.items():
        setattr(kind, "copy", noting(copy))  # noqa: B010  (a plain assignment to a method is refused by mypy)
    try:
        yield
    finally:
        for kind, copy in kept.items():
            setattr(kind, "copy", copy)  # noqa: B010


def whole(shape: Shape) -> Workload:
    """Every block once, in random order on both sides."""
    rng = np.random.default_rng(SEED)
    src, dst = (tuple(rng.permutation(shape.blocks).tolist()) for _ in range(2))
    pull = BlocksPull(shape.tensors, src, dst, shape.block_nbytes)
    return Workload("blocks", f"{shape.blocks} blocks", (pull,), 1, 60)


def source_side(shape: Shape, allocated: bool) -> Mapping[str, Callable[..., Any]]:
    source = KvSource(allocated=allocated, transfer_backend="shm")
    return {"open": lambda: source.open(shape, [whole(shape)], seed=SEED), "close": source.close}


def measure(shape: Shape, *, allocated: bool, face: str, pulls: int, patience: float) -> list[Timed]:
    work = whole(shape)
    with Child(source_side, shape, allocated) as source:
        puller = KvPuller(FACES[face], allocated=allocated, transfer_backend="shm")
        puller.open(shape, [work], told=source.ask("open"))
        arena = puller.arena(work)
        arena.poison()
        puller.pull(work, 1)
        if wrong := wrong_bytes(arena, work.pulls, shape=shape, seed=SEED):
            raise RuntimeError(f"{wrong} bytes are wrong")
        neighbours = Neighbours({os.getpid(), source.pid})
        found = [_one(puller, work, neighbours, patience) for _ in range(pulls)]
        puller.close()
    return found


def _one(puller: KvPuller, work: Workload, neighbours: Neighbours, patience: float) -> Timed:
    spans: list[tuple[float, float]] = []
    others: list[float] = []
    with noted_copies(spans), neighbours.noted(others, patience=patience):
        began = time.perf_counter()
        puller.pull(work, 1)
        ended = time.perf_counter()
    first, last = min(span[0] for span in spans), max(span[1] for span in spans)
    return Timed(ended - began, first - began, ended - last, others[0])


def tell(found: Mapping[str, Sequence[Timed]], shape: Shape) -> dict[str, tuple[float, float]]:
    rows, bounds = [], {}
    for name, pulls in found.items():
        quiet, note = quiet_ones(pulls, [pull.others for pull in pulls])
        outside = Spread([pull.outside for pull in quiet])
        times = [Spread([1e3 * getattr(pull, part) for pull in quiet]) for part in ("total", "before", "after")]
        rows.append([name, *(spread.text(2) for spread in times), outside.text(1), note])
        bounds[f"outside the copy, {name}"] = (outside.mid, BOUND)
    heads = ["", "ms", "before the copy", "after it", "% outside", "quiet"]
    print_table(f"{shape.blocks} blocks of {shape.block_nbytes} bytes in each of {shape.tensors} tensors", heads, rows)
    return bounds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    standard_arguments(parser)
    parser.add_argument("--tensors", type=int, default=SHAPE.tensors, help="of each side (8)")
    parser.add_argument("--pulls", type=int, default=15, help="timed pulls of each kind (15)")
    options = parsed(parser)
    whole_shape = replace(SHAPE, tensors=options.tensors)
    shape, pulls = (QUICK_SHAPE, 2) if options.quick else (whole_shape, options.pulls)
    found = {
        f"{memory}, {face}": measure(shape, allocated=allocated, face=face, pulls=pulls, patience=options.patience)
        for memory, allocated in MEMORY.items()
        for face in FACES
    }
    print(", ".join(f"{what} {value}" for what, value in machine().items()))
    bounds = tell(found, shape)
    save(options.json, pulls={name: [asdict(pull) for pull in every] for name, every in found.items()})
    return judge(bounds, unit="%", quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
