"""What is proven in a greeting, and which version two sides agree on."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpull_async.protocol import frames, proof
from kvpull_async.protocol.identity import Identity
from tests.wire import plain_hello

SECRET = b"a secret of many bytes"
CHALLENGE = frames.Challenge(frames.VERSION, b"i" * 16, b"n" * 32, authenticates=True)
WELCOME = frames.Welcome(2, b"", b"t" * 16, [("tcp", b"")])
HELLO = frames.encode(plain_hello())


def test_without_a_secret_nothing_is_proven() -> None:
    assert proof.proof(None, HELLO, CHALLENGE, None) == b""


@pytest.mark.parametrize("field", [field for field in frames.Challenge.__struct_fields__ if field != "authenticates"])
def test_a_proof_holds_for_that_challenge_only(field: str) -> None:
    value = getattr(CHALLENGE, field)
    other = msgspec.structs.replace(CHALLENGE, **{field: value + 1 if isinstance(value, int) else value[::-1] + b""})
    if other == CHALLENGE:
        other = msgspec.structs.replace(CHALLENGE, **{field: b"?" * len(value)})
    assert proof.proof(SECRET, HELLO, other, None) != proof.proof(SECRET, HELLO, CHALLENGE, None)


@given(at=st.integers(0, len(HELLO) - 1), bit=st.integers(0, 7))
def test_a_proof_holds_for_that_hello_only(at: int, bit: int) -> None:
    other = bytearray(HELLO)
    other[at] ^= 1 << bit
    assert proof.proof(SECRET, bytes(other), CHALLENGE, None) != proof.proof(SECRET, HELLO, CHALLENGE, None)


def test_the_two_sides_prove_different_words() -> None:
    """One side's proof sent back to it proves nothing."""
    dialling, accepting = (proof.proof(SECRET, HELLO, CHALLENGE, welcome) for welcome in (None, WELCOME))
    assert not proof.same(dialling, accepting)
    assert proof.same(accepting, proof.proof(SECRET, HELLO, CHALLENGE, msgspec.structs.replace(WELCOME, proof=b"x")))
    assert accepting != proof.proof(SECRET, HELLO, CHALLENGE, msgspec.structs.replace(WELCOME, token=b"u" * 16))


def test_a_hello_is_framed_as_it_was_sent() -> None:
    assert proof.framed(HELLO[frames.HEADER.size :]) == HELLO


@pytest.mark.parametrize(
    ("newest", "oldest", "version"),
    [
        (frames.VERSION, 0, frames.VERSION),
        (frames.VERSION, frames.OLDEST, frames.VERSION),
        (frames.VERSION + 5, frames.VERSION, frames.VERSION),
        (frames.VERSION + 5, frames.VERSION + 1, None),
        (frames.VERSION + 5, 0, None),
        (frames.OLDEST - 1, 0, None),
        (frames.OLDEST - 1, 1, None),
    ],
)
def test_the_newest_version_that_both_speak(newest: int, oldest: int, version: int | None) -> None:
    assert proof.agreed(plain_hello(version=newest, oldest=oldest)) == version


def test_a_peer_has_its_own_secret_before_the_common_one() -> None:
    both = Identity(1, bytes(16), secret=b"common", secrets={2: b"of two"})
    assert (proof.secret_with(both, 2), proof.secret_with(both, 3)) == (b"of two", b"common")
    assert proof.secret_with(Identity(1, bytes(16)), 2) is None


def test_a_peer_without_a_secret_can_prove_nothing_where_others_have_one() -> None:
    some = Identity(1, bytes(16), secrets={2: b"of two"})
    drawn = {proof.secret_with(some, 3) for _ in range(8)}
    assert len(drawn) == 8
    assert None not in drawn
    assert b"of two" not in drawn
