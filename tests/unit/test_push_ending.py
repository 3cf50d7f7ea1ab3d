"""How pushes end when something is in their way: deadlines, refusals, lost connections, released caches, and transfers
that cannot be stopped.
"""

from __future__ import annotations

import asyncio
import errno
import time

import pytest

from kvpull_async.protocol import frames
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from tests.loop_nodes import eventually
from tests.orders import endings
from tests.unit.push_link import Lent, PushBench
from tests.unit.test_push import bench, failure, sending, sent

__all__ = ["bench", "sent"]

NOT_EXIST, LINK_FAILED = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, LLMStatusCode.LLM_LINK_FAILED


# -- deadlines ---------------------------------------------------------------------------------------------------------


async def test_p3_a_silent_receiver_costs_the_deadline_and_no_more(bench: PushBench) -> None:
    bench.link.silent = True
    began = time.monotonic()
    error = await failure(bench.push(50))
    assert time.monotonic() - began < 5
    assert isinstance(error, LLMTimeoutError)
    assert "while peer:1 took the bytes" in str(error)
    assert "settle" in bench.reports[0].phases
    await eventually(lambda: not bench.entry.busy)
    bench.quiet()
    await bench.next_one()


async def test_p3_the_wait_for_the_link_counts(bench: PushBench) -> None:
    await bench.link.fifo.acquire()
    error = await failure(bench.push(20))
    assert "waited for earlier calls on its link" in str(error)
    assert not error.destination_unsafe
    assert bench.link.lane.heard == []
    bench.link.fifo.release()
    bench.quiet()


async def test_p3_the_way_to_the_peer_counts_and_its_trouble_is_told(bench: PushBench) -> None:
    bench.link.unreachable = True
    error = await failure(bench.push(20))
    assert "being connected: nobody is there" in str(error)
    assert (error.retry_safe, error.destination_unsafe) == (True, False)
    bench.quiet()
    await bench.next_one()


# -- what the receiver says --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "again"),
    [
        (LLMStatusCode.LLM_PARAM_INVALID, LLMException, False),
        (LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, LLMException, True),
        (LLMStatusCode.LLM_LINK_FAILED, LLMException, True),
        (LLMStatusCode.LLM_TIMEOUT, LLMTimeoutError, True),
        (LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT, LLMTimeoutError, True),
    ],
)
async def test_what_the_receiver_refuses_is_the_callers_error(
    bench: PushBench, status: LLMStatusCode, kind: type[LLMException], again: bool
) -> None:
    bench.link.answer = frames.Result(1, int(status), "not like this", unsafe=False)
    error = await failure(bench.push())
    assert type(error) is kind
    assert (str(error), error.status_code) == ("not like this", status)
    assert (error.retry_safe, error.destination_unsafe) == (again, False)
    assert bench.link.lane.cancels == []
    await eventually(lambda: not bench.entry.busy)
    bench.quiet()
    await bench.next_one()


async def test_a_refusal_that_left_something_writing_says_so(bench: PushBench) -> None:
    bench.link.answer = frames.Result(1, int(LINK_FAILED), "stuck", unsafe=True)
    error = await failure(bench.push())
    assert (error.retry_safe, error.destination_unsafe) == (False, True)


async def test_a_status_that_nobody_knows_is_a_failure(bench: PushBench) -> None:
    bench.link.answer = frames.Result(1, 12345, "from a later release", unsafe=False)
    error = await failure(bench.push())
    assert error.status_code == LLMStatusCode.LLM_FAILED


# -- the connection ----------------------------------------------------------------------------------------------------


async def test_a_connection_lost_after_the_offer_leaves_the_destination_unknown(bench: PushBench) -> None:
    bench.link.silent = True
    task = asyncio.ensure_future(bench.push().run())
    await eventually(lambda: bool(bench.link.lane.heard))
    bench.link.lane.lose("the connection broke")
    with pytest.raises(LLMException, match="the connection broke") as caught:
        await task
    assert caught.value.status_code == LINK_FAILED
    assert (caught.value.retry_safe, caught.value.destination_unsafe) == (False, True)
    await eventually(lambda: not bench.entry.busy)
    bench.quiet()
    await bench.next_one()


async def test_a_connection_lost_before_the_offer_is_made_anew(bench: PushBench) -> None:
    first = bench.link.lane
    first.channel.broken = ConnectionResetError("reset")
    first.lose("the connection broke")
    await bench.push().run()
    assert bench.link.lane is not first
    assert (first.heard, len(bench.link.lane.heard)) == ([], 1)
    assert bench.link.received == [bench.expected]
    await eventually(lambda: not bench.entry.busy)
    bench.quiet()


async def test_a_connection_lost_while_the_path_was_made_ready_is_made_anew() -> None:
    bench = PushBench("accepted")
    first = bench.link.lane

    async def ready(_: object) -> None:
        first.lose("the connection broke")

    bench.link.path.ready = ready  # type: ignore[method-assign, assignment]
    await bench.push().run()
    assert bench.link.lane is not first
    assert bench.link.received == [bench.expected]
    await bench.link.close()


