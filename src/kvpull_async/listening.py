"""Opening the listeners of one address, on every route that peers may take. It must not know who comes or why."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable

from kvpull_async.linkage import Route
from kvpull_async.transport.base import Address, Listener, OnChannel

__all__ = ["close_all", "is_here", "listen"]


async def listen(routes: Iterable[Route], address: Address, acceptor: Callable[[Route], OnChannel]) -> list[Listener]:
    """Those of all routes, each with the real port in its address. OSError; then, or when it is
    cancelled, none is left open.
    """
    listeners: list[Listener] = []
    try:
        for route in reversed(tuple(routes)):  # tcp first: it says which port was free
            listener = await route.transport.listen(address, acceptor(route))
            listeners.append(listener)
            address = listener.address
    except BaseException:
        await close_all(listeners)
        raise
    return listeners


def is_here(host: str) -> bool:
    """Whether it is an address of this machine, so that listening there is possible at all."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


async def close_all(listeners: Iterable[Listener]) -> None:
    for listener in tuple(listeners):
        await listener.aclose()
