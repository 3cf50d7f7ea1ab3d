"""Two engines in one process: finding each other, loops of different threads, and memory that is withdrawn."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers
from kvpull_async.memory.base import Batches
from kvpull_async.observe import Log
from kvpull_async.transport import inproc
from kvpull_async.transport.base import Address, ControlChannel, Listener, PathSeed
from kvpull_async.transport.inproc import InprocTransport
from tests.loop_nodes import event_log, eventually

HOST = "127.0.0.1"
GRANT = b"g" * 16


def soon() -> Deadline:
    return Deadline.after_ms(20_000)


@pytest.fixture
def transport() -> InprocTransport:
    return InprocTransport(Log())


@contextlib.asynccontextmanager
async def listening(
    transport: InprocTransport, address: Address = (HOST, 0)
) -> AsyncIterator[tuple[Listener, list[ControlChannel]]]:
    channels: list[ControlChannel] = []

    async def take(channel: ControlChannel) -> None:
        channels.append(channel)

    listener = await transport.listen(address, take)
    try:
        yield listener, channels
    finally:
        await listener.aclose()
        assert listener.address not in inproc._listeners


# --- finding each other ---


async def test_a_forked_process_finds_none_of_its_parents_engines(transport: InprocTransport) -> None:
    """It must reach them as any other process does; and a thread of the parent may have held the lock."""
    listener = await transport.listen((HOST, 0), _unwanted)
    inproc._lock.acquire()
    inproc._forget_parent()
    assert not transport.reaches(listener.address)
    await listener.aclose()


async def test_a_peer_accepted_just_before_the_listener_closes_is_told(transport: InprocTransport) -> None:
    async def take(channel: ControlChannel) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            channel.abort()

    listener = await transport.listen((HOST, 0), take)
    channel = await transport.dial(listener.address)
    asyncio.get_running_loop().call_soon(asyncio.ensure_future, listener.aclose())  # right behind the accept
    assert await asyncio.wait_for(channel.receive(), 20) == b""


async def _unwanted(channel: ControlChannel) -> None:
    raise AssertionError("nobody dials here")


async def test_p7_a_fetch_that_cannot_begin_leaves_the_source_free() -> None:
    workers = Workers(1)
    workers.close(0)
    source, puller = (
        inproc.InprocPath(PathSeed(b"t" * 16, 0, dialer, None, workers), None) for dialer in (False, True)
    )
    offer = source.serve(GRANT, _nothing(), 0)
    with pytest.raises(RuntimeError, match="shut down"):
        puller.fetch(GRANT, _nothing(), 0)
    source.release(GRANT)
    await asyncio.wait_for(offer.settled, 20)


def _nothing() -> Batches:
    yield from ()


async def test_a_free_port_is_given_and_found(transport: InprocTransport) -> None:
    async with listening(transport) as (one, _), listening(transport) as (two, channels):
        assert one.address != two.address
        assert transport.reaches(two.address)
        channel = await transport.dial(two.address)
        await eventually(lambda: len(channels) == 1)
        await channel.send(b"hello")
        assert await channels[0].receive() == b"hello"
        channel.abort()
        assert await channels[0].receive() == b""


async def test_a_listener_on_every_address_is_found_by_each(transport: InprocTransport) -> None:
    async with listening(transport, ("0.0.0.0", 0)) as (listener, _):
        port = listener.address[1]
        for host in (HOST, "127.0.0.2", "0.0.0.0"):
            assert transport.reaches((host, port))
        assert not transport.reaches((HOST, port + 1))


async def test_a_listener_that_has_closed_is_reached_by_nobody(transport: InprocTransport) -> None:
    async with listening(transport) as (listener, _):
        address = listener.address
    assert not transport.reaches(address)
    with pytest.raises(ConnectionRefusedError):
        await transport.dial(address)
    async with listening(transport, address) as (again, _):
        assert again.address == address


async def test_a_dial_that_arrives_after_the_listener_closed_is_hung_up(transport: InprocTransport) -> None:
    async with listening(transport) as (listener, channels):
        channel = await transport.dial(listener.address)
        await listener.aclose()  # before its loop had a turn to accept
        assert await channel.receive() == b""
        assert channels == []


async def test_a_failure_of_who_takes_the_channel_is_logged(transport: InprocTransport) -> None:
    async def fail(channel: ControlChannel) -> None:
        channel.abort()
        raise ZeroDivisionError("a bug")

    with event_log() as events:
        listener = await transport.listen((HOST, 0), fail)
        channel = await transport.dial(listener.address)
        assert await channel.receive() == b""
        await events.first("link.accept_failed", text="ZeroDivisionError('a bug')")
        await listener.aclose()


async def test_closing_the_listener_ends_who_is_being_greeted(transport: InprocTransport) -> None:
    greeting, ended = asyncio.Event(), asyncio.Event()

    async def greet(channel: ControlChannel) -> None:
        try:
            greeting.set()
            await channel.receive()
        finally:
            channel.abort()
            ended.set()

    listener = await transport.listen((HOST, 0), greet)
    channel = await transport.dial(listener.address)
    await greeting.wait()
    await listener.aclose()
    assert ended.is_set()
    assert await channel.receive() == b""


# --- channels ---


async def test_an_empty_send_is_not_the_end_of_the_stream(transport: InprocTransport) -> None:
    async with listening(transport) as (listener, channels):
        channel = await transport.dial(listener.address)
        await eventually(lambda: len(channels) == 1)
        channel.post(b"")
        await channel.send(b"")
        await channel.send(b"hello")
        assert await channels[0].receive() == b"hello"
        channel.abort()


async def test_send_waits_for_the_reader(transport: InprocTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inproc, "_BUFFER", 10)
    async with listening(transport) as (listener, channels):
        channel = await transport.dial(listener.address)
        await eventually(lambda: len(channels) == 1)
        await channel.send(b"x" * 11)
        waiting = asyncio.create_task(channel.send(b"y"))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        assert "unread=11" in repr(channel)
        assert await channels[0].receive() == b"x" * 11
        await waiting
        await channel.send(b"z" * 11)
        stuck = asyncio.create_task(channel.send(b"!"))
        await asyncio.sleep(0)
        channels[0].abort()
        with pytest.raises(ConnectionResetError):
            await stuck
        channel.post(b"into the void")


async def test_frames_cross_between_the_loops_of_two_threads(transport: InprocTransport) -> None:
    ready, over = threading.Event(), threading.Event()
    address: list[Address] = []

    async def echo(channel: ControlChannel) -> None:
        while data := await channel.receive():
            await channel.send(data.upper())

    async def other_loop() -> None:
        listener = await transport.listen((HOST, 0), echo)
        address.append(listener.address)
        ready.set()
        await asyncio.to_thread(over.wait, 30)
        await listener.aclose()

    thread = threading.Thread(target=asyncio.run, args=(other_loop(),))
    thread.start()
    try:
        assert ready.wait(20)
        channel = await transport.dial(address[0])
        for word in (b"one", b"two", b"three"):
            await channel.send(word)
            assert await asyncio.wait_for(channel.receive(), 20) == word.upper()
        channel.abort()
        last = await transport.dial(address[0])
    finally:
        over.set()
        await asyncio.to_thread(thread.join, 20)
    last.abort()  # towards a loop that is gone
    last.post(b"nobody hears this")


# --- paths ---


def of(data: bytes) -> Batches:
    yield [memoryview(data)]


def into(buffer: bytearray) -> Batches:
    yield [memoryview(buffer)]


class Paths:
    def __init__(self, transport: InprocTransport) -> None:
        self.workers = Workers(1)
        seed = PathSeed(b"t" * 16, 0, dialer=True, address=(HOST, 1), workers=self.workers)
        self.source, self.puller = transport.path(seed), transport.path(seed)


@pytest.fixture
async def paths(transport: InprocTransport) -> AsyncIterator[Paths]:
    made = Paths(transport)
    yield made
    await made.source.aclose(soon())
    await made.puller.aclose(soon())
    await asyncio.to_thread(made.workers.close, 20)
    assert not inproc._offers


async def test_the_puller_reads_the_sources_memory(paths: Paths) -> None:
    served = paths.source.serve(GRANT, of(b"data"), 4)
    assert served.done.done()  # nothing is left to do for the source
    buffer = bytearray(4)
    assert await paths.puller.fetch(GRANT, into(buffer), 4).done == 4
    assert bytes(buffer) == b"data"
    await served.settled
    paths.source.release(GRANT)


async def test_a_grant_is_read_once(paths: Paths) -> None:
    paths.source.serve(GRANT, of(b"data"), 4)
    await paths.puller.fetch(GRANT, into(bytearray(4)), 4).done
    await asyncio.sleep(0)
    with pytest.raises(ConnectionAbortedError, match="withdrawn"):
        paths.puller.fetch(GRANT, into(bytearray(4)), 4)


@pytest.mark.parametrize("how", ["never granted", "released", "aborted", "the path is over"])
async def test_p7_what_the_source_has_withdrawn_cannot_be_read(paths: Paths, how: str) -> None:
    if how != "never granted":
        served = paths.source.serve(GRANT, of(b"data"), 4)
        end = {
            "released": lambda: paths.source.release(GRANT),
            "aborted": served.abort,
            "the path is over": paths.source.abort,
        }[how]
        end()
        assert served.settled.done()
    with pytest.raises(ConnectionAbortedError, match="withdrawn"):
        paths.puller.fetch(GRANT, into(bytearray(4)), 4)


async def test_p7_a_reader_is_cut_and_only_then_is_the_source_settled(paths: Paths) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(data: bytes) -> Batches:
        yield [memoryview(data)[:2]]
        inside.set()
        go_on.wait(20)
        yield [memoryview(data)[2:]]

    def piecewise(buffer: bytearray) -> Batches:
        yield [memoryview(buffer)[:2]]
        yield [memoryview(buffer)[2:]]

    served = paths.source.serve(GRANT, slow(b"data"), 4)
    buffer = bytearray(4)
    fetched = paths.puller.fetch(GRANT, piecewise(buffer), 4)
    assert await asyncio.to_thread(inside.wait, 20)
    paths.source.release(GRANT)
    await asyncio.sleep(0.01)
    assert not served.settled.done()
    assert "reading=1" in repr(paths.puller)
    go_on.set()
    with pytest.raises(ConnectionAbortedError, match="withdrawn"):
        await fetched.done
    await served.settled
