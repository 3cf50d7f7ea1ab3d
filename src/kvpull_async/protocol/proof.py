"""What both sides of a greeting prove with their shared secret, and which version they then speak: bytes in, bytes out.
It must not know states.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

import msgspec

from kvpull_async.protocol import frames
from kvpull_async.protocol.identity import Identity

__all__ = ["agreed", "framed", "proof", "same", "secret_with", "versions"]

_LABEL: Final = b"kvpull link 1"


def same(one: bytes, other: bytes) -> bool:
    """In a time that tells nothing of where they differ."""
    return hmac.compare_digest(one, other)


def secret_with(identity: Identity, cluster_id: int) -> bytes | None:
    """The secret to prove oneself with to a peer of that id; None when this side has none at all.

    Where there are secrets, but none for that peer, it is one that nobody knows: such a peer learns no more than that
    the secrets differ.
    """
    if not identity.authenticates:
        return None
    return identity.secrets.get(cluster_id, identity.secret) or secrets.token_bytes(32)


def framed(hello: bytes) -> bytes:
    """The frame of a HELLO as it came."""
    return frames.HEADER.pack(len(hello), frames.Hello.kind, len(hello)) + hello


def proof(secret: bytes | None, hello: bytes, challenge: frames.Challenge, welcome: frames.Welcome | None) -> bytes:
    """HMAC over all that was said so far: no proof can be replayed, reflected, or moved to other words. The dialling
    side proves the first two frames, the accepting side these and its welcome. `hello` is the frame as it was sent.
    """
    if secret is None:
        return b""
    text = _LABEL + hello + frames.encode(challenge)  # each frame begins with its kind and length
    if welcome is not None:
        text += frames.encode(msgspec.structs.replace(welcome, proof=b""))
    return hmac.new(secret, text, hashlib.sha256).digest()


def agreed(hello: frames.Hello) -> int | None:
    """The newest version that both sides speak; None when there is none."""
    version = min(hello.version, frames.VERSION)
    return version if version >= max(hello.oldest or hello.version, frames.OLDEST) else None


def versions(*, dialer: tuple[int, int], acceptor: tuple[int, int]) -> str:
    """Why two sides cannot talk; each with its oldest and newest version."""
    theirs, ours = (
        f"{newest}" if oldest == newest else f"{oldest} to {newest}" for oldest, newest in (dialer, acceptor)
    )
    return f"the dialling side speaks protocol {theirs}, the accepting side {ours}; run releases that share one on both"