async def test_an_offer_that_could_not_be_sent_changes_nothing_at_the_receiver(bench: PushBench) -> None:
    bench.link.lane.channel.broken = ConnectionResetError("reset")
    error = await failure(bench.push())
    assert "reset" in str(error)
    assert error.status_code == LINK_FAILED
    assert (error.retry_safe, error.destination_unsafe) == (True, False)
    await eventually(lambda: not bench.entry.busy)
    bench.quiet()
    await bench.next_one()


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (ConnectionError("there is no payload connection"), LINK_FAILED),
        (RuntimeError("can't start new thread"), LLMStatusCode.LLM_FAILED),
    ],
)
async def test_a_path_that_breaks_when_the_receiver_is_ready_ends_the_push(
    failure: Exception, status: LLMStatusCode
) -> None:
    bench = PushBench("accepted")
    bench.link.path.broken = failure
    bench.link.silent = True
    task = asyncio.ensure_future(bench.push().run())
    await eventually(lambda: bool(bench.link.lane.heard))
    bench.link.lane.heard[0].accepted()
    with pytest.raises(LLMException, match=str(failure)) as caught:
        await task
    assert (caught.value.status_code, caught.value.destination_unsafe) == (status, False)
    assert bench.link.lane.cancels == [1]
    bench.quiet()
    bench.link.path.broken = None
    await bench.next_one()
    await bench.link.close()


# -- the source's memory -----------------------------------------------------------------------------------------------


async def test_a_source_released_while_the_push_waited_is_not_offered(bench: PushBench) -> None:
    await bench.link.fifo.acquire()
    task = asyncio.ensure_future(bench.push().run())
    await asyncio.sleep(0)
    bench.registry.release(bench.entry)
    bench.link.fifo.release()
    with pytest.raises(LLMException, match="was released") as caught:
        await task
    assert caught.value.status_code == NOT_EXIST
    assert bench.link.lane.heard == []
    bench.quiet()


async def test_a_source_that_is_taken_away_cuts_the_push(bench: PushBench) -> None:
    bench.link.silent = bench.link.stuck = True
    task = asyncio.ensure_future(bench.push().run())
    await eventually(lambda: bool(bench.link.lane.heard))
    bench.registry.release(bench.entry)
    bench.entry.cut_pins()
    with pytest.raises(LLMException, match="was released meanwhile") as caught:
        await task
    assert (caught.value.status_code, caught.value.destination_unsafe) == (NOT_EXIST, False)
    assert bench.link.lane.cancels == [1]
    await eventually(lambda: not bench.entry.busy)
    bench.quiet()


async def test_a_source_that_cannot_be_read_is_told_and_not_what_the_receiver_makes_of_it(sent: PushBench) -> None:
    """Which sees its connection end, and nothing more."""
    sent.link.silent = True
    task = asyncio.ensure_future(sent.push().run())
    await eventually(lambda: bool(sent.link.lane.heard))
    (made,) = sent.link.lane.heard
    made.accepted()
    sending(sent).breaks(OSError(errno.EFAULT, "Bad address"))
    made.result.set_result(frames.Result(1, int(LINK_FAILED), "the peer closed the payload connection", unsafe=False))
    with pytest.raises(LLMException, match="the source's memory cannot be read") as caught:
        await task
    error = caught.value
    assert error.status_code == LLMStatusCode.LLM_PARAM_INVALID
    assert (error.retry_safe, error.destination_unsafe) == (False, False)
    await eventually(lambda: not sent.entry.busy)
    sent.quiet()
    await sent.next_one()


async def test_p3_neither_the_receiver_nor_what_is_read_here_holds_a_cancelled_push_longer_than_promised(
    sent: PushBench,
) -> None:
    sent.link.stuck = sent.link.stubborn = sent.link.silent = sent.link.deaf = True
    sent.link.settle_timeout = 0.4
    task = asyncio.ensure_future(sent.push().run())
    await eventually(lambda: bool(sent.link.lane.heard))
    if sent.link.way == "accepted":
        sent.link.lane.heard[0].accepted()
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < 2 * sent.link.settle_timeout
    sending(sent).stuck = False
    await eventually(lambda: not sent.entry.busy)


async def test_p7_memory_that_is_still_read_is_kept_however_the_push_ended(sent: PushBench) -> None:
    sent.link.stuck = sent.link.stubborn = True
    began = time.monotonic()
    error = await failure(sent.push(50))
    assert isinstance(error, LLMTimeoutError)
    assert time.monotonic() - began < 5
    assert sent.entry.busy  # and the link goes on
    assert not sent.link.fifo.busy
    sent.entry.cut_pins()  # nobody is left to be cut
    await asyncio.sleep(0.01)
    assert sent.entry.busy
    sending(sent).stuck = False
    await eventually(lambda: not sent.entry.busy)
    sent.quiet()
    await sent.next_one()


async def test_a_source_without_the_memory_it_was_registered_with_is_not_offered(bench: PushBench) -> None:
    bench.entry.reached = False
    bench.entry.regions = bench.registry.backend.adopt(
        [4096] * 4, tensor_nbytes=1_400_000, placement=bench.entry.regions[0].placement
    )
    error = await failure(bench.push())
    assert "there is no memory at the address" in str(error)
    assert error.status_code == LLMStatusCode.LLM_PARAM_INVALID
    assert bench.link.lane.heard == []
    bench.quiet()


async def test_p1_a_push_is_aborted_before_its_memory_is_told_to_wait_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = PushBench("ticket")
    bench.link.silent = True
    task = asyncio.ensure_future(bench.push().run())
    await eventually(lambda: bool(bench.link.lane.heard))
    heard = endings(monkeypatch, Lent)
    task.cancel()
    await asyncio.sleep(0)
    assert heard[:2] == ["abort", "stop"]
    bench.link.lane.lose("the connection broke")
    with pytest.raises(asyncio.CancelledError):
        await task
    await bench.link.close()
