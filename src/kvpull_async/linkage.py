"""What every link of an engine shares: states, identity, routes, how a lane is made, how a failed connection reads.

It must not know how a link lives.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers
from kvpull_async.config import Settings
from kvpull_async.lane import Lane
from kvpull_async.memory.base import no_memory
from kvpull_async.observe import Counters, Log
from kvpull_async.protocol.frames import Message
from kvpull_async.protocol.session import Identity, Peer, Session
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError, fresh
from kvpull_async.transport.base import Address, ControlChannel, DataPath, PathKind, PathSeed, Transport

__all__ = [
    "Connection", "LinkContext", "LinkState", "Route", "Server", "away", "broken", "connect_error",
    "first", "lost_with", "reconnect_error", "text",
]  # fmt: skip

_BARE: Final = (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EADDRNOTAVAIL)
_NOTICE: Final = 0.5
"""Seconds within which the loss of a whole connection shows, once a part of it has broken."""


class LinkState(enum.Enum):
    NEW = "new"
    CONNECTING = "connecting"
    READY = "ready"
    POISONED = "poisoned"
    CLOSED = "closed"


class Server(Protocol):
    """What answers the peer's requests on one lane."""

    def receive(self, message: Message, tail: bytes) -> None: ...

    def abort(self) -> None: ...


@dataclass(frozen=True)
class Route:
    """A way to reach peers: the transport of the control connections, and the kinds of data path that go with it, best
    first.
    """

    transport: Transport
    kinds: tuple[PathKind, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(kind.name for kind in self.kinds)


@dataclass(frozen=True)
class Connection:
    """What a link is made of once it has been greeted: its lanes by number, the paths beside them, and why these."""

    peer: Peer
    lanes: dict[int, Lane]
    paths: dict[int, DataPath]
    why: str

    def abort(self) -> None:
        for lane in self.lanes.values():
            lane.abort()
        for path in self.paths.values():
            path.abort()


@dataclass(frozen=True)
class LinkContext:
    """What every link of an engine shares."""

    identity: Identity
    settings: Settings
    log: Log
    counters: Counters
    workers: Workers
    routes: Iterable[Route]
    """Best first; none as long as the engine is not open."""
    serve: Callable[[Lane, DataPath, Peer, Callable[[bool], None]], Server]
    gone: Callable[[Any], None]
    elsewhere: tuple[Address, ...] = ()
    """Further addresses at which the peer of a link may be found: whoever dials tries them in turn."""
    silent: dict[Address, float] = field(default_factory=dict)
    """Those of them at which nobody answered, and until when they are left alone (`time.monotonic()`)."""

    def meeting(self, group: str, addresses: Sequence[Address]) -> LinkContext:
        """For a link to a peer that is to be met in a group, at the first of the addresses or at another of them."""
        identity = replace(self.identity, group=group)
        return replace(self, identity=identity, elsewhere=tuple(addresses[1:]), silent={})

    def route_to(self, address: Address) -> Route:
        """The best route that reaches the address."""
        for route in self.routes:
            if route.transport.reaches(address):
                return route
        names = ", ".join(route.transport.name for route in self.routes)
        raise LLMException(f"{text(address)} is out of reach of {names}", status_code=LLMStatusCode.LLM_LINK_FAILED)

    def connected(
        self, peer: Peer, lanes: dict[int, Lane], kind: PathKind, *, why: str, address: Address | None
    ) -> Connection:
        """A link's connection, once both lanes have been greeted. OSError when the path cannot be had after all."""
        paths: dict[int, DataPath] = {}
        try:
            for number, lane in lanes.items():
                seed = PathSeed(
                    peer.token, number, address is not None, address, self.workers, lane.abort, peer.cluster_id
                )
                paths[number] = kind.path(seed)
        except BaseException:
            for path in paths.values():
                path.abort()
            raise
        return Connection(peer, lanes, paths, why)

    def new_lane(
        self,
        channel: ControlChannel,
        *,
        dialer: bool,
        paths: tuple[str, ...] = (),
        asked: int = 0,
        lane: int,
        token: bytes,
    ) -> Lane:
        return Lane(
            channel,
            Session(replace(self.identity, paths=paths), dialer=dialer, asked=asked, lane=lane, token=token),
            log=self.log,
            heartbeat=self.settings.heartbeat_interval_ms / 1000,
            silence=self.settings.heartbeat_timeout_ms / 1000,
        )


def connect_error(error: BaseException, where: str) -> LLMException:
    """Why a connection could not be made, with the status that says whether waiting or looking helps."""
    if isinstance(error, LLMException):
        return error
    if isinstance(error, asyncio.TimeoutError):
        return LLMTimeoutError(f"{where} did not answer in time", retry_safe=True)
    number = getattr(error, "errno", None)
    why = os.strerror(number) if number in _BARE else error  # asyncio leaves out the system's words
    known = LLMException(f"{where}: {why}", status_code=LLMStatusCode.LLM_LINK_FAILED, retry_safe=True)
    known.__cause__ = error
    return known


def reconnect_error(error: BaseException, where: str) -> LLMException:
    """The same for a link that was there. A peer that is silent is away like any other: no deadline of a caller has
    passed, and nothing was asked.
    """
    known = connect_error(error, where)
    if isinstance(known, LLMTimeoutError):
        return LLMException(*known.args, status_code=LLMStatusCode.LLM_LINK_FAILED, retry_safe=True)
    known.retry_safe = True
    return known


def away(reason: str) -> LLMException:
    """That a peer is not there, or not the one that it was."""
    return LLMException(reason, status_code=LLMStatusCode.LLM_LINK_FAILED, retry_safe=True)


def broken(error: OSError, lane: Lane | None, peer: str, *, push: bool = False) -> LLMException:
    """Why a transfer from the peer, or a push to it, broke: for want of memory here, or with its connection if that is
    lost.
    """
    unreachable = no_memory(error, "source" if push else "destination", reading=push)
    if unreachable is not None:
        return unreachable
    if lane is not None and lane.lost.done():
        return fresh(lane.lost.result())
    reason = f"the transfer {'to' if push else 'from'} {peer} broke: {error}"
    return LLMException(reason, status_code=LLMStatusCode.LLM_LINK_FAILED, retry_safe=True)


async def lost_with(lane: Lane, deadline: Deadline) -> bool:
    """After a part of a connection has broken: whether all of it is lost, which shows before long. Then its link knows
    it, too, and can be asked for a new one.
    """
    if not lane.lost.done():
        await asyncio.wait([lane.lost], timeout=deadline.sooner(_NOTICE).remaining)
    if not lane.lost.done():
        return False
    await asyncio.sleep(0)  # the link hears of it now
    return True


async def first(
    one: asyncio.Future[None], other: asyncio.Future[LLMException], *, timeout: float | None = None
) -> None:
    """Wait until either is done, or the timeout (s) is over."""
    both: list[asyncio.Future[Any]] = [one, other]
    await asyncio.wait(both, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)


def text(address: Address | None) -> str:
    return "a peer that dialled this side" if address is None else f"{address[0]}:{address[1]}"
