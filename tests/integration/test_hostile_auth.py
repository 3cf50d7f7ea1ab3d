"""Who does not have the secret: what such a client may say on the wire, and that it gets no further, learns nothing and
keeps nobody out. The client is made by hand (wire_client.py beside it).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvpull_async import LLMDataDist, LLMStatusCode
from tests.hostile import (
    OK,
    STRIDE,
    TENSORS,
    honest_client,
    honest_pull,
    link,
    links_of,
    publish,
    pulling,
    serving,
)
from tests.integration.wire_client import (
    CHALLENGE,
    GRANT,
    HELLO,
    PING,
    PROVE,
    REJECT,
    WELCOME,
    Linked,
    Peer,
    Said,
    Wire,
    frame,
    frames_in,
    linked,
    pack,
    proof,
    request,
)
from tests.loop_nodes import EventLog, event_log

FAILED = LLMStatusCode.LLM_LINK_FAILED
NODE = 0x5EC2E7_C105_7E2D
"""A cluster id that does not come up by chance."""
SECRET = b"correct horse battery staple"
FIVE, SIX = b"the secret of five, and of five only", b"that of six, and of six only"
DIFFER = "the link secrets of the two sides differ"
ME = Peer(asked=NODE, secret=SECRET)
STRANGER = ME.but(secret=b"a guess that is as long as it is wrong")
OPEN = STRANGER.but(authenticates=False)


@pytest.fixture
async def events() -> AsyncIterator[EventLog]:
    with event_log() as log:
        yield log


@contextlib.asynccontextmanager
async def guarded(**more: Any) -> AsyncIterator[LLMDataDist]:
    """A node with a secret for all, and others for the clusters 5 and 6."""
    options = {"link_secret": SECRET.decode(), "link_secrets": {5: FIVE.decode(), 6: SIX.decode()}}
    async with serving(NODE, **options, **more) as source:
        yield source


async def unharmed(source: LLMDataDist) -> None:
    """An honest client links, pulls and leaves, and nothing else is linked."""
    began = time.monotonic()
    await honest_client(source, link_secret=SECRET.decode())
    assert time.monotonic() - began < 10
    assert links_of(source) == []


@contextlib.contextmanager
def by_hand(source: LLMDataDist, peer: Peer = ME) -> Iterator[Linked]:
    one = linked(peer, lambda: Wire.open(source.listen_address))
    try:
        yield one
    finally:
        one.leave()


async def test_the_client_made_by_hand_is_let_in_when_it_is_honest() -> None:
    """Else its refusals would mean nothing. It pulls, too: the node speaks what is written down."""
    async with guarded() as source:
        for who in (ME, ME.but(cluster_id=5, secret=FIVE), ME.but(more=("a field of a later version", 7), version=9)):
            key, cache = await publish(source, 0x33)
            with by_hand(source, who) as me:
                me.asks.send(request(1, key.req_id, tensors=TENSORS, size=STRIDE))  # type: ignore[union-attr]
                grant = me.asks.read()
                assert grant is not None
                assert (grant.kind, grant.fields[0], grant.tail) == (GRANT, 1, b"\x33" * STRIDE * TENSORS)
            await source.kv_cache_manager.deallocate_cache(cache)
        await unharmed(source)


# --- one connection, refused ---


@dataclass
class Attack:
    """What a case has to work with. All that the node says on every connection is kept."""

    source: LLMDataDist
    heard: list[Said] = field(default_factory=list)

    def open(self) -> Wire:
        return Wire.open(self.source.listen_address)

    def challenged(self, wire: Wire, hello: bytes) -> bytes:
        wire.send(hello)
        said = wire.read()
        assert said is not None
        self.heard.append(said)
        assert said.kind == CHALLENGE, said
        return said.raw

    def end(self, wire: Wire) -> None:
        self.heard += frames_in(wire.rest())

    def say(self, *data: bytes) -> None:
        """At once, on a new connection, without waiting for answers."""
        wire = self.open()
        wire.send(b"".join(data))
        wire.hang_up()
        self.end(wire)

    def prove(self, who: Peer, make: Callable[[bytes], bytes], *, hello: bytes | None = None) -> None:
        """Say hello, and then as a proof what `make` makes of the challenge."""
        wire = self.open()
        challenge = self.challenged(wire, hello or who.hello)
        wire.send(frame(PROVE, make(challenge)))
        wire.hang_up()
        self.end(wire)


def shown(change: Callable[[bytes], bytes]) -> Callable[[Attack], None]:
    """The right proof, changed."""
    return lambda attack: attack.prove(ME, lambda challenge: change(proof(SECRET, ME.hello, challenge)))


def altered(**fields: Any) -> Callable[[Attack], None]:
    """A man in the middle changes these fields of an honest HELLO."""

    def run(attack: Attack) -> None:
        attack.prove(ME, lambda challenge: proof(SECRET, ME.hello, challenge), hello=ME.but(**fields).hello)

    return run


def challenge_altered(at: int, to: object) -> Callable[[Attack], None]:
    """A man in the middle changes a field of the node's CHALLENGE, and the honest dialler proves what it got."""

    def run(attack: Attack) -> None:
        def make(challenge: bytes) -> bytes:
            fields = frames_in(challenge)[0].fields
            return proof(SECRET, ME.hello, frame(CHALLENGE, *fields[:at], to, *fields[at + 1 :]))

        attack.prove(ME, make)

    return run


