"""Making a link as the side that dials: which kind of data path is taken and why, and what is left when none is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.dialling import acknowledged, dial
from kvpull_async.link import Link
from kvpull_async.linkage import Connection, LinkContext
from kvpull_async.protocol import frames
from kvpull_async.protocol.session import Peer
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import Address, ControlChannel
from tests.loop_nodes import LoopNode, event_log, eventually, loop_nodes
from tests.unit.kinds import ScriptedKind

FAILED = LLMStatusCode.LLM_LINK_FAILED


def soon() -> Deadline:
    return Deadline.after_ms(15_000)


class Ends:
    """Node 1 dials node 2; each has kinds of path of its own, by name."""

    def __init__(self, mine: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]], **settings: Any) -> None:
        self.mine = {name: ScriptedKind(name, **faults) for name, faults in mine.items()}
        self.theirs = {name: ScriptedKind(name, **faults) for name, faults in theirs.items()}
        self.one = LoopNode(1, kinds=tuple(self.mine.values()))
        self.two = LoopNode(2, kinds=tuple(self.theirs.values()), **settings)
        self.channels: list[ControlChannel] = []
        self.aborted: set[ControlChannel] = set()
        self.break_after = 2
        """How many connections can be made."""
        self._dial = self.one.transport.dial
        self.one.transport.dial = self._recorded  # type: ignore[method-assign]

    async def _recorded(self, address: Address) -> ControlChannel:
        if len(self.channels) == self.break_after:
            raise ConnectionRefusedError("the machine is gone")
        channel = await self._dial(address)
        abort = channel.abort

        def aborted() -> None:
            self.aborted.add(channel)
            abort()

        channel.abort = aborted  # type: ignore[method-assign]
        self.channels.append(channel)
        return channel

    async def dial(self, deadline: Deadline | None = None) -> Connection:
        address = self.two.target.address
        assert address is not None
        return await dial(self.one.context, 2, address, deadline or soon())

    async def all_gone(self) -> None:
        """Nothing of the link is left on either side: no half of it, no connection."""
        await eventually(lambda: len(self.two.links._halves) == 0, "the half link is dropped")
        assert self.two.links.all() == []
        assert self.aborted == {*self.channels}

    @property
    def token(self) -> bytes:
        (token,) = {*self.theirs.values()}.pop().offered
        return token


@contextlib.asynccontextmanager
async def ends(
    mine: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]], **settings: Any
) -> AsyncIterator[Ends]:
    made = Ends(mine, theirs, **settings)
    async with loop_nodes(made.one, made.two):
        yield made


@contextlib.asynccontextmanager
async def dialled(made: Ends) -> AsyncIterator[Connection]:
    connection = await made.dial()
    try:
        yield connection
    finally:
        connection.abort()


# --- which kind is taken ---


async def test_the_best_kind_that_both_have_is_met_on_and_both_lanes_get_a_path_of_it() -> None:
    async with ends({"fast": {}, "slow": {}}, {"slow": {}, "fast": {}}) as made, dialled(made) as connection:
        token = made.token
        assert [path.name for path in connection.paths.values()] == ["fast", "fast"]
        assert list(connection.lanes) == list(connection.paths) == [0, 1]
        assert connection.why == "fast is what there is"
        assert connection.peer.cluster_id == 2
        assert made.mine["fast"].met == [(token, b"come to fast")]
        assert made.mine["slow"].met == []
        mine, theirs = made.mine["fast"].seeds, made.theirs["fast"].seeds
        assert [(seed.token, seed.lane, seed.dialer, seed.address) for seed in mine] == [
            (token, lane, True, made.two.target.address) for lane in (0, 1)
        ]
        assert [(seed.token, seed.lane, seed.dialer, seed.address) for seed in theirs] == [
            (token, lane, False, None) for lane in (0, 1)
        ]


async def test_what_was_offered_and_not_taken_is_forgotten_and_the_rest_is_not() -> None:
    async with ends({"fast": {}, "slow": {}}, {"slow": {}, "fast": {}}) as made, dialled(made):
        assert made.theirs["slow"].forgotten == [made.token]
        for kind in (*made.mine.values(), made.theirs["fast"]):
            assert kind.forgotten == []


async def test_a_kind_that_cannot_be_met_on_makes_way_for_the_next_and_says_why() -> None:
    broken = {"no_meeting": OSError("another machine")}
    async with ends({"fast": broken, "slow": {}}, {"fast": {}, "slow": {}}) as made, dialled(made) as connection:
        assert connection.paths[0].name == "slow"
        assert connection.why == "fast: another machine"
        assert made.mine["fast"].forgotten == made.theirs["fast"].forgotten == [made.token]
        assert made.mine["slow"].forgotten == made.theirs["slow"].forgotten == []
        assert made.mine["fast"].seeds == made.theirs["fast"].seeds == []


async def test_p5_a_kind_whose_meeting_hangs_makes_way_in_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpull_async.dialling._MEETING", 0.05)
    hangs = {"hangs": True}
    async with ends({"fast": hangs, "slow": {}}, {"fast": {}, "slow": {}}) as made, dialled(made) as connection:
        assert connection.paths[0].name == "slow"
        assert connection.why == "fast: no answer in time"
        assert made.mine["fast"].forgotten == [made.token]


async def test_a_kind_that_the_peer_has_not_is_not_tried() -> None:
    async with ends({"fast": {}, "slow": {}}, {"slow": {}}) as made, dialled(made) as connection:
        assert connection.paths[0].name == "slow"
        assert connection.why == "fast: not offered by the peer"
        assert made.mine["fast"].met == []


async def test_both_sides_tell_which_kind_was_taken_and_the_dialling_one_why() -> None:
    broken = {"no_meeting": OSError("another machine")}
    with event_log() as events:
        async with ends({"fast": broken, "slow": {}}, {"fast": {}, "slow": {}}) as made:
            assert await made.one.link(made.two) == [LLMStatusCode.LLM_SUCCESS]
            mine = await events.first("link.up", dialled=True)
            theirs = await events.first("link.up", dialled=False)
    assert (mine["path"], mine["why"]) == ("slow", "fast: another machine")
    assert (theirs["path"], theirs["why"]) == ("slow", "the peer's choice")
    assert mine["protocol"] == theirs["protocol"] == frames.VERSION


async def test_a_link_that_is_dialled_anew_agrees_anew() -> None:
    async with ends({"fast": {}, "slow": {}}, {"fast": {}, "slow": {}}) as made:
        made.break_after = 4
        assert await made.one.link(made.two) == [LLMStatusCode.LLM_SUCCESS]
        (link,) = made.one.links.all()
        assert link.path.name == "fast"
        made.mine["fast"].no_meeting = OSError("the peer has moved to another machine")
        made.channels[0].abort()
        await eventually(lambda: len(made.mine["slow"].paths) == 2, "the link is back")
        await link.ready(soon())
        assert link.path.name == "slow"
        assert len({*made.theirs["fast"].offered}) == 2  # a token for each


# --- what is left of a link that comes to nothing ---


async def test_when_no_kind_works_every_reason_is_told_and_nothing_is_left() -> None:
    none = {"fast": {"no_meeting": OSError("another machine")}, "rare": {}, "slow": {"no_meeting": OSError("no room")}}
    async with ends(none, {"fast": {}, "slow": {}}, handshake_timeout_ms=50) as made:
        with pytest.raises(LLMException) as caught:
            await made.dial()
        assert caught.value.status_code == FAILED
        reasons = "fast: another machine; rare: not offered by the peer; slow: no room"
        assert str(caught.value) == f"no data path works: {reasons}"
        await made.all_gone()
        for kind in (made.mine["fast"], made.mine["slow"], *made.theirs.values()):
            assert kind.forgotten == [made.token]


@pytest.mark.parametrize("stage", ["its second connection", "its path"])
async def test_a_link_that_fails_after_the_meeting_is_forgotten_on_both_sides(stage: str) -> None:
    mine = {"fast": {"no_path": OSError("no memory")} if stage == "its path" else {}}
    async with ends(mine, {"fast": {}}, handshake_timeout_ms=50) as made:
        made.break_after = 1 if stage == "its second connection" else 2
        with pytest.raises(OSError, match=r"the machine is gone|no memory"):
            await made.dial()
        assert made.mine["fast"].forgotten == [made.token]
        if stage == "its second connection":
            await made.all_gone()
            assert made.theirs["fast"].forgotten == [made.token]


async def test_a_side_that_the_acceptor_refuses_after_all_forgets_the_meeting() -> None:
    async with ends({"fast": {}}, {"fast": {"no_path": OSError("no descriptors left")}}) as made:
        with pytest.raises(LLMException, match="refused: fast: no descriptors left") as caught:
            await made.dial()
        assert caught.value.status_code == FAILED
        assert made.mine["fast"].forgotten == made.theirs["fast"].forgotten == [made.token]
        await made.all_gone()


async def test_another_cluster_than_asked_for_is_met_on_nothing() -> None:
    async with ends({"fast": {}}, {"fast": {}}) as made:
        address = made.two.target.address
        assert address is not None
        with pytest.raises(LLMException, match="this is cluster 2, not 5 as asked for"):
            await dial(made.one.context, 5, address, soon())
        assert made.mine["fast"].met == made.mine["fast"].forgotten == []
        await made.all_gone()


@pytest.mark.parametrize("how", ["the deadline", "a cancellation"])
async def test_p1_a_meeting_that_is_interrupted_is_forgotten_and_nothing_is_left(how: str) -> None:
    async with ends({"fast": {"hangs": True}, "slow": {}}, {"fast": {}, "slow": {}}, handshake_timeout_ms=50) as made:
        dialling = asyncio.create_task(made.dial(Deadline.after_ms(500 if how == "the deadline" else 15_000)))
        await eventually(lambda: bool(made.mine["fast"].met), "the meeting has begun")
        if how == "a cancellation":
            dialling.cancel()
        with pytest.raises(asyncio.TimeoutError if how == "the deadline" else asyncio.CancelledError):
            await dialling
        assert made.mine["slow"].met == []
        assert made.mine["fast"].forgotten == [made.token]
        await made.all_gone()
        assert [kind.forgotten for kind in made.theirs.values()] == [[made.token]] * 2


# --- a peer that may be found at several addresses ---


GROUP = "g" * 32


class Meeting:
    """Node 1 looks for node 2, which lets a group in at one address; the others are nobody's, or say nothing."""

    def __init__(self, kind: str = "tcp") -> None:
        self.one, self.two = LoopNode(1, transport=kind), LoopNode(2, transport=kind)
        self.answer: tuple[LLMStatusCode, str] | None = None
        self.came: list[str] = []

    def refusal(self, peer: Peer, held: Link | None) -> tuple[LLMStatusCode, str] | None:
        self.came.append(peer.group)
        return self.answer

    def entered(self, link: Link) -> None: ...

    async def open(self) -> Address:
        """The door."""
        self.two.listener = await self.two.transport.listen(
            ("127.0.0.1", 0), lambda channel: self.two.links.accept(self.two.route, channel, self)
        )
        return self.two.listener.address

    def context(self, *addresses: Address) -> LinkContext:
        return self.one.context.meeting(GROUP, addresses)


