"""How links end and come back: unlinking politely and by force, from either side, dead peers, restarts, relinking."""

from __future__ import annotations

import asyncio

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.link import Link
from kvpull_async.linkage import LinkState
from kvpull_async.protocol import frames
from kvpull_async.status import LLMException, LLMStatusCode
from tests.loop_nodes import CODES, LoopNode, event_log, eventually, loop_nodes

OK = LLMStatusCode.LLM_SUCCESS
both_transports = pytest.mark.parametrize("transport", ["tcp", "inproc"])
both_sides = pytest.mark.parametrize("side", ["dialler", "acceptor"])


def soon() -> Deadline:
    return Deadline.after_ms(15_000)


def link_of(node: LoopNode, cluster_id: int) -> Link:
    link = node.links.find(cluster_id)
    assert link is not None
    return link


async def no_links(*nodes: LoopNode) -> None:
    await eventually(lambda: all(node.links.all() == [] for node in nodes), "no links left")


async def connected(*nodes: LoopNode) -> None:
    await eventually(
        lambda: all([link.state for link in node.links.all()] == [LinkState.READY] for node in nodes), "one link each"
    )


def cut(node: LoopNode) -> None:
    """Break the node's connections as a network does."""
    for link in node.links.all():
        for lane in link._lanes.values():
            lane.channel.abort()


@both_transports
@both_sides
@pytest.mark.parametrize("force", [False, True])
async def test_unlinking_from_either_side_ends_both_and_relinking_works(transport: str, side: str, force: bool) -> None:
    """By force, too: the side that dialled would otherwise dial again and the link be back by itself."""
    one, two = LoopNode(1, transport=transport), LoopNode(2, transport=transport)
    async with loop_nodes(one, two):
        for _ in range(3):
            assert await one.link(two) == [OK]
            leaving, other = (one, 2) if side == "dialler" else (two, 1)
            assert await leaving.unlink(other, force=force) == OK
            assert leaving.links.all() == []
            await no_links(one, two)
        assert await two.link(one) == [OK]
        await connected(one, two)


@both_sides
async def test_the_other_side_knows_why_its_link_is_gone(side: str) -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        await one.link(two)
        leaving, left, other = (one, link_of(two, 1), 2) if side == "dialler" else (two, link_of(one, 2), 1)
        assert await leaving.unlink(other) == OK
        with pytest.raises(LLMException, match="has unlinked") as caught:
            await left.ready(soon())
        assert caught.value.status_code == LLMStatusCode.LLM_NOT_YET_LINK


async def test_unlinking_what_is_not_linked_has_the_modes_own_code() -> None:
    one = LoopNode(1)
    async with loop_nodes(one):
        for force in (False, True):
            assert await one.unlink(9, force=force) == CODES.unknown_unlink


async def test_a_polite_unlink_waits_for_the_running_pull_and_fails_those_that_wait() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        await one.link(two)
        link = link_of(one, 2)
        await link._fifo.acquire()
        waiting = asyncio.create_task(link._fifo.acquire())
        await asyncio.sleep(0)
        unlinking = asyncio.create_task(one.unlink(2))
        with pytest.raises(LLMException, match="cluster 2 was unlinked") as caught:
            await waiting
        assert caught.value.status_code == LLMStatusCode.LLM_NOT_YET_LINK
        await asyncio.sleep(0.02)
        assert not unlinking.done()
        link._fifo.release()
        assert await unlinking == OK


async def test_p4_an_unlink_that_is_cancelled_leaves_the_link_as_it_was() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        await one.link(two)
        link = link_of(one, 2)
        await link._fifo.acquire()
        unlinking = asyncio.create_task(one.unlink(2))
        await eventually(lambda: bool(link._fifo._idle))
        unlinking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unlinking
        link._fifo.release()
        assert link_of(one, 2) is link
        await asyncio.wait_for(link._fifo.acquire(), 20)
        link._fifo.release()
        assert not link.leaving
        assert await one.unlink(2) == OK


async def test_a_forced_unlink_does_not_wait_long_for_the_running_pull() -> None:
    one, two = LoopNode(1, settle_timeout_ms=20), LoopNode(2)
    async with loop_nodes(one, two):
        await one.link(two)
        await link_of(one, 2)._fifo.acquire()
        assert await one.unlink(2, force=True) == OK
        await no_links(one, two)


