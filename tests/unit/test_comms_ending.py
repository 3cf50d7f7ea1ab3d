"""The end of comms on the test's own loop: unlinked on either side, lost, never met, and what is left of them."""

from __future__ import annotations

import asyncio

import pytest

from kvpull_async.status import LLMException, LLMStatusCode
from tests.loop_nodes import event_log, eventually
from tests.ranks import comm_name
from tests.unit.comm_nodes import FAILED, PREPARING, Node, apart, doors, is_closed, met, nodes, refused

# -- ending ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [0, 1])
async def test_unlinking_tells_the_peer_which_may_unlink_as_well(side: int) -> None:
    both = Node(1), Node(2)
    async with nodes(*both):
        name = comm_name()
        for turn in (1, 2):
            assert await met(*both, name) == (turn, turn)
            await both[side].comms.unlink(turn)
            await both[1 - side].becomes(turn, FAILED)
            await both[1 - side].comms.unlink(turn)
            assert [node.links.all() for node in both] == [[], []]


async def test_both_sides_may_unlink_at_once() -> None:
    both = Node(1), Node(2)
    async with nodes(*both):
        name = comm_name()
        for turn in range(1, 6):
            await met(*both, name)
            await asyncio.wait_for(asyncio.gather(*(node.comms.unlink(turn) for node in both)), 10)
            await eventually(lambda: [node.links.all() for node in both] == [[], []])


@pytest.mark.parametrize("side", [0, 1])
async def test_what_was_left_is_not_entered_again_but_by_a_new_comm(side: int) -> None:
    both = Node(1), Node(2)
    ahead, behind = both[side], both[1 - side]
    async with nodes(*both):
        name = comm_name()
        await met(*both, name)
        await ahead.comms.unlink(1)
        await ahead.meet(name)
        await behind.becomes(1, FAILED)
        await asyncio.sleep(0.2)
        assert (await ahead.now(2), await behind.now(1)) == (PREPARING, FAILED)
        await behind.comms.unlink(1)
        await behind.meet(name)
        await ahead.becomes(2)
        await behind.becomes(2)


async def test_a_comm_whose_caller_was_cancelled_too_late_to_hear_of_it_is_taken_back() -> None:
    one, two = Node(1), Node(2)
    async with nodes(one, two):
        await met(one, two, comm_name())
        one.comms.take_back(1)
        await two.becomes(1, FAILED)
        await eventually(lambda: repr(one.comms) == "<Comms []>" and not one.links.all())
        one.comms.take_back(1)


async def test_unlinking_that_is_cancelled_leaves_nothing_either() -> None:
    one, two = Node(1), Node(2)
    async with nodes(one, two):
        name = comm_name()
        port = one.wanted(name).ports[0]
        for turns in range(12):
            comms = await met(one, two, name)
            unlinking = asyncio.create_task(one.comms.unlink(comms[0]))
            for _ in range(turns):
                await asyncio.sleep(0)
            unlinking.cancel()
            await asyncio.gather(unlinking, return_exceptions=True)
            if repr(one.comms) != "<Comms []>":  # cancelled before it began
                await one.comms.unlink(comms[0])
            await two.becomes(comms[1], FAILED)
            await two.comms.unlink(comms[1])
            await eventually(lambda: not (one.links.all() or two.links.all()))
            await is_closed(two, ("127.0.0.1", port))


async def test_unlink_clusters_ends_the_comm_on_both_sides() -> None:
    one, two = Node(1), Node(2)
    with event_log() as events:
        async with nodes(one, two):
            await met(one, two, comm_name())
            assert await one.unlink(2) is LLMStatusCode.LLM_SUCCESS
            await one.becomes(1, FAILED)
            await two.becomes(1, FAILED)
            await eventually(lambda: len(events.named("comm.failed", text="was unlinked")) == 2)
            assert not events.warnings


async def test_a_lost_link_comes_back_and_the_comm_with_it() -> None:
    one, two = Node(1), Node(2)
    async with nodes(one, two):
        await met(one, two, comm_name())
        link = two.links.find(1)
        assert link is not None
        for lane in link._lanes.values():
            lane.abort()
        await eventually(lambda: two.counters.snapshot().get("reconnects") == 1)
        await one.becomes(1)
        await two.becomes(1)


async def test_a_comm_whose_link_stays_away_has_failed() -> None:
    one, two = Node(1), Node(2, rank_link_timeout_ms=300)
    with event_log() as events:
        async with nodes(one, two):
            await met(one, two, comm_name())
            await one.die()
            await two.becomes(1, PREPARING)
            await two.becomes(1, FAILED)
            link = two.links.find(1)
            assert link is not None
            two.links.end(link, "given up")
            await events.first("comm.failed", text="has ended")
        assert {event["event"] for event in events.warnings} == {"link.lost", "comm.failed"}


@pytest.mark.parametrize("cluster", [1, 2])
async def test_who_does_not_come_in_time_is_named(cluster: int) -> None:
    node = Node(cluster, rank_link_timeout_ms=100)
    with event_log() as events:
        async with nodes(node):
            await node.meet(comm_name(), text=apart("127.0.0.7"))
            await node.becomes(1, FAILED)
            failed = await events.first("comm.failed", text="not met within 0.1 s", clusters=str(3 - cluster))
    assert ("it did not come" if cluster == 1 else "127.0.0.7") in failed["reason"]


async def test_total_time_in_seconds_goes_before_the_timeout() -> None:
    node = Node(2, rank_link_timeout_ms=10, link_total_time_s=60)
    async with nodes(node):
        await node.meet(comm_name())
        await asyncio.sleep(0.1)
        assert await node.now(1) is PREPARING


async def test_an_existing_comm_is_not_made_twice_unless_it_has_failed() -> None:
    one = Node(1, rank_link_timeout_ms=100)
    async with nodes(one):
        name = comm_name()
        await one.meet(name)
        with pytest.raises(LLMException, match="comm 1 is") as caught:
            await one.meet(name)
        refused(caught, LLMStatusCode.LLM_ALREADY_LINK)
        await one.becomes(1, FAILED)
        assert await one.meet(name) == 2
        assert (await one.now(1), await one.now(2)) == (FAILED, PREPARING)


async def test_p8_nothing_is_left_after_unlinking_or_closing() -> None:
    one, two = Node(1), Node(2)
    before = {task.get_name() for task in asyncio.all_tasks()}
    with event_log() as events:
        async with nodes(one, two):
            name = comm_name()
            await met(one, two, name)
            await two.comms.unlink(1)
            await one.comms.unlink(1)
            await eventually(lambda: {task.get_name() for task in asyncio.all_tasks()} == before)
            (address,) = doors(events, name)
            with pytest.raises(ConnectionRefusedError):
                await two.transport.dial(address)
            await one.meet(name)
            await two.meet(comm_name())
        await eventually(lambda: {task.get_name() for task in asyncio.all_tasks()} == before)
