"""TLS: whose certificates are taken, what names in them count, and sockets that the loop waits for."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtensionOID

from kvpull_async._deadline import Deadline
from kvpull_async.transport import tls
from kvpull_async.transport.tls import Certified, Tls
from tests.certificates import Authority, cluster


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


def loaded(authority: Authority, *uris: str, extensions: tuple[x509.ExtensionType, ...] = ()) -> Tls:
    options = authority.issue("one", *uris, extensions=extensions)
    return Tls.load(certificate=options["tls_certificate"], key="", authority=options["tls_authority"])


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two that are connected and do not block."""
    pair = socket.socketpair()
    for sock in pair:
        sock.setblocking(False)
    yield pair
    for sock in pair:
        sock.close()


@contextlib.asynccontextmanager
async def secured(ours: Tls, sockets: tuple[socket.socket, ...]) -> AsyncIterator[tuple[ssl.SSLSocket, ssl.SSLSocket]]:
    """The dialling end and the accepting one."""
    async with Deadline.after_ms(20_000).scope():
        near, far = await asyncio.gather(
            tls.connected(ours.dialling, sockets[0], accepting=False),
            tls.connected(ours.accepting, sockets[1], accepting=True),
        )
        try:
            yield near, far
        finally:
            near.close()
            far.close()


# --- certificates ---


def test_both_sides_want_tls_1_3_and_a_certificate(authority: Authority) -> None:
    one = loaded(authority, *cluster(1))
    for context in (one.dialling, one.accepting):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED
    assert one.accepting.num_tickets == 0


def test_a_file_that_cannot_be_used_is_named(authority: Authority, tmp_path: Path) -> None:
    good = authority.issue("good", *cluster(1))
    (tmp_path / "text.pem").write_text("hello")
    text, nowhere = str(tmp_path / "text.pem"), str(tmp_path / "nowhere.pem")
    for bad in (text, nowhere):
        with pytest.raises(OSError, match=bad):
            Tls.load(certificate=bad, key="", authority=good["tls_authority"])
        with pytest.raises(OSError, match=bad):
            Tls.load(certificate=good["tls_certificate"], key="", authority=bad)
        with pytest.raises(OSError, match=bad):
            Tls.load(certificate=good["tls_certificate"], key=bad, authority=good["tls_authority"])


def test_a_certificate_speaks_for_what_its_uris_name_and_for_nothing_else() -> None:
    names = (
        ("URI", "kvpull:cluster:7"),
        ("DNS", "kvpull:cluster:8"),
        ("URI", "https://cluster/9"),
        ("URI", "kvpull:9"),
    )
    some = Certified.of({"subjectAltName": names})
    assert some.names == ("kvpull:cluster:7",)
    assert [some.speaks_for(number) for number in (7, 8, 9, 77, 0)] == [True, False, False, False, False]
    assert Certified.of({"subjectAltName": (("URI", "kvpull:cluster:*"),)}).speaks_for(2**64 - 1)
    for nothing in (None, {}, {"subject": ((("commonName", "kvpull:cluster:7"),),)}):
        assert not Certified.of(nothing).speaks_for(7)


@pytest.mark.parametrize("accepting", [False, True])
async def test_names_that_are_no_text_are_an_error_of_the_peer(
    authority: Authority, sockets: tuple[socket.socket, socket.socket], accepting: bool
) -> None:
    names = b"\x30\x04\x86\x02\xff\xfe"
    odd = loaded(authority, extensions=(x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, names),))
    async with secured(odd, sockets) as ends:
        with pytest.raises(ssl.SSLError, match="the names in the peer's certificate are no text"):
            ends[accepting].getpeercert()
        assert ends[accepting].getpeercert(binary_form=True)


# --- sockets ---


async def test_both_ends_know_each_other_after_the_handshake(
    authority: Authority, sockets: tuple[socket.socket, socket.socket]
) -> None:
    async with secured(loaded(authority, *cluster(3, 4)), sockets) as ends:
        for end in ends:
            assert end.version() == "TLSv1.3"
            assert Certified.of(end.getpeercert()).names == cluster(3, 4)


async def test_more_than_fits_in_between_arrives(
    authority: Authority, sockets: tuple[socket.socket, socket.socket]
) -> None:
    data = bytes(range(251)) * 40_000
    async with secured(loaded(authority, *cluster(1)), sockets) as ends:
        for sender, receiver in (ends, ends[::-1]):
            sending = asyncio.ensure_future(tls.send(sender, data))
            got = bytearray()
            while len(got) < len(data):
                got += await tls.receive(receiver, 100_003)
            assert got == data
            await sending


async def test_the_end_is_no_bytes(authority: Authority, sockets: tuple[socket.socket, socket.socket]) -> None:
    async with secured(loaded(authority, *cluster(1)), sockets) as (near, far):
        await tls.send(near, b"last words")
        tls.shutdown(near)
        assert await tls.receive(far, 100) == b"last words"
        assert await tls.receive(far, 100) == b""


async def test_a_handshake_that_fails_closes_the_socket(
    authority: Authority, sockets: tuple[socket.socket, socket.socket]
) -> None:
    sockets[1].send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(ssl.SSLError):
        await tls.connected(loaded(authority, *cluster(1)).dialling, sockets[0], accepting=False)
    with contextlib.suppress(ConnectionResetError):
        while sockets[1].recv(4096):
            pass  # the dialler's first words, and then the end
    assert sockets[0].fileno() == -1


@pytest.mark.parametrize("accepting", [False, True])
async def test_a_handshake_that_is_given_up_closes_the_socket_and_the_loop_forgets_it(
    authority: Authority, sockets: tuple[socket.socket, socket.socket], accepting: bool
) -> None:
    one = loaded(authority, *cluster(1))
    number = sockets[0].fileno()
    waiting = asyncio.ensure_future(
        tls.connected(one.accepting if accepting else one.dialling, sockets[0], accepting=accepting)
    )
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert sockets[0].fileno() == -1
    assert not asyncio.get_running_loop().remove_reader(number)


async def test_p1_a_shutdown_from_another_thread_never_gives_a_reader_what_is_not_decrypted(
    authority: Authority, sockets: tuple[socket.socket, socket.socket]
) -> None:
    """The own shutdown of a TLS socket forgets its keys first: who reads on would get the peer's bytes as they are."""
    async with secured(loaded(authority, *cluster(1)), sockets) as (near, far):
        near.setblocking(True)
        got = bytearray()

        def read() -> None:
            buffer = bytearray(4096)
            with contextlib.suppress(OSError):
                while (n := near.recv_into(buffer)) > 0:
                    got.extend(buffer[:n])

        thread = threading.Thread(target=read)
        thread.start()
        with contextlib.suppress(OSError):
            for _ in range(200):
                await tls.send(far, bytes(16_000))
                if len(got) > 100_000:
                    tls.shutdown(near)
        await asyncio.to_thread(thread.join, 20)
        assert not thread.is_alive()
        assert got == bytes(len(got))
