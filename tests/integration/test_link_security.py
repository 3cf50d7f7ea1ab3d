"""Who may link: secrets that match, differ or stand on one side only, and where a node listens at all."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

from kvpull_async import LLMConfig, LLMDataDist, LLMException, LLMRole
from kvpull_async.protocol import frames
from kvpull_async.protocol.session import Failed, Session
from kvpull_async.status import LLMStatusCode
from tests.hostile import (
    MAGIC,
    OK,
    Raw,
    greet,
    honest_client,
    honest_pull,
    info,
    link,
    links_of,
    messages,
    node,
    publish,
    pulling,
    raw_peer,
    serving,
)
from tests.loop_nodes import event_log
from tests.wire import identity, plain_hello

FAILED = LLMStatusCode.LLM_LINK_FAILED
SECRET = "correct horse battery staple"
DIFFER = "the link secrets of the two sides differ"
both_transports = pytest.mark.parametrize("transport", ["tcp", "inproc", "shm"])

ONE_SIDED = {
    "different": (SECRET, "another", DIFFER),
    "only the source": (SECRET, None, "only the accepting side has a link secret; give both the same"),
    "only the puller": (None, SECRET, "only the dialling side has a link secret; give both the same"),
}


@both_transports
async def test_the_same_secret_on_both_sides_links(transport: str) -> None:
    options: dict[str, Any] = {"link_secret": SECRET, "transfer_backend": transport}
    async with serving(**options) as source, pulling(**options) as puller:
        assert await link(puller, source) == OK
        await honest_pull(puller, source, 9)


@both_transports
@pytest.mark.parametrize(("theirs", "ours", "reason"), ONE_SIDED.values(), ids=ONE_SIDED.keys())
async def test_other_secrets_are_refused_and_named_on_both_sides(
    transport: str, theirs: str | None, ours: str | None, reason: str
) -> None:
    def options(secret: str | None) -> dict[str, Any]:
        return {"transfer_backend": transport} | ({"link_secret": secret} if secret else {})

    with event_log() as events:
        async with serving(**options(theirs)) as source, pulling(**options(ours)) as puller:
            assert await link(puller, source) == FAILED
            await events.first("link.failed", text=f"refused: {reason}", local_cluster_id=2)
            await events.first("link.rejected", text=reason, local_cluster_id=1)
            assert links_of(source) == links_of(puller) == []
            assert SECRET not in str(events.events)
            await honest_client(source, **options(theirs))


async def test_nothing_of_the_node_is_revealed_to_a_peer_without_the_secret() -> None:
    """Neither its cluster id nor that it holds caches: all that comes back is a nonce and that the secrets differ."""
    async with serving(4711, link_secret=SECRET) as source:
        _, cache = await publish(source, 7)
        raw = await Raw.connect(source.listen_address)
        await raw.send(frames.encode(plain_hello(asked=4711, authenticates=True)))
        await raw.send(frames.encode(frames.Prove(b"a guess")))
        challenge, reject = messages(await raw.rest())
        assert isinstance(challenge, frames.Challenge)
        assert reject == frames.Reject(int(FAILED), DIFFER)
        impatient = await Raw.connect(source.listen_address)  # asks before it is anyone
        await impatient.send(frames.encode(frames.Request(1, "p", "", 1000, "cache", 1, 0, 0, -1, 2, 8, 0, False, 0,
                                                          False, 1000)))  # fmt: skip
        assert await impatient.rest() == b""
        await source.kv_cache_manager.deallocate_cache(cache)


async def test_a_recorded_greeting_cannot_be_replayed() -> None:
    async with serving(link_secret=SECRET) as source:
        session = Session(identity(66, secret=SECRET.encode()), dialer=True, asked=1)
        session.start()
        said = [session.take_output()]
        raw = await Raw.connect(source.listen_address)
        await raw.send(said[0])
        session.receive(await raw.receive())
        said.append(session.take_output())
        await raw.send(said[1])
        (welcome,) = messages(await raw.receive())
        assert isinstance(welcome, frames.Welcome)
        raw.close()
        again = await Raw.connect(source.listen_address)
        for data in said:
            await again.send(data)
        assert messages(await again.rest())[-1] == frames.Reject(int(FAILED), DIFFER)


async def test_a_proof_reflected_from_the_node_itself_is_refused() -> None:
    """The node's own dialling proof, sent back to it as an accepting one."""
    async with pulling(link_secret=SECRET) as puller:
        reflected = await _reflect(puller)
        assert reflected is FAILED


async def _reflect(puller: LLMDataDist) -> LLMStatusCode:
    async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        (hello,) = messages(await reader.read(4096))
        assert isinstance(hello, frames.Hello)
        writer.write(frames.encode(frames.Challenge(frames.VERSION, hello.incarnation, hello.nonce, True)))
        (prove,) = messages(await reader.read(4096))
        assert isinstance(prove, frames.Prove)
        writer.write(frames.encode(frames.Welcome(hello.asked, prove.proof, b"t" * 16, [("tcp", b"")])))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(mirror, "127.0.0.1", 0)
    try:
        with event_log() as events:
            code = await link(puller, info(1, server.sockets[0].getsockname()))
            await events.first("link.failed", text=DIFFER)
    finally:
        server.close()
    return code


