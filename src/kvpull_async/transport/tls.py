"""Certificates of both sides, and TLS over sockets that the loop waits for. It must not know what the bytes mean."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

__all__ = ["Certified", "Tls", "connected", "receive", "send", "shutdown"]

T = TypeVar("T")
_NAME: Final = "kvpull:cluster:"
_ANY: Final = "*"
_HANDSHAKE_LIMIT: Final = 16 * 1024
"""Most bytes of a peer's part in a handshake: a certificate and a few above it. A hundred certificates would hold the
loop for tens of milliseconds, whoever sent them.
"""


@dataclass(frozen=True)
class Tls:
    """The certificates of one engine, for the side that dials and for the one that is dialled."""

    dialling: ssl.SSLContext
    accepting: ssl.SSLContext

    @classmethod
    def load(cls, *, certificate: str, key: str, authority: str) -> Tls:
        """From PEM files. OSError (ssl.SSLError is one) with the file that cannot be used."""
        contexts: list[ssl.SSLContext] = []
        for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
            context = _Context(protocol)
            context.check_hostname = False  # identities are cluster ids: see `Certified`
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.sslobject_class, context.sslsocket_class = _Object, _Socket
            _loaded(context.load_cert_chain, certificate, key or None, lambda: "", what=f"{certificate} {key}".strip())
            _loaded(context.load_verify_locations, authority, what=authority)
            contexts.append(context)
        contexts[1].num_tickets = 0  # nothing comes on a payload connection but payload
        return cls(*contexts)


def _loaded(load: Callable[..., object], *paths: object, what: str) -> None:
    """The password callback given with a key keeps OpenSSL from asking at the terminal for one."""
    try:
        load(*paths)
    except OSError as error:
        raise OSError(error.errno, f"{what}: {error.strerror or error}") from error


class _Legible:
    """A certificate whose names cannot be read is a bad one, and no error of this side."""

    def getpeercert(self, binary_form: bool = False) -> Any:
        try:
            return super().getpeercert(binary_form)  # type: ignore[misc]
        except UnicodeDecodeError as error:
            raise ssl.SSLError("the names in the peer's certificate are no text") from error


class _Object(_Legible, ssl.SSLObject):
    """For connections of the loop. Ends a handshake that is too long before it is looked at."""

    incoming: ssl.MemoryBIO
    _heard = 0

    def do_handshake(self) -> None:
        self._heard += self.incoming.pending
        if self._heard > _HANDSHAKE_LIMIT:
            raise ssl.SSLError(f"the peer's handshake is longer than {_HANDSHAKE_LIMIT} bytes")
        super().do_handshake()


class _Socket(_Legible, ssl.SSLSocket):
    """For payload connections."""


class _Context(ssl.SSLContext):
    """Tells its objects where their bytes come from."""

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        assert isinstance(made, _Object)
        made.incoming = incoming
        return made


@dataclass(frozen=True)
class Certified:
    """What a peer's certificate says: the clusters that it may speak for."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, certificate: Mapping[str, Any] | None) -> Certified:
        """As `getpeercert` gives it."""
        names = (certificate or {}).get("subjectAltName", ())
        return cls(tuple(name for kind, name in names if kind == "URI" and name.startswith(_NAME)))

    def speaks_for(self, cluster_id: int) -> bool:
        return bool({f"{_NAME}{cluster_id}", f"{_NAME}{_ANY}"} & set(self.names))


async def connected(context: ssl.SSLContext, sock: socket.socket, *, accepting: bool) -> ssl.SSLSocket:
    """The handshake over a socket that does not block, which is closed unless it succeeds. OSError."""
    try:
        secured = context.wrap_socket(sock, server_side=accepting, do_handshake_on_connect=False)
    except BaseException:
        sock.close()
        raise
    try:
        await _retried(secured, secured.do_handshake)
    except BaseException:
        secured.close()
        raise
    return secured


async def receive(sock: ssl.SSLSocket, n: int) -> bytes:
    """Up to n bytes, or none at the end."""
    return await _retried(sock, lambda: sock.recv(n))


async def send(sock: ssl.SSLSocket, data: bytes) -> None:
    while data:
        data = data[await _retried(sock, partial(sock.send, data)) :]


def shutdown(sock: socket.socket) -> None:
    """Both directions, from any thread. The own method of a TLS socket would first forget its keys, and a thread that
    reads would get what the peer sent as it is.
    """
    socket.socket.shutdown(sock, socket.SHUT_RDWR)


async def _retried(sock: ssl.SSLSocket, step: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    while True:
        try:
            return step()
        except ssl.SSLWantReadError:
            watch, forget = loop.add_reader, loop.remove_reader
        except ssl.SSLWantWriteError:
            watch, forget = loop.add_writer, loop.remove_writer
        ready: asyncio.Future[None] = loop.create_future()
        fd = sock.fileno()
        watch(fd, _set, ready)
        try:
            await ready
        finally:
            forget(fd)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
