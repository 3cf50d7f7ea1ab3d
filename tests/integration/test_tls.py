"""Links over TLS: what they carry, what certificates they need, and what a side without any is told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpull_async import (
    CacheDesc,
    CacheKey,
    DataType,
    LLMException,
    LLMStatusCode,
    Placement,
)
from tests.certificates import Authority, cluster
from tests.hostile import MAGIC, OK, Raw, honest_client, honest_pull, link, links_of, node, pulling, serving
from tests.loop_nodes import event_log

pytestmark = pytest.mark.smoke  # asyncio's TLS differs between versions of Python
FAILED = LLMStatusCode.LLM_LINK_FAILED
INVALID = LLMStatusCode.LLM_PARAM_INVALID
paths = pytest.mark.parametrize("path", ["tcp", "shm"])


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


def options(authority: Authority, cluster_id: int, **more: Any) -> dict[str, Any]:
    return authority.issue(f"of {cluster_id}", *cluster(cluster_id)) | {"transfer_backend": "tcp"} | more


@paths
async def test_a_pull_over_tls_is_right(authority: Authority, path: str) -> None:
    async with (
        serving(1, **options(authority, 1, transfer_backend=path)) as source,
        pulling(99, **options(authority, 99, transfer_backend=path)) as puller,
    ):
        assert await link(puller, source) == OK
        for fill in range(1, 4):
            await honest_pull(puller, source, fill)
        assert [one.path.name for one in links_of(puller)] == [path]


@pytest.mark.parametrize("entries", [1, 64], ids=["small", "megabytes"])
@pytest.mark.parametrize("inline_limit", [0, 65536])
async def test_every_byte_of_large_pulls_arrives(authority: Authority, entries: int, inline_limit: int) -> None:
    desc = CacheDesc(4, [entries, 70_001], DataType.DT_UINT8, Placement.HOST)
    more = {"inline_limit": inline_limit}
    async with serving(1, **options(authority, 1)) as source, pulling(99, **options(authority, 99, **more)) as puller:
        assert await link(puller, source) == OK
        keys = [CacheKey(1, number) for number in range(entries)]
        cache = await source.kv_cache_manager.allocate_cache(desc, keys)
        content = np.random.default_rng(7).integers(0, 256, (4, entries, 70_001), dtype=np.uint8)
        for tensor in range(4):
            source.kv_cache_manager.get_cache_tensors(cache, tensor)[0].numpy()[:] = content[tensor]
        into = await puller.kv_cache_manager.allocate_cache(desc)
        for number in (0, entries // 2, entries - 1)[:entries]:
            await puller.kv_cache_manager.pull_cache(keys[number], into, batch_index=number)
            for tensor in range(4):
                found = puller.kv_cache_manager.get_cache_tensors(into, tensor)[0].numpy()[number]
                assert np.array_equal(found, content[tensor, number])


async def test_p1_p4_a_pull_over_tls_that_is_cancelled_writes_no_more_and_the_link_goes_on(
    authority: Authority,
) -> None:
    desc = CacheDesc(2, [1, 64 << 20], DataType.DT_UINT8, Placement.HOST)
    async with serving(1, **options(authority, 1)) as source, pulling(99, **options(authority, 99)) as puller:
        assert await link(puller, source) == OK
        cache = await source.kv_cache_manager.allocate_cache(desc, [CacheKey(1, 1)])
        for tensor in range(2):
            source.kv_cache_manager.get_cache_tensors(cache, tensor)[0].numpy()[:] = 7
        into = await puller.kv_cache_manager.allocate_cache(desc)
        views = [puller.kv_cache_manager.get_cache_tensors(into, tensor)[0].numpy() for tensor in range(2)]
        for after in (0.001, 0.01, 0.03, 0.05):
            pull = asyncio.ensure_future(puller.kv_cache_manager.pull_cache(CacheKey(1, 1), into, timeout=20_000))
            await asyncio.sleep(after)
            pull.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pull
            for view in views:
                view[:] = 9
            await asyncio.sleep(0.1)
            assert all((view == 9).all() for view in views)
        await puller.kv_cache_manager.pull_cache(CacheKey(1, 1), into, timeout=20_000)
        assert all((view == 7).all() for view in views)


MISMATCHED = {
    "only the source": (True, False, "the accepting side wants TLS, the dialling side has no certificates"),
    "only the puller": (False, True, "the dialling side asks for TLS, the accepting side has no certificates"),
}


@pytest.mark.parametrize(("theirs", "ours", "reason"), MISMATCHED.values(), ids=MISMATCHED.keys())
async def test_tls_on_one_side_only_says_so_at_once(
    authority: Authority, theirs: bool, ours: bool, reason: str
) -> None:
    """Long before any timeout, on both sides."""

    def some(cluster_id: int, *, tls: bool) -> dict[str, Any]:
        patient = {"handshake_timeout": 60_000}
        return options(authority, cluster_id, **patient) if tls else {"transfer_backend": "tcp", **patient}

    with event_log() as events:
        async with serving(1, **some(1, tls=theirs)) as source, pulling(99, **some(99, tls=ours)) as puller:
            began = asyncio.get_running_loop().time()
            assert await link(puller, source, timeout=60_000) == FAILED
            assert asyncio.get_running_loop().time() - began < 20.0
            await events.first("link.failed", text=reason, local_cluster_id=99)
            rejected = await events.first("link.rejected", local_cluster_id=1)
            assert "TLS" in str(rejected)
            assert links_of(source) == links_of(puller) == []
            await honest_client(source, **some(99, tls=theirs))


async def test_a_certificate_speaks_for_the_clusters_it_names_only(authority: Authority) -> None:
    async with serving(1, **options(authority, 1)) as source:
        for cluster_id, names, right in (
            (7, cluster(7), True), (8, cluster(7), False), (8, cluster(7, 8), True), (9, cluster("*"), True),
            (9, ("kvpull:cluster:99", "kvpull:cluster:", "https://cluster/9"), False), (9, (), False),
        ):  # fmt: skip
            certificate = authority.issue(f"dialler {cluster_id}", *names)
            async with pulling(cluster_id, transfer_backend="tcp", **certificate) as puller:
                with event_log() as events:
                    assert (await link(puller, source) == OK) is right, (cluster_id, names)
                    if not right:
                        named = f"does not name kvpull:cluster:{cluster_id}"
                        await events.first("link.failed", text=named, local_cluster_id=cluster_id)
                        await events.first("link.rejected", text=named, local_cluster_id=1)


async def test_the_side_that_dials_checks_whom_it_reached(authority: Authority) -> None:
    """A node that listens as cluster 1 with the certificate of cluster 2."""
    wrong = authority.issue("accepting", *cluster(2))
    async with serving(1, transfer_backend="tcp", **wrong) as source, pulling(99, **options(authority, 99)) as puller:
        with event_log() as events:
            assert await link(puller, source) == FAILED
            await events.first("link.failed", text="does not name kvpull:cluster:1", local_cluster_id=99)


@pytest.mark.parametrize("kind", ["expired", "not yet", "another authority"])
@pytest.mark.parametrize("side", ["accepting", "dialling"])
async def test_a_bad_certificate_is_refused_on_both_sides(
    authority: Authority, tmp_path: Path, kind: str, side: str
) -> None:
    if kind == "another authority":
        bad = Authority(tmp_path, "impostor").issue("bad", *cluster(1, 99)) | {"tls_authority": str(authority.pem)}
    else:
        bad = authority.issue(kind, *cluster(1, 99), days=(-3, -1) if kind == "expired" else (1, 3))
    good = authority.issue("good", *cluster(1, 99))
    theirs, ours = (bad, good) if side == "accepting" else (good, bad)
    with event_log() as events:
        async with (
            serving(1, transfer_backend="tcp", **theirs) as source,
            pulling(99, transfer_backend="tcp", **ours) as puller,
        ):
            assert await link(puller, source) == FAILED
            failed = await events.first("link.failed", local_cluster_id=99)
            assert "certificate" in failed["reason"]
            await events.first("link.rejected", local_cluster_id=1)
            await honest_client(source, transfer_backend="tcp", **good) if side == "dialling" else None


async def test_a_secret_and_tls_go_together(authority: Authority) -> None:
    more = {"link_secret": "correct horse battery staple"}
    async with serving(1, **options(authority, 1, **more)) as source:
        async with pulling(99, **options(authority, 99, **more)) as puller:
            assert await link(puller, source) == OK
            await honest_pull(puller, source, 5)
        async with pulling(99, **options(authority, 99)) as puller:
            assert await link(puller, source) == FAILED


async def test_certificates_let_a_node_listen_beyond_this_machine(authority: Authority) -> None:
    async with node(1, listen="0.0.0.0:0", **options(authority, 1)) as source:
        assert source.listen_address is not None


@pytest.mark.parametrize("missing", ["tls_authority", "tls_certificate"])
async def test_half_of_what_tls_needs_is_refused(authority: Authority, missing: str) -> None:
    some = options(authority, 1)
    del some[missing]
    with pytest.raises(LLMException, match=r"TLS needs both kvpull\.TlsCertificate and kvpull\.TlsAuthority") as raised:
        async with serving(1, **some):
            pass
    assert raised.value.status_code == INVALID


@pytest.mark.parametrize("broken", ["no such file", "not PEM", "password", "another key"])
async def test_files_that_cannot_be_used_are_named_by_init(authority: Authority, tmp_path: Path, broken: str) -> None:
    """Nobody is asked for a password at a terminal."""
    some = options(authority, 1)
    if broken == "no such file":
        some["tls_authority"] = str(tmp_path / "nowhere.pem")
    elif broken == "not PEM":
        (tmp_path / "text.pem").write_text("hello")
        some["tls_certificate"] = str(tmp_path / "text.pem")
    elif broken == "password":
        some |= authority.issue("locked", *cluster(1), password="open sesame")
    else:
        some["tls_key"] = authority.issue("other", *cluster(1), separate_key=True)["tls_key"]
    with pytest.raises(LLMException, match=r"TLS: .*\.(pem|key)") as raised:
        async with serving(1, **some):
            pass
    assert raised.value.status_code == INVALID


async def test_a_key_in_a_file_of_its_own(authority: Authority) -> None:
    async with serving(1, transfer_backend="tcp", **authority.issue("split", *cluster(1), separate_key=True)) as source:
        await honest_client(source, **options(authority, 99))


@pytest.mark.parametrize("kind", [b"S", b"T"], ids=["control", "payload"])
async def test_p6_a_handshake_that_is_too_long_is_ended_before_it_is_looked_at(
    authority: Authority, kind: bytes
) -> None:
    """A certificate may be as large as a stranger likes; judging it would hold the loop."""
    large = authority.issue("large", *cluster(*range(10_000, 12_000)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(authority.pem)
    context.load_cert_chain(large["tls_certificate"])
    with event_log() as events:
        async with serving(1, **options(authority, 1)) as source:
            raw = await Raw.connect(source.listen_address, MAGIC + b"S")
            assert await raw.receive() == b"\x06"
            raw.sock.setblocking(True)
            await asyncio.to_thread(_handshake, context, raw.sock)
            await events.first("link.rejected", text="handshake is longer than 16384 bytes", local_cluster_id=1)
            await honest_client(source, **options(authority, 99))


def _handshake(context: ssl.SSLContext, sock: socket.socket) -> None:
    """As far as it gets."""
    with contextlib.suppress(OSError):
        sock.settimeout(10)
        with context.wrap_socket(sock) as secured:
            secured.recv(1)
