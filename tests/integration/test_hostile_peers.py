"""Garbage, strangers and floods on the port of a real node: each is turned away, named in the log, and the next honest
client is served.
"""

from __future__ import annotations

import asyncio
import http.client
import random
import time

import msgspec
import pytest

from kvpull_async.protocol import frames
from kvpull_async.protocol.session import READY_LIMIT, Failed, Session
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
    pulling,
    raw_peer,
    serving,
    unlink,
)
from tests.loop_nodes import EventLog, event_log
from tests.wire import SAMPLES, identity, mutate, plain_hello, sample

FAILED = LLMStatusCode.LLM_LINK_FAILED


def bugs(events: EventLog) -> list[dict[str, object]]:
    """What only an error of ours would log."""
    names = ("link.bug", "link.accept_failed", "serve.bug", "engine.bug")
    return [event for name in names for event in events.named(name)]


# --- A8: garbage ---


async def test_a8_garbage_before_the_greeting_does_not_keep_the_next_client_out() -> None:
    rng = random.Random("before")
    names = sorted(SAMPLES)
    with event_log() as events:
        async with serving() as source:
            for round_ in range(10):
                for _ in range(30):
                    garbage = mutate(sample(rng.choice(names)), rng)
                    preamble = MAGIC + b"C" if rng.random() < 0.8 else mutate(MAGIC + b"C", rng)
                    raw = await Raw.connect(source.listen_address, preamble + garbage)
                    raw.hang_up()
                    await raw.rest()
                if round_ % 5 == 4:
                    await honest_client(source, fill=round_)
            assert links_of(source) == []
        assert len(events.named("link.rejected")) == 300
        assert bugs(events) == []


async def test_a8_garbage_after_the_greeting_ends_that_link_only() -> None:
    rng = random.Random("after")
    heard = ("Request", "Cancel", "Done", "Ping", "Pong", "Hello", "Grant", "Refuse", "DoneAck", "ByeAck")
    with event_log() as events:
        async with serving() as source, pulling() as puller:
            assert await link(puller, source) == OK
            for round_ in range(60):
                peer = await raw_peer(source.listen_address)
                for _ in range(rng.randint(1, 3)):
                    connection = rng.choice((peer.asks, peer.serves))
                    await connection.send(mutate(sample(rng.choice(heard)), rng))
                if round_ % 20 == 19:
                    await honest_pull(puller, source, round_)
                peer.asks.hang_up()
                peer.serves.hang_up()
                await peer.asks.rest()
                await peer.serves.rest()
            await honest_client(source)
            await honest_pull(puller, source, 3)
        assert bugs(events) == []


async def test_a8_every_truncation_of_a_greeting_is_survived() -> None:
    hello = frames.encode(plain_hello(asked=1))
    stream = MAGIC + b"C" + hello + frames.encode(frames.Prove(b""))
    async with serving() as source:
        for length in range(len(stream)):
            raw = await Raw.connect(source.listen_address, stream[:length])
            raw.hang_up()
            await raw.rest()
        await honest_client(source)


async def test_an_http_client_gets_no_answer() -> None:
    with event_log() as events:
        async with serving() as source:
            host, port = source.listen_address or ("", 0)

            def get() -> None:
                connection = http.client.HTTPConnection(host, port, timeout=20)
                try:
                    connection.request("GET", "/metrics")
                    connection.getresponse()
                finally:
                    connection.close()

            with pytest.raises((http.client.HTTPException, ConnectionError)):
                await asyncio.to_thread(get)
            await events.first("link.rejected", text="does not speak the kvpull protocol, it began with b'GET")
            await honest_client(source)


@pytest.mark.parametrize("length", [READY_LIMIT + 1, 0xFFFFFFFF])
async def test_a_frame_above_the_limit_ends_the_connection_at_its_header(length: int) -> None:
    with event_log() as events:
        async with serving() as source:
            early = await Raw.connect(source.listen_address)
            await early.send(frames.HEADER.pack(length, 1, 100))
            assert await early.rest() == b""
            await events.first("link.rejected", text=f"{length} bytes exceeds the limit of {frames.GREETING_LIMIT}")
            peer = await raw_peer(source.listen_address)
            await peer.asks.send(frames.HEADER.pack(length, 8, 100))
            assert await peer.asks.rest() == b""
            await events.first("link.lost", text=f"{length} bytes exceeds the limit of {READY_LIMIT}")
            peer.close()
            await honest_client(source)


# --- silence and floods ---


async def test_silent_connections_are_bounded_and_an_honest_peer_still_links() -> None:
    with event_log() as events:
        async with serving(handshake_timeout=1500) as source:
            silent = [await Raw.connect(source.listen_address, MAGIC[: i % 9]) for i in range(180)]
            began = time.monotonic()
            await honest_client(source, handshake_timeout=20_000)
            ends = await asyncio.gather(*(raw.rest() for raw in silent))
            assert set(ends) == {b""}
            assert time.monotonic() - began < 60
            assert events.named("link.rejected", text="over 128 unfinished greetings")
            assert events.named("link.rejected", text="no greeting in time")
            await honest_client(source)