def as_(who: Peer) -> Callable[[Attack], None]:
    return lambda attack: attack.prove(who, lambda challenge: proof(who.secret or b"", who.hello, challenge))


def said(*data: bytes) -> Callable[[Attack], None]:
    return lambda attack: attack.say(*data)


def replayed(attack: Attack) -> None:
    """Word by word what an honest client said before."""
    hello = ME.hello
    with attack.open() as first:
        first.send(hello)
        challenge = first.read()
        assert challenge is not None
        words = ME.proves(challenge.raw)
        first.send(words)
        assert (first.read() or challenge).kind == WELCOME
    attack.say(hello, words)


def replayed_later(attack: Attack) -> None:
    """The proof that an honest client gave before, behind a hello of one's own."""
    with attack.open() as first:
        first.send(ME.hello)
        challenge = first.read()
        assert challenge is not None
    attack.prove(STRANGER, lambda _: proof(SECRET, ME.hello, challenge.raw))


def as_the_other_side(attack: Attack) -> None:
    """The proof that the accepting side would give, with an empty proof in its WELCOME."""
    welcome = frame(WELCOME, NODE, b"", b"t" * 16, [["tcp", b""]])
    attack.prove(ME, lambda challenge: proof(SECRET, ME.hello, challenge, welcome))


def twice(attack: Attack) -> None:
    wire = attack.open()
    attack.challenged(wire, STRANGER.hello)
    wire.send(STRANGER.hello)
    wire.hang_up()
    attack.end(wire)


def after_the_refusal(attack: Attack) -> None:
    """Goes on as if nothing had been."""
    wire = attack.open()
    attack.challenged(wire, STRANGER.hello)
    wire.send(frame(PROVE, b""))
    refused = wire.read()
    assert refused is not None
    attack.heard.append(refused)
    assert refused.kind == REJECT
    wire.send(frame(PING, 1) + request(1, 1, tensors=2, size=8) + ME.hello + frame(PROVE, b""))
    wire.hang_up()
    attack.end(wire)


def impatient(*more: bytes) -> Callable[[Attack], None]:
    """The right proof, and more before it is answered."""

    def run(attack: Attack) -> None:
        wire = attack.open()
        wire.send(ME.proves(attack.challenged(wire, ME.hello)) + b"".join(more))
        wire.hang_up()
        attack.end(wire)

    return run


