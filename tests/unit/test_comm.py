"""One comm on the test's own loop: meeting, its status, strangers at the door, and links that exist already."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest

from kvpull_async import comm as comm_module
from kvpull_async import comms as comms_module
from kvpull_async._deadline import Deadline
from kvpull_async.link import Link
from kvpull_async.linkage import LinkState
from kvpull_async.protocol.session import Peer
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import Address, ControlChannel
from tests.loop_nodes import event_log, eventually
from tests.ranks import comm_name
from tests.unit.comm_nodes import FAILED, OK, PREPARING, Node, doors, met, nodes, ready, refused

LOW, HIGH = b"\x01" * 16, b"\xfe" * 16


# -- meeting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp", "inproc"])
@pytest.mark.parametrize("first", [1, 2])
async def test_whoever_comes_first_waits_for_the_other(transport: str, first: int) -> None:
    one, two = Node(1, transport=transport), Node(2, transport=transport)
    early, late = (one, two) if first == 1 else (two, one)
    with event_log() as events:
        async with nodes(one, two):
            name = comm_name()
            assert await early.meet(name) == 1
            await asyncio.sleep(0.1)
            assert await early.now(1) is PREPARING
            assert await late.meet(name) == 1
            await early.becomes(1)
            await late.becomes(1)
            assert ready(one, two) == [1, 1]
            link = two.links.find(1)
            assert link is not None
            await link.check(Deadline.after_ms(15_000))
            for _ in range(2):
                await events.first("comm.ready", comm_name=name)
    assert [event["clusters"] for event in events.named("comm.linking", comm_name=name)].count("2") == 1
    assert len(events.named("comm.closed", comm_name=name)) == 2


async def test_many_comms_of_one_pair_come_about_at_once_over_one_link() -> None:
    one, two = Node(1), Node(2)
    async with nodes(one, two):
        names = [comm_name() for _ in range(20)]
        await asyncio.gather(*(node.meet(name) for name in names for node in (one, two)))
        for comm_id in range(1, 21):
            await one.becomes(comm_id)
            await two.becomes(comm_id)
        assert ready(one, two) == [1, 1]


async def test_comms_in_which_the_ranks_are_the_other_way_round() -> None:
    for incarnations in ((LOW, HIGH), (HIGH, LOW)):
        one, two = (Node(i + 1, incarnation=incarnation) for i, incarnation in enumerate(incarnations))
        async with nodes(one, two):
            name, other = comm_name(), comm_name()
            for node in (one, two):
                await node.meet(name, {1: 0, 2: 1})
                await node.meet(other, {2: 0, 1: 1})
            for node in (one, two):
                await node.becomes(1)
                await node.becomes(2)
            await eventually(lambda: ready(one, two) == [1, 1])  # noqa: B023


async def test_ranks_of_one_server_are_looked_for_on_this_machine_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpull_async.comm._NEARBY", 0.2)
    two, asked = Node(2), []

    async def refuse(address: Address) -> ControlChannel:
        asked.append((address[0], time.monotonic()))
        raise ConnectionRefusedError

    two.transport.dial = refuse  # type: ignore[method-assign]
    async with nodes(two):
        began = time.monotonic()
        await two.meet(comm_name())
        await eventually(lambda: any(host == "10.1.1.1" for host, _ in asked))
    assert {host for host, at in asked if at - began < 0.2} == {"127.0.0.1"}


async def test_a_member_that_has_long_been_missing_is_looked_for_as_often_as_it_takes_to_meet_at_once() -> None:
    two, asked = Node(2), []
    async with nodes(two):
        wanted = two.wanted(comm_name())

        async def refuse(address: Address) -> ControlChannel:
            if address == wanted.dials[0].addresses[0]:
                asked.append(time.monotonic())
            raise ConnectionRefusedError

        two.transport.dial = refuse  # type: ignore[method-assign]
        await two.comms.link(wanted)
        await eventually(lambda: len(asked) > 30)
    assert min(late - early for early, late in itertools.pairwise(asked[-10:])) < 0.1


async def test_a_member_that_comes_in_before_all_doors_are_open_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, listening, go_on = Node(1, rank_link_timeout_ms=500), Node(2), asyncio.Event(), asyncio.Event()
    begin = comms_module.listen

    async def slow(*arguments: Any) -> Any:
        opened = await begin(*arguments)
        listening.set()
        await go_on.wait()
        return opened

    monkeypatch.setattr(comms_module, "listen", slow)
    with event_log() as events:
        async with nodes(one, two):
            name = comm_name()
            linking = asyncio.create_task(one.meet(name))
            await listening.wait()
            await two.becomes(await two.meet(name))
            go_on.set()
            await one.becomes(await linking)
            await asyncio.sleep(0.6)
            assert len(events.named("comm.ready", comm_name=name)) == 2
            assert not events.named("comm.failed")


# -- how it stands -----------------------------------------------------------------------------------------------------


async def test_the_time_for_a_lost_link_to_come_back_counts_from_its_loss_whoever_asks() -> None:
    one, two = Node(1), Node(2, rank_link_timeout_ms=400)
    async with nodes(one, two):
        await met(one, two, comm_name())
        link = two.links.find(1)
        assert link is not None
        await one.die()
        await eventually(lambda: link.state is not LinkState.READY)
        assert await two.now(1) is PREPARING
    one, two = Node(1), Node(2, rank_link_timeout_ms=400)
    async with nodes(one, two):
        await met(one, two, comm_name())
        await one.die()
        await asyncio.sleep(1.0)  # nobody asks
        assert await two.now(1) is FAILED


async def test_a_comm_that_was_unlinked_while_a_link_for_it_was_dropped_stays_unlinked() -> None:
    """Dropping a link takes its time, and must not eat what ends the search."""
    one, two = Node(1), Node(2)
    async with nodes(one, two):
        await one.meet(comm_name())
        name, dropping = comm_name(), asyncio.Event()
        await one.meet(name)

        async def take(link: Link) -> LLMStatusCode:
            dropping.set()
            (lane, *_) = link._lanes.values()
            lane._tasks.add(asyncio.ensure_future(asyncio.sleep(0.2)))
            await link.close(LLMException("the peer's own connection counts"), Deadline.after_ms(15_000))
            return LLMStatusCode.LLM_SUCCESS

        keep, two.links.take = two.links.take, take  # type: ignore[method-assign]
        comm_id = await two.meet(name)
        await dropping.wait()
        two.links.take = keep  # type: ignore[method-assign]
        await two.comms.unlink(comm_id)
        await asyncio.sleep(0.3)
        assert two.links.all() == []
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "kvpull-comm" and not task.done()]


# -- strangers ---------------------------------------------------------------------------------------------------------


async def knock(node: Node, address: Address, *, group: str, asked: int = 1, paths: tuple[str, ...] = ("tcp",)) -> Peer:
    """Greet at a door as the first connection of a link."""
    context = node.context.meeting(group, [address])
    channel = await node.transport.dial(address)
    lane = context.new_lane(channel, dialer=True, paths=paths, asked=asked, lane=0, token=b"")
    try:
        return await lane.dial(Deadline.after_ms(15_000))
    finally:
        lane.abort()


async def test_a_door_lets_its_group_in_and_nobody_else() -> None:
    one, member, stranger = Node(1), Node(2), Node(9)
    with event_log() as events:
        async with nodes(one, member, stranger):
            name = comm_name()
            wanted = one.wanted(name)
            await one.comms.link(wanted)
            (address,) = doors(events, name)
            ordinary = await one.listen()
            for node, group, at in (
                (member, "", address),
                (member, "0" * 32, address),
                (stranger, wanted.group, address),
                (member, wanted.group, ordinary),
            ):
                with pytest.raises(LLMException, match="group") as caught:
                    await knock(node, at, group=group)
                refused(caught, LLMStatusCode.LLM_LINK_FAILED)
            with pytest.raises(LLMException, match="no link yet"):
                await knock(member, address, group=wanted.group, paths=())
            assert (ready(one), await one.now(1)) == ([0], PREPARING)
            assert (await knock(member, address, group=wanted.group)).cluster_id == 1
    assert {event["reason"] for event in events.named("link.rejected") if "group" in event["reason"]}


async def test_another_process_of_a_member_does_not_push_it_out() -> None:
    one, two, impostor = Node(1), Node(2), Node(2)
    async with nodes(one, two, impostor):
        name = comm_name()
        await met(one, two, name)
        link = one.links.find(2)
        await impostor.meet(name)
        await asyncio.sleep(0.2)
        assert await impostor.now(1) is PREPARING
        assert (await one.now(1), await two.now(1), ready(one)) == (OK, OK, [1])
        assert one.links.find(2) is link
        await two.die()
        await impostor.becomes(1)
        await one.becomes(1)


# -- sharing -----------------------------------------------------------------------------------------------------------


async def test_a_link_is_a_comms_only_once_both_sides_say_so() -> None:
    one, two = Node(1), Node(2)
    async with nodes(one, two):
        await one.listen()
        assert await two.link(one) == [LLMStatusCode.LLM_SUCCESS]
        name = comm_name()
        for node, other in ((one, two), (two, one)):
            comm_id = await node.meet(name)
            await asyncio.sleep(0.1)
            assert await node.now(comm_id) is PREPARING
            await other.comms.unlink(await other.meet(comm_name()))
            await node.comms.unlink(comm_id)
        await met(one, two, name)
        assert ready(one, two) == [1, 1]


async def test_a_link_is_not_left_while_the_peer_is_asked_to_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its answer on the peer counts on the link."""
    one, two, answered, go_on = Node(1), Node(2), asyncio.Event(), asyncio.Event()
    ask = comm_module.acknowledged

    async def slowly(*arguments: Any) -> None:
        await ask(*arguments)
        answered.set()
        await go_on.wait()

    async with nodes(one, two):
        first, name = await met(one, two, comm_name()), comm_name()
        monkeypatch.setattr(comm_module, "acknowledged", slowly)
        second = await one.meet(name), await two.meet(name)
        await answered.wait()
        await two.comms.unlink(first[1])
        go_on.set()
        await two.becomes(second[1])
        assert [await one.now(comm_id) for comm_id in (first[0], second[0])] == [OK, OK]
        assert ready(one, two) == [1, 1]


