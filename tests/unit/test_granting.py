"""Grants: how long they hold, what ends them, and what the source says of their sums. See also test_serve.py."""

from __future__ import annotations

import asyncio
import errno
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import xxhash

from kvpull_async import LLMException, LLMStatusCode, sums
from kvpull_async.memory.base import Batches, MemoryBackend, Until
from kvpull_async.protocol import frames
from kvpull_async.testing.faults import GatedMemory
from tests.loop_nodes import eventually
from tests.serving import STRIDE, TENSORS, FakeTransfer, Scene

BROKEN = LLMStatusCode.LLM_DEVICE_MEM_ERROR
EXPECTED = xxhash.xxh3_64(bytes(range(STRIDE)) * TENSORS).digest()


@pytest.fixture(params=["inline", "one-sided", "streamed"])
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    """Each way in which bytes leave."""
    made = Scene(one_sided=request.param == "one-sided", inline_limit=4096 if request.param == "inline" else 0)
    yield made
    made.serving.abort()
    made.workers.close(5.0)


async def streamed(scene: Scene) -> None:
    """Let the bytes leave, where the source sends them."""
    await scene.granted()
    for transfer in scene.path.transfers:
        if not transfer.done.done():
            transfer.finish()


async def digest(scene: Scene) -> frames.Digest:
    found: list[Any] = await scene.heard(frames.Digest)
    assert len(found) == 1
    return found[0]  # type: ignore[no-any-return]


async def test_the_sum_comes_beside_the_grant(scene: Scene) -> None:
    scene.ask(7, inline_limit=4096, verify="xxh3")
    await streamed(scene)
    assert await digest(scene) == frames.Digest(7, EXPECTED)


async def test_nothing_is_summed_that_nobody_asked_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise AssertionError("something was summed")

    monkeypatch.setattr(sums, "begin", none)
    scene.ask(7, inline_limit=4096)
    await streamed(scene)
    await eventually(lambda: scene.counters.snapshot().get("serves") == 1)
    assert not scene.of(frames.Digest)


@pytest.mark.parametrize(
    ("name", "status"),
    [("xxh3", LLMStatusCode.LLM_FEATURE_NOT_ENABLED), ("sha1", LLMStatusCode.LLM_PARAM_INVALID)],
)
async def test_p10_a_sum_that_cannot_be_made_is_refused(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, name: str, status: LLMStatusCode
) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    scene.ask(7, inline_limit=4096, verify=name)
    (refusal,) = await scene.heard(frames.Refuse)
    assert refusal.status == status
    assert not scene.of(frames.Grant)
    assert not scene.entry.busy


class Held:
    """A sum that is held in its middle, in the worker."""

    def __init__(self, scene: Scene) -> None:
        inner: MemoryBackend = scene.registry.backend
        self.gated = GatedMemory(inner, after=0)
        scene.registry.backend, scene.entry.direct = self.gated, False
        self.gate = self.gated.lending_gate


async def begin_held() -> tuple[Scene, Held]:
    scene = Scene(one_sided=True)
    held = Held(scene)
    scene.path.serve = lambda *_: _served(scene)  # type: ignore[method-assign]
    held.gate.close()
    scene.ask(7, verify="crc32")
    await held.gate.reached()
    return scene, held


def _served(scene: Scene) -> Any:
    transfer = FakeTransfer(finished=True)
    scene.path.transfers.append(transfer)
    return transfer


async def end(scene: Scene, held: Held) -> None:
    held.gate.open()
    await eventually(lambda: not scene.entry.busy, "the end of the sum")
    scene.serving.abort()
    scene.workers.close(5.0)


async def test_p1_the_memory_is_held_while_it_is_summed() -> None:
    scene, held = await begin_held()
    scene.path.transfers[0].settled.set_result(None)
    grant = await scene.granted()
    scene.serving.receive(frames.Done(grant.grant_id, "a-pull"), b"")  # as no honest puller does: it waits for the sum
    assert scene.entry.busy
    await end(scene, held)
    assert (await digest(scene)).digest


@pytest.mark.parametrize("how", ["cancelled", "released"])
async def test_a_sum_that_ends_early_is_told_as_none(how: str) -> None:
    scene, held = await begin_held()
    if how == "cancelled":
        scene.serving.receive(frames.Cancel(7), b"")
    else:
        scene.entry.cut_pins()
    assert await digest(scene) == frames.Digest(7, b"")
    assert scene.entry.busy  # a thread is still reading
    for transfer in scene.path.transfers:
        if not transfer.settled.done():
            transfer.settled.set_result(None)
    await end(scene, held)


