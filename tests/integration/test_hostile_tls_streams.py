"""What comes in place of TLS, or within it: strangers, stalls, floods and ends. The client is made by hand
(wire_client.py beside it).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
import time
from collections.abc import AsyncIterator

import pytest

from kvpull_async import LLMDataDist, LLMStatusCode
from tests.certificates import cluster
from tests.hostile import honest_client, serving
from tests.integration.key_updates import KeyUpdates
from tests.integration.tls_scene import ME, NODE, Office, admitted, guarded, unharmed
from tests.integration.wire_client import (
    AGREED,
    CHALLENGE,
    MAGIC,
    PING,
    PONG,
    PROVE,
    REFUSED,
    REJECT,
    Wire,
    frame,
    frames_in,
    linked,
)
from tests.loop_nodes import EventLog, event_log, eventually

FAILED = LLMStatusCode.LLM_LINK_FAILED
WANTED = "the accepting side wants TLS, the dialling side has no certificates"


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Office:
    return Office.at(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def events() -> AsyncIterator[EventLog]:
    with event_log() as log:
        yield log


# --- what comes in place of TLS ---


async def test_a_client_without_tls_is_told_that_and_nothing_more(office: Office, events: EventLog) -> None:
    """So it is for a man in the middle who changes the kind of connection that a peer with TLS asked for."""
    async with guarded(office) as source:
        for words in (b"", ME.hello, ME.but(secret=b"secret").hello, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"):
            with Wire.open(source.listen_address, MAGIC + b"C" + words) as wire:
                wire.hang_up()
                (refused,) = frames_in(wire.rest())
                assert (refused.kind, refused.fields) == (REJECT, [FAILED, WANTED])
        await events.first("link.rejected", text=WANTED)
        with Wire.open(source.listen_address, MAGIC + b"P" + bytes(17)) as wire:
            assert wire.rest() == b""
        await events.first("link.rejected", text="a payload connection without TLS")


@pytest.mark.parametrize("kind", [b"S", b"T"], ids=["control", "payload"])
async def test_a_node_without_certificates_says_so_and_hangs_up(events: EventLog, kind: bytes) -> None:
    async with serving(NODE) as source:
        with Wire.open(source.listen_address, MAGIC + kind + ME.hello) as wire:
            assert wire.rest() == REFUSED
        await events.first("link.rejected", text="the dialling side asks for TLS, this side has no certificates")
        await honest_client(source)


GARBAGE = {
    "plain frames": ME.hello,
    "zeros": bytes(500),
    "an alert": bytes.fromhex("15030300020100"),
    "a record above the limit": b"\x16\x03\x01\xff\xff" + bytes(70_000),
    "application data": b"\x17\x03\x03\x00\x20" + bytes(32),
    "a hello cut short": bytes.fromhex("160301000601000002 0303".replace(" ", "")),
    "HTTP": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("words", GARBAGE.values(), ids=GARBAGE.keys())
@pytest.mark.parametrize("kind", [b"S", b"T"], ids=["control", "payload"])
async def test_what_is_no_tls_after_the_consent_ends_the_connection(
    office: Office, events: EventLog, words: bytes, kind: bytes
) -> None:
    async with guarded(office) as source:
        with Wire.open(source.listen_address, MAGIC + kind) as wire:
            assert wire.take(1) == AGREED
            wire.send(words)
            wire.hang_up()
            answer = wire.rest()
            assert answer == b"" or (answer[0] == 0x15 and len(answer) <= 7)  # an alert of TLS, which says nothing
        rejected = await events.first("link.rejected", local_cluster_id=NODE)
        assert "in time" not in rejected["reason"]
        assert events.named("link.accept_failed") == []


# --- time, and floods ---


def stalled(source: LLMDataDist, office: Office, how: str) -> Wire:
    """A connection that has got so far and no further. It has not spoken inside TLS."""
    wire = Wire.open(source.listen_address, MAGIC + b"S")
    assert wire.take(1) == AGREED
    if how == "before the handshake":
        return wire
    if how == "after the handshake":
        wire.secure(office.context("right", *cluster(11)))
        return wire
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    half = office.context("right", *cluster(11)).wrap_bio(incoming, outgoing)
    with pytest.raises(ssl.SSLWantReadError):
        half.do_handshake()
    hello = outgoing.read()
    wire.send(hello[:40] if how == "half a hello" else hello)
    return wire


@pytest.mark.parametrize("how", ["before the handshake", "half a hello", "half a handshake", "after the handshake"])
async def test_a_connection_that_stalls_is_ended_in_time_and_others_link_meanwhile(
    office: Office, events: EventLog, how: str
) -> None:
    async with guarded(office, handshake_timeout=700) as source:
        began = time.monotonic()
        silent = [stalled(source, office, how) for _ in range(3)]
        await unharmed(office, source)
        for wire in silent:
            await asyncio.to_thread(wire.rest)
        assert time.monotonic() - began < 10
        await eventually(lambda: len(events.named("link.rejected", local_cluster_id=NODE)) == 3)


@pytest.mark.parametrize("how", ["closes", "resets", "closes within TLS"])
@pytest.mark.parametrize("when", ["before the handshake", "half a handshake", "after the handshake"])
async def test_a_client_that_hangs_up_is_not_said_to_be_slow(
    office: Office, events: EventLog, how: str, when: str
) -> None:
    async with guarded(office) as source:
        wire = stalled(source, office, when)
        if how == "resets":
            wire.reset()
        elif how == "closes within TLS" and isinstance(wire.sock, ssl.SSLSocket):
            wire.sock.settimeout(1.0)
            with contextlib.suppress(OSError):  # the node need not answer
                wire.sock.unwrap()
            wire.close()
        else:
            wire.close()
        rejected = await events.first("link.rejected", local_cluster_id=NODE)
        assert "time" not in rejected["reason"], rejected
        assert len(rejected["reason"]) > 10
        assert events.named("link.accept_failed") == events.named("engine.bug") == []


async def test_a_flood_of_new_keys_holds_nobody_up(office: Office, events: EventLog) -> None:
    """A client with a good certificate sends nothing but KeyUpdate, each of which makes the node compute keys."""
    async with guarded(office, handshake_timeout=20_000) as source:
        context = office.context("right", *cluster(11))
        keys = office.folder / "keys"
        context.keylog_filename = str(keys)
        with admitted(source, context) as wire:
            updates = KeyUpdates(keys)
            raw = wire.below_tls()
            flooding = asyncio.ensure_future(asyncio.to_thread(updates.flood, raw, 20_000))
            for _ in range(3):
                await unharmed(office, source)
            await flooding
            assert events.named("link.rejected") == []  # each of them was right
            raw.close()
        assert events.named("engine.bug") == []


async def test_a_frame_above_the_limit_ends_the_connection_within_tls(office: Office, events: EventLog) -> None:
    async with guarded(office) as source:
        with admitted(source, office.context("right", *cluster(11))) as wire:
            wire.send(ME.but(group="g" * 20_000).hello)
            assert wire.rest() == b""
        await events.first("link.rejected", text="exceeds the limit of 4096", local_cluster_id=NODE)


async def test_a_goodbye_of_tls_ends_the_link_whenever_it_comes(office: Office, events: EventLog) -> None:
    async with guarded(office) as source:
        context = office.context("right", *cluster(11))
        me = linked(ME, lambda: admitted(source, context))
        me.asks.send(frame(PING, 7))
        answer = me.asks.read()
        assert answer is not None
        assert (answer.kind, answer.fields) == (PONG, [7])
        me.asks.send(frame(PING, 8)[:5])
        for wire in (me.asks, me.serves):
            assert isinstance(wire.sock, ssl.SSLSocket)
            wire.sock.settimeout(1.0)
            with contextlib.suppress(OSError):
                wire.sock.unwrap()
        await events.first("link.lost", cluster_id=11, local_cluster_id=NODE)
        me.close()
        with linked(ME.but(incarnation=secrets.token_bytes(16)), lambda: admitted(source, context)):
            await events.first("link.closed", cluster_id=11, text="restarted")


async def test_a_secret_is_asked_for_within_tls_too(office: Office, events: EventLog) -> None:
    """The certificate does not stand for it, and of neither anything shows in the log."""
    options = office.right.issue("node", *cluster(NODE)) | {"link_secret": "correct horse battery staple"}
    async with serving(NODE, **options) as source:
        context = office.context("right", *cluster(11))
        for who, kinds in ((ME, [REJECT]), (ME.but(secret=b"a guess"), [CHALLENGE, REJECT])):
            with admitted(source, context) as wire:
                wire.send(who.hello + frame(PROVE, bytes(32)))
                assert [one.kind for one in frames_in(wire.rest())] == kinds
        with linked(ME.but(secret=b"correct horse battery staple"), lambda: admitted(source, context)):
            pass
        assert "correct horse" not in str(events.events)
        await honest_client(source, **office.right.issue("honest", *cluster(99)), link_secret=options["link_secret"])
