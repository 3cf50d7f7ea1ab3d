"""How an offer ends at the receiver when it is not simply taken: time, withdrawals, released caches, and transfers that
cannot be stopped. Whatever happens, one RESULT says so once nothing writes any more.
"""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.protocol import frames
from kvpull_async.status import LLMStatusCode
from kvpull_async.testing.stubborn import StubbornPath
from tests.loop_nodes import event_log, eventually
from tests.orders import endings
from tests.serving import STRIDE, FakeTransfer, Scene
from tests.unit.test_receiving import (
    BYTES,
    LINK_FAILED,
    NBYTES,
    NOT_EXIST,
    OK,
    PARAM_INVALID,
    READ,
    STREAMED,
    TO_BE_ACCEPTED,
    allocated,
    goes_on,
    landed,
    table,
    untouched,
)


async def test_a_transfer_that_breaks_is_told_with_its_reason_and_so_is_one_whose_rows_do_not_fit() -> None:
    scene = Scene()
    for number, (error, status) in enumerate(
        [
            (ConnectionResetError("reset"), LINK_FAILED),
            (OSError(errno.EFAULT, "Bad address"), PARAM_INVALID),
            (ValueError("outside a cache"), PARAM_INVALID),
        ],
        1,
    ):
        scene.offer(number, **STREAMED)
        await eventually(lambda number=number: len(scene.path.transfers) == number)
        scene.path.transfers[-1].finish(error)  # type: ignore[arg-type]
        result = await scene.result(number)
        assert (result.status, result.unsafe) == (status, False)
        assert str(error) in result.reason
        assert ("the destination's memory cannot be written" in result.reason) is ("Bad address" in str(error))
    await goes_on(scene)


async def test_p3_the_time_of_an_offer_ends_it_wherever_it_waits() -> None:
    scene = Scene()
    scene.path.stuck = True
    scene.offer(1, remaining_ms=30, **TO_BE_ACCEPTED)
    assert (await scene.result(1)).status == LLMStatusCode.LLM_TIMEOUT
    scene.path.stuck = False
    scene.offer(2, remaining_ms=30, **STREAMED)
    result = await scene.result(2)
    assert (result.status, result.reason) == (LLMStatusCode.LLM_TIMEOUT, "the time for this push was over")
    assert scene.path.transfers[0].aborts == 1
    assert untouched(scene)
    await goes_on(scene)


async def test_p3_the_time_that_an_offer_spends_in_the_queue_counts() -> None:
    scene = Scene()
    scene.offer(1, **STREAMED)
    scene.offer(2, BYTES, remaining_ms=20)
    await asyncio.sleep(0.05)
    scene.path.transfers[0].finish(ConnectionResetError("reset"))
    assert (await scene.result(2)).status == LLMStatusCode.LLM_TIMEOUT
    assert untouched(scene)
    await goes_on(scene)


@pytest.mark.parametrize("fields", [STREAMED, TO_BE_ACCEPTED, READ], ids=["streamed", "to be accepted", "read"])
async def test_p1_an_offer_that_is_withdrawn_while_bytes_move_is_answered_when_nothing_writes_any_more(
    fields: dict[str, Any],
) -> None:
    scene = Scene()
    scene.offer(1, **fields)
    scene.offer(2, BYTES)
    await eventually(lambda: bool(scene.path.transfers))
    transfer = scene.path.transfers[0]
    transfer.refuses = True
    scene.serving.receive(frames.Cancel(1), b"")
    await asyncio.sleep(0.01)
    assert scene.of(frames.Result) == []
    assert transfer.aborts == 1
    transfer.finish()
    result = await scene.result(1)
    assert (result.status, result.unsafe) == (LINK_FAILED, False)
    assert "the sender gave up" in result.reason
    assert (await scene.result(2)).status == OK
    await goes_on(scene)


@pytest.mark.parametrize("turns", range(4))
async def test_an_offer_may_be_withdrawn_at_any_moment(turns: int) -> None:
    scene = Scene()
    scene.offer(1, **TO_BE_ACCEPTED)
    for _ in range(turns):
        await asyncio.sleep(0)
    scene.serving.receive(frames.Cancel(1), b"")
    result = await scene.result(1)
    assert (result.status, result.unsafe) == (LINK_FAILED, False)
    await eventually(lambda: not scene.entry.busy)
    assert untouched(scene)
    await goes_on(scene)