def unreadable_later(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory can be read once, for the bytes themselves, and not again."""
    backend, readings = scene.registry.backend, []
    lending = backend.lending

    def failing(regions: Any, segments: Any, **options: Any) -> Batches:
        readings.append(regions)
        if len(readings) > 1:
            raise OSError(errno.EFAULT, "Bad address")
        return lending(regions, segments, **options)

    monkeypatch.setattr(backend, "lending", failing)


async def check_told_as_none(scene: Scene) -> None:
    """The puller, which has its grant, hears something, and the lane goes on."""
    assert await digest(scene) == frames.Digest(7, b"")
    await eventually(lambda: scene.lane.ended == [7])
    assert not scene.lane.aborted
    for transfer in scene.path.transfers:
        if not transfer.settled.done():
            transfer.settled.set_result(None)
    scene.serving.receive(frames.Cancel(7), b"")  # gives a lease back
    await eventually(lambda: not scene.entry.busy)


async def test_p3_a_sum_that_fails_behind_the_grant_is_told_as_none(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.lane.channel.ready = False  # so that it is not answered on the spot
    unreadable_later(scene, monkeypatch)
    scene.ask(7, inline_limit=4096, verify="crc32")
    await streamed(scene)
    await check_told_as_none(scene)


async def test_p3_where_the_bytes_do_not_leave_the_sum_is_told_as_none() -> None:
    scene = Scene()
    scene.ask(7, verify="crc32")
    await scene.granted()
    scene.path.transfers[0].finish(ConnectionResetError("broken"))
    await check_told_as_none(scene)


@pytest.mark.parametrize("one_sided", [True, False])
async def test_p3_without_a_thread_the_sum_is_told_as_none(one_sided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    scene = Scene(one_sided=one_sided)
    scene.entry.direct = False  # not for a loop to read
    monkeypatch.setattr(threading.Thread, "start", refuse)
    scene.ask(7, verify="crc32")
    await streamed(scene)
    await check_told_as_none(scene)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (LLMException("the device is gone", status_code=BROKEN), BROKEN),
        (OSError(errno.EFAULT, "Bad address"), LLMStatusCode.LLM_PARAM_INVALID),
        (ConnectionResetError("reset"), LLMStatusCode.LLM_LINK_FAILED),
    ],
)
async def test_p2_a_source_that_cannot_go_on_behind_its_grant_says_why(error: Exception, status: LLMStatusCode) -> None:
    scene = Scene()
    scene.ask(7)
    await scene.granted()
    scene.path.transfers[0].finish(error)
    (refusal,) = await scene.heard(frames.Refuse)
    assert (refusal.request_id, refusal.status) == (7, status)
    await eventually(lambda: not scene.entry.busy)


@pytest.mark.parametrize("by", ["the end of the cache", "the puller", "the end of the lease"])
async def test_p7_memory_is_waited_for_no_longer_than_its_lease(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, untils = Scene(one_sided=True, lease_margin=0.2 if by == "the end of the lease" else 60.0), []
    lending = scene.registry.backend.lending

    def lent(*args: Any, until: Until, **options: Any) -> Batches:
        untils.append(until)
        return lending(*args, until=until, **options)

    monkeypatch.setattr(scene.registry.backend, "lending", lent)
    scene.ask(7, remaining_ms=50 if by == "the end of the lease" else 60_000)
    await scene.granted()
    (until,) = untils
    assert not until.stopped
    assert 0 < until.deadline.remaining <= 120
    if by == "the end of the cache":
        scene.entry.cut_pins()
    elif by == "the puller":
        scene.serving.receive(frames.Cancel(7), b"")
    await eventually(lambda: until.stopped)
    await eventually(lambda: not scene.entry.busy)


async def test_one_request_is_summed_after_the_other() -> None:
    """So that a peer which only asks cannot keep all workers busy."""
    scene, held = await begin_held()
    scene.ask(8, identity=8, verify="crc32")
    assert len(scene.of(frames.Grant)) == 1
    held.gate.open()
    assert [found.request_id for found in await scene.heard(frames.Digest, 2)] == [7, 8]
    for transfer in scene.path.transfers:
        if not transfer.settled.done():
            transfer.settled.set_result(None)
    scene.serving.abort()
    await end(scene, held)


# -- grants that the puller reads by itself ----------------------------------------------------------------------------


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


async def test_p4_bytes_that_cannot_be_stopped_hold_up_the_next_request_for_a_moment() -> None:
    scene = Scene(lease_margin=0.0)
    scene.ask(1)
    await scene.granted()
    scene.path.transfers[0].refuses = True
    scene.serving.receive(frames.Cancel(1), b"")
    scene.ask(2, remaining_ms=900)
    await scene.heard(frames.Grant, 2)
    assert scene.entry.busy
    for transfer in scene.path.transfers:
        transfer.settled.set_result(None)
    scene.serving.abort()
    await eventually(lambda: not scene.entry.busy)
