"""Reports of doors left open: pickles, listeners for everyone, addresses out of messages, connections without end."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import pickle
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvpull_async import LLMConfig, LLMException, LLMRole, LLMStatusCode
from kvpull_async.protocol import frames, messages
from kvpull_async.protocol.session import Session
from tests import duo, hostile, house
from tests.certificates import Authority
from tests.conformance.api import Api
from tests.hostile import (
    MAGIC,
    OK,
    HostileSource,
    Raw,
    greet,
    honest_client,
    info,
    link,
    links_of,
    publish,
    pulling,
    raw_peer,
    serving,
)
from tests.integration.processes import sockets
from tests.integration.rig import FAILED, SOON, each_face
from tests.loop_nodes import event_log, eventually
from tests.wire import SAMPLES, identity, plain_hello

SECRET = "a secret of more than sixteen bytes"


def listening() -> list[str]:
    """The local address of every TCP socket on which this process listens, and the name of every such Unix socket."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            own.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/self/net/{table}").read_text(encoding="utf-8").splitlines()[1:]]
        found += [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in own]
    rows = [line.split() for line in Path("/proc/self/net/unix").read_text(encoding="utf-8").splitlines()[1:]]
    accepting = "00010000"
    return found + [row[7] for row in rows if row[3] == accepting and row[6] in own]


# -- 11.2, 11.6: what listens, and what is unpickled -------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "tcp", "shm", "inproc"])
@each_face
async def test_11_2_a_node_listens_nowhere_unless_told_and_on_the_loopback_if_so(backend: str, api: Api) -> None:
    before = listening()
    node = api.package.LLMDataDist(LLMRole.PROMPT, 1)
    try:
        await api.do(node.init, duo.options(transport=backend))
        assert listening() == before
        await api.do(node.finalize)
        await api.do(node.init, duo.options(transport=backend, listen=True))
        opened = [name for name in listening() if name not in before]
        assert opened == ([] if backend == "inproc" else ["0100007F"])
    finally:
        await api.do(node.finalize)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1"])
@each_face
async def test_11_2_beyond_this_machine_nobody_listens_without_a_key_or_the_explicit_wish(host: str, api: Api) -> None:
    node = api.package.LLMDataDist(LLMRole.PROMPT, 1)
    config = LLMConfig()
    config.listen_ip_info = f"{host}:0"
    with pytest.raises(LLMException, match="beyond this machine") as caught:
        await api.do(node.init, config.generate_options())
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert {"kvpull.LinkSecret", "kvpull.AllowInsecureNetwork"} <= set(str(caught.value).replace(",", "").split())


class Exploit:
    """Unpickling it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("state", ["a stranger", "a linked peer"])
async def test_11_2_a_pickle_on_the_wire_is_garbage_and_runs_nothing(state: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    data = pickle.dumps(Exploit(made))
    framed = len(data).to_bytes(4, "little") + data
    async with serving() as source:
        for attack in (data, framed, MAGIC + b"C" + framed):
            if state == "a stranger":
                raw = await Raw.connect(source.listen_address, attack)
                raw.hang_up()
                await raw.rest()
            else:
                peer = await raw_peer(source.listen_address)
                await peer.asks.send(attack)
                peer.asks.hang_up()
                await peer.asks.rest()
                peer.close()
        await honest_client(source)
    assert not made.exists()


def imports(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_11_6_no_source_unpickles_or_evaluates_what_it_is_sent() -> None:
    """Nor does one import an engine, whose helpers would do the first on what a peer sends."""
    wrong = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "zmq", "nixl", "mooncake"}
    for path in sorted((house.ROOT / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        assert not imports(tree) & wrong, path
        called = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not called & {"eval", "exec", "__import__"}, path


def test_11_6_a_link_and_a_pull_load_nothing_that_unpickles_engines_metadata() -> None:
    assert not {"nixl", "nixl_cu12", "mooncake", "zmq"} & {name.split(".")[0] for name in sys.modules}


async def test_11_6_the_side_channel_of_shared_memory_is_not_there_before_a_link_and_not_to_be_guessed() -> None:
    """A name of this machine with 128 random bits, told to peers that have been authenticated."""
    before = listening()
    options = {"transfer_backend": "shm", "link_secret": SECRET}
    names = []
    for _ in range(2):
        async with serving(**options) as source, pulling(**options) as puller:
            assert not [name for name in listening() if name.startswith("@") and name not in before]
            async with pulling(3, transfer_backend="shm", link_secret="another secret of the kind") as stranger:
                assert await link(stranger, source) == FAILED
            assert not [name for name in listening() if name.startswith("@") and name not in before]
            assert await link(puller, source) == OK
            names += [name for name in listening() if name.startswith("@") and name not in before]
    assert len(names) == len(set(names)) >= 2
    assert all(len(name) >= 32 for name in names)


# -- 11.3: addresses ---------------------------------------------------------------------------------------------------


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Where threads of the library have connected to."""
    addresses: list[Any] = []

    class Noting(socket.socket):
        pass

    for name in ("connect", "connect_ex"):

        def noting(sock: Any, address: Any, name: str = name) -> Any:
            if threading.current_thread().name.startswith("kvpull"):
                addresses.append(address)
            return getattr(super(socket.socket, sock), name)(address)

        monkeypatch.setattr(socket.socket, name, noting, raising=False)
    return addresses


