"""One connection through a fault proxy: two sockets, and a stream of bytes each way with the faults that befall it.

It must not know who listens or why something is to happen. Nothing but tests may import it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from kvpull_async.testing.proxy_plan import Fault, FaultKind, Way

__all__ = ["Connection", "Passing"]

_PIECE: Final = 64 * 1024
_STEPS: Final = 50
"""Pieces in which a throttled second is passed on."""
_RESET: Final = struct.pack("ii", 1, 0)
_MAGIC: Final = b"KVPULL\x01"
_KINDS: Final = {b"C": "control", b"S": "control", b"P": "payload", b"T": "payload"}
"""By the letter behind that. S and T go on with TLS."""


@dataclass(frozen=True)
class Passing:
    """One connection as it is now: its number, what it is for ("control" or "payload" of a link, "" as long as that
    is not known), how many bytes have gone each way, and whether it is open.
    """

    number: int
    kind: str
    there: int
    back: int
    open: bool


class Stream:
    """One direction of a connection, and the faults that are still to come in it."""

    def __init__(self, way: Way, connection: Connection) -> None:
        self.passed: int = 0
        self.source: socket.socket | None = None
        self.sink: socket.socket | None = None
        self.open: asyncio.Event = asyncio.Event()
        self.open.set()
        self.delay: float = 0.0
        self.rate: int = 0
        self.lost: bool = False
        """Whether what is said this way is lost, the end of the connection too."""
        self._way = way
        self._connection = connection
        self._faults: list[Fault] = []
        self._swallows = False
        self._flip = 0
        self._first = b""

    def plan(self, fault: Fault) -> None:
        self._faults.append(replace(fault, at=self.passed + fault.at))
        self._faults.sort(key=lambda one: one.at)
        self.harm()

    async def run(self) -> None:
        """Until its source has ended. OSError when the connection breaks."""
        while data := await self._receive():
            if self._way is Way.THERE and len(self._first) <= len(_MAGIC):
                self._recognise(data)
            await self._pass(memoryview(data))
        await self.open.wait()
        if not self.lost:
            self.finish()

    async def _receive(self) -> bytes:
        assert self.source is not None
        try:
            return await asyncio.get_running_loop().sock_recv(self.source, _PIECE)
        except OSError:
            if not self.lost:
                raise
            return b""  # nobody is told

    def _recognise(self, data: bytes) -> None:
        self._first = (self._first + data)[: len(_MAGIC) + 1]
        if self._first.startswith(_MAGIC):
            self._connection.kind = _KINDS.get(self._first.removeprefix(_MAGIC), "")

    async def _pass(self, data: memoryview) -> None:
        while data and not self._connection.ended:
            await self.open.wait()
            piece = data[: self._room(len(data))]
            pause = self.delay + (len(piece) / self.rate if self.rate else 0.0)
            if pause:
                await asyncio.sleep(pause)
                await self.open.wait()
            await self._send(piece)
            data = data[len(piece) :]
            self.harm()

    def _room(self, nbytes: int) -> int:
        """How much may pass before something happens."""
        if self.rate:
            nbytes = min(nbytes, max(1, self.rate // _STEPS))
        return min(nbytes, self._faults[0].at - self.passed) if self._faults else nbytes

    async def _send(self, piece: memoryview) -> None:
        """A fault that is inflicted meanwhile finds these bytes gone."""
        assert self.sink is not None
        self.passed += len(piece)
        if self._swallows:
            return
        if self._flip:
            piece = memoryview(bytes([piece[0] ^ self._flip]) + piece[1:])
            self._flip = 0
        try:
            await asyncio.get_running_loop().sock_sendall(self.sink, piece)
        except OSError:
            if not self._connection.loses(self._way):
                raise
            self._swallows = True

    def forget(self) -> None:
        self._faults.clear()
        self._flip = 0

    def harm(self) -> None:
        """Do what is due. Nothing is while the connection to the target is still being made."""
        while self.sink is not None and self._faults and self._faults[0].at <= self.passed:
            fault = self._faults.pop(0)
            self._connection.say(fault.describe())
            self._do(fault)

    def _do(self, fault: Fault) -> None:
        kind = fault.kind
        if kind is FaultKind.DELAY:
            self.delay = fault.value / 1000
        elif kind is FaultKind.THROTTLE:
            self.rate = fault.value
        elif kind is FaultKind.STALL:
            self.open.clear()
            if fault.value:
                asyncio.get_running_loop().call_later(fault.value / 1000, self.open.set)
        elif kind is FaultKind.CUT:
            self._connection.cut()
        elif kind is FaultKind.CLOSE:
            self._connection.finish()
        elif kind is FaultKind.HALF_CLOSE:
            self.finish()
        elif kind is FaultKind.SWALLOW:
            self._swallows = self.lost = True
        else:
            self._flip ^= fault.value

    def finish(self) -> None:
        self._swallows = True
        if self.sink is not None:
            with contextlib.suppress(OSError):  # it has ended already
                self.sink.shutdown(socket.SHUT_WR)


class Connection:
    """Two sockets and the two streams between them."""

    def __init__(self, number: int, client: socket.socket, tell: Callable[[str], None]) -> None:
        self.number: int = number
        self.kind: str = ""
        self.ended: bool = False
        self.closed: asyncio.Event = asyncio.Event()
        """Set when both sockets are; soon after `ended`."""
        self._client = client
        self._target: socket.socket | None = None
        self._tell = tell
        self._streams = {way: Stream(way, self) for way in Way}
        self._task: asyncio.Task[None] | None = None
        client.setblocking(False)

    def plan(self, faults: Iterable[Fault]) -> None:
        for fault in faults:
            if not self.ended:
                self._streams[fault.way].plan(fault)

    async def run(self, target: tuple[str, int] | None) -> None:
        """Until both ways have ended, or it is cut. None: nobody is there who could say anything."""
        self._task = asyncio.current_task()
        streams: list[asyncio.Task[None]] = []
        try:
            if self.ended:  # cut before it began
                return
            if target is None:
                while await asyncio.get_running_loop().sock_recv(self._client, _PIECE):
                    pass
            else:
                await self._connect(target)
                loop = asyncio.get_running_loop()
                streams = [loop.create_task(stream.run()) for stream in self._streams.values()]
                await asyncio.gather(*streams)
        except OSError as error:
            self.say(f"broke: {error}")
            self._reset()
        except asyncio.CancelledError:
            self.say("was ended here")
            raise
        finally:
            self.ended = True  # now, so that no `cut` interrupts what follows
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            for sock in filter(None, (self._client, self._target)):
                sock.close()
            self.closed.set()

    async def _connect(self, target: tuple[str, int]) -> None:
        self._target = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        await asyncio.get_running_loop().sock_connect(self._target, target)
        for sock in (self._client, self._target):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        there, back = self._streams[Way.THERE], self._streams[Way.BACK]
        there.source, there.sink = self._client, self._target
        back.source, back.sink = self._target, self._client
        for stream in (there, back):
            stream.harm()

    def cut(self) -> None:
        """Both sides get a reset, after what has been passed on."""
        if not self.ended:
            self.ended = True
            self._reset()
            if self._task is not None:
                self._task.cancel()

    def _reset(self) -> None:
        """Let the sockets say so when they are closed."""
        for sock in filter(None, (self._client, self._target)):
            with contextlib.suppress(OSError):  # the peer was faster
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.finish()

    def loses(self, way: Way) -> bool:
        """Whether the sender on this way cannot be told that its receiver is gone."""
        return self._streams[Way.BACK if way is Way.THERE else Way.THERE].lost

    def forget(self) -> None:
        """The faults that have not happened yet."""
        for stream in self._streams.values():
            stream.forget()

    def resume(self) -> None:
        for stream in self._streams.values():
            stream.delay, stream.rate = 0.0, 0
            stream.open.set()

    def passing(self) -> Passing:
        passed = {way.value: stream.passed for way, stream in self._streams.items()}
        return Passing(self.number, self.kind, open=not self.ended, **passed)

    def say(self, what: str) -> None:
        self._tell(f"connection {self.number}{' ' + self.kind if self.kind else ''}: {what}")
