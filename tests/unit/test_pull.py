"""One pull through a link: what it leaves behind however it ends, at every point where it waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvpull_async._deadline import Deadline, absorb
from kvpull_async.protocol import frames
from kvpull_async.pull import Pull
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from tests.loop_nodes import eventually
from tests.pull_link import GRANT_ID, INLINE, LONG_MS, STEP, STREAMED, UNPROVEN, Bench, counted

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


@pytest.fixture(params=["inline", "streamed", "to be confirmed"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    made = Bench(inline_limit=INLINE if request.param == "inline" else STREAMED)
    made.link.ticket = UNPROVEN if request.param == "to be confirmed" else None
    yield made
    await made.link.close()


@pytest.fixture
async def streamed() -> AsyncIterator[Bench]:
    made = Bench(inline_limit=STREAMED, settle_timeout=0.05)
    yield made
    await made.link.close()


async def failure(pull: Pull) -> LLMException:
    with pytest.raises(LLMException) as caught:
        await pull.run()
    return caught.value


# -- success -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wants_done", [True, False])
async def test_p2_a_pull_that_returns_has_delivered_every_byte_and_says_done_if_asked(
    bench: Bench, *, wants_done: bool
) -> None:
    bench.link.granted = {"wants_done": wants_done}
    await bench.pull().run()
    assert bench.landed()
    assert bench.link.done == ([frames.Done(GRANT_ID, "pull-0")] if wants_done else [])
    assert bench.link.lane.given_up == []
    bench.quiet()


async def test_the_report_tells_bytes_path_and_phases(bench: Bench) -> None:
    await bench.pull().run()
    report = bench.reports[0]
    assert (report.bytes, report.peer, report.path) == (4 * bench.size, "peer:1", "loop")
    assert set(report.phases) == {"queue", "connect", "request", "copy"}


async def test_the_request_carries_its_table_and_the_time_that_is_left(bench: Bench) -> None:
    await bench.pull().run()
    assert bench.link.lane.tables == [b"table"]
    assert 0 < bench.link.lane.requests[0].remaining_ms <= LONG_MS


async def test_memory_that_a_loop_cannot_touch_is_filled_by_a_worker() -> None:
    bench = Bench(inline_limit=INLINE)
    bench.entry.direct = False
    await bench.pull().run()
    assert bench.landed()
    assert bench.link.workers.apart._threads
    assert not bench.link.workers._threads
    await bench.link.close()


async def test_p5_pulls_of_one_link_run_one_after_another_in_order(bench: Bench) -> None:
    ended: list[int] = []

    async def run(number: int) -> None:
        await bench.pull().run()
        ended.append(number)
        assert len(bench.link.lane.requests) == number + 1

    await asyncio.gather(*(run(number) for number in range(4)))
    assert ended == [0, 1, 2, 3]


# -- cancellation at every point ---------------------------------------------------------------------------------------


async def interrupted(
    bench: Bench, pull: Pull, *, at: int, again: bool, by: Callable[..., Any]
) -> BaseException | None:
    """Run the pull and interrupt it where it waits for the `at`-th time, and with `again` whenever it waits later."""
    waits = 0

    def suspended() -> None:
        nonlocal waits
        waits += 1
        if waits == at or (again and waits > at):
            asyncio.get_running_loop().call_soon(by, task)

    task = asyncio.ensure_future(_run(bench, pull, suspended))
    await asyncio.wait([task])
    return asyncio.CancelledError() if task.cancelled() else task.exception()


async def _run(bench: Bench, pull: Pull, suspended: Callable[[], None]) -> None:
    """Behind another one, so that it waits for the link too."""
    await bench.link.fifo.acquire()
    before = asyncio.ensure_future(asyncio.sleep(STEP))
    before.add_done_callback(lambda _: bench.link.fifo.release())
    try:
        await counted(pull.run(), suspended)
    finally:
        await absorb([before], Deadline.after_ms(LONG_MS))


async def waits_of(bench: Bench) -> int:
    count = 0

    def suspended() -> None:
        nonlocal count
        count += 1

    await _run(bench, bench.pull(), suspended)
    assert count >= 4
    return count


@pytest.mark.parametrize("again", [False, True], ids=["once", "repeatedly"])
async def test_p1_p4_wherever_it_is_cancelled_nothing_is_left_and_the_next_pull_works(
    bench: Bench, *, again: bool
) -> None:
    for at in range(1, await waits_of(bench) + 1):
        bench.memory[:], done = 0, len(bench.link.done)
        error = await interrupted(bench, bench.pull(), at=at, again=again, by=asyncio.Task.cancel)
        if error is None:
            assert at > 2  # after the last byte a cancellation is too late
            continue
        assert isinstance(error, asyncio.CancelledError)
        assert len(bench.link.done) == done  # P2: what fails consumes no key
        bench.quiet()
        await bench.canary()
        await bench.next_one()


async def test_wherever_it_is_stopped_the_error_is_the_one_given(bench: Bench) -> None:
    given = LLMException("the peer has unlinked", status_code=LLMStatusCode.LLM_NOT_YET_LINK, retry_safe=True)
    for at in range(1, await waits_of(bench) + 1):
        pull = bench.pull()
        error = await interrupted(bench, pull, at=at, again=False, by=lambda _, pull=pull: pull.stop(given))
        if error is None:
            continue
        assert isinstance(error, LLMException)
        assert error is not given
        assert (str(error), error.status_code, error.retry_safe) == (str(given), given.status_code, True)
        bench.quiet()
        await bench.canary()
    await bench.next_one()


async def test_a_stopped_pull_leaves_its_task_uncancelled(bench: Bench) -> None:
    bench.link.silent = True

    async def caller() -> str:
        with pytest.raises(LLMException, match="stop"):
            await pull.run()
        await asyncio.sleep(0)  # would raise again if the cancellation had been left
        return "went on"

    pull = bench.pull()
    task = asyncio.ensure_future(caller())
    await eventually(lambda: bool(bench.link.lane.requests))
    pull.stop(LLMException("stop"))
    assert await task == "went on"


async def test_stopping_what_has_happened_changes_nothing(bench: Bench) -> None:
    pull = bench.pull()
    await pull.run()
    pull.stop(LLMException("too late"))
    await asyncio.sleep(0)
    assert bench.landed()


async def test_a_cancelled_request_is_given_up_and_so_is_a_path_with_bytes_nobody_takes(bench: Bench) -> None:
    bench.link.silent = True
    task = asyncio.ensure_future(bench.pull().run())
    await eventually(lambda: bool(bench.link.lane.requests))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.link.lane.given_up == [1]
    assert bench.link.path.given_up == (0 if bench.link.inline_limit else 1)


# -- deadlines ---------------------------------------------------------------------------------------------------------


async def test_p3_a_silent_peer_costs_the_deadline_and_no_more(bench: Bench) -> None:
    bench.link.silent = True
    began = time.monotonic()
    error = await failure(bench.pull(50))
    assert time.monotonic() - began < 5
    assert isinstance(error, LLMTimeoutError)
    assert "peer:1 did not answer" in str(error)
    assert (error.retry_safe, error.destination_unsafe) == (True, False)
    bench.quiet()
    await bench.canary()
    await bench.next_one()


async def test_p3_the_wait_for_the_link_counts(bench: Bench) -> None:
    await bench.link.fifo.acquire()
    error = await failure(bench.pull(20))
    assert "waited for earlier ones" in str(error)
    assert bench.link.lane.requests == []
    bench.link.fifo.release()
    bench.quiet()


async def test_p3_the_way_to_the_peer_counts_and_its_trouble_is_told(bench: Bench) -> None:
    bench.link.unreachable = True
    error = await failure(bench.pull(20))
    assert "being connected: nobody is there" in str(error)
    bench.quiet()
    await bench.next_one()


async def test_p1_a_transfer_is_aborted_and_waited_for_when_the_deadline_passes(streamed: Bench) -> None:
    streamed.link.stuck = True
    error = await failure(streamed.pull(50))
    assert isinstance(error, LLMTimeoutError)
    assert "bytes came from" in str(error)
    (transfer,) = streamed.link.path.transfers
    assert transfer.settled.done()
    assert not error.destination_unsafe
    assert "settle" in streamed.reports[0].phases
    streamed.quiet()
    await streamed.canary()
    await streamed.next_one()


# -- what cannot be stopped --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deadline", "cancellation"])
async def test_p1_what_cannot_be_stopped_quarantines_the_destination_until_it_is_over(
    streamed: Bench, how: str
) -> None:
    streamed.link.stuck = streamed.link.stubborn = True
    began = time.monotonic()
    task = asyncio.ensure_future(streamed.pull(100 if how == "deadline" else LONG_MS).run())
    await eventually(lambda: bool(streamed.link.path.transfers))
    if how == "cancellation":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        with pytest.raises(LLMTimeoutError) as caught:
            await task
        assert caught.value.destination_unsafe
        assert not caught.value.retry_safe
    assert time.monotonic() - began < 5
    assert streamed.entry.quarantined
    assert streamed.link.quarantined == [streamed.entry]
    assert not streamed.link.fifo.busy
    streamed.link.path.transfers[0].stuck = False
    assert await streamed.entry.idle(Deadline.after_ms(LONG_MS), writers_only=True)
    streamed.quiet()
    await streamed.canary()
    await streamed.next_one()


async def test_a_pull_into_a_quarantined_destination_waits_outside_the_link(streamed: Bench) -> None:
    writer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    streamed.entry.quarantine(writer)
    error = await failure(streamed.pull(20))
    assert "its destination was quarantined" in str(error)
    waiting = asyncio.ensure_future(streamed.pull().run())
    await asyncio.sleep(0.01)
    assert not streamed.link.fifo.busy
    assert not waiting.done()
    writer.set_result(None)
    await waiting
    assert streamed.landed()


# -- other ends --------------------------------------------------------------------------------------------------------


async def test_a_refusal_is_the_callers_error_and_touches_nothing(bench: Bench) -> None:
    bench.link.refusal = LLMException("not here", status_code=NOT_EXIST, retry_safe=True)
    error = await failure(bench.pull())
    assert (str(error), error.status_code, error.retry_safe) == ("not here", NOT_EXIST, True)
    assert not bench.memory.any()
    assert bench.link.path.given_up == 0
    bench.quiet()
    await bench.next_one()


async def test_a_destination_released_while_the_pull_waited_is_not_written(bench: Bench) -> None:
    await bench.link.fifo.acquire()
    task = asyncio.ensure_future(bench.pull().run())
    await asyncio.sleep(0)
    bench.registry.release(bench.entry)
    bench.link.fifo.release()
    with pytest.raises(LLMException, match="was released") as caught:
        await task
    assert caught.value.status_code == NOT_EXIST
    bench.quiet()
    await bench.canary()


async def test_a_destination_that_is_taken_away_cuts_the_pull(streamed: Bench) -> None:
    streamed.link.stuck = True
    task = asyncio.ensure_future(streamed.pull().run())
    await eventually(lambda: bool(streamed.link.path.transfers))
    streamed.registry.release(streamed.entry)
    streamed.entry.cut_pins()
    with pytest.raises(LLMException, match="was released meanwhile") as caught:
        await task
    assert caught.value.status_code == NOT_EXIST
    streamed.quiet()
    await streamed.canary()


async def test_a_transfer_that_breaks_is_the_links_trouble(streamed: Bench) -> None:
    streamed.link.stuck = True
    task = asyncio.ensure_future(streamed.pull().run())
    await eventually(lambda: bool(streamed.link.path.transfers))
    streamed.link.path.transfers[0].fail(ConnectionResetError("reset"))
    with pytest.raises(LLMException, match="broke: reset") as caught:
        await task
    assert isinstance(caught.value.__cause__, ConnectionResetError)
    assert caught.value.retry_safe
    streamed.quiet()
    await streamed.canary()
    await streamed.next_one()


async def test_a_grant_that_reaches_outside_of_the_sources_cache_is_the_sources_fault(streamed: Bench) -> None:
    streamed.link.stuck = True
    task = asyncio.ensure_future(streamed.pull().run())
    await eventually(lambda: bool(streamed.link.path.transfers))
    streamed.link.path.transfers[0].fail(ValueError("bytes 64..128 are outside"))
    with pytest.raises(LLMException, match="the source granted what its cache does not have: bytes 64") as caught:
        await task
    assert (caught.value.status_code, caught.value.retry_safe) == (LLMStatusCode.LLM_FAILED, False)
    streamed.quiet()
    await streamed.canary()
    await streamed.next_one()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"granted": {"per_tensor": 1}}, "does not fit"),
        ({"payload": b"short"}, "came with it"),
        ({"refusal": ZeroDivisionError("a bug")}, "internal error: ZeroDivisionError"),
    ],
)
async def test_a_wrong_answer_fails_the_pull_and_nothing_else(changes: dict[str, Any], text: str) -> None:
    bench = Bench(inline_limit=INLINE)
    for name, value in changes.items():
        setattr(bench.link, name, value)
    error = await failure(bench.pull())
    assert text in str(error)
    assert not bench.memory.any()
    assert bench.link.done == []
    bench.quiet()
    await bench.next_one()
    await bench.link.close()
