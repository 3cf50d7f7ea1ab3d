"""Half links on the side that was dialled: what they are offered, what completes them, and how they are given up."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.lane import Lane
from kvpull_async.linkage import LinkState
from kvpull_async.protocol import frames
from kvpull_async.protocol.session import Peer
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import PathKind
from tests.loop_nodes import EventLog, LoopNode, event_log, eventually, loop_nodes
from tests.unit.kinds import ScriptedKind

OK = LLMStatusCode.LLM_SUCCESS
FAILED = LLMStatusCode.LLM_LINK_FAILED


def scripted(*names: str) -> tuple[ScriptedKind, ...]:
    return tuple(ScriptedKind(name) for name in names)


class Acceptor:
    """A node that is dialled by hand, one connection at a time."""

    def __init__(self, kinds: tuple[PathKind, ...], *, handshake_timeout_ms: int) -> None:
        self.node = LoopNode(2, kinds=kinds, handshake_timeout_ms=handshake_timeout_ms)
        self.dialer = LoopNode(1)
        self.lanes: list[Lane] = []

    async def open(self, *paths: str, lane: int = 0, token: bytes = b"") -> Peer:
        """Greet as a link's first or second connection; what the node said."""
        address = self.node.target.address
        assert address is not None
        channel = await self.dialer.transport.dial(address)
        one = self.dialer.context.new_lane(channel, dialer=True, paths=paths, asked=2, lane=lane, token=token)
        self.lanes.append(one)
        return await one.dial(Deadline.after_ms(15_000))

    async def impatient(self, *paths: str, token: bytes) -> None:
        """Greet as a link's second connection, and talk on before the answer."""
        address = self.node.target.address
        assert address is not None
        channel = await self.dialer.transport.dial(address)
        one = self.dialer.context.new_lane(channel, dialer=True, paths=paths, asked=2, lane=1, token=token)
        self.lanes.append(one)
        one.session.start()
        channel.post(one.session.take_output())
        one.session.receive(await channel.receive())
        channel.post(one.session.take_output() + frames.encode(frames.Ping(1)))

    @property
    def half(self) -> int:
        return len(self.node.links._halves)


@contextlib.asynccontextmanager
async def acceptor(*kinds: PathKind, handshake_timeout_ms: int = 20_000) -> AsyncIterator[tuple[Acceptor, EventLog]]:
    made = Acceptor(kinds, handshake_timeout_ms=handshake_timeout_ms)
    with event_log() as events:
        try:
            async with loop_nodes(made.dialer, made.node):
                yield made, events
        finally:
            for lane in made.lanes:
                lane.abort()


# --- the first connection ---


async def test_a_first_connection_is_offered_every_kind_that_both_have_and_no_other() -> None:
    kinds = scripted("shm", "rare", "tcp")
    async with acceptor(*kinds) as (made, _):
        peer = await made.open("tcp", "shm", "unknown")
        assert sorted(peer.offers) == [("shm", b"come to shm"), ("tcp", b"come to tcp")]
        assert [kind.offered for kind in kinds] == [[peer.token], [], [peer.token]]
        assert made.half == 1
        assert made.node.links.all() == []


async def test_every_half_link_has_a_token_of_its_own() -> None:
    async with acceptor(*scripted("shm")) as (made, _):
        peers = [await made.open("shm") for _ in range(3)]
        assert len({peer.token for peer in peers}) == made.half == 3


@pytest.mark.parametrize(("theirs", "named"), [(("shm",), "shm"), (("shm", "nixl"), "shm, nixl"), ((), "none")])
async def test_without_a_kind_in_common_the_refusal_names_those_of_both_sides(
    theirs: tuple[str, ...], named: str
) -> None:
    async with acceptor(*scripted("inproc", "tcp")) as (made, events):
        words = f"no data path in common: the accepting side has inproc, tcp, the dialling side {named}"
        with pytest.raises(LLMException, match=words) as caught:
            await made.open(*theirs)
        assert caught.value.status_code == FAILED
        await events.first("link.rejected", text=words)
        assert made.half == 0


async def test_an_offer_that_cannot_be_made_is_left_out_and_told() -> None:
    broken, good = ScriptedKind("shm", no_offer=OSError("no memory files here")), ScriptedKind("tcp")
    async with acceptor(broken, good) as (made, events):
        peer = await made.open("shm", "tcp")
        assert dict(peer.offers) == {"tcp": b"come to tcp"}
        await events.first("link.path_not_offered", text="no memory files here", path="shm")
        with pytest.raises(LLMException, match="the data path shm was not offered"):
            await made.open("shm", lane=1, token=peer.token)


async def test_when_the_only_offer_cannot_be_made_the_link_is_refused() -> None:
    async with acceptor(ScriptedKind("shm", no_offer=OSError("no memory files here"))) as (made, _):
        with pytest.raises(LLMException, match="no data path in common"):
            await made.open("shm")
        assert made.half == 0


# --- the second connection ---


async def test_the_second_connection_chooses_and_completes_the_link() -> None:
    shm, tcp = kinds = scripted("shm", "tcp")
    async with acceptor(*kinds) as (made, events):
        peer = await made.open("shm", "tcp")
        await made.open("tcp", lane=1, token=peer.token)
        (link,) = made.node.links.all()
        assert link.state is LinkState.READY
        assert link.path.name == "tcp"
        assert made.half == 0
        assert (shm.forgotten, tcp.forgotten) == ([peer.token], [])
        up = await events.first("link.up", path="tcp", dialled=False)
        assert up["why"] == "the peer's choice"


