"""Plain TCP: what an accepted connection turns out to be, who is turned away, and how payload connections are bound."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers
from kvpull_async.memory.base import Batches
from kvpull_async.observe import Log
from kvpull_async.transport.base import Address, ControlChannel, PathSeed
from kvpull_async.transport.tcp import TcpPath, TcpTransport, congestion_of
from tests.loop_nodes import EventLog, event_log, eventually

MAGIC = b"KVPULL\x01"
TOKEN = b"t" * 16


def soon() -> Deadline:
    return Deadline.after_ms(20_000)


class Scene:
    """A listening transport that keeps the channels it was given, and another one that dials."""

    def __init__(self, greeting_timeout: float) -> None:
        self.here = TcpTransport(Log(), greeting_timeout=greeting_timeout)
        self.there = TcpTransport(Log(), greeting_timeout=greeting_timeout)
        self.channels: list[ControlChannel] = []
        self.address: Address = ("", 0)
        self.hold = asyncio.Event()
        self.hold.set()

    async def take(self, channel: ControlChannel) -> None:
        self.channels.append(channel)
        await self.hold.wait()

    async def raw(self, data: bytes = b"") -> socket.socket:
        """A plain client that has sent this much."""
        loop = asyncio.get_running_loop()
        client = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        await loop.sock_connect(client, self.address)
        await loop.sock_sendall(client, data)
        return client

    def path(self, *, dialer: bool, token: bytes = TOKEN, lane: int = 0) -> TcpPath:
        seed = PathSeed(token, lane, dialer, self.address, Workers(1))
        path = (self.there if dialer else self.here).path(seed)
        assert isinstance(path, TcpPath)
        return path


@contextlib.asynccontextmanager
async def scene(greeting_timeout: float = 20.0) -> AsyncIterator[Scene]:
    one = Scene(greeting_timeout)
    listener = await one.here.listen(("127.0.0.1", 0), one.take)
    one.address = listener.address
    try:
        yield one
    finally:
        await listener.aclose()
        for channel in one.channels:
            channel.abort()
        await asyncio.sleep(0)


async def hung_up(client: socket.socket) -> bytes:
    """What the listener said before it closed the connection."""
    loop, said = asyncio.get_running_loop(), b""
    try:
        while data := await asyncio.wait_for(loop.sock_recv(client, 4096), 20):
            said += data
    except ConnectionResetError:
        pass
    finally:
        client.close()
    return said


# --- the listener and its greetings ---


async def test_a_free_port_is_reported_and_only_the_asked_address_is_bound() -> None:
    async with scene() as one:
        host, port = one.address
        assert host == "127.0.0.1"
        assert port > 0
        with pytest.raises(OSError, match="Connect call failed"):
            await one.there.dial(("127.0.0.2", port))


async def test_a_control_connection_is_handed_on_with_its_peers_name() -> None:
    async with scene() as one:
        channel = await one.there.dial(one.address)
        await eventually(lambda: len(one.channels) == 1)
        (accepted,) = one.channels
        assert channel.peer == f"127.0.0.1:{one.address[1]}"
        assert accepted.peer.startswith("127.0.0.1:")
        await channel.send(b"hello")
        assert await accepted.receive() == b"hello"
        channel.abort()
        assert repr(channel) == f"<TcpChannel {channel.peer}>"


async def test_an_empty_send_only_waits() -> None:
    async with scene() as one:
        channel = await one.there.dial(one.address)
        await eventually(lambda: len(one.channels) == 1)
        await channel.send(b"")
        await channel.send(b"hello")
        assert await one.channels[0].receive() == b"hello"
        channel.abort()


STRANGERS = {
    "an HTTP client": (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "kvpull protocol, it began with b'GET"),
    "a TLS client": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "does not speak the kvpull protocol"),
    "another release": (b"KVPULL\x02C", "does not speak the kvpull protocol, it began with b'KVPULL\\x02'"),
    "an unknown kind": (MAGIC + b"X", "a connection of unknown kind b'X'"),
    "a foreign token": (MAGIC + b"P" + b"x" * 16 + b"\0", "a payload connection for a link that does not exist"),
    "a foreign lane": (MAGIC + b"P" + TOKEN + b"\1", "a payload connection for a link that does not exist"),
}  # fmt: skip


@pytest.mark.parametrize(("data", "reason"), STRANGERS.values(), ids=STRANGERS.keys())
async def test_a_stranger_is_turned_away_without_a_word_and_the_log_says_why(data: bytes, reason: str) -> None:
    with event_log() as events:
        async with scene() as one:
            path = one.path(dialer=False)
            client = await one.raw(data)
            name = f"127.0.0.1:{client.getsockname()[1]}"
            assert await hung_up(client) == b""
            await events.first("link.rejected", text=reason, peer=name)
            assert one.channels == []
            path.abort()


@pytest.mark.parametrize("length", range(25))
async def test_a_connection_that_ends_within_its_preamble(length: int) -> None:
    preamble = (MAGIC + b"P" + TOKEN + b"\0")[:length]
    with event_log() as events:
        async with scene() as one:
            client = await one.raw(preamble)
            client.shutdown(socket.SHUT_WR)
            assert await hung_up(client) == b""
            await events.first("link.rejected", text="the peer closed the connection after")


@pytest.mark.parametrize("data", [b"", MAGIC, MAGIC + b"P", MAGIC + b"P" + TOKEN])
async def test_a_silent_connection_is_dropped_in_time(data: bytes) -> None:
    with event_log() as events:
        async with scene(greeting_timeout=0.05) as one:
            assert await hung_up(await one.raw(data)) == b""
            await events.first("link.rejected", text="no greeting in time")


async def test_silent_connections_are_bounded_and_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest unfinished one goes for the newest: an honest peer is through in milliseconds."""
    monkeypatch.setattr("kvpull_async.transport.tcp._GREETINGS", 8)
    with event_log() as events:
        async with scene() as one:
            silent = [await one.raw(MAGIC[: i % 8]) for i in range(20)]
            channel = await one.there.dial(one.address)
            await eventually(lambda: len(one.channels) == 1)
            await events.first("link.rejected", text="over 8 unfinished greetings", peer="127.0.0.1")
            for client in silent[:12]:
                assert await hung_up(client) == b""
            for client in silent[14:]:
                with pytest.raises(BlockingIOError):
                    client.recv(1)
            for client in silent[12:]:
                client.close()
            channel.abort()


