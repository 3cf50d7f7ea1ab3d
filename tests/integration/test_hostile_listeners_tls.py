"""Whoever is dialled in place of a node with TLS: false certificates, none, plain bytes, silence. The side that dials
learns why in time, says nothing that is not encrypted and leaves nothing open. The listener is made by hand
(wire_client.py beside it).
"""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from kvpull_async import CacheKey, LLMException, LLMStatusCode
from tests.certificates import cluster
from tests.hostile import DESC, OK, honest_pull, info, link, links_of, pulling, serving, unlink
from tests.integration.tls_scene import NODE, Office, guarded
from tests.integration.wire_client import AGREED, CHALLENGE, HELLO, REFUSED, Wire, frame, server
from tests.integration.wire_listener import SECRET, Script, accepts, relay, take
from tests.loop_nodes import EventLog, event_log

FAILED = LLMStatusCode.LLM_LINK_FAILED


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Office:
    return Office.at(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def events() -> AsyncIterator[EventLog]:
    with event_log() as log:
        yield log


def shows(office: Office, name: str, *uris: str, wrong: bool = False, **more: Any) -> ssl.SSLContext:
    """Of a listener with such a certificate, which takes any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority = office.wrong if wrong else office.right
    context.load_cert_chain(authority.issue(name, *uris, **more)["tls_certificate"])
    return context


def secured(context: ssl.SSLContext, then: Callable[[Wire], object] | None = None) -> Script:
    """Consents, speaks TLS, and is honest within it, unless it is to do something else."""

    def script(wire: Wire, _: bytes) -> None:
        wire.send(AGREED)
        try:
            wire.secure(context, accepting=True)
        except (ssl.SSLError, ConnectionError):
            return  # what the dialler does not like ends it here already
        wire.send(AGREED)
        (then or partial(accepts, secret=None))(wire)

    return script


async def fails(office: Office, script: Script, reason: str, events: EventLog, *, timeout: int = 20_000) -> None:
    """The link does, with this reason and in time, and the same side then links with the right node."""
    options = office.right.issue("dialler", *cluster(99)) | {"transfer_backend": "tcp"}
    async with pulling(99, **options) as puller, guarded(office) as right:
        with server(script) as one:
            began = time.monotonic()
            code = await link(puller, info(1, one.address), timeout=timeout)
            assert code in (FAILED, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)
            assert time.monotonic() - began < timeout / 1000 + 5
            failed = await events.first("link.failed", local_cluster_id=99)
            assert reason in failed["reason"], failed
            assert set(one.preambles) == {b"KVPULL\x01S"}  # never without TLS after all
        assert events.named("engine.bug") == events.named("link.bug") == []
        assert links_of(puller) == []
        assert await link(puller, right) == OK
        await honest_pull(puller, right, 3)
        assert await unlink(puller, NODE) == OK


async def test_a_listener_made_by_hand_is_linked_when_its_certificate_is_right(office: Office) -> None:
    """Else the refusals of the others would mean nothing."""
    for names in (cluster(1), cluster("*"), cluster(2, 1)):
        with server(secured(shows(office, "right", *names))) as one:
            async with pulling(99, **office.right.issue("dialler", *cluster(99))) as puller:
                assert await link(puller, info(1, one.address)) == OK
                assert await unlink(puller, 1) == OK
            assert one.preambles == [b"KVPULL\x01S"] * 2


CERTIFICATES: dict[str, tuple[Callable[[Office], ssl.SSLContext], str]] = {
    "another cluster": (lambda o: shows(o, "other", *cluster(2)), "does not name kvpull:cluster:1"),
    "the dialler's own cluster": (lambda o: shows(o, "own", *cluster(99)), "does not name kvpull:cluster:1"),
    "no name": (lambda o: shows(o, "nobody"), "does not name kvpull:cluster:1"),
    "a longer number": (lambda o: shows(o, "longer", *cluster(11)), "does not name kvpull:cluster:1"),
    "a zero byte behind": (lambda o: shows(o, "zero", "kvpull:cluster:1\0"), "does not name kvpull:cluster:1"),
    "another authority of that name": (lambda o: shows(o, "fake", *cluster(1), wrong=True), "verify failed"),
    "expired": (lambda o: shows(o, "old", *cluster(1), days=(-3, -1)), "certificate has expired"),
    "not yet valid": (lambda o: shows(o, "new", *cluster(1), days=(1, 3)), "certificate is not yet valid"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "reason"), CERTIFICATES.values(), ids=CERTIFICATES.keys())
async def test_a_certificate_that_is_not_that_of_the_right_node(
    office: Office, events: EventLog, make: Callable[[Office], ssl.SSLContext], reason: str
) -> None:
    await fails(office, secured(make(office)), reason, events)


async def test_tls_before_1_3_is_not_spoken(office: Office, events: EventLog) -> None:
    older = shows(office, "older", *cluster(1))
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    await fails(office, secured(older), "protocol version", events)


def answers(*data: bytes, hang_up: bool = False) -> Script:
    """To the preamble; the dialler then ends the connection, and has said nothing more, or something of TLS."""

    def script(wire: Wire, _: bytes) -> None:
        wire.send(b"".join(data))
        if hang_up:
            wire.hang_up()
        said = wire.take(65536)
        assert said == b"" or said[:1] in (b"\x15", b"\x16"), said

    return script


PLAIN: dict[str, tuple[Script, str]] = {
    "no TLS here": (answers(REFUSED), "the dialling side asks for TLS, the accepting side has no certificates"),
    "no TLS here, and then frames": (answers(REFUSED, b"\x03\0\0\0\x05\x03\0\0\0\x92\x00\xa0"), "has no certificates"),
    "frames": (answers(b"\x03\0\0\0\x05\x03\0\0\0\x92\x00\xa0"), "does not speak the kvpull protocol"),
    "an end": (answers(hang_up=True), "hung up"),
    "consent, and then frames": (answers(AGREED, b"\x03\0\0\0\x05\x03\0\0\0\x92\x00\xa0"), "SSL"),
    "consent, and then zeros": (answers(AGREED, bytes(600)), "SSL"),
    "consent, and then an end": (answers(AGREED, hang_up=True), "hung up"),
    "consent twice": (answers(AGREED, AGREED * 20), "SSL"),
}  # fmt: skip


@pytest.mark.parametrize(("script", "reason"), PLAIN.values(), ids=PLAIN.keys())
async def test_no_word_is_said_without_tls(office: Office, events: EventLog, script: Script, reason: str) -> None:
    await fails(office, script, reason, events)


@pytest.mark.parametrize("when", ["at once", "after the consent", "within TLS", "after the greeting's first word"])
async def test_silence_ends_with_the_dialler_s_time(office: Office, events: EventLog, when: str) -> None:
    right = shows(office, "right", *cluster(1))

    def script(wire: Wire, _: bytes) -> None:
        if when != "at once":
            wire.send(AGREED)
        if when in ("within TLS", "after the greeting's first word"):
            wire.secure(right, accepting=True)
        if when == "after the greeting's first word":
            wire.send(AGREED)
            take(wire, HELLO)

    await fails(office, script, "did not answer in time", events, timeout=500)


@pytest.mark.parametrize("word", [b"\x15", b"\x00", b"\x06\x06", b""])
async def test_what_is_no_consent_within_tls_ends_the_link(office: Office, events: EventLog, word: bytes) -> None:
    right = shows(office, "right", *cluster(1))

    def script(wire: Wire, _: bytes) -> None:
        wire.send(AGREED)
        wire.secure(right, accepting=True)
        wire.send(word)
        wire.hang_up()

    await fails(office, script, "", events)


async def test_a_man_in_the_middle_cannot_take_tls_away(office: Office, events: EventLog) -> None:
    """He changes the kind of connection on its way, to a node with TLS and to one without."""
    async with guarded(office) as with_tls, serving(1, handshake_timeout=500) as without:
        for target in (with_tls, without):
            await fails(office, relay(target.listen_address, first=b"C"), "", events)
            assert links_of(target) == []


async def test_who_shows_another_certificate_on_the_payload_connection_hears_no_token(
    office: Office, events: EventLog
) -> None:
    """Else one who holds a certificate of another cluster, and is in the middle, could serve the bytes of this one."""
    right, other = shows(office, "right", *cluster(1)), shows(office, "other", *cluster(2))
    heard: list[bytes] = []

    def script(wire: Wire, kind: bytes) -> None:
        if kind == b"S":
            secured(right)(wire, kind)
            return
        wire.send(AGREED)
        wire.secure(other, accepting=True)
        heard.append(wire.take(17))

    options = office.right.issue("dialler", *cluster(99)) | {"inline_limit": 0}
    with server(script) as one:
        async with pulling(99, **options) as puller:
            assert await link(puller, info(1, one.address)) == OK
            into = await puller.kv_cache_manager.allocate_cache(DESC)
            with pytest.raises(LLMException, match="does not name kvpull:cluster:1"):
                await puller.kv_cache_manager.pull_cache(CacheKey(1, 7), into)
            await puller.kv_cache_manager.deallocate_cache(into)
    assert heard
    assert set(heard) == {b""}


async def test_who_takes_the_second_connection_must_be_who_took_the_first(office: Office, events: EventLog) -> None:
    """One who holds a certificate of another cluster, and is in the middle, lets the first connection through."""
    right, other = shows(office, "right", *cluster(1)), shows(office, "other", *cluster(2))
    came: list[bytes] = []

    def script(wire: Wire, kind: bytes) -> None:
        came.append(kind)
        if len(came) == 1:
            secured(right)(wire, kind)
        else:
            secured(other, partial(accepts, secret=None, who=2))(wire, kind)

    await fails(office, script, "the second connection reached another node than the first", events)


def open_to_all(wire: Wire) -> None:
    take(wire, HELLO)
    wire.send(frame(CHALLENGE, 4, b"i" * 16, b"n" * 32, False))


async def test_a_certificate_does_not_stand_for_the_secret(office: Office, events: EventLog) -> None:
    with server(secured(shows(office, "right", *cluster(1)), open_to_all)) as one:
        options = office.right.issue("dialler", *cluster(99)) | {"link_secret": SECRET.decode()}
        async with pulling(99, **options) as puller:
            assert await link(puller, info(1, one.address)) == FAILED
            await events.first("link.failed", text="only one side has a link secret", local_cluster_id=99)
