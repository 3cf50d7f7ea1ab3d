"""The ready connection: requests, answers, late answers, and what a peer may have in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvpull_async.protocol import frames
from kvpull_async.protocol.frames import FrameError, Message
from kvpull_async.protocol.session import (
    FRAMES_AT_ONCE,
    IN_FLIGHT_LIMIT,
    WATCHES_LIMIT,
    Failed,
    Received,
    Session,
    State,
)
from kvpull_async.status import LLMStatusCode
from tests.wire import SAMPLES, deliver, drained, exchange, greeted

LINK_FAILED = LLMStatusCode.LLM_LINK_FAILED


def ask(session: Session) -> tuple[int, frames.Request]:
    number = session.new_request()
    request = msgspec.structs.replace(SAMPLES["Request"].message, request_id=number)
    session.send(request)
    return number, request


def grant(number: int) -> frames.Grant:
    return msgspec.structs.replace(SAMPLES["Grant"].message, request_id=number)


@pytest.mark.parametrize("lane", [0, 1])
def test_a_request_and_its_answer_pass_with_their_tails(lane: int) -> None:
    pair = greeted(lane=lane)
    asking, serving = pair if lane == 0 else pair[::-1]
    number, request = ask(asking)
    asking.send(msgspec.structs.replace(request, request_id=asking.new_request()), b"a table")
    exchange(asking, serving)
    assert [event.tail for event in drained(serving)] == [b"", b"a table"]
    serving.send(grant(number), b"bytes")
    exchange(asking, serving)
    assert drained(asking) == [Received(grant(number), b"bytes")]


@pytest.mark.parametrize("answer", [grant, lambda number: frames.Refuse(number, 1, "no")], ids=["grant", "refusal"])
def test_a_late_answer_is_dropped_and_an_answer_nobody_asked_for_is_a_failure(answer: Callable[[int], Message]) -> None:
    session, _ = greeted()
    first, second = ask(session)[0], ask(session)[0]
    session.end_request(first)
    assert deliver(session, answer(first)) == []
    assert session.late_answers == 1
    assert len(deliver(session, answer(second))) == 1
    assert deliver(session, answer(second)) == []  # answered twice: late too
    assert session.late_answers == 2
    (failed,) = deliver(session, answer(second + 1))
    assert failed == Failed(f"an answer to request {second + 1}, which was never sent", LINK_FAILED)


def test_what_was_granted_and_is_sent_may_be_refused_yet_once() -> None:
    session, _ = greeted()
    first, second, third = (ask(session)[0] for _ in range(3))
    refusal = frames.Refuse(first, 1, "the memory has failed")
    assert len(deliver(session, msgspec.structs.replace(grant(first), inline=False))) == 1
    assert deliver(session, refusal) == [Received(refusal)]
    assert deliver(session, refusal) == []
    assert len(deliver(session, msgspec.structs.replace(grant(second), inline=False))) == 1
    session.end_request(second)
    assert deliver(session, frames.Refuse(second, 1, "too late")) == []
    assert len(deliver(session, msgspec.structs.replace(grant(third), inline=True))) == 1
    assert deliver(session, frames.Refuse(third, 1, "its bytes have come")) == []
    assert session.late_answers == 3


@pytest.mark.parametrize("granted", [False, True])
@pytest.mark.parametrize("name", ["Grant", "Refuse", "Result", "Appeared", "Accept"])
def test_an_answer_to_request_zero_is_a_failure(name: str, *, granted: bool) -> None:
    session, _ = greeted()
    if granted:
        number, _ = ask(session)
        deliver(session, msgspec.structs.replace(grant(number), inline=False))
        deliver(session, frames.Refuse(number, 1, "the memory has failed"))
    answer = msgspec.structs.replace(SAMPLES[name].message, request_id=0)
    assert isinstance(deliver(session, answer)[0], Failed)


def request(number: int) -> frames.Request:
    return msgspec.structs.replace(SAMPLES["Request"].message, request_id=number)


@pytest.mark.parametrize("number", [0, 3, 5])
def test_request_ids_only_grow(number: int) -> None:
    _, serving = greeted()
    assert len(deliver(serving, request(5))) == 1
    (failed,) = deliver(serving, request(number))
    assert failed == Failed(f"request id {number} came out of order", LINK_FAILED)


def test_requests_in_flight_are_bounded() -> None:
    _, serving = greeted()
    for number in range(1, IN_FLIGHT_LIMIT + 1):
        assert len(deliver(serving, request(number))) == 1
    serving.end_request(7)
    assert len(deliver(serving, request(IN_FLIGHT_LIMIT + 1))) == 1
    (failed,) = deliver(serving, request(IN_FLIGHT_LIMIT + 2))
    assert failed == Failed(f"more than {IN_FLIGHT_LIMIT} requests in flight", LINK_FAILED)


def test_the_tables_of_requests_in_flight_are_bounded_together() -> None:
    _, serving = greeted()
    table = bytes(frames.TAIL_LIMIT)
    for number in (1, 2):
        assert len(deliver(serving, request(number), table)) == 1
    serving.end_request(1)
    assert len(deliver(serving, request(3), table)) == 1
    (failed,) = deliver(serving, request(4), bytes(8))
    assert failed == Failed(f"more than {2 * frames.TAIL_LIMIT} bytes of tables in flight", LINK_FAILED)


def test_p6_a_flood_of_small_frames_is_handled_in_bounded_steps() -> None:
    _, serving = greeted()
    flood = frames.encode(frames.Cancel(1)) * (2 * FRAMES_AT_ONCE + 1)
    serving.receive(flood)
    assert (len(drained(serving)), serving.more) == (FRAMES_AT_ONCE, True)
    serving.receive(b"")
    assert (len(drained(serving)), serving.more) == (FRAMES_AT_ONCE, True)
    serving.receive(b"")
    assert (len(drained(serving)), serving.more, serving.buffered) == (1, False, 0)


def test_a_message_too_large_is_not_sent_and_spoils_nothing() -> None:
    asking, serving = greeted()
    with pytest.raises(FrameError, match="exceeds the limits"):
        asking.send(request(asking.new_request()), bytes(frames.TAIL_LIMIT + 8))
    assert asking.take_output() == b""
    ask(asking)
    exchange(asking, serving)
    assert len(drained(serving)) == 1


# --- offers and watches ---


def offer(number: int) -> frames.Offer:
    return msgspec.structs.replace(SAMPLES["Offer"].message, request_id=number)


def watch(number: int) -> frames.Watch:
    return msgspec.structs.replace(SAMPLES["Watch"].message, request_id=number)


def result(number: int) -> frames.Result:
    return frames.Result(number, int(LLMStatusCode.LLM_SUCCESS), "", unsafe=False)


def test_an_offer_passes_with_its_tail_and_may_be_accepted_before_its_result() -> None:
    asking, serving = greeted()
    number = asking.new_request(frames.Offer)
    asking.send(offer(number), b"a table ", b"and bytes")
    exchange(asking, serving)
    assert drained(serving) == [Received(offer(number), b"a table and bytes")]
    serving.send(frames.Accept(number))
    serving.send(result(number))
    exchange(asking, serving)
    assert drained(asking) == [Received(frames.Accept(number)), Received(result(number))]
    assert deliver(asking, frames.Accept(number)) == []  # after the result it is late
    assert deliver(asking, result(number)) == []
    assert asking.late_answers == 2


def test_the_result_of_an_offer_that_was_given_up_is_dropped() -> None:
    asking, _ = greeted()
    number = asking.new_request(frames.Offer)
    asking.send(offer(number))
    asking.end_request(number)
    assert deliver(asking, frames.Accept(number)) == []
    assert deliver(asking, result(number)) == []
    assert asking.late_answers == 2


@pytest.mark.parametrize("answer", [result, frames.Accept, frames.Appeared], ids=["result", "accept", "appeared"])
def test_an_answer_to_an_offer_or_watch_that_never_was_is_a_failure(answer: Callable[[int], Message]) -> None:
    asking, _ = greeted()
    (failed,) = deliver(asking, answer(1))
    assert failed == Failed("an answer to request 1, which was never sent", LINK_FAILED)


@pytest.mark.parametrize("message", [offer(1), watch(1)], ids=["offer", "watch"])
def test_only_the_requesting_side_offers_and_watches(message: Message) -> None:
    asking, _ = greeted()
    (failed,) = deliver(asking, message)
    assert failed == Failed(f"{type(message).__name__} sent to the requesting side", LINK_FAILED)


@pytest.mark.parametrize("message", [result(1), frames.Accept(1), frames.Appeared(1)], ids=lambda m: type(m).__name__)
def test_only_the_serving_side_answers_them(message: Message) -> None:
    _, serving = greeted()
    (failed,) = deliver(serving, message)
    assert failed == Failed(f"{type(message).__name__} sent to the serving side", LINK_FAILED)


def test_requests_offers_and_watches_share_the_numbers_that_only_grow() -> None:
    _, serving = greeted()
    for message in (request(1), offer(2), watch(3)):
        assert deliver(serving, message) == [Received(message)]
    (failed,) = deliver(serving, offer(3))
    assert failed == Failed("request id 3 came out of order", LINK_FAILED)


def test_offers_count_among_the_requests_in_flight_and_so_do_their_tails() -> None:
    _, serving = greeted()
    for number in range(1, IN_FLIGHT_LIMIT + 1):
        assert len(deliver(serving, offer(number))) == 1
    serving.end_request(3)
    assert len(deliver(serving, request(IN_FLIGHT_LIMIT + 1))) == 1
    (failed,) = deliver(serving, offer(IN_FLIGHT_LIMIT + 2))
    assert failed == Failed(f"more than {IN_FLIGHT_LIMIT} requests in flight", LINK_FAILED)
    _, serving = greeted()
    for number in (1, 2):
        assert len(deliver(serving, offer(number), bytes(frames.TAIL_LIMIT))) == 1
    (failed,) = deliver(serving, request(3), bytes(8))
    assert "bytes of tables in flight" in failed.reason


def test_watches_are_in_nobodys_way_and_bounded_too() -> None:
    _, serving = greeted()
    for number in range(1, WATCHES_LIMIT + 1):
        assert len(deliver(serving, watch(number))) == 1
    for number in range(WATCHES_LIMIT + 1, WATCHES_LIMIT + IN_FLIGHT_LIMIT + 1):
        assert len(deliver(serving, request(number))) == 1
    serving.end_request(5)
    serving.end_request(WATCHES_LIMIT + 1)
    last = WATCHES_LIMIT + IN_FLIGHT_LIMIT
    assert len(deliver(serving, watch(last + 1))) == 1
    (failed,) = deliver(serving, watch(last + 2))
    assert failed == Failed(f"more than {WATCHES_LIMIT} watches", LINK_FAILED)


def test_what_appeared_ends_its_watch() -> None:
    asking, serving = greeted()
    number = asking.new_request(frames.Watch)
    asking.send(watch(number))
    exchange(asking, serving)
    assert drained(serving) == [Received(watch(number))]
    serving.end_request(number)
    serving.send(frames.Appeared(number))
    exchange(asking, serving)
    assert drained(asking) == [Received(frames.Appeared(number))]
    assert deliver(asking, frames.Appeared(number)) == []
    assert asking.late_answers == 1


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (frames.Request, frames.Accept(1)),
        (frames.Request, frames.Appeared(1)),
        (frames.Request, result(1)),
        (frames.Offer, frames.Refuse(1, 0, "")),
        (frames.Offer, frames.Appeared(1)),
        (frames.Watch, frames.Accept(1)),
        (frames.Watch, frames.Refuse(1, 0, "")),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
def test_an_answer_that_does_not_fit_what_was_asked_ends_the_session(asked: Any, answer: Any) -> None:
    asking, _ = greeted()
    assert asking.new_request(asked) == 1
    (failed,) = deliver(asking, answer)
    assert failed == Failed(f"{type(answer).__name__} is no answer to what was asked", LINK_FAILED)


def test_p4_many_leases_at_once_cost_no_link() -> None:
    """They are answered on the spot: callers who gave up while the peer was held up may have left hundreds of them."""
    asking, serving = greeted()
    numbers = [asking.new_request(frames.Lease) for _ in range(5 * IN_FLIGHT_LIMIT)]
    for number in numbers:
        asking.send(frames.Lease(number, "p", "request", number, 0, 0, 100))
    serving.receive(asking.take_output())
    heard = drained(serving)
    while serving.more:
        serving.receive(b"")
        heard += drained(serving)
    assert [event.message.request_id for event in heard] == numbers
    assert serving.state is State.READY
