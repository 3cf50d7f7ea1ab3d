"""A payload connection over TLS: as over a plain socket, and no byte counts that is not decrypted and whole."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvpull_async.transport import tls
from kvpull_async.transport.payload import Payload, TcpTransfer, receive_into
from kvpull_async.transport.tls import Tls
from tests.certificates import Authority, cluster
from tests.unit.transport.payloads import FOREIGN, ONE, Pair, batches, failed, head


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    options = Authority(tmp_path_factory.mktemp("certificates")).issue("both", *cluster("*"))
    return Tls.load(certificate=options["tls_certificate"], key="", authority=options["tls_authority"])


class SecuredPair(Pair):
    """The payload connection is the side that dialled."""

    def __init__(self, near: ssl.SSLSocket, far: ssl.SSLSocket) -> None:
        self.far = far
        far.setblocking(True)
        far.settimeout(20)
        self.payload = Payload(near, asyncio.get_running_loop())


@pytest.fixture
async def secured(own: Tls) -> AsyncIterator[SecuredPair]:
    near, far = socket.socketpair()
    for sock in (near, far):
        sock.setblocking(False)
    one = SecuredPair(
        *await asyncio.gather(
            tls.connected(own.dialling, near, accepting=False), tls.connected(own.accepting, far, accepting=True)
        )
    )
    yield one
    await one.end()


async def test_many_transfers_pass_both_ways_and_the_connection_stays_alive(secured: SecuredPair) -> None:
    for number in range(5):
        data = bytes([number + 1]) * (70_000 * number + 1)
        into, name = bytearray(len(data)), bytes([number]) * 16
        fetched = secured.fetch(name, into)
        await asyncio.to_thread(secured.far.sendall, head(name, len(data)) + data)
        assert await fetched.done == len(data)
        assert into == data
        assert secured.payload.alive()
        served = secured.serve(name, data)
        got = await asyncio.to_thread(received, secured.far, 24 + len(data))
        assert got == head(name, len(data)) + data
        assert await served.done == len(data)
        assert secured.payload.alive()


def say_goodbye(sock: socket.socket) -> None:
    """Within TLS; the other end need not answer."""
    assert isinstance(sock, ssl.SSLSocket)
    sock.settimeout(0.1)
    with contextlib.suppress(OSError):
        sock.unwrap()


def received(sock: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n and (more := sock.recv(n - len(data))):
        data += more
    return data


async def test_pieces_smaller_and_larger_than_a_record_are_filled(secured: SecuredPair) -> None:
    """A record may end in the middle of a piece, and a piece in the middle of a record."""
    sizes = [1, 7, 16_384, 40_000, 3, 16_383, 16_385, 0, 100_000]
    into = [np.zeros(size, np.uint8) for size in sizes]
    transfer = TcpTransfer(secured.payload, receive_into(batches([memoryview(one) for one in into]), ONE, sum(sizes)))
    data = bytes(i % 251 for i in range(sum(sizes)))
    stream = head(ONE, len(data)) + data

    def send() -> None:
        for start in range(0, len(stream), 9_999):
            secured.far.sendall(stream[start : start + 9_999])

    await asyncio.to_thread(send)
    assert await transfer.done == len(data)
    assert b"".join(one.tobytes() for one in into) == data


@pytest.mark.parametrize("stream", FOREIGN.values(), ids=FOREIGN.keys())
async def test_bytes_of_anything_else_never_land(secured: SecuredPair, stream: bytes) -> None:
    into = bytearray(6)
    transfer = secured.fetch(ONE, into)
    secured.far.sendall(stream)
    assert "carries another transfer" in str(await failed(transfer))
    assert into == bytes(6)


async def test_liveness_sees_bytes_that_wait_decrypted(secured: SecuredPair) -> None:
    """They came in one record with those that were asked for, so nothing waits below TLS."""
    into = bytearray(3)
    transfer = secured.fetch(ONE, into)
    secured.far.sendall(head(ONE, 3) + b"abc" + b"and what nobody asked for")
    await transfer.done
    assert not secured.payload.alive()


@pytest.mark.parametrize("how", ["bytes", "goodbye of TLS", "end"])
async def test_liveness_sees_what_the_peer_did(secured: SecuredPair, how: str) -> None:
    assert secured.payload.alive()
    if how == "bytes":
        secured.far.sendall(b"of a push that nobody took")
    elif how == "end":
        tls.shutdown(secured.far)
    else:
        say_goodbye(secured.far)
    assert not secured.payload.alive()


@pytest.mark.parametrize("how", ["goodbye of TLS", "end"])
async def test_an_end_in_the_middle_is_a_failed_transfer(secured: SecuredPair, how: str) -> None:
    """An end that is not said within TLS may be another's doing."""
    transfer = secured.fetch(ONE, bytearray(100_000))
    secured.far.sendall(head(ONE, 100_000) + bytes(50_000))
    if how == "end":
        tls.shutdown(secured.far)
    else:
        say_goodbye(secured.far)
    assert "closed the payload connection" in str(await failed(transfer))


