"""Faults for engines that a test is about to make, by way of the names from which an engine takes its parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvpull_async.memory.base import Region
from kvpull_async.memory.host import HostMemory
from kvpull_async.testing.faults import Faults, FaultyTransport, Gate, GatedMemory
from kvpull_async.testing.stubborn import StubbornTransport
from kvpull_async.transport.base import Transport
from kvpull_async.transport.inproc import InprocTransport
from kvpull_async.transport.shm.remote import Mapped, Private
from kvpull_async.transport.tcp import TcpTransport

_TRANSPORTS: dict[str, tuple[str, type[Transport]]] = {
    "tcp": ("TcpTransport", TcpTransport),
    "inproc": ("InprocTransport", InprocTransport),
    "shm": ("TcpTransport", TcpTransport),  # which carries its control connections
}


class _Gated(GatedMemory):
    """Other processes see what the memory below publishes."""

    def __init__(self, inner: HostMemory, *, after: int) -> None:
        super().__init__(inner, after=after)
        self.publications = inner.publications

    def disown(self, regions: tuple[Region, ...]) -> None:
        self._inner.disown(regions)


def gated_memories(monkeypatch: pytest.MonkeyPatch, *, after: int) -> list[GatedMemory]:
    """Engines made from now on have gated memory: the list of it grows in the order in which they are made."""
    made: list[GatedMemory] = []

    def make(*args: Any, **options: Any) -> GatedMemory:
        made.append(_Gated(HostMemory(*args, **options), after=after))
        return made[-1]

    monkeypatch.setattr("kvpull_async.engine.HostMemory", make)
    return made


def gated_copies(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Copies out of another process's memory stop at this gate once it is closed, but for their first piece."""
    gate = Gate()
    closed_since: Iterator[bool] = iter(())

    def close(*, times: int | None = None) -> None:
        nonlocal closed_since
        closed_since = iter((True,))  # for the piece that passes
        Gate.close(gate, times=times)

    monkeypatch.setattr(gate, "close", close)
    for kind in (Mapped, Private):

        def copy(cache: Any, *rows: Any, inner: Any = kind.copy) -> int:
            if not next(closed_since, False):
                gate.pass_through()
            return int(inner(cache, *rows))

        monkeypatch.setattr(kind, "copy", copy)
    return gate


def faulty_transports(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Faults]:
    """Engines made from now on suffer faults on that transport's control connections: one `Faults` per engine."""
    made: list[Faults] = []
    attribute, transport = _TRANSPORTS[name]

    def make(*args: Any, **options: Any) -> FaultyTransport:
        made.append(Faults())
        return FaultyTransport(transport(*args, **options), made[-1])

    monkeypatch.setattr(f"kvpull_async.routes.{attribute}", make)
    return made


def stubborn_inproc(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inproc transport of engines made from now on has fetches that refuse to abort."""
    monkeypatch.setattr("kvpull_async.routes.InprocTransport", lambda log: StubbornTransport(InprocTransport(log)))
