"""The links of an engine: dialling, accepting, sharing ids, dialling each other at once, and who is turned away."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.lane import Lane
from kvpull_async.linkage import LinkState
from kvpull_async.links import Target
from kvpull_async.protocol import frames
from kvpull_async.protocol.session import Peer, Session, State
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import Address, ControlChannel
from tests.loop_nodes import LoopNode, event_log, eventually, loop_nodes
from tests.wire import identity

OK = LLMStatusCode.LLM_SUCCESS
ALREADY = LLMStatusCode.LLM_ALREADY_LINK
FAILED = LLMStatusCode.LLM_LINK_FAILED
LOW, HIGH = b"\x01" * 16, b"\xfe" * 16
both_transports = pytest.mark.parametrize("transport", ["tcp", "inproc"])


def soon() -> Deadline:
    return Deadline.after_ms(15_000)


def ready(*nodes: LoopNode) -> list[int]:
    """How many links of each node are READY."""
    return [sum(link.state is LinkState.READY for link in node.links.all()) for node in nodes]


async def open_lane(node: LoopNode, target: LoopNode, *, lane: int = 0, token: bytes = b"") -> tuple[Lane, Peer]:
    """One greeted connection, as a link's first or second."""
    address = target.target.address
    assert address is not None
    channel = await node.transport.dial(address)
    asked = target.settings.cluster_id
    names = node.route.names
    one = node.context.new_lane(channel, dialer=True, paths=names, asked=asked, lane=lane, token=token)
    try:
        return one, await one.dial(soon())
    except BaseException:
        one.abort()
        raise


# --- one dials the other ---


@both_transports
async def test_a_link_serves_both_sides(transport: str) -> None:
    one, two = LoopNode(1, transport=transport), LoopNode(2, transport=transport)
    async with loop_nodes(one, two):
        assert await one.link(two) == [OK]
        mine, theirs = one.links.find(2), two.links.find(1)
        assert mine is not None
        assert theirs is not None
        for link in (mine, theirs):
            await link.check(soon())
            assert link.path.name == transport
        assert ready(one, two) == [1, 1]
        assert mine.peer is not None
        assert mine.peer.incarnation == two.context.identity.incarnation


async def test_links_are_dialled_all_at_once_with_a_code_for_each_in_order() -> None:
    one, two, three = LoopNode(1), LoopNode(2), LoopNode(3)
    async with loop_nodes(one, two, three):
        nobody = Target(4, ("127.0.0.1", 1))
        codes = await one.link(three, nobody, Target(5, None), two, three)
        assert codes == [OK, FAILED, LLMStatusCode.LLM_PARAM_INVALID, OK, ALREADY]
        assert ready(one) == [2]


async def test_p5_a_silent_peer_delays_no_other_link() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two), silent_listener() as address:
        linking = asyncio.create_task(one.link(Target(3, address), two, timeout_ms=10_000))
        await eventually(lambda: one.links.find(2) is not None)
        assert not linking.done()
        linking.cancel()
        await asyncio.gather(linking, return_exceptions=True)


async def test_a_silent_peer_is_a_timeout() -> None:
    one = LoopNode(1)
    async with loop_nodes(one), silent_listener() as address:
        assert await one.link(Target(2, address), timeout_ms=50) == [LLMStatusCode.LLM_TIMEOUT]
        assert one.links.all() == []


