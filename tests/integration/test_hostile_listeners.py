"""Whoever is dialled in place of the right node, and does not have the secret: false proofs, mirrors, silence. The side
that dials learns why in time, is not linked and leaves nothing open. The listener is made by hand
(wire_client.py beside it).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvpull_async import LLMStatusCode
from tests.hostile import OK, info, link, links_of, node, pulling, unlink
from tests.integration.wire_client import (
    CHALLENGE,
    HELLO,
    PROVE,
    REJECT,
    WELCOME,
    Address,
    Said,
    Wire,
    frame,
    proof,
    server,
)
from tests.integration.wire_listener import CHALLENGED, SECRET, Script, accepts, relay, take, welcome
from tests.loop_nodes import EventLog, event_log

FAILED = LLMStatusCode.LLM_LINK_FAILED
DIFFER = "the link secrets of the two sides differ"


@pytest.fixture
async def events() -> AsyncIterator[EventLog]:
    with event_log() as log:
        yield log


async def fails(at: Address, reason: str, events: EventLog, *, timeout: int = 20_000, **options: Any) -> None:
    """The link does, with this reason and in time."""
    async with pulling(99, **options) as puller:
        began = time.monotonic()
        code = await link(puller, info(1, at), timeout=timeout)
        assert code in (FAILED, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)
        assert time.monotonic() - began < timeout / 1000 + 5
        failed = await events.first("link.failed", local_cluster_id=99)
        assert reason in failed["reason"], failed
        assert SECRET.decode() not in str(events.events)
        assert events.named("engine.bug") == events.named("link.bug") == []
        assert links_of(puller) == []


async def test_a_listener_made_by_hand_is_linked_when_it_is_honest() -> None:
    """Else the refusals of the others would mean nothing."""
    with server(lambda wire, _: accepts(wire)) as one:
        async with pulling(99, link_secret=SECRET.decode()) as puller:
            assert await link(puller, info(1, one.address)) == OK
            assert await unlink(puller, 1) == OK
        assert one.preambles == [b"KVPULL\x01C"] * 2


# --- with a secret ---


def greeted(answer: Callable[[Said], bytes], *, first: bytes = CHALLENGED) -> Script:
    """A challenge, and after the dialler's proof what `answer` makes of its hello."""

    def script(wire: Wire, _: bytes) -> None:
        hello = take(wire, HELLO)
        wire.send(first)
        take(wire, PROVE)
        wire.send(answer(hello))

    return script


def says(*data: bytes) -> Script:
    """Whatever the dialler says."""

    def script(wire: Wire, _: bytes) -> None:
        take(wire, HELLO)
        wire.send(b"".join(data))

    return script


def reflects(wire: Wire, _: bytes) -> None:
    """The dialler's own proof as that of this side."""
    take(wire, HELLO)
    wire.send(CHALLENGED)
    shown = take(wire, PROVE).fields[0]
    wire.send(frame(WELCOME, 1, shown, b"t" * 16, [["tcp", b""]]))


def mirrors(wire: Wire, _: bytes) -> None:
    """Everything that the dialler says."""
    while said := wire.read():
        wire.send(said.raw)


def hangs_up(after: int) -> Script:
    def script(wire: Wire, _: bytes) -> None:
        for kind, answer in ((HELLO, CHALLENGED), (PROVE, b""))[:after]:
            take(wire, kind)
            wire.send(answer)
        wire.hang_up()

    return script


def second_is_false(wire: Wire, _: bytes) -> None:
    """An honest first connection, and a second one without the secret."""
    hello = take(wire, HELLO)
    wire.send(CHALLENGED)
    take(wire, PROVE)
    wire.send(welcome(hello, secret=SECRET if hello.fields[6] == 0 else b"a guess"))


def nowhere(hello: Said) -> bytes:
    bare = frame(WELCOME, 1, b"", b"t" * 16, [["by hand", b""]])
    return frame(WELCOME, 1, proof(SECRET, hello.raw, CHALLENGED, bare), b"t" * 16, [["by hand", b""]])


