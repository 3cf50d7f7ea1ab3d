"""What a transport is to the rest: a control channel, a listener, and a data path. It must not know caches or links.

A *control channel* carries the bytes of frames, nothing else. A *data path* moves the bytes of one granted pull at a
time. The kind of path is agreed on for each connection of a link: the side that was dialled makes an offer for each
kind that both can use, the side that dialled takes the first that works. Both then build their halves.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers
from kvpull_async.memory.base import Batches, Span, Until
from kvpull_async.status import LLMException
from kvpull_async.transport.arrivals import Arrivals, Arrived, Ended

__all__ = [
    "Address",
    "ControlChannel",
    "DataPath",
    "Listener",
    "PathKind",
    "PathSeed",
    "Segments",
    "Standing",
    "Transfer",
    "Transport",
    "break_off",
    "moved",
]

Address = tuple[str, int]
Segments = NDArray[np.int64]
"""Rows of tensor, byte offset, length, in stream order."""


class ControlChannel(ABC):
    """A reliable, ordered stream of bytes to one peer. Used by one event loop."""

    peer: str
    """The other end, for messages to people."""
    arrivals: Arrivals
    """Where the channel puts what comes, and then the end."""
    waited: float = 0.0
    """Seconds that the peer took before it could be greeted: they are part of the time that it has for that."""
    unfit: str = ""
    """Why nobody is to be greeted on it: the peer is told this, and nothing more."""

    def speaks_for(self, cluster_id: int) -> bool:
        """Whether the other end may be that cluster, as far as the channel itself can tell."""
        return True

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """Wait until the peer has kept up with earlier frames, then hand over all of `data`, maybe empty, at once.

        OSError when the connection is broken. A send that is cancelled while it waits has handed over nothing, so
        the stream never stops in the middle of a frame.
        """

    @abstractmethod
    def post(self, data: bytes) -> None:
        """Hand over a frame without waiting: a small one, or when `ready` says so. Silent on a broken connection, since
        its end is reported on the other way.
        """

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether `send` would neither wait nor fail now."""

    @abstractmethod
    def abort(self) -> None:
        """Break the connection now. Never waits, never raises, may be called twice."""

    async def receive(self) -> bytes:
        """Some bytes, or b"" after the peer's end of stream. OSError when the connection is broken."""
        return await self.arrivals.receive()

    def deliver(self, arrived: Arrived, ended: Ended) -> None:
        """From now on bytes come by `arrived`, valid during the call only, and then once `ended`, with None for the
        peer's end of stream. Both are called on the loop, the first in its next turn at the earliest.
        """
        self.arrivals.deliver(arrived, ended)

    def pause(self) -> None:
        """Call back no more until `resume`; before long the peer has to wait, too."""
        self.arrivals.pause()

    def resume(self) -> None:
        """Not from within a callback."""
        self.arrivals.resume()


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


def break_off(transfer: Transfer | None, until: Until | None) -> None:
    """End the transfer soon, whose pieces were made with `until`. Never waits. In this order: another engine that reads
    the memory, and is stopped, has to find that it was withdrawn.
    """
    if transfer is not None:
        transfer.abort()
    if until is not None:
        until.stop()


async def moved(transfer: Transfer) -> int:
    """Wait for the bytes it moves. Cancelling the wait leaves the transfer alone, and a transfer that something else
    aborted is an OSError, not a cancellation of whoever waits.
    """
    await asyncio.wait([transfer.done])
    if transfer.done.cancelled():
        raise ConnectionAbortedError("the transfer was aborted")
    try:
        return transfer.done.result()  # forgets the thread that moved them, as `exception` does not
    except LLMException as error:
        raise error.with_traceback(None)  # noqa: B904  (who keeps the thread's would keep the memory)


class Standing(Protocol):
    """A cache of the peer that may be read again without asking, as long as the peer has it. Used from any thread."""

    @property
    def tensors(self) -> int: ...

    @property
    def tensor_nbytes(self) -> int: ...

    @property
    def valid(self) -> bool:
        """Whether the peer has it still, as far as this side knows."""
        ...

    def read(self, first: int, start: int, destinations: Sequence[int], nbytes: int) -> bool:
        """Copy `nbytes` from byte `start` on of the tensors from `first` on, one to each address. False when the peer
        has taken the memory away meanwhile: then what was copied counts for nothing. ValueError outside the memory,
        OSError when it cannot be read.
        """
        ...


