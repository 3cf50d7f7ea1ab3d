"""The serving side of one lane: grants, refusals, leases, cancellations, and what keeps memory pinned."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kvpull_async.lane import Lane
from kvpull_async.observe import Log
from kvpull_async.offers import Issued, PeerRecord
from kvpull_async.protocol import frames
from kvpull_async.serve import Serving
from kvpull_async.status import LLMStatusCode
from kvpull_async.values import CacheKey
from tests.loop_nodes import event_log, eventually
from tests.serving import STRIDE, TENSORS, Scene

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST

# --- grants ---


async def test_a_small_pull_rides_on_its_grant() -> None:
    scene = Scene(inline_limit=TENSORS * STRIDE)
    with event_log() as events:
        scene.ask(1)
        grant = await scene.granted()
        assert scene.lane.said[0][1] == bytes(range(STRIDE)) * TENSORS
        assert (grant.request_id, grant.tensors, grant.per_tensor, grant.inline) == (1, TENSORS, STRIDE, True)
        await events.first("serve.started", pull_id="0123456789abcdef", bytes=TENSORS * STRIDE)
        finished = await events.first("serve.finished", inline=True, key="request:7:0", peer="a peer")
        assert finished["traceparent"].startswith("00-aaaa")
    assert scene.path.transfers == []
    assert scene.lane.ended == [1]
    assert not scene.entry.busy
    assert scene.counters.snapshot() == {"serves": 1, "bytes_served": TENSORS * STRIDE}


async def test_p6_of_many_small_requests_at_once_only_some_are_answered_on_the_spot_and_all_in_order() -> None:
    scene = Scene(inline_limit=TENSORS * STRIDE)
    for number in range(1, 21):
        scene.ask(number)
    at_once = len(scene.of(frames.Grant))
    assert 0 < at_once < 20
    grants = await scene.heard(frames.Grant, 20)
    assert [grant.request_id for grant in grants] == list(range(1, 21))
    assert sorted(scene.lane.ended) == list(range(1, 21))
    scene.lane.turns += 1
    scene.ask(21)
    assert len(scene.of(frames.Grant)) == 21


async def test_a_small_answer_waits_for_a_peer_that_does_not_read() -> None:
    scene = Scene(inline_limit=TENSORS * STRIDE)
    scene.lane.channel.ready = False
    scene.ask(1)
    assert scene.of(frames.Grant) == []
    assert (await scene.granted()).inline


@pytest.mark.parametrize(("ours", "theirs"), [(TENSORS * STRIDE - 1, 2**20), (2**20, TENSORS * STRIDE - 1)])
async def test_either_side_may_want_less_on_the_grant(ours: int, theirs: int) -> None:
    scene = Scene(inline_limit=ours)
    scene.ask(1, inline_limit=theirs)
    assert not (await scene.granted()).inline
    scene.path.transfers[0].finish()


async def test_a_streamed_pull_keeps_the_memory_until_its_transfer_has_settled() -> None:
    scene = Scene()
    scene.ask(1)
    grant = await scene.granted()
    assert not grant.inline
    assert scene.path.bytes == bytes(range(STRIDE)) * TENSORS
    assert scene.entry.busy
    assert scene.lane.ended == []
    scene.path.transfers[0].finish()
    await eventually(lambda: not scene.entry.busy)
    assert scene.lane.ended == [1]
    assert scene.path.released == [grant.grant_id]


async def test_a_one_sided_pull_keeps_the_memory_until_done() -> None:
    scene = Scene(one_sided=True)
    scene.ask(1, offset_pull=True)  # consumes nothing, and yet the source must hear of its end
    grant = await scene.granted()
    assert grant.wants_done
    await eventually(lambda: scene.lane.ended == [1])
    assert scene.entry.busy
    scene.ask(2)  # the lane goes on
    await scene.heard(frames.Grant, 2)
    scene.serving.receive(frames.Done(grant.grant_id, "p"), b"")
    assert scene.path.released == [grant.grant_id]
    assert scene.of(frames.DoneAck) == [frames.DoneAck(grant.grant_id)]
    assert scene.held


async def test_a_lease_that_nobody_ends_expires() -> None:
    scene = Scene(one_sided=True, lease_margin=0.0)
    with event_log() as events:
        scene.ask(1, remaining_ms=50)
        grant = await scene.granted()
        await events.first("serve.lease_expired", request_id=1)
    assert scene.path.released == [grant.grant_id]
    assert scene.path.transfers[0].aborts == 1
    await eventually(lambda: not scene.entry.busy)
    assert scene.counters.snapshot()["leases_expired"] == 1
    scene.serving.receive(frames.Done(grant.grant_id, "p"), b"")  # late, and still what ends the key
    assert not scene.held


async def test_a_grant_that_the_puller_reads_by_itself_says_where_the_bytes_begin() -> None:
    scene = Scene(one_sided=True)
    scene.ask(1, identity=8, offset=3, size=5)
    grant = await scene.granted()
    assert (grant.ticket, grant.start, grant.per_tensor, grant.inline) == (b"a ticket", STRIDE + 3, 5, False)
    ((described, span),) = scene.path.described
    assert described == grant.grant_id
    assert span.regions == scene.entry.regions
    assert span.rows().tolist() == [[tensor, STRIDE + 3, 5] for tensor in range(TENSORS)]


async def test_a_grant_whose_bytes_are_sent_has_no_ticket() -> None:
    scene = Scene()
    scene.ask(1, offset_pull=True)
    grant = await scene.granted()
    assert (grant.ticket, grant.wants_done) == (None, False)
    scene.path.transfers[0].finish()


async def test_p5_requests_of_one_lane_are_served_one_after_another() -> None:
    scene = Scene()
    for number in (1, 2, 3):
        scene.ask(number)
    for number in (1, 2, 3):
        await scene.heard(frames.Grant, number)
        assert len(scene.path.transfers) == number
        scene.path.transfers[-1].finish()
    assert [grant.request_id for grant in scene.of(frames.Grant)] == [1, 2, 3]


# --- keys ---


async def test_done_consumes_the_key_once_and_is_always_acknowledged() -> None:
    scene = Scene(inline_limit=2**20)
    scene.ask(1)
    grant = await scene.granted()
    assert grant.wants_done
    assert scene.held
    for _ in range(2):
        scene.serving.receive(frames.Done(grant.grant_id, "p"), b"")
    scene.serving.receive(frames.Done(b"?" * 16, "p"), b"")
    assert not scene.held
    assert [ack.grant_id for ack in scene.of(frames.DoneAck)] == [grant.grant_id] * 2 + [b"?" * 16]
    assert scene.counters.snapshot()["keys_consumed"] == 1


async def test_a_done_may_come_on_a_later_connection_of_the_same_peer() -> None:
    scene = Scene(inline_limit=2**20)
    scene.ask(1)
    grant = await scene.granted()
    scene.serving.abort()
    other = Scene()
    later = Serving(
        cast("Lane", other.lane), other.path, peer=2, registry=scene.registry, record=scene.record,
        workers=other.workers, log=Log(), counters=other.counters, inline_limit=0, lease_margin=1.0, settle_timeout=5.0,
        pushes_by_key=True, peer_left=lambda: None,
    )  # fmt: skip
    later.receive(frames.Done(grant.grant_id, "p"), b"")
    assert not scene.held


async def test_a_done_of_an_older_generation_leaves_the_new_key_alone() -> None:
    scene = Scene(inline_limit=2**20)
    scene.ask(1)
    grant = await scene.granted()
    scene.registry.remove_key(CacheKey(1, 7))
    scene.registry.bind(scene.entry, [CacheKey(1, 7)])
    scene.serving.receive(frames.Done(grant.grant_id, "p"), b"")
    assert scene.held
    assert scene.of(frames.DoneAck)


async def test_an_offset_pull_wants_no_done() -> None:
    scene = Scene(inline_limit=2**20)
    scene.ask(1, offset_pull=True)
    assert not (await scene.granted()).wants_done


async def test_p2_a_transfer_that_breaks_keeps_the_key_and_the_lane() -> None:
    scene = Scene()
    scene.ask(1)
    await scene.granted()
    scene.path.transfers[0].finish(ConnectionResetError("the peer closed the payload connection"))
    (refusal,) = await scene.heard(frames.Refuse)
    assert "closed the payload connection" in refusal.reason
    assert scene.held
    assert not scene.entry.busy
    scene.ask(2)
    await scene.heard(frames.Grant, 2)
    scene.path.transfers[1].finish()


def test_what_a_peer_was_promised_is_bounded() -> None:
    record = PeerRecord()
    for number in range(4100):
        record.issue(number.to_bytes(16, "big"), Issued(number, range(1)))
    assert len(record.issued) == 4096
    assert next(iter(record.issued)) == (4).to_bytes(16, "big")


# --- refusals ---


async def test_what_is_not_here_is_refused_with_its_status_and_told() -> None:
    scene = Scene()
    with event_log() as events:
        scene.ask(1, identity=99)
        (refusal,) = await scene.heard(frames.Refuse)
        await events.first("serve.refused", status="LLM_KV_CACHE_NOT_EXIST", pull_id="0123456789abcdef")
    assert (refusal.request_id, refusal.status) == (1, NOT_EXIST)
    assert "req_id 99 of model 0 is not here" in refusal.reason
    assert scene.lane.ended == [1]
    assert scene.counters.snapshot() == {"serves_refused": 1}


@pytest.mark.parametrize("inline_limit", [0, 10_000], ids=["in turn", "on the spot"])
async def test_a_refusal_that_the_puller_waits_upon_is_no_failure(inline_limit: int) -> None:
    scene = Scene(inline_limit=inline_limit)
    with event_log() as events:
        scene.ask(1, identity=99, waits=True, inline_limit=inline_limit)
        (refusal,) = await scene.heard(frames.Refuse)
        await events.first("serve.awaited", text="is not here", pull_id="0123456789abcdef", key="request:99:0")
        assert not events.named("serve.refused")
    assert refusal.status == NOT_EXIST
    assert scene.counters.snapshot() == {"serves_awaited": 1}


async def test_what_waiting_does_not_help_is_refused_to_who_waits_too() -> None:
    scene = Scene()
    with event_log() as events:
        scene.ask(1, tensors=9, waits=True)
        await events.first("serve.refused", status="LLM_PARAM_INVALID")
    assert scene.counters.snapshot() == {"serves_refused": 1}


async def test_a_path_that_cannot_carry_refuses() -> None:
    scene = Scene()
    scene.path.broken = ConnectionError("there is no payload connection")
    scene.ask(1)
    (refusal,) = await scene.heard(frames.Refuse)
    assert (refusal.status, refusal.reason) == (LLMStatusCode.LLM_LINK_FAILED, "there is no payload connection")
    assert not scene.entry.busy


async def test_p7_a_path_that_never_gets_ready_is_refused_when_the_lease_would_have_ended() -> None:
    scene = Scene(lease_margin=0.0)
    scene.path.stuck = True
    scene.ask(1, remaining_ms=40)
    (refusal,) = await scene.heard(frames.Refuse)
    assert refusal.reason == "the time for this request was over"
    assert not scene.entry.busy


async def test_a_reason_longer_than_a_frame_allows_is_cut() -> None:
    scene = Scene()
    scene.path.broken = ConnectionError("x" * 5000)
    scene.ask(1)
    (refusal,) = await scene.heard(frames.Refuse)
    assert len(refusal.reason) == 1000


async def test_a_failure_of_ours_ends_the_lane_and_is_logged_as_such() -> None:
    scene = Scene()
    scene.path.serve = None  # type: ignore[method-assign, assignment]
    with event_log() as events:
        scene.ask(1)
        await eventually(lambda: bool(scene.lane.aborted))
        await events.first("serve.bug", text="TypeError")
    assert "internal error while serving: TypeError" in scene.lane.aborted[0]
    assert not scene.entry.busy


# --- cancellation and the end ---


async def test_a_cancelled_request_that_waits_is_never_served() -> None:
    scene = Scene()
    for number in (1, 2, 3):
        scene.ask(number)
    await scene.heard(frames.Grant)
    scene.serving.receive(frames.Cancel(2), b"")
    assert scene.lane.ended == [2]
    scene.path.transfers[0].finish()
    await scene.heard(frames.Grant, 2)
    scene.path.transfers[1].finish()
    assert [grant.request_id for grant in scene.of(frames.Grant)] == [1, 3]


@pytest.mark.parametrize("stuck", [True, False], ids=["before its grant", "while bytes move"])
async def test_a_cancelled_request_that_runs_is_stopped_and_the_next_one_served(stuck: bool) -> None:
    scene = Scene()
    scene.path.stuck = stuck
    scene.ask(1)
    scene.ask(2)
    await asyncio.sleep(0.01)
    scene.path.stuck = False
    scene.serving.receive(frames.Cancel(1), b"")
    await eventually(lambda: any(grant.request_id == 2 for grant in scene.of(frames.Grant)))
    assert [transfer.aborts > 0 for transfer in scene.path.transfers[:-1]] == [True] * (not stuck)
    scene.path.transfers[-1].finish()
    await eventually(lambda: not scene.entry.busy)
    assert scene.held


async def test_a_cancelled_request_that_was_sent_breaks_the_payload_connection() -> None:
    """The puller never took the last bytes, and they must not be mistaken for the next pull's."""
    scene = Scene()
    scene.ask(1)
    await scene.granted()
    scene.path.transfers[0].finish()
    await eventually(lambda: scene.lane.ended == [1])
    scene.serving.receive(frames.Cancel(1), b"")
    assert scene.path.transfers[0].aborts == 1
    scene.serving.receive(frames.Cancel(77), b"")  # of a request that never was
    assert scene.path.transfers[0].aborts == 1


