"""Who is measured, by name, and what their two processes can be asked. It must not decide what is asked when."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from kv_nodes import AwaitingNode, BlockingNode, KvPuller, KvSource
from sides import Puller, Source
from workloads import Shape, Workload, build, wrong_bytes
from yardsticks import LoopPuller, LoopSource, SocketPuller, SocketSource, crossings

__all__ = ["CONTENDERS", "Contender", "Task", "crossing_side", "puller_side", "source_side"]


@dataclass(frozen=True)
class Contender:
    title: str
    source: Callable[..., Source]
    puller: Callable[..., Puller]
    only_latency: bool = False


def _library(title: str, node: type[AwaitingNode | BlockingNode], *, allocated: bool) -> Contender:
    return Contender(title, partial(KvSource, allocated=allocated), partial(KvPuller, node, allocated=allocated))


def _sockets(title: str, family: socket.AddressFamily) -> Contender:
    return Contender(title, partial(SocketSource, family), partial(SocketPuller, family))


CONTENDERS: Final[Mapping[str, Contender]] = {
    "await": _library("kvpull, awaited", AwaitingNode, allocated=False),
    "tcp": _sockets("plain TCP sockets", socket.AF_INET),
    "blocking": _library("kvpull, blocking", BlockingNode, allocated=False),
    "unix": _sockets("plain Unix sockets", socket.AF_UNIX),
    "await-allocated": _library("kvpull, awaited, own memory", AwaitingNode, allocated=True),
    "asyncio": Contender("bare asyncio round trip", LoopSource, LoopPuller, only_latency=True),
    "blocking-allocated": _library("kvpull, blocking, own memory", BlockingNode, allocated=True),
}
"""In the order in which one repetition runs them."""


@dataclass(frozen=True)
class Task:
    """What both processes of one session are told."""

    contender: str
    shape: Shape
    names: tuple[str, ...]
    seed: int
    huge: bool
    quick: bool

    def works(self) -> dict[str, Workload]:
        works = build(self.shape, seed=self.seed)
        skip_bulk = CONTENDERS[self.contender].only_latency
        chosen = {name: works[name] for name in self.names if works[name].is_latency or not skip_bulk}
        if self.quick:
            chosen = {name: replace(work, warmup=1, count=3) for name, work in chosen.items()}
        return chosen


def source_side(task: Task) -> Mapping[str, Callable[..., Any]]:
    """The answers of the source process."""
    source = CONTENDERS[task.contender].source(huge=task.huge)
    works = list(task.works().values())
    return {"open": lambda: source.open(task.shape, works, seed=task.seed), "close": source.close}


def puller_side(task: Task) -> Mapping[str, Callable[..., Any]]:
    """The answers of the puller process."""
    puller = CONTENDERS[task.contender].puller(huge=task.huge)
    works = task.works()

    def open_(told: Any) -> None:
        puller.open(task.shape, list(works.values()), told=told)
        for work in works.values():
            puller.arena(work).poison()  # every page exists before the clock runs

    def timed(name: str) -> tuple[list[float], float]:
        began = time.process_time()
        seconds = puller.pull(works[name], works[name].count)
        return seconds, time.process_time() - began

    def check(name: str) -> int:
        arena = puller.arena(works[name])
        arena.poison()
        puller.pull(works[name], 1)
        return wrong_bytes(arena, works[name].pulls, shape=task.shape, seed=task.seed)

    return {
        "open": open_,
        "warm": lambda name: puller.pull(works[name], works[name].warmup),
        "timed": timed,
        "check": check,
        "close": puller.close,
    }


def crossing_side() -> Mapping[str, Callable[..., Any]]:
    """The answers of the process that measures bare thread crossings."""
    return {"timed": crossings}
