"""Plain TCP: the control plane's companion, and the payload's fallback. It must not know caches, keys or requests.

Every connection starts with a preamble that says what it is for. Control connections become asyncio streams. Payload
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
from kvpull_async.memory.base import Batches
from kvpull_async.transport.base import Address, ControlChannel, DataPath, Listener, OnChannel, PathSeed, Transport
from kvpull_async.transport.payload import Payload, TcpTransfer, receive_into, send_from

__all__ = ["TcpTransport"]

_PREAMBLE: Final = struct.Struct("<7sc")
_MAGIC: Final = b"KVPULL\x01"
_CONTROL, _PAYLOAD = b"C", b"P"
_TICKET: Final = struct.Struct("<16sB")
_ATTACHED: Final = b"\x06"
_READ_SIZE: Final = 256 * 1024
_GREETINGS: Final = 128
_ACCEPT_PAUSE: Final = 0.05


class TcpTransport(Transport):
    """All TCP connections of one engine."""

    name = "tcp"

    def __init__(self, log: observe.Log, *, greeting_timeout: float) -> None:
        self._log = log
        self._greeting_timeout = greeting_timeout
        self._attachable: dict[tuple[bytes, int], TcpPath] = {}
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    async def listen(self, address: Address, on_channel: OnChannel) -> Listener:
        sock = socket.create_server(address, family=socket.AF_INET, backlog=512)
        sock.setblocking(False)
        self.adopt(sock)
        return _TcpListener(self, sock, on_channel)

    async def dial(self, address: Address) -> ControlChannel:
        sock = await self._connect(address, _CONTROL)
        return await _open_channel(sock)

    def path(self, seed: PathSeed) -> DataPath:
        path = TcpPath(self, seed)
        if not seed.dialer:
            self._attachable[seed.token, seed.lane] = path
        return path

    def forget(self, seed: PathSeed) -> None:
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
            channel = await _open_channel(sock)
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


class _TcpChannel(ControlChannel):
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> None:
        self.peer = peer
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        await self._writer.drain()
        self._writer.write(data)

    def post(self, data: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(data)

    async def receive(self) -> bytes:
        return await self._reader.read(_READ_SIZE)

    def abort(self) -> None:
        self._writer.transport.abort()

    def __repr__(self) -> str:
        return f"<TcpChannel {self.peer}>"


class TcpPath(DataPath):
    """One direction of one link. The side that dialled the link dials its payload connections too, when needed."""

    name = "tcp"

    def __init__(self, transport: TcpTransport, seed: PathSeed) -> None:
        self._transport = transport
        self._seed = seed
        self._loop = asyncio.get_running_loop()
        self._payload: Payload | None = None
        self._ending: set[Payload] = set()
        self._aborted = False

    async def ready(self, deadline: Deadline) -> None:
        if self._seed.dialer and not self._usable():
            self.attach(await self._transport.dial_payload(self._seed, deadline))

    def attach(self, sock: socket.socket) -> None:
        """Take a new payload connection; an older one is of no use to the peer any more."""
        if self._aborted:
            sock.close()
            return
        self._drop()
        try:
            self._payload = Payload(sock, self._loop)
        except BaseException:  # no thread to be had
            sock.close()
            raise

    def fetch(self, grant_id: bytes, landing: Batches, nbytes: int) -> TcpTransfer:
        return TcpTransfer(self._connected(), receive_into(landing, grant_id, nbytes))

    def serve(self, grant_id: bytes, lending: Batches, nbytes: int) -> TcpTransfer:
        return TcpTransfer(self._connected(), send_from(lending, grant_id, nbytes))

    def give_up(self) -> None:
        """The side that dials begins anew: what is in the connection, or on its way, belongs to the request given up.
        The side that was dialled need not, since the source breaks the connection when it hears of it, and dials again.
        """
        if self._seed.dialer:
            self._drop()

    def abort(self) -> None:
        self._aborted = True
        self._transport.forget(self._seed)
        self._drop()

    async def aclose(self, deadline: Deadline) -> None:
        self.abort()
        await absorb([payload.ended for payload in self._ending], deadline)

    def _connected(self) -> Payload:
        if self._payload is None or self._payload.broken:
            raise ConnectionError("there is no payload connection")
        return self._payload

    def _usable(self) -> bool:
        return self._payload is not None and self._payload.alive()

    def _drop(self) -> None:
        payload, self._payload = self._payload, None
        if payload is not None:
            self._ending.add(payload)
            payload.ended.add_done_callback(lambda _: self._ending.discard(payload))
            payload.abort()

    def __repr__(self) -> str:
        return f"<TcpPath lane={self._seed.lane} connected={self._payload is not None}>"


async def _open_channel(sock: socket.socket) -> _TcpChannel:
    peer = _name_of(sock)
    reader, writer = await asyncio.open_connection(sock=sock, limit=_READ_SIZE)
    return _TcpChannel(reader, writer, peer)


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
