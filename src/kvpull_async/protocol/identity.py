"""Who the two sides of a connection are, as far as their greeting says. It must not know how they greet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Identity", "Peer"]


@dataclass(frozen=True)
class Identity:
    """Who this side is: the incarnation is random per `init`, `paths` are the kinds of data path it can use. A dialling
    side names the `group` that it wants to meet. `secret` is shared with every peer, except those that have one of
    their own in `secrets`, by cluster id.
    """

    cluster_id: int
    incarnation: bytes
    paths: tuple[str, ...] = ()
    secret: bytes | None = field(default=None, repr=False)
    group: str = ""
    secrets: Mapping[int, bytes] = field(default_factory=dict, repr=False)

    @property
    def authenticates(self) -> bool:
        return self.secret is not None or bool(self.secrets)


@dataclass(frozen=True)
class Peer:
    """Who the other side is, as far as the greeting told. `token` names the link. The accepting side learns the `paths`
    that the peer can use and the `group` it wants to meet, the dialling side the `offers` made for these paths.
    `version` is the one that both speak.
    """

    cluster_id: int
    incarnation: bytes
    lane: int
    token: bytes = field(default=b"", repr=False)
    paths: tuple[str, ...] = ()
    offers: tuple[tuple[str, bytes], ...] = field(default=(), repr=False)
    group: str = ""
    version: int = 0

    @property
    def process(self) -> tuple[int, bytes]:
        """Which process of which cluster it is. Incarnations alone can be read on a network, and every peer knows them:
        only the cluster id stands for a secret or a certificate.
        """
        return self.cluster_id, self.incarnation
