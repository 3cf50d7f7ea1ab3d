"""Asking the source, over a lane, whether it still holds the memory of a grant."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvpull_async.protocol import frames
from kvpull_async.status import LLMException, LLMStatusCode
from tests.loop_nodes import LaneScene, eventually

GRANT, OTHER, LATER = b"g" * 16, b"o" * 16, b"l" * 16


@pytest.fixture
async def scene() -> AsyncIterator[LaneScene]:
    made = await LaneScene().greet()
    yield made
    made.lane.abort("the test is over")
    await asyncio.gather(*made.lane.tasks, return_exceptions=True)


@pytest.mark.parametrize("valid", [True, False])
async def test_a_check_is_one_round_trip_and_its_answer_the_sources(scene: LaneScene, *, valid: bool) -> None:
    checking = asyncio.create_task(scene.lane.check(GRANT))
    assert await scene.heard(frames.Check) == frames.Check(GRANT)
    scene.say(frames.Checked(OTHER, not valid))  # of a grant that nobody asked about
    later = asyncio.create_task(scene.lane.check(LATER))
    await scene.heard(frames.Check)
    scene.say(frames.Checked(LATER, valid=True))
    assert await later  # what had been said before it has been taken by now
    assert not checking.done()
    scene.say(frames.Checked(GRANT, valid))
    assert await checking is valid


async def test_each_answer_reaches_who_asked(scene: LaneScene) -> None:
    one, other = (asyncio.create_task(scene.lane.check(grant)) for grant in (GRANT, OTHER))
    await asyncio.sleep(0)
    scene.say(frames.Checked(OTHER, valid=False))
    scene.say(frames.Checked(GRANT, valid=True))
    scene.say(frames.Checked(GRANT, valid=False))  # said twice: the first counts
    assert (await one, await other) == (True, False)


async def test_an_answer_that_comes_after_its_asker_has_gone_is_dropped(scene: LaneScene) -> None:
    checking = asyncio.create_task(scene.lane.check(GRANT))
    await scene.heard(frames.Check)
    checking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await checking
    scene.say(frames.Checked(GRANT, valid=True))
    again = asyncio.create_task(scene.lane.check(OTHER))
    await scene.heard(frames.Check)
    scene.say(frames.Checked(OTHER, valid=True))
    assert await again
    assert not scene.lane.lost.done()


async def test_p2_a_connection_that_is_lost_says_nothing_of_the_memory(scene: LaneScene) -> None:
    checking = asyncio.create_task(scene.lane.check(GRANT))
    await scene.heard(frames.Check)
    scene.channel.feed(ConnectionResetError("reset by peer"))
    with pytest.raises(LLMException, match="the connection broke: reset by peer") as caught:
        await checking
    assert (caught.value.status_code, caught.value.retry_safe) == (LLMStatusCode.LLM_LINK_FAILED, True)
    with pytest.raises(LLMException, match="reset by peer"):
        await scene.lane.check(GRANT)


async def test_a_check_goes_to_what_serves_on_the_other_side() -> None:
    serving = await LaneScene(dialer=False).greet()
    serving.say(frames.Check(GRANT))
    await eventually(lambda: serving.received == [(frames.Check(GRANT), b"")])
    serving.lane.post(frames.Checked(GRANT, valid=True))
    assert await serving.heard(frames.Checked) == frames.Checked(GRANT, True)
    serving.lane.abort("the test is over")
    await asyncio.gather(*serving.lane.tasks, return_exceptions=True)