async def test_a_peer_is_found_at_any_of_its_addresses() -> None:
    made = Meeting()
    async with loop_nodes(made.one, made.two, listen=False):
        door, nobody = await made.open(), ("127.0.0.1", 1)
        for addresses in ([door, nobody], [nobody, door], [nobody, nobody, door]):
            connection = await dial(made.context(*addresses), 2, addresses[0], soon())
            assert connection.peer.incarnation == made.two.context.identity.incarnation
            connection.abort()
        assert set(made.came) == {GROUP}


async def test_an_address_that_says_nothing_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpull_async.dialling._CANDIDATE", 0.2)
    made = Meeting()
    async with loop_nodes(made.one, made.two, listen=False), silent_address() as (silent, connections):
        door = await made.open()
        context = made.context(silent, door)
        for _ in range(2):
            (await dial(context, 2, silent, soon())).abort()
        assert len(connections) == 1
        context = made.context(silent, silent)
        for _ in range(2):  # but not when there is no other one
            with pytest.raises(asyncio.TimeoutError):
                await dial(context, 2, silent, soon())
        assert len(connections) == 3


async def test_a_host_that_cannot_be_connected_to_is_not_tried_at_every_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpull_async.dialling._CONNECTING", 0.05)
    made, asked, real = Meeting(), [], asyncio.get_running_loop().sock_connect
    async with loop_nodes(made.one, made.two, listen=False):
        door = await made.open()

        async def connect(sock: Any, address: Address) -> None:
            asked.append(address)
            await (real(sock, address) if address == door else asyncio.sleep(60))

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", connect)
        nowhere = [("198.51.100.7", port) for port in range(1, 9)]
        (await dial(made.context(*nowhere, door), 2, nowhere[0], soon())).abort()
        assert asked.count(nowhere[0]) == 1
        assert not {*nowhere[1:]}.intersection(asked)


