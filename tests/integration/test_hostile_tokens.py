"""The second connection of a link, and its payload connections: what they are bound to, and that nobody else's counts.
The client is made by hand (wire_client.py beside it).
"""

from __future__ import annotations

import contextlib
import secrets
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import pytest

from kvpull_async import LLMDataDist, LLMStatusCode
from tests.hostile import STRIDE, TENSORS, honest_client, links_of, publish, serving
from tests.integration.wire_client import (
    AGREED,
    GRANT,
    MAGIC,
    REJECT,
    WELCOME,
    Linked,
    Peer,
    Wire,
    frame,
    frames_in,
    linked,
    request,
)
from tests.loop_nodes import EventLog, event_log, eventually

FAILED = LLMStatusCode.LLM_LINK_FAILED
SECRET = b"correct horse battery staple"
FIVE, SIX = b"the secret of five, and of five only", b"that of six, and of six only"
ME = Peer(cluster_id=5, asked=1, secret=FIVE)
NO_LINK = "the second connection of a link that does not exist"
NO_PAYLOAD = "a payload connection for a link that does not exist"


@pytest.fixture
async def events() -> AsyncIterator[EventLog]:
    with event_log() as log:
        yield log


@contextlib.asynccontextmanager
async def guarded(**more: Any) -> AsyncIterator[LLMDataDist]:
    options = {"link_secret": SECRET.decode(), "link_secrets": {5: FIVE.decode(), 6: SIX.decode()}}
    async with serving(1, **options, **more) as source:
        yield source
        await honest_client(source, link_secret=SECRET.decode())


def again(who: Peer, **fields: Any) -> Peer:
    return who.but(nonce=secrets.token_bytes(32), **fields)


@contextlib.contextmanager
def half(source: LLMDataDist) -> Iterator[tuple[Wire, bytes]]:
    """The first connection of a link, and the token for the second."""
    with Wire.open(source.listen_address) as wire:
        welcome = ME.greets(wire)
        assert welcome.kind == WELCOME
        yield wire, welcome.fields[2]


def mine(source: LLMDataDist, who: Peer = ME) -> Linked:
    return linked(who, partial(Wire.open, source.listen_address))


SECONDS: dict[str, Callable[[bytes], Peer]] = {
    "a guessed token": lambda _: ME.but(token=b"t" * 16),
    "no token": lambda _: ME.but(token=b""),
    "half a token": lambda token: ME.but(token=token[:8]),
    "a token with more behind it": lambda token: ME.but(token=token + b"\0"),
    "the token, from another incarnation": lambda token: ME.but(token=token, incarnation=bytes(16)),
    "the token, from another cluster with its own secret": lambda token: ME.but(token=token, cluster_id=6, secret=SIX),
    "the token, from a cluster with the secret for all": lambda token: ME.but(token=token, cluster_id=7, secret=SECRET),
}


@pytest.mark.parametrize("make", SECONDS.values(), ids=SECONDS.keys())
async def test_a_second_connection_belongs_to_who_made_the_first(
    events: EventLog, make: Callable[[bytes], Peer]
) -> None:
    """Incarnations can be read on the network, and so can tokens where there is no TLS: neither is enough."""
    async with guarded() as source:
        with half(source) as (first, token):
            with Wire.open(source.listen_address) as wire:
                refused = again(make(token), lane=1).greets(wire)
                assert (refused.kind, refused.fields) == (REJECT, [FAILED, NO_LINK])
            await events.first("link.rejected", text=NO_LINK)
            assert links_of(source) == []
            with Wire.open(source.listen_address) as second:  # the right one is still let in, unless it broke its first
                answer = again(ME, lane=1, token=token).greets(second)
                assert answer.kind == WELCOME
                await eventually(lambda: len(links_of(source)) == 1)
                Linked(first, second, token).leave()


