"""The state machine of one connection: what each message does in each state, and who is let in."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvpull_async.protocol import frames
from kvpull_async.protocol.frames import FrameError
from kvpull_async.protocol.session import (
    Asked,
    Failed,
    Identity,
    Peer,
    Ready,
    Received,
    Session,
    State,
)
from kvpull_async.status import LLMStatusCode
from tests.wire import PLAIN, SAMPLES, at, deliver, drained, exchange, greeted, identity, plain_hello, refused, sent

LINK_FAILED = LLMStatusCode.LLM_LINK_FAILED
SECRET = b"correct horse battery staple"
TOKEN = b"t" * 16


# --- the table: what each kind of message does in each state of both roles ---


REFUSED = "refused"
HEARTBEAT = {"Ping": [frames.Pong], "Pong": Received}
TO_SERVER = dict.fromkeys(("Request", "Offer", "Watch", "Lease", "Cancel", "Done", "Check", "Read", "Bye"), Received)
TO_REQUESTER = {"DoneAck": Received, "Checked": Received, "ByeAck": Received}
TABLE: dict[tuple[str, str], dict[str, Any]] = {
    ("dialer", "new"): {"Reject": REFUSED},
    ("dialer", "greeting"): {"Challenge": [frames.Prove], "Reject": REFUSED},
    ("dialer", "proving"): {"Welcome": Ready, "Reject": REFUSED},
    ("dialer", "asks"): HEARTBEAT | TO_REQUESTER,
    ("dialer", "serves"): HEARTBEAT | TO_SERVER,
    ("acceptor", "new"): {"Hello": [frames.Challenge]},
    ("acceptor", "proving"): {"Prove": Asked},
    ("acceptor", "deciding"): {},
    ("acceptor", "asks"): HEARTBEAT | TO_REQUESTER,
    ("acceptor", "serves"): HEARTBEAT | TO_SERVER,
}
"""What is allowed: a type is the event it causes, a list the messages it is answered with, REFUSED that the peer said
no. Everything else ends the connection. (Answers to requests have their own tests below.)"""


@pytest.mark.parametrize("name", sorted(SAMPLES))
@pytest.mark.parametrize(("role", "state"), TABLE, ids=str)
def test_what_a_message_does_in_a_state(role: str, state: str, name: str) -> None:
    session = at(role, state)
    events = deliver(session, PLAIN[name], SAMPLES[name].tail)
    expected = TABLE[role, state].get(name)
    if expected is None or expected is REFUSED:
        assert session.state is State.FAILED
        (failed,) = events
        assert isinstance(failed, Failed)
        assert failed.by_peer is (expected is REFUSED)
        assert failed.status is LINK_FAILED
        assert failed.reason
    elif isinstance(expected, list):
        assert events == []
        assert [type(message) for message in sent(session)] == expected
    else:
        assert [type(event) for event in events] == [expected]
        assert session.take_output() == b""


@pytest.mark.parametrize("end", ["failed", "closed"])
@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_nothing_comes_of_bytes_after_the_end(name: str, end: str) -> None:
    session, _ = greeted()
    if end == "failed":
        session.fail("a reason", LINK_FAILED)
    else:
        session.close()
    drained(session)
    assert deliver(session, PLAIN[name], SAMPLES[name].tail) == []
    session.receive_eof()
    assert (session.state.value, session.next_event(), session.take_output()) == (end, None, b"")
    assert session.buffered == 0


def test_a_failure_is_told_once_and_survives_close() -> None:
    session, _ = greeted()
    session.fail("first", LINK_FAILED)
    session.fail("second", LINK_FAILED)
    session.close()
    assert drained(session) == [Failed("first", LINK_FAILED)]
    assert session.state is State.FAILED
    with pytest.raises(FrameError, match="the connection is failed"):
        session.send(frames.Bye())


@pytest.mark.parametrize(("role", "state"), TABLE, ids=str)
def test_the_end_of_the_stream_is_a_failure_that_says_when(role: str, state: str) -> None:
    session = at(role, state)
    session.receive_eof()
    (failed,) = drained(session)
    when = "without a goodbye" if state in ("asks", "serves") else "during the greeting"
    assert failed == Failed(f"the peer closed the connection {when}", LINK_FAILED)


# --- the greeting ---


@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "secret"])
@pytest.mark.parametrize("lane", [0, 1])
def test_both_sides_learn_who_the_other_is(lane: int, secret: bytes | None) -> None:
    one = Identity(1, b"1" * 16, ("tcp", "shm"), secret)
    two = Identity(2, b"2" * 16, ("tcp",), secret)
    dialer = Session(one, dialer=True, asked=2, lane=lane, token=TOKEN if lane else b"")
    acceptor = Session(two, dialer=False)
    dialer.start()
    exchange(dialer, acceptor)
    asked = acceptor.next_event()
    assert asked == Asked(
        Peer(1, one.incarnation, lane, TOKEN if lane else b"", ("tcp", "shm"), version=frames.VERSION)
    )
    assert dialer.next_event() is None  # nothing is ready before the owner has decided
    acceptor.welcome(token=TOKEN, offers=[("tcp", b"port")])
    exchange(dialer, acceptor)
    offers = (("tcp", b"port"),)
    assert dialer.next_event() == Ready(Peer(2, two.incarnation, lane, TOKEN, offers=offers, version=frames.VERSION))
    assert acceptor.next_event() == Ready(Peer(1, one.incarnation, lane, TOKEN, ("tcp", "shm"), version=frames.VERSION))
    assert (dialer.requests, acceptor.requests) == (lane == 0, lane == 1)


def test_the_owner_may_refuse_a_peer_that_has_proven_itself() -> None:
    dialer, acceptor = Session(identity(1), dialer=True, asked=2), Session(identity(2), dialer=False)
    dialer.start()
    exchange(dialer, acceptor)
    acceptor.reject(LLMStatusCode.LLM_ALREADY_LINK, "no room " + "x" * 5000)
    exchange(dialer, acceptor)
    failed = drained(dialer)[-1]
    assert (failed.status, failed.by_peer) == (LLMStatusCode.LLM_ALREADY_LINK, True)
    assert failed.reason.startswith("no room xxx")
    assert acceptor.state is State.FAILED


@pytest.mark.parametrize("number", [0, -1, 0xFFFFFFFF, 12345, 2**63, -(2**63)])
def test_a_refusal_is_never_a_success_whatever_its_number(number: int) -> None:
    session = at("dialer", "greeting")
    assert deliver(session, frames.Reject(number, "no")) == [Failed("no", LINK_FAILED, by_peer=True)]


SECRETS = {
    "different": (SECRET, b"another", "the link secrets of the two sides differ"),
    "differing in one bit": (SECRET, SECRET[:-1] + b"d", "the link secrets of the two sides differ"),
    "longer": (SECRET, SECRET + b"!", "the link secrets of the two sides differ"),
    "only dialling": (SECRET, None, "only the dialling side has a link secret; give both the same"),
    "only accepting": (None, SECRET, "only the accepting side has a link secret; give both the same"),
}


@pytest.mark.parametrize(("ours", "theirs", "reason"), SECRETS.values(), ids=SECRETS.keys())
def test_secrets_that_differ_are_named_on_both_sides(ours: bytes | None, theirs: bytes | None, reason: str) -> None:
    dialer = Session(identity(1, secret=ours), dialer=True, asked=2)
    acceptor = Session(identity(2, secret=theirs), dialer=False)
    assert refused(dialer, acceptor) == (Failed(reason, LINK_FAILED, by_peer=True), Failed(reason, LINK_FAILED))


def test_a_secret_is_never_shown_or_sent() -> None:
    mine, theirs = identity(1, secret=SECRET), identity(2, secret=SECRET)
    dialer, acceptor = Session(mine, dialer=True, asked=2), Session(theirs, dialer=False)
    dialer.start()
    wire = b""
    for _ in range(4):
        wire += (there := dialer.take_output())
        acceptor.receive(there)
        if acceptor.state is State.DECIDING:
            acceptor.welcome(token=TOKEN)
        wire += (back := acceptor.take_output())
        dialer.receive(back)
    assert dialer.state is State.READY
    assert SECRET not in wire
    assert "horse" not in f"{mine!r} {dialer!r} {acceptor!r} {drained(dialer)!r}"


def recorded(dialer: Session, acceptor: Session) -> list[bytes]:
    """What the dialling side sends in an honest greeting: HELLO and PROVE."""
    dialer.start()
    said = [dialer.take_output()]
    acceptor.receive(said[0])
    dialer.receive(acceptor.take_output())
    said.append(dialer.take_output())
    acceptor.receive(said[1])
    assert acceptor.state is State.DECIDING
    return said


def test_a_replayed_greeting_is_refused() -> None:
    """The acceptor's nonce is new each time, so that yesterday's proof says nothing today."""
    victim = identity(2, secret=SECRET)
    said = recorded(Session(identity(1, secret=SECRET), dialer=True, asked=2), Session(victim, dialer=False))
    again = Session(victim, dialer=False)
    for data in said:
        again.receive(data)
    assert drained(again) == [Failed("the link secrets of the two sides differ", LINK_FAILED)]


def test_a_proof_for_one_lane_or_token_does_not_open_another() -> None:
    """A recorded HELLO that is changed in any field needs another proof, even before the same nonce."""
    mine, victim = identity(1, secret=SECRET), identity(2, secret=SECRET)
    changed: dict[str, Any] = {
        "lane": 1, "token": TOKEN, "cluster_id": 3, "incarnation": b"x" * 16, "nonce": b"y" * 32, "asked": 9,
        "paths": ["shm"],
    }  # fmt: skip

    def steady(size: int) -> bytes:
        return b"s" * size

    said = recorded(Session(mine, dialer=True, asked=2, entropy=steady), Session(victim, dialer=False, entropy=steady))
    for field, value in changed.items():
        decoder = frames.Decoder()
        decoder.feed(said[0])
        frame = decoder.next_frame()
        assert frame is not None
        target = Session(victim, dialer=False, entropy=steady)
        target.receive(frames.encode(msgspec.structs.replace(frame.message, **{field: value})) + said[1])
        assert drained(target) == [Failed("the link secrets of the two sides differ", LINK_FAILED)], field


def test_a_welcome_that_was_changed_on_its_way_is_refused() -> None:
    """What the accepting side says about itself is proven too, so that nobody between can choose the path."""
    changed: dict[str, Any] = {"cluster_id": 3, "token": b"z" * 16, "offers": [("shm", b"")]}
    for field, value in changed.items():
        dialer = Session(identity(1, secret=SECRET), dialer=True, asked=2)
        acceptor = Session(identity(2, secret=SECRET), dialer=False)
        recorded(dialer, acceptor)
        acceptor.next_event()
        acceptor.welcome(token=TOKEN)
        (welcome,) = sent(acceptor)
        dialer.receive(frames.encode(msgspec.structs.replace(welcome, **{field: value})))
        assert drained(dialer) == [Failed("the link secrets of the two sides differ", LINK_FAILED)], field


def test_a_reflected_proof_is_refused() -> None:
    """Someone without the secret sends a side's own proof back to it; the roles are part of what is proven."""
    dialer = Session(identity(1, secret=SECRET), dialer=True, asked=1)
    dialer.start()
    (hello,) = sent(dialer)
    assert isinstance(hello, frames.Hello)
    dialer.receive(frames.encode(frames.Challenge(frames.VERSION, hello.incarnation, hello.nonce, authenticates=True)))
    (prove,) = sent(dialer)
    assert isinstance(prove, frames.Prove)
    dialer.receive(frames.encode(frames.Welcome(1, prove.proof, TOKEN, [("tcp", b"")])))
    assert drained(dialer) == [Failed("the link secrets of the two sides differ", LINK_FAILED)]


