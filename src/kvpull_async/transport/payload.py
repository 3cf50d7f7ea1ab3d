"""A payload connection: one blocking socket, the thread that owns it, and the transfers that run on it in turn.

It must not know how connections come to be or what the bytes mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvpull_async._workers import report_to, resolve
from kvpull_async.memory.base import Batches
from kvpull_async.transport import tls

__all__ = ["Payload", "TcpTransfer", "receive_into", "send_from"]

_HEAD: Final = struct.Struct("<16sQ")


class Payload:
    """One payload socket and the thread that owns it."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self.broken: bool = False
        self.ended: asyncio.Future[None] = loop.create_future()
        self._sock = sock
        self._loop = loop
        self._over = False
        self._lock = threading.Lock()  # protects the descriptor (no shutdown after it was closed) and _over
        self._jobs: queue.SimpleQueue[TcpTransfer | None] = queue.SimpleQueue()
        sock.setblocking(True)
        threading.Thread(target=self._run, name="kvpull-payload", daemon=True).start()

    def start(self, transfer: TcpTransfer) -> None:
        with self._lock:
            if not self._over:
                self._jobs.put(transfer)
                return
        transfer.drop()

    def alive(self) -> bool:
        """Between transfers: False when the connection has ended, also when only the peer knows so far, or holds bytes
        of a transfer that was given up.
        """
        if self.broken:
            return False
        try:  # of a TLS socket the bytes below it, where between transfers nothing comes either
            socket.socket.recv(self._sock, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return not (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending())
        except OSError:
            return False
        return False

    def abort(self) -> None:
        if not self.broken:
            self.broken = True
            self._jobs.put(None)
            with self._lock, contextlib.suppress(OSError):
                tls.shutdown(self._sock)

    def _run(self) -> None:
        try:
            while (transfer := self._jobs.get()) is not None:
                if not transfer.run(self._sock):
                    break
        finally:
            with self._lock:
                self._over = True
                self._sock.close()
            while not self._jobs.empty():
                transfer = self._jobs.get()
                if transfer is not None:
                    transfer.drop()
            report_to(self._loop, resolve, self.ended)


class TcpTransfer:
    """One grant's bytes through a payload connection, in its thread."""

    def __init__(self, payload: Payload, work: Work) -> None:
        self.cancelled: bool = False
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[int] = self._loop.create_future()
        self.settled: asyncio.Future[None] = self._loop.create_future()
        self._payload = payload
        self._work = work
        payload.start(self)

    def abort(self) -> bool:
        """Break the connection, also after the last byte was sent: the peer may not have taken it."""
        self.cancelled = True
        self._payload.abort()
        return True

    def run(self, sock: socket.socket) -> bool:
        """In the connection's thread; False when the connection cannot be used any more."""
        try:
            moved = self._work(sock, self)
        except BaseException as error:  # noqa: BLE001  (belongs to whoever awaits `done`)
            self._payload.broken = True  # before anyone hears of it and starts the next transfer here
            report_to(self._loop, self._finish, 0, error)
            return False
        report_to(self._loop, self._finish, moved, None)
        return True

    def drop(self) -> None:
        report_to(self._loop, self._finish, 0, ConnectionError("the payload connection has ended"))

    def check(self) -> None:
        if self.cancelled or self._payload.broken:  # a Unix socket still gives what came before its shutdown
            raise ConnectionAbortedError("the transfer was aborted")

    def _finish(self, moved: int, error: BaseException | None) -> None:
        if error is None:
            self.done.set_result(moved)
        else:
            self.done.set_exception(error)
            self.done.exception()  # an aborted caller may never ask for it
        self.settled.set_result(None)


def receive_into(landing: Batches, grant_id: bytes, nbytes: int) -> Work:
    """Work that fills the landing with the bytes of this grant and refuses those of any other."""

    def work(sock: socket.socket, transfer: TcpTransfer) -> int:
        with contextlib.closing(landing):
            head = bytearray(_HEAD.size)
            _fill(sock, [memoryview(head)], transfer)
            if _HEAD.unpack(head) != (grant_id, nbytes):
                raise ConnectionError("the payload connection carries another transfer")
            for batch in landing:
                _fill(sock, batch, transfer)
        return nbytes

    return work


def send_from(lending: Batches, grant_id: bytes, nbytes: int) -> Work:
    """Work that sends the lending's bytes under the name of this grant."""

    def work(sock: socket.socket, transfer: TcpTransfer) -> int:
        with contextlib.closing(lending):
            _empty(sock, [memoryview(_HEAD.pack(grant_id, nbytes))], transfer)
            for batch in lending:
                _empty(sock, batch, transfer)
        return nbytes

    return work


def _fill(sock: socket.socket, views: Sequence[memoryview], transfer: TcpTransfer) -> None:
    while views:
        transfer.check()
        if isinstance(sock, ssl.SSLSocket):
            n = sock.recv_into(views[0])
        else:
            n, _, _, _ = sock.recvmsg_into(views, 0, socket.MSG_WAITALL)
        if n == 0:
            transfer.check()
            raise ConnectionError("the peer closed the payload connection")
        views = _advance(views, n)


def _empty(sock: socket.socket, views: Sequence[memoryview], transfer: TcpTransfer) -> None:
    while views:
        transfer.check()
        n = sock.send(views[0]) if isinstance(sock, ssl.SSLSocket) else sock.sendmsg(views)
        views = _advance(views, n)


def _advance(views: Sequence[memoryview], n: int) -> Sequence[memoryview]:
    """What is left of the views after `n` bytes."""
    for i, view in enumerate(views):
        if n < view.nbytes:
            return [view[n:], *views[i + 1 :]]
        n -= view.nbytes
    return ()


Work = Callable[[socket.socket, TcpTransfer], int]
