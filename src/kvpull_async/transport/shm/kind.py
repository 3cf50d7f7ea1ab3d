"""How two processes find out that they share a machine and a user, and meet on a side channel. It must not know grants.

The side that was dialled waits on an abstract Unix socket of a random name, which it tells the other only in a greeting
that was proven; the other shows the link's token there. What stands against it (another host, user or network
namespace) is an OSError with the reason, and the next kind of path is tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import secrets
import socket
from pathlib import Path
from typing import Final

from kvpull_async import observe
from kvpull_async._deadline import Deadline, absorb
from kvpull_async._workers import resolve
from kvpull_async.memory import shared
from kvpull_async.memory.publications import EPOCHS, Publications
from kvpull_async.memory.shared import Mapping
from kvpull_async.transport.base import PathKind, PathSeed
from kvpull_async.transport.shm import messages, side
from kvpull_async.transport.shm.messages import Hello, Offer, Opened
from kvpull_async.transport.shm.path import ShmPath
from kvpull_async.transport.shm.remote import PeerProcess
from kvpull_async.transport.shm.side import Side

__all__ = ["ShmPaths"]

_PROBE: Final = 16
_GREETING: Final = 1.0
"""Seconds that a process which came to the socket has to say HELLO."""
_WAITING: Final = 128
_PAUSE: Final = 0.2
"""Seconds in which nobody is let in, once there was no descriptor for one."""
_NAME: Final = b"\0kvpull-"
_PR_SET_PTRACER: Final = 0x59616D61
_PR_SET_PTRACER_ANY: Final = ctypes.c_ulong(-1)


class ShmPaths(PathKind):
    """`process_reads` ("auto", "on" or "off") says whether memory that is in no memory file may be read through the
    kernel; "on" also asks it to let the peer do so where it would not by itself.
    """

    name = "shm"
    why = "same host and user"

    def __init__(self, publications: Publications, log: observe.Log, *, process_reads: str = "auto") -> None:
        self._publications = publications
        self._log = log
        self._process_reads = process_reads
        _boot_id()
        self._probe = ctypes.create_string_buffer(secrets.token_bytes(_PROBE), _PROBE)
        self._listener: _Listener | None = None
        self._expected: set[bytes] = set()
        self._sides: dict[bytes, Side] = {}

    def offer(self, token: bytes) -> bytes:
        if self._listener is None:
            self._listener = _Listener(self)
        self._expected.add(token)
        return messages.encode(Offer(_boot_id(), os.geteuid(), self._listener.name))

    async def meet(self, token: bytes, offer: bytes) -> None:
        there = messages.decode_offer(offer)
        if there.boot_id != _boot_id():
            raise ConnectionError("the peer is on another host")
        if there.uid != os.geteuid():
            raise ConnectionError(f"the peer is user {there.uid}, this process is user {os.geteuid()}")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            try:
                sock.connect(_NAME + there.name)  # at once or never, as the peer is here
            except ConnectionRefusedError:
                raise ConnectionError("the peer is in another network namespace") from None
            pid = _same_user(sock)
            await self._say_hello(sock, token, reads=False)
            page, process, hello = await self._hear_hello(sock, pid)
            if hello.token != token:
                raise ConnectionError("the peer answered for another link")
            side.send(sock, Opened(process is not None))
            self._sides[token] = Side(sock, self._publications, page=page, process=process, read_by_peer=hello.reads)
        except BaseException:
            sock.close()
            raise

    async def greet(self, sock: socket.socket) -> None:
        """One that came to the socket: it must be of this user, and know the token of a link that is being made."""
        pid = _same_user(sock)
        page, process, hello = await self._hear_hello(sock, pid)
        if hello.token not in self._expected:
            raise ConnectionError("the token of a link that does not exist")
        self._expected.discard(hello.token)
        await self._say_hello(sock, hello.token, reads=process is not None)
        self._sides[hello.token] = Side(sock, self._publications, page=page, process=process, read_by_peer=False)

    def path(self, seed: PathSeed) -> ShmPath:
        met = self._sides.get(seed.token)
        if met is None or met.closed:
            raise ConnectionError("the peer has not come to the side channel")
        met.lost = seed.lost
        return ShmPath(met, seed, forget=self.forget)

    def forget(self, token: bytes) -> None:
        self._expected.discard(token)
        met = self._sides.pop(token, None)
        if met is not None:
            met.close()

    def refused(self, reason: str) -> None:
        self._log.warning("link.rejected", peer="side channel", reason=reason)

    def close_after_fork(self) -> None:
        if self._listener is not None:
            self._listener.close_after_fork()
        for met in self._sides.values():
            met.close_after_fork()

    async def aclose(self, deadline: Deadline) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await absorb(listener.close(), deadline)
        for token in list(self._sides):
            self.forget(token)
        self._expected.clear()

    async def _say_hello(self, sock: socket.socket, token: bytes, *, reads: bool) -> None:
        address = 0 if self._process_reads == "off" else ctypes.addressof(self._probe)
        if self._process_reads == "on":
            _let_read()
        page = self._publications.page
        side.send(sock, Hello(token, address, self._probe.raw, reads), [page.descriptor])

    async def _hear_hello(self, sock: socket.socket, pid: int) -> tuple[Mapping, PeerProcess | None, Hello]:
        async with Deadline.after_ms(_GREETING * 1000).scope():
            hello, descriptors = await _next(sock)
        try:
            if not isinstance(hello, Hello) or len(descriptors) != 1:
                raise ConnectionError(f"{type(hello).__name__} with {len(descriptors)} descriptors is no greeting")
            nbytes = EPOCHS * 8
            shared.check_sealed(descriptors[0], nbytes)
            return shared.map_readonly(descriptors[0], nbytes), self._readable(pid, hello), hello
        finally:
            side.close(descriptors)

    def _readable(self, pid: int, hello: Hello) -> PeerProcess | None:
        """The peer's memory, if it may be tried and can be read."""
        if not hello.probe_address or self._process_reads == "off" or not pid:
            return None
        process = PeerProcess(pid, probe_address=hello.probe_address, probe=hello.probe)
        try:
            process.check()
        except OSError as error:
            self._log.info("link.process_reads", allowed=False, reason=str(error))
            return None
        return process

    def __repr__(self) -> str:
        return f"<ShmPaths links={len(self._sides)} expected={len(self._expected)}>"


