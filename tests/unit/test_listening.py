"""Listeners on every route of an engine: one port for all, or none."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kvpull_async.linkage import Route
from kvpull_async.listening import close_all, is_here, listen
from kvpull_async.observe import Log
from kvpull_async.transport.base import ControlChannel, Listener, OnChannel
from kvpull_async.transport.inproc import InprocTransport
from kvpull_async.transport.tcp import TcpTransport
from tests.loop_nodes import eventually


def routes() -> list[Route]:
    inproc, tcp = InprocTransport(Log()), TcpTransport(Log(), greeting_timeout=3.0)
    return [Route(inproc, (inproc,)), Route(tcp, (tcp,))]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def nobody(route: Route) -> OnChannel:
    async def turn_away(channel: ControlChannel) -> None:
        channel.abort()

    return turn_away


async def test_all_routes_listen_on_the_port_that_was_free() -> None:
    all_of_them, came = routes(), []

    def acceptor(route: Route) -> OnChannel:
        async def accept(channel: ControlChannel) -> None:
            came.append(route)
            channel.abort()

        return accept

    listeners = await listen(all_of_them, ("127.0.0.1", 0), acceptor)
    try:
        (address,) = {listener.address for listener in listeners}
        assert address[1] > 0
        for route in all_of_them:
            (await route.transport.dial(address)).abort()
        await eventually(lambda: len(came) == 2)
        assert {route.transport.name for route in came} == {"inproc", "tcp"}
    finally:
        await close_all(listeners)
    assert not any(route.transport.reaches(address) for route in all_of_them if route.transport.name == "inproc")


async def test_when_one_route_cannot_listen_none_does() -> None:
    port, (inproc, tcp) = free_port(), routes()
    taken = await inproc.transport.listen(("127.0.0.1", port), nobody(inproc))
    try:
        with pytest.raises(OSError, match="listens there"):
            await listen([inproc, tcp], ("127.0.0.1", port), nobody)
        with socket.create_server(("127.0.0.1", port)):
            pass  # the port was given back
    finally:
        await taken.aclose()


async def test_nothing_is_left_open_when_it_is_cancelled() -> None:
    for turns in range(8):
        (inproc, tcp), port = routes(), free_port()
        listening = asyncio.create_task(listen([inproc, tcp], ("127.0.0.1", port), nobody))
        for _ in range(turns):
            await asyncio.sleep(0)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        if not listening.cancelled():
            await close_all(listening.result())
        with socket.create_server(("127.0.0.1", port)):
            pass
        assert not inproc.transport.reaches(("127.0.0.1", port))


async def test_what_is_open_is_closed_when_a_later_route_is_cancelled() -> None:
    (inproc, tcp), port, waiting = routes(), free_port(), asyncio.Event()

    async def never(*_: object) -> Listener:
        waiting.set()
        return await asyncio.get_running_loop().create_future()

    inproc.transport.listen = never  # type: ignore[method-assign]
    listening = asyncio.create_task(listen([inproc, tcp], ("127.0.0.1", port), nobody))
    await waiting.wait()
    listening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await listening
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.parametrize(("host", "here"), [("127.0.0.1", True), ("0.0.0.0", True), ("198.51.100.7", False)])
def test_addresses_of_this_machine_are_told_from_others(host: str, here: bool) -> None:
    assert is_here(host) is here