def test_11_3_no_message_has_a_place_for_an_address_to_dial() -> None:
    """Those of pushes name memory of the receiver, which it looks up among its own caches."""
    kinds = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    named = {field for kind in kinds for field in kind.__struct_fields__}
    assert len(kinds) > 15
    assert not named & {"host", "ip", "port", "url", "uri", "address", "addresses", "endpoint", "listen", "dial"}


async def test_11_3_nothing_that_a_linked_peer_says_makes_a_node_dial(dialled: list[Any]) -> None:
    """Every kind of message, with an address in each text where one fits."""
    trap = socket.create_server(("127.0.0.1", 0))
    trap.setblocking(False)
    port = trap.getsockname()[1]
    text = f"127.0.0.1:{port}"
    try:
        async with serving() as source:
            for name, sample in SAMPLES.items():
                message = sample.message
                texts = {field: text for field in message.__struct_fields__ if isinstance(getattr(message, field), str)}
                peer = await raw_peer(source.listen_address)
                for one in (message, msgspec.structs.replace(message, **texts)):
                    await peer.asks.send(frames.encode(one, sample.tail))
                await asyncio.sleep(0.01)
                peer.close()
                assert name
            here = source.listen_address
            await honest_client(source)
        assert {address for address in dialled if address[:2] != here} == set()
        with pytest.raises(BlockingIOError):
            trap.accept()
    finally:
        trap.close()


