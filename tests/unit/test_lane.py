"""One connection driven over a channel that the test controls: greeting, answers, heartbeats, silence, and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.protocol import frames
from kvpull_async.protocol.session import FRAMES_AT_ONCE, State
from kvpull_async.status import LLMException, LLMStatusCode
from tests.loop_nodes import TOKEN, LaneScene, ScriptedChannel, event_log, eventually
from tests.wire import PLAIN, SAMPLES, sample


def soon() -> Deadline:
    return Deadline.after_ms(20_000)


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


def grant(number: int) -> frames.Grant:
    return msgspec.structs.replace(SAMPLES["Grant"].message, request_id=number)


# --- the greeting ---


async def test_two_lanes_greet_each_other(scene: Any) -> None:
    dialling, accepting = scene(), scene(dialer=False)

    async def carry(source: ScriptedChannel, target: ScriptedChannel) -> None:
        while True:
            for data in source.sent:
                target.feed(data)
            source.sent.clear()
            await asyncio.sleep(0)

    dialling.lane.session._asked_id = 1  # the accepting side of this scene is cluster 1 too
    wires = [
        asyncio.create_task(carry(one.channel, other.channel))
        for one, other in ((dialling, accepting), (accepting, dialling))
    ]
    dialled = asyncio.create_task(dialling.lane.dial(soon()))
    peer = await accepting.lane.accept(soon())
    assert (peer.cluster_id, peer.lane) == (1, 0)
    assert not dialled.done()
    ready = accepting.lane.welcome(token=TOKEN, offers=[("tcp", b"port 7")])
    assert (ready.token, ready.paths) == (TOKEN, ("tcp",))
    welcomed = await dialled
    assert (welcomed.token, welcomed.offers) == (TOKEN, (("tcp", b"port 7"),))
    for wire in wires:
        wire.cancel()
    await asyncio.gather(*wires, return_exceptions=True)


@pytest.mark.parametrize("dialer", [True, False])
async def test_a_silent_peer_ends_the_greeting_at_its_deadline(scene: Any, dialer: bool) -> None:
    lane = scene(dialer=dialer).lane
    with pytest.raises(asyncio.TimeoutError):
        await (lane.dial if dialer else lane.accept)(Deadline.after_ms(30))


async def test_a_refusal_names_who_refused_and_needs_no_farewell(scene: Any) -> None:
    """The refused side hangs up at once: the refusing one waits for just that."""
    one = scene()
    one.say(frames.Reject(int(LLMStatusCode.LLM_ALREADY_LINK), "no room"))
    with pytest.raises(LLMException, match="scripted refused: no room") as caught:
        await one.lane.dial(soon())
    assert caught.value.status_code == LLMStatusCode.LLM_ALREADY_LINK
    assert one.channel.reads == 1


async def test_the_refusing_side_waits_until_the_peer_has_hung_up(scene: Any) -> None:
    one = scene(dialer=False)
    one.say(msgspec.structs.replace(PLAIN["Hello"], asked=1))
    one.say(PLAIN["Prove"])
    await one.lane.accept(soon())
    refusing = asyncio.create_task(one.lane.reject(LLMStatusCode.LLM_LINK_FAILED, "no room"))
    reject = await one.heard(frames.Reject)
    assert isinstance(reject, frames.Reject)
    assert reject.reason == "no room"
    assert not refusing.done()
    one.channel.feed(b"more of whatever", b"")
    await refusing


@pytest.mark.parametrize("end", [b"", ConnectionResetError("reset")], ids=["end of stream", "reset"])
async def test_a_connection_that_ends_during_the_greeting(scene: Any, end: bytes | OSError) -> None:
    one = scene()
    one.channel.feed(end)
    expected: Any = LLMException if end == b"" else ConnectionResetError
    with pytest.raises(expected, match=r"reset|closed the connection during the greeting"):
        await one.lane.dial(soon())


async def test_a_peer_that_talks_on_before_it_was_answered_is_not_let_in(scene: Any) -> None:
    one = scene(dialer=False)
    hello = msgspec.structs.replace(PLAIN["Hello"], asked=1)
    one.channel.feed(frames.encode(hello) + frames.encode(PLAIN["Prove"]) + sample("Ping"))
    await one.lane.accept(soon())
    with pytest.raises(LLMException, match="did not wait for the answer") as caught:
        one.lane.welcome(token=TOKEN)
    assert caught.value.status_code == LLMStatusCode.LLM_LINK_FAILED


# --- requests and answers ---


async def test_each_answer_reaches_who_asked(scene: Any) -> None:
    one = await scene().greet()
    first, data, granted = one.lane.ask(build, b"a table!")
    second, _, refused = one.lane.ask(build, b"")
    assert (first, second) == (1, 2)
    decoder = frames.Decoder(1 << 20)
    decoder.feed(data)
    sent = decoder.next_frame()
    assert sent is not None
    assert (sent.message, sent.tail) == (build(1), b"a table!")
    one.say(frames.Refuse(second, int(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST), "not here"))
    one.say(grant(first), b"bytes")
    assert await granted == (grant(first), b"bytes")
    with pytest.raises(LLMException, match="not here") as caught:
        await refused
    assert caught.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert caught.value.peer == "scripted"
    assert caught.value.retry_safe


@pytest.mark.parametrize("number", [0, -1, 4711, 0xFFFFFFFF])
async def test_a_refusal_is_never_a_success_whatever_its_number(scene: Any, number: int) -> None:
    one = await scene().greet()
    request_id, _, answer = one.lane.ask(build, b"")
    one.say(frames.Refuse(request_id, number, "no"))
    with pytest.raises(LLMException, match="no") as caught:
        await answer
    assert caught.value.status_code is LLMStatusCode.LLM_FAILED


async def test_a_request_given_up_is_cancelled_at_the_peer_and_its_answer_dropped(scene: Any) -> None:
    one = await scene().greet()
    request_id, _, answer = one.lane.ask(build, b"")
    one.lane.give_up(request_id, tell=True)
    assert await one.heard(frames.Cancel) == frames.Cancel(request_id)
    one.say(grant(request_id))
    other, _, next_answer = one.lane.ask(build, b"")
    one.say(grant(other))
    await next_answer
    assert not answer.done()
    assert one.lane.session.late_answers == 1
    one.lane.give_up(other, tell=False)
    assert one.channel.take() == []


async def test_a_table_too_large_is_the_callers_fault_and_spoils_nothing(scene: Any) -> None:
    one = await scene().greet()
    with pytest.raises(LLMException, match="exceeds the limits") as caught:
        one.lane.ask(build, bytes(frames.TAIL_LIMIT + 8))
    assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
    request_id, _, answer = one.lane.ask(build, b"")
    one.say(grant(request_id))
    await answer


async def test_requests_go_to_the_server_with_their_tails(scene: Any) -> None:
    one = await scene(dialer=False).greet()
    for message in (build(1), frames.Cancel(1), frames.Done(b"g" * 16, "p"), frames.Bye()):
        one.say(message, b"table" if isinstance(message, frames.Request) else b"")
    await eventually(lambda: len(one.received) == 4)
    assert one.received[0] == (build(1), b"table")
    assert [type(message) for message, _ in one.received[1:]] == [frames.Cancel, frames.Done, frames.Bye]


async def test_a_peer_that_only_asks_and_never_reads_is_not_read_either(scene: Any) -> None:
    """Its answers would pile up here without a bound."""
    one = await scene(dialer=False).greet()
    one.channel.clogged = True
    one.say(build(1))
    await eventually(lambda: len(one.received) == 1)
    reads = one.channel.reads
    for number in range(2, 10):
        one.say(build(number))
    await asyncio.sleep(0.05)
    assert len(one.received) == 1
    assert one.channel.reads == reads
    one.channel.unclog()
    await eventually(lambda: len(one.received) == 9)


async def test_p6_a_flood_of_small_frames_leaves_others_their_turns(scene: Any) -> None:
    one = await scene(dialer=False).greet()
    one.channel.feed(sample("Cancel") * 5000)
    turns = 0
    while len(one.received) < 5000:
        before = len(one.received)
        await asyncio.sleep(0)
        assert len(one.received) - before <= FRAMES_AT_ONCE
        turns += 1
    assert turns >= 5000 / FRAMES_AT_ONCE


async def test_the_asking_side_reads_on_while_its_own_bytes_wait(scene: Any) -> None:
    """Otherwise both sides could wait for each other to read."""
    one = await scene().greet()
    request_id, _, answer = one.lane.ask(build, b"")
    one.channel.clogged = True
    one.say(grant(request_id))
    await asyncio.wait_for(answer, 20)


# --- heartbeats ---


async def test_ping_is_one_round_trip(scene: Any) -> None:
    one = await scene().greet()
    pinging = asyncio.create_task(one.lane.ping(soon()))
    ping = await one.heard(frames.Ping)
    assert isinstance(ping, frames.Ping)
    one.say(frames.Pong(ping.number + 1))
    one.say(frames.Pong(0))
    await asyncio.sleep(0.02)
    assert not pinging.done()
    one.say(frames.Pong(ping.number))
    await pinging


async def test_a_ping_without_an_answer_ends_at_its_deadline_and_the_next_one_works(scene: Any) -> None:
    one = await scene().greet()
    with pytest.raises(asyncio.TimeoutError):
        await one.lane.ping(Deadline.after_ms(30))
    first = await one.heard(frames.Ping)
    pinging = asyncio.create_task(one.lane.ping(soon()))
    second = await one.heard(frames.Ping)
    one.say(frames.Pong(first.number))
    one.say(frames.Pong(second.number))
    await pinging


async def test_a_ping_is_answered(scene: Any) -> None:
    one = await scene(dialer=False).greet()
    one.say(frames.Ping(77))
    assert await one.heard(frames.Pong) == frames.Pong(77)


async def test_both_sides_beat_so_that_neither_depends_on_how_often_the_other_does(scene: Any) -> None:
    for dialer in (True, False):
        one = await scene(dialer=dialer, heartbeat=0.01).greet()
        assert await one.heard(frames.Ping) == frames.Ping(0)
        assert await one.heard(frames.Ping) == frames.Ping(0)


async def test_a_silent_peer_is_given_up_and_a_talking_one_is_not(scene: Any) -> None:
    silent, talking = await scene(heartbeat=0.02, silence=0.1).greet(), await scene(heartbeat=0.02, silence=30).greet()
    error = await silent.lost()
    assert "the peer was silent for " in str(error)
    assert silent.channel.aborted
    talking.say(frames.Pong(0))
    assert not talking.lane.lost.done()


async def test_p4_a_loop_that_was_held_up_does_not_take_its_own_absence_for_the_peers_silence(scene: Any) -> None:
    """An extension that holds the interpreter costs latency, not links: what came meanwhile has not been read yet."""
    one = await scene(heartbeat=0.05, silence=0.5).greet()
    time.sleep(0.8)  # noqa: ASYNC251  (the loop itself is what is held up)
    await asyncio.sleep(0.01)
    assert not one.lane.lost.done()
    error = await one.lost()  # and a peer that stays silent afterwards is still given up
    assert "the peer was silent for " in str(error)


# --- the end ---


async def waiting(one: LaneScene) -> list[asyncio.Future[Any]]:
    """Two answers and a ping under way."""
    answers = [one.lane.ask(build, b"")[2] for _ in range(2)]
    pinging = asyncio.create_task(one.lane.ping(soon()))
    await one.heard(frames.Ping)
    return [*answers, pinging]


ENDS = {
    "end of stream": (b"", "the peer closed the connection without a goodbye"),
    "reset": (ConnectionResetError("reset by peer"), "the connection broke: reset by peer"),
    "garbage": (b"\xff" * 40, "perhaps the peer does not speak the kvpull protocol"),
    "a message to the other side": (sample("Request"), "Request sent to the requesting side"),
    "an answer never asked for": (frames.encode(grant(99)), "an answer to request 99, which was never sent"),
    "a failure of ours": (12, "internal error while reading: TypeError"),
}


@pytest.mark.parametrize(("last", "reason"), ENDS.values(), ids=ENDS.keys())
async def test_whatever_ends_a_connection_ends_all_that_waits_on_it_with_the_reason(
    scene: Any, last: Any, reason: str
) -> None:
    one = await scene().greet()
    waiters = await waiting(one)
    one.channel.feed(last)
    error = await one.lost()
    assert reason in str(error)
    assert (error.status_code, error.peer) == (LLMStatusCode.LLM_LINK_FAILED, "scripted")
    raised = [await asyncio.wait_for(asyncio.gather(waiter, return_exceptions=True), 20) for waiter in waiters]
    assert [str(one[0]) for one in raised] == [str(error)] * 3
    assert len({id(one[0]) for one in raised}) == 3  # an instance per waiter
    assert one.channel.aborted
    with pytest.raises(LLMException) as caught:
        one.lane.ask(build, b"")
    assert str(caught.value) == str(error)


async def test_what_the_peer_sent_before_it_hung_up_is_still_handed_out(scene: Any) -> None:
    one = await scene(dialer=False).greet()
    one.channel.feed(sample("Done") + sample("Bye") + b"\xff" * 20)
    await one.lost()
    assert [type(message) for message, _ in one.received] == [frames.Done, frames.Bye]


async def test_a_connection_that_has_failed_but_not_ended_takes_no_request(scene: Any) -> None:
    """The reader may still be busy when the session has failed: that is a lost link, no fault of the caller's."""
    one = await scene().greet()
    one.lane.session.fail("garbage", LLMStatusCode.LLM_LINK_FAILED)
    with pytest.raises(LLMException, match="the connection is ending") as caught:
        one.lane.ask(build, b"")
    assert caught.value.status_code == LLMStatusCode.LLM_LINK_FAILED
    with pytest.raises(LLMException, match="the connection is ending"):
        await one.lane.send(frames.Bye())


async def test_abort_may_be_called_at_any_time_and_twice(scene: Any) -> None:
    fresh = scene()
    fresh.lane.abort("before the greeting")
    fresh.lane.abort("again")
    assert str(await fresh.lost()) == "before the greeting"
    one = await scene().greet()
    waiters = await waiting(one)
    one.lane.abort("unlinked")
    one.lane.abort("again")
    assert str(await one.lost()) == "unlinked"
    results = await asyncio.gather(*waiters, return_exceptions=True)
    assert [str(result) for result in results] == ["unlinked"] * 3
    one.lane.post(frames.Bye())
    assert one.channel.take() == []
    await asyncio.gather(*one.lane.tasks)
    assert one.lane.session.state is State.CLOSED


async def test_a_bug_of_ours_is_logged_as_one(scene: Any) -> None:
    with event_log() as events:
        one = await scene(dialer=False).greet()
        one.received = None  # type: ignore[assignment]
        one.say(frames.Cancel(1))
        assert "internal error while reading: AttributeError" in str(await one.lost())
        await events.first("link.bug", text="AttributeError")
