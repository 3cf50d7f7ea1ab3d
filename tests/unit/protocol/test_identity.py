"""Who the two sides are: values, whose text gives no secret away."""

from __future__ import annotations

import dataclasses

import pytest

from kvpull_async.protocol import session
from kvpull_async.protocol.identity import Identity, Peer


def test_the_text_of_an_identity_has_no_secret() -> None:
    made = Identity(5, b"i" * 16, ("tcp",), b"hush", "a group")
    assert "hush" not in repr(made)
    assert "a group" in repr(made)


def test_the_text_of_a_peer_has_neither_token_nor_what_was_offered() -> None:
    made = Peer(5, b"i" * 16, 0, b"token!", ("shm",), (("shm", b"a name"),), "g")
    assert "token!" not in repr(made)
    assert "a name" not in repr(made)


@pytest.mark.parametrize("made", [Identity(5, b"i"), Peer(5, b"i", 0)], ids=["identity", "peer"])
def test_they_are_values_with_nothing_told_by_default(made: Identity | Peer) -> None:
    assert made == dataclasses.replace(made)
    assert (made.paths, made.group) == ((), "")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.cluster_id = 6  # type: ignore[misc]


def test_a_process_is_known_by_its_cluster_id_too() -> None:
    """Incarnations can be read on a network: one of another cluster must not pass for it."""
    made = Peer(5, b"i" * 16, 0, b"token!")
    assert made.process == dataclasses.replace(made, lane=1, token=b"another", version=4).process
    assert made.process != dataclasses.replace(made, cluster_id=6).process
    assert made.process != dataclasses.replace(made, incarnation=b"j" * 16).process


def test_sessions_speak_of_the_same_types() -> None:
    assert (session.Identity, session.Peer) == (Identity, Peer)
