"""A data path over payload connections of its own: the source sends, the puller receives. It must not know how such a
connection is made.
"""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod

from kvpull_async._deadline import Deadline, absorb
from kvpull_async.memory.base import Batches
from kvpull_async.transport.base import DataPath, Transfer
from kvpull_async.transport.payload import Payload, TcpTransfer, receive_into, send_from

__all__ = ["StreamPath"]


class StreamPath(DataPath):
    """One direction of one link. The side that dialled the link dials its payload connections too, when needed."""

    def __init__(self, *, dials: bool) -> None:
        self._dials = dials
        self._loop = asyncio.get_running_loop()
        self._payload: Payload | None = None
        self._ending: set[Payload] = set()
        self._aborted = False

    @abstractmethod
    async def dial(self, deadline: Deadline) -> socket.socket:
        """A new payload connection, attached to the peer's half of the path. OSError or TimeoutError."""

    async def ready(self, deadline: Deadline) -> None:
        if self._dials and not self._usable():
            self.attach(await self.dial(deadline))

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

    @property
    def connected(self) -> bool:
        return self._payload is not None

    def fetch(self, grant_id: bytes, landing: Batches, nbytes: int) -> Transfer:
        return TcpTransfer(self._connected(), receive_into(landing, grant_id, nbytes))

    def serve(self, grant_id: bytes, lending: Batches, nbytes: int) -> Transfer:
        return TcpTransfer(self._connected(), send_from(lending, grant_id, nbytes))

    def give_up(self) -> None:
        """The side that dials begins anew: what is in the connection, or on its way, belongs to the request given up.
        The side that was dialled need not, since the source breaks the connection when it hears of it, and dials again.
        """
        if self._dials:
            self._drop()

    def abort(self) -> None:
        self._aborted = True
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
