"""One connection through the proxy: what passes is what was sent, and each fault happens exactly where it is to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvpull_async.testing.proxy import Fault, FaultKind, Way
from kvpull_async.testing.proxy_connection import Connection
from tests.unit.testing.proxying import PATIENCE, Rig, both_ways, exactly, planned, rest, silent


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


# --- what passes ---


@both_ways
def test_what_is_sent_arrives_in_its_order_and_so_does_its_end(rig: Rig, way: Way) -> None:
    writer, reader = rig.line().end(way)
    data = os.urandom(3_000_000)

    def write() -> None:
        writer.sendall(data)
        writer.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=write)
    thread.start()
    assert rest(reader) == (data, "end")
    thread.join(PATIENCE)
    reader.sendall(b"still here")
    assert exactly(writer, 10) == b"still here"


def test_a_reset_passes_through_and_a_target_that_is_not_there_is_one(rig: Rig) -> None:
    line = rig.line()
    line.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    line.client.close()
    assert rest(line.server) == (b"", "reset")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        rig.proxy.target = unused.getsockname()
        with contextlib.suppress(ConnectionResetError):  # that soon
            assert rest(rig.dial()) == (b"", "reset")


# --- faults ---


@both_ways
@pytest.mark.parametrize("at", [0, 1, 1000])
@pytest.mark.parametrize(
    ("kind", "ends"), [(FaultKind.CUT, "reset"), (FaultKind.CLOSE, "end"), (FaultKind.HALF_CLOSE, "end")]
)
def test_it_ends_after_exactly_so_many_bytes(way: Way, at: int, kind: FaultKind, ends: str) -> None:
    with planned(*[Fault(kind, way, at)] if at else []) as rig:
        line = rig.line()
        writer, reader = line.end(way)
        if not at:  # (planned, it may happen before there is a line)
            rig.proxy.inflict(Fault(kind, way))
        told = ""
        try:
            writer.sendall(bytes(range(256)) * 8)
        except ConnectionResetError:
            told = "reset"
        assert rest(reader) == ((bytes(range(256)) * 8)[:at], ends)
        if kind is FaultKind.HALF_CLOSE:
            reader.sendall(b"the other way goes on")
            assert exactly(writer, 21) == b"the other way goes on"
        else:
            assert (told or rest(writer)[1]) == ends


@both_ways
def test_a_stall_holds_one_way_and_loses_nothing(rig: Rig, way: Way) -> None:
    line = rig.line()
    writer, reader = line.end(way)
    rig.proxy.stall(way)
    writer.sendall(b"later")
    reader.sendall(b"now")
    assert exactly(writer, 3) == b"now"
    assert silent(reader)
    rig.proxy.resume()
    assert exactly(reader, 5) == b"later"


def test_a_stall_may_end_by_itself(rig: Rig) -> None:
    line = rig.line()
    rig.proxy.inflict(Fault(FaultKind.STALL, Way.THERE, at=2, value=100))
    began = time.monotonic()
    line.client.sendall(b"abcd")
    assert exactly(line.server, 2) == b"ab"
    assert exactly(line.server, 2) == b"cd"
    assert time.monotonic() - began >= 0.1


def test_what_is_swallowed_is_lost_with_its_end_and_nobody_is_told(rig: Rig) -> None:
    line = rig.line()
    line.client.sendall(b"before")
    assert exactly(line.server, 6) == b"before"
    rig.proxy.swallow(Way.THERE)
    line.client.sendall(b"x" * 1_000_000)
    line.server.sendall(b"the other way goes on")
    assert exactly(line.client, 21) == b"the other way goes on"
    line.client.close()
    assert silent(line.server)
    line.server.sendall(b"nobody is there")
    assert silent(line.server)
    assert rig.proxy.passing()[0].open


@both_ways
def test_one_byte_is_corrupted_exactly_there(way: Way) -> None:
    with planned(Fault(FaultKind.CORRUPT, way, 70_000, 0x81)) as rig:
        writer, reader = rig.line().end(way)
        writer.sendall(bytes(80_000))
        data = exactly(reader, 80_000)
        assert [(index, byte) for index, byte in enumerate(data) if byte] == [(70_000, 0x81)]


def test_delays_and_throttles_slow_down_and_lose_nothing(rig: Rig) -> None:
    line = rig.line()
    rig.proxy.inflict(Fault(FaultKind.DELAY, Way.BACK, value=60))
    began = time.monotonic()
    line.server.sendall(b"late")
    assert exactly(line.client, 4) == b"late"
    assert time.monotonic() - began >= 0.06
    rig.proxy.inflict(Fault(FaultKind.THROTTLE, Way.THERE, value=100_000))
    began = time.monotonic()
    line.client.sendall(bytes(20_000))
    assert exactly(line.server, 20_000) == bytes(20_000)
    assert time.monotonic() - began >= 0.15
    rig.proxy.resume()


# --- its task ---


async def test_a_connection_that_is_cut_says_so_to_whoever_waits_for_it() -> None:
    near, far = socket.socketpair()
    said: list[str] = []
    connection = Connection(0, near, said.append)
    running = asyncio.ensure_future(connection.run(None))
    await asyncio.sleep(0)
    connection.cut()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert near.fileno() == -1
    assert any("was ended here" in line for line in said)
    far.close()


@pytest.mark.parametrize("steps", range(12))
def test_a_cut_while_it_ends_by_itself_leaves_no_socket_open(steps: int) -> None:
    async def body() -> tuple[int, int]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            dialled = socket.create_connection(server.getsockname())
            taken, _ = server.accept()
            connection = Connection(0, taken, lambda _: None)
            running = asyncio.create_task(connection.run(server.getsockname()))
            server.settimeout(PATIENCE)
            onward, _ = await asyncio.to_thread(server.accept)
            while connection._target is None or connection._streams[Way.BACK].sink is None:  # noqa: ASYNC110  (it sets no event)
                await asyncio.sleep(0)
            dialled.close()
            onward.close()
            for _ in range(steps):
                await asyncio.sleep(0)
            connection.cut()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            assert connection.closed.is_set()
            return taken.fileno(), connection._target.fileno()

    assert asyncio.run(body()) == (-1, -1)
