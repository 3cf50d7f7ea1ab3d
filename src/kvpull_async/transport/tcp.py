"""Plain TCP: the control plane's companion, and the payload's fallback. It must not know caches, keys or requests.

Every connection starts with a preamble that says what it is for. Control connections become asyncio protocols. Payload
connections stay plain blocking sockets, each owned by a thread of its own, so that a peer that stops reading or
sending exhausts nobody else's threads; a shutdown of the socket interrupts that thread at once.

Where a node has certificates the preamble asks for TLS, and nothing else is said before one byte of consent: so a peer
that has none learns the reason at once, on either side, and no connection ever goes on without TLS instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import struct
import weakref
from collections import OrderedDict
from typing import Final

from kvpull_async import observe
from kvpull_async._deadline import Deadline, absorb
from kvpull_async.transport import tls
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
from kvpull_async.transport.greetings import Greetings
from kvpull_async.transport.stream import StreamPath
from kvpull_async.transport.tcp_channel import READ_SIZE, TcpChannel, name_of, open_channel
from kvpull_async.transport.tls import Certified, Tls

__all__ = ["TcpTransport"]

_PREAMBLE: Final = struct.Struct("<7sc")
_MAGIC: Final = b"KVPULL\x01"
_CONTROL, _PAYLOAD, _TLS_CONTROL, _TLS_PAYLOAD = b"C", b"P", b"S", b"T"
_AGREED, _REFUSED = b"\x06", b"\x15"
_NO_TLS: Final = {
    _REFUSED: "the dialling side asks for TLS, the accepting side has no certificates",
    b"": "the accepting side hung up when it was asked for TLS",
}
_TICKET: Final = struct.Struct("<16sB")
_ATTACHED: Final = b"\x06"
_ENDED: Final = 256
"""Links that have ended, and are still known by their tokens."""
_GREETINGS: Final = 128
_ACCEPT_PAUSE: Final = 0.05
_TELLING_PAUSE: Final = 1.0
_PACED, _UNPACED = b"bbr", b"reno"
_KEPT_ALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Of payload connections: what lies between forgets an idle one without a word, and heartbeats do not pass here."""


class _Late(ConnectionError):
    """A peer's connection was cut, and its other one does not know yet: told of by `link.lost`, so no warning."""


