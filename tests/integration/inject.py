"""Faults for engines that a test is about to make, by way of the names from which an engine takes its parts."""

from __future__ import annotations

from typing import Any

import pytest

from kvpull_async.memory.host import HostMemory
from kvpull_async.testing.faults import Faults, FaultyTransport, GatedMemory, StubbornTransport
from kvpull_async.transport.base import Transport
from kvpull_async.transport.inproc import InprocTransport
from kvpull_async.transport.tcp import TcpTransport

_TRANSPORTS: dict[str, tuple[str, type[Transport]]] = {
    "tcp": ("TcpTransport", TcpTransport),
    "inproc": ("InprocTransport", InprocTransport),
}


def gated_memories(monkeypatch: pytest.MonkeyPatch, *, after: int) -> list[GatedMemory]:
    """Engines made from now on have gated memory: the list of it grows in the order in which they are made."""
    made: list[GatedMemory] = []

    def make(*args: Any) -> GatedMemory:
        made.append(GatedMemory(HostMemory(*args), after=after))
        return made[-1]

    monkeypatch.setattr("kvpull_async.engine.HostMemory", make)
    return made


def faulty_transports(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Faults]:
    """Engines made from now on suffer faults on that transport's control connections: one `Faults` per engine."""
    made: list[Faults] = []
    attribute, transport = _TRANSPORTS[name]

    def make(*args: Any, **options: Any) -> FaultyTransport:
        made.append(Faults())
        return FaultyTransport(transport(*args, **options), made[-1])

    monkeypatch.setattr(f"kvpull_async.engine.{attribute}", make)
    return made


def stubborn_inproc(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inproc transport of engines made from now on has fetches that refuse to abort."""
    monkeypatch.setattr("kvpull_async.engine.InprocTransport", lambda log: StubbornTransport(InprocTransport(log)))
