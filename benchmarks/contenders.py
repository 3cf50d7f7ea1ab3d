"""Who is measured, by name, and what their two processes can be asked. It must not decide what is asked when."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import partial
from typing import Any, Final

import peers_mooncake
import peers_nixl
from kv_nodes import AwaitingNode, BlockingNode, KvPuller, KvSource, LocalPuller, MakeNode
from kv_small import ConsumedPuller, ConsumedSource, RemotePuller, RemoteSource
from limits import MODES, CopyPuller, CopySource
from pages import pages
from sides import Puller, SeedSource, Source
from workloads import SMALL, Shape, Workload, build, wrong_bytes
from yardsticks import LoopPuller, LoopSource, SocketPuller, SocketSource

__all__ = [
    "CONTENDERS",
    "LIMIT",
    "NAMES",
    "OURS",
    "PEER",
    "PLAIN",
    "ROWS",
    "Contender",
    "Row",
    "Task",
    "matching",
    "puller_side",
    "source_side",
]

NAMES: Final = ("W1", "W2", "W3", "W4", "W5")
BULK: Final = ("W1", "W2", "W5")
LATENCY: Final = ("W3", "W4")
OURS, PLAIN, LIMIT, PEER = "kvpull", "plain", "limit", "peer"


@dataclass(frozen=True)
class Row:
    """One line of the tables: a way in which a contender makes the pulls of some workloads."""

    name: str
    title: str
    mode: str = ""
    works: tuple[str, ...] = NAMES


@dataclass(frozen=True)
class Contender:
    """Two fresh processes that are asked for one row after another."""

    kind: str
    source: Callable[..., Source]
    puller: Callable[..., Puller]
    rows: tuple[Row, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    abrupt: bool = False

    @property
    def works(self) -> set[str]:
        return {name for row in self.rows for name in row.works}


def _library(backend: str, node: MakeNode, *rows: Row, allocated: bool = True, **properties: Any) -> Contender:
    said = {"allocated": allocated, "transfer_backend": backend, **properties}
    return Contender(OURS, partial(KvSource, **said), partial(KvPuller, node, **said), rows)


def _both_faces(backend: str) -> dict[str, Contender]:
    faces: dict[str, tuple[str, MakeNode]] = {
        "await": ("awaited", AwaitingNode),
        "blocking": ("blocking", BlockingNode),
    }
    return {
        f"{backend}-{face}": _library(
            backend,
            node,
            Row(f"{backend}-{face}", f"kvpull {backend}, {said}"),
            Row(f"{backend}-{face}-layers", f"kvpull {backend}, {said}, pull_layers", "layers", ("W5",)),
        )
        for face, (said, node) in faces.items()
    }


def _registered(backend: str, face: str, node: MakeNode, *works: str) -> dict[str, Contender]:
    name, said = f"{backend}-registered-{face}", "awaited" if face == "await" else face
    row = Row(name, f"kvpull {backend}, {said}, registered memory", works=works)
    return {name: _library(backend, node, row, allocated=False)}


def _small(backend: str) -> dict[str, Contender]:
    """Small pulls by cache id, and by a key that they use up."""
    said: dict[str, Any] = {"allocated": True, "transfer_backend": backend}
    remote = {**said, "enable_remote_cache_accessible": True}
    titles = {"remote": "by cache id, remote access", "consumed": "by a key that is used up"}
    rows = {
        how: (Row(f"{backend}-{how}", f"kvpull {backend}, awaited, {title}", works=LATENCY),)
        for how, title in titles.items()
    }
    by_id, by_key = partial(RemoteSource, **remote), partial(ConsumedSource, **said)
    blocking = (Row(f"{backend}-remote-blocking", f"kvpull {backend}, blocking, {titles['remote']}", works=LATENCY),)
    return {
        f"{backend}-remote": Contender(OURS, by_id, partial(RemotePuller, AwaitingNode, **remote), rows["remote"]),
        f"{backend}-remote-blocking": Contender(OURS, by_id, partial(RemotePuller, BlockingNode, **remote), blocking),
        f"{backend}-consumed": Contender(OURS, by_key, partial(ConsumedPuller, AwaitingNode, **said), rows["consumed"]),
    }


def _inproc() -> Contender:
    puller = partial(LocalPuller, AwaitingNode, allocated=True, transfer_backend="inproc")
    return Contender(OURS, SeedSource, puller, (Row("inproc-await", "kvpull inproc, awaited"),))


def _streamed() -> Contender:
    row = Row("shm-streamed", "kvpull shm, awaited, registered, streamed", works=("W1", "W2"))
    return _library("shm", AwaitingNode, row, allocated=False, allow_process_vm_read="off")


def _sockets(name: str, title: str, family: socket.AddressFamily) -> Contender:
    rows = [Row(name, title), Row(f"{name}-4m", f"{title}, 4 MiB buffers", "4m")]
    if family == socket.AF_INET:
        rows.append(Row(f"{name}-reno", f"{title}, not paced", "reno", BULK))
    return Contender(PLAIN, partial(SocketSource, family), partial(SocketPuller, family), tuple(rows))


def _copies() -> Contender:
    rows = [Row(mode, title, mode, NAMES if mode.endswith("1") else BULK) for mode, title in MODES.items()]
    return Contender(LIMIT, CopySource, CopyPuller, tuple(rows))


def _nixl(name: str, *rows: Row, env: Mapping[str, str], tcp: bool) -> dict[str, Contender]:
    source = partial(peers_nixl.NixlSource, tcp=tcp)
    return {name: Contender(PEER, source, peers_nixl.NixlPuller, rows, env, abrupt=True)}


def _peers() -> dict[str, Contender]:
    prepared = Row("nixl", "NIXL, prepared lists", "prepared")
    fresh = Row("nixl-fresh", "NIXL, everything fresh", "fresh", LATENCY)
    tcp = Row("nixl-tcp", "NIXL over TCP, tuned", "prepared")
    mooncake = (Row("mooncake", "Mooncake, TCP, 16 lanes"),)
    sides = peers_mooncake.MooncakeSource, peers_mooncake.MooncakePuller
    return {
        **_nixl("nixl", prepared, fresh, env=peers_nixl.ENV, tcp=False),
        **_nixl("nixl-tcp", tcp, env=peers_nixl.TCP_ENV, tcp=True),
        "mooncake": Contender(PEER, *sides, mooncake, peers_mooncake.ENV, abrupt=True),
    }


CONTENDERS: Final[Mapping[str, Contender]] = {
    **_both_faces("shm"),
    **_peers(),
    **_both_faces("tcp"),
    "tcp": _sockets("tcp", "plain TCP sockets", socket.AF_INET),
    **_registered("shm", "await", AwaitingNode, *NAMES[:4]),
    **_registered("shm", "blocking", BlockingNode, *NAMES[:2]),
    "limits": _copies(),
    "shm-streamed": _streamed(),
    "unix": _sockets("unix", "plain Unix sockets", socket.AF_UNIX),
    **_registered("tcp", "await", AwaitingNode, *NAMES[:4]),
    "inproc-await": _inproc(),
    **_small("shm"),
    **_small("tcp"),
    "asyncio": Contender(
        PLAIN, LoopSource, LoopPuller, (Row("asyncio", "asyncio streams over TCP, these bytes", works=LATENCY),)
    ),
}
"""In the order in which one repetition runs them."""
ROWS: Final[Mapping[str, Row]] = {row.name: row for contender in CONTENDERS.values() for row in contender.rows}


def matching(patterns: str) -> list[str]:
    """The contenders that match any of these patterns, separated by commas. Raises LookupError when one has none."""
    found = []
    for pattern in patterns.split(","):
        matches = [name for name in CONTENDERS if fnmatch(name, pattern)]
        if not matches:
            raise LookupError(f"unknown: {pattern}; there are {', '.join(CONTENDERS)}")
        found += matches
    return [name for name in CONTENDERS if name in found]


@dataclass(frozen=True)
class Task:
    """What both processes of one session are told."""

    contender: str
    shape: Shape
    names: tuple[str, ...]
    seed: int
    huge: bool
    quick: bool

    @property
    def memory(self) -> Shape:
        """Small pulls need little."""
        return self.shape if self.works().keys() & set(BULK) else min(self.shape, SMALL, key=_nbytes)

    def works(self) -> dict[str, Workload]:
        works, able = build(self.shape, seed=self.seed), CONTENDERS[self.contender].works
        chosen = {name: works[name] for name in self.names if name in able}
        if self.quick:
            chosen = {name: replace(work, warmup=1, count=3) for name, work in chosen.items()}
        return chosen


def _nbytes(shape: Shape) -> int:
    return shape.tensors * shape.tensor_nbytes


def source_side(task: Task) -> Mapping[str, Callable[..., Any]]:
    """The answers of the source process."""
    source = CONTENDERS[task.contender].source(huge=task.huge)
    works = list(task.works().values())
    return {
        "open": lambda: source.open(task.memory, works, seed=task.seed),
        "pages": lambda: pages(source.arenas()),
        "close": source.close,
    }


def puller_side(task: Task) -> Mapping[str, Callable[..., Any]]:
    """The answers of the puller process."""
    puller = CONTENDERS[task.contender].puller(huge=task.huge)
    works = task.works()

    def open_(told: Any) -> str:
        puller.open(task.memory, list(works.values()), told=told)
        arenas = {id(arena): arena for arena in map(puller.arena, works.values())}.values()
        for arena in arenas:
            arena.poison()  # every page exists before the clock runs
        return pages(arenas)

    def timed(name: str, mode: str) -> tuple[list[float], float]:
        began = time.process_time()
        seconds = puller.pull(works[name], works[name].count, mode)
        return seconds, time.process_time() - began

    def check(name: str, mode: str) -> int:
        arena = puller.arena(works[name])
        arena.poison()
        puller.pull(works[name], 1, mode)
        return wrong_bytes(arena, works[name].pulls, shape=task.memory, seed=task.seed)

    return {
        "open": open_,
        "warm": lambda name, mode: puller.pull(works[name], works[name].warmup, mode),
        "timed": timed,
        "check": check,
        "close": puller.close,
    }
