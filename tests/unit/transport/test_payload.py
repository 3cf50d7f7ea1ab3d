"""A payload connection over a pair of sockets: turns, foreign bytes, interruption, and what its thread leaves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvpull_async.memory.base import Batches
from kvpull_async.transport.payload import TcpTransfer, receive_into, send_from
from tests.unit.transport.payloads import FOREIGN, ONE, TWO, Pair, batches, failed, head


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    one = Pair()
    yield one
    await one.end()


async def test_bytes_arrive_under_the_name_of_their_grant(pair: Pair) -> None:
    into = bytearray(6)
    fetched = pair.fetch(ONE, into)
    pair.far.sendall(head(ONE, 6) + b"abcdef")
    assert await fetched.done == 6
    assert bytes(into) == b"abcdef"
    served = pair.serve(TWO, b"xyz")
    assert await served.done == 3
    assert pair.far.recv(100, socket.MSG_WAITALL | socket.MSG_DONTWAIT) == head(TWO, 3) + b"xyz"
    assert served.settled.done()


async def test_transfers_run_in_turn_on_one_connection(pair: Pair) -> None:
    buffers = [bytearray(2) for _ in range(3)]
    transfers = [pair.fetch(bytes([i]) * 16, buffer) for i, buffer in enumerate(buffers)]
    for i in range(3):
        pair.far.sendall(head(bytes([i]) * 16, 2) + bytes([i, i]))
    assert [await transfer.done for transfer in transfers] == [2, 2, 2]
    assert buffers == [bytearray([i, i]) for i in range(3)]


async def test_scattered_pieces_are_filled_however_the_stream_is_cut(pair: Pair) -> None:
    into = np.zeros(1000, np.uint8)
    views = [memoryview(into)[start : start + 7] for start in range(0, 994, 7)]
    work = receive_into(batches(views[:50], views[50:]), ONE, 7 * len(views))
    transfer = TcpTransfer(pair.payload, work)
    data = bytes(i % 251 for i in range(7 * len(views)))
    stream = head(ONE, len(data)) + data
    for start in range(0, len(stream), 13):
        pair.far.sendall(stream[start : start + 13])
        await asyncio.sleep(0)
    assert await transfer.done == len(data)
    assert bytes(into[: len(data)]) == data


async def test_a_slow_reader_gets_every_piece(pair: Pair) -> None:
    data = bytes(i % 251 for i in range(3_000_000))
    view = memoryview(data)
    pieces = [view[start : start + 100_003] for start in range(0, len(data), 100_003)]
    transfer = TcpTransfer(pair.payload, send_from(batches(pieces[:9], pieces[9:]), ONE, len(data)))
    received = bytearray()
    pair.far.setblocking(False)
    while len(received) < 24 + len(data):
        received += await asyncio.get_running_loop().sock_recv(pair.far, 50_001)
    assert await transfer.done == len(data)
    assert bytes(received) == head(ONE, len(data)) + data


@pytest.mark.parametrize("stream", FOREIGN.values(), ids=FOREIGN.keys())
async def test_bytes_of_anything_else_never_land(pair: Pair, stream: bytes) -> None:
    into = bytearray(6)
    transfer = pair.fetch(ONE, into)
    pair.far.sendall(stream)
    assert "carries another transfer" in str(await failed(transfer))
    assert bytes(into) == bytes(6)
    assert pair.payload.broken


async def test_a_failed_transfer_ends_the_connection_and_those_behind_it(pair: Pair) -> None:
    first, second = pair.fetch(ONE, bytearray(6)), pair.fetch(TWO, bytearray(6))
    pair.far.sendall(head(ONE, 6) + b"ab")
    pair.far.shutdown(socket.SHUT_WR)
    assert "the peer closed the payload connection" in str(await failed(first))
    assert "the payload connection has ended" in str(await failed(second))
    assert not pair.payload.alive()
    late = pair.fetch(ONE, bytearray(6))
    assert "the payload connection has ended" in str(await failed(late))


async def test_p1_an_abort_interrupts_a_receive_and_settles_it(pair: Pair) -> None:
    into = bytearray(1 << 20)
    transfer = pair.fetch(ONE, into)
    pair.far.sendall(head(ONE, len(into)) + b"\x01" * 1000)
    assert transfer.abort() is True
    assert transfer.abort() is True
    assert "aborted" in str(await failed(transfer))
    into[:] = bytes(len(into))
    with pytest.raises(OSError, match="Broken pipe"):
        pair.far.sendall(b"\x01" * 10_000_000)
    assert bytes(into) == bytes(len(into))


async def test_an_abort_interrupts_a_send_to_a_peer_that_does_not_read(pair: Pair) -> None:
    transfer = pair.serve(ONE, bytes(8 << 20))
    await asyncio.sleep(0.02)
    assert not transfer.done.done()
    transfer.abort()
    await failed(transfer)


async def test_an_abort_after_the_last_byte_breaks_the_connection_too(pair: Pair) -> None:
    """The peer may not have taken the bytes, and they must not stand before the next pull's."""
    transfer = pair.serve(ONE, b"abc")
    await transfer.done
    transfer.abort()
    await asyncio.wait_for(asyncio.shield(pair.payload.ended), 20)
    assert transfer.done.result() == 3
    assert not pair.payload.alive()


async def test_liveness_sees_a_peer_that_hung_up(pair: Pair) -> None:
    assert pair.payload.alive()
    pair.far.shutdown(socket.SHUT_WR)
    assert not pair.payload.alive()
    assert not pair.payload.broken  # nobody has used it since


async def test_liveness_sees_bytes_that_were_given_up(pair: Pair) -> None:
    """Nothing else comes between transfers."""
    pair.far.sendall(b"of a push that nobody took")
    assert not pair.payload.alive()


async def test_a_landing_that_fails_ends_the_connection_and_is_closed(pair: Pair) -> None:
    closed = []

    def bad(buffer: bytearray) -> Batches:
        try:
            yield [memoryview(buffer)[:2]]
            raise OSError("no memory behind it")
        finally:
            closed.append(True)

    transfer = TcpTransfer(pair.payload, receive_into(bad(bytearray(4)), ONE, 4))
    pair.far.sendall(head(ONE, 4) + b"abcd")
    assert "no memory behind it" in str(await failed(transfer))
    assert closed == [True]


async def test_p8_an_idle_connection_ends_at_once_and_twice_is_harmless() -> None:
    pair = Pair()
    pair.payload.abort()
    await pair.end()
    assert pair.far.fileno() == -1


@pytest.mark.parametrize("turn", range(20))
async def test_no_transfer_is_lost_between_the_end_of_a_connection_and_its_thread(turn: int) -> None:
    """Started at any moment around an abort, a transfer settles: one that did not would pin its cache for ever."""
    pair = Pair()
    transfers = [pair.fetch(ONE, bytearray(4)) for _ in range(turn % 3)]
    pair.payload.abort()
    for _ in range(turn):
        await asyncio.sleep(0)
    transfers += [pair.fetch(TWO, bytearray(4)) for _ in range(3)]
    for transfer in transfers:
        await failed(transfer)
    await pair.end()