async def test_a_peer_that_only_asks_and_never_reads_is_held_back_and_then_dropped() -> None:
    """What it is owed would fill this node's memory: 64 MB of acknowledged nonsense must not go through."""
    with event_log() as events:
        async with (
            serving(heartbeat_interval=200, heartbeat_timeout=1000) as source,
            pulling(heartbeat_interval=200) as puller,
        ):
            assert await link(puller, source) == OK
            peer = await raw_peer(source.listen_address)
            peer.asks.sock.setblocking(False)
            flood, rest, sent, stuck_since = memoryview(sample("Done") * 2000), memoryview(b""), 0, time.monotonic()
            while time.monotonic() - stuck_since < 0.3:
                rest = rest or flood
                try:
                    rest, sent = rest[(count := peer.asks.sock.send(rest)) :], sent + count
                    stuck_since = time.monotonic()
                except BlockingIOError:
                    await asyncio.sleep(0.01)
                except ConnectionError:
                    break
                assert sent < 64 << 20
            await honest_pull(puller, source, 5)
            await events.first("link.lost", cluster_id=66, text="the peer was silent for")
            peer.close()
            await honest_client(source)


async def test_a_flood_of_pings_does_not_keep_others_waiting() -> None:
    async with serving() as source, pulling() as puller:
        assert await link(puller, source) == OK
        peer = await raw_peer(source.listen_address)

        async def flood() -> None:
            while True:
                await peer.asks.send(sample("Ping") * 500)
                assert await peer.asks.receive()

        flooding = asyncio.create_task(flood())
        for fill in range(5):
            await honest_pull(puller, source, fill)
        assert not flooding.done()
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
        peer.close()


# --- connections that do not belong ---


async def test_a_payload_connection_with_a_wrong_token_is_refused_while_pulls_go_on() -> None:
    with event_log() as events:
        async with serving(inline_limit=0) as source, pulling(inline_limit=0) as puller:
            assert await link(puller, source) == OK
            for fill in range(5):
                raw = await Raw.connect(source.listen_address, MAGIC + b"P" + bytes(16) + bytes([fill % 2]))
                await honest_pull(puller, source, fill)
                assert await raw.rest() == b""
            await events.first("link.rejected", text="a payload connection for a link that does not exist")
            assert len(events.named("link.up")) == 2


async def test_a_second_lane_with_a_foreign_token_is_refused() -> None:
    with event_log() as events:
        async with serving() as source:
            raw = await Raw.connect(source.listen_address)
            failed = await greet(raw, Session(identity(66), dialer=True, asked=1, lane=1, token=b"x" * 16))
            assert failed == Failed("the second connection of a link that does not exist", FAILED, by_peer=True)
            await events.first("link.rejected", text="the second connection of a link that does not exist")
            raw.close()
            await honest_client(source)


async def test_a_peer_that_links_and_dies_leaves_nothing_in_the_way() -> None:
    async with serving() as source:
        for _ in range(20):
            peer = await raw_peer(source.listen_address)
            await peer.asks.send(sample("Request"))
            peer.close()
        await honest_client(source)


async def test_requests_beyond_what_a_peer_may_have_in_flight_end_its_link() -> None:
    with event_log() as events:
        async with serving() as source:
            peer = await raw_peer(source.listen_address)
            request = msgspec.structs.replace(SAMPLES["Request"].message, remaining_ms=60_000)
            numbered = (msgspec.structs.replace(request, request_id=number) for number in range(1, 80))
            await peer.asks.send(b"".join(frames.encode(one) for one in numbered))
            await peer.asks.rest()
            await events.first("link.lost", cluster_id=66, text="more than 64 requests in flight")
            peer.close()
            await honest_client(source)


# --- versions and ids ---


async def test_a_peer_of_another_version_is_told_so_and_both_are_named() -> None:
    words = (
        f"the dialling side speaks protocol 7, the accepting side {frames.VERSION}; run releases that share one on both"
    )
    with event_log() as events:
        async with serving() as source:
            raw = await Raw.connect(source.listen_address)
            await raw.send(frames.encode(plain_hello(version=7, asked=1)))
            (reject,) = messages(await raw.rest())
            assert isinstance(reject, frames.Reject)
            assert (reject.reason, reject.status) == (words, FAILED)
            await events.first("link.rejected", text=words)
            await honest_client(source)


async def test_the_wrong_cluster_id_is_named_on_both_sides() -> None:
    words = "this is cluster 1, not 5 as asked for"
    with event_log() as events:
        async with serving() as source, pulling() as puller:
            assert await link(puller, info(5, source.listen_address)) == FAILED
            await events.first("link.failed", text=words, cluster_id=5, local_cluster_id=2)
            await events.first("link.rejected", text=words, local_cluster_id=1)
            assert links_of(source) == links_of(puller) == []
            assert await link(puller, source) == OK
            await honest_pull(puller, source, 4)


async def test_relinking_after_hostile_visits_starts_clean() -> None:
    async with serving() as source, pulling() as puller:
        for fill in range(3):
            assert await link(puller, source) == OK
            (await raw_peer(source.listen_address)).close()
            await honest_pull(puller, source, fill)
            assert await unlink(puller, 1) == OK
