"""One remote cluster: its slot, its readiness, the acknowledgements it owes, and what a loss does to who uses it."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.halves import Halves, Refusal
from kvpull_async.link import Link
from kvpull_async.linkage import LinkState, broken
from kvpull_async.observe import Report
from kvpull_async.protocol import frames
from kvpull_async.protocol.session import Peer
from kvpull_async.pull import Pull
from kvpull_async.registry import Entry
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import ControlChannel, Transport
from tests.loop_nodes import LoopNode, RecordingServer, event_log, eventually, loop_nodes

NEVER_LINKED = ("127.0.0.1", 1)


def soon() -> Deadline:
    return Deadline.after_ms(15_000)


class FakePull:
    """What a link knows of a pull: that it can be stopped with an error."""

    def __init__(self) -> None:
        self.stopped: list[LLMException] = []
        self.losses_seen = 0

    def stop(self, error: LLMException) -> None:
        self.stopped.append(error)


def fake() -> tuple[FakePull, Pull]:
    pull = FakePull()
    return pull, cast("Pull", pull)


async def linked(one: LoopNode, two: LoopNode) -> tuple[Link, Link]:
    """The dialled end and the accepted one."""
    assert await one.link(two) == [LLMStatusCode.LLM_SUCCESS]
    mine, theirs = one.links.find(two.settings.cluster_id), two.links.find(one.settings.cluster_id)
    assert mine is not None
    assert theirs is not None
    return mine, theirs


async def lose(link: Link) -> None:
    """Break the link's connections and wait until it has noticed."""
    for lane in list(link._lanes.values()):
        lane.channel.abort()
    await eventually(lambda: link.state is not LinkState.READY or link.lost_at > 0)


def served_by(node: LoopNode) -> RecordingServer:
    return node.servers[-1]


# --- the slot ---


async def test_p5_one_pull_at_a_time_in_order_of_arrival() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        link, _ = await linked(one, two)
        pulls = [fake()[1] for _ in range(3)]
        await link.enter(pulls[0])
        entering = [asyncio.create_task(link.enter(pull)) for pull in pulls[1:]]
        await asyncio.sleep(0)
        link.leave(pulls[0])
        await entering[0]
        assert not entering[1].done()
        link.leave(pulls[1])
        await entering[1]
        link.leave(pulls[2])


