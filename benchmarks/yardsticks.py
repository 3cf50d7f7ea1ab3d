"""What sockets can do without the library: plain blocking ones, and the same pulls over asyncio streams.

It must not use the library.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from sides import Puller, Source, repeat, repeat_awaiting
from workloads import MIB, Arena, Shape, Workload, own_memory

__all__ = ["LoopPuller", "LoopSource", "SocketPuller", "SocketSource", "fill", "prompt"]

ASK: Final = struct.Struct("<56xII")
"""A request: which pull of which workload. It is as long as a small message of a real protocol."""
Views = list[memoryview]


BUFFERS: Final = 4 * MIB
MODES: Final = {socket.AF_INET: ("", "4m", "reno"), socket.AF_UNIX: ("", "4m")}
"""How sockets are set up: as the system does it, with 4 MiB of buffers, or with a congestion control that does not pace
what it sends (some systems choose one that does, which costs much between processes of one machine).
"""


def _listener(family: socket.AddressFamily, mode: str) -> socket.socket:
    """Accepted sockets inherit how it is set up."""
    listener = _set_up(socket.socket(family), mode)
    # An abstract name for a Unix socket: no file to be left behind.
    name = f"\0kvpull-bench-{os.getpid()}-{mode}" if family == socket.AF_UNIX else ("127.0.0.1", 0)
    listener.bind(name)
    listener.listen()
    return listener


def _set_up(sock: socket.socket, mode: str) -> socket.socket:
    if mode == "4m":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFERS)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFERS)
    elif mode:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, mode.encode())
    return sock


def prompt(sock: socket.socket) -> socket.socket:
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _lent(arena: Arena, shape: Shape, works: Sequence[Workload]) -> list[list[Views]]:
    """The pieces that a source sends, by workload and pull."""
    return [
        [[arena.view(src, at, n) for src, at, _, _, n in pull.segments(shape)] for pull in work.pulls] for work in works
    ]


def _landing(arena: Arena, shape: Shape, work: Workload) -> list[Views]:
    """The pieces that a puller fills, by pull."""
    return [[arena.view(dst, at, n) for _, _, dst, at, n in pull.segments(shape)] for pull in work.pulls]


def fill(sock: socket.socket, view: memoryview) -> None:
    while view:
        n = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if not n:
            raise ConnectionError("the other side has hung up")
        view = view[n:]


class SocketSource(Source):
    """Plain blocking sockets: reads a request, sends the segments one after another."""

    def __init__(self, family: socket.AddressFamily, *, huge: bool = False) -> None:
        self._family = family
        self._huge = huge

    def open(self, shape: Shape, works: Sequence[Workload], *, seed: int) -> Any:
        self._arena = own_memory(shape, huge=self._huge)
        self._arena.fill(seed)
        lent = _lent(self._arena, shape, works)
        listeners = [_listener(self._family, mode) for mode in MODES[self._family]]
        for listener in listeners:
            threading.Thread(target=self._serve, args=(listener, lent), daemon=True).start()
        return [listener.getsockname() for listener in listeners]

    def arenas(self) -> Sequence[Arena]:
        return [self._arena]

    @staticmethod
    def _serve(listener: socket.socket, lent: list[list[Views]]) -> None:
        with listener, prompt(listener.accept()[0]) as sock:
            request = bytearray(ASK.size)
            while sock.recv_into(request, 0, socket.MSG_WAITALL):
                work, pull = ASK.unpack(request)
                for view in lent[work][pull]:
                    sock.sendall(view)


class SocketPuller(Puller):
    """Plain blocking sockets: sends a request, receives each segment where it belongs.

    There is a connection for each mode.
    """

    def __init__(self, family: socket.AddressFamily, *, huge: bool = False) -> None:
        self._family = family
        self._huge = huge
        self._socks: dict[str, socket.socket] = {}

    def open(self, shape: Shape, works: Sequence[Workload], *, told: Any) -> None:
        self._shape, self._names = shape, [work.name for work in works]
        self._arena = own_memory(shape, huge=self._huge)
        for mode, address in zip(MODES[self._family], told, strict=True):
            self._socks[mode] = sock = _set_up(socket.socket(self._family), mode)
            sock.connect(address if isinstance(address, (str, bytes)) else tuple(address))
            prompt(sock)

    def arena(self, work: Workload) -> Arena:
        return self._arena

    def pull(self, work: Workload, count: int, mode: str = "") -> list[float]:
        number, sock = self._names.index(work.name), self._socks[mode]
        landing = _landing(self._arena, self._shape, work)
        calls = [partial(self._pull, sock, ASK.pack(number, i), views) for i, views in enumerate(landing)]
        return repeat(calls, count, budget=work.budget)

    @staticmethod
    def _pull(sock: socket.socket, request: bytes, views: Views) -> None:
        sock.sendall(request)
        for view in views:
            fill(sock, view)

    def close(self) -> None:
        for sock in self._socks.values():
            sock.close()


class LoopSource(Source):
    """The least that a server on asyncio streams can do: reads a request, writes the segment."""

    def __init__(self, *, huge: bool = False) -> None:
        self._huge = huge
        self._listening = threading.Event()

    def open(self, shape: Shape, works: Sequence[Workload], *, seed: int) -> Any:
        self._arena = own_memory(shape, huge=self._huge)
        self._arena.fill(seed)
        self._lent = _lent(self._arena, shape, works)
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        if not self._listening.wait(10):
            raise TimeoutError("the server did not start")
        return self._address

    def arenas(self) -> Sequence[Arena]:
        return [self._arena]

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self._address = server.sockets[0].getsockname()
        self._listening.set()
        async with server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                work, pull = ASK.unpack(await reader.readexactly(ASK.size))
                for view in self._lent[work][pull]:
                    writer.write(view)
                await writer.drain()
        except asyncio.IncompleteReadError:
            writer.close()


class LoopPuller(Puller):
    """One round trip over asyncio streams: what no library on asyncio can be faster than."""

    def __init__(self, *, huge: bool = False) -> None:
        self._huge = huge
        self._loop = asyncio.new_event_loop()

    def open(self, shape: Shape, works: Sequence[Workload], *, told: Any) -> None:
        self._shape, self._names = shape, [work.name for work in works]
        self._arena = own_memory(shape, huge=self._huge)
        self._reader, self._writer = self._loop.run_until_complete(asyncio.open_connection(*told))

    def arena(self, work: Workload) -> Arena:
        return self._arena

    def pull(self, work: Workload, count: int, mode: str = "") -> list[float]:
        number = self._names.index(work.name)
        landing = _landing(self._arena, self._shape, work)
        calls = [partial(self._pull, ASK.pack(number, i), views) for i, views in enumerate(landing)]
        return self._loop.run_until_complete(repeat_awaiting(calls, count, budget=work.budget))

    async def _pull(self, request: bytes, views: Views) -> None:
        self._writer.write(request)
        await self._writer.drain()
        for view in views:
            view[:] = await self._reader.readexactly(len(view))

    def close(self) -> None:
        self._writer.close()
        self._loop.run_until_complete(self._writer.wait_closed())
        self._loop.close()
