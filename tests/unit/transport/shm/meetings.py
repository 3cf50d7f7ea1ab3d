"""Two kinds of path that meet, and strangers who come to the same socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers
from kvpull_async.memory.host import HostMemory
from kvpull_async.observe import Log
from kvpull_async.transport.base import PathSeed
from kvpull_async.transport.shm import messages, side
from kvpull_async.transport.shm.kind import ShmPaths
from kvpull_async.transport.shm.messages import Hello, Offer

PREFIX = b"\0kvpull-"
STRANGER = 65534


class Kind(ShmPaths):
    """Keeps what it refused."""

    def __init__(self, *, process_reads: str = "auto") -> None:
        self.memory = HostMemory()
        super().__init__(self.memory.publications, Log(), process_reads=process_reads)
        self.reasons: list[str] = []

    def refused(self, reason: str) -> None:
        self.reasons.append(reason)


@contextlib.asynccontextmanager
async def kinds(*, accepting: str = "auto", meeting: str = "auto") -> AsyncIterator[tuple[Kind, Kind]]:
    """The side that was dialled and the one that dialled."""
    pair = Kind(process_reads=accepting), Kind(process_reads=meeting)
    try:
        yield pair
    finally:
        for kind in pair:
            await kind.aclose(Deadline.after_ms(20_000))


def seed(token: bytes, workers: Workers, *, dialer: bool, lost: list[str] | None = None) -> PathSeed:
    return PathSeed(token, 0, dialer, None, workers, lost.append if lost is not None else lambda _: None)


def offered(kind: Kind, token: bytes) -> Offer:
    return messages.decode_offer(kind.offer(token))


def connected(name: bytes) -> socket.socket:
    """As a process that knows the name, or has guessed it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        sock.connect(PREFIX + name)
    except BaseException:
        sock.close()
        raise
    return sock


def hello(token: bytes) -> Hello:
    return Hello(token, 0, bytes(16), False)


@contextlib.contextmanager
def stranger() -> Iterator[None]:
    """This process is of another user meanwhile."""
    if os.geteuid():
        pytest.skip("needs to become another user")
    os.seteuid(STRANGER)
    try:
        yield
    finally:
        os.seteuid(0)


def hung_up(sock: socket.socket) -> bool:
    """The end of the other side, seen as such or as a reset: it may not have read what was said."""
    try:
        return side.receive(sock)[0] is None
    except ConnectionResetError:
        return True


async def until(happened: Callable[[], object]) -> None:
    for _ in range(2000):
        if happened():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


async def greeted(kind: Kind, *said: tuple[messages.Message, list[int]]) -> None:
    """One that comes and says that is hung up on, and the kind has the reason."""
    before = len(kind.reasons)
    with connected(kind._listener.name) as sock:  # type: ignore[union-attr]
        for message, descriptors in said:
            side.send(sock, message, descriptors)
        await until(lambda: len(kind.reasons) > before)
        assert hung_up(sock)