@pytest.mark.parametrize("who", ["this side", "the peer"])
async def test_a_link_that_was_only_asked_about_is_left_with_the_last_who_used_it(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, answered, go_on = Node(1), Node(2), asyncio.Event(), asyncio.Event()
    ask = comm_module.acknowledged

    async def slowly(*arguments: Any) -> None:
        try:
            await ask(*arguments)
        finally:
            answered.set()
            await go_on.wait()

    with event_log() as events:
        async with nodes(one, two):
            first, name = await met(one, two, comm_name()), comm_name()
            monkeypatch.setattr(comm_module, "acknowledged", slowly)
            waiting = await two.meet(name)
            await answered.wait()
            leaver, comm_id = (two, first[1]) if who == "this side" else (one, first[0])
            await leaver.comms.unlink(comm_id)
            go_on.set()
            await eventually(lambda: (one.links.all(), two.links.all()) == ([], []))
            assert await two.now(waiting) is PREPARING
            assert not events.named("comm.failed", comm_name=name)
            await one.becomes(await one.meet(name))
            await two.becomes(waiting)


@pytest.mark.parametrize("side", [0, 1])
async def test_a_link_that_is_on_its_way_out_is_not_shared_by_either_side(side: int) -> None:
    both = Node(1), Node(2)
    leaver, other = both[side], both[1 - side]
    async with nodes(*both):
        first, name = await met(*both, comm_name()), comm_name()
        (link,) = leaver.links.all()
        await link._fifo.acquire()  # a pull, which is waited for
        unlinking = asyncio.create_task(leaver.comms.unlink(first[side]))
        await eventually(lambda: link.leaving)
        second = [await node.meet(name) for node in both]
        await asyncio.sleep(0.2)
        assert [await node.now(comm_id) for node, comm_id in zip(both, second, strict=True)] == [PREPARING] * 2
        assert await other.now(first[1 - side]) is OK
        link._fifo.release()
        await unlinking
        for node, comm_id in zip(both, second, strict=True):
            await node.becomes(comm_id)


async def test_members_that_leave_one_comm_while_they_enter_another_meet_in_that() -> None:
    for turns in range(8):
        one, two = Node(1), Node(2)
        async with nodes(one, two):
            first, name = await met(one, two, comm_name()), comm_name()

            async def enter(node: Node, name: str = name, turns: int = turns) -> int:
                for _ in range(turns):
                    await asyncio.sleep(0)
                return await node.meet(name)

            leave = [node.comms.unlink(comm_id) for node, comm_id in zip((one, two), first, strict=True)]
            *_, mine, theirs = await asyncio.gather(*leave, enter(one), enter(two))
            assert (mine, theirs) == (2, 2)
            await one.becomes(2)
            await two.becomes(2)