class DataPath(ABC):
    """Moves payload between the two ends of one link, for one lane's requests: to the side that asks, or from it if it
    pushes. Then the pushing side is the source, and the receiver does what a puller does.
    """

    name: str
    prepared: bool = True
    """Whether a push may `serve` before the receiver has made sure that payload can move."""
    opens: bool = False
    """Whether the puller may read memory without asking once it has been granted: `standing`."""

    @abstractmethod
    async def ready(self, deadline: Deadline) -> None:
        """Make sure that payload can move, before a request is sent (puller) or a grant is given (source)."""

    @abstractmethod
    def fetch(self, grant_id: bytes, landing: Batches, nbytes: int) -> Transfer:
        """Puller: fill `landing` with the `nbytes` of the grant. Starts at once."""

    @abstractmethod
    def serve(self, grant_id: bytes, lending: Batches, nbytes: int) -> Transfer:
        """Source: make the grant's bytes reach the puller. With a ticket it is done when they may be read."""

    def describe(self, grant_id: bytes, span: Span) -> bytes | None:
        """Source, before `serve`: the ticket, at most 4 KiB, with which the puller's half reads `span` by itself. It
        rides on the grant, and the memory then stays pinned until the puller's DONE or the end of the lease. None when
        the source sends the bytes, and so knows when it has.
        """
        return None

    def expect(self, grant_id: bytes, ticket: bytes | None, reading: Callable[[], Segments], span: Span) -> None:
        """Puller, before `fetch`: the source's ticket, which rows of the source's cache it asked for, and the
        destination, for paths that read and write by themselves. Both tables may take long: off the loop.
        """

    def standing(self, ticket: bytes) -> Standing | None:
        """Puller: the memory behind a ticket, if it may be read without asking from now on."""
        return None

    def unproven(self, ticket: bytes) -> bool:
        """Puller: whether bytes read with this ticket count only once the source has said that it held them still."""
        return False

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


def _nobody(reason: str) -> None:
    """Nobody is to be told."""


@dataclass(frozen=True)
class PathSeed:
    """What both ends of a link need to build their halves of a path: `token` is known to these two only."""

    token: bytes = field(repr=False)
    lane: int
    dialer: bool
    address: Address | None
    workers: Workers
    lost: Callable[[str], object] = field(default=_nobody, repr=False)
    """To be called when the path has broken for good, with the reason: the link then makes a new one."""
    cluster_id: int | None = None
    """The peer's, where certificates are to be compared with it."""


class Listener(ABC):
    address: Address
    """Where peers dial: the port is the real one when 0 was asked for."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop accepting and drop connections that have not become links."""


class PathKind(ABC):
    """One way to move payload. The engine owns one of each kind that it uses.

    A link is agreed on in this order: `offer` on the side that was dialled, `meet` on the other, `path` for each lane
    on both; or `forget` on both, when the link comes to nothing.
    """

    name: str
    why: str = "the only path to this address"
    """What speaks for this kind once it has been agreed on, for the log."""

    def offer(self, token: bytes) -> bytes:
        """What the dialling side of the link `token` needs for this kind, at most 512 bytes. OSError: not possible."""
        return b""

    async def meet(self, token: bytes, offer: bytes) -> None:
        """Dialling side: try it. OSError with the reason when this kind cannot be used; the caller bounds the wait."""

    @abstractmethod
    def path(self, seed: PathSeed) -> DataPath:
        """This side's half of one lane's path. OSError when the other side has not met this one."""

    def forget(self, token: bytes) -> None:
        """The link `token` came to nothing."""

    def close_after_fork(self) -> None:
        """In a forked child: close this process's copies of what is open, without a word to any peer."""

    async def aclose(self, deadline: Deadline) -> None:
        """The engine ends: leave nothing, within the deadline."""


OnChannel = Callable[[ControlChannel], Awaitable[None]]


class Transport(ABC):
    """One way to reach a peer with control channels. The engine owns one of each."""

    name: str

    @abstractmethod
    async def listen(self, address: Address, on_channel: OnChannel) -> Listener:
        """Accept control channels; each is handed to `on_channel` in a task of its own. OSError when impossible."""

    @abstractmethod
    async def dial(self, address: Address) -> ControlChannel:
        """Connect; the caller bounds the wait. OSError when the peer cannot be reached."""

    def reaches(self, address: Address) -> bool:
        """Whether this transport can be used towards `address`; asked in the order of preference."""
        return True

    def close_after_fork(self) -> None:
        """In a forked child: close this process's copies of what is open, without a word to any peer."""