VERSIONS = "run releases that share one on both"
STATE = "in state "
REQUEST_1 = request(1, 1, tensors=TENSORS, size=STRIDE)
CASES: dict[str, tuple[Callable[[Attack], None], str]] = {
    # proofs
    "a wrong secret": (as_(STRANGER), DIFFER),
    "an empty proof": (shown(lambda _: b""), DIFFER),
    "a proof cut short": (shown(lambda right: right[:-1]), DIFFER),
    "half a proof": (shown(lambda right: right[:16]), DIFFER),
    "a proof that is too long": (shown(lambda right: right + b"\0"), "malformed Prove"),
    "wrong in the first byte": (shown(lambda right: bytes([right[0] ^ 1]) + right[1:]), DIFFER),
    "wrong in the last byte": (shown(lambda right: right[:-1] + bytes([right[-1] ^ 1])), DIFFER),
    "zeros": (shown(lambda _: bytes(32)), DIFFER),
    "the proof of the other side": (as_the_other_side, DIFFER),
    "a whole greeting again": (replayed, DIFFER),
    "a proof seen elsewhere": (replayed_later, DIFFER),
    # a man in the middle
    "another nonce": (altered(nonce=bytes(32)), DIFFER),
    "another cluster id": (altered(cluster_id=67), DIFFER),
    "asking for another": (altered(asked=2), DIFFER),
    "another incarnation": (altered(incarnation=bytes(16)), DIFFER),
    "another lane": (altered(lane=1, token=b"t" * 16), DIFFER),
    "another token": (altered(token=b"t"), DIFFER),
    "other paths": (altered(paths=("shm", "tcp")), DIFFER),
    "another group": (altered(group="elsewhere"), DIFFER),
    "an older oldest": (altered(oldest=1), DIFFER),
    "no oldest": (altered(oldest=0), DIFFER),
    "a newer newest": (altered(version=5), DIFFER),
    "a field more": (altered(more=(True,)), DIFFER),
    "another nonce of the node": (challenge_altered(2, bytes(32)), DIFFER),
    "another version of the node": (challenge_altered(0, 5), DIFFER),
    "another incarnation of the node": (challenge_altered(1, bytes(16)), DIFFER),
    # whose secret
    "five with the secret for all": (as_(ME.but(cluster_id=5)), DIFFER),
    "five with the secret of six": (as_(ME.but(cluster_id=5, secret=SIX)), DIFFER),
    "a third one with the secret of five": (as_(ME.but(secret=FIVE)), DIFFER),
    "the wrong id asked for, without the secret": (as_(STRANGER.but(asked=3)), DIFFER),
    "as if there were no secrets": (said(OPEN.hello), "only the accepting side"),
    "no secret, and proving so": (said(OPEN.hello, frame(PROVE, b"")), "only the accepting side"),
    # versions
    "an old version": (said(STRANGER.but(version=3, oldest=0).hello), VERSIONS),
    "old versions": (said(STRANGER.but(version=3, oldest=1).hello), VERSIONS),
    "new versions": (said(STRANGER.but(version=9, oldest=5).hello), VERSIONS),
    "versions the wrong way round": (said(STRANGER.but(version=4, oldest=9).hello), VERSIONS),
    "a version below zero": (said(STRANGER.but(version=-4, oldest=-9).hello), VERSIONS),
    "the largest version, and the smallest": (as_(STRANGER.but(version=2**63 - 1, oldest=-(2**63))), DIFFER),
    "a version that is no number": (said(STRANGER.but(version="4").hello), "malformed Hello"),
    "another protocol": (said(STRANGER.but(magic="kvpush").hello), "does not speak the kvpull protocol"),
    # out of turn
    "hello twice": (twice, f"Hello {STATE}proving"),
    "hello twice at once": (said(STRANGER.hello, STRANGER.hello), f"Hello {STATE}proving"),
    "a proof before a hello": (said(frame(PROVE, bytes(32))), f"Prove {STATE}new"),
    "a proof before the challenge": (said(STRANGER.hello, frame(PROVE, bytes(32))), DIFFER),
    "two proofs": (said(STRANGER.hello, frame(PROVE, b""), frame(PROVE, b"")), DIFFER),
    "a request at once": (said(REQUEST_1), f"Request {STATE}new"),
    "a request for a proof": (said(STRANGER.hello, REQUEST_1), f"Request {STATE}proving"),
    "a request behind a wrong proof": (said(STRANGER.hello, frame(PROVE, b""), REQUEST_1), DIFFER),
    "a request behind the right proof": (impatient(REQUEST_1), "did not wait for the answer to its greeting"),
    "the right proof twice": (impatient(frame(PROVE, b"")), "did not wait for the answer to its greeting"),
    "pings before a proof": (said(STRANGER.hello, frame(PING, 1) * 50), f"Ping {STATE}proving"),
    "words after the refusal": (after_the_refusal, DIFFER),
    "a challenge of its own": (said(frame(CHALLENGE, 4, bytes(16), bytes(32), True)), f"Challenge {STATE}new"),
    "a welcome of its own": (said(STRANGER.hello, frame(WELCOME, NODE, b"", b"", [])), f"Welcome {STATE}proving"),
    "a refusal of its own": (said(STRANGER.hello, frame(REJECT, 0, "go away")), f"Reject {STATE}proving"),
    # frames
    "a greeting above the limit": (said(STRANGER.but(group="g" * 4096).hello), "exceeds the limit of 4096"),
    "a greeting with a tail": (said(frame(HELLO, tail=bytes(9))), "carries no tail"),
    "a nonce cut short": (said(STRANGER.but(nonce=bytes(31)).hello), "malformed Hello"),
    "a third lane": (said(STRANGER.but(lane=2).hello), "malformed Hello"),
    "a hello of one word": (said(frame(HELLO, "kvpull")), "malformed Hello"),
}  # fmt: skip


