"""Ends of side channels: honest ones that face each other, and one that faces a socket which says what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpull_async.memory.base import Region
from kvpull_async.memory.copying import CancelFlag
from kvpull_async.memory.publications import EPOCHS, Publications
from kvpull_async.memory.shared import SharedFile, map_readonly
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.shm import side
from kvpull_async.transport.shm.messages import Layout, Message
from kvpull_async.transport.shm.remote import Cache, PeerProcess
from kvpull_async.transport.shm.side import Side
from kvpull_async.values import Placement
from tests.copies import at, noise, words

NBYTES = 4096


def packets() -> tuple[socket.socket, socket.socket]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.setblocking(False)
    other.setblocking(False)
    return one, other


def this_process() -> tuple[PeerProcess, NDArray[np.uint8]]:
    """This process as if it were the peer; the probe is to be kept."""
    probe = np.frombuffer(os.urandom(16), np.uint8).copy()
    process = PeerProcess(os.getpid(), probe_address=probe.ctypes.data, probe=probe.tobytes())
    try:
        process.check()
    except PermissionError:
        pytest.skip("the kernel lets no process read another's memory")
    return process, probe


def file_regions(count: int = 1, *, file: SharedFile | None = None) -> tuple[Region, ...]:
    """A cache in one memory file, by default a new one: tensors of NBYTES."""
    held = file or SharedFile(NBYTES * count)
    return tuple(Region(held.address + i * NBYTES, NBYTES, Placement.HOST, held) for i in range(count))


def heap_regions(count: int = 1, nbytes: int = NBYTES) -> tuple[Region, ...]:
    arrays = [np.zeros(nbytes, np.uint8) for _ in range(count)]
    return tuple(Region(array.ctypes.data, nbytes, Placement.HOST, array) for array in arrays)


class Duo:
    """Two honest ends in one process."""

    def __init__(self, *, reads: bool = False) -> None:
        known: PeerProcess | None = None
        if reads:
            known, self._probe = this_process()
        self.publications = Publications(), Publications()
        socks = packets()
        pages = [map_readonly(one.page.descriptor, one.page.nbytes) for one in self.publications]
        self.one, self.other = (
            Side(socks[i], self.publications[i], page=pages[1 - i], process=known, read_by_peer=reads) for i in (0, 1)
        )
        self.lost: list[tuple[str, str]] = []
        self.one.lost = lambda reason: self.lost.append(("one", reason))
        self.other.lost = lambda reason: self.lost.append(("other", reason))

    def close(self) -> None:
        self.one.close()
        self.other.close()


@contextlib.contextmanager
def duo(*, reads: bool = False) -> Iterator[Duo]:
    made = Duo(reads=reads)
    try:
        yield made
    finally:
        made.close()


class Hostile:
    """An honest end, `side`, and a socket that faces it. `page` is the peer's page of epochs, with 1 in every slot."""

    def __init__(self, *, process: PeerProcess | None = None, read_by_peer: bool = False) -> None:
        self.publications = Publications()
        sock, self.sock = packets()
        self.page = SharedFile(EPOCHS * 8)
        np.frombuffer(view(self.page), np.int64)[:] = 1
        mapped = map_readonly(self.page.descriptor, self.page.nbytes)
        self.side = Side(sock, self.publications, page=mapped, process=process, read_by_peer=read_by_peer)
        self.lost: list[str] = []
        self.side.lost = self.lost.append

    def say(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        side.send(self.sock, message, descriptors)

    def say_raw(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self.sock, [data], list(descriptors))

    def hear(self) -> tuple[Message | None, list[int]]:
        return side.receive(self.sock)

    def heard(self) -> list[Message | None]:
        """All that there is, without the descriptors."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                message, descriptors = self.hear()
                side.close(descriptors)
                found.append(message)
                if message is None:
                    break
        return found

    def close(self) -> None:
        self.side.close()
        self.sock.close()


@contextlib.contextmanager
def hostile(*, process: PeerProcess | None = None, read_by_peer: bool = False) -> Iterator[Hostile]:
    made = Hostile(process=process, read_by_peer=read_by_peer)
    try:
        yield made
    finally:
        made.close()


def view(file: SharedFile) -> memoryview:
    return memoryview((ctypes.c_ubyte * file.nbytes).from_address(file.address))


def layout(number: int = 1, *pairs: tuple[int, int], **other: object) -> Layout:
    """One tensor of NBYTES at the beginning of file 1, unless told otherwise; the epoch is that of a hostile page."""
    table = np.array(pairs or [(0, 0)], "<i8")
    values = {"number": number, "slot": 0, "epoch": 1, "tensor_nbytes": NBYTES, "tensors": len(table), "first": 0}
    return Layout(**{**values, "files": [1], "places": table.tobytes(), **other})  # type: ignore[arg-type]


async def turn(times: int = 3) -> None:
    """Let the loop look at its sockets."""
    for _ in range(times):
        await asyncio.sleep(0.001)


def fill(regions: tuple[Region, ...]) -> list[bytes]:
    """Different bytes in every tensor; what they are."""
    said = []
    for number, region in enumerate(regions):
        data = np.roll(noise(region.nbytes), number).tobytes()
        ctypes.memmove(region.address, data, region.nbytes)
        said.append(data)
    return said


def read(cache: Cache) -> list[bytes]:
    found = []
    for base in cache.bases.tolist():
        target = np.zeros(cache.tensor_nbytes, np.uint8)
        cache.copy(words(at(target)), words(base), words(target.size), CancelFlag())
        found.append(target.tobytes())
    return found


def published(end: Side, regions: tuple[Region, ...]) -> int:
    number = end.publish(regions)
    assert number is not None
    return number


def taken_back(end: Side, number: int) -> None:
    with pytest.raises(LLMException, match="took its cache away") as raised:
        end.cache(number)
    assert raised.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert raised.value.retry_safe


def missing(end: Side, number: int) -> None:
    with pytest.raises(ConnectionError, match="not mapped here"):
        end.cache(number)
