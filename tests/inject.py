"""Faults for engines that a test is about to make, by way of the names from which an engine takes its parts."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpull_async.memory import choosing
from kvpull_async.memory.base import Allocation, Region, Until
from kvpull_async.memory.publications import Publications
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
    """Other processes see what the memory below publishes. `all_made` are the gated memories of the test."""

    def __init__(self, inner: Any, all_made: list[_Gated], *, after: int) -> None:
        super().__init__(inner, after=after)
        self.publications: Publications = inner.publications
        self._all_made = all_made
        self._places: set[int] = set()

    def allocate(self, **wanted: Any) -> Allocation:
        made = super().allocate(**wanted)
        self._places.update(region.address for region in made.regions)
        return made

    def adopt(self, addresses: Sequence[int], **wanted: Any) -> tuple[Region, ...]:
        self._places.update(addresses)
        return super().adopt(addresses, **wanted)

    def disown(self, regions: tuple[Region, ...]) -> None:
        self._inner.disown(regions)

    def copying(
        self,
        sources: Sequence[Region],
        destinations: Sequence[Region],
        pairs: NDArray[np.int64],
        *,
        until: Until | None = None,
    ) -> Generator[int, None, None]:
        """Within a device no bytes are lent: the steps of the copy stop at the gates of the two memories instead."""
        if sources[0].device is None or destinations[0].device is None:
            yield from super().copying(sources, destinations, pairs, until=until)
            return
        lender = next((made for made in self._all_made if sources[0].address in made._places), self)
        with closing(self._inner.copying(sources, destinations, pairs, until=until)) as steps:
            for number in itertools.count():
                if number >= self._after:
                    lender.lending_gate.pass_through()
                    self.landing_gate.pass_through()
                copied = next(steps, None)
                if copied is None:
                    return
                yield copied


def gated_memories(monkeypatch: pytest.MonkeyPatch, *, after: int) -> Sequence[GatedMemory]:
    """Engines opened from now on have gated memory: the list of it grows in the order in which they open."""
    made: list[_Gated] = []

    def choose(*args: Any, inner: Any = choosing.choose, **options: Any) -> choosing.Chosen:
        chosen: choosing.Chosen = inner(*args, **options)
        made.append(_Gated(chosen.memory, made, after=after))
        return replace(chosen, memory=made[-1])

    monkeypatch.setattr(choosing, "choose", choose)
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
    monkeypatch.setattr("kvpull_async.routes.InprocTransport", lambda *args: StubbornTransport(InprocTransport(*args)))
