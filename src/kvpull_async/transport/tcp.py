"""Plain TCP: the control plane's companion, and the payload's fallback. It must not know caches, keys or requests.

Every connection starts with a preamble that says what it is for. Control connections become asyncio protocols. Payload
connections stay plain blocking sockets, each owned by a thread of its own, so that a peer that stops reading or
sending exhausts nobody else's threads; a shutdown of the socket interrupts that thread at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
import weakref
from typing import Final

from kvpull_async import observe
from kvpull_async._deadline import Deadline, absorb
from kvpull_async.transport.arrivals import Arrivals
from kvpull_async.transport.base import (
    Address,
    ControlChannel,
    DataPath,
    Listener,
    OnChannel,
    PathKind,
    PathSeed,
    Transport,
)
from kvpull_async.transport.outbox import Outbox
from kvpull_async.transport.stream import StreamPath

__all__ = ["TcpTransport"]

_PREAMBLE: Final = struct.Struct("<7sc")
_MAGIC: Final = b"KVPULL\x01"
_CONTROL, _PAYLOAD = b"C", b"P"
_TICKET: Final = struct.Struct("<16sB")
_ATTACHED: Final = b"\x06"
_READ_SIZE: Final = 256 * 1024
_GREETINGS: Final = 128
_ACCEPT_PAUSE: Final = 0.05
_PACED, _UNPACED = b"bbr", b"reno"


class TcpTransport(Transport, PathKind):
    """All TCP connections of one engine."""

    name = "tcp"

    def __init__(self, log: observe.Log, *, greeting_timeout: float) -> None:
        self._log = log
        self._greeting_timeout = greeting_timeout
        self._attachable: dict[tuple[bytes, int], TcpPath] = {}
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._buffer = memoryview(bytearray(_READ_SIZE))

    async def listen(self, address: Address, on_channel: OnChannel) -> Listener:
        sock = socket.create_server(address, family=socket.AF_INET, backlog=512)
        sock.setblocking(False)
        self.adopt(sock)
        return _TcpListener(self, sock, on_channel)

    async def dial(self, address: Address) -> ControlChannel:
        sock = await self._connect(address, _CONTROL)
        return await _open_channel(sock, self._buffer)

    def path(self, seed: PathSeed) -> DataPath:
        path = TcpPath(self, seed)
        if not seed.dialer:
            self._attachable[seed.token, seed.lane] = path
        return path

    def detach(self, seed: PathSeed) -> None:
        self._attachable.pop((seed.token, seed.lane), None)

    def adopt(self, sock: socket.socket) -> None:
        self._sockets.add(sock)

    def close_after_fork(self) -> None:
        """In a forked child: close this process's copies without a word to the peers, whose links live on."""
        for sock in list(self._sockets):
            sock.close()

    async def dial_payload(self, seed: PathSeed, deadline: Deadline) -> socket.socket:
        """A payload socket attached to the peer's half of the path; OSError or TimeoutError when there is none."""
        assert seed.address is not None
        loop = asyncio.get_running_loop()
        async with deadline.scope():
            sock = await self._connect(seed.address, _PAYLOAD + _TICKET.pack(seed.token, seed.lane))
            try:
                _unpace(sock)
                if await loop.sock_recv(sock, 1) != _ATTACHED:
                    raise ConnectionError("the peer did not take the payload connection")
            except BaseException:
                sock.close()
                raise
        return sock

    async def greet(self, sock: socket.socket, on_channel: OnChannel) -> None:
        """Find out what an accepted connection is for and hand it on."""
        handed_on = False
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with Deadline.after_ms(self._greeting_timeout * 1000).scope():
                magic, kind = _PREAMBLE.unpack(await _receive_exactly(sock, _PREAMBLE.size))
                if magic != _MAGIC:
                    raise ConnectionError(f"the peer does not speak the kvpull protocol, it began with {magic!r}")
                if kind == _PAYLOAD:
                    await self._attach(sock)
                    handed_on = True
                    return
            if kind != _CONTROL:
                raise ConnectionError(f"a connection of unknown kind {kind!r}")
            channel = await _open_channel(sock, self._buffer)
            handed_on = True
            await on_channel(channel)
        except (OSError, asyncio.TimeoutError) as error:
            self._log.warning("link.rejected", peer=_name_of(sock), reason=str(error) or "no greeting in time")
        finally:
            if not handed_on:
                sock.close()

    async def _attach(self, sock: socket.socket) -> None:
        token, lane = _TICKET.unpack(await _receive_exactly(sock, _TICKET.size))
        path = self._attachable.get((token, lane))
        if path is None:
            raise ConnectionError("a payload connection for a link that does not exist")
        _unpace(sock)
        await asyncio.get_running_loop().sock_sendall(sock, _ATTACHED)
        path.attach(sock)

    async def _connect(self, address: Address, first: bytes) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self.adopt(sock)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, address)
            if sock.getsockname() == sock.getpeername():  # the kernel may connect a free local port to itself
                raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_sendall(sock, _MAGIC + first)
        except BaseException:
            sock.close()
            raise
        return sock

    def __repr__(self) -> str:
        return f"<TcpTransport sockets={len(self._sockets)} attachable={len(self._attachable)}>"


