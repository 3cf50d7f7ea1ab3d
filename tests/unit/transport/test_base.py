"""What the contracts themselves promise to a transport's author; their behaviour is tested by the contract suite."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers
from kvpull_async.memory.base import Batches, Span, Until
from kvpull_async.transport import base
from kvpull_async.transport.base import (
    Address,
    ControlChannel,
    DataPath,
    Listener,
    OnChannel,
    PathKind,
    PathSeed,
    Transfer,
    Transport,
    break_off,
    moved,
)
from kvpull_async.transport.inproc import InprocTransport
from kvpull_async.transport.tcp import TcpTransport


class SmallestPath(DataPath):
    name = "smallest"

    async def ready(self, deadline: Deadline) -> None: ...

    def fetch(self, grant_id: bytes, landing: Batches, nbytes: int) -> Transfer:
        raise NotImplementedError

    def serve(self, grant_id: bytes, lending: Batches, nbytes: int) -> Transfer:
        raise NotImplementedError

    def abort(self) -> None: ...

    async def aclose(self, deadline: Deadline) -> None: ...


class SmallestTransport(Transport):
    name = "smallest"

    async def listen(self, address: Address, on_channel: OnChannel) -> Listener:
        raise NotImplementedError

    async def dial(self, address: Address) -> ControlChannel:
        raise NotImplementedError


class SmallestKind(PathKind):
    name = "smallest"

    def path(self, seed: PathSeed) -> DataPath:
        return SmallestPath()


@pytest.mark.parametrize("contract", [ControlChannel, DataPath, Listener, PathKind, Transport])
def test_a_contract_cannot_be_used_without_its_methods(contract: type[object]) -> None:
    with pytest.raises(TypeError, match="abstract"):
        contract()


def test_a_path_streams_and_has_nothing_to_describe_expect_or_release_unless_it_says_so() -> None:
    path, span = SmallestPath(), Span((), lambda: np.empty((0, 3), np.int64), direct=True)
    assert path.unproven(b"") is False
    assert path.describe(b"g" * 16, span) is None
    path.expect(b"g" * 16, None, lambda: np.empty((0, 3), np.int64), span)
    path.give_up()
    path.release(b"g" * 16)


def test_a_transport_reaches_every_address_unless_it_says_otherwise() -> None:
    transport = SmallestTransport()
    assert transport.reaches(("10.0.0.1", 7))
    transport.close_after_fork()


async def test_a_kind_needs_no_words_to_be_agreed_on_unless_it_says_so() -> None:
    kind = SmallestKind()
    assert kind.offer(b"t" * 16) == b""
    await kind.meet(b"t" * 16, b"")
    kind.forget(b"t" * 16)
    kind.close_after_fork()
    await kind.aclose(Deadline.after_ms(1000))
    assert kind.why


def test_a_seed_does_not_show_its_token() -> None:
    seed = PathSeed(b"a secret token!!", 0, dialer=True, address=("127.0.0.1", 7), workers=Workers(1))
    assert "secret" not in repr(seed)


def test_the_transports_have_names_of_their_own() -> None:
    assert {TcpTransport.name, InprocTransport.name} == {"tcp", "inproc"}
    assert set(base.__all__) >= {"ControlChannel", "DataPath", "Listener", "PathKind", "Transfer", "Transport"}


class FakeTransfer:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[int] = loop.create_future()
        self.settled: asyncio.Future[None] = loop.create_future()

    def abort(self) -> bool:
        self.done.cancel()
        return True


async def test_what_is_broken_off_is_aborted_before_its_memory_is_told_to_wait_no_more() -> None:
    """Else another engine, which reads it, would be stopped without knowing why."""
    transfer, until = FakeTransfer(), Until()
    stopped: list[bool] = []
    transfer.done.add_done_callback(lambda _: None)
    abort = transfer.abort
    transfer.abort = lambda: (stopped.append(until.stopped), abort())[1]  # type: ignore[method-assign]
    break_off(transfer, until)
    assert stopped == [False]
    assert transfer.done.cancelled()
    assert until.stopped
    break_off(None, None)


async def test_moved_waits_for_the_bytes_or_the_reason() -> None:
    good, bad = FakeTransfer(), FakeTransfer()
    good.done.set_result(7)
    bad.done.set_exception(ConnectionResetError("reset"))
    assert await moved(good) == 7
    with pytest.raises(ConnectionResetError, match="reset"):
        await moved(bad)


async def test_a_transfer_that_something_else_aborted_is_no_cancellation_of_who_waits() -> None:
    transfer = FakeTransfer()
    waiting = asyncio.create_task(moved(transfer))
    await asyncio.sleep(0)
    transfer.abort()
    with pytest.raises(ConnectionAbortedError):
        await waiting


async def test_a_cancelled_wait_leaves_the_transfer_alone() -> None:
    transfer = FakeTransfer()
    waiting = asyncio.create_task(moved(transfer))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not transfer.done.done()
