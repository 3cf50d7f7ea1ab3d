"""What a session tells its owner. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from kvpull_async.protocol.identity import Peer
from kvpull_async.protocol.messages import Message
from kvpull_async.status import LLMStatusCode

__all__ = ["Asked", "Event", "Failed", "Ready", "Received"]


@dataclass(frozen=True)
class Asked:
    """A peer has proven itself and asks for a link: answer with `welcome` or `reject`."""

    peer: Peer


@dataclass(frozen=True)
class Ready:
    peer: Peer


@dataclass(frozen=True)
class Failed:
    """Terminal. `by_peer` is true when the peer refused us, false when the connection itself went wrong."""

    reason: str
    status: LLMStatusCode
    by_peer: bool = False


@dataclass(frozen=True)
class Received:
    message: Message
    tail: bytes | memoryview = b""
    """A grant's payload may be a view of what `receive` was given, and is then valid as long."""


Event = Asked | Ready | Failed | Received
