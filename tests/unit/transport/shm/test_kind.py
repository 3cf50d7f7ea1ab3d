"""How two processes meet: only on one machine, as one user, with the token of a link that is being made."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import Iterator

import pytest

from kvpull_async._workers import Workers
from kvpull_async.memory.publications import EPOCHS
from kvpull_async.memory.shared import SharedFile
from kvpull_async.transport.shm import kind as kind_module
from kvpull_async.transport.shm import messages, side
from kvpull_async.transport.shm.messages import Hello, Missed, Offer
from tests import memfds
from tests.sides import this_process, turn
from tests.unit.transport.shm.meetings import (
    PREFIX,
    STRANGER,
    connected,
    greeted,
    hello,
    hung_up,
    kinds,
    offered,
    seed,
    stranger,
    until,
)


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(2)
    yield made
    made.close(10)


# -- a meeting ---------------------------------------------------------------------------------------------------------


async def test_two_sides_meet_and_each_builds_its_half(workers: Workers) -> None:
    async with kinds() as (accepting, meeting):
        token = secrets.token_bytes(16)
        await meeting.meet(token, accepting.offer(token))
        halves = [kind.path(seed(token, workers, dialer=kind is meeting)) for kind in (accepting, meeting)]
        assert [half.name for half in halves] == ["shm", "shm"]
        assert "links=1 expected=0" in repr(accepting)


async def test_many_links_meet_at_once_by_one_name(workers: Workers) -> None:
    async with kinds() as (accepting, meeting):
        tokens = [secrets.token_bytes(16) for _ in range(30)]
        offers = [accepting.offer(token) for token in tokens]
        assert len({messages.decode_offer(offer).name for offer in offers}) == 1
        assert max(map(len, offers)) <= 512
        await asyncio.gather(*(meeting.meet(*one) for one in zip(tokens, offers, strict=True)))
        for token in tokens:
            accepting.path(seed(token, workers, dialer=False))


@pytest.mark.parametrize(
    ("accepting", "meeting", "allowed"),
    [
        ("auto", "auto", True),
        ("on", "on", True),
        ("auto", "on", True),
        ("off", "auto", False),
        ("auto", "off", False),
        ("off", "off", False),
    ],
)
async def test_process_memory_is_read_only_where_neither_side_forbids_it(
    accepting: str, meeting: str, allowed: bool
) -> None:
    if allowed:
        this_process()
    async with kinds(accepting=accepting, meeting=meeting) as pair:
        token = secrets.token_bytes(16)
        await pair[1].meet(token, pair[0].offer(token))
        sides = [kind._sides[token] for kind in pair]
        sides[0].drain()
        assert [(one.process is not None, one.read_by_peer) for one in sides] == [(allowed, allowed)] * 2


async def test_a_side_that_forbids_reading_does_not_tell_where_its_probe_is() -> None:
    async with kinds(accepting="off") as (accepting, _):
        with connected(offered(accepting, bytes(16)).name) as sock:
            page = SharedFile(EPOCHS * 8)
            side.send(sock, hello(bytes(16)), [page.descriptor])
            await until(lambda: accepting._sides)
            answer, descriptors = side.receive(sock)
            side.close(descriptors)
            assert isinstance(answer, Hello)
            assert answer.probe_address == 0
            assert len(descriptors) == 1


async def test_a_path_cannot_be_had_before_the_other_side_has_come(workers: Workers) -> None:
    async with kinds() as (accepting, meeting):
        accepting.offer(bytes(16))
        for kind in (accepting, meeting):
            with pytest.raises(ConnectionError, match="has not come"):
                kind.path(seed(bytes(16), workers, dialer=False))


# -- what stands against it --------------------------------------------------------------------------------------------


async def test_another_host_user_or_namespace_is_a_reason() -> None:
    async with kinds() as (accepting, meeting):
        offer = offered(accepting, bytes(16))
        for other, reason in (
            (Offer("another boot", offer.uid, offer.name), "another host"),
            (Offer(offer.boot_id, offer.uid + 1, offer.name), f"user {offer.uid + 1}"),
            (Offer(offer.boot_id, offer.uid, secrets.token_hex(16).encode()), "network namespace"),
            (Offer(offer.boot_id, offer.uid, b"/" * 64), "network namespace"),
        ):
            with pytest.raises(OSError, match=reason):
                await meeting.meet(bytes(16), messages.encode(other))
        assert "links=0" in repr(meeting)


@pytest.mark.parametrize("offer", [b"", b"junk", messages.encode(hello(bytes(16)))])
async def test_an_offer_that_makes_no_sense_is_an_error_like_others(offer: bytes) -> None:
    async with kinds() as (_, meeting):
        with pytest.raises(ConnectionError, match="malformed offer"):
            await meeting.meet(bytes(16), offer)


async def test_a_process_of_another_user_is_not_let_in_though_it_knows_everything() -> None:
    async with kinds() as (accepting, _):
        token = secrets.token_bytes(16)
        name = offered(accepting, token).name
        page = SharedFile(EPOCHS * 8)
        with stranger():
            sock = connected(name)
        with sock:
            side.send(sock, hello(token), [page.descriptor])
            await until(lambda: accepting.reasons)
            assert hung_up(sock)
        assert f"user {STRANGER}" in accepting.reasons[0]
        assert "links=0 expected=1" in repr(accepting), "the link that is being made is not disturbed"


async def test_a_child_that_became_another_user_is_not_let_in() -> None:
    async with kinds() as (accepting, _):
        token = secrets.token_bytes(16)
        name = offered(accepting, token).name
        if os.geteuid():
            pytest.skip("needs to become another user")

        def child() -> str:
            os.setresuid(STRANGER, STRANGER, STRANGER)
            page = SharedFile(EPOCHS * 8)
            with connected(name) as sock:
                side.send(sock, hello(token), [page.descriptor])
            return "said hello"

        assert memfds.in_child(child) == "said hello"
        await until(lambda: accepting.reasons)
        assert f"user {STRANGER}" in accepting.reasons[0]
        assert not accepting._sides


async def test_a_socket_of_another_user_is_not_trusted_though_the_offer_says_so() -> None:
    async with kinds() as (accepting, meeting):
        offer = offered(accepting, bytes(16))
        fake = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with fake:
            name = secrets.token_hex(16).encode()
            fake.bind(PREFIX + name)
            with stranger():
                fake.listen()
            with pytest.raises(PermissionError, match=f"user {STRANGER}"):
                await meeting.meet(bytes(16), messages.encode(Offer(offer.boot_id, offer.uid, name)))


# -- greetings ---------------------------------------------------------------------------------------------------------


async def test_a_token_is_of_use_once_and_only_while_its_link_is_being_made() -> None:
    async with kinds() as (accepting, meeting):
        first, second, third = (secrets.token_bytes(16) for _ in range(3))
        await meeting.meet(first, accepting.offer(first))
        accepting.offer(second)
        accepting.forget(second)
        page = SharedFile(EPOCHS * 8)
        for token in (first, second, third):
            await greeted(accepting, (hello(token), [page.descriptor]))
        assert accepting.reasons == ["the token of a link that does not exist"] * 3
        assert list(accepting._sides) == [first]
        assert not accepting._sides[first].closed


async def test_a_greeting_that_is_none_is_refused() -> None:
    async with kinds() as (accepting, _):
        token = secrets.token_bytes(16)
        accepting.offer(token)
        page, small = SharedFile(EPOCHS * 8), SharedFile(EPOCHS * 8 - 8)
        unsealed = memfds.memfd(EPOCHS * 8, seals=memfds.SEAL)
        said = hello(token)
        await greeted(accepting, (said, []))
        await greeted(accepting, (said, [page.descriptor, page.descriptor]))
        await greeted(accepting, (said, [small.descriptor]))
        await greeted(accepting, (said, [unsealed]))
        await greeted(accepting, (said, [0]))
        await greeted(accepting, (Missed(1), [page.descriptor]))
        os.close(unsealed)
        assert len(accepting.reasons) == 6
        assert "expected=1" in repr(accepting), "the honest one may still come"
        with connected(offered(accepting, token).name) as sock:
            sock.send(b"junk")
            await until(lambda: len(accepting.reasons) == 7)
        with connected(offered(accepting, token).name):
            pass
        await until(lambda: len(accepting.reasons) == 8)


async def test_one_that_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind_module, "_GREETING", 0.05)
    async with kinds() as (accepting, _):
        accepting.offer(bytes(16))
        await greeted(accepting)
        assert accepting.reasons == ["no greeting in time"]


async def test_more_silent_ones_than_may_wait_are_turned_away_and_an_honest_one_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kind_module, "_WAITING", 5)
    monkeypatch.setattr(kind_module, "_GREETING", 0.3)
    async with kinds() as (accepting, meeting):
        token = secrets.token_bytes(16)
        offer = accepting.offer(token)
        name = messages.decode_offer(offer).name
        with contextlib.ExitStack() as open_ones:
            for _ in range(5):
                open_ones.enter_context(connected(name))
                await turn(2)
            with connected(name) as late:
                await turn()
                assert hung_up(late)
            await until(lambda: len(accepting.reasons) == 5)
        await meeting.meet(token, offer)


async def test_a_mute_or_lying_listener_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind_module, "_GREETING", 0.1)
    async with kinds() as (accepting, meeting):
        offer = offered(accepting, bytes(16))
        page = SharedFile(EPOCHS * 8)
        unsealed = memfds.memfd(EPOCHS * 8, seals=memfds.SEAL)
        answers: list[tuple[messages.Message, list[int]] | None] = [
            None,
            (hello(b"another token..."), [page.descriptor]),
            (hello(bytes(16)), [unsealed]),
            (hello(bytes(16)), []),
            (Missed(1), []),
        ]
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as fake:
            name = secrets.token_hex(16).encode()
            fake.bind(PREFIX + name)
            fake.listen()
            for answer in answers:
                there = messages.encode(Offer(offer.boot_id, offer.uid, name))
                meeting_it = asyncio.ensure_future(meeting.meet(bytes(16), there))
                await turn()
                accepted, _ = fake.accept()
                with accepted:
                    if answer is not None:
                        side.send(accepted, *answer)
                    with pytest.raises((OSError, asyncio.TimeoutError)):
                        await meeting_it
        os.close(unsealed)
        assert "links=0" in repr(meeting)


async def test_a_meeting_that_is_cancelled_leaves_nothing() -> None:
    async with kinds() as (accepting, meeting):
        offer = offered(accepting, bytes(16))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as fake:
            name = secrets.token_hex(16).encode()
            fake.bind(PREFIX + name)
            fake.listen()
            there = messages.encode(Offer(offer.boot_id, offer.uid, name))
            task = asyncio.ensure_future(meeting.meet(bytes(16), there))
            await turn()
            before = memfds.descriptors()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert memfds.descriptors() == before - 1


async def test_a_full_queue_of_greeters_is_an_error_at_once() -> None:
    async with kinds() as (accepting, meeting):
        offer = offered(accepting, bytes(16))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as fake, contextlib.ExitStack() as waiting:
            name = secrets.token_hex(16).encode()
            fake.bind(PREFIX + name)
            fake.listen(0)
            waiting.enter_context(connected(name))
            with pytest.raises(OSError, match=r"\w"):
                await meeting.meet(bytes(16), messages.encode(Offer(offer.boot_id, offer.uid, name)))
