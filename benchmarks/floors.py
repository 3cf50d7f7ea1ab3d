"""The least that one small message costs: 64 bytes there and back, and a bare call over to another thread's loop.

It must not use the library.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from yardsticks import fill, prompt

__all__ = ["FLOORS", "floors_side", "pong_side"]

NBYTES: Final = 64
MESSAGE: Final = bytes(NBYTES)
CROSSING: Final = "two thread crossings"
FLOORS: Final = (
    "asyncio TCP round trip",
    "asyncio Unix round trip",
    "blocking TCP round trip",
    "blocking Unix round trip",
    f"{CROSSING}, awaited",
    f"{CROSSING}, blocking",
)
"""What `floors_side` measures, in this order."""


def pong_side() -> Mapping[str, Callable[..., Any]]:
    """The answers of the process that sends back what it gets: "open" tells the addresses."""
    return {"open": lambda: [*_pong_blocking(), *_pong_asyncio()]}


def _pong_blocking() -> list[Any]:
    tcp = socket.create_server(("127.0.0.1", 0))
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(f"\0kvpull-pong-{os.getpid()}")
    unix.listen()
    for listener in (tcp, unix):
        threading.Thread(target=_echo, args=(listener,), daemon=True).start()
    return [tcp.getsockname(), unix.getsockname()]


def _echo(listener: socket.socket) -> None:
    with listener, prompt(listener.accept()[0]) as sock:
        message = bytearray(NBYTES)
        while sock.recv_into(message, 0, socket.MSG_WAITALL):
            sock.sendall(message)


def _pong_asyncio() -> list[Any]:
    """Both servers on one loop, on a thread of their own."""
    addresses: list[Any] = []
    ready = threading.Event()

    async def serve() -> None:
        tcp = await asyncio.start_server(_echo_asyncio, "127.0.0.1", 0)
        unix = await asyncio.start_unix_server(_echo_asyncio, f"\0kvpull-pong-asyncio-{os.getpid()}")
        addresses.extend(server.sockets[0].getsockname() for server in (tcp, unix))
        ready.set()
        async with tcp, unix:
            await asyncio.gather(tcp.serve_forever(), unix.serve_forever())

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    if not ready.wait(10):
        raise TimeoutError("the servers did not start")
    return addresses


async def _echo_asyncio(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            writer.write(await reader.readexactly(NBYTES))
    except asyncio.IncompleteReadError:
        writer.close()


def floors_side() -> Mapping[str, Callable[..., Any]]:
    """The answers of the process that measures: "timed" gives seconds by the names of FLOORS."""
    return {"timed": _timed}


def _timed(addresses: list[Any], count: int) -> dict[str, list[float]]:
    found = {}
    tcp, unix, loop_tcp, loop_unix = (told if isinstance(told, (str, bytes)) else tuple(told) for told in addresses)
    for name, address in zip(FLOORS, (loop_tcp, loop_unix), strict=False):
        found[name] = asyncio.run(_ping_asyncio(address, count))
    for name, address in zip(FLOORS[2:], (tcp, unix), strict=False):
        found[name] = _ping_blocking(address, count)
    awaiting, blocking = _crossings(count)
    return {**found, FLOORS[4]: awaiting, FLOORS[5]: blocking}


async def _ping_asyncio(address: Any, count: int) -> list[float]:
    unix = isinstance(address, (str, bytes))
    opening = asyncio.open_unix_connection(address) if unix else asyncio.open_connection(*address)
    reader, writer = await opening
    seconds, clock = [], time.perf_counter
    for _ in range(count + count // 10):
        began = clock()
        writer.write(MESSAGE)
        await reader.readexactly(NBYTES)
        seconds.append(clock() - began)
    writer.close()
    await writer.wait_closed()
    return seconds[count // 10 :]


def _ping_blocking(address: Any, count: int) -> list[float]:
    family = socket.AF_UNIX if isinstance(address, (str, bytes)) else socket.AF_INET
    seconds, clock, answer = [], time.perf_counter, memoryview(bytearray(NBYTES))
    with socket.socket(family) as sock:
        sock.connect(address)
        prompt(sock)
        for _ in range(count + count // 10):
            began = clock()
            sock.sendall(MESSAGE)
            fill(sock, answer)
            seconds.append(clock() - began)
    return seconds[count // 10 :]


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


def _crossings(count: int) -> tuple[list[float], list[float]]:
    """The seconds of each of `count` crossings there and back, awaiting and blocking."""
    crossing = Crossings()
    asyncio.run(crossing.awaiting(count // 10))
    crossing.blocking(count // 10)
    found = asyncio.run(crossing.awaiting(count)), crossing.blocking(count)
    crossing.close()
    return found
