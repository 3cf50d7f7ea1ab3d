"""Sessions of earlier versions, as they were recorded: this one reads them, or says which versions stand against it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpull_async.protocol import frames
from kvpull_async.protocol.session import Asked, Event, Failed, Ready, Received
from tests.unit.protocol import recording
from tests.wire import drained

RECORDINGS = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in recording.FOLDER.glob("session-*.json")
}
each = pytest.mark.parametrize("name", sorted(RECORDINGS))
STILL_SPOKEN = [name for name, recorded in RECORDINGS.items() if recorded["version"] >= frames.OLDEST]


def test_this_version_has_been_recorded() -> None:
    """`python -m tests.unit.protocol.recording tests/data/session-N.json` makes the recording of a new version."""
    assert f"session-{frames.VERSION}" in RECORDINGS


def test_this_version_still_writes_what_was_recorded_of_it() -> None:
    recorded = RECORDINGS[f"session-{frames.VERSION}"]
    for step in recorded["steps"]:
        assert b"".join(map(recording.encoded, step["says"])).hex() == step["bytes"]


def test_the_recording_has_every_kind_of_message() -> None:
    recorded = RECORDINGS[f"session-{frames.VERSION}"]
    kinds = {said["kind"] for step in recorded["steps"] for said in step["says"]}
    assert kinds == {message.__name__ for message in frames.MESSAGES.values()} - {"Reject"}


@pytest.mark.parametrize("name", sorted(STILL_SPOKEN))
@pytest.mark.parametrize("side", ["dialer", "acceptor"])
@pytest.mark.parametrize("pieces", [1 << 30, 7])
def test_what_the_other_side_said_then_is_understood_now(name: str, side: str, pieces: int) -> None:
    """This version takes the part of either side against the recorded words of the other."""
    heard = replay(RECORDINGS[name], side, pieces)
    assert not [event for event in heard if isinstance(event, Failed)], heard
    received = [event.message for event in heard if isinstance(event, Received)]
    theirs = [step["says"] for step in RECORDINGS[name]["steps"] if step["from"] != side][-1]
    assert [type(message).__name__ for message in received] == [
        said["kind"] for said in theirs if said["kind"] != "Ping"
    ]


@each
def test_an_older_peer_works_or_is_told_both_versions(name: str) -> None:
    recorded = RECORDINGS[name]
    acceptor = recording.session("acceptor")
    acceptor.receive(bytes.fromhex(recorded["steps"][0]["bytes"]))
    (said,) = recording.spoken(acceptor.take_output())
    if name in STILL_SPOKEN:
        assert (said["kind"], said["fields"]["version"]) == ("Challenge", recorded["version"])
    else:
        assert said["kind"] == "Reject"
        assert str(recorded["version"]) in said["fields"]["reason"]
        assert str(frames.VERSION) in said["fields"]["reason"]


def replay(recorded: dict[str, Any], side: str, pieces: int) -> list[Event]:
    session, heard = recording.session(side), list[Event]()
    if side == "dialer":
        session.start()
    for number, step in enumerate(recorded["steps"]):
        if step["from"] == side:
            if number == 4:  # the requests, so that their answers are expected
                for said in step["says"]:
                    if said["kind"] in recording.ASKED:
                        session.new_request(getattr(frames, said["kind"]))
            continue
        data = bytes.fromhex(step["bytes"])
        for at in range(0, len(data), pieces):
            session.receive(data[at : at + pieces])
            heard += drained(session)
            if heard and isinstance(heard[-1], Asked):
                session.welcome(token=recording.TOKEN, offers=[("tcp", b"")])
                heard += drained(session)
        session.take_output()
    assert any(isinstance(event, Ready) for event in heard), heard
    return heard