@contextlib.asynccontextmanager
async def silent_listener() -> Any:
    """Accepts and says nothing."""
    open_ends = []

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ends.append(writer)

    server = await asyncio.start_server(keep, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()
    finally:
        server.close()
        for writer in open_ends:
            writer.transport.abort()
        await asyncio.sleep(0)


@pytest.mark.parametrize("transport", ["tcp", "inproc"])
async def test_a_peer_out_of_reach_is_a_code_and_a_log_event(transport: str) -> None:
    one = LoopNode(1, transport=transport)
    with event_log() as events:
        async with loop_nodes(one, listen=False):
            assert await one.link(Target(2, ("127.0.0.1", 1))) == [FAILED]
        (failed,) = events.named("link.failed")
        assert (failed["cluster_id"], failed["peer"]) == (2, "127.0.0.1:1")
        assert failed["status"] == "LLM_LINK_FAILED"
        assert failed["reason"]


async def test_a_peer_that_listens_later_is_found_by_a_retry() -> None:
    one, two = LoopNode(1, link_retry_count=100), LoopNode(2)
    async with loop_nodes(one, two):
        target = two.target
        assert target.address is not None
        await two.stop_listening()
        linking = asyncio.create_task(one.link(target))
        await asyncio.sleep(0.1)
        assert not linking.done()
        await two.listen(target.address)
        assert await linking == [OK]


async def test_a_second_dial_to_a_linked_id_is_refused_from_both_sides() -> None:
    one, two, other = LoopNode(1), LoopNode(2), LoopNode(2)
    with event_log() as events:
        async with loop_nodes(one, two, other):
            assert await one.link(two) == [OK]
            assert await one.link(two) == [ALREADY]
            assert await one.link(other) == [ALREADY]
            assert await two.link(one) == [ALREADY]
            assert ready(one, two, other) == [1, 1, 0]
            assert len(events.named("link.already", text="is linked already, to ", status="LLM_ALREADY_LINK")) == 3
        assert events.warnings == []
        assert "links_failed" not in one.counters.snapshot()


async def test_the_wrong_cluster_id_is_named_on_both_sides() -> None:
    one, two = LoopNode(1), LoopNode(2)
    words = "this is cluster 2, not 5 as asked for"
    with event_log() as events:
        async with loop_nodes(one, two):
            assert await one.link(Target(5, two.target.address)) == [FAILED]
            await events.first("link.failed", text=words, cluster_id=5)
            await events.first("link.rejected", text=words)
            assert one.links.all() == two.links.all() == []
            assert len(two.links._halves) == 0


async def test_a_peer_that_lies_about_its_id_is_found_out() -> None:
    """It says yes to whatever was asked for, and then that it is another one."""

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = Session(identity(5), dialer=False)
        await reader.readexactly(8)
        while session.state is not State.DECIDING:
            session.receive(await reader.read(4096))
            writer.write(session.take_output())
        session._identity = identity(2)
        session.welcome(token=b"t" * 16)
        writer.write(session.take_output())
        await reader.read()
        writer.close()

    one, server = LoopNode(1), await asyncio.start_server(lie, "127.0.0.1", 0)
    with event_log() as events:
        async with loop_nodes(one):
            address = server.sockets[0].getsockname()
            assert await one.link(Target(5, address)) == [FAILED]
            await events.first("link.failed", text=f"{address[1]} is cluster 2, not 5 as asked for")
            assert one.links.all() == []
    server.close()


async def test_links_are_limited_on_both_sides() -> None:
    one, two, three = LoopNode(1, max_links=1), LoopNode(2), LoopNode(3)
    with event_log() as events:
        async with loop_nodes(one, two, three):
            assert await one.link(two) == [OK]
            assert await one.link(three) == [FAILED]
            assert await three.link(one) == [FAILED]
            await events.first("link.rejected", text="this engine has 1 links already")
            await events.first("link.failed", text="would exceed 1 links")


# --- both sides dial at once ---


@pytest.mark.parametrize("transport", ["tcp", "inproc"])
@pytest.mark.parametrize("first_is_higher", [True, False])
async def test_two_sides_that_dial_each_other_at_any_moment_end_with_one_link(
    transport: str, first_is_higher: bool
) -> None:
    """The second dial starts after every possible number of turns of the loop of the first."""
    for delay in range(0, 60, 2):
        one = LoopNode(1, transport=transport, incarnation=HIGH if first_is_higher else LOW)
        two = LoopNode(2, transport=transport, incarnation=LOW if first_is_higher else HIGH)
        async with loop_nodes(one, two):
            linking = asyncio.create_task(one.link(two))
            for _ in range(delay):
                await asyncio.sleep(0)
            codes = [*await two.link(one), *await linking]
            assert set(codes) <= {OK, ALREADY}, (delay, codes)
            assert OK in codes
            assert [len(node.links.all()) for node in (one, two)] == [1, 1], delay
            assert ready(one, two) == [1, 1], delay
            assert len(one.links._halves) == len(two.links._halves) == 0, delay
            for node, other in ((one, 2), (two, 1)):
                link = node.links.find(other)
                assert link is not None
                await link.check(soon())


async def test_the_loser_of_a_tie_takes_over_when_the_winners_dial_fails() -> None:
    """The side whose dial counts dials an address where nobody answers; the other one's dial is then accepted."""
    high, low = LoopNode(1, incarnation=HIGH), LoopNode(2, incarnation=LOW)
    async with loop_nodes(high, low), silent_listener() as address:
        hopeless = asyncio.create_task(high.link(Target(2, address), timeout_ms=400))
        await eventually(lambda: 2 in high.links._dialling)
        assert await low.link(high) == [OK]
        assert await hopeless == [LLMStatusCode.LLM_TIMEOUT]
        assert ready(high, low) == [1, 1]


async def test_another_peer_of_the_id_that_is_being_dialled_is_let_in() -> None:
    """Ids are shared in the field: that one peer of cluster 2 is dialled says nothing about another one."""
    node, dialled, other = LoopNode(1, incarnation=HIGH), LoopNode(2), LoopNode(2, incarnation=LOW)
    async with loop_nodes(node, dialled, other):
        mine, theirs = await asyncio.gather(node.link(dialled), other.link(node))
        assert (mine, theirs) == ([OK], [OK])
        assert ready(node, dialled, other) == [2, 1, 1]


async def test_two_peers_with_one_id_may_both_dial() -> None:
    node, older, younger = LoopNode(1), LoopNode(2), LoopNode(2)
    async with loop_nodes(node, older, younger):
        assert [*await older.link(node), *await younger.link(node)] == [OK, OK]
        assert ready(node) == [2]
        found = node.links.find(2)
        assert found is not None
        assert found.peer is not None
        assert found.peer.incarnation == younger.context.identity.incarnation
        assert await younger.unlink(1) == OK
        await eventually(lambda: ready(node) == [1])
        found = node.links.find(2)
        assert found is not None
        assert found.peer is not None
        assert found.peer.incarnation == older.context.identity.incarnation


@both_transports
async def test_a_node_may_link_to_itself(transport: str) -> None:
    node = LoopNode(1, transport=transport)
    async with loop_nodes(node):
        assert await node.link(node) == [OK]
        link = node.links.find(1)
        assert link is not None
        await link.check(soon())
        assert await node.link(node) == [ALREADY]
        assert await node.unlink(1) == OK
        await eventually(lambda: node.links.all() == [])
        assert await node.link(node) == [OK]


# --- connections that do not belong ---


async def test_a_second_connection_needs_the_token_of_the_first() -> None:
    one, two, thief = LoopNode(1), LoopNode(2), LoopNode(3)
    with event_log() as events:
        async with loop_nodes(one, two, thief):
            first, peer = await open_lane(one, two)
            for token in (b"", b"x" * 16):
                with pytest.raises(LLMException, match="the second connection of a link that does not exist"):
                    await open_lane(one, two, lane=1, token=token)
            with pytest.raises(LLMException, match="the second connection of a link that does not exist"):
                await open_lane(thief, two, lane=1, token=peer.token)  # the right token, another process
            second, _ = await open_lane(one, two, lane=1, token=peer.token)  # and the owner is not hurt
            assert ready(two) == [1]
            with pytest.raises(LLMException, match="the second connection of a link that does not exist"):
                await open_lane(one, two, lane=1, token=peer.token)  # once only
            await events.first("link.rejected", text="the second connection of a link that does not exist")
            for lane in (first, second):
                lane.abort()


async def test_a_link_whose_second_connection_does_not_come_is_dropped() -> None:
    one, two = LoopNode(1), LoopNode(2, handshake_timeout_ms=50, max_links=1)
    with event_log() as events:
        async with loop_nodes(one, two):
            lane, _ = await open_lane(one, two)
            lane.start(lambda *_: None)
            assert await LoopNode(3).link(two) == [FAILED]  # it counts as long as it may still come
            assert "closed the connection" in str(await asyncio.wait_for(lane.lost, 20))
            await events.first("link.rejected", text="its second connection did not come")
            assert await one.link(two) == [OK]


async def test_a_first_connection_that_talks_on_before_its_welcome_is_dropped() -> None:
    one, two = LoopNode(1), LoopNode(2)
    with event_log() as events:
        async with loop_nodes(one, two):
            channel, lane = await impatient(one, two, lane=0, token=b"")
            await events.first("link.rejected", text="did not wait for the answer to its greeting")
            assert len(two.links._halves) == 0
            first, peer = await open_lane(one, two)
            again, late = await impatient(one, two, lane=1, token=peer.token)
            await eventually(lambda: len(events.named("link.rejected", text="did not wait")) == 2)
            assert len(two.links._halves) == 1  # the first connection is still good
            second, _ = await open_lane(one, two, lane=1, token=peer.token)
            assert ready(two) == [1]
            assert events.named("link.accept_failed") == []
            for each in (lane, late, first, second):
                each.abort()
            assert channel is not again


async def impatient(node: LoopNode, target: LoopNode, *, lane: int, token: bytes) -> tuple[ControlChannel, Lane]:
    """Greets, and sends a ping on top of its proof."""
    channel = await node.transport.dial(target.target.address or ("", 0))
    one = node.context.new_lane(channel, dialer=True, paths=node.route.names, asked=2, lane=lane, token=token)
    one.session.start()
    channel.post(one.session.take_output())
    one.session.receive(await channel.receive())
    channel.post(one.session.take_output() + frames.encode(frames.Ping(1)))
    return channel, one


async def test_a_silent_connection_is_dropped_at_the_handshake_timeout() -> None:
    one, two = LoopNode(1), LoopNode(2, handshake_timeout_ms=50)
    with event_log() as events:
        async with loop_nodes(one, two):
            channel = await one.transport.dial(two.target.address or ("", 0))
            assert await asyncio.wait_for(channel.receive(), 20) == b""
            channel.abort()
            await events.first("link.rejected", text="no greeting within 50 ms")


async def test_a_closed_engine_lets_nobody_in() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        await two.links.close(soon())
        assert await one.link(two) == [LLMStatusCode.LLM_ENGINE_FINALIZED]


async def test_a_link_that_is_made_while_the_engine_closes_is_ended() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        dial = one.transport.dial

        async def slow(address: Address) -> ControlChannel:
            await one.links.close(soon())
            return await dial(address)

        one.transport.dial = slow  # type: ignore[method-assign]
        assert await one.link(two) == [LLMStatusCode.LLM_ENGINE_FINALIZED]
        await eventually(lambda: ready(one, two) == [0, 0])


@pytest.mark.parametrize("first_is_higher", [True, False])
async def test_two_sides_that_dial_each_other_after_a_lost_link_end_with_one_link(first_is_higher: bool) -> None:
    """As above, with the remains of an older link on one side, whose owner would be free to dial again."""
    for delay in range(0, 60, 3):
        one = LoopNode(1, incarnation=HIGH if first_is_higher else LOW, settle_timeout_ms=50)
        two = LoopNode(2, incarnation=LOW if first_is_higher else HIGH)
        async with loop_nodes(one, two):
            await one.link(two)
            for link in one.links.all():
                link.wave = lambda **_: None  # type: ignore[method-assign]  # the goodbye is lost
            await one.unlink(2, force=True)
            await eventually(lambda left=two: ready(left) == [0])
            linking = asyncio.create_task(one.link(two))
            for _ in range(delay):
                await asyncio.sleep(0)
            codes = [*await two.link(one), *await linking]
            assert set(codes) <= {OK, ALREADY}, (delay, codes)
            await eventually(lambda both=(one, two): ready(*both) == [1, 1], f"one link each after {delay} turns")
            for node, other in ((one, 2), (two, 1)):
                link = node.links.find(other)
                assert link is not None
                await link.check(soon())
