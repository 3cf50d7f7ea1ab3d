"""A fault proxy before a server of the test, and both ends of the connections through it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from kvpull_async.testing.proxy import Fault, FaultProxy, Plan, Way

PATIENCE = 10.0


@dataclass
class Line:
    """Both ends of one connection through the proxy."""

    client: socket.socket
    server: socket.socket

    def end(self, way: Way) -> tuple[socket.socket, socket.socket]:
        """Who writes and who reads that way."""
        return (self.client, self.server) if way is Way.THERE else (self.server, self.client)


class Rig:
    """A proxy before a server of this test."""

    def __init__(self, plans: Callable[[int], Plan] | None = None) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(PATIENCE)
        self.proxy = FaultProxy(self._server.getsockname(), plans=plans)
        self._stack = contextlib.ExitStack()

    def dial(self) -> socket.socket:
        client = self._stack.enter_context(socket.create_connection(self.proxy.address, PATIENCE))
        client.settimeout(PATIENCE)
        return client

    def line(self) -> Line:
        client = self.dial()
        server, _ = self._server.accept()
        self._stack.enter_context(server)
        server.settimeout(PATIENCE)
        return Line(client, server)

    def close(self) -> None:
        self._stack.close()
        self.proxy.close()
        self._server.close()


@contextlib.contextmanager
def planned(*faults: Fault) -> Iterator[Rig]:
    made = Rig(lambda _: Plan(faults))
    try:
        yield made
    finally:
        made.close()


def exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes and (more := sock.recv(nbytes - len(data))):
        data += more
    return data


def rest(sock: socket.socket) -> tuple[bytes, str]:
    """All that comes, and how it ends: "end", "reset" or "silence"."""
    data = b""
    while True:
        try:
            more = sock.recv(65536)
        except ConnectionResetError:
            return data, "reset"
        except TimeoutError:
            return data, "silence"
        if not more:
            return data, "end"
        data += more


def silent(sock: socket.socket, seconds: float = 0.1) -> bool:
    sock.settimeout(seconds)
    try:
        return not sock.recv(1)
    except TimeoutError:
        return True
    finally:
        sock.settimeout(PATIENCE)


both_ways = pytest.mark.parametrize("way", list(Way))