async def test_11_3_what_a_peer_offers_is_met_at_the_address_that_the_caller_gave(
    dialled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile source answers with paths that lead elsewhere; it is dialled again where it was dialled first."""
    trap = socket.create_server(("127.0.0.1", 0))
    port = trap.getsockname()[1]

    class Offering(Session):
        def welcome(self, *, token: bytes, offers: Any) -> None:
            elsewhere = f"127.0.0.1:{port}".encode()
            super().welcome(token=token, offers=[("nixl", elsewhere), ("shm", elsewhere), ("tcp", elsewhere)])

    monkeypatch.setattr(hostile, "Session", Offering)
    try:
        async with HostileSource().listening() as source, pulling(transfer_backend="auto") as puller:
            await link(puller, info(1, source.address), timeout=5000)
            await asyncio.sleep(0.1)
            inet = {address for address in dialled if isinstance(address, tuple)}
            assert inet == {tuple(source.address[:2])}
            unix = [address for address in dialled if not isinstance(address, tuple)]
            assert all(bytes(name).startswith(b"\0kvpull-") for name in unix)
    finally:
        trap.close()


# -- 11.4: connections that come to nothing ----------------------------------------------------------------------------

MANY = 400


@pytest.mark.parametrize("secret", ["", SECRET], ids=["open", "with a secret"])
async def test_11_4_half_open_greetings_are_bounded_dropped_in_time_and_keep_nobody_out(secret: str) -> None:
    """At every stage at which a client can stop: silent, in the middle of a word, greeted once and no more."""
    stages = [b"", MAGIC[:3], MAGIC + b"C", MAGIC + b"C" + frames.encode(plain_hello(asked=1))[:20],
              MAGIC + b"C" + frames.encode(plain_hello(asked=1, authenticates=bool(secret)))]  # fmt: skip
    options = {"link_secret": secret} if secret else {}
    with event_log() as log:
        async with serving(handshake_timeout=2000, **options) as source:
            before = sockets()
            raws = [await Raw.connect(source.listen_address, stages[number % len(stages)]) for number in range(MANY)]
            began = time.monotonic()
            await asyncio.sleep(0.2)
            assert sockets() - before - MANY < 300, "what is not greeted is bounded"
            await honest_client(source, handshake_timeout=20_000, **options)
            assert time.monotonic() - began < SOON
            await asyncio.gather(*(raw.rest() for raw in raws))  # all of them are hung up on
            await eventually(lambda: sockets() <= before, lambda: f"{before} sockets before, {sockets()} now")
            assert log.named("link.rejected")
            await honest_client(source, **options)


# -- 11.5: keys --------------------------------------------------------------------------------------------------------

KEYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "wrong": ({"link_secret": SECRET}, {"link_secret": "another secret of the same length"}),
    "missing here": ({"link_secret": SECRET}, {}),
    "missing there": ({}, {"link_secret": SECRET}),
}


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("backend", ["tcp", "shm", "inproc"])
async def test_11_5_without_the_right_key_a_link_is_refused_at_once_with_the_reason(keys: str, backend: str) -> None:
    theirs, ours = KEYS[keys]
    with event_log() as log:
        async with (
            serving(transfer_backend=backend, **theirs) as source,
            pulling(transfer_backend=backend, **ours) as puller,
        ):
            began = time.monotonic()
            assert await link(puller, source) == FAILED
            assert time.monotonic() - began < SOON
            assert await log.first("link.failed", text="secret", local_cluster_id=2)
            assert await log.first("link.rejected", text="secret", local_cluster_id=1)
            assert links_of(source) == links_of(puller) == []
            assert SECRET not in str(log.events)


async def test_11_5_who_has_no_key_learns_nothing_about_caches() -> None:
    """Neither ids, nor keys, nor whether there are any: a node that holds some says what an empty one says."""
    said = []
    for holds in (True, False):
        async with serving(4711, link_secret=SECRET) as source:
            cache = (await publish(source, 7))[1] if holds else None
            raw = await Raw.connect(source.listen_address)
            refused = await greet(raw, Session(identity(66, secret=b"a guess of some length"), dialer=True, asked=4711))
            said.append((type(refused).__name__, refused.reason, await raw.rest()))
            if cache is not None:
                await source.kv_cache_manager.deallocate_cache(cache)
    assert said[0] == said[1]
    assert "4711" not in str(said)


CERTIFICATES = ("of another authority", "expired", "not there", "only here", "for another cluster")


@pytest.mark.parametrize("which", CERTIFICATES)
async def test_11_5_without_the_right_certificate_a_link_is_refused_at_once_with_the_reason(
    which: str, tmp_path: Path
) -> None:
    """By both sides' word, long before the timeout; the right certificate links a moment later."""
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    theirs = authority.issue("source", "kvpull:cluster:1")
    right = authority.issue("puller", "kvpull:cluster:2")
    ours: dict[str, dict[str, str]] = {
        "of another authority": stranger.issue("other", "kvpull:cluster:2"),
        "expired": authority.issue("old", "kvpull:cluster:2", days=(-3, -2)),
        "not there": {},
        "only here": right,
        "for another cluster": authority.issue("nine", "kvpull:cluster:9"),
    }
    with event_log() as log:
        async with serving(**({} if which == "only here" else theirs)) as source:
            async with pulling(**ours[which]) as puller:
                began = time.monotonic()
                assert await link(puller, source) == FAILED
                assert time.monotonic() - began < SOON
                failed = await log.first("link.failed", local_cluster_id=2)
                assert any(word in failed["reason"] for word in ("TLS", "certificate")), failed
                assert links_of(source) == links_of(puller) == []
            if which != "only here":
                assert await log.first("link.rejected", local_cluster_id=1)
                async with pulling(**right) as puller:
                    assert await link(puller, source) == OK