async def test_an_offer_that_waits_for_its_turn_is_withdrawn_at_once() -> None:
    scene = Scene()
    for number in (1, 2, 3):
        scene.offer(number, **STREAMED)
    await eventually(lambda: bool(scene.path.transfers))
    scene.serving.receive(frames.Cancel(2), b"")
    assert scene.lane.ended == [2]
    (result,) = scene.of(frames.Result)
    assert (result.request_id, result.status, result.unsafe) == (2, LINK_FAILED, False)
    assert "withdrawn before it was taken" in result.reason
    for number in (0, 1):
        await eventually(lambda number=number: len(scene.path.transfers) == number + 1)
        scene.path.transfers[number].land(BYTES)
    assert (await scene.result(3)).status == OK


async def test_what_has_ended_cannot_be_withdrawn() -> None:
    scene = Scene()
    scene.offer(1, BYTES)
    await scene.result(1)
    await eventually(lambda: scene.lane.ended == [1])
    scene.serving.receive(frames.Cancel(1), b"")
    await asyncio.sleep(0.01)
    assert len(scene.of(frames.Result)) == 1
    assert landed(scene)


async def test_p7_a_destination_that_is_taken_away_ends_the_offer_with_the_reason() -> None:
    scene = Scene()
    scene.offer(1, **STREAMED)
    await eventually(lambda: bool(scene.path.transfers))
    scene.registry.release(scene.entry)
    scene.entry.cut_pins()
    result = await scene.result(1)
    assert (result.status, result.reason, result.unsafe) == (NOT_EXIST, "the cache was released", False)
    assert scene.path.transfers[0].aborts == 1
    await eventually(lambda: not scene.entry.busy)
    scene.offer(2, BYTES)
    assert (await scene.result(2)).status == NOT_EXIST


async def test_all_caches_that_addresses_name_are_held_and_either_may_be_taken_away() -> None:
    scene = Scene()
    other = allocated(scene, [2, STRIDE])
    addresses = table(scene.entry.regions[0].address, other.regions[0].address)
    scene.offer(1, addresses, key="address", **STREAMED)
    await eventually(lambda: bool(scene.path.transfers))
    assert scene.entry.busy
    assert other.busy
    scene.registry.release(other)
    other.cut_pins()
    assert (await scene.result(1)).status == NOT_EXIST
    await eventually(lambda: not scene.entry.busy and not other.busy)


@pytest.mark.parametrize("end", ["withdrawn", "time over", "taken away"])
async def test_p1_what_cannot_be_stopped_quarantines_the_destination_and_the_sender_is_told(end: str) -> None:
    scene = Scene(settle_timeout=0.03)
    scene.path.refusing = True
    with event_log() as events:
        scene.offer(1, remaining_ms=40 if end == "time over" else 60_000, **STREAMED)
        await eventually(lambda: bool(scene.path.transfers))
        if end == "withdrawn":
            scene.serving.receive(frames.Cancel(1), b"")
        elif end == "taken away":
            scene.entry.cut_pins()
        assert (await scene.result(1)).unsafe
        await events.first("region.quarantined", cache_id=scene.entry.cache_id, request_id=1)
    assert scene.counters.snapshot()["regions_quarantined"] == 1
    assert scene.entry.quarantined
    scene.path.refusing = False
    scene.offer(2, BYTES)
    scene.offer(3, BYTES, remaining_ms=20)
    await asyncio.sleep(0.02)
    assert len({result.request_id for result in scene.of(frames.Result)}) == 1  # the next one waits
    scene.path.transfers[0].land(bytes(NBYTES))
    assert (await scene.result(2)).status == OK
    assert landed(scene)
    assert await scene.entry.idle(Deadline.after_ms(20_000))


async def test_p1_a_quarantine_that_begins_while_another_is_waited_for_is_waited_for_too() -> None:
    scene = Scene()
    other = allocated(scene, [2, STRIDE])
    writers: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in range(2)]
    other.quarantine(writers[1])
    addresses = table(scene.entry.regions[0].address + STRIDE, other.regions[0].address)
    scene.offer(1, addresses + BYTES, key="address")
    await asyncio.sleep(0.01)
    scene.entry.quarantine(writers[0])
    writers[1].set_result(None)
    await asyncio.sleep(0.01)
    assert (scene.lane.said, untouched(scene)) == ([], True)
    writers[0].set_result(None)
    assert (await scene.result(1)).status == OK
    await eventually(lambda: not scene.entry.busy and not other.busy)


