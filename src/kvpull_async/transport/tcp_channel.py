"""A control channel over one TCP connection, with or without TLS. It must not know how the connection came to be."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from typing import Final

from kvpull_async.transport.arrivals import Arrivals
from kvpull_async.transport.base import ControlChannel
from kvpull_async.transport.outbox import Outbox
from kvpull_async.transport.tls import Certified

__all__ = ["READ_SIZE", "TcpChannel", "name_of", "open_channel"]

READ_SIZE: Final = 256 * 1024


class TcpChannel(ControlChannel, asyncio.BufferedProtocol):
    """Bytes come into a buffer that all channels of a loop share, since a callback takes them out on the spot: no task
    wakes up for them.
    """

    def __init__(self, peer: str, buffer: memoryview) -> None:
        self.peer: str = peer
        self.arrivals: Arrivals = Arrivals(self._taken)
        self._buffer = buffer
        self.connected: bool = False
        """Whether the loop has given it the connection, which from then on ends with `abort`."""
        self._full = self._lost = self._held = False
        self.certified: Certified | None = None
        self._outbox = Outbox(self._write, lambda: self._full)

    def speaks_for(self, cluster_id: int) -> bool:
        return self.certified is None or self.certified.speaks_for(cluster_id)

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
        self.connected = True
        if transport.get_extra_info("sslcontext") is not None:
            self.certified = Certified.of(transport.get_extra_info("peercert"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.arrivals.put(self._buffer[:nbytes])
        if self.arrivals.unread > READ_SIZE:
            self._hold()

    def eof_received(self) -> bool:
        self.arrivals.end()
        return self.certified is None  # what is to be said to the peer may still be, unless TLS forbids it

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
        if self._held and not self.arrivals.paused and self.arrivals.unread <= READ_SIZE:
            self._held = False
            self._transport.resume_reading()

    def __repr__(self) -> str:
        return f"<TcpChannel {self.peer}>"


async def open_channel(
    sock: socket.socket, buffer: memoryview, context: ssl.SSLContext | None, *, accepting: bool, timeout: float
) -> TcpChannel:
    """Over a connected socket, with TLS if there is a context, whose handshake may take `timeout` seconds. OSError. The
    socket is closed unless it becomes a channel.
    """
    channel, loop = TcpChannel(name_of(sock), buffer), asyncio.get_running_loop()
    bound = None if context is None else timeout
    try:
        if accepting:
            await loop.connect_accepted_socket(lambda: channel, sock, ssl=context, ssl_handshake_timeout=bound)
        else:
            name = None if context is None else ""  # identities are cluster ids
            await loop.create_connection(
                lambda: channel, sock=sock, ssl=context, server_hostname=name, ssl_handshake_timeout=bound
            )
    except BaseException as error:
        if channel.connected:
            channel.abort()  # the loop watches the socket still, and would then watch whatever comes in its place
        else:
            sock.close()
        if isinstance(error, ConnectionResetError) and not str(error):  # as asyncio has it
            raise ConnectionResetError(errno.ECONNRESET, "the peer hung up during the TLS handshake") from error
        raise
    return channel


def name_of(sock: socket.socket) -> str:
    """The other end, for messages to people."""
    with contextlib.suppress(OSError):
        host, port = sock.getpeername()
        return f"{host}:{port}"
    return "unknown"