class TcpTransport(Transport, PathKind):
    """All TCP connections of one engine."""

    name = "tcp"

    def __init__(self, log: observe.Log, *, greeting_timeout: float, certificates: Tls | None = None) -> None:
        self._log = log
        self._tls = certificates
        self._greeting_timeout = greeting_timeout
        self._attachable: dict[tuple[bytes, int], TcpPath] = {}
        self._ended: OrderedDict[tuple[bytes, int], None] = OrderedDict()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._buffer = memoryview(bytearray(READ_SIZE))

    async def listen(self, address: Address, on_channel: OnChannel) -> Listener:
        sock = socket.create_server(address, family=socket.AF_INET, backlog=512)
        sock.setblocking(False)
        self.adopt(sock)
        return _TcpListener(self, sock, on_channel)

    async def dial(self, address: Address) -> ControlChannel:
        sock = await self._connect(address, _CONTROL if self._tls is None else _TLS_CONTROL)
        channel = await self._open_channel(sock, secured=self._tls is not None)
        try:
            if self._tls is not None and await channel.receive() != _AGREED:
                raise ConnectionError("the accepting side refused the certificate of this side, and its log says why")
        except BaseException:
            channel.abort()
            raise
        return channel

    def path(self, seed: PathSeed) -> DataPath:
        path = TcpPath(self, seed)
        if not seed.dialer:
            self._attachable[seed.token, seed.lane] = path
        return path

    def detach(self, seed: PathSeed) -> None:
        if self._attachable.pop((seed.token, seed.lane), None) is not None:
            self._ended[seed.token, seed.lane] = None
            while len(self._ended) > _ENDED:
                self._ended.popitem(last=False)

    def adopt(self, sock: socket.socket) -> None:
        self._sockets.add(sock)

    def close_after_fork(self) -> None:
        """In a forked child: close this process's copies without a word to the peers, whose links live on."""
        for sock in list(self._sockets):
            sock.close()

    async def dial_payload(self, seed: PathSeed, deadline: Deadline) -> socket.socket:
        """A payload socket attached to the peer's half of the path; OSError or TimeoutError when there is none."""
        assert seed.address is not None
        ticket = _TICKET.pack(seed.token, seed.lane)
        async with deadline.scope():
            sock = await self._connect(seed.address, _PAYLOAD if self._tls is None else _TLS_PAYLOAD)
            try:
                _prepare(sock)
                sock = await self._secured(sock, accepting=False)
                _identify(sock, seed)  # before it hears the token
                await _send(sock, ticket)
                if await _receive(sock, 1) != _ATTACHED:
                    raise ConnectionError("the peer did not take the payload connection, and its log says why")
            except BaseException as error:
                sock.close()
                if isinstance(error, ssl.SSLEOFError):  # how a hang-up looks from within TLS
                    raise ConnectionError("the peer refused the payload connection, and its log says why") from error
                raise
        return sock

    async def _secured(self, sock: socket.socket, *, accepting: bool) -> socket.socket:
        """With TLS, if this node has certificates. The socket is closed when that fails."""
        if self._tls is None:
            return sock
        context = self._tls.accepting if accepting else self._tls.dialling
        secured = await tls.connected(context, sock, accepting=accepting)
        self.adopt(secured)
        return secured

    async def greet(self, sock: socket.socket, on_channel: OnChannel) -> None:
        """Find out what an accepted connection is for and hand it on."""
        peer, deadline = name_of(sock), Deadline.after_ms(self._greeting_timeout * 1000)
        try:
            async with deadline.scope():
                channel = await self._sorted(sock)
            if channel is not None:
                channel.waited = self._greeting_timeout - deadline.remaining
                await on_channel(channel)
        except _Late as error:
            self._log.debug("link.rejected", peer=peer, reason=str(error))
        except (OSError, asyncio.TimeoutError) as error:
            self._log.warning("link.rejected", peer=peer, reason=str(error) or "no greeting in time")

    async def _sorted(self, sock: socket.socket) -> ControlChannel | None:
        """The control channel, or None for a payload connection, which its path has now. The socket is closed when it
        comes to neither.
        """
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            magic, kind = _PREAMBLE.unpack(await _receive_exactly(sock, _PREAMBLE.size))
            if magic != _MAGIC:
                raise ConnectionError(f"the peer does not speak the kvpull protocol, it began with {magic!r}")
            await self._consent(sock, kind)
            if kind in (_PAYLOAD, _TLS_PAYLOAD):
                sock = await self._secured(sock, accepting=True)
                await self._attach(sock)
                return None
        except BaseException:
            sock.close()
            raise
        channel = await self._open_channel(sock, secured=kind == _TLS_CONTROL, accepting=True)
        if kind == _TLS_CONTROL:
            channel.post(_AGREED)  # to a dialler whose certificate was good: by TLS itself it would not know
        elif self._tls is not None:
            channel.unfit = "the accepting side wants TLS, the dialling side has no certificates"
        return channel

    async def _consent(self, sock: socket.socket, kind: bytes) -> None:
        """Say whether the connection goes on with TLS, if that was asked for. ConnectionError when it cannot go on."""
        if kind in (_TLS_CONTROL, _TLS_PAYLOAD):
            await _send(sock, _AGREED if self._tls is not None else _REFUSED)
            if self._tls is None:
                raise ConnectionError("the dialling side asks for TLS, this side has no certificates")
        elif kind not in (_CONTROL, _PAYLOAD):
            raise ConnectionError(f"a connection of unknown kind {kind!r}")
        elif kind == _PAYLOAD and self._tls is not None:
            raise ConnectionError("a payload connection without TLS")

    async def _attach(self, sock: socket.socket) -> None:
        token, lane = _TICKET.unpack(await _receive_exactly(sock, _TICKET.size))
        path = self._attachable.get((token, lane))
        if path is None and (token, lane) in self._ended:
            raise _Late("a payload connection for a link that has ended")
        if path is None:
            raise ConnectionError("a payload connection for a link that does not exist")
        _identify(sock, path.seed)
        _prepare(sock)
        await _send(sock, _ATTACHED)
        path.attach(sock)

    async def _connect(self, address: Address, kind: bytes) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self.adopt(sock)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, address)
            if sock.getsockname() == sock.getpeername():  # the kernel may connect a free local port to itself
                raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens there")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_sendall(sock, _MAGIC + kind)
            if self._tls is not None and (answer := await loop.sock_recv(sock, 1)) != _AGREED:
                raise ConnectionError(_NO_TLS.get(answer, "the peer does not speak the kvpull protocol"))
        except BaseException:
            sock.close()
            raise
        return sock

    async def _open_channel(self, sock: socket.socket, *, secured: bool, accepting: bool = False) -> TcpChannel:
        """The socket is closed unless it becomes a channel."""
        context = None
        if secured:
            assert self._tls is not None
            context = self._tls.accepting if accepting else self._tls.dialling
        return await open_channel(sock, self._buffer, context, accepting=accepting, timeout=self._greeting_timeout)

    def __repr__(self) -> str:
        return f"<TcpTransport sockets={len(self._sockets)} attachable={len(self._attachable)}>"