async def test_p1_over_a_stubborn_path_a_withdrawn_push_is_unsafe_until_its_last_byte() -> None:
    scene = Scene(settle_timeout=0.03)
    scene.serving._receiving._path = StubbornPath(scene.path)
    scene.offer(1, **STREAMED)
    await eventually(lambda: bool(scene.path.transfers))
    scene.serving.receive(frames.Cancel(1), b"")
    assert (await scene.result(1)).unsafe
    assert scene.path.transfers[0].aborts == 0
    assert scene.entry.quarantined
    scene.path.transfers[0].land(BYTES)
    await eventually(lambda: not scene.entry.busy)
    assert not scene.entry.quarantined
    await goes_on(scene)


async def test_p3_a_quarantine_that_lasts_costs_the_offer_its_time() -> None:
    scene = Scene()
    writer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    scene.entry.quarantine(writer)
    scene.offer(1, BYTES, remaining_ms=30)
    assert (await scene.result(1)).status == LLMStatusCode.LLM_TIMEOUT
    assert untouched(scene)
    scene.offer(2, BYTES)
    await asyncio.sleep(0.01)
    scene.registry.discard(scene.entry)
    writer.set_result(None)
    assert (await scene.result(2)).status == NOT_EXIST


async def test_bytes_that_may_be_on_their_way_are_not_left_in_the_path() -> None:
    scene = Scene()
    scene.offer(1, identity=77, **STREAMED)
    await scene.result(1)
    assert scene.path.given_up == 1
    scene.offer(2, BYTES, identity=77)
    scene.offer(3, identity=77, **READ)
    await scene.result(3)
    assert scene.path.given_up == 1


async def test_p4_a_sender_that_has_no_connection_is_given_a_new_one() -> None:
    """What this side believes to have is of no use then."""
    scene = Scene()
    scene.offer(1, inline=False)
    await scene.heard(frames.Accept)
    assert scene.path.given_up == 1
    await eventually(lambda: bool(scene.path.transfers))
    scene.path.transfers[0].land(BYTES)
    await scene.result(1)


async def test_p4_the_bytes_of_an_offer_that_is_cancelled_late_or_never_taken_are_given_up() -> None:
    scene = Scene()
    scene.offer(1, **STREAMED)
    scene.serving.receive(frames.Cancel(1), b"")  # before its task has begun
    assert scene.path.given_up == 1
    assert (await scene.result(1)).status == LLMStatusCode.LLM_LINK_FAILED
    scene.offer(2, BYTES)
    await scene.result(2)
    scene.serving.receive(frames.Cancel(2), b"")  # it rode inside the offer
    assert scene.path.given_up == 1


async def test_p8_the_end_of_the_lane_gives_every_pin_back() -> None:
    scene = Scene()
    for number in (1, 2):
        scene.offer(number, **STREAMED)
    await eventually(lambda: bool(scene.path.transfers))
    scene.lane.lost.set_result(None)  # type: ignore[arg-type]
    scene.serving.abort()
    await eventually(lambda: not scene.entry.busy)
    assert scene.path.transfers[0].aborts == 1
    assert len(scene.path.transfers) == 1
    assert untouched(scene)


async def test_a_failure_of_ours_ends_the_lane_and_writes_nothing() -> None:
    scene = Scene()
    scene.path.fetch = None  # type: ignore[method-assign, assignment]
    with event_log() as events:
        scene.offer(1, **STREAMED)
        await eventually(lambda: bool(scene.lane.aborted))
        await events.first("serve.bug", text="TypeError")
    assert not scene.entry.busy
    assert untouched(scene)


async def test_memory_that_a_loop_cannot_touch_is_never_written_on_the_spot() -> None:
    scene = Scene()
    scene.entry.direct = False
    scene.offer(1, BYTES)
    assert not scene.of(frames.Result)
    assert (await scene.result(1)).status == OK
    assert scene.workers.apart._threads
    assert not scene.workers._threads
    scene.workers.close(5.0)


async def test_p1_bytes_are_aborted_before_their_memory_is_told_to_wait_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    scene.offer(1, **STREAMED)
    await eventually(lambda: bool(scene.path.transfers))
    heard = endings(monkeypatch, FakeTransfer)
    scene.serving.receive(frames.Cancel(1), b"")
    await scene.result(1)
    assert heard == ["abort", "stop"]
    await goes_on(scene)