def test_a_reflected_greeting_is_refused() -> None:
    """Someone without the secret dials and sends the acceptor's own words back as his."""
    acceptor = Session(identity(2, secret=SECRET), dialer=False)
    acceptor.receive(frames.encode(plain_hello(authenticates=True, incarnation=b"m" * 16)))
    (challenge,) = sent(acceptor)
    assert isinstance(challenge, frames.Challenge)
    for proof in (b"", challenge.nonce, bytes(32)):
        target = Session(identity(2, secret=SECRET), dialer=False)
        target.receive(frames.encode(plain_hello(authenticates=True)) + frames.encode(frames.Prove(proof)))
        assert drained(target) == [Failed("the link secrets of the two sides differ", LINK_FAILED)]


def test_an_acceptor_must_prove_itself_too() -> None:
    dialer = Session(identity(1, secret=SECRET), dialer=True, asked=2)
    dialer.start()
    dialer.receive(frames.encode(frames.Challenge(frames.VERSION, b"i" * 16, b"n" * 32, authenticates=True)))
    dialer.receive(frames.encode(frames.Welcome(2, b"p" * 32, TOKEN, [("tcp", b"")])))
    assert drained(dialer) == [Failed("the link secrets of the two sides differ", LINK_FAILED)]


def test_a_challenge_that_needs_no_secret_does_not_talk_a_side_out_of_its_own() -> None:
    dialer = Session(identity(1, secret=SECRET), dialer=True, asked=2)
    dialer.start()
    dialer.receive(frames.encode(frames.Challenge(frames.VERSION, b"i" * 16, b"n" * 32, authenticates=False)))
    (failed,) = drained(dialer)
    assert failed == Failed("only one side has a link secret; give both the same", LINK_FAILED)


