"""Who has no certificate, or not the right one: that such a client gets no further than the handshake, learns nothing
and keeps nobody out. The client is made by hand (wire_client.py beside it).
"""

from __future__ import annotations

import contextlib
import secrets
import ssl
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID

from tests.certificates import Authority, cluster
from tests.hostile import STRIDE, TENSORS, publish
from tests.integration.tls_scene import ME, NODE, Office, admitted, guarded, presents
from tests.integration.wire_client import AGREED, DONE, DONE_ACK, GRANT, REJECT, WELCOME, Wire, frame, linked, request
from tests.loop_nodes import EventLog, event_log


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Office:
    return Office.at(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def events() -> AsyncIterator[EventLog]:
    with event_log() as log:
        yield log


async def test_the_client_made_by_hand_is_let_in_when_its_certificate_is_right(office: Office) -> None:
    """Else its refusals would mean nothing. It pulls, too, by a payload connection with TLS."""
    async with guarded(office) as source:
        for names in (cluster(11), cluster("*"), cluster(5, 11, 6)):
            context = office.context("right", *names)
            key, cache = await publish(source, 0x33)
            connect = partial(admitted, source, context)
            with linked(ME, connect) as me, Wire.over_tls(source.listen_address, context, b"T") as payload:
                payload.send(me.token + b"\0")
                assert payload.take(1) == AGREED
                ask = request(1, key.req_id, tensors=TENSORS, size=STRIDE, inline=False)  # type: ignore[union-attr]
                me.asks.send(ask)
                grant = me.asks.read()
                assert grant is not None
                assert (grant.kind, grant.fields[0]) == (GRANT, 1)
                assert payload.take(24)[:16] == grant.fields[1]
                assert payload.take(STRIDE * TENSORS) == b"\x33" * STRIDE * TENSORS
                me.asks.send(frame(DONE, grant.fields[1], "by hand"))
                assert (me.asks.read() or grant).kind == DONE_ACK
            await source.kv_cache_manager.deallocate_cache(cache)


# --- certificates that are not good ---


def by_a_peer(office: Office) -> ssl.SSLContext:
    """Signed with the key of another peer's good certificate, which is no authority's."""
    peer = Path(office.right.issue("a peer", *cluster(7))["tls_certificate"])
    false = Authority(office.folder, "false")
    false._key = serialization.load_pem_private_key(peer.read_bytes(), None)  # type: ignore[assignment]
    false._name = x509.load_pem_x509_certificate(peer.read_bytes()).subject
    signed = Path(false.issue("signed by a peer", *cluster(11))["tls_certificate"])
    signed.write_bytes(signed.read_bytes() + peer.read_bytes())
    return presents(str(signed))


def with_another_key(office: Office) -> ssl.SSLContext:
    """The certificate of the right peer, shown by somebody who does not have its key: the half of a key that a library
    compares with the certificate is right, the other half is not.
    """

    def read(name: str) -> tuple[bytes, bytes, bytes]:
        key = serialization.load_pem_private_key(Path(name).read_bytes(), None)
        text = key.private_bytes(
            serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        point = serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint
        return Path(name).read_bytes(), text, key.public_key().public_bytes(*point)

    pem, _, point = read(office.right.issue("victim", *cluster(11))["tls_certificate"])
    _, text, own = read(office.wrong.issue("thief", *cluster(11))["tls_certificate"])
    stolen = ssl.DER_cert_to_PEM_cert(text.replace(own, point)).replace("CERTIFICATE", "EC PRIVATE KEY")
    path = office.folder / "stolen.pem"
    path.write_bytes(stolen.encode() + pem[pem.index(b"-----BEGIN CERTIFICATE") :])
    return presents(str(path))


def self_signed(office: Office) -> ssl.SSLContext:
    own = Authority(office.folder, "own")
    path = office.folder / "own with key.pem"
    private = own._key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + own.pem.read_bytes())
    return presents(str(path))


SERVERS_ONLY = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
BAD: dict[str, tuple[Callable[[Office], ssl.SSLContext], str]] = {
    "none": (lambda _: presents(None), "peer did not return a certificate"),
    "self-signed": (self_signed, "certificate verify failed"),
    "of another authority of that name": (lambda o: o.context("fake", *cluster(11), wrong=True), "verify failed"),
    "signed by a peer": (by_a_peer, "certificate verify failed"),
    "expired": (lambda o: o.context("old", *cluster(11), days=(-3, -1)), "certificate has expired"),
    "not yet valid": (lambda o: o.context("new", *cluster(11), days=(1, 3)), "certificate is not yet valid"),
    "for servers only": (lambda o: o.context("serves", *cluster(11), extensions=[SERVERS_ONLY]), "verify failed"),
    "without its key": (with_another_key, "bad signature"),
    "with TLS 1.2": (lambda o: o.context("older", *cluster(11), newest=ssl.TLSVersion.TLSv1_2), "unsupported protocol"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "reason"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("kind", [b"S", b"T"], ids=["control", "payload"])
async def test_a_certificate_that_is_not_good_gets_no_word(
    office: Office, events: EventLog, make: Callable[[Office], ssl.SSLContext], reason: str, kind: bytes
) -> None:
    async with guarded(office) as source:
        context = make(office)
        with contextlib.suppress(ssl.SSLError), Wire.over_tls(source.listen_address, context, kind) as wire:
            wire.send(ME.hello if kind == b"S" else bytes(17))
            assert wire.rest() == b""
        rejected = await events.first("link.rejected", local_cluster_id=NODE)
        assert reason in rejected["reason"].replace("_", " ").lower(), rejected["reason"]
        assert events.named("link.accept_failed") == []


OTHERS = {
    "no name": (),
    "another cluster": cluster(12),
    "a longer number": cluster(111),
    "the beginning of the number": cluster(1),
    "the end of the number": ("kvpull:cluster:1",),
    "upper case": ("KVPULL:cluster:11", "kvpull:CLUSTER:11", "Kvpull:Cluster:*"),
    "spaces": (" kvpull:cluster:11", "kvpull:cluster:11 ", "kvpull:cluster: 11", "kvpull:cluster:11\n"),
    "a zero byte behind": ("kvpull:cluster:11\0", "kvpull:cluster:11\0.example", "kvpull:cluster:*\0"),
    "a zero byte before": ("\0kvpull:cluster:11", "kvpull:cluster:\x0011"),
    "other ways to write the number": ("kvpull:cluster:011", "kvpull:cluster:+11", "kvpull:cluster:0xb"),
    "patterns": ("kvpull:cluster:1*", "kvpull:cluster:**", "kvpull:cluster:?1", "kvpull:*", "*", "kvpull:cluster:"),
    "several in one": ("kvpull:cluster:11,12", "kvpull:cluster:11;kvpull:cluster:12", "kvpull:cluster:11/"),
    "other schemes": ("https://kvpull:cluster:11", "spiffe://kvpull/cluster/11", "urn:kvpull:cluster:11"),
}  # fmt: skip
LOOKALIKES: dict[str, x509.ExtensionType] = {
    "a DNS name": x509.SubjectAlternativeName([x509.DNSName("kvpull:cluster:11")]),
    "a mail address": x509.SubjectAlternativeName([x509.RFC822Name("kvpull:cluster:11")]),
    "a directory name": x509.SubjectAlternativeName(
        [x509.DirectoryName(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvpull:cluster:11")]))]
    ),
    "a name of the issuer": x509.IssuerAlternativeName([x509.UniformResourceIdentifier("kvpull:cluster:11")]),
}
NAMED = {name: (uris, ()) for name, uris in OTHERS.items()} | {name: ((), (one,)) for name, one in LOOKALIKES.items()}


@pytest.mark.parametrize(("uris", "extensions"), NAMED.values(), ids=NAMED.keys())
async def test_a_certificate_of_the_right_authority_that_does_not_name_the_cluster(
    office: Office, events: EventLog, uris: tuple[str, ...], extensions: tuple[x509.ExtensionType, ...]
) -> None:
    async with guarded(office) as source:
        # Its own name, too, may look like what is asked for.
        context = office.context("kvpull:cluster:11", *uris, extensions=extensions)
        with admitted(source, context) as wire:
            refused = ME.greets(wire)
            assert refused.kind == REJECT
            assert "does not name kvpull:cluster:11" in refused.fields[1]
            assert str(NODE) not in refused.fields[1]
            assert wire.rest() == b""
        await events.first("link.rejected", text="does not name kvpull:cluster:11", local_cluster_id=NODE)


async def test_names_that_are_no_text_are_refused_as_a_bad_certificate(office: Office, events: EventLog) -> None:
    """A URI is ASCII; this authority signs another one all the same."""
    uri = b"kvpull:cluster:\xff\xfe"
    names = b"\x30" + bytes([len(uri) + 2]) + b"\x86" + bytes([len(uri)]) + uri
    extension = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, names)
    async with guarded(office) as source:
        context = office.context("odd", extensions=[extension])
        with Wire.over_tls(source.listen_address, context) as wire:
            wire.send(ME.hello)
            assert wire.rest() == b""
        await events.first("link.rejected", text="names", local_cluster_id=NODE)
        assert events.named("link.accept_failed") == []


async def test_a_certificate_without_a_name_learns_no_cluster_id(office: Office) -> None:
    """Asking for a wrong one would tell, if names were looked at later."""
    async with guarded(office) as source:
        with admitted(source, office.context("nobody")) as wire:
            refused = ME.but(asked=3).greets(wire)
            assert (refused.kind, str(NODE) in refused.fields[1]) == (REJECT, False), refused.fields


# --- payload connections ---


@pytest.mark.parametrize("names", [cluster(12), ()], ids=["another cluster", "no name"])
async def test_a_token_in_the_hands_of_another_cluster_is_of_no_use(
    office: Office, events: EventLog, names: tuple[str, ...]
) -> None:
    async with guarded(office) as source:
        right, other = office.context("right", *cluster(11)), office.context("other", *names)
        with linked(ME, lambda: admitted(source, right)) as me:
            for lane in (b"\0", b"\1"):
                with Wire.over_tls(source.listen_address, other, b"T") as wire:
                    wire.send(me.token + lane)
                    assert wire.rest() == b""
            await events.first("link.rejected", text="does not name kvpull:cluster:11")
            with Wire.over_tls(source.listen_address, right, b"T") as wire:
                wire.send(me.token + b"\0")
                assert wire.take(1) == AGREED


async def test_a_second_connection_with_the_certificate_of_another_cluster(office: Office) -> None:
    async with guarded(office) as source:
        right, other = office.context("right", *cluster(11)), office.context("other", *cluster(12))
        with admitted(source, right) as first:
            welcome = ME.greets(first)
            assert welcome.kind == WELCOME
            for who in (ME, ME.but(cluster_id=12)):
                with admitted(source, other) as wire:
                    refused = who.but(lane=1, token=welcome.fields[2], nonce=secrets.token_bytes(32)).greets(wire)
                    assert refused.kind == REJECT
