"""What a lane says together: answers to what came at once, and messages that nobody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from kvpull_async.protocol import frames
from tests.loop_nodes import LaneScene, eventually
from tests.wire import SAMPLES, sample


@pytest.fixture
async def scene() -> AsyncIterator[Any]:
    made: list[LaneScene] = []

    def make(**options: Any) -> LaneScene:
        made.append(LaneScene(**options))
        return made[-1]

    yield make
    for one in made:
        one.lane.abort("the test is over")
        await asyncio.gather(*one.lane.tasks, return_exceptions=True)


def build(number: int) -> frames.Request:
    return msgspec.structs.replace(SAMPLES["Request"].message, request_id=number)


async def test_answers_to_what_came_together_go_out_together(scene: Any) -> None:
    one = await scene(dialer=False).greet()
    one.lane._on_message = lambda message, _: one.lane.post(frames.DoneAck(message.grant_id))
    done = frames.encode(frames.Done(b"g" * 16, "p"))
    one.channel.feed(done + sample("Ping") + done)
    await eventually(lambda: bool(one.channel.sent))
    assert len(one.channel.sent) == 1
    assert len(one.channel.take()) == 3


async def test_what_is_mentioned_goes_with_the_next_message_and_before_it(scene: Any) -> None:
    one = await scene().greet()
    done = frames.Done(b"g" * 16, "p")
    one.lane.mention(done)
    assert one.channel.sent == []
    one.lane.post(frames.Bye())
    assert len(one.channel.sent) == 1
    assert one.channel.take() == [done, frames.Bye()]
    one.lane.mention(done)
    _, data, _ = one.lane.ask(build, b"")
    assert data == frames.encode(done) + frames.encode(build(1))


async def test_what_is_mentioned_does_not_wait_for_long(scene: Any) -> None:
    one = await scene().greet()
    done = frames.Done(b"g" * 16, "p")
    one.lane.mention(done)
    assert await one.heard(frames.Done) == done
    one.lane.mention(done)
    one.lane.abort("over")
    assert one.channel.take() == [done], "a connection that is given up takes it along"
    one.lane.mention(done)
    await asyncio.sleep(0.01)
    assert one.channel.take() == []


@pytest.mark.parametrize("asks", [True, False])
async def test_what_is_mentioned_is_not_taken_back_with_a_message_that_waits(scene: Any, asks: bool) -> None:
    one = await scene().greet()
    done = frames.Done(b"g" * 16, "p")
    one.channel.clogged = True
    one.lane.mention(done)
    if asks:
        _, data, _ = one.lane.ask(build, b"")
        assert data == frames.encode(build(1))
    else:
        sending = asyncio.create_task(one.lane.send(frames.Bye()))
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait([sending])
    assert one.channel.take() == [done]
