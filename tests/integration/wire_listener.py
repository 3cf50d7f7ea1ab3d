"""Listeners made by hand: what an honest one says, by the means of `wire_client` alone."""

from __future__ import annotations

from collections.abc import Callable

from tests.integration.wire_client import (
    BYE,
    BYE_ACK,
    CHALLENGE,
    HELLO,
    PING,
    PONG,
    PROVE,
    WELCOME,
    Address,
    Said,
    Wire,
    frame,
    proof,
)

SECRET = b"correct horse battery staple"
CHALLENGED = frame(CHALLENGE, 4, b"i" * 16, b"n" * 32, True)
Script = Callable[[Wire, bytes], object]
"""What is done with a connection, and the kind that its preamble named."""


def take(wire: Wire, kind: int) -> Said:
    said = wire.read()
    assert said is not None
    assert said.kind == kind
    return said


def welcome(hello: Said, challenge: bytes = CHALLENGED, *, secret: bytes | None = SECRET, who: int = 1) -> bytes:
    """As an honest listener would say it, if it is cluster 1."""
    token, offers = hello.fields[7] or b"t" * 16, [] if hello.fields[6] else [["tcp", b""]]
    text = hello.raw, challenge, frame(WELCOME, who, b"", token, offers)
    return frame(WELCOME, who, b"" if secret is None else proof(secret, *text), token, offers)


def accepts(wire: Wire, *, secret: bytes | None = SECRET, who: int = 1) -> None:
    """An honest greeting, and then answers until the peer leaves."""
    challenge = frame(CHALLENGE, 4, b"i" * 16, b"n" * 32, secret is not None)
    hello = take(wire, HELLO)
    wire.send(challenge)
    assert take(wire, PROVE).fields == [b"" if secret is None else proof(secret, hello.raw, challenge)]
    wire.send(welcome(hello, challenge, secret=secret, who=who))
    while (said := wire.read()) is not None:
        answer = {PING: PONG, BYE: BYE_ACK}.get(said.kind)
        if answer is not None:
            wire.send(frame(answer, *(said.fields if answer == PONG else ())))


def relay(to: Address | None, *, first: bytes | None = None) -> Script:
    """Passes the dialler's frames on, maybe with another kind of connection, and brings the answers."""

    def script(wire: Wire, kind: bytes) -> None:
        with Wire.open(to, b"KVPULL\x01" + (first or kind)) as far:
            wire.pass_on(far)

    return script
