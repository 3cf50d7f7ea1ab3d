"""Payload connections while nothing passes: kept alive, and after the end of their link no news any more."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers
from kvpull_async.observe import Log
from kvpull_async.transport.base import Address, PathSeed
from kvpull_async.transport.tcp import TcpTransport
from tests.loop_nodes import event_log

TOKEN = b"t" * 16


@contextlib.asynccontextmanager
async def two() -> AsyncIterator[tuple[TcpTransport, TcpTransport, Address]]:
    here, there = (TcpTransport(Log(), greeting_timeout=5) for _ in range(2))
    listener = await here.listen(("127.0.0.1", 0), lambda _: asyncio.sleep(0))
    try:
        yield here, there, listener.address
    finally:
        await listener.aclose()


async def test_the_system_looks_after_idle_payload_connections_of_both_sides() -> None:
    """What lies between the hosts forgets a connection that says nothing; heartbeats pass on other ones."""
    async with two() as (here, there, address):
        accepted = here.path(PathSeed(TOKEN, 0, dialer=False, address=None, workers=Workers(1)))
        dialled = there.path(PathSeed(TOKEN, 0, dialer=True, address=address, workers=Workers(1)))
        try:
            await dialled.ready(Deadline.after_ms(5000))
            for path in (dialled, accepted):
                sock = path._payload._sock  # type: ignore[attr-defined]
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                idle, between, count = (
                    sock.getsockopt(socket.IPPROTO_TCP, name)
                    for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                )
                assert idle + between * count <= 30
        finally:
            await dialled.aclose(Deadline.after_ms(5000))
            await accepted.aclose(Deadline.after_ms(5000))


@pytest.mark.parametrize(("ended", "level"), [(True, "DEBUG"), (False, "WARNING")])
async def test_a_payload_connection_that_comes_after_the_end_of_its_link_is_no_warning(
    caplog: pytest.LogCaptureFixture, ended: bool, level: str
) -> None:
    """The side that dials may hear later that the link was cut; `link.lost` has told that already."""
    with event_log() as events:
        async with two() as (here, there, address):
            accepted = here.path(PathSeed(TOKEN, 0, dialer=False, address=None, workers=Workers(1)))
            if ended:
                accepted.abort()
            dialled = there.path(PathSeed(TOKEN if ended else bytes(16), 0, True, address, Workers(1)))
            with pytest.raises(OSError, match="did not take the payload connection"):
                await dialled.ready(Deadline.after_ms(5000))
            words = "for a link that has ended" if ended else "for a link that does not exist"
            await events.first("link.rejected", text=words)
            (record,) = (one for one in caplog.records if words in one.getMessage())
            assert record.levelname == level
            dialled.abort()
            accepted.abort()