async def test_p1_an_abort_from_another_thread_lets_no_ciphertext_through_and_nothing_later(
    secured: SecuredPair,
) -> None:
    """The peer goes on sending all the while."""
    into = np.zeros(64 << 20, np.uint8)
    transfer = TcpTransfer(secured.payload, receive_into(batches([memoryview(into)]), ONE, into.size))
    sent = threading.Event()

    def flood() -> None:
        with contextlib.suppress(OSError):
            secured.far.sendall(head(ONE, into.size))
            while True:
                secured.far.sendall(b"\x07" * 16_000)
                sent.set()

    flooding = threading.Thread(target=flood)
    flooding.start()
    assert await asyncio.to_thread(sent.wait, 20)
    await asyncio.sleep(0.01)
    aborting = threading.Thread(target=transfer.abort)
    aborting.start()
    assert "aborted" in str(await failed(transfer))
    landed = into.copy()
    assert set(np.unique(landed).tolist()) <= {0, 7}
    into[:] = 9
    for thread in (aborting, flooding):
        await asyncio.to_thread(thread.join, 20)
    assert (into == 9).all()


async def test_an_abort_interrupts_a_send_to_a_peer_that_does_not_read(secured: SecuredPair) -> None:
    transfer = secured.serve(ONE, bytes(8 << 20))
    await asyncio.sleep(0.02)
    assert not transfer.done.done()
    transfer.abort()
    await failed(transfer)


async def test_a_changed_record_is_a_failed_transfer(own: Tls) -> None:
    """Somebody in between turns one bit of what passes."""
    near, between, beyond, far = *socket.socketpair(), *socket.socketpair()
    for sock in (near, far):
        sock.setblocking(False)

    def pass_on(source: socket.socket, target: socket.socket, turned: list[bool]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data[:-1] + bytes([data[-1] ^ 1]) if turned and len(data) > 5_000 else data)
            target.shutdown(socket.SHUT_WR)

    turned: list[bool] = []
    threads = [threading.Thread(target=pass_on, args=(*way, turned)) for way in ((between, beyond), (beyond, between))]
    for thread in threads:
        thread.start()
    ends = await asyncio.gather(
        tls.connected(own.dialling, near, accepting=False), tls.connected(own.accepting, far, accepting=True)
    )
    pair = SecuredPair(*ends)
    turned.append(True)
    into = bytearray(10_000)
    transfer = pair.fetch(ONE, into)
    pair.far.sendall(head(ONE, len(into)) + bytes([5]) * len(into))
    assert isinstance(await failed(transfer), ssl.SSLError)
    assert into == bytes(len(into))
    await pair.end()
    for sock in (between, beyond):
        sock.close()
    for thread in threads:
        await asyncio.to_thread(thread.join, 20)