async def test_a_token_is_of_no_use_once_its_link_is_there(events: EventLog) -> None:
    async with guarded() as source:
        with mine(source) as me:
            for _ in range(2):
                with Wire.open(source.listen_address) as wire:
                    refused = again(ME, lane=1, token=me.token).greets(wire)
                    assert (refused.kind, refused.fields) == (REJECT, [FAILED, NO_LINK])
            await pulls(source, me)


async def test_who_comes_too_late_with_the_second_connection_begins_anew(events: EventLog) -> None:
    async with guarded(handshake_timeout=300) as source:
        with half(source) as (first, token):
            assert first.rest() == b""
            await events.first("link.rejected", text="its second connection did not come")
            with Wire.open(source.listen_address) as second:
                assert again(ME, lane=1, token=token).greets(second).fields == [FAILED, NO_LINK]
            with Wire.open(source.listen_address, MAGIC + b"P" + token + b"\0") as payload:
                assert payload.rest() == b""


# --- payload connections ---


async def pulls(source: LLMDataDist, me: Linked, number: int = 1, *, payload: Wire | None = None) -> None:
    """One small pull, whose bytes ride on the grant, or, given a payload connection, one that comes by that."""
    key, cache = await publish(source, 0x33)
    me.asks.send(request(number, key.req_id, tensors=TENSORS, size=STRIDE, inline=payload is None))  # type: ignore[union-attr]
    grant = me.asks.read()
    assert grant is not None
    assert (grant.kind, grant.fields[0]) == (GRANT, number), grant
    if payload is None:
        assert grant.tail == b"\x33" * STRIDE * TENSORS
    else:
        head, data = payload.take(24), payload.take(STRIDE * TENSORS)
        assert head == grant.fields[1] + struct.pack("<Q", STRIDE * TENSORS)
        assert data == b"\x33" * STRIDE * TENSORS
    me.asks.send(frame(12, grant.fields[1], "by hand"))  # DONE
    assert (me.asks.read() or grant).kind == 13  # its acknowledgement
    await source.kv_cache_manager.deallocate_cache(cache)


def ticket(token: bytes, lane: int) -> bytes:
    return MAGIC + b"P" + token + bytes([lane])


def attached(source: LLMDataDist, token: bytes, lane: int = 0) -> Wire:
    wire = Wire.open(source.listen_address, ticket(token, lane))
    assert wire.take(1) == AGREED
    return wire


async def test_payload_comes_by_the_connection_with_the_token() -> None:
    async with guarded() as source:
        with mine(source) as me, attached(source, me.token) as payload:
            for number in range(1, 4):
                await pulls(source, me, number, payload=payload)


@pytest.mark.parametrize("kind", ["random", "one bit", "lane 2", "lane 255", "reversed"])
async def test_a_payload_connection_without_the_token_is_closed(events: EventLog, kind: str) -> None:
    async with guarded() as source:
        with mine(source) as me, attached(source, me.token) as payload:
            tokens = {
                "random": bytes(16),
                "one bit": me.token[:15] + bytes([me.token[15] ^ 1]),
                "reversed": me.token[::-1],
            }
            lane = {"lane 2": 2, "lane 255": 255}.get(kind, 0)
            with Wire.open(source.listen_address, ticket(tokens.get(kind, me.token), lane)) as wire:
                assert wire.rest() == b""
            await events.first("link.rejected", text=NO_PAYLOAD)
            await pulls(source, me, payload=payload)


async def test_payload_of_one_direction_never_comes_by_the_connection_of_the_other() -> None:
    async with guarded() as source:
        with mine(source) as me, attached(source, me.token, 1) as other, attached(source, me.token, 0) as payload:
            await pulls(source, me, payload=payload)
            other.sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.sock.recv(1)


async def test_of_two_payload_connections_the_second_counts_and_the_first_is_closed() -> None:
    """The owner dials anew after it has given a pull up: the token is what says that it is the owner."""
    async with guarded() as source:
        with mine(source) as me, attached(source, me.token) as first, attached(source, me.token) as second:
            assert first.rest() == b""
            await pulls(source, me, payload=second)


