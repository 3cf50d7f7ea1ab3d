"""What a transport is to the rest: a control channel, a listener, and a data path. It must not know caches or links.

A *control channel* carries the bytes of frames, nothing else. A *data path* moves the bytes of one granted pull at a
time. The path of a link is made anew for each connection of that link, on both sides, by the same transport.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers
from kvpull_async.memory.base import Batches, Span

__all__ = ["Address", "ControlChannel", "DataPath", "Listener", "PathSeed", "Transfer", "Transport", "moved"]

Address = tuple[str, int]


class ControlChannel(ABC):
    """A reliable, ordered stream of bytes to one peer. Used by one event loop."""

    peer: str
    """The other end, for messages to people."""

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Wait until the peer has kept up with earlier frames, then hand over all of `data`, maybe empty, at once.

        OSError when the connection is broken. A send that is cancelled while it waits has handed over nothing, so
        the stream never stops in the middle of a frame.
        """

    @abstractmethod
    def post(self, data: bytes) -> None:
        """Hand over a small frame without waiting; for cancellations and heartbeats. Silent on a broken connection,
        since `receive` reports it.
        """

    @abstractmethod
    async def receive(self) -> bytes:
        """Some bytes, or b"" after the peer's end of stream. OSError when the connection is broken."""

    @abstractmethod
    def abort(self) -> None:
        """Break the connection now. Never waits, never raises, may be called twice."""


class Transfer(Protocol):
    """Bytes on their way. Both futures belong to the core's loop."""

    @property
    def done(self) -> asyncio.Future[int]:
        """The bytes moved, or why they were not; cancelled when it was aborted."""

    @property
    def settled(self) -> asyncio.Future[None]:
        """Ends when nothing of this transfer touches memory any more, and nothing will."""

    def abort(self) -> bool:
        """Stop soon; False when the engine below cannot, and then only `settled` tells. Never waits or raises."""


async def moved(transfer: Transfer) -> int:
    """Wait for the bytes it moves. Cancelling the wait leaves the transfer alone, and a transfer that something else
    aborted is an OSError, not a cancellation of whoever waits.
    """
    await asyncio.wait([transfer.done])
    if transfer.done.cancelled():
        raise ConnectionAbortedError("the transfer was aborted")
    return transfer.done.result()


class DataPath(ABC):
    """Moves payload between the two ends of one link in one direction (the lane's)."""

    name: str
    one_sided: bool = False
    """True when the puller reads the source's memory by itself once it holds a grant: the source keeps the memory
    pinned until the puller's DONE or the end of the lease. False when the source sends and knows when it has sent."""

    @abstractmethod
    async def ready(self, deadline: Deadline) -> None:
        """Make sure that payload can move, before a request is sent (puller) or a grant is given (source)."""

    @abstractmethod
    def fetch(self, grant_id: bytes, landing: Batches, nbytes: int) -> Transfer:
        """Puller: fill `landing` with the `nbytes` of the grant. Starts at once."""

    @abstractmethod
    def serve(self, grant_id: bytes, lending: Batches, nbytes: int) -> Transfer:
        """Source: make the grant's bytes reach the puller. A one-sided path is done when the grant may be read."""

    def describe(self, grant_id: bytes, span: Span) -> bytes:
        """Source, before `serve`: what the puller's half needs to read `span` by itself, at most 4 KiB; it rides on the
        grant. Names and offsets, never addresses that the peer could choose. Paths that send have nothing to say.
        """
        return b""

    def expect(self, grant_id: bytes, ticket: bytes, span: Span) -> None:
        """Puller, before `fetch`: the source's ticket, and the destination for paths that write to it by themselves."""

    def give_up(self) -> None:
        """Puller: a request was given up before its grant came, and the source may have sent bytes for it already: they
        must not get in the way of the next grant's. Never waits, never raises.
        """

    def release(self, grant_id: bytes) -> None:
        """Source: the grant is over. Only one-sided paths have something to forget."""

    @abstractmethod
    def abort(self) -> None:
        """Break the path. Never waits, never raises, may be called twice."""

    @abstractmethod
    async def aclose(self, deadline: Deadline) -> None:
        """Abort and wait, bounded, until no thread of the path is left."""


@dataclass(frozen=True)
class PathSeed:
    """What both ends of a link need to build their halves of a path: `token` is known to these two only."""

    token: bytes = field(repr=False)
    lane: int
    dialer: bool
    address: Address | None
    workers: Workers


class Listener(ABC):
    address: Address
    """Where peers dial: the port is the real one when 0 was asked for."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop accepting and drop connections that have not become links."""


OnChannel = Callable[[ControlChannel], Awaitable[None]]


class Transport(ABC):
    """One way to reach a peer. The engine owns one of each kind that it uses."""

    name: str

    @abstractmethod
    async def listen(self, address: Address, on_channel: OnChannel) -> Listener:
        """Accept control channels; each is handed to `on_channel` in a task of its own. OSError when impossible."""

    @abstractmethod
    async def dial(self, address: Address) -> ControlChannel:
        """Connect; the caller bounds the wait. OSError when the peer cannot be reached."""

    @abstractmethod
    def path(self, seed: PathSeed) -> DataPath:
        """This side's half of the data path of a link."""

    def reaches(self, address: Address) -> bool:
        """Whether this transport can be used towards `address`; asked in the order of preference."""
        return True
