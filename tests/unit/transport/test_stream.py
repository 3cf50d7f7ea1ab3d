"""A path over payload connections, whatever these are: made when needed, replaced when broken, given up with a pull."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.memory.base import Batches
from kvpull_async.transport.stream import StreamPath
from tests.loop_nodes import eventually


def soon() -> Deadline:
    return Deadline.after_ms(20_000)


def of(data: bytes) -> Batches:
    yield [memoryview(data)]


def into(buffer: bytearray) -> Batches:
    yield [memoryview(buffer)]


class PairPath(StreamPath):
    """Dials by handing the other half one end of a socket pair."""

    name = "pair"

    def __init__(self, accepting: StreamPath | None = None) -> None:
        super().__init__(dials=accepting is not None)
        self.accepting = accepting
        self.dialled = 0
        self.refusal: OSError | None = None

    async def dial(self, deadline: Deadline) -> socket.socket:
        assert self.accepting is not None
        if self.refusal is not None:
            raise self.refusal
        self.dialled += 1
        mine, theirs = socket.socketpair()
        self.accepting.attach(theirs)
        return mine


@contextlib.asynccontextmanager
async def halves() -> AsyncIterator[tuple[PairPath, PairPath]]:
    accepted = PairPath()
    dialled = PairPath(accepted)
    try:
        yield dialled, accepted
    finally:
        await dialled.aclose(soon())
        await accepted.aclose(soon())


async def pull(source: StreamPath, puller: StreamPath, data: bytes) -> bytes:
    grant, buffer = bytes(16), bytearray(len(data))
    await puller.ready(soon())
    await source.ready(soon())
    fetched = puller.fetch(grant, into(buffer), len(data))
    served = source.serve(grant, of(data), len(data))
    assert (await fetched.done, await served.done) == (len(data), len(data))
    return bytes(buffer)


@pytest.mark.parametrize("dialler_pulls", [True, False])
async def test_one_connection_made_by_the_side_that_dials_serves_many_pulls(*, dialler_pulls: bool) -> None:
    async with halves() as (dialled, accepted):
        source, puller = (accepted, dialled) if dialler_pulls else (dialled, accepted)
        await accepted.ready(soon())
        assert (dialled.connected, accepted.connected, dialled.dialled) == (False, False, 0)
        await dialled.ready(soon())
        for data in (b"first", b"second " * 1000, b"third"):
            assert await pull(source, puller, data) == data
        assert (dialled.connected, accepted.connected, dialled.dialled) == (True, True, 1)


async def test_a_path_without_a_connection_refuses_at_once() -> None:
    async with halves() as paths:
        for path in paths:
            with pytest.raises(ConnectionError, match="there is no payload connection"):
                path.fetch(bytes(16), into(bytearray(1)), 1)
            with pytest.raises(ConnectionError, match="there is no payload connection"):
                path.serve(bytes(16), of(b"x"), 1)


async def test_a_dial_that_fails_may_be_tried_again() -> None:
    async with halves() as (dialled, accepted):
        dialled.refusal = ConnectionRefusedError("not now")
        with pytest.raises(ConnectionRefusedError, match="not now"):
            await dialled.ready(soon())
        dialled.refusal = None
        assert await pull(accepted, dialled, b"data") == b"data"


@pytest.mark.parametrize("end", ["source", "puller"])
async def test_p4_a_broken_connection_is_replaced_when_the_next_pull_needs_it(end: str) -> None:
    async with halves() as (dialled, accepted):
        assert await pull(accepted, dialled, b"before") == b"before"
        grant, path = b"g" * 16, accepted if end == "source" else dialled
        transfer = path.fetch(grant, into(bytearray(1)), 1)
        transfer.abort()
        await asyncio.wait_for(asyncio.shield(transfer.settled), 20)
        with pytest.raises(ConnectionError, match="there is no payload connection"):
            path.fetch(grant, into(bytearray(1)), 1)
        assert await pull(accepted, dialled, b"after") == b"after"
        assert dialled.dialled == 2


@pytest.mark.parametrize("dialler_pulls", [True, False])
async def test_bytes_of_a_pull_given_up_before_its_grant_do_not_reach_the_next_one(*, dialler_pulls: bool) -> None:
    async with halves() as (dialled, accepted):
        source, puller = (accepted, dialled) if dialler_pulls else (dialled, accepted)
        assert await pull(source, puller, b"before") == b"before"
        sent = source.serve(b"s" * 16, of(b"nobody wants this"), 17)
        await sent.settled
        puller.give_up()
        sent.abort()  # when the source hears of it
        assert await pull(source, puller, b"after") == b"after"


async def test_a_new_connection_ends_what_runs_on_the_old_one() -> None:
    async with halves() as (dialled, accepted):
        await dialled.ready(soon())
        waiting = accepted.fetch(bytes(16), into(bytearray(1)), 1)
        mine, theirs = socket.socketpair()
        accepted.attach(theirs)
        await asyncio.wait_for(asyncio.shield(waiting.settled), 20)
        assert isinstance(waiting.done.exception(), OSError)
        mine.close()


async def test_p8_the_end_of_a_path_ends_its_threads_and_takes_no_connection_any_more() -> None:
    async with halves() as (dialled, accepted):
        assert await pull(accepted, dialled, b"data") == b"data"
        await dialled.aclose(soon())
        await eventually(lambda: not dialled._ending)
        assert not dialled.connected
        mine, theirs = socket.socketpair()
        dialled.attach(theirs)
        assert mine.recv(1) == b""
        mine.close()