@pytest.mark.parametrize("chosen", [("rare",), (), ("shm", "tcp")], ids=["another", "none", "two"])
async def test_a_second_connection_that_names_what_was_not_offered_ends_the_link(chosen: tuple[str, ...]) -> None:
    kinds = scripted("shm", "tcp", "rare")
    async with acceptor(*kinds) as (made, events):
        peer = await made.open("shm", "tcp")
        words = f"the data path {' '.join(chosen)} was not offered"
        with pytest.raises(LLMException, match=words) as caught:
            await made.open(*chosen, lane=1, token=peer.token)
        assert caught.value.status_code == FAILED
        await events.first("link.rejected", text=words)
        assert made.half == 0
        assert made.node.links.all() == []
        assert [kind.forgotten for kind in kinds] == [[peer.token], [peer.token], []]
        assert await made.lanes[0].channel.receive() == b""  # the first connection has ended too


async def test_a_path_that_cannot_be_had_after_all_ends_the_link_with_the_reason() -> None:
    kind = ScriptedKind("shm", no_path=OSError("the peer has not met this side"))
    async with acceptor(kind) as (made, _):
        peer = await made.open("shm")
        with pytest.raises(LLMException, match="shm: the peer has not met this side"):
            await made.open("shm", lane=1, token=peer.token)
        assert kind.forgotten == [peer.token]
        assert made.half == len(made.node.links.all()) == 0


async def test_a_second_connection_of_nobodys_hurts_no_half_link() -> None:
    kinds = scripted("shm")
    async with acceptor(*kinds) as (made, _):
        peer = await made.open("shm")
        stranger = LoopNode(1)
        dialer, made.dialer = made.dialer, stranger
        for token in (peer.token, b"x" * 16):
            with pytest.raises(LLMException, match="the second connection of a link that does not exist"):
                await made.open("shm", lane=1, token=token)
        made.dialer = dialer
        assert (made.half, kinds[0].forgotten) == (1, [])
        await made.open("shm", lane=1, token=peer.token)
        assert made.half == 0
        await stranger.close()


async def test_p8_a_second_connection_that_is_not_let_in_leaves_no_path_behind() -> None:
    (kind,) = kinds = scripted("shm")
    async with acceptor(*kinds) as (made, events):
        peer = await made.open("shm")
        await made.impatient("shm", token=peer.token)
        await events.first("link.rejected", text="did not wait for the answer to its greeting")
        assert all(path.aborted for path in kind.paths)
        assert (made.half, kind.forgotten) == (1, [])
        await made.open("shm", lane=1, token=peer.token)
        (link,) = made.node.links.all()
        assert link.state is LinkState.READY
        assert not any(path.aborted for path in kind.paths[-2:])


# --- given up ---


async def test_p8_what_is_not_completed_in_time_is_dropped_and_forgotten() -> None:
    kinds = scripted("shm", "tcp")
    async with acceptor(*kinds, handshake_timeout_ms=50) as (made, events):
        peer = await made.open("shm", "tcp")
        await events.first("link.rejected", text="its second connection did not come")
        await eventually(lambda: made.half == 0)
        assert [kind.forgotten for kind in kinds] == [[peer.token]] * 2
        assert await made.lanes[0].channel.receive() == b""


async def test_strangers_who_never_complete_a_link_keep_nobody_out() -> None:
    (kind,) = kinds = scripted("shm")
    async with acceptor(*kinds) as (made, events):
        tokens = [(await made.open("shm")).token for _ in range(130)]
        assert made.half == 128
        assert kind.forgotten == tokens[:2]
        assert len(events.named("link.rejected", text="over 128 links without their second connection")) == 2
        await made.open("shm", lane=1, token=tokens[-1])
        (link,) = made.node.links.all()
        assert link.state is LinkState.READY


async def test_a_completed_link_is_not_touched_by_the_timeout_of_its_half() -> None:
    kinds = scripted("shm")
    async with acceptor(*kinds, handshake_timeout_ms=200) as (made, _):
        late = await made.open("shm")
        early = await made.open("shm")
        await made.open("shm", lane=1, token=early.token)
        await eventually(lambda: made.half == 0)  # the other one: the time is over for both
        assert kinds[0].forgotten == [late.token]
        assert [link.state for link in made.node.links.all()] == [LinkState.READY]


async def test_the_end_of_the_engine_drops_every_half_link() -> None:
    kinds = scripted("shm")
    async with acceptor(*kinds) as (made, events):
        tokens = {(await made.open("shm")).token for _ in range(2)}
        await made.node.links.close(Deadline.after_ms(5000))
        assert made.half == 0
        assert set(kinds[0].forgotten) == tokens
        assert len(events.named("link.rejected", text="this engine is being finalized")) == 2


async def test_only_who_owns_a_half_link_can_have_it_dropped() -> None:
    kinds = scripted("shm")
    async with acceptor(*kinds) as (made, _):
        peer = await made.open("shm")
        halves = made.node.links._halves
        mine = made.dialer.context.identity
        halves.drop(peer.token, "another process", of=Peer(mine.cluster_id, b"?" * 16, 1, peer.token))
        halves.drop(peer.token, "another cluster", of=Peer(7, mine.incarnation, 1, peer.token))
        halves.drop(b"x" * 16, "no such token")
        assert (len(halves), kinds[0].forgotten) == (1, [])
        halves.drop(peer.token, "its owner", of=Peer(mine.cluster_id, mine.incarnation, 1, peer.token))
        assert (len(halves), kinds[0].forgotten) == (0, [peer.token])