ZEROS = frame(WELCOME, 1, bytes(32), b"t" * 16, [["tcp", b""]])
FALSE: dict[str, tuple[Script, str]] = {
    "a wrong secret": (greeted(lambda hello: welcome(hello, secret=b"a guess")), DIFFER),
    "an empty proof": (greeted(lambda hello: welcome(hello, secret=None)), DIFFER),
    "zeros": (greeted(lambda _: ZEROS), DIFFER),
    "a proof cut short": (greeted(lambda _: frame(WELCOME, 1, bytes(31), b"t" * 16, [])), DIFFER),
    "a proof that is too long": (greeted(lambda _: frame(WELCOME, 1, bytes(33), b"t" * 16, [])), "malformed Welcome"),
    "the dialler's own proof": (reflects, DIFFER),
    "another challenge": (greeted(lambda hello: welcome(hello, CHALLENGED[:-2] + b"N\xc3")), DIFFER),
    "a changed welcome": (greeted(lambda hello: welcome(hello)[:-1] + b"x"), "Welcome"),
    "a second connection without the secret": (second_is_false, DIFFER),
    "a welcome at once": (says(ZEROS), "Welcome in state greeting"),
    "a welcome before the proof": (says(CHALLENGED, ZEROS), DIFFER),
    "a challenge twice": (says(CHALLENGED, CHALLENGED), "Challenge in state proving"),
    "no need of a proof": (says(CHALLENGED[:-1] + b"\xc2", ZEROS), "only one side has a link secret"),
    "an older version": (says(frame(CHALLENGE, 3, b"i" * 16, b"n" * 32, True)), "the accepting side 3"),
    "a newer version": (says(frame(CHALLENGE, 5, b"i" * 16, b"n" * 32, True)), "the accepting side 5"),
    "everything the dialler says": (mirrors, "Hello in state greeting"),
    "a refusal that is a success": (says(frame(REJECT, 0, "welcome")), "refused: welcome"),
    "another cluster": (lambda wire, _: accepts(wire, who=2), "is cluster 2, not 1 as asked for"),
    "no path": (greeted(nowhere), "no data path works"),
    "a frame above the limit": (says(b"\xff\xff\xff\x7f\x02" + bytes(4)), "exceeds the limit of 4096"),
    "an end at once": (hangs_up(0), "closed the connection during the greeting"),
    "an end after the hello": (hangs_up(1), "closed the connection during the greeting"),
    "an end after the proof": (hangs_up(2), "closed the connection during the greeting"),
}  # fmt: skip


@pytest.mark.parametrize(("script", "reason"), FALSE.values(), ids=FALSE.keys())
async def test_who_does_not_prove_to_be_the_right_one_is_not_linked(
    events: EventLog, script: Script, reason: str
) -> None:
    with server(script) as one:
        await fails(one.address, reason, events, link_secret=SECRET.decode())


async def test_a_listener_with_the_secret_of_another_cluster_is_not_linked(events: EventLog) -> None:
    for secret in (SECRET, b"the secret of two, and of two only"):
        with server(greeted(lambda hello: welcome(hello, secret=secret))) as one:  # noqa: B023
            secrets = {1: "the secret of one, and of one only", 2: "the secret of two, and of two only"}
            await fails(one.address, DIFFER, events, link_secret=SECRET.decode(), link_secrets=secrets)


async def test_a_node_that_is_led_to_itself_is_not_linked_with_itself(events: EventLog) -> None:
    """The man in the middle passes on what it says to the port on which it listens, which has the secret, too."""
    async with node(99, listen="127.0.0.1:0", transfer_backend="tcp", link_secret=SECRET.decode()) as one_node:
        with server(relay(one_node.listen_address)) as one:
            assert await link(one_node, info(1, one.address)) == FAILED
            await events.first("link.failed", text="this is cluster 99, not 1 as asked for", local_cluster_id=99)
            assert links_of(one_node) == []


@pytest.mark.parametrize("when", ["at once", "after the challenge", "in drips"])
async def test_silence_ends_with_the_dialler_s_time(events: EventLog, when: str) -> None:
    def script(wire: Wire, _: bytes) -> None:
        if when == "after the challenge":
            take(wire, HELLO)
            wire.send(CHALLENGED)
        elif when == "in drips":
            for byte in frame(REJECT, 1, "r" * 900)[:200]:
                wire.send(bytes([byte]))
                time.sleep(0.01)

    with server(script) as one:
        await fails(one.address, "did not answer in time", events, timeout=500, link_secret=SECRET.decode())


async def test_words_of_a_refusal_do_not_look_like_other_lines_of_the_log(
    events: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody may say them: who listens there has proven nothing yet."""
    words = "no\n2026-01-01 link.up cluster_id=1 reason=all is well\r\x1b[2J"
    with server(says(frame(REJECT, int(FAILED), words))) as one, caplog.at_level("DEBUG", "kvpull"):
        await fails(one.address, "no", events, link_secret=SECRET.decode())
    assert not any(set(record.getMessage()) & set("\n\r\x1b") for record in caplog.records)
