"""A pull whose source cannot go on after its grant, and how long a pull lets its own memory wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvpull_async import pull as pull_module
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from tests.loop_nodes import eventually
from tests.orders import endings
from tests.pull_link import LONG_MS, STREAMED, Bench, LoopTransfer

BROKEN = LLMStatusCode.LLM_DEVICE_MEM_ERROR


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench(inline_limit=STREAMED, settle_timeout=0.05)
    yield made
    await made.link.close()


async def begun(bench: Bench, timeout_ms: float = LONG_MS) -> asyncio.Task[None]:
    """A pull whose bytes are on their way."""
    bench.link.stuck = True
    task = asyncio.ensure_future(bench.pull(timeout_ms).run())
    await eventually(lambda: bool(bench.link.path.transfers))
    return task


@pytest.mark.parametrize("first", ["the break", "the refusal"])
async def test_p2_the_source_says_why_it_has_broken_off_whichever_comes_first(bench: Bench, first: str) -> None:
    task = await begun(bench)
    steps = [
        lambda: bench.link.path.transfers[0].fail(ConnectionResetError("reset")),
        lambda: bench.link.lane.refusals[0].set_result(LLMException("the device is gone", status_code=BROKEN)),
    ]
    for step in steps if first == "the break" else steps[::-1]:
        step()
        await asyncio.sleep(0.02)
    with pytest.raises(LLMException, match="the device is gone") as caught:
        await task
    assert caught.value.status_code is BROKEN
    assert not caught.value.destination_unsafe
    bench.quiet()
    await bench.canary()
    await bench.next_one()


async def test_a_source_that_knows_no_more_than_this_side_changes_nothing(bench: Bench) -> None:
    task = await begun(bench)
    lost = LLMException("the transfer broke there", status_code=LLMStatusCode.LLM_LINK_FAILED)
    bench.link.lane.refusals[0].set_result(lost)
    bench.link.path.transfers[0].fail(ConnectionResetError("reset"))
    with pytest.raises(LLMException, match="broke: reset"):
        await task


async def test_p10_a_break_near_the_deadline_is_told_as_a_break(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason, which does not come, is not waited for until all that can be said is that time is over."""
    monkeypatch.setattr(pull_module, "_WHY", 60.0)
    task = await begun(bench, timeout_ms=2000)
    bench.link.path.transfers[0].fail(ConnectionResetError("reset"))
    with pytest.raises(LLMException, match="broke: reset") as caught:
        await task
    assert not isinstance(caught.value, LLMTimeoutError)


async def test_a_pull_that_ends_well_listens_no_longer(bench: Bench) -> None:
    await bench.pull().run()
    assert [refusal.cancelled() for refusal in bench.link.lane.refusals] == [True]


async def test_p2_memory_is_waited_for_until_the_deadline_or_the_end_of_the_pull(bench: Bench) -> None:
    bench.link.stuck = True
    pull = bench.pull()
    task = asyncio.ensure_future(pull.run())
    await eventually(lambda: bench.until is not None)
    until = bench.until
    assert until is not None
    assert (until.deadline, until.stopped) == (pull._deadline, False)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert until.stopped


async def test_p1_a_pull_is_aborted_before_its_memory_is_told_to_wait_no_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await begun(bench)
    heard = endings(monkeypatch, LoopTransfer)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert heard == ["abort", "stop"]


async def test_a_wait_for_the_device_that_was_too_long_is_no_broken_connection(bench: Bench) -> None:
    """LLMTimeoutError is an OSError, too: nobody is asked why the connection broke."""
    task = await begun(bench)
    transfer = bench.link.path.transfers[0]
    transfer.fail(LLMTimeoutError("the device did not answer in time", status_code=LLMStatusCode.LLM_TIMEOUT))
    await asyncio.wait([transfer.settled])
    for _ in range(20):  # turns: nothing is waited for by the clock
        await asyncio.sleep(0)
    assert task.done()
    with pytest.raises(LLMTimeoutError, match="the device did not answer"):
        await task