async def test_a_cancelled_one_sided_grant_is_withdrawn() -> None:
    scene = Scene(one_sided=True)
    scene.ask(1)
    grant = await scene.granted()
    await eventually(lambda: scene.lane.ended == [1])
    scene.serving.receive(frames.Cancel(1), b"")
    assert scene.path.released == [grant.grant_id]
    await eventually(lambda: not scene.entry.busy)


async def test_p7_a_released_cache_cuts_its_reader_with_the_reason() -> None:
    scene = Scene()
    scene.ask(1)
    await scene.granted()
    scene.registry.release(scene.entry)
    scene.entry.cut_pins()
    (refusal,) = await scene.heard(frames.Refuse)
    assert (refusal.status, refusal.reason) == (NOT_EXIST, "the cache was released")
    assert scene.path.transfers[0].aborts
    await eventually(lambda: not scene.entry.busy)


async def test_p8_the_end_of_the_lane_gives_every_pin_back() -> None:
    scene = Scene(one_sided=True)
    for number in (1, 2):
        scene.ask(number)
        await scene.heard(frames.Grant, number)
    scene.path.stuck = True
    scene.ask(3)
    scene.ask(4)
    await asyncio.sleep(0)
    scene.serving.abort()
    await eventually(lambda: not scene.entry.busy)
    assert len(scene.path.released) == 2
    await asyncio.sleep(0.01)
    assert len(scene.of(frames.Grant)) == 2
    assert repr(scene.serving) == "<Serving a peer waiting=0 granted=0>"


async def test_memory_that_is_still_read_stays_pinned_after_the_lane() -> None:
    scene = Scene(one_sided=True)
    scene.ask(1)
    await scene.granted()
    scene.path.transfers[0].refuses = True
    scene.serving.abort()
    await asyncio.sleep(0.01)
    assert scene.entry.busy
    scene.path.transfers[0].settled.set_result(None)
    await eventually(lambda: not scene.entry.busy)


async def test_a_goodbye_is_acknowledged_and_handed_on() -> None:
    scene = Scene()
    scene.serving.receive(frames.Bye(), b"")
    assert scene.of(frames.ByeAck) == [frames.ByeAck()]
    assert scene.left == 1
