"""A payload connection and what is at its other end, for its tests."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence

from kvpull_async.memory.base import Batches
from kvpull_async.transport.payload import Payload, TcpTransfer, receive_into, send_from

ONE, TWO = b"1" * 16, b"2" * 16


def batches(*views: Sequence[memoryview]) -> Batches:
    yield from views


def lending(data: bytes) -> Batches:
    return batches([memoryview(data)])


def landing(buffer: bytearray) -> Batches:
    return batches([memoryview(buffer)])


def head(grant_id: bytes, nbytes: int) -> bytes:
    return struct.pack("<16sQ", grant_id, nbytes)


class Pair:
    """A payload connection and the socket at its other end."""

    def __init__(self) -> None:
        ours, self.far = socket.socketpair()
        self.payload = Payload(ours, asyncio.get_running_loop())

    def fetch(self, grant_id: bytes, into: bytearray) -> TcpTransfer:
        return TcpTransfer(self.payload, receive_into(landing(into), grant_id, len(into)))

    def serve(self, grant_id: bytes, data: bytes) -> TcpTransfer:
        return TcpTransfer(self.payload, send_from(lending(data), grant_id, len(data)))

    async def end(self) -> None:
        self.payload.abort()
        await asyncio.wait_for(asyncio.shield(self.payload.ended), 20)
        self.far.close()


async def failed(transfer: TcpTransfer) -> Exception:
    """Why a transfer failed, once it has settled."""
    await asyncio.wait_for(asyncio.shield(transfer.settled), 20)
    error = transfer.done.exception()
    assert isinstance(error, OSError)
    return error


FOREIGN = {
    "another grant": head(TWO, 6) + b"abcdef",
    "another length": head(ONE, 7) + b"abcdefg",
    "no head": b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
}
