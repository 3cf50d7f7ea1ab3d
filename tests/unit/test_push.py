"""One push through a link: what it leaves behind however it ends, at every point where it waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvpull_async._deadline import Deadline, absorb
from kvpull_async.protocol import frames
from kvpull_async.push import Push
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from tests.loop_nodes import eventually
from tests.pull_link import LONG_MS, STEP, counted
from tests.unit.push_link import WAYS, PushBench

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


@pytest.fixture(params=WAYS)
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[PushBench]:
    made = PushBench(request.param)
    yield made
    await made.link.close()


@pytest.fixture(params=["begun", "accepted"])
async def sent(request: pytest.FixtureRequest) -> AsyncIterator[PushBench]:
    """Its bytes go on the data path."""
    made = PushBench(request.param, settle_timeout=0.05)
    yield made
    await made.link.close()


async def failure(push: Push) -> LLMException:
    with pytest.raises(LLMException) as caught:
        await push.run()
    return caught.value


def sending(bench: PushBench) -> Any:
    return bench.link.path.transfers[-1]


# -- success -----------------------------------------------------------------------------------------------------------


async def test_p2_a_push_that_returns_has_given_every_byte_to_the_receiver(bench: PushBench) -> None:
    await bench.push().run()
    assert bench.link.received == [bench.expected]
    assert bench.link.lane.cancels == []
    await eventually(lambda: not bench.entry.busy)
    bench.quiet()


async def test_the_report_tells_bytes_path_and_phases(bench: PushBench) -> None:
    await bench.push().run()
    report = bench.reports[0]
    assert (report.bytes, report.peer, report.path) == (4 * bench.size, "peer:1", "loop")
    assert set(report.phases) == {"queue", "connect", "copy"}


async def test_the_offer_says_what_comes_how_and_within_which_time(bench: PushBench) -> None:
    await bench.push().run()
    (made,) = bench.link.lane.heard
    offer, way = made.offer, bench.link.way
    assert (offer.tensors, offer.per_tensor, offer.identity, offer.entry, offer.first_tensor) == (
        4,
        bench.size,
        3,
        1,
        2,
    )
    assert 0 < offer.remaining_ms <= LONG_MS
    assert (offer.inline, offer.begun, offer.ticket) == (
        way in ("inline", "at once"), way == "begun", b"ticket" if way == "ticket" else None,
    )  # fmt: skip
    assert offer.src_blocks == (5 if way == "ticket" else 0)  # of no use to who does not read by itself
    assert made.tail == (bench.expected if offer.inline else b"rows" * 10 if way == "ticket" else b"")


async def test_every_push_is_offered_under_a_name_of_its_own_which_the_path_forgets(bench: PushBench) -> None:
    for _ in range(2):
        await bench.push().run()
    names = [made.offer.grant_id for made in bench.link.lane.heard]
    assert len(set(names)) == 2
    assert bench.link.path.released == names


@pytest.mark.parametrize("most_rows", [4, 2**40], ids=["few rows", "many rows"])
async def test_bytes_that_ride_on_the_offer_are_gathered_here_or_by_a_worker(most_rows: int) -> None:
    bench = PushBench("inline")
    await bench.push(most_rows=most_rows).run()
    assert bench.link.received == [bench.expected]
    await eventually(lambda: not bench.entry.busy)
    await bench.link.close()


async def test_p5_pushes_of_one_link_run_one_after_another_in_order(bench: PushBench) -> None:
    ended: list[int] = []

    async def run(number: int) -> None:
        await bench.push().run()
        ended.append(number)
        assert len(bench.link.lane.heard) == number + 1

    await asyncio.gather(*(run(number) for number in range(4)))
    assert ended == [0, 1, 2, 3]


async def test_memory_that_is_read_after_the_result_stays_until_it_is_read_no_more(sent: PushBench) -> None:
    """A receiver that says it has everything while bytes still leave: only a hostile one does."""
    sent.link.stuck, sent.link.silent = True, True
    task = asyncio.ensure_future(sent.push().run())
    await eventually(lambda: bool(sent.link.lane.heard))
    (made,) = sent.link.lane.heard
    made.accepted()
    made.result.set_result(frames.Result(1, 0, "", unsafe=False))
    await task
    assert sent.entry.busy
    sent.entry.cut_pins()  # whose push is over
    sending(sent).stuck = False
    await eventually(lambda: not sent.entry.busy)
    sent.quiet()


# -- cancellation at every point ---------------------------------------------------------------------------------------


async def interrupted(
    bench: PushBench, push: Push, *, at: int, again: bool, by: Callable[..., Any]
) -> BaseException | None:
    """Run the push and interrupt it where it waits for the `at`-th time, and with `again` whenever it waits later."""
    waits = 0

    def suspended() -> None:
        nonlocal waits
        waits += 1
        if waits == at or (again and waits > at):
            asyncio.get_running_loop().call_soon(by, task)

    task = asyncio.ensure_future(_run(bench, push, suspended))
    await asyncio.wait([task])
    return asyncio.CancelledError() if task.cancelled() else task.exception()


async def _run(bench: PushBench, push: Push, suspended: Callable[[], None]) -> None:
    """Behind another one, so that it waits for the link too."""
    await bench.link.fifo.acquire()
    before = asyncio.ensure_future(asyncio.sleep(STEP))
    before.add_done_callback(lambda _: bench.link.fifo.release())
    try:
        await counted(push.run(), suspended)
    finally:
        await absorb([before], Deadline.after_ms(LONG_MS))


async def waits_of(bench: PushBench) -> int:
    count = 0

    def suspended() -> None:
        nonlocal count
        count += 1

    await _run(bench, bench.push(), suspended)
    assert count >= 4
    return count


@pytest.mark.parametrize("again", [False, True], ids=["once", "repeatedly"])
@pytest.mark.parametrize("unsafe", [False, True])
async def test_p1_p4_wherever_it_is_cancelled_nothing_is_left_and_the_next_push_works(
    bench: PushBench, *, again: bool, unsafe: bool
) -> None:
    bench.link.unsafe = unsafe
    for at in range(1, await waits_of(bench) + 1):
        heard, cancels = len(bench.link.lane.heard), len(bench.link.lane.cancels)
        error = await interrupted(bench, bench.push(), at=at, again=again, by=asyncio.Task.cancel)
        if error is None:
            assert at > 3  # after the result a cancellation is too late
            continue
        assert isinstance(error, asyncio.CancelledError)
        said = len(bench.link.lane.heard) - heard
        assert len(bench.link.lane.cancels) - cancels <= said  # what was not offered is not withdrawn
        await eventually(lambda: not bench.entry.busy)
        bench.quiet()
        await bench.next_one()
        bench.link.unsafe = unsafe


async def test_wherever_it_is_stopped_the_error_is_the_one_given(bench: PushBench) -> None:
    given = LLMException("the peer has unlinked", status_code=LLMStatusCode.LLM_NOT_YET_LINK, retry_safe=True)
    for at in range(1, await waits_of(bench) + 1):
        push = bench.push()
        error = await interrupted(bench, push, at=at, again=False, by=lambda _, push=push: push.stop(given))
        if error is None:
            continue
        assert isinstance(error, LLMException)
        assert error is not given
        assert (str(error), error.status_code) == (str(given), given.status_code)
        assert (error.retry_safe, error.destination_unsafe) == (True, False)  # the receiver has answered the CANCEL
        await eventually(lambda: not bench.entry.busy)
        bench.quiet()
    await bench.next_one()


@pytest.mark.parametrize("answered", ["before", "after", "after, unsafe", "never"])
@pytest.mark.parametrize("how", ["deadline", "stop"])
async def test_p1_the_destination_is_unsafe_unless_the_receiver_has_said_that_nothing_writes(
    bench: PushBench, how: str, answered: str
) -> None:
    bench.link.silent, bench.link.deaf = True, answered == "never"
    bench.link.unsafe, bench.link.settle_timeout = "unsafe" in answered, 0.05
    push = bench.push(150 if how == "deadline" else LONG_MS)
    task = asyncio.ensure_future(push.run())
    await eventually(lambda: bool(bench.link.lane.heard))
    (made,) = bench.link.lane.heard
    if how == "stop":
        push.stop(LLMException("stop", retry_safe=True))
    if answered == "before" and how == "stop":  # in the same moment
        made.result.set_result(frames.Result(1, int(NOT_EXIST), "gone", unsafe=False))
    elif answered == "before":
        await asyncio.sleep(0.01)
        made.result.set_result(frames.Result(1, int(LLMStatusCode.LLM_TIMEOUT), "the time was over", unsafe=False))
    began = time.monotonic()
    with pytest.raises(LLMException) as caught:
        await task
    assert time.monotonic() - began < 5
    assert isinstance(caught.value, LLMTimeoutError) is (how == "deadline")
    unsafe = answered in ("never", "after, unsafe")
    assert (caught.value.destination_unsafe, caught.value.retry_safe) == (unsafe, not unsafe)
    assert bench.link.lane.cancels == ([] if answered == "before" else [1])
    await eventually(lambda: not bench.entry.busy)
    bench.quiet()
    await bench.next_one()


async def test_an_offer_that_was_never_sent_is_neither_withdrawn_nor_unsafe(bench: PushBench) -> None:
    bench.link.lane.channel.clogged = True
    error = await failure(bench.push(50))
    assert isinstance(error, LLMTimeoutError)
    assert (error.destination_unsafe, error.retry_safe) == (False, True)
    assert (bench.link.lane.heard, bench.link.lane.cancels) == ([], [])
    await eventually(lambda: not bench.entry.busy)
    bench.quiet()
    await bench.next_one()


async def test_a_receiver_that_accepts_too_late_gets_nothing() -> None:
    """ACCEPT and CANCEL have crossed."""
    bench = PushBench("accepted")
    bench.link.silent = True
    push = bench.push()
    task = asyncio.ensure_future(push.run())
    await eventually(lambda: bool(bench.link.lane.heard))
    push.stop(LLMException("stop"))
    await eventually(lambda: bool(bench.link.lane.cancels))
    bench.link.lane.heard[0].accepted()
    with pytest.raises(LLMException, match="stop"):
        await task
    assert bench.link.path.transfers == []
    bench.quiet()
    await bench.next_one()
    await bench.link.close()


@pytest.mark.parametrize("way", ["at once", "inline", "ticket", "begun"])
async def test_a_receiver_that_was_not_asked_whether_it_is_ready_starts_nothing(way: str) -> None:
    bench = PushBench(way)
    bench.link.silent = True
    task = asyncio.ensure_future(bench.push().run())
    await eventually(lambda: bool(bench.link.lane.heard))
    before = list(bench.link.path.transfers)
    bench.link.lane.heard[0].accepted()
    bench.link.lane.heard[0].accepted()
    assert bench.link.path.transfers == before
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: not bench.entry.busy)
    await bench.link.close()
