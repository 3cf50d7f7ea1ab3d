"""Grants that the puller reads by itself: how long they hold, what ends them, and what is said to who asks."""

from __future__ import annotations

import asyncio

import msgspec

from kvpull_async.protocol import frames
from kvpull_async.status import LLMStatusCode
from tests.loop_nodes import eventually
from tests.serving import Scene


def checked(scene: Scene, grant: frames.Grant) -> bool:
    """What the source says when it is asked whether it still holds the grant."""
    scene.serving.receive(frames.Check(grant.grant_id), b"")
    answer = scene.of(frames.Checked)[-1]
    assert answer.grant_id == grant.grant_id
    return bool(answer.valid)


async def test_p7_a_cut_one_sided_grant_ends_at_once_whatever_its_puller_does() -> None:
    scene = Scene(one_sided=True)
    scene.ask(1)
    grant = await scene.granted()
    await eventually(lambda: scene.lane.ended == [1])
    assert scene.entry.busy
    scene.entry.cut_pins()
    assert scene.path.transfers[0].aborts == 1
    assert scene.path.released == [grant.grant_id]
    await eventually(lambda: not scene.entry.busy)
    assert not checked(scene, grant)


async def test_p7_a_cut_grant_stays_pinned_as_long_as_this_side_reads_it() -> None:
    scene = Scene(one_sided=True)
    scene.ask(1)
    grant = await scene.granted()
    await eventually(lambda: scene.lane.ended == [1])
    scene.path.transfers[0].refuses = True
    scene.entry.cut_pins()
    assert not checked(scene, grant)
    for _ in range(50):  # nothing here needs a thread or the clock: what can happen happens in turns of the loop
        await asyncio.sleep(0)
    assert scene.entry.busy
    scene.path.transfers[0].settled.set_result(None)
    await eventually(lambda: not scene.entry.busy)


async def test_p2_a_grant_is_valid_until_it_ends_and_never_again() -> None:
    scene = Scene(one_sided=True)
    scene.ask(1)
    first = await scene.granted()
    assert checked(scene, first)
    assert checked(scene, first)  # to ask changes nothing
    assert scene.entry.busy
    scene.ask(2)
    second = (await scene.heard(frames.Grant, 2))[1]
    scene.serving.receive(frames.Done(first.grant_id, "p"), b"")
    assert not checked(scene, first)
    assert checked(scene, second)
    scene.serving.receive(frames.Cancel(2), b"")
    assert not checked(scene, second)
    assert not checked(scene, msgspec.structs.replace(first, grant_id=b"?" * 16))  # one that never was


async def test_p2_a_grant_whose_lease_is_over_is_not_valid() -> None:
    scene = Scene(one_sided=True, lease_margin=0.0)
    scene.ask(1, remaining_ms=50)
    grant = await scene.granted()
    assert checked(scene, grant)
    await eventually(lambda: not scene.entry.busy)
    assert not checked(scene, grant)
    assert scene.held


async def test_a_puller_that_ends_no_grant_is_refused_more_of_them() -> None:
    """Each would be kept until its lease is over, which may be long."""
    scene = Scene(one_sided=True)
    for number in range(1, 1026):
        scene.ask(number, offset_pull=True)
        await eventually(lambda: scene.lane.ended[-1:] == [number])  # noqa: B023  (waited for at once)
    grants, (refusal,) = scene.of(frames.Grant), scene.of(frames.Refuse)
    assert len(grants) == 1024
    assert (refusal.request_id, refusal.status) == (1025, int(LLMStatusCode.LLM_LINK_BUSY))
    assert "1024 grants of this link are not over yet" in refusal.reason
    assert len(scene.path.released) == 1
    scene.serving.receive(frames.Done(grants[0].grant_id, "p"), b"")
    scene.ask(1026)
    await scene.heard(frames.Grant, 1025)
    scene.path.transfers[0].settled.set_result(None)
    scene.serving.abort()
    await eventually(lambda: not scene.entry.busy)