async def test_a_burst_of_honest_peers_is_served_in_full() -> None:
    """They queue up in the kernel while the loop is busy, and are then accepted in turn with those already there."""
    async with scene() as one:
        clients = []
        for _ in range(200):  # the loop has no chance to accept any of them meanwhile
            client = socket.create_connection(one.address)
            client.sendall(MAGIC + b"C")
            clients.append(client)
        await eventually(lambda: len(one.channels) == 200)
        for client in clients:
            client.close()


async def test_a_failure_of_who_takes_the_channel_is_logged_and_the_next_peer_served() -> None:
    with event_log() as events:
        async with scene() as one:
            take, one.take = one.take, None  # type: ignore[method-assign, assignment]

            async def fail(channel: ControlChannel) -> None:
                channel.abort()
                raise ZeroDivisionError("a bug")

            listener = await one.here.listen(("127.0.0.1", 0), fail)
            for _ in range(2):
                channel = await one.there.dial(listener.address)
                assert await channel.receive() == b""
                channel.abort()
            await events.first("link.accept_failed", text="ZeroDivisionError('a bug')")
            await listener.aclose()
            assert take is not None


async def test_closing_the_listener_drops_unfinished_greetings_and_refuses_dials() -> None:
    one = Scene(20.0)
    listener = await one.here.listen(("127.0.0.1", 0), one.take)
    one.address = listener.address
    half = await one.raw(MAGIC)
    one.hold.clear()
    channel = await one.there.dial(one.address)
    await eventually(lambda: len(one.channels) == 1)
    await listener.aclose()
    assert await hung_up(half) == b""
    with pytest.raises(OSError, match="Connect call failed"):
        await one.there.dial(one.address)
    for each in (channel, *one.channels):
        each.abort()


async def test_a_cancelled_dial_leaves_no_socket() -> None:
    transport = TcpTransport(Log(), greeting_timeout=1.0)
    dialling = asyncio.create_task(transport.dial(("192.0.2.1", 9)))  # a network that answers nobody
    await asyncio.sleep(0.01)
    dialling.cancel()
    results = await asyncio.gather(dialling, return_exceptions=True)
    assert isinstance(results[0], (asyncio.CancelledError, OSError))


async def test_out_of_descriptors_the_listener_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [OSError(24, "Too many open files")]

    def failing(sock: socket.socket) -> tuple[socket.socket, Any]:
        if failures:
            raise failures.pop()
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", failing)
    with event_log() as events:
        async with scene() as one:
            channel = await one.there.dial(one.address)
            await eventually(lambda: len(one.channels) == 1)
            await events.first("link.accept_failed", text="Too many open files")
            channel.abort()


# --- payload connections ---


def of(data: bytes) -> Batches:
    yield [memoryview(data)]


def into(buffer: bytearray) -> Batches:
    yield [memoryview(buffer)]


async def pull(source: TcpPath, puller: TcpPath, data: bytes) -> bytes:
    grant, buffer = bytes(16), bytearray(len(data))
    await puller.ready(soon())
    await source.ready(soon())
    fetched = puller.fetch(grant, into(buffer), len(data))
    served = source.serve(grant, of(data), len(data))
    assert (await fetched.done, await served.done) == (len(data), len(data))
    return bytes(buffer)