@both_sides
async def test_a_dead_peer_cannot_be_told_but_can_be_forced(side: str) -> None:
    """The link is kept after the polite attempt, as the original keeps it."""
    one, two = LoopNode(1), LoopNode(2)
    with event_log() as events:
        async with loop_nodes(one, two):
            await one.link(two)
            staying, dying, other = (one, two, 2) if side == "dialler" else (two, one, 1)
            await dying.die()
            await eventually(lambda: link_of(staying, other).state is not LinkState.READY)
            assert await staying.unlink(other) == CODES.unreachable_unlink
            reason = "could not be told to unlink: the link is down"
            await events.first("link.unlink_failed", text=reason, cluster_id=other)
            assert not events.named("link.failed")
            assert staying.links.find(other) is not None
            assert await staying.unlink(other, force=True) == OK
            assert await staying.unlink(other, force=True) == CODES.unknown_unlink
            assert staying.links.all() == []


async def test_a_peer_that_does_not_answer_the_goodbye_is_a_timeout_and_the_link_stays() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        await one.link(two)
        server = two.servers[0]
        server.receive, answer = lambda *_: None, server.receive  # type: ignore[method-assign]
        server.lane._on_message = server.receive
        assert await one.unlink(2, timeout_ms=50) == CODES.timeout
        assert link_of(one, 2).state is not LinkState.CLOSED  # it is on its way to a new connection
        server.lane._on_message = answer
        await link_of(one, 2).check(soon())
        assert await one.unlink(2) == OK


async def test_a_link_that_could_not_be_unlinked_still_comes_back() -> None:
    """The polite attempt stops the reconnecting for a moment, and must set it going again."""
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        await one.link(two)
        address = two.target.address
        assert address is not None
        await two.stop_listening()
        cut(two)
        link = link_of(one, 2)
        await eventually(lambda: link.state is not LinkState.READY)
        link.refuse(LLMException("about to be unlinked"))
        assert link._reconnecting is not None
        await asyncio.wait([link._reconnecting], timeout=20)
        assert await one.unlink(2) == CODES.unreachable_unlink
        await two.listen(address)
        await link.check(soon())
        await connected(one, two)


async def test_a_peer_lost_during_the_goodbye_leaves_a_link_that_comes_back() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        await one.link(two)
        link, server = link_of(one, 2), two.servers[0]

        def hang_up(message: frames.Message, tail: bytes) -> None:
            if isinstance(message, frames.Bye):
                server.lane.channel.abort()

        server.lane._on_message = hang_up
        assert await one.unlink(2) == CODES.unreachable_unlink
        await link.check(soon())
        assert await one.unlink(2) == OK


# --- lost and found ---


@both_transports
async def test_p4_a_cut_link_comes_back_without_being_asked(transport: str) -> None:
    one, two = LoopNode(1, transport=transport), LoopNode(2, transport=transport)
    async with loop_nodes(one, two):
        await one.link(two)
        mine, theirs = link_of(one, 2), link_of(two, 1)
        for count, node in enumerate((one, two), 2):
            cut(node)
            await eventually(lambda up=count: len(two.servers) == up and mine.state is theirs.state is LinkState.READY)
            await mine.check(soon())
            await theirs.check(soon())
        assert (one.links.find(2), two.links.find(1)) == (mine, theirs)
        assert one.counters.snapshot()["reconnects"] >= 1


async def test_the_side_that_was_dialled_may_dial_while_the_link_is_down() -> None:
    """The two attempts to restore it must not end with two links, nor with one that nobody can use. The first link
    comes back, so that what waits on it goes on.
    """
    for delay in range(0, 40, 4):
        one, two = LoopNode(1, incarnation=b"\x01" * 16), LoopNode(2, incarnation=b"\xfe" * 16)
        async with loop_nodes(one, two):
            await one.link(two)
            kept = link_of(one, 2)
            cut(two)
            for _ in range(delay):
                await asyncio.sleep(0)
            (code,) = await two.link(one)
            assert code in (OK, LLMStatusCode.LLM_ALREADY_LINK)
            await connected(one, two)
            assert link_of(one, 2) is kept
            await link_of(one, 2).check(soon())
            await link_of(two, 1).check(soon())


