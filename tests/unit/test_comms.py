"""Comms on the test's own loop: meeting, sharing links, ports that are taken, and strangers at the door."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.protocol.session import Peer
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import Address, ControlChannel
from tests.comm_nodes import OK, PREPARING, Node, apart, met, nodes, ready, refused
from tests.loop_nodes import event_log, eventually
from tests.ranks import comm_name, device, table

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
            assert early.now(1) is PREPARING
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


async def test_ids_are_never_used_again_and_are_limited() -> None:
    one = Node(1, max_comms=2)
    async with nodes(one):
        assert [await one.meet(comm_name()), await one.meet(comm_name())] == [1, 2]
        with pytest.raises(LLMException, match="2 comms exist") as caught:
            await one.meet(comm_name())
        refused(caught, LLMStatusCode.LLM_LINK_FAILED)
        await one.comms.unlink(2)
        assert await one.meet(comm_name()) == 3
        for call in (one.comms.unlink, one.comms.status):
            with pytest.raises(LLMException, match="no comm 2") as caught:
                await call(2)
            refused(caught, LLMStatusCode.LLM_NOT_YET_LINK)


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
    monkeypatch.setattr("kvpull_async.comms._NEARBY", 0.2)
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


async def test_ports_that_are_taken_are_passed_over() -> None:
    one, two = Node(1), Node(2)
    async with nodes(one, two):
        name = comm_name()
        wanted = one.wanted(name)
        taken = [await asyncio.start_server(_say_nothing, "127.0.0.1", port) for port in wanted.ports[:2]]
        try:
            await met(one, two, name)
        finally:
            for server in taken:
                server.close()


async def _say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def test_nothing_is_left_open_when_no_port_is_free() -> None:
    one = Node(1)
    async with nodes(one):
        wanted = one.wanted(comm_name())
        taken = [await asyncio.start_server(_say_nothing, "127.0.0.1", port) for port in wanted.ports]
        try:
            with pytest.raises(LLMException, match="KVPULL_RANK_PORT_BASE") as caught:
                await one.comms.link(wanted)
            refused(caught, LLMStatusCode.LLM_PARAM_INVALID)
        finally:
            for server in taken:
                server.close()
                await server.wait_closed()
        assert await one.comms.link(wanted) == 2
        assert repr(one.comms).startswith("<Comms [<Comm 2 ")


# -- addresses beyond this machine -------------------------------------------------------------------------------------


async def test_an_address_beyond_this_machine_needs_a_safeguard_where_this_side_listens() -> None:
    one, two = Node(1), Node(2)
    async with nodes(one, two):
        with pytest.raises(LLMException, match="KVPULL_LINK_SECRET") as caught:
            await one.meet(comm_name(), text=apart("10.99.99.99"))
        refused(caught, LLMStatusCode.LLM_PARAM_INVALID)
        assert await two.meet(comm_name(), text=apart("10.99.99.99")) == 1  # which dials


@pytest.mark.parametrize("cluster", [1, 2])
async def test_a_table_without_addresses_is_of_no_use(cluster: int) -> None:
    node = Node(cluster)
    async with nodes(node):
        with pytest.raises(LLMException, match="no IPv4 address") as caught:
            await node.meet(comm_name(), text=table([device(0, None)], [device(1, None)]))
        assert "KVPULL_RANK_HOSTS" in refused(caught, LLMStatusCode.LLM_PARAM_INVALID)


@pytest.mark.parametrize("safeguard", [{"link_secret": b"s"}, {"allow_insecure_network": True}])
async def test_an_address_of_another_machine_cannot_be_listened_on(safeguard: dict[str, Any]) -> None:
    one = Node(1, **safeguard)
    async with nodes(one):
        with pytest.raises(LLMException, match="KVPULL_RANK_HOSTS") as caught:
            await one.meet(comm_name(), text=apart("198.51.100.7"))
        assert "SECRET" not in refused(caught, LLMStatusCode.LLM_PARAM_INVALID)


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
            wanted = one.wanted(comm_name())
            await one.comms.link(wanted)
            (address,) = [listener.address for listener in one.comms._find(1).listeners]
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
            assert (ready(one), one.now(1)) == ([0], PREPARING)
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
        assert impostor.now(1) is PREPARING
        assert (one.now(1), two.now(1), ready(one)) == (OK, OK, [1])
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
            assert node.now(comm_id) is PREPARING
            await other.comms.unlink(await other.meet(comm_name()))
            await node.comms.unlink(comm_id)
        await met(one, two, name)
        assert ready(one, two) == [1, 1]


@pytest.mark.parametrize("side", [0, 1])
async def test_unlinking_keeps_what_others_use(side: int) -> None:
    both = Node(1), Node(2)
    async with nodes(*both):
        await both[0].listen()
        first = await met(*both, comm_name())
        second = await met(*both, comm_name())
        assert await both[1].link(both[0]) == [LLMStatusCode.LLM_ALREADY_LINK]  # and uses it, too
        await both[side].comms.unlink(first[side])
        await both[side].comms.unlink(second[side])
        await asyncio.sleep(0.05)
        assert ready(*both) == ([1, 1] if side else [0, 0])


async def test_a_listener_stays_for_a_link_that_came_in_there_until_nobody_needs_it() -> None:
    one, two = Node(1), Node(2)
    async with nodes(one, two):
        name = comm_name()
        first = await met(one, two, name)
        second = await met(one, two, comm_name())
        comm = one.comms._find(first[0])
        await one.comms.unlink(first[0])
        link = two.links.find(1)
        assert link is not None
        for lane in link._lanes.values():
            lane.abort()
        await eventually(lambda: two.counters.snapshot().get("reconnects") == 1)
        await two.becomes(second[1])
        assert comm in one.comms._ended
        await one.comms.unlink(second[0])
        await eventually(lambda: not one.comms._ended)
        assert await one.meet(name) == 3