@contextlib.asynccontextmanager
async def paths(one: Scene, events: EventLog | None = None) -> AsyncIterator[tuple[TcpPath, TcpPath]]:
    dialled, accepted = one.path(dialer=True), one.path(dialer=False)
    try:
        yield dialled, accepted
    finally:
        await dialled.aclose(soon())
        await accepted.aclose(soon())


@pytest.mark.parametrize("dialler_pulls", [True, False])
async def test_the_side_that_dialled_opens_the_payload_connection_when_it_is_needed(dialler_pulls: bool) -> None:
    async with scene() as one, paths(one) as (dialled, accepted):
        source, puller = (accepted, dialled) if dialler_pulls else (dialled, accepted)
        assert "connected=False" in repr(dialled)
        await dialled.ready(soon())
        payload = dialled._payload
        for data in (b"first", b"second " * 1000):
            assert await pull(source, puller, data) == data
        assert dialled._payload is payload
        assert "connected=True" in repr(dialled)


async def test_a_stranger_with_a_wrong_token_does_not_disturb_the_owner() -> None:
    with event_log() as events:
        async with scene() as one, paths(one) as (dialled, accepted):
            assert await pull(accepted, dialled, b"before") == b"before"
            payload = accepted._payload
            for token in (b"\0" * 16, TOKEN[:-1] + b"u"):
                assert await hung_up(await one.raw(MAGIC + b"P" + token + b"\0")) == b""
            await events.first("link.rejected", text="a payload connection for a link that does not exist")
            assert accepted._payload is payload
            assert await pull(accepted, dialled, b"after") == b"after"


async def test_a_new_connection_of_the_owner_replaces_the_old_one() -> None:
    async with scene() as one, paths(one) as (dialled, accepted):
        await dialled.ready(soon())
        await eventually(lambda: accepted._payload is not None)
        old = accepted._payload
        assert old is not None
        second = one.path(dialer=True)
        assert await pull(accepted, second, b"data") == b"data"
        await asyncio.wait_for(asyncio.shield(old.ended), 20)
        await second.aclose(soon())


async def test_nobody_attaches_to_a_path_that_is_over() -> None:
    async with scene() as one, paths(one) as (dialled, accepted):
        accepted.abort()
        with pytest.raises(OSError, match=r"did not take the payload connection|reset"):
            await dialled.ready(soon())
        dialled.abort()
        ours, far = socket.socketpair()
        dialled.attach(ours)
        assert far.recv(1) == b""
        far.close()
        assert one.here._attachable == {}


def _pace(sock: socket.socket) -> None:
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
    except OSError:
        pytest.skip("this machine has no congestion control that paces")


async def test_within_one_machine_payload_is_not_paced_and_control_is_as_the_system_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect = TcpTransport._connect

    async def paced(transport: TcpTransport, address: Address, first: bytes) -> socket.socket:
        sock = await connect(transport, address, first)
        _pace(sock)
        return sock

    monkeypatch.setattr(TcpTransport, "_connect", paced)
    async with scene() as one, paths(one) as (dialled, accepted):
        (listening,) = [sock for sock in one.here._sockets if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
        _pace(listening)  # what it accepts begins like itself
        channel = await one.there.dial(one.address)
        await eventually(lambda: len(one.channels) == 1)
        control = {*one.here._sockets, *one.there._sockets} - {listening}
        assert await pull(accepted, dialled, b"data") == b"data"
        payload = {*one.here._sockets, *one.there._sockets} - {listening} - control
        assert [congestion_of(sock) for sock in payload] == [b"reno", b"reno"]
        assert [congestion_of(sock) for sock in control] == [b"bbr", b"bbr"]
        channel.abort()


async def test_a_payload_connection_whose_pacing_cannot_be_changed_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpull_async.transport.tcp._UNPACED", b"unknown")
    async with scene() as one, paths(one) as (dialled, accepted):
        (listening,) = one.here._sockets
        _pace(listening)
        assert await pull(accepted, dialled, b"data") == b"data"
        assert accepted._payload is not None
        assert congestion_of(accepted._payload._sock) == b"bbr"


async def test_p3_a_payload_connection_that_is_not_taken_ends_with_the_deadline() -> None:
    transport = TcpTransport(Log(), greeting_timeout=1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        seed = PathSeed(TOKEN, 0, dialer=True, address=server.getsockname(), workers=Workers(1))
        began = time.monotonic()
        with pytest.raises(asyncio.TimeoutError):
            await transport.path(seed).ready(Deadline.after_ms(50))
        assert time.monotonic() - began < 10


async def test_after_a_fork_the_sockets_are_closed_without_a_word() -> None:
    transport = TcpTransport(Log(), greeting_timeout=1.0)
    ours, far = socket.socketpair()
    transport.adopt(ours)
    assert repr(transport) == "<TcpTransport sockets=1 attachable=0>"
    transport.close_after_fork()
    assert ours.fileno() == -1
    assert far.recv(1) == b""
    far.close()
