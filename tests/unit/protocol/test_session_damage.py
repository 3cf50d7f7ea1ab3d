"""Damaged and hostile bytes in every state of a connection: it fails with a reason or waits, and keeps no more than it
was fed.
"""

from __future__ import annotations

import random

import pytest

from kvpull_async.protocol import frames
from kvpull_async.protocol.session import READY_LIMIT, Failed, Session, State
from kvpull_async.status import LLMStatusCode
from tests.wire import PLAIN, SAMPLES, at, drained, greeted, identity, mutate, sample


@pytest.mark.parametrize("ready", [False, True], ids=["before the greeting", "after the greeting"])
def test_a_frame_above_the_limit_ends_the_connection(ready: bool) -> None:
    limit = READY_LIMIT if ready else frames.GREETING_LIMIT
    for length, ends in ((limit, False), (limit + 1, True), (0xFFFFFFFF, True)):
        session = greeted()[1] if ready else Session(identity(2), dialer=False)
        session.receive(frames.HEADER.pack(length, frames.Request.kind, 100))
        assert (session.state is State.FAILED) is ends
        assert session.buffered <= frames.HEADER.size
        if ends:
            (failed,) = drained(session)
            assert f"{length} bytes exceeds the limit of {limit}" in failed.reason


def test_text_of_another_protocol_is_named_as_such() -> None:
    for text in (
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ):
        session = Session(identity(2), dialer=False)
        session.receive(text)
        session.receive_eof()
        (failed,) = drained(session)
        assert "perhaps the peer does not speak the kvpull protocol" in failed.reason
        assert session.take_output() == b""


HEARD_BY = {
    ("acceptor", "new"): ["Hello"],
    ("acceptor", "proving"): ["Prove"],
    ("acceptor", "deciding"): ["Prove"],
    ("acceptor", "serves"): ["Request", "Offer", "Watch", "Cancel", "Done", "Bye", "Ping", "Pong"],
    ("acceptor", "asks"): ["Grant", "Refuse", "Accept", "Result", "DoneAck", "ByeAck"],
    ("dialer", "greeting"): ["Challenge", "Reject"],
    ("dialer", "proving"): ["Welcome"],
    ("dialer", "asks"): ["Grant", "Refuse", "Accept", "Result", "Appeared", "DoneAck", "ByeAck", "Ping", "Pong"],
    ("dialer", "serves"): ["Request", "Cancel", "Done", "Bye"],
}


STATES = list(HEARD_BY)
MANY, FEWER = 10_000, 2_000
COPIES = {("dialer", "serves"), ("acceptor", "asks")}
"""The same code as for the other role, so fewer mutations are enough."""


def prepared(role: str, state: str) -> Session:
    session = at(role, state)
    if state == "asks":
        session.new_request()
    return session


def check_sane(session: Session, fed: int) -> None:
    events = drained(session)
    if session.state is State.FAILED:
        assert isinstance(events[-1], Failed)
        assert events[-1].reason
    else:
        assert not any(isinstance(event, Failed) for event in events)
    assert session.buffered <= fed


@pytest.mark.parametrize(("role", "state"), STATES, ids=str)
def test_a8_every_truncation_asks_for_more_and_fails_at_the_end_of_the_stream(role: str, state: str) -> None:
    for name in HEARD_BY[role, state]:
        data = frames.encode(PLAIN[name], SAMPLES[name].tail)
        for length in range(len(data)):
            session = prepared(role, state)
            session.receive(data[:length])
            assert drained(session) == []
            assert session.buffered == length
            session.receive_eof()
            assert session.state is State.FAILED
            check_sane(session, length)


@pytest.mark.parametrize(("role", "state"), STATES, ids=str)
def test_a8_mutated_frames_end_in_failed_or_wait(role: str, state: str) -> None:
    """10,000 of each kind, fed whole or in two pieces; a session that they did not harm goes on with the next."""
    for name in HEARD_BY[role, state]:
        rng, session, fed = random.Random(f"{role} {state} {name}"), prepared(role, state), 0
        before = session.state
        data = frames.encode(PLAIN[name], SAMPLES[name].tail)
        for _ in range(FEWER if (role, state) in COPIES else MANY):
            damaged = mutate(data, rng)
            cut = rng.randrange(len(damaged) + 1)
            session.receive(damaged[:cut])
            session.receive(damaged[cut:])
            session.take_output()
            fed += len(damaged)
            check_sane(session, fed)
            if session.state is not before or session.buffered:
                session, fed = prepared(role, state), 0


def test_a8_sequences_of_damaged_frames_never_raise() -> None:
    rng = random.Random("sequences")
    names = sorted(SAMPLES)
    for _ in range(2_000):
        session, fed = at(*rng.choice(STATES)), 0
        for _ in range(rng.randint(1, 8)):
            data = sample(rng.choice(names))
            data = mutate(data, rng) if rng.random() < 0.5 else data
            session.receive(data)
            session.take_output()
            fed += len(data)
            assert session.buffered <= fed
        session.receive_eof()
        assert session.state is State.FAILED
        check_sane(session, fed)


@pytest.mark.parametrize("end", ["closed here", "hung up", "damaged"])
def test_p8_a_session_that_is_over_keeps_nothing_of_a_frame(end: str) -> None:
    """Its owner may keep it for as long as the link may come back, and a peer can make that many times."""
    session = at("acceptor", "serves")
    session.receive(frames.encode(PLAIN["Request"], bytes(1 << 20))[:-1])
    assert session.buffered > 1 << 20
    if end == "closed here":
        session.close()
    elif end == "hung up":
        session.receive_eof()
    else:
        session.fail("the peer was silent", LLMStatusCode.LLM_LINK_FAILED)
    assert session.buffered == 0
    session.receive(b"x" * 100)
    assert session.buffered == 0
