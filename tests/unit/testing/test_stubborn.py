"""Transfers that refuse to stop, and what is passed on to the path below them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvpull_async._deadline import Deadline
from kvpull_async.memory.base import Batches, Span
from kvpull_async.observe import Log
from kvpull_async.testing.stubborn import StubbornPath, StubbornTransfer, StubbornTransport
from kvpull_async.transport.base import DataPath, PathSeed, Segments
from kvpull_async.transport.inproc import InprocTransport


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


class Slow:
    """A transfer that ends when the test says so."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[int] = loop.create_future()
        self.settled: asyncio.Future[None] = loop.create_future()
        self.aborted = False

    def abort(self) -> bool:
        self.aborted = True
        return True


class SlowPath(DataPath):
    name = "slow"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.transfer = Slow()

    async def ready(self, deadline: Deadline) -> None:
        self.calls.append("ready")

    def fetch(self, grant_id: bytes, landing: Batches, nbytes: int) -> Slow:
        return self.transfer

    def serve(self, grant_id: bytes, lending: Batches, nbytes: int) -> Slow:
        return self.transfer

    def describe(self, grant_id: bytes, span: Span) -> bytes:
        self.calls.append("describe")
        return b"a ticket"

    def expect(self, grant_id: bytes, ticket: bytes | None, reading: Callable[[], Segments], span: Span) -> None:
        assert ticket == b"a ticket"
        self.calls.append("expect")

    def unproven(self, ticket: bytes) -> bool:
        self.calls.append("unproven")
        return ticket == b"a ticket"

    def give_up(self) -> None:
        self.calls.append("give_up")

    def release(self, grant_id: bytes) -> None:
        self.calls.append("release")

    def abort(self) -> None:
        self.calls.append("abort")

    async def aclose(self, deadline: Deadline) -> None:
        self.calls.append("aclose")


def nothing() -> Iterator[Any]:
    yield from ()


async def test_a_stubborn_fetch_refuses_to_abort_and_keeps_its_path_alive_until_it_settles() -> None:
    inner = SlowPath()
    path = StubbornPath(inner)
    transfer = path.fetch(b"", nothing(), 0)  # type: ignore[arg-type]
    assert isinstance(transfer, StubbornTransfer)
    assert not transfer.abort()
    path.abort()
    began = time.monotonic()
    await path.aclose(Deadline.after_ms(20))
    assert time.monotonic() - began < 5
    assert not inner.transfer.aborted
    assert inner.calls == []
    inner.transfer.done.set_result(0)
    inner.transfer.settled.set_result(None)
    await turns()
    assert transfer.done.result() == 0
    await path.aclose(Deadline.after_ms(1000))
    assert set(inner.calls) == {"abort", "aclose"}


async def test_a_stubborn_path_passes_the_rest_on() -> None:
    inner = SlowPath()
    path = StubbornPath(inner)
    await path.ready(Deadline.after_ms(1000))
    nowhere = Span((), lambda: np.empty((0, 3), np.int64), direct=True)
    assert path.describe(b"", nowhere) == b"a ticket"
    path.expect(b"", b"a ticket", nowhere.rows, nowhere)
    assert path.unproven(b"a ticket")
    path.give_up()
    path.release(b"")
    assert path.serve(b"", nothing(), 0) is inner.transfer  # type: ignore[arg-type]
    path.abort()
    assert inner.calls == ["ready", "describe", "expect", "unproven", "give_up", "release", "abort"]
    inner.transfer.done.cancel()


async def test_the_stubborn_transport_makes_stubborn_paths() -> None:
    transport = StubbornTransport(InprocTransport(Log()))
    path = transport.path(PathSeed(bytes(16), 0, True, None, None))  # type: ignore[arg-type]
    nowhere = Span((), lambda: np.empty((0, 3), np.int64), direct=True)
    assert isinstance(path, StubbornPath)
    assert (transport.name, path.name, path.describe(b"", nowhere)) == ("inproc", "inproc", b"")


async def test_whether_a_push_may_set_out_at_once_is_for_the_path_below_to_say() -> None:
    below = SlowPath()
    path = StubbornPath(below)
    for prepared in (True, False):
        below.prepared = prepared
        assert path.prepared is prepared
