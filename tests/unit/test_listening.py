"""Listeners on every route of an engine: one port for all, or none."""

from __future__ import annotations

import socket

import pytest

from kvpull_async.linkage import Route
from kvpull_async.listening import close_all, listen
from kvpull_async.observe import Log
from kvpull_async.transport.base import ControlChannel, OnChannel
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