async def test_two_sides_of_which_each_would_let_the_other_one_wait_do_not() -> None:
    """One side restores a link that the other has forgotten and dials anew: neither may insist for long."""
    one, two = LoopNode(1, incarnation=b"\x01" * 16), LoopNode(2, incarnation=b"\xfe" * 16)
    async with loop_nodes(one, two):
        await one.link(two)
        link_of(two, 1).wave = lambda **_: None  # type: ignore[method-assign]  # the goodbye is lost
        await two.unlink(1, force=True)
        assert await two.link(one, timeout_ms=3000) == [OK]
        await connected(one, two)


async def test_a_dial_of_the_other_side_replaces_a_link_that_has_been_down_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvpull_async.link._RETURNS", 0.0)
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        await one.link(two)
        dead = link_of(one, 2)
        await two.stop_listening()
        cut(two)
        await eventually(lambda: dead.state is not LinkState.READY)
        assert await two.link(one) == [OK]
        await connected(one, two)
        assert link_of(one, 2) is not dead
        with pytest.raises(LLMException, match="dialled anew"):
            await dead.ready(soon())


async def test_a_restarted_peer_replaces_its_dead_link() -> None:
    one, old = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, old):
        await old.link(one)
        await old.die()
        await eventually(lambda: link_of(one, 2).state is not LinkState.READY)
        new = LoopNode(2)
        async with loop_nodes(new):
            assert await new.link(one) == [OK]
            await connected(one, new)
            await link_of(one, 2).check(soon())


async def test_a_peer_restarted_at_its_address_is_found_again() -> None:
    one, old, new = LoopNode(1), LoopNode(2), LoopNode(2)
    async with loop_nodes(one):
        address = await old.listen()
        await one.link(old)
        await old.close()
        await eventually(lambda: link_of(one, 2).state is not LinkState.READY)
        await new.listen(address)
        await link_of(one, 2).check(soon())
        assert one.counters.snapshot()["incarnation_changes"] == 1
        await new.close()


async def test_a_peer_that_does_not_come_back_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpull_async.link._INCOMING_KEPT", 0.05)
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        await two.link(one)
        link = link_of(one, 2)
        await two.die()
        await no_links(one)
        with pytest.raises(LLMException, match="the peer is gone") as caught:
            await link.ready(soon())
        assert caught.value.status_code == LLMStatusCode.LLM_NOT_YET_LINK


async def test_a_peer_that_was_away_before_is_given_its_full_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alarm of an earlier absence must not end a later one."""
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        await two.link(one)
        link = link_of(one, 2)
        monkeypatch.setattr("kvpull_async.link._INCOMING_KEPT", 0.3)
        cut(one)
        await eventually(lambda: link.lost_at > 0)
        await connected(one, two)
        monkeypatch.setattr("kvpull_async.link._INCOMING_KEPT", 60.0)
        await two.die()
        await eventually(lambda: link.state is not LinkState.READY)
        await asyncio.sleep(0.4)
        assert one.links.find(2) is link


async def test_closing_tells_who_waits_and_leaves_nothing() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        await one.link(two)
        link = link_of(one, 2)
        await link._fifo.acquire()
        waiting = asyncio.create_task(link._fifo.acquire())
        await asyncio.sleep(0)
        closing = asyncio.create_task(one.links.close(Deadline.after_ms(300)))
        with pytest.raises(LLMException) as caught:
            await waiting
        assert caught.value.status_code == LLMStatusCode.LLM_ENGINE_FINALIZED
        await closing
        assert one.links.all() == []


async def test_records_of_peers_are_kept_by_process_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpull_async.links._RECORDS", 2)
    links = LoopNode(1).links
    first = links.record((7, b"1"))
    second = links.record((7, b"2"))
    assert links.record((7, b"1")) is first
    links.record((7, b"3"))  # the least recently used one goes
    assert links.record((7, b"1")) is first
    assert links.record((7, b"2")) is not second


@both_transports
async def test_an_orderly_end_of_the_side_that_dialled_is_told_and_no_loss(transport: str) -> None:
    one, two = LoopNode(1, transport=transport), LoopNode(2, transport=transport)
    with event_log() as events:
        async with loop_nodes(one, two):
            await two.link(one)
            await two.close()
            await no_links(one)
        assert not events.named("link.lost")
