"""Opening the listeners of one address, on every route that peers may take. It must not know who comes or why."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvpull_async.linkage import Route
from kvpull_async.transport.base import Address, Listener, OnChannel

__all__ = ["close_all", "listen"]


async def listen(routes: Iterable[Route], address: Address, acceptor: Callable[[Route], OnChannel]) -> list[Listener]:
    """Those of all routes, each with the real port in its address. OSError; then none is left open."""
    listeners: list[Listener] = []
    try:
        for route in reversed(tuple(routes)):  # tcp first: it says which port was free
            listener = await route.transport.listen(address, acceptor(route))
            listeners.append(listener)
            address = listener.address
    except OSError:
        await close_all(listeners)
        raise
    return listeners


async def close_all(listeners: Iterable[Listener]) -> None:
    for listener in tuple(listeners):
        await listener.aclose()