class _TcpListener(Listener):
    def __init__(self, transport: TcpTransport, sock: socket.socket, on_channel: OnChannel) -> None:
        self.address = sock.getsockname()
        self._transport = transport
        self._sock = sock
        self._on_channel = on_channel
        self._greetings = Greetings(_GREETINGS)
        self._loop = asyncio.get_running_loop()
        self._paused: asyncio.TimerHandle | None = None
        self._pushed_out = 0
        self._crowd = ""
        """The address of the last one."""
        self._telling: asyncio.TimerHandle | None = None
        self._listen()

    def _listen(self) -> None:
        # No task that awaits `sock_accept`: cancelled in the wrong moment it loses a connection without closing it.
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        """One connection per turn of the loop, so that others have theirs while peers queue up."""
        try:
            sock, (host, _) = self._sock.accept()
        except (BlockingIOError, InterruptedError):
            return  # the peer has gone again
        except OSError as error:  # out of descriptors: the backlog keeps the peers until there are some again
            self._transport._log.warning("link.accept_failed", reason=str(error))
            self._loop.remove_reader(self._sock.fileno())
            self._paused = self._loop.call_later(_ACCEPT_PAUSE, self._listen)
            return
        self._transport.adopt(sock)
        sock.setblocking(False)
        task = self._loop.create_task(self._transport.greet(sock, self._on_channel), name="kvpull-greet")
        pushed_out = self._greetings.add(task, host)
        if pushed_out is not None:
            pushed_out[0].cancel()
            self._crowd = pushed_out[1]
            self._pushed_out += 1
            if self._telling is None:
                self._tell()
        task.add_done_callback(self._greeted)

    def _tell(self) -> None:
        """Of those that were pushed out, once in a while: strangers must not fill the log."""
        self._telling = None
        if self._pushed_out:
            reason = f"over {_GREETINGS} unfinished greetings, {self._pushed_out} pushed out"
            self._transport._log.warning("link.rejected", peer=self._crowd, reason=reason)
            self._pushed_out = 0
            self._telling = self._loop.call_later(_TELLING_PAUSE, self._tell)

    def _greeted(self, task: asyncio.Task[None]) -> None:
        self._greetings.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._transport._log.error("link.accept_failed", reason=repr(error))

    async def aclose(self) -> None:
        if self._sock.fileno() < 0:
            return
        for timer in (self._paused, self._telling):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for task in self._greetings.all():  # not at once: a task cancelled before it began would not close its socket
            self._loop.call_soon(task.cancel)
        await absorb(self._greetings.all(), Deadline.after_ms(1000))


class TcpPath(StreamPath):
    """Its payload connections lead to the port of the control connections."""

    name = "tcp"

    def __init__(self, transport: TcpTransport, seed: PathSeed) -> None:
        super().__init__(dials=seed.dialer)
        self._transport = transport
        self.seed: PathSeed = seed

    async def dial(self, deadline: Deadline) -> socket.socket:
        return await self._transport.dial_payload(self.seed, deadline)

    @property
    def prepared(self) -> bool:  # type: ignore[override]  # the other paths need no connection
        return self._usable()

    def abort(self) -> None:
        self._transport.detach(self.seed)
        super().abort()

    def __repr__(self) -> str:
        return f"<TcpPath lane={self.seed.lane} connected={self.connected}>"


def _identify(sock: socket.socket, seed: PathSeed) -> None:
    """ConnectionError unless a payload connection leads to the link's own peer, as far as a certificate tells."""
    if not isinstance(sock, ssl.SSLSocket) or seed.cluster_id is None:
        return
    if not Certified.of(sock.getpeercert()).speaks_for(seed.cluster_id):
        raise ConnectionError(f"the certificate of {name_of(sock)} does not name kvpull:cluster:{seed.cluster_id}")


def _prepare(sock: socket.socket) -> None:
    """A payload connection for its bytes, and for the time between them."""
    _unpace(sock)
    for level, name, value in _KEPT_ALIVE:
        sock.setsockopt(level, name, value)


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


async def _receive(sock: socket.socket, n: int) -> bytes:
    if isinstance(sock, ssl.SSLSocket):
        return await tls.receive(sock, n)
    return await asyncio.get_running_loop().sock_recv(sock, n)


async def _send(sock: socket.socket, data: bytes) -> None:
    if isinstance(sock, ssl.SSLSocket):
        await tls.send(sock, data)
    else:
        await asyncio.get_running_loop().sock_sendall(sock, data)


async def _receive_exactly(sock: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        more = await _receive(sock, n - len(data))
        if not more:
            raise ConnectionError(f"the peer closed the connection after {len(data)} of {n} bytes")
        data += more
    return data