@pytest.mark.parametrize(("attack", "reason"), CASES.values(), ids=CASES.keys())
async def test_it_is_refused_learns_nothing_and_keeps_nobody_out(
    events: EventLog, attack: Callable[[Attack], None], reason: str
) -> None:
    async with guarded() as source:
        _, cache = await publish(source, 7)
        one = Attack(source)
        await asyncio.to_thread(attack, one)
        rejected = await events.first("link.rejected", text=reason, local_cluster_id=NODE)
        assert [each.kind for each in one.heard] in ([], [REJECT], [CHALLENGE], [CHALLENGE, REJECT])
        for each in one.heard:
            assert each.kind == CHALLENGE or each.fields == [FAILED, rejected["reason"]]
            assert each.kind == REJECT or each.fields[0] == 4
            assert pack(NODE) not in each.raw
            assert str(NODE) not in str(each.fields)
        assert not any(secret.decode() in str(events.events) for secret in (SECRET, FIVE, SIX))
        assert events.named("link.bug") == events.named("link.accept_failed") == []
        await unharmed(source)
        await source.kv_cache_manager.deallocate_cache(cache)


async def test_a_cluster_without_a_secret_here_is_told_the_same_as_one_with_a_wrong_secret() -> None:
    """So nobody finds out which clusters a node knows. The challenges differ in nothing but their random bytes."""
    async with serving(NODE, link_secrets={5: FIVE.decode()}) as source:
        heard = []
        for cluster_id in (5, 7, 2**63):
            for wrong in (b"", b"a guess", SECRET):
                attack = Attack(source)
                await asyncio.to_thread(as_(ME.but(cluster_id=cluster_id, secret=wrong)), attack)
                (challenge, refused) = attack.heard
                heard.append((challenge.fields[0], challenge.fields[3], len(challenge.raw), refused.raw))
        assert set(heard) == {(4, True, heard[0][2], frame(REJECT, int(FAILED), DIFFER))}
        async with pulling(5, link_secrets={NODE: FIVE.decode()}) as puller:
            assert await link(puller, source) == OK
            await honest_pull(puller, source, 5)


# --- time ---

SLOW = {
    "no word": b"",
    "half a hello": ME.hello[:20],
    "no proof": STRANGER.hello,
    "half a proof": ME.hello + frame(PROVE, b"")[:5],
}


@pytest.mark.parametrize("words", SLOW.values(), ids=SLOW.keys())
@pytest.mark.parametrize("drips", [False, True], ids=["and then silence", "and then drips"])
async def test_a_greeting_that_takes_too_long_is_ended_and_others_link_meanwhile(
    events: EventLog, words: bytes, drips: bool
) -> None:
    async with guarded(handshake_timeout=600) as source:
        began = time.monotonic()
        wire = Wire.open(source.listen_address)
        wire.send(words)
        await unharmed(source)
        ending = asyncio.ensure_future(asyncio.to_thread(wire.rest))
        while not ending.done():
            if drips:
                wire.send(b"\0")
            await asyncio.sleep(0.05)
        assert time.monotonic() - began < 10
        assert [each.kind for each in frames_in(await ending)] in ([], [CHALLENGE])
        assert events.named("link.rejected")
        await unharmed(source)


async def test_drips_do_not_make_the_time_longer(events: EventLog) -> None:
    """A frame that would be whole after some 20 s."""
    async with guarded(handshake_timeout=400) as source:
        with Wire.open(source.listen_address) as wire:
            began = time.monotonic()
            for byte in STRANGER.but(group="g" * 900).hello:
                wire.send(bytes([byte]))
                await asyncio.sleep(0.02)
                if events.named("link.rejected", text="no greeting within 400 ms"):
                    break
            assert time.monotonic() - began < 10
            assert wire.rest() == b""