class _Listener:
    """An abstract name, gone with the process."""

    def __init__(self, kind: ShmPaths) -> None:
        self.name = secrets.token_hex(16).encode()
        self._kind = kind
        self._loop = asyncio.get_running_loop()
        self._greetings: set[asyncio.Task[None]] = set()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._sock.bind(_NAME + self.name)
            self._sock.listen(_WAITING)
        except BaseException:
            self._sock.close()
            raise
        self._pause: asyncio.TimerHandle | None = None
        self._watch()

    def _watch(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:  # out of descriptors: those who wait give up by themselves
            self._kind.refused(str(error))
            self._loop.remove_reader(self._sock.fileno())  # which would call again at once
            self._pause = self._loop.call_later(_PAUSE, self._watch)
            return
        sock.setblocking(False)
        if len(self._greetings) >= _WAITING:
            sock.close()
            return
        task = self._loop.create_task(self._greet(sock), name="kvpull-greet-side")
        self._greetings.add(task)
        task.add_done_callback(self._greetings.discard)

    async def _greet(self, sock: socket.socket) -> None:
        try:
            await self._kind.greet(sock)
        except (OSError, asyncio.TimeoutError) as error:
            sock.close()
            self._kind.refused(str(error) or "no greeting in time")
        except BaseException:
            sock.close()
            raise

    def close(self) -> list[asyncio.Task[None]]:
        """Let nobody in any more; the greetings, which end now."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for task in self._greetings:
            task.cancel()
        return list(self._greetings)

    def close_after_fork(self) -> None:
        self._sock.close()


async def _next(sock: socket.socket) -> tuple[messages.Message | None, list[int]]:
    """The next message, waiting for it."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return side.receive(sock)
        except BlockingIOError:
            arrived: asyncio.Future[None] = loop.create_future()
            loop.add_reader(sock.fileno(), resolve, arrived)
            try:
                await arrived
            finally:
                loop.remove_reader(sock.fileno())


def _same_user(sock: socket.socket) -> int:
    pid, uid = side.credentials(sock)
    if uid != os.geteuid():
        raise PermissionError(f"the other process is of user {uid}, this one of user {os.geteuid()}")
    return pid


@functools.cache
def _boot_id() -> str:
    """Tells machines apart, and one boot from the next. Read early, as long as there is a descriptor for it."""
    with contextlib.suppress(OSError):
        # As text it would load a codec, on the core's loop.
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().decode("ascii").strip()
    return ""


def _let_read() -> None:
    """Where the kernel lets only parents read a process, let all of its user; elsewhere without effect. It keeps one
    exception, so that naming one peer would take it from another.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
