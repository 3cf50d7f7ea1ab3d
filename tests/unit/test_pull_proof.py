"""Pulls over a path whose bytes count only once the source has confirmed that it held them until they were read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvpull_async.protocol import frames
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from tests.loop_nodes import eventually
from tests.pull_link import GRANT_ID, INLINE, STREAMED, UNPROVEN, Bench

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench(inline_limit=STREAMED)
    made.link.ticket = UNPROVEN
    yield made
    await made.link.close()


async def test_p2_the_pull_has_happened_once_the_source_has_confirmed_it(bench: Bench) -> None:
    bench.link.valid = None
    pulling = asyncio.ensure_future(bench.pull().run())
    await eventually(lambda: bench.link.lane.checked == [GRANT_ID])
    assert bench.link.path.transfers[0].settled.done()  # asked after the last byte, not before
    for _ in range(50):  # nothing here needs a thread or the clock: what can happen happens in turns of the loop
        await asyncio.sleep(0)
    assert not pulling.done()
    assert bench.link.done == []
    bench.link.lane.confirm(valid=True)
    await pulling
    assert bench.landed()
    assert bench.link.done == [frames.Done(GRANT_ID, "pull-0")]
    bench.quiet()


async def test_nobody_is_told_of_what_is_not_final_before_the_confirmation(bench: Bench) -> None:
    told: list[int] = []
    bench.landed_bytes = told.append
    await bench.pull().run()
    assert bench.landed()
    assert bench.link.path.expected[-1].span.landed is None
    assert told == [], "by the memory itself"


async def test_who_asks_is_told_of_what_is_final_at_once(bench: Bench) -> None:
    told: list[int] = []
    bench.landed_bytes, bench.link.ticket = told.append, b"as good as sent"
    await bench.pull().run()
    assert bench.link.path.expected[-1].span.landed is not None
    assert told[-1] == 4 * bench.size


async def test_p2_bytes_of_memory_that_was_taken_away_are_an_error_and_consume_no_key(bench: Bench) -> None:
    bench.link.valid = False
    with pytest.raises(LLMException, match="took its cache away while it was being read") as caught:
        await bench.pull().run()
    error = caught.value
    assert (error.status_code, error.retry_safe, error.destination_unsafe) == (NOT_EXIST, True, False)
    assert bench.link.done == []
    assert bench.link.lane.given_up == [1]
    bench.quiet()
    await bench.canary()
    await bench.next_one()


async def test_p2_a_connection_that_is_lost_before_the_confirmation_fails_the_pull(bench: Bench) -> None:
    lost = LLMException("the connection broke", status_code=LLMStatusCode.LLM_LINK_FAILED, retry_safe=True)
    bench.link.valid = lost
    with pytest.raises(LLMException, match="the connection broke") as caught:
        await bench.pull().run()
    assert (caught.value.status_code, caught.value.retry_safe) == (LLMStatusCode.LLM_LINK_FAILED, True)
    assert bench.link.done == []
    bench.quiet()
    await bench.canary()
    await bench.next_one()


async def test_p3_a_confirmation_that_does_not_come_costs_the_deadline(bench: Bench) -> None:
    bench.link.valid = None
    with pytest.raises(LLMTimeoutError, match="while bytes came from peer:1") as caught:
        await bench.pull(200).run()
    assert bench.link.lane.checked == [GRANT_ID]
    assert (caught.value.retry_safe, caught.value.destination_unsafe) == (True, False)
    assert bench.link.done == []
    bench.quiet()
    await bench.canary()
    await bench.next_one()


@pytest.mark.parametrize("how", ["cancelled", "stopped", "released"])
async def test_p1_a_pull_that_ends_while_it_waits_for_the_confirmation_has_not_happened(bench: Bench, how: str) -> None:
    bench.link.valid = None
    pull = bench.pull()
    pulling = asyncio.ensure_future(pull.run())
    await eventually(lambda: bool(bench.link.lane.checked))
    if how == "cancelled":
        pulling.cancel()
    elif how == "stopped":
        pull.stop(LLMException("the peer has unlinked", status_code=LLMStatusCode.LLM_NOT_YET_LINK))
    else:
        bench.entry.cut_pins()
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else LLMException):
        await pulling
    assert bench.link.done == []
    assert bench.link.lane.given_up == [1]
    bench.quiet()
    await bench.canary()
    await bench.next_one()


@pytest.mark.parametrize("ticket", [None, b"", b"as good as sent"])
async def test_a_path_that_can_tell_by_itself_asks_nobody(bench: Bench, ticket: bytes | None) -> None:
    bench.link.ticket, bench.link.valid = ticket, None
    await bench.pull().run()
    assert bench.landed()
    assert bench.link.lane.checked == []
    assert [expected.ticket for expected in bench.link.path.expected] == [ticket]


async def test_what_is_inside_the_answer_needs_no_confirmation() -> None:
    made = Bench(inline_limit=INLINE)
    made.link.granted, made.link.valid = {"ticket": UNPROVEN}, None
    await made.pull().run()
    assert made.landed()
    assert made.link.lane.checked == []
    await made.link.close()


async def test_the_path_is_told_what_to_read_and_where_to_before_it_fetches(bench: Bench) -> None:
    bench.link.granted = {"start": 77}
    await bench.pull().run()
    (expected,) = bench.link.path.expected
    assert (expected.grant_id, expected.ticket) == (GRANT_ID, UNPROVEN)
    assert expected.reading().tolist() == [[tensor, 77, bench.size] for tensor in range(4)]
    assert expected.span.regions == bench.entry.regions
    assert expected.span.rows().tolist() == [[tensor, 700_000, bench.size] for tensor in range(4)]
