"""Links of which the first connection has been greeted and the second has not come yet. It must not know links."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Final

from kvpull_async.lane import Lane
from kvpull_async.linkage import Connection, LinkContext, Route
from kvpull_async.protocol.session import Peer
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import PathKind

__all__ = ["Halves", "Refusal"]

Refusal = tuple[LLMStatusCode, str]
_MOST: Final = 128


@dataclass
class _Half:
    peer: Peer
    lane: Lane
    kinds: tuple[PathKind, ...]
    """Those that have been offered."""


class Halves:
    """By token. What is not completed within the handshake timeout is dropped."""

    def __init__(self, context: LinkContext) -> None:
        self._context = context
        self._halves: dict[bytes, _Half] = {}

    def __len__(self) -> int:
        return len(self._halves)

    def begin(self, peer: Peer, lane: Lane, route: Route) -> Refusal | None:
        """Welcome the first connection, with an offer for each kind of data path that both sides can use."""
        token = secrets.token_bytes(16)
        kinds, offers = [], []
        for kind in route.kinds:
            if kind.name in peer.paths:
                try:
                    offers.append((kind.name, kind.offer(token)))
                    kinds.append(kind)
                except OSError as error:
                    self._context.log.info("link.path_not_offered", path=kind.name, reason=str(error))
        if not kinds:
            ours, theirs = (", ".join(names) or "none" for names in (route.names, peer.paths))
            both = f"the accepting side has {ours}, the dialling side {theirs}"
            return LLMStatusCode.LLM_LINK_FAILED, f"no data path in common: {both} (transfer_backend)"
        if len(self._halves) >= _MOST:  # the oldest goes: an honest peer is through in milliseconds
            self.drop(next(iter(self._halves)), f"over {_MOST} links without their second connection")
        self._halves[token] = _Half(lane.welcome(token=token, offers=offers), lane, tuple(kinds))
        timeout = self._context.settings.handshake_timeout_ms / 1000
        asyncio.get_running_loop().call_later(timeout, self.drop, token, "its second connection did not come")
        return None

    def refusal(self, peer: Peer) -> Refusal | None:
        """Why the second connection of a peer cannot be one; None when its first is here."""
        half = self._halves.get(peer.token)
        if half is None or half.peer.process != peer.process:
            return LLMStatusCode.LLM_LINK_FAILED, "the second connection of a link that does not exist"
        return None

    def complete(self, peer: Peer, lane: Lane) -> Connection | Refusal:
        """Welcome the second connection, which names the kind of path on which the two have met."""
        half = self._halves[peer.token]
        kind = next((kind for kind in half.kinds if (kind.name,) == peer.paths), None)
        if kind is None:
            return LLMStatusCode.LLM_LINK_FAILED, f"the data path {' '.join(peer.paths)} was not offered"
        try:
            connection = self._context.connected(
                half.peer, {0: half.lane, 1: lane}, kind, why="the peer's choice", address=None
            )
        except OSError as error:
            return LLMStatusCode.LLM_LINK_FAILED, f"{kind.name}: {error}"
        try:
            lane.welcome(token=peer.token)
        except LLMException:
            for path in connection.paths.values():
                path.abort()
            raise
        del self._halves[peer.token]
        for other in half.kinds:
            if other is not kind:
                other.forget(peer.token)
        return connection

    def drop(self, token: bytes, reason: str, *, of: Peer | None = None) -> None:
        """Give one up; with `of`, only if it belongs to that peer."""
        half = self._halves.get(token)
        if half is None or (of is not None and half.peer.process != of.process):
            return
        del self._halves[token]
        self._context.log.warning("link.rejected", peer=half.lane.channel.peer, reason=reason)
        half.lane.abort(reason)
        for kind in half.kinds:
            kind.forget(token)

    def drop_all(self, reason: str) -> None:
        for token in list(self._halves):
            self.drop(token, reason)
