"""Sessions of different releases, and secrets that belong to one peer."""

from __future__ import annotations

import msgspec
import pytest

from kvpull_async.protocol import frames, proof
from kvpull_async.protocol.session import Asked, Failed, Identity, Ready, Session
from kvpull_async.status import LLMStatusCode
from tests.wire import at, deliver, drained, exchange, identity, plain_hello, refused, sent

LINK_FAILED = LLMStatusCode.LLM_LINK_FAILED
SECRET = b"correct horse battery staple"
TOKEN = b"t" * 16


@pytest.mark.parametrize(("oldest", "newest", "text"), [(7, 7, "7"), (6, 9, "6 to 9"), (0, 3, "3"), (0, 7, "7")])
def test_protocol_versions_are_named_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, oldest: int, newest: int, text: str
) -> None:
    """Each side's own log says which release is the older one, in the same words."""
    dialer, acceptor = Session(identity(1), dialer=True, asked=2), Session(identity(2), dialer=False)
    with monkeypatch.context() as patch:
        patch.setattr(frames, "VERSION", newest)
        patch.setattr(frames, "OLDEST", oldest)
        dialer.start()
    exchange(dialer, acceptor)
    both = f"the dialling side speaks protocol {text}, the accepting side {frames.VERSION}"
    words = f"{both}; run releases that share one on both"
    assert drained(dialer) == [Failed(words, LINK_FAILED, by_peer=True)]
    assert drained(acceptor) == [Failed(words, LINK_FAILED)]


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
def test_a_newer_dialer_speaks_the_version_of_this_one(monkeypatch: pytest.MonkeyPatch, secret: bytes | None) -> None:
    """Its greeting says more than this version reads, and all of it is proven."""
    acceptor = Session(identity(2, secret=secret), dialer=False)
    hello = plain_hello(version=frames.VERSION + 3, oldest=frames.OLDEST, authenticates=secret is not None)
    body = msgspec.msgpack.encode([*msgspec.to_builtins(hello, builtin_types=(bytes,)), "of a later version", 7])
    frame = frames.HEADER.pack(len(body), frames.Hello.kind, len(body)) + body
    acceptor.receive(frame)
    (challenge,) = sent(acceptor)
    assert isinstance(challenge, frames.Challenge)
    assert challenge.version == frames.VERSION
    proven = proof.proof(secret, frame, challenge, None)
    for said in (proven[:-1] + b"?" if secret else b"?", proven):
        other = Session(identity(2, secret=secret), dialer=False, entropy=bytes)
        other.receive(frame)
        (challenge,) = sent(other)
        assert isinstance(challenge, frames.Challenge)
        right = said is proven
        other.receive(frames.encode(frames.Prove(proof.proof(secret, frame, challenge, None) if right else said)))
        assert isinstance(other.next_event(), Asked if right else Failed)
        if right:
            other.welcome(token=TOKEN)
            ready = other.next_event()
            assert isinstance(ready, Ready)
            assert ready.peer.version == frames.VERSION


def test_a_newer_acceptor_speaks_the_version_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    dialer, acceptor = Session(identity(1), dialer=True, asked=2), Session(identity(2), dialer=False)
    dialer.start()
    hello = dialer.take_output()
    with monkeypatch.context() as patch:
        patch.setattr(frames, "VERSION", 9)
        acceptor.receive(hello)
    exchange(dialer, acceptor)
    assert isinstance(acceptor.next_event(), Asked)
    acceptor.welcome(token=TOKEN)
    exchange(dialer, acceptor)
    ready = dialer.next_event()
    assert isinstance(ready, Ready)
    assert ready.peer.version == frames.VERSION


def test_each_peer_has_a_secret_of_its_own() -> None:
    """Who knows that of one cluster can be nobody else; the common one counts for those that have none."""
    source = Identity(1, b"1" * 16, ("tcp",), SECRET, secrets={2: b"of two", 3: b"of three"})
    for cluster_id, secret, right in (
        (2, b"of two", True), (2, b"of three", False), (3, b"of two", False), (2, SECRET, False), (4, SECRET, True),
        (4, b"of two", False),
    ):  # fmt: skip
        for dialler in (identity(cluster_id, secret=secret), Identity(cluster_id, bytes(16), (), secrets={1: secret})):
            dialer, acceptor = Session(dialler, dialer=True, asked=1), Session(source, dialer=False)
            dialer.start()
            exchange(dialer, acceptor)
            assert isinstance(acceptor.next_event(), Asked if right else Failed), (cluster_id, secret)
            back = Session(source, dialer=True, asked=cluster_id)
            back.start()
            other = Session(dialler, dialer=False)
            exchange(back, other)
            assert isinstance(other.next_event(), Asked if right else Failed), (cluster_id, secret)


def test_a_cluster_without_a_secret_is_told_no_more_than_one_with_a_wrong_secret() -> None:
    source = Identity(1, b"1" * 16, ("tcp",), secrets={2: b"of two"})
    said = []
    for cluster_id in (2, 3):
        mine, theirs = refused(Session(identity(cluster_id, secret=b"?"), dialer=True, asked=1),
                               Session(source, dialer=False))  # fmt: skip
        assert theirs.reason == "the link secrets of the two sides differ"
        said.append(mine)
    assert said[0] == said[1]


def test_a_dialer_refuses_an_acceptor_of_another_version() -> None:
    session = at("dialer", "greeting")
    (failed,) = deliver(session, frames.Challenge(9, b"i" * 16, b"n" * 32, authenticates=False))
    assert f"the dialling side speaks protocol {frames.VERSION}, the accepting side 9" in failed.reason
