"""Making the two connections of a link and agreeing on its data path, as the side that dials. It must not know how a
link lives on.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

from kvpull_async._deadline import Deadline
from kvpull_async.lane import Lane
from kvpull_async.linkage import Connection, LinkContext, Route, text
from kvpull_async.protocol.session import Peer
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import Address, ControlChannel, PathKind

__all__ = ["acknowledged", "dial"]

T = TypeVar("T")
_MEETING: Final = 1.0
"""Seconds that one kind of path may take before the next one is tried."""
_CANDIDATE: Final = 1.0
"""Seconds that a peer may take at one of several addresses."""
_CONNECTING: Final = 0.5
"""Seconds that the system may take to connect to one of several addresses."""
_LEFT_ALONE: Final = 10.0
"""Seconds that an address is left out after it was silent, as long as there are others."""
_NO_HOST: Final = (errno.EHOSTUNREACH, errno.ENETUNREACH)


async def dial(context: LinkContext, cluster_id: int, address: Address, deadline: Deadline) -> Connection:
    """Connect, greet twice, agree, at the first of the peer's addresses where that works. LLMException, OSError or
    asyncio.TimeoutError; then nothing of it is left.
    """
    if not context.elsewhere:
        return await _dial(context, cluster_id, address, deadline)
    return await _somewhere(context, address, deadline, lambda at, bound: _dial(context, cluster_id, at, bound))


async def acknowledged(context: LinkContext, cluster_id: int, address: Address, deadline: Deadline) -> None:
    """Ask at a meeting whether this side is expected there and linked already. The errors of `dial` when it is not."""

    async def ask(at: Address, bound: Deadline) -> None:
        lanes: list[Lane] = []
        try:
            async with bound.scope():
                route = context.route_to(at)
                await _greet(context, route, lanes, asked=cluster_id, address=at, deadline=bound, paths=())
        except LLMException as error:
            if error.status_code != LLMStatusCode.LLM_ALREADY_LINK:
                raise
        else:
            raise LLMException(f"{text(at)} is no meeting", status_code=LLMStatusCode.LLM_LINK_FAILED)
        finally:
            for lane in lanes:
                lane.abort()

    await _somewhere(context, address, deadline, ask)


async def _somewhere(
    context: LinkContext, first: Address, deadline: Deadline, attempt: Callable[[Address, Deadline], Awaitable[T]]
) -> T:
    """One address after the other. The error is that of the peer that said most, or of the first address."""
    errors: list[LLMException | OSError | asyncio.TimeoutError] = []
    addresses, now = (first, *context.elsewhere), time.monotonic()
    if all(context.silent.get(address, now) > now for address in addresses):
        context.silent.clear()
    for address in addresses:
        if context.silent.get(address, now) > now:
            continue
        try:
            return await attempt(address, deadline.sooner(_CANDIDATE))
        except (LLMException, OSError, asyncio.TimeoutError) as error:
            errors.append(error)
            until = time.monotonic() + _LEFT_ALONE
            if isinstance(error, asyncio.TimeoutError):
                context.silent[address] = until
            elif isinstance(error, OSError) and error.errno in _NO_HOST:
                context.silent.update({other: until for other in addresses if other[0] == address[0]})
            if deadline.expired or getattr(error, "status_code", None) == LLMStatusCode.LLM_ALREADY_LINK:
                raise  # the right peer said this
    raise next((error for error in errors if isinstance(error, LLMException)), errors[0])


async def _connect(context: LinkContext, route: Route, address: Address) -> ControlChannel:
    """Where there are other addresses to try, not for long: one that leads nowhere gives no answer at all."""
    if not context.elsewhere:
        return await route.transport.dial(address)
    try:
        async with Deadline.after_ms(_CONNECTING * 1000).scope():
            return await route.transport.dial(address)
    except asyncio.TimeoutError as error:
        raise OSError(errno.EHOSTUNREACH, "no answer") from error


async def _dial(context: LinkContext, cluster_id: int, address: Address, deadline: Deadline) -> Connection:
    route = context.route_to(address)
    lanes: list[Lane] = []
    kind: PathKind | None = None
    token = b""
    try:
        async with deadline.scope():
            greet = partial(_greet, context, route, lanes, asked=cluster_id, address=address, deadline=deadline)
            peer = await greet(paths=route.names)
            token = peer.token
            if peer.cluster_id != cluster_id:
                raise LLMException(
                    f"{text(address)} is cluster {peer.cluster_id}, not {cluster_id} as asked for",
                    status_code=LLMStatusCode.LLM_LINK_FAILED,
                )
            kind, why = await _agree(route, peer, deadline)
            second = await greet(paths=(kind.name,), token=token)
            if second.process != peer.process:
                raise LLMException(
                    f"{text(address)}: the second connection reached another node than the first",
                    status_code=LLMStatusCode.LLM_LINK_FAILED,
                )
            return context.connected(peer, dict(enumerate(lanes)), kind, why=why, address=address)
    except BaseException:
        for lane in lanes:
            lane.abort()
        if kind is not None:
            kind.forget(token)
        raise


async def _greet(
    context: LinkContext,
    route: Route,
    lanes: list[Lane],
    *,
    asked: int,
    address: Address,
    deadline: Deadline,
    paths: tuple[str, ...],
    token: bytes = b"",
) -> Peer:
    channel = await _connect(context, route, address)
    lane = context.new_lane(channel, dialer=True, paths=paths, asked=asked, lane=len(lanes), token=token)
    lanes.append(lane)
    return await lane.dial(deadline)


async def _agree(route: Route, peer: Peer, deadline: Deadline) -> tuple[PathKind, str]:
    """The first kind of path that works, and why it is not a better one."""
    offers, against = dict(peer.offers), []
    for kind in route.kinds:
        if kind.name not in offers:
            against.append(f"{kind.name}: not offered by the peer")
            continue
        try:
            async with deadline.sooner(_MEETING).scope():
                await kind.meet(peer.token, offers[kind.name])
        except BaseException as error:
            kind.forget(peer.token)
            if deadline.expired or not isinstance(error, (OSError, asyncio.TimeoutError)):
                raise
            against.append(f"{kind.name}: {str(error) or 'no answer in time'}")
            continue
        return kind, "; ".join(against) or kind.why
    raise LLMException(f"no data path works: {'; '.join(against)}", status_code=LLMStatusCode.LLM_LINK_FAILED)