async def test_a_peer_without_a_secret_may_link_by_hand_only_where_none_is_set() -> None:
    async with serving() as source:
        (await raw_peer(source.listen_address)).close()
    async with serving(link_secret=SECRET) as source:
        raw = await Raw.connect(source.listen_address)
        refused = await greet(raw, Session(identity(66), dialer=True, asked=1))
        assert isinstance(refused, Failed)
        raw.close()


# --- where a node listens ---


def listening_ports() -> dict[int, str]:
    """Every TCP port on which this process listens and the local address it is bound to."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            own.add(str(entry.readlink()))
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    bound = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return {int(port, 16): ".".join(str(int(host[i : i + 2], 16)) for i in (6, 4, 2, 0)) for host, port in bound}


async def test_a_node_listens_only_where_it_was_told_to() -> None:
    async with node(1, LLMRole.PROMPT) as silent:
        assert silent.listen_address is None
        assert listening_ports() == {}
    async with serving() as source:
        host, port = source.listen_address or ("", 0)
        assert (host, listening_ports()) == ("127.0.0.1", {port: "127.0.0.1"})
    assert listening_ports() == {}


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "192.168.1.1"])
async def test_off_this_machine_a_node_without_a_safeguard_is_refused_with_the_three_ways(host: str) -> None:
    config = LLMConfig()
    config.listen_ip_info = f"{host}:0"
    threads = threading.active_count()
    refused = LLMDataDist(LLMRole.PROMPT, 1)
    with pytest.raises(LLMException) as caught:
        await refused.init(config.generate_options())
    assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
    for way in ("kvpull.LinkSecret", "KVPULL_LINK_SECRET", "TLS", "kvpull.AllowInsecureNetwork"):
        assert way in str(caught.value)
    assert threading.active_count() == threads


@pytest.mark.parametrize("way", ["secret", "secret in the environment", "secret in a file", "opt-out", "opt-out env"])
async def test_each_way_makes_a_node_listen_beyond_this_machine(
    way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each also by environment, so that a program that knows nothing of this library needs no edit."""
    properties: dict[str, Any] = {}
    if way == "secret":
        properties["link_secret"] = SECRET
    elif way == "secret in the environment":
        monkeypatch.setenv("KVPULL_LINK_SECRET", SECRET)
    elif way == "secret in a file":
        (tmp_path / "secret").write_text(SECRET + "\n")
        monkeypatch.setenv("KVPULL_LINK_SECRET_FILE", str(tmp_path / "secret"))
    elif way == "opt-out":
        properties["allow_insecure_network"] = True
    else:
        monkeypatch.setenv("KVPULL_ALLOW_INSECURE_NETWORK", "1")
    with event_log() as events:
        async with node(1, LLMRole.PROMPT, listen="0.0.0.0:0", transfer_backend="tcp", **properties) as source:
            monkeypatch.delenv("KVPULL_LINK_SECRET", raising=False)
            monkeypatch.delenv("KVPULL_LINK_SECRET_FILE", raising=False)
            port = (source.listen_address or ("", 0))[1]
            theirs = {"link_secret": SECRET} if "secret" in way else {}
            async with pulling(2, **theirs) as puller:
                assert await link(puller, info(1, ("127.0.0.1", port))) == OK
            if "secret" in way:
                async with pulling(3) as stranger:
                    assert await link(stranger, info(1, ("127.0.0.1", port))) == FAILED
        assert bool(events.named("link.insecure")) is ("opt-out" in way)


async def test_a_taken_port_fails_init_with_the_address_and_leaves_nothing() -> None:
    async with serving() as source:
        host, port = source.listen_address or ("", 0)
        config = LLMConfig()
        config.listen_ip_info = f"{host}:{port}"
        second = LLMDataDist(LLMRole.PROMPT, 2)
        with pytest.raises(LLMException, match=f"cannot listen on {host}:{port}") as caught:
            await second.init(config.generate_options())
        assert caught.value.status_code == LLMStatusCode.LLM_FAILED
        await honest_client(source)


async def test_a_slow_beginning_is_part_of_the_time_for_the_greeting() -> None:
    """The first bytes late, and then silence: one handshake timeout in all, not one for each step."""
    async with serving(handshake_timeout=2000) as source:
        began = asyncio.get_running_loop().time()
        raw = await Raw.connect(source.listen_address, b"")
        await asyncio.sleep(1.7)
        await raw.send(MAGIC + b"C")
        assert await raw.rest() == b""
        assert asyncio.get_running_loop().time() - began < 3.2  # it would be 3.7 otherwise


@pytest.mark.parametrize("secret", [{"link_secret": SECRET}, {"link_secrets": {2: SECRET}}])
async def test_the_opt_out_says_that_peers_are_not_authenticated_only_where_they_are_not(
    secret: dict[str, Any],
) -> None:
    with event_log() as events:
        async with serving(allow_insecure_network=True, **secret) as source:
            await events.first("link.listening")
            assert not events.named("link.insecure")
            async with pulling() as puller:
                assert await link(puller, source) == FAILED


@both_transports
async def test_p10_a_node_that_finalizes_is_not_taken_for_a_lost_one(transport: str) -> None:
    """Its goodbye is heard before its connections close, however soon that is."""
    with event_log() as events:
        async with serving(transfer_backend=transport) as source:
            for number in range(20):
                async with pulling(transfer_backend=transport) as puller:
                    assert await link(puller, source) == OK
                    if number % 2:
                        await honest_pull(puller, source, 9)
        assert len(events.named("link.closed", local_cluster_id=1)) == 20
        assert not events.named("link.lost")
