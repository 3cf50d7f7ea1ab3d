"""Comms on the test's own loop: their ids and ports, the links that they share, and one for each group at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.listening import listen
from kvpull_async.status import LLMException, LLMStatusCode
from tests.loop_nodes import event_log, eventually
from tests.ranks import comm_name, device, table
from tests.unit.comm_nodes import FAILED, Node, apart, doors, is_closed, met, nodes, ready, refused

# -- ids and ports -----------------------------------------------------------------------------------------------------


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
            await one.meet(comm_name(), text=apart("0.0.0.0"))
        assert "no address of this machine" not in refused(caught, LLMStatusCode.LLM_PARAM_INVALID)
        assert await two.meet(comm_name(), text=apart("10.99.99.99")) == 1  # which dials


@pytest.mark.parametrize("cluster", [1, 2])
async def test_a_table_without_addresses_is_of_no_use(cluster: int) -> None:
    node = Node(cluster)
    async with nodes(node):
        with pytest.raises(LLMException, match="no IPv4 address") as caught:
            await node.meet(comm_name(), text=table([device(0, None)], [device(1, None)]))
        assert "KVPULL_RANK_HOSTS" in refused(caught, LLMStatusCode.LLM_PARAM_INVALID)


@pytest.mark.parametrize("safeguard", [{}, {"link_secret": b"s"}, {"allow_insecure_network": True}])
async def test_an_address_of_another_machine_cannot_be_listened_on(safeguard: dict[str, Any]) -> None:
    one = Node(1, **safeguard)
    async with nodes(one):
        with pytest.raises(LLMException, match="it is no address of this machine") as caught:
            await one.meet(comm_name(), text=apart("198.51.100.7"))
        said = refused(caught, LLMStatusCode.LLM_PARAM_INVALID)
        assert "198.51.100.7: " in said
        assert "KVPULL_RANK_HOSTS" in said
        assert "SECRET" not in said


# -- sharing -----------------------------------------------------------------------------------------------------------


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
    with event_log() as events:
        async with nodes(one, two):
            name = comm_name()
            first = await met(one, two, name)
            second = await met(one, two, comm_name())
            (address,) = doors(events, name)
            await one.comms.unlink(first[0])
            link = two.links.find(1)
            assert link is not None
            for lane in link._lanes.values():
                lane.abort()
            await eventually(lambda: two.counters.snapshot().get("reconnects") == 1)
            await two.becomes(second[1])
            (await two.transport.dial(address)).abort()
            await one.comms.unlink(second[0])
            await is_closed(two, address)
            assert await one.meet(name) == 3


# -- one for each group ------------------------------------------------------------------------------------------------


async def failed(*groups: str, **options: Any) -> Node:
    """A node with a failed comm of each of these groups, in order."""
    one = Node(1, rank_link_timeout_ms=50, **options)
    for comm_id, name in enumerate(groups, 1):
        assert await one.meet(name) == comm_id
        await one.becomes(comm_id, FAILED)
    return one


async def test_a_comm_that_failed_does_not_hide_the_one_in_its_place() -> None:
    name = comm_name()
    one, two = await failed(name), Node(2)
    async with nodes(one, two):
        assert await met(one, two, name) == (2, 1)
        with pytest.raises(LLMException, match="comm 2 is") as caught:
            await one.meet(name)
        refused(caught, LLMStatusCode.LLM_ALREADY_LINK)


async def test_only_one_of_two_calls_at_once_makes_a_comm_of_the_group() -> None:
    name = comm_name()
    for earlier in ([], [name]):
        one = await failed(*earlier)
        async with nodes(one):
            made, other = await asyncio.gather(one.meet(name), one.meet(name), return_exceptions=True)
            assert made == len(earlier) + 1
            assert isinstance(other, LLMException)
            assert other.status_code is LLMStatusCode.LLM_ALREADY_LINK


async def test_failed_comms_do_not_count_once_they_were_given_up_and_the_last_ones_are_remembered() -> None:
    name = comm_name()
    one = await failed(*[name] * 5, max_comms=2)
    async with nodes(one):
        assert await one.meet(comm_name()) == 6
        with pytest.raises(LLMException, match="no comm 1"):
            await one.now(1)
        assert [await one.now(comm_id) for comm_id in (3, 4, 5)] == [FAILED] * 3
        with pytest.raises(LLMException, match="2 comms exist"):
            await one.meet(comm_name())


@pytest.mark.parametrize("end", ["unlink", "close"])
async def test_a_comm_that_is_ended_while_it_begins_leaves_no_listener(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, opened, go_on = Node(1), asyncio.Event(), asyncio.Event()

    async def slow(*arguments: Any) -> Any:
        listeners = await listen(*arguments)
        opened.set()
        await go_on.wait()
        return listeners

    monkeypatch.setattr("kvpull_async.comms.listen", slow)
    async with nodes(one):
        wanted = one.wanted(comm_name())
        linking = asyncio.create_task(one.comms.link(wanted))
        await opened.wait()
        await (one.comms.close(Deadline.after_ms(15_000)) if end == "close" else one.comms.unlink(1))
        go_on.set()
        with pytest.raises(LLMException, match="before it began") as caught:
            await linking
        codes = {"close": LLMStatusCode.LLM_ENGINE_FINALIZED, "unlink": LLMStatusCode.LLM_NOT_YET_LINK}
        refused(caught, codes[end])
        assert repr(one.comms) == "<Comms []>"
        await is_closed(one, ("127.0.0.1", wanted.ports[0]))


@pytest.mark.parametrize("transport", ["tcp", "inproc"])
async def test_a_comm_whose_beginning_is_cancelled_leaves_nothing(transport: str) -> None:
    one = Node(1, transport=transport)
    async with nodes(one):
        for turns in range(10):
            wanted = one.wanted(comm_name())
            linking = asyncio.create_task(one.comms.link(wanted))
            for _ in range(turns):
                await asyncio.sleep(0)
            linking.cancel()
            await asyncio.gather(linking, return_exceptions=True)
            if not linking.cancelled():
                await one.comms.unlink(linking.result())
            assert repr(one.comms) == "<Comms []>"
            await is_closed(one, ("127.0.0.1", wanted.ports[0]))


async def test_a_comm_is_not_begun_after_the_end() -> None:
    one = Node(1)
    async with nodes(one):
        await one.comms.close(Deadline.after_ms(15_000))
        with pytest.raises(LLMException, match="finalized") as caught:
            await one.meet(comm_name())
        refused(caught, LLMStatusCode.LLM_ENGINE_FINALIZED)