async def test_a_token_is_of_no_use_for_payload_before_its_link_is_there_or_after(events: EventLog) -> None:
    async with guarded() as source:
        with half(source) as (first, token):
            with Wire.open(source.listen_address, ticket(token, 0)) as wire:
                assert wire.rest() == b""
            with Wire.open(source.listen_address) as second:
                assert again(ME, lane=1, token=token).greets(second).kind == WELCOME
                Linked(first, second, token).leave()
        await eventually(lambda: links_of(source) == [])
        with Wire.open(source.listen_address, ticket(token, 0)) as wire:
            assert wire.rest() == b""
        await events.first("link.rejected", text=NO_PAYLOAD)
        await events.first("link.rejected", text="a payload connection for a link that has ended")


async def test_a_payload_connection_that_says_half_its_ticket_is_ended_in_time(events: EventLog) -> None:
    async with guarded(handshake_timeout=300) as source:
        with mine(source) as me:
            with Wire.open(source.listen_address, ticket(me.token, 0)[:-1]) as wire:
                assert wire.rest() == b""
            await events.first("link.rejected", text="no greeting in time")
            await pulls(source, me)


async def test_bytes_that_nobody_asked_for_do_not_get_into_the_next_pull() -> None:
    """The client sends on the connection by which it should receive: the node closes it, and asks for a new one."""
    async with guarded() as source:
        with mine(source) as me:
            with attached(source, me.token) as payload:
                payload.send(b"\x55" * 4096)
                await pulls(source, me)
            with attached(source, me.token) as payload:
                await pulls(source, me, 2, payload=payload)


async def test_a_payload_connection_in_place_of_a_control_connection_gets_no_word(events: EventLog) -> None:
    async with guarded() as source:
        with Wire.open(source.listen_address, MAGIC + b"P" + ME.hello) as wire:
            assert wire.rest() == b""
        await events.first("link.rejected", text=NO_PAYLOAD)
        with Wire.open(source.listen_address, MAGIC + b"C" + b"t" * 17) as wire:
            wire.hang_up()
            assert frames_in(wire.rest()) == []


# --- whose process ---


async def test_a_cluster_that_says_it_is_the_process_of_another_gets_a_link_of_its_own() -> None:
    """Every peer of a process knows its incarnation. The link of the right one is neither taken over nor ended."""
    async with guarded() as source:
        impostor = again(ME, cluster_id=6, secret=SIX)
        with mine(source) as me:
            with mine(source, impostor) as other:
                await eventually(lambda: len(links_of(source)) == 2)
                assert sorted(link.cluster_id for link in links_of(source)) == [5, 6]
                await pulls(source, me)
                await pulls(source, other)
            await eventually(lambda: [link.cluster_id for link in links_of(source)] == [5])
            await pulls(source, me, 2)
        await eventually(lambda: links_of(source) == [])


async def test_a_grant_can_be_ended_by_who_got_it_only() -> None:
    """A DONE consumes the key: with the id of another's grant, from another cluster, it does nothing."""
    async with guarded() as source:
        impostor = again(ME, cluster_id=6, secret=SIX)
        with mine(source) as me, mine(source, impostor) as other:
            key, cache = await publish(source, 0x33)
            asked = request(1, key.req_id, tensors=TENSORS, size=STRIDE)  # type: ignore[union-attr]
            me.asks.send(asked)
            grant = me.asks.read()
            assert grant is not None
            other.asks.send(frame(12, grant.fields[1], "not mine"))
            assert (other.asks.read() or grant).kind == 13  # an acknowledgement, as for one that it has had already
            other.asks.send(asked)
            assert (other.asks.read() or grant).kind == GRANT  # the key is still there
            me.asks.send(frame(12, grant.fields[1], "mine"))
            assert (me.asks.read() or grant).kind == 13
            other.asks.send(request(2, key.req_id, tensors=TENSORS, size=STRIDE))  # type: ignore[union-attr]
            assert (other.asks.read() or grant).kind == 10  # REFUSE: now it is consumed
            await source.kv_cache_manager.deallocate_cache(cache)
