"""A control channel over one TCP connection: with and without TLS, its peer's names, its end, and how full it gets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.transport.tcp_channel import READ_SIZE, TcpChannel, name_of, open_channel
from kvpull_async.transport.tls import Tls
from tests.certificates import Authority, cluster

with_tls = pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """What both sides show: they may be cluster 1 or 2."""
    options = Authority(tmp_path_factory.mktemp("certificates")).issue("one", *cluster(1, 2))
    return Tls.load(certificate=options["tls_certificate"], key="", authority=options["tls_authority"])


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        near = socket.create_connection(listening.getsockname())
        far, _ = listening.accept()
    for sock in (near, far):
        sock.setblocking(False)
    return near, far


async def opened(sock: socket.socket, context: ssl.SSLContext | None, *, accepting: bool) -> TcpChannel:
    buffer = memoryview(bytearray(READ_SIZE))
    return await open_channel(sock, buffer, context, accepting=accepting, timeout=20.0)


@contextlib.asynccontextmanager
async def channels(own: Tls | None) -> AsyncIterator[tuple[TcpChannel, TcpChannel]]:
    """The dialling end and the accepting one."""
    near, far = connected()
    dialling, accepting = (None, None) if own is None else (own.dialling, own.accepting)
    async with Deadline.after_ms(20_000).scope():
        both = await asyncio.gather(opened(near, dialling, accepting=False), opened(far, accepting, accepting=True))
        try:
            yield both[0], both[1]
        finally:
            for channel in both:
                channel.abort()
            await asyncio.sleep(0)


@with_tls
async def test_bytes_pass_and_the_ends_know_each_other(own: Tls, secured: bool) -> None:
    async with channels(own if secured else None) as (near, far):
        await near.send(b"hello")
        assert await far.receive() == b"hello"
        far.post(b"and back")
        assert await near.receive() == b"and back"
        assert near.peer.startswith("127.0.0.1:")
        assert near.peer != far.peer
        assert repr(near) == f"<TcpChannel {near.peer}>"


@with_tls
async def test_whom_a_channel_speaks_for(own: Tls, secured: bool) -> None:
    """Without TLS nothing is known of that, and nothing is in the way."""
    async with channels(own if secured else None) as ends:
        for end in ends:
            assert (end.certified is not None) is secured
            assert [end.speaks_for(number) for number in (1, 2, 3)] == [True, True, not secured]


@with_tls
async def test_the_end_of_the_peer_comes_after_its_last_words(own: Tls, secured: bool) -> None:
    async with channels(own if secured else None) as (near, far):
        near.post(b"last words")
        near._transport.close()
        assert await far.receive() == b"last words"
        assert await far.receive() == b""


async def test_without_tls_an_answer_still_reaches_a_peer_that_has_said_its_last_word() -> None:
    near, far = connected()
    channel = await opened(far, None, accepting=True)
    near.shutdown(socket.SHUT_WR)
    assert await channel.receive() == b""
    channel.post(b"why you are refused")
    await channel.send(b"")
    assert await asyncio.get_running_loop().sock_recv(near, 100) == b"why you are refused"
    channel.abort()
    near.close()


@with_tls
async def test_what_nobody_takes_makes_the_peer_wait(own: Tls, secured: bool) -> None:
    async with channels(own if secured else None) as (near, far):
        sent, piece = 0, bytes(READ_SIZE)
        sending = asyncio.ensure_future(near.send(piece))
        while (await asyncio.wait([sending], timeout=0.3))[0]:
            sent += len(piece)
            assert sent < 256 << 20
            sending = asyncio.ensure_future(near.send(piece))
        assert far.arrivals.unread < 8 * READ_SIZE
        assert not near.ready
        sent += len(piece)
        while sent:
            sent -= len(await far.receive())
        await sending
        assert near.ready


@with_tls
async def test_an_abort_is_told_to_who_sends_and_may_come_twice(own: Tls, secured: bool) -> None:
    async with channels(own if secured else None) as (near, far):
        near.abort()
        near.abort()
        near.post(b"nobody hears this")
        with pytest.raises(ConnectionResetError):
            await near.send(b"nor this")
        with contextlib.suppress(OSError):
            assert await far.receive() == b""


# --- handshakes ---


async def failing(own: Tls, sock: socket.socket, *, accepting: bool, timeout: float = 20.0) -> OSError:
    context, buffer = own.accepting if accepting else own.dialling, memoryview(bytearray(READ_SIZE))
    with pytest.raises(OSError, match=r"\S") as raised:
        await open_channel(sock, buffer, context, accepting=accepting, timeout=timeout)
    await asyncio.sleep(0)
    assert sock.fileno() == -1
    return raised.value


@pytest.mark.parametrize("accepting", [False, True])
async def test_a_peer_that_hangs_up_during_the_handshake(own: Tls, accepting: bool) -> None:
    near, far = connected()
    far.close()
    assert "hung up during the TLS handshake" in str(await failing(own, near, accepting=accepting))


@pytest.mark.parametrize("accepting", [False, True])
async def test_a_peer_that_speaks_no_tls(own: Tls, accepting: bool) -> None:
    near, far = connected()
    far.send(b"GET / HTTP/1.1\r\n\r\n")
    assert isinstance(await failing(own, near, accepting=accepting), ssl.SSLError)
    far.close()


@pytest.mark.parametrize("accepting", [False, True])
async def test_a_handshake_takes_no_longer_than_it_may(own: Tls, accepting: bool) -> None:
    near, far = connected()
    assert "handshake" in str(await failing(own, near, accepting=accepting, timeout=0.05))
    far.close()


@with_tls
@pytest.mark.parametrize("accepting", [False, True])
async def test_what_is_given_up_closes_its_socket(own: Tls, secured: bool, accepting: bool) -> None:
    near, far = connected()
    context = (own.accepting if accepting else own.dialling) if secured else None
    opening = asyncio.ensure_future(opened(near, context, accepting=accepting))
    await asyncio.sleep(0.01 if secured else 0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await asyncio.sleep(0)
    assert near.fileno() == -1
    far.close()


@with_tls
@pytest.mark.parametrize("accepting", [False, True])
async def test_what_is_given_up_the_moment_it_opens_leaves_its_descriptor_to_others(
    own: Tls, secured: bool, accepting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (near, far), (sock, end) = connected(), socket.socketpair()
    fd, peer, loop, made = near.fileno(), name_of(near), asyncio.get_running_loop(), TcpChannel.connection_made

    def giving_up(channel: TcpChannel, transport: asyncio.BaseTransport) -> None:
        made(channel, transport)
        if channel.peer == peer:
            opening.cancel()

    monkeypatch.setattr(TcpChannel, "connection_made", giving_up)
    contexts = (own.dialling, own.accepting) if secured else (None, None)
    opening = asyncio.ensure_future(opened(near, contexts[accepting], accepting=accepting))
    other = asyncio.ensure_future(opened(far, contexts[not accepting], accepting=not accepting))
    with pytest.raises(asyncio.CancelledError):
        await opening
    await asyncio.sleep(0)
    assert near.fileno() == -1

    os.dup2(sock.fileno(), fd)  # as the next connection would have it
    came = asyncio.Event()
    loop.add_reader(fd, came.set)
    end.send(b"!")
    await asyncio.wait_for(came.wait(), 20)
    loop.remove_reader(fd)
    os.close(fd)
    (await other).abort()
    await asyncio.sleep(0)
    for one in (sock, end):
        one.close()


async def test_an_end_on_the_heels_of_the_handshake_is_one_without_complaints(
    own: Tls, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = connected()
    accepting = asyncio.ensure_future(opened(far, own.accepting, accepting=True))

    loop, incoming, outgoing = asyncio.get_running_loop(), ssl.MemoryBIO(), ssl.MemoryBIO()
    visitor = own.dialling.wrap_bio(incoming, outgoing)
    with pytest.raises(ssl.SSLWantReadError):
        visitor.do_handshake()
    await loop.sock_sendall(near, outgoing.read())
    while True:
        incoming.write(await loop.sock_recv(near, 65536))
        with contextlib.suppress(ssl.SSLWantReadError):
            visitor.do_handshake()
            break
    with pytest.raises(ssl.SSLWantReadError):
        visitor.unwrap()
    await loop.sock_sendall(near, outgoing.read())  # both at once
    channel = await accepting
    with contextlib.suppress(ConnectionResetError):
        assert await channel.receive() == b""
    channel.abort()
    await asyncio.sleep(0)
    near.close()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_the_name_of_a_socket_is_its_other_end() -> None:
    near, far = connected()
    assert name_of(near) == f"127.0.0.1:{far.getsockname()[1]}"
    near.close()
    far.close()
    assert name_of(near) == "unknown"
