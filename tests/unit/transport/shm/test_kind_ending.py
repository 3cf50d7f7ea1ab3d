"""What is left when a meeting fails or a kind of path ends: nothing, and the next meeting works."""

from __future__ import annotations

import asyncio
import gc
import secrets
from collections.abc import Iterator

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers
from kvpull_async.memory import shared
from kvpull_async.transport.shm import messages, side
from tests import memfds
from tests.sides import turn
from tests.unit.transport.shm.meetings import (
    Kind,
    connected,
    kinds,
    offered,
    seed,
    until,
)


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(2)
    yield made
    made.close(10)


# -- descriptors run out -----------------------------------------------------------------------------------------------


async def test_without_descriptors_nobody_is_let_in_the_loop_stays_free_and_it_passes() -> None:
    async with kinds() as (accepting, meeting):
        token, other = secrets.token_bytes(16), secrets.token_bytes(16)
        offer, late = accepting.offer(token), accepting.offer(other)
        await meeting.meet(other, late)
        with connected(messages.decode_offer(offer).name), memfds.descriptor_limit(0):
            await until(lambda: accepting.reasons)
            for _ in range(100):
                await asyncio.sleep(0)
            assert len(accepting.reasons) < 50, "the loop spins: it tries at every turn"
            assert "Too many open files" in accepting.reasons[0]
        await until(lambda: "Too many open files" not in accepting.reasons[-1])  # who waited is let in, and has gone
        await meeting.meet(token, offer)


async def test_a_meeting_without_descriptors_is_an_error_and_works_later() -> None:
    async with kinds() as (accepting, meeting):
        for kind in (accepting, meeting):
            assert kind._publications.page.nbytes
        at_first = 0
        for free in (0, 1, 2):
            token = secrets.token_bytes(16)
            offer = accepting.offer(token)
            before = memfds.descriptors()
            with memfds.descriptor_limit(free), pytest.raises((OSError, asyncio.TimeoutError)):
                await meeting.meet(token, offer)
            accepting.forget(token)
            at_first = at_first or before
            await until(lambda: memfds.descriptors() == before)  # noqa: B023
        token = secrets.token_bytes(16)
        await meeting.meet(token, accepting.offer(token))  # let in after all those that failed
        for kind in (accepting, meeting):
            kind.forget(token)
        await until(lambda: memfds.descriptors() == at_first)


async def test_a_page_without_a_descriptor_is_a_reason_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with kinds() as (accepting, meeting):
        token = secrets.token_bytes(16)
        with monkeypatch.context() as old:
            old.setattr(shared, "_sealed", lambda _: False)
            with pytest.raises(OSError, match="no descriptor"):
                await meeting.meet(token, accepting.offer(token))
        await meeting.meet(token, accepting.offer(token))


# -- the end -----------------------------------------------------------------------------------------------------------


async def test_the_end_of_the_side_channel_is_told_to_the_link(workers: Workers) -> None:
    async with kinds() as (accepting, meeting):
        token = secrets.token_bytes(16)
        lost: tuple[list[str], list[str]] = ([], [])
        await meeting.meet(token, accepting.offer(token))
        accepting.path(seed(token, workers, dialer=False, lost=lost[0]))
        meeting.path(seed(token, workers, dialer=True, lost=lost[1]))
        accepting.forget(token)
        await until(lambda: lost[1])
        assert not lost[0], "who ends it by itself knows"  # and would have been told first
        await asyncio.sleep(side._FAREWELL)  # a later timer than one that tells it again
        assert len(lost[1]) == 1
        with pytest.raises(ConnectionError):
            meeting.path(seed(token, workers, dialer=True))


async def test_aborting_either_path_ends_the_side_channel_and_may_come_twice(workers: Workers) -> None:
    async with kinds() as (accepting, meeting):
        token = secrets.token_bytes(16)
        await meeting.meet(token, accepting.offer(token))
        path = meeting.path(seed(token, workers, dialer=True))
        path.abort()
        path.abort()
        meeting.forget(token)
        await until(lambda: accepting._sides[token].closed)
        assert "links=0" in repr(meeting)


async def test_forgetting_what_is_unknown_or_forgotten_is_nothing() -> None:
    async with kinds() as (accepting, _):
        token = secrets.token_bytes(16)
        accepting.forget(token)
        accepting.offer(token)
        accepting.forget(token)
        accepting.forget(token)
        assert "expected=0" in repr(accepting)


async def test_nothing_is_left_after_the_end(workers: Workers) -> None:
    before = memfds.descriptors(), memfds.mappings()
    pair = Kind(), Kind()
    tokens = [secrets.token_bytes(16) for _ in range(5)]
    for token in tokens:
        await pair[1].meet(token, pair[0].offer(token))
    waiting = connected(offered(pair[0], bytes(16)).name)
    await turn()
    for kind in pair:
        await kind.aclose(Deadline.after_ms(20_000))
        await kind.aclose(Deadline.after_ms(20_000))
        assert "links=0 expected=0" in repr(kind)
    assert waiting.recv(1) == b""
    waiting.close()
    del pair, kind
    gc.collect()
    assert (memfds.descriptors(), memfds.mappings()) == before


async def test_an_ended_kind_may_offer_anew() -> None:
    async with kinds() as (accepting, meeting):
        accepting.offer(bytes(16))
        await accepting.aclose(Deadline.after_ms(20_000))
        token = secrets.token_bytes(16)
        await meeting.meet(token, accepting.offer(token))


async def test_a_forked_child_closes_its_copies_and_the_parent_goes_on(workers: Workers) -> None:
    async with kinds() as (accepting, meeting):
        token, other = secrets.token_bytes(16), secrets.token_bytes(16)
        await meeting.meet(token, accepting.offer(token))
        late = accepting.offer(other)

        def child() -> str:
            before = memfds.descriptors()
            accepting.close_after_fork()
            meeting.close_after_fork()
            return str(before - memfds.descriptors())

        assert memfds.in_child(child) == "3"
        await turn()
        assert not accepting._sides[token].closed
        await meeting.meet(other, late)
        accepting.path(seed(other, workers, dialer=False))