class _TcpListener(Listener):
    def __init__(self, transport: TcpTransport, sock: socket.socket, on_channel: OnChannel) -> None:
        self.address = sock.getsockname()
        self._transport = transport
        self._sock = sock
        self._on_channel = on_channel
        self._greetings: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.get_running_loop()
        self._paused: asyncio.TimerHandle | None = None
        self._listen()

    def _listen(self) -> None:
        # No task that awaits `sock_accept`: cancelled in the wrong moment it loses a connection without closing it.
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        """One connection per turn of the loop, so that others have theirs while peers queue up."""
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError):
            return  # the peer has gone again
        except OSError as error:  # out of descriptors: the backlog keeps the peers until there are some again
            self._transport._log.warning("link.accept_failed", reason=str(error))
            self._loop.remove_reader(self._sock.fileno())
            self._paused = self._loop.call_later(_ACCEPT_PAUSE, self._listen)
            return
        self._transport.adopt(sock)
        if len(self._greetings) >= _GREETINGS:  # the oldest goes: an honest peer is through in milliseconds
            oldest = next(iter(self._greetings))
            del self._greetings[oldest]
            oldest.cancel()
            self._transport._log.warning("link.rejected", reason=f"over {_GREETINGS} unfinished greetings")
        sock.setblocking(False)
        task = self._loop.create_task(self._transport.greet(sock, self._on_channel), name="kvpull-greet")
        self._greetings[task] = None
        task.add_done_callback(self._greeted)

    def _greeted(self, task: asyncio.Task[None]) -> None:
        self._greetings.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._transport._log.error("link.accept_failed", reason=repr(error))

    async def aclose(self) -> None:
        if self._sock.fileno() < 0:
            return
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for task in self._greetings:  # not at once: a task cancelled before it began would not close its socket
            self._loop.call_soon(task.cancel)
        await absorb(tuple(self._greetings), Deadline.after_ms(1000))


class _TcpChannel(ControlChannel, asyncio.BufferedProtocol):
    """Bytes come into a buffer that all channels of a loop share, since a callback takes them out on the spot: no task
    wakes up for them.
    """

    def __init__(self, peer: str, buffer: memoryview) -> None:
        self.peer = peer
        self.arrivals = Arrivals(self._taken)
        self._buffer = buffer
        self._full = self._lost = self._held = False
        self._outbox = Outbox(self._write, lambda: self._full)

    @property
    def ready(self) -> bool:
        return self._outbox.ready

    async def send(self, data: bytes) -> None:
        await self._outbox.send(data)

    def post(self, data: bytes) -> None:
        self._outbox.post(data)

    def _write(self, data: bytes) -> None:
        if not self._lost and not self._transport.is_closing():
            self._transport.write(data)

    def abort(self) -> None:
        self._lost = True
        self._outbox.end()
        self._transport.abort()

    def pause(self) -> None:
        self.arrivals.pause()
        self._hold()

    def resume(self) -> None:
        self.arrivals.resume()
        self._taken(0)

    # -- called by the loop -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.arrivals.put(self._buffer[:nbytes])
        if self.arrivals.unread > _READ_SIZE:
            self._hold()

    def eof_received(self) -> bool:
        self.arrivals.end()
        return True  # what is to be said to the peer may still be

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self.arrivals.end(error if isinstance(error, OSError) else None)
        self._outbox.end()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._outbox.flow()

    def _hold(self) -> None:
        self._held = True
        self._transport.pause_reading()

    def _taken(self, n: int) -> None:
        if self._held and not self.arrivals.paused and self.arrivals.unread <= _READ_SIZE:
            self._held = False
            self._transport.resume_reading()

    def __repr__(self) -> str:
        return f"<TcpChannel {self.peer}>"


class TcpPath(StreamPath):
    """Its payload connections lead to the port of the control connections."""

    name = "tcp"

    def __init__(self, transport: TcpTransport, seed: PathSeed) -> None:
        super().__init__(dials=seed.dialer)
        self._transport = transport
        self._seed = seed

    async def dial(self, deadline: Deadline) -> socket.socket:
        return await self._transport.dial_payload(self._seed, deadline)

    @property
    def prepared(self) -> bool:  # type: ignore[override]  # the other paths need no connection
        return self._usable()

    def abort(self) -> None:
        self._transport.detach(self._seed)
        super().abort()

    def __repr__(self) -> str:
        return f"<TcpPath lane={self._seed.lane} connected={self.connected}>"


def _unpace(sock: socket.socket) -> None:
    """For a payload connection that does not leave this machine: there is no network to share, and a congestion control
    that spaces packets out costs a third of the processor's time and almost half of the rate. Others stay as the system
    wants them.
    """
    with contextlib.suppress(OSError):  # not allowed, or not known here: the bytes come more slowly, but they come
        if sock.getsockname()[0] == sock.getpeername()[0] and congestion_of(sock) == _PACED:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)


def congestion_of(sock: socket.socket) -> bytes:
    """The name of a connection's congestion control."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


async def _open_channel(sock: socket.socket, buffer: memoryview) -> _TcpChannel:
    peer = _name_of(sock)
    _, channel = await asyncio.get_running_loop().create_connection(lambda: _TcpChannel(peer, buffer), sock=sock)
    return channel


async def _receive_exactly(sock: socket.socket, n: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < n:
        more = await loop.sock_recv(sock, n - len(data))
        if not more:
            raise ConnectionError(f"the peer closed the connection after {len(data)} of {n} bytes")
        data += more
    return data


def _name_of(sock: socket.socket) -> str:
    with contextlib.suppress(OSError):
        host, port = sock.getpeername()
        return f"{host}:{port}"
    return "unknown"
