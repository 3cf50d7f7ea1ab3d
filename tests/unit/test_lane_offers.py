"""Offers and watches on a lane: who hears what of them, and when they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from kvpull_async.protocol import frames
from kvpull_async.protocol.session import WATCHES_LIMIT
from kvpull_async.status import LLMException, LLMStatusCode
from tests.loop_nodes import LaneScene, eventually
from tests.wire import SAMPLES

OK = frames.Result(1, int(LLMStatusCode.LLM_SUCCESS), "", unsafe=False)


@pytest.fixture
async def scene() -> AsyncIterator[LaneScene]:
    made = await LaneScene().greet()
    yield made
    made.lane.abort("the test is over")
    await asyncio.gather(*made.lane.tasks, return_exceptions=True)


def offer(number: int) -> frames.Offer:
    return msgspec.structs.replace(SAMPLES["Offer"].message, request_id=number)


def watch(number: int) -> frames.Watch:
    return msgspec.structs.replace(SAMPLES["Watch"].message, request_id=number)


class Told:
    """Counts how often the peer has said that it is ready."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


async def passed(scene: LaneScene) -> None:
    """What was said so far has been heard."""
    number = scene.lane.turns
    scene.say(frames.Pong(0))
    await eventually(lambda: scene.lane.turns > number)


async def test_an_offer_hears_that_it_is_accepted_and_what_became_of_it(scene: LaneScene) -> None:
    told = Told()
    number, data, result = scene.lane.offer(offer, b"table", b"bytes", accepted=told)
    decoder = frames.Decoder(1 << 20)
    decoder.feed(data)
    assert decoder.next_frame() == frames.Frame(offer(number), b"tablebytes")
    scene.say(frames.Accept(number))
    await eventually(lambda: told.times == 1)
    assert not result.done()
    scene.say(OK)
    assert await result == OK


async def test_each_of_several_offers_has_its_own_answers(scene: LaneScene) -> None:
    told = [Told(), Told()]
    first, second = (scene.lane.offer(offer, accepted=one) for one in told)
    refused = frames.Result(second[0], int(LLMStatusCode.LLM_PARAM_INVALID), "no", unsafe=True)
    scene.say(frames.Accept(second[0]))
    scene.say(refused)
    assert await second[2] == refused
    assert [one.times for one in told] == [0, 1]
    assert not first[2].done()


async def test_an_offer_that_was_given_up_hears_no_more(scene: LaneScene) -> None:
    told = Told()
    number, _, result = scene.lane.offer(offer, accepted=told)
    scene.lane.give_up(number, tell=True)
    assert await scene.heard(frames.Cancel) == frames.Cancel(number)
    scene.say(frames.Accept(number))
    scene.say(OK)
    await passed(scene)
    assert (told.times, result.done()) == (0, False)
    assert not scene.lane.lost.done()


async def test_an_offer_may_be_given_up_without_a_word(scene: LaneScene) -> None:
    number, _, _ = scene.lane.offer(offer, accepted=Told())
    scene.lane.give_up(number, tell=False)
    assert not any(isinstance(message, frames.Cancel) for message in scene.channel.take())


async def test_a_peer_that_accepts_after_its_result_is_not_heard(scene: LaneScene) -> None:
    told = Told()
    _, _, result = scene.lane.offer(offer, accepted=told)
    scene.channel.feed(frames.encode(OK) + frames.encode(frames.Accept(1)) + frames.encode(OK))
    await result
    await passed(scene)
    assert told.times == 0
    assert not scene.lane.lost.done()


async def test_an_answer_of_the_wrong_kind_ends_the_connection_and_so_whoever_waits(scene: LaneScene) -> None:
    """A hostile peer: better lost than waited for."""
    offered = scene.lane.offer(offer, accepted=Told())[2]
    scene.say(frames.Appeared(1))
    with pytest.raises(LLMException, match="Appeared is no answer to what was asked"):
        await asyncio.wait_for(offered, 20)
    assert scene.lane.lost.done()


async def test_an_offer_too_large_is_refused_here_and_takes_no_other_with_it(scene: LaneScene) -> None:
    with pytest.raises(LLMException, match="exceeds the limits") as caught:
        scene.lane.offer(offer, bytes(frames.TAIL_LIMIT), b"x", accepted=Told())
    assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
    number, _, result = scene.lane.offer(offer, accepted=Told())
    scene.say(msgspec.structs.replace(OK, request_id=number))
    await result


async def waiter(scene: LaneScene, name: str = "a key") -> asyncio.Task[None]:
    task = asyncio.ensure_future(scene.lane.appeared(name, watch))
    await asyncio.sleep(0)
    return task


async def test_a_watch_ends_when_its_key_has_appeared(scene: LaneScene) -> None:
    waiting = await waiter(scene)
    assert await scene.heard(frames.Watch) == watch(1)
    await passed(scene)
    assert not waiting.done()
    scene.say(frames.Appeared(1))
    await asyncio.wait_for(waiting, 20)


async def test_those_who_wait_for_one_name_share_a_watch(scene: LaneScene) -> None:
    first, second, third = [await waiter(scene, "one") for _ in range(3)]
    assert await scene.heard(frames.Watch) == watch(1)
    other = await waiter(scene, "other")
    assert await scene.heard(frames.Watch) == watch(2)
    first.cancel()
    await passed(scene)
    assert not second.done()
    scene.say(frames.Appeared(1))
    await asyncio.wait_for(asyncio.gather(second, third), 20)
    assert not other.done()
    scene.say(frames.Appeared(2))
    await asyncio.wait_for(other, 20)
    again = await waiter(scene, "one")
    assert await scene.heard(frames.Watch) == watch(3)
    again.cancel()


async def test_a_watch_that_nobody_waits_for_any_more_is_taken_back_at_the_peer(scene: LaneScene) -> None:
    one, two = await waiter(scene), await waiter(scene)
    one.cancel()
    await passed(scene)
    two.cancel()
    assert await scene.heard(frames.Cancel) == frames.Cancel(1)
    scene.say(frames.Appeared(1))
    await passed(scene)
    assert not scene.lane.lost.done()


async def test_more_names_than_the_peer_takes_are_refused_here(scene: LaneScene) -> None:
    waiting = [await waiter(scene, str(number)) for number in range(WATCHES_LIMIT)]
    with pytest.raises(LLMException, match="waited for") as caught:
        await scene.lane.appeared("one more", watch)
    assert caught.value.status_code == LLMStatusCode.LLM_LINK_BUSY
    assert caught.value.retry_safe
    assert not scene.lane.lost.done()
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    last = await waiter(scene, "one more")
    last.cancel()


async def test_the_end_of_the_connection_ends_offers_and_watches_each_with_an_error_of_its_own(
    scene: LaneScene,
) -> None:
    waiting: list[asyncio.Future[Any]] = [scene.lane.offer(offer, accepted=Told())[2], await waiter(scene)]
    scene.channel.feed(ConnectionResetError("reset"))
    errors = [await asyncio.wait_for(asyncio.gather(one, return_exceptions=True), 20) for one in waiting]
    assert [str(error) for (error,) in errors] == ["the connection broke: reset"] * 2
    assert errors[0][0] is not errors[1][0]
    with pytest.raises(LLMException, match="the connection broke: reset"):
        scene.lane.offer(offer, accepted=Told())
    with pytest.raises(LLMException, match="the connection broke: reset"):
        await scene.lane.appeared("a key", watch)
