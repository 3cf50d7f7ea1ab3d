"""Making the two connections of a link and agreeing on its data path, as the side that dials. It must not know how a
link lives on.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kvpull_async._deadline import Deadline
from kvpull_async.lane import Lane
from kvpull_async.linkage import Connection, LinkContext, Route, text
from kvpull_async.protocol.session import Peer
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import Address, PathKind

__all__ = ["dial"]

_MEETING: Final = 1.0
"""Seconds that one kind of path may take before the next one is tried."""


async def dial(context: LinkContext, cluster_id: int, address: Address, deadline: Deadline) -> Connection:
    """Connect, greet twice, agree. LLMException, OSError or asyncio.TimeoutError; then nothing of it is left."""
    route = context.route_to(address)
    lanes: list[Lane] = []
    kind: PathKind | None = None
    token = b""
    try:
        async with deadline.scope():
            peer = await _greet(context, route, lanes, asked=cluster_id, address=address, deadline=deadline)
            token = peer.token
            if peer.cluster_id != cluster_id:
                raise LLMException(
                    f"{text(address)} is cluster {peer.cluster_id}, not {cluster_id} as asked for",
                    status_code=LLMStatusCode.LLM_LINK_FAILED,
                )
            kind, why = await _agree(route, peer, deadline)
            await _greet(
                context, route, lanes, asked=cluster_id, address=address, deadline=deadline, kind=kind, token=token
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
    kind: PathKind | None = None,
    token: bytes = b"",
) -> Peer:
    channel = await route.transport.dial(address)
    paths = route.names if kind is None else (kind.name,)
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