@pytest.mark.parametrize(("settings", "allowed"), [({"queue_limit": 2}, 2), ({"link_busy_policy": "raise"}, 0)])
async def test_waiting_is_bounded_by_the_settings(settings: dict[str, Any], allowed: int) -> None:
    link = Link(LoopNode(1, **settings).context, 2, NEVER_LINKED)
    await link.enter(fake()[1])
    waiting = [asyncio.create_task(link.enter(fake()[1])) for _ in range(allowed)]
    await asyncio.sleep(0)
    with pytest.raises(LLMException) as caught:
        await link.enter(fake()[1])
    assert caught.value.status_code == LLMStatusCode.LLM_LINK_BUSY
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_refused_link_takes_no_pull_and_ends_those_that_wait() -> None:
    link = Link(LoopNode(1).context, 2, NEVER_LINKED)
    await link.enter(fake()[1])
    waiting = asyncio.create_task(link.enter(fake()[1]))
    await asyncio.sleep(0)
    error = LLMException("unlinked", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
    link.refuse(error)
    link.refuse(LLMException("a later reason"))
    for call in (waiting, link.enter(fake()[1]), link.ready(soon())):
        with pytest.raises(LLMException, match="unlinked") as caught:
            await call
        assert caught.value is not error
    link.reopen()
    with pytest.raises(asyncio.TimeoutError):
        await link.ready(Deadline.after_ms(20))


# --- readiness ---


async def test_p4_a_pull_waits_until_the_link_is_back() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        link, _ = await linked(one, two)
        before = await link.ready(soon())
        await two.stop_listening()
        await lose(link)
        waiting = asyncio.create_task(link.ready(soon()))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await two.listen(link.address or NEVER_LINKED)
        after = await waiting
        assert after is not before
        assert not after.lost.done()


async def test_readiness_spends_the_callers_deadline() -> None:
    one, two = LoopNode(1, reconnect_grace_ms=60_000), LoopNode(2)
    async with loop_nodes(one, two):
        link, _ = await linked(one, two)
        await two.stop_listening()
        await lose(link)
        with pytest.raises(asyncio.TimeoutError):
            await link.ready(Deadline.after_ms(50))
        assert link.trouble.startswith(": ")


async def test_a_peer_that_has_been_gone_for_a_while_fails_a_pull_fast() -> None:
    one, two = LoopNode(1, reconnect_grace_ms=0), LoopNode(2)
    async with loop_nodes(one, two):
        link, _ = await linked(one, two)
        await two.close()
        await lose(link)
        began = time.monotonic()
        with pytest.raises(LLMException, match=r"refused|Connect call failed") as caught:
            await link.ready(Deadline.after_ms(60_000))
        assert caught.value.status_code == LLMStatusCode.LLM_LINK_FAILED
        assert time.monotonic() - began < 30


async def test_a_peer_that_dialled_this_side_is_waited_for_only_for_the_grace() -> None:
    one, two = LoopNode(1), LoopNode(2, reconnect_grace_ms=30)
    async with loop_nodes(one, two):
        mine, theirs = await linked(one, two)
        await one.die()
        await lose(theirs)
        with pytest.raises(LLMException, match="which dialled this link, is gone: ") as caught:
            await theirs.ready(soon())
        assert caught.value.status_code == LLMStatusCode.LLM_LINK_FAILED
        assert caught.value.retry_safe
        assert mine.state is LinkState.CLOSED


async def test_a_waiting_pull_cuts_the_pause_between_attempts_short() -> None:
    one, two = LoopNode(1, reconnect_grace_ms=60_000), LoopNode(2)
    async with loop_nodes(one, two):
        link, _ = await linked(one, two)
        address = two.target.address
        assert address is not None
        await two.stop_listening()
        await lose(link)
        await asyncio.sleep(0.3)
        await two.listen(address)
        await link.ready(soon())


async def test_a_check_is_a_round_trip_beside_the_queue() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        link, other = await linked(one, two)
        _, pull = fake()
        await link.enter(pull)
        await link.check(soon())
        await other.check(soon())
        link.leave(pull)


@pytest.mark.parametrize("stage", ["first", "second"])
async def test_a_connect_that_fails_half_way_leaves_no_connection(stage: str) -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        if stage == "second":
            two.links._halves = _Forgetful(two.context)
        else:
            await two.links.close(soon())
        link = Link(one.context, 2, two.target.address)
        with pytest.raises(LLMException):
            await link.connect(soon())
        assert link.state is LinkState.NEW
        assert link._lanes == {}


class _Forgetful(Halves):
    """Half links that are lost between their two connections."""

    def refusal(self, peer: Peer) -> Refusal | None:
        self.drop(peer.token, "forgotten")
        return super().refusal(peer)


async def test_a_link_closed_while_it_connects_ends_with_the_reason() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        link = Link(one.context, 2, two.target.address)
        connecting = asyncio.create_task(link.connect(soon()))
        await asyncio.sleep(0)
        await link.close(LLMException("finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED), soon())
        with pytest.raises(LLMException, match="finalized"):
            await connecting
        assert link._lanes == {}


# --- what is lost with a connection, and what is not ---


async def test_p2_a_done_is_repeated_to_the_same_incarnation_until_it_is_acknowledged() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        link, _ = await linked(one, two)
        done = frames.Done(b"g" * 16, "a pull")
        served_by(two).lane._on_message = lambda *_: None  # it is lost on the way
        link.tell_done(done)
        assert not await link.flush(Deadline.after_ms(30))
        address = two.target.address
        assert address is not None
        await two.stop_listening()
        await lose(link)
        assert not await link.flush(soon())  # nothing to wait for while it is down
        await two.listen(address)
        await link.ready(soon())
        assert await link.flush(soon())
        await eventually(lambda: done in served_by(two).messages)
        assert await link.flush(Deadline.after_ms(0))


async def test_a_done_told_while_the_link_is_down_is_sent_when_it_is_back() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        link, _ = await linked(one, two)
        await two.stop_listening()
        await lose(link)
        done = frames.Done(b"g" * 16, "a pull")
        link.tell_done(done)
        await two.listen(link.address or NEVER_LINKED)
        await link.ready(soon())
        assert await link.flush(soon())
        assert done in served_by(two).messages


async def test_another_incarnation_ends_what_began_before_it_and_hears_no_old_done() -> None:
    one, old, new = LoopNode(1), LoopNode(2), LoopNode(2)
    async with loop_nodes(one):
        address = await old.listen()
        link, _ = await linked(one, old)
        served_by(old).lane._on_message = lambda *_: None
        link.tell_done(frames.Done(b"g" * 16, "a pull"))
        active, pull = fake()
        await link.enter(pull)
        waiting = asyncio.create_task(link.enter(fake()[1]))
        await asyncio.sleep(0)
        await old.close()
        await eventually(lambda: link.state is not LinkState.READY)
        later = asyncio.create_task(link.enter(fake()[1]))  # knows of the loss, and means whoever is there
        await new.listen(address)
        await eventually(lambda: len(active.stopped) == 1)
        assert "was restarted" in str(active.stopped[0])
        link.leave(pull)
        with pytest.raises(LLMException, match="was restarted") as caught:
            await waiting
        assert caught.value.status_code == LLMStatusCode.LLM_LINK_FAILED
        await later
        await link.check(soon())
        assert served_by(new).messages == []
        assert await link.flush(Deadline.after_ms(0))
        await new.close()


async def test_a_peer_that_dials_again_replaces_its_own_connections() -> None:
    """It has lost them, whether or not this side has noticed."""
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        _, theirs = await linked(one, two)
        old = await theirs.ready(soon())
        again = Link(one.context, 2, two.target.address)
        await again.connect(soon())
        assert two.links.find(1) is theirs
        assert old.lost.done()
        await theirs.check(soon())
        assert two.servers[0].aborted
        await again.close(LLMException("over"), soon())


async def test_the_loss_is_told_once_with_its_reason() -> None:
    one, two = LoopNode(1), LoopNode(2)
    with event_log() as events:
        async with loop_nodes(one, two):
            link, theirs = await linked(one, two)
            await lose(theirs)
            await link.ready(soon())
            await eventually(lambda: len(events.named("link.up", cluster_id=2)) == 2)
            (lost,) = events.named("link.lost", cluster_id=2)
            assert lost["reason"]
            assert one.counters.snapshot()["links_lost"] == 1


async def test_a_broken_transfer_is_explained_by_the_lost_connection() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        link, _ = await linked(one, two)
        lane, reset = link._lanes[0], ConnectionResetError("reset")
        error = broken(reset, lane, "there")
        assert str(error) == "the transfer from there broke: reset"
        assert (error.status_code, error.retry_safe) == (LLMStatusCode.LLM_LINK_FAILED, True)
        lane.abort("the peer was silent for 5.0 s")
        assert str(broken(reset, lane, "there")) == "the peer was silent for 5.0 s"


# --- the end ---


async def test_closing_stops_the_running_pull_and_waits_for_it_within_a_bound() -> None:
    one, two = LoopNode(1, settle_timeout_ms=30), LoopNode(2)
    async with loop_nodes(one, two):
        link, _ = await linked(one, two)
        active, pull = fake()
        await link.enter(pull)
        error = LLMException("over", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)
        lanes = list(link._lanes.values())
        await link.close(error, soon())
        assert active.stopped == [error]
        assert link.state is LinkState.CLOSED
        assert all(task.done() for lane in lanes for task in lane.tasks)
        await link.close(error, soon())  # again is harmless


async def test_closing_ends_the_reconnecting() -> None:
    one, two = LoopNode(1), LoopNode(2)
    async with loop_nodes(one, two):
        link, _ = await linked(one, two)
        two.links.accept = _silence  # type: ignore[method-assign, assignment]  # so that an attempt is under way at the end
        await lose(link)
        waiting = asyncio.create_task(link.ready(soon()))
        await eventually(lambda: link.state is LinkState.CONNECTING)
        await link.close(LLMException("over"), soon())
        with pytest.raises(LLMException, match="over"):
            await waiting
        assert link._reconnecting is not None
        assert link._reconnecting.done()
        assert link.state is LinkState.CLOSED


async def _silence(transport: Transport, channel: ControlChannel) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        channel.abort()


async def test_quarantine_is_marked_on_the_cache_and_told() -> None:
    class FakeEntry:
        cache_id = 3
        settled: asyncio.Future[None] | None = None

        def quarantine(self, settled: asyncio.Future[None]) -> None:
            self.settled = settled

    entry, node = FakeEntry(), LoopNode(1)
    link = Link(node.context, 2, NEVER_LINKED)
    settled = asyncio.get_running_loop().create_future()
    with event_log() as events:
        link.quarantine(cast("Entry", entry), settled, Report("pull_cache", "a pull"))
    assert entry.settled is settled
    (event,) = events.named("region.quarantined")
    assert (event["cache_id"], event["pull_id"], event["peer"]) == (3, "a pull", "127.0.0.1:1")
    assert node.counters.snapshot() == {"regions_quarantined": 1}


async def test_repr_shows_the_peer_the_state_and_the_queue() -> None:
    link = Link(LoopNode(1).context, 2, NEVER_LINKED)
    assert repr(link) == "<Link cluster=2 127.0.0.1:1 new <Fifo held=False waiting=0>>"
