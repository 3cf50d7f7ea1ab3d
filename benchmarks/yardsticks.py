"""What the machine can do without the library: plain sockets, a bare asyncio round trip, and bare thread crossings.

It must not use the library.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from sides import Puller, Source, repeat, repeat_awaiting
from workloads import Arena, Shape, Workload, own_memory

__all__ = ["LoopPuller", "LoopSource", "SocketPuller", "SocketSource", "crossings"]

ASK: Final = struct.Struct("<56xII")
"""A request: which pull of which workload. It is as long as a small message of a real protocol."""
Views = list[memoryview]


def _listener(family: socket.AddressFamily) -> socket.socket:
    if family == socket.AF_INET:
        return socket.create_server(("127.0.0.1", 0))
    listener = socket.socket(family)
    listener.bind(f"\0kvpull-bench-{os.getpid()}")  # an abstract name: no file to be left behind
    listener.listen()
    return listener


def _prompt(sock: socket.socket) -> socket.socket:
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


def _fill(sock: socket.socket, view: memoryview) -> None:
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
        arena = own_memory(shape, huge=self._huge)
        arena.fill(seed)
        lent = _lent(arena, shape, works)
        listener = _listener(self._family)
        threading.Thread(target=self._serve, args=(listener, lent), daemon=True).start()
        return listener.getsockname()

    @staticmethod
    def _serve(listener: socket.socket, lent: list[list[Views]]) -> None:
        with listener, _prompt(listener.accept()[0]) as sock:
            request = bytearray(ASK.size)
            while sock.recv_into(request, 0, socket.MSG_WAITALL):
                work, pull = ASK.unpack(request)
                for view in lent[work][pull]:
                    sock.sendall(view)


class SocketPuller(Puller):
    """Plain blocking sockets: sends a request, receives each segment where it belongs."""

    def __init__(self, family: socket.AddressFamily, *, huge: bool = False) -> None:
        self._family = family
        self._huge = huge

    def open(self, shape: Shape, works: Sequence[Workload], *, told: Any) -> None:
        self._shape, self._names = shape, [work.name for work in works]
        self._arena = own_memory(shape, huge=self._huge)
        self._sock = socket.socket(self._family)
        self._sock.connect(told if isinstance(told, (str, bytes)) else tuple(told))
        _prompt(self._sock)

    def arena(self, work: Workload) -> Arena:
        return self._arena

    def pull(self, work: Workload, count: int) -> list[float]:
        number = self._names.index(work.name)
        landing = _landing(self._arena, self._shape, work)
        calls = [partial(self._pull, ASK.pack(number, i), views) for i, views in enumerate(landing)]
        return repeat(calls, count, budget=work.budget)

    def _pull(self, request: bytes, views: Views) -> None:
        self._sock.sendall(request)
        for view in views:
            _fill(self._sock, view)

    def close(self) -> None:
        self._sock.close()


class LoopSource(Source):
    """The least that a server on asyncio streams can do: reads a request, writes the segment."""

    def __init__(self, *, huge: bool = False) -> None:
        self._huge = huge
        self._listening = threading.Event()

    def open(self, shape: Shape, works: Sequence[Workload], *, seed: int) -> Any:
        arena = own_memory(shape, huge=self._huge)
        arena.fill(seed)
        self._lent = _lent(arena, shape, works)
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        if not self._listening.wait(10):
            raise TimeoutError("the server did not start")
        return self._address

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

    def pull(self, work: Workload, count: int) -> list[float]:
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


class Crossings:
    """A call over to a loop on another thread and back, without anything done there: a library that runs on a loop of
    its own cannot be faster than this.
    """

    def __init__(self) -> None:
        self._other = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._other.run_forever, daemon=True)
        self._thread.start()

    async def awaiting(self, count: int) -> list[float]:
        loop, clock, seconds = asyncio.get_running_loop(), time.perf_counter, []
        for _ in range(count):
            began = clock()
            back: asyncio.Future[None] = loop.create_future()
            self._other.call_soon_threadsafe(loop.call_soon_threadsafe, back.set_result, None)
            await back
            seconds.append(clock() - began)
        return seconds

    def blocking(self, count: int) -> list[float]:
        clock, seconds = time.perf_counter, []
        for _ in range(count):
            began = clock()
            back = threading.Event()
            self._other.call_soon_threadsafe(back.set)
            back.wait()
            seconds.append(clock() - began)
        return seconds

    def close(self) -> None:
        self._other.call_soon_threadsafe(self._other.stop)
        self._thread.join()
        self._other.close()


def crossings(count: int) -> dict[str, list[float]]:
    """The seconds of each of `count` crossings there and back, awaiting and blocking."""
    crossing = Crossings()
    asyncio.run(crossing.awaiting(count // 10))
    crossing.blocking(count // 10)
    found = {"awaiting": asyncio.run(crossing.awaiting(count)), "blocking": crossing.blocking(count)}
    crossing.close()
    return found
