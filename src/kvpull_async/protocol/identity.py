"""Who the two sides of a connection are, as far as their greeting says. It must not know how they greet."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Identity", "Peer"]


@dataclass(frozen=True)
class Identity:
    """Who this side is: the incarnation is random per `init`, `paths` are the kinds of data path it can use. A dialling
    side names the `group` that it wants to meet.
    """

    cluster_id: int
    incarnation: bytes
    paths: tuple[str, ...] = ()
    secret: bytes | None = field(default=None, repr=False)
    group: str = ""


@dataclass(frozen=True)
class Peer:
    """Who the other side is, as far as the greeting told. `token` names the link. The accepting side learns the `paths`
    that the peer can use and the `group` it wants to meet, the dialling side the `offers` made for these paths.
    """

    cluster_id: int
    incarnation: bytes
    lane: int
    token: bytes = field(default=b"", repr=False)
    paths: tuple[str, ...] = ()
    offers: tuple[tuple[str, bytes], ...] = field(default=(), repr=False)
    group: str = ""