def test_a_hello_of_another_protocol_is_refused() -> None:
    acceptor = Session(identity(2), dialer=False)
    acceptor.receive(frames.encode(plain_hello(magic="smtp")))
    (reject,) = sent(acceptor)
    assert isinstance(reject, frames.Reject)
    assert drained(acceptor) == [Failed("the peer does not speak the kvpull protocol", LINK_FAILED)]


def test_a_peer_that_looks_for_another_cluster_is_told_who_is_here() -> None:
    words = "this is cluster 2, not 5 as asked for"
    mine, theirs = refused(Session(identity(1), dialer=True, asked=5), Session(identity(2), dialer=False))
    assert (mine, theirs) == (Failed(words, LINK_FAILED, by_peer=True), Failed(words, LINK_FAILED))


def test_nobody_learns_who_is_here_without_the_secret() -> None:
    dialer = Session(identity(1, secret=b"a guess"), dialer=True, asked=5)
    mine, _ = refused(dialer, Session(identity(2, secret=SECRET), dialer=False))
    assert mine.reason == "the link secrets of the two sides differ"


def test_a_peer_that_may_not_be_who_it_says_is_not_told_who_is_here() -> None:
    """It is refused in the words of whoever knows the connection, whether or not it asked for the right one."""
    for asked in (2, 5):
        acceptor = Session(identity(2), dialer=False)
        acceptor.misfit = lambda cluster_id: f"no certificate for {cluster_id}" if cluster_id == 1 else ""
        mine, theirs = refused(Session(identity(1), dialer=True, asked=asked), acceptor)
        words = "no certificate for 1"
        assert (mine, theirs) == (Failed(words, LINK_FAILED, by_peer=True), Failed(words, LINK_FAILED))