async def test_the_error_is_that_of_the_peer_which_said_something() -> None:
    made = Meeting()
    async with loop_nodes(made.one, made.two, listen=False):
        door, nobody = await made.open(), ("127.0.0.1", 1)
        made.answer = FAILED, "you are not expected"
        with pytest.raises(LLMException, match="not expected"):
            await dial(made.context(nobody, door, nobody), 2, nobody, soon())
        with pytest.raises(ConnectionRefusedError):
            await dial(made.context(nobody, nobody), 2, nobody, soon())
        made.came.clear()
        made.answer = LLMStatusCode.LLM_ALREADY_LINK, "we are linked"
        with pytest.raises(LLMException, match="we are linked"):
            await dial(made.context(door, door), 2, door, soon())
        assert len(made.came) == 1


async def test_the_deadline_bounds_all_addresses_together() -> None:
    made = Meeting()
    async with loop_nodes(made.one, made.two, listen=False), silent_address() as (silent, _):
        with pytest.raises(asyncio.TimeoutError):
            await dial(made.context(silent, silent, silent), 2, silent, Deadline.after_ms(50))


async def test_asking_whether_a_link_counts_makes_none() -> None:
    made = Meeting()
    async with loop_nodes(made.one, made.two, listen=False):
        door = await made.open()
        made.answer = LLMStatusCode.LLM_ALREADY_LINK, "we are linked"
        await acknowledged(made.context(door), 2, door, soon())
        made.answer = FAILED, "no link yet"
        with pytest.raises(LLMException, match="no link yet"):
            await acknowledged(made.context(door), 2, door, soon())
        made.answer = None  # one that would let this side in as if it brought a link
        with pytest.raises(LLMException, match="no data path"):
            await acknowledged(made.context(door), 2, door, soon())
        with pytest.raises(ConnectionRefusedError):
            await acknowledged(made.context(("127.0.0.1", 1)), 2, ("127.0.0.1", 1), soon())
        assert made.one.links.all() == made.two.links.all() == []
        await eventually(lambda: len(made.two.links._halves) == 0)


async def test_a_second_connection_to_another_node_than_the_first_ends_the_link() -> None:
    """As where a balancer, or somebody, stands between; this other node would even let it in."""
    async with ends({"fast": {}}, {"fast": {}}) as made:
        three = LoopNode(2, kinds=tuple(made.theirs.values()))
        async with loop_nodes(three):
            assert made.two.target.address is not None
            assert three.target.address is not None
            first, addresses = made._dial, iter([made.two.target.address, three.target.address])
            made._dial = lambda _: first(next(addresses))  # type: ignore[assignment]
            three.links._halves = made.two.links._halves
            with pytest.raises(LLMException, match="the second connection reached another node than the first"):
                await made.dial()
        await made.all_gone()


@contextlib.asynccontextmanager
async def silent_address() -> AsyncIterator[tuple[Address, list[asyncio.StreamWriter]]]:
    """Where somebody accepts and says nothing, and who came there."""
    connections: list[asyncio.StreamWriter] = []

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)

    server = await asyncio.start_server(keep, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname(), connections
    finally:
        server.close()
        for writer in connections:
            writer.transport.abort()
        await asyncio.sleep(0)
