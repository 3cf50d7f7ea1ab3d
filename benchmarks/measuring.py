"""Runs the contenders one after another, each in two fresh processes, and keeps what they found.

It must not judge or print tables.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from contenders import CONTENDERS, LIMIT, OURS, PEER, ROWS, Contender, Row, Task, puller_side, source_side
from floors import floors_side, pong_side
from idle import IDLE_LINKS, cores, idle_links
from kv_nodes import COPIES
from processes import Child, ChildFailed, Unavailable
from quiet import LOOK, Neighbours
from runs import Block, Run
from workloads import FULL, QUICK, build

__all__ = ["measure"]

ROUND_TRIPS: Final = 1000
ATTEMPTS: Final = 3
"""At a block that others disturb."""


class Session:
    """One contender in one repetition."""

    def __init__(self, task: Task, run: Run, *, rep: int, patience: Patience) -> None:
        self._task, self._run, self._rep, self._patience = task, run, rep, patience
        self._contender: Contender = CONTENDERS[task.contender]

    def measure(self) -> None:
        """What cannot run is noted with its reason, and the rest goes on."""
        name, run = self._task.contender, self._run
        try:
            with ExitStack() as stack:
                self._measure(*(stack.enter_context(self._child(side)) for side in (source_side, puller_side)))
        except Unavailable as why:
            run.missing[name] = str(why)
        except ChildFailed as failure:
            print(failure, file=sys.stderr)
            run.failed[name] = str(failure).strip().splitlines()[-1]

    def _child(self, side: object) -> Child:
        contender = self._contender
        return Child(side, self._task, env=contender.env, abrupt=contender.abrupt)  # type: ignore[arg-type]

    def _measure(self, source: Child, puller: Child) -> None:
        into = puller.ask("open", source.ask("open"))
        self._run.memory[self._task.contender] = (source.ask("pages") or into, into)
        neighbours = Neighbours({os.getpid(), source.pid, puller.pid})
        for name in self._task.works():
            for row in self._contender.rows:
                if name in row.works and row.name not in self._run.missing:
                    self._block(name, row, source, puller, neighbours)
        if self._contender.kind == PEER and self._rep == 0:
            title = f"{self._contender.rows[0].title}, 1 link"
            self._run.idle[title] = cores(source, puller, seconds=_idle_seconds(quick=self._task.quick))

    def _block(self, name: str, row: Row, source: Child, puller: Child, neighbours: Neighbours) -> None:
        try:
            block = self._quietest(name, row.mode, source, puller, neighbours)
        except Unavailable as why:
            self._run.missing[row.name] = str(why)
            return
        if self._contender.kind != LIMIT or self._rep == 0:  # bare copies are the same ones each time
            block.wrong = puller.ask("check", name, row.mode)
        self._run.add(name, row.name, block)

    def _quietest(self, name: str, mode: str, source: Child, puller: Child, neighbours: Neighbours) -> Block:
        """Of a few attempts, or the first quiet one."""
        best: Block | None = None
        for _ in range(ATTEMPTS):
            self._patience.wait(neighbours)
            puller.ask("warm", name, mode)
            before, spent = neighbours.look(), source.ask("cpu")
            seconds, cpu = puller.ask("timed", name, mode)
            cpu += source.ask("cpu") - spent
            block = Block(self._rep, seconds, cpu / len(seconds), neighbours.share(before))
            if best is None or block.others < best.others:
                best = block
            if best.quiet or self._patience.spent:
                break
        assert best is not None
        return best


@dataclass
class Patience:
    """For a quiet moment: so long each time (s), and less than `total` in a run, which would never end otherwise."""

    each: float
    total: float = 60.0

    @property
    def spent(self) -> bool:
        return not self.each or self.total <= 0

    def wait(self, neighbours: Neighbours) -> None:
        if not self.spent:
            began = time.monotonic()
            neighbours.wait(self.each)
            self.total -= time.monotonic() - began - LOOK


def floors(run: Run, *, patience: Patience, count: int) -> None:
    with Child(pong_side) as pong, Child(floors_side) as child:
        addresses = pong.ask("open")
        patience.wait(Neighbours({os.getpid(), pong.pid, child.pid}))
        run.floors.append(child.ask("timed", addresses, count))


def measure(options: argparse.Namespace) -> Run:
    shape = QUICK if options.quick else FULL
    nbytes = {name: work.nbytes for name, work in build(shape, seed=0).items()}
    titles = {row.name: row.title for row in ROWS.values()}
    run = Run(options.pages, nbytes, titles, quick=options.quick, copies=COPIES)
    progress, patience = _Progress(), Patience(options.patience)
    for rep in range(options.reps):
        for name in options.only:
            if name in run.missing or not CONTENDERS[name].works & set(options.workloads):
                continue
            task = Task(name, shape, options.workloads, 1000 + rep, options.pages == "huge", options.quick)
            Session(task, run, rep=rep, patience=patience).measure()
            progress.tell(f"repetition {rep + 1}/{options.reps}: {name}")
        floors(run, patience=patience, count=100 if options.quick else ROUND_TRIPS)
    idle(run, options.only, quick=options.quick)
    progress.tell("idle")
    return run


def idle(run: Run, chosen: Sequence[str], *, quick: bool) -> None:
    """Cores that the library uses while many links are open and nothing is asked for. Peers were looked at before."""
    for backend in ("shm", "tcp"):
        if any(CONTENDERS[name].kind == OURS and name.startswith(backend) for name in chosen):
            try:
                used = idle_links(backend, seconds=_idle_seconds(quick=quick))
            except Unavailable as why:
                run.missing[f"idle {backend}"] = str(why)
            else:
                run.idle[f"kvpull {backend}, {IDLE_LINKS} links"] = used


def _idle_seconds(*, quick: bool) -> float:
    return 0.2 if quick else 3.0


class _Progress:
    def __init__(self) -> None:
        self._began = time.monotonic()

    def tell(self, what: str) -> None:
        print(f"[{time.monotonic() - self._began:5.0f} s] {what}", file=sys.stderr, flush=True)
