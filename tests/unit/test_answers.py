"""What requests wait for: each answer finds whoever asked, once. See also test_lane.py and its kin."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import msgspec
import pytest

from kvpull_async import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.answers import Answers
from kvpull_async.protocol import frames
from tests.wire import SAMPLES

GRANT = SAMPLES["Grant"].message
LINK_FAILED = LLMStatusCode.LLM_LINK_FAILED


def grant(request_id: int) -> frames.Grant:
    assert isinstance(GRANT, frames.Grant)
    return msgspec.structs.replace(GRANT, request_id=request_id)


@pytest.fixture
async def answers() -> Answers:
    return Answers(asyncio.get_running_loop(), "a peer")


async def test_each_answer_finds_whoever_asked(answers: Answers) -> None:
    first, second = answers.of_request(1), answers.of_request(2)
    assert answers.deliver(grant(2), b"two")
    assert await second == (grant(2), b"two")
    assert not first.done()
    assert answers.deliver(frames.Refuse(1, int(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST), "gone"), b"")
    with pytest.raises(LLMException, match="gone") as caught:
        await first
    assert caught.value.peer == "a peer"
    assert caught.value.retry_safe


@pytest.mark.parametrize("status", [LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_FEATURE_NOT_ENABLED])
async def test_what_would_be_refused_again_is_not_to_be_asked_again(answers: Answers, status: LLMStatusCode) -> None:
    asked = answers.of_request(1)
    answers.deliver(frames.Refuse(1, int(status), "never"), b"")
    with pytest.raises(LLMException) as caught:
        await asked
    assert not caught.value.retry_safe


@pytest.mark.parametrize("status", [LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT])
async def test_a_time_that_is_over_at_the_source_is_over_here(answers: Answers, status: LLMStatusCode) -> None:
    asked, refused = answers.of_request(1), answers.refusal_of(2)
    for number in (1, 2):
        answers.deliver(frames.Refuse(number, int(status), "too late"), b"")
    with pytest.raises(LLMTimeoutError, match="too late") as caught:
        await asked
    assert (caught.value.status_code, caught.value.retry_safe) == (status, True)
    assert isinstance(await refused, LLMTimeoutError)


async def test_a_sum_may_come_together_with_its_grant_and_is_there_when_it_is_waited_for(answers: Answers) -> None:
    asked, digest = answers.of_request(1), answers.digest_of(1)
    answers.deliver(grant(1), b"")
    answers.deliver(frames.Digest(1, b"sum"), b"")
    answers.deliver(frames.Digest(1, b"another"), b"")  # as no honest source says
    await asked
    assert await digest == b"sum"


async def test_p10_sums_that_nobody_waits_for_are_dropped(answers: Answers) -> None:
    assert answers.deliver(frames.Digest(5, b"sum"), b"")
    digest = answers.digest_of(6)
    answers.forget(6)
    answers.deliver(frames.Digest(6, b"sum"), b"")
    assert not digest.done()
    asked, refused = answers.of_request(7), answers.digest_of(7)
    answers.deliver(frames.Refuse(7, int(LLMStatusCode.LLM_FAILED), "no"), b"")
    answers.deliver(frames.Digest(7, b"sum"), b"")
    assert not refused.done()
    with pytest.raises(LLMException):
        await asked


async def test_a_lost_connection_ends_every_wait(answers: Answers) -> None:
    waiting: list[asyncio.Future[Any]] = [
        answers.of_request(1),
        answers.digest_of(1),
        answers.of_result(2, lambda: None),
        answers.of_watch("a name", lambda: 3),
    ]
    answers.fail(LLMException("lost", status_code=LINK_FAILED))
    for one in waiting:
        with pytest.raises(LLMException, match="lost"):
            await one
    answers.fail(LLMException("again", status_code=LINK_FAILED))  # nobody is left


async def test_what_is_no_answer_is_handed_back(answers: Answers) -> None:
    assert not answers.deliver(SAMPLES["Request"].message, b"")
    assert answers.deliver(frames.Pong(3), b"")  # nobody waits for that one


async def test_those_who_wait_for_one_name_share_a_watch(answers: Answers) -> None:
    begun: list[int] = []

    def begin() -> int:
        begun.append(len(begun) + 1)
        return begun[-1]

    first, second = answers.of_watch("a name", begin), answers.of_watch("a name", begin)
    assert (begun, answers.watches) == ([1], 1)
    assert answers.unwatch("a name", first) is None, "there is one that waits"
    assert answers.unwatch("a name", second) == 1
    third = answers.of_watch("a name", begin)
    answers.deliver(frames.Appeared(1), b"")
    assert not third.done(), "the first watch was given up"
    answers.deliver(frames.Appeared(2), b"")
    await third
    fourth = answers.of_watch("a name", begin)
    assert answers.unwatch("a name", third) is None, "its own watch is over, and the next one not its own"
    assert not fourth.done()
    assert (begun, answers.watches) == ([1, 2, 3], 1)


async def test_a_watch_that_cannot_begin_is_none(answers: Answers) -> None:
    def begin() -> int:
        raise LLMException("busy")

    with pytest.raises(LLMException, match="busy"):
        _ = answers.of_watch("a name", begin)
    assert answers.watches == 0


async def test_pongs_and_checks_are_waited_for_only_as_long_as_somebody_does(answers: Answers) -> None:
    with answers.of_ping(3) as pong, answers.of_check(b"grant") as check:
        answers.deliver(frames.Pong(4), b"")
        answers.deliver(frames.Checked(b"another", valid=False), b"")
        assert not pong.done()
        answers.deliver(frames.Pong(3), b"")
        answers.deliver(frames.Checked(b"grant", valid=True), b"")
        await pong
        assert await check
    with answers.of_ping(3) as later:
        pass
    answers.deliver(frames.Pong(3), b"")
    assert not later.done()


async def test_a_word_of_acceptance_where_nobody_listens_for_it_changes_nothing(answers: Answers) -> None:
    result = answers.of_result(2)
    answers.deliver(frames.Accept(2), b"")
    assert not result.done()
    said = frames.Result(2, 0, "", unsafe=False)
    answers.deliver(said, b"")
    assert await result == said


async def test_a_refusal_that_nobody_takes_any_more_is_no_mistake(answers: Answers) -> None:
    """Whoever asked may be about to end for another reason, in the very turn in which it comes."""
    said: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: said.append(context))
    try:
        answers.of_request(1)
        answers.deliver(frames.Refuse(1, int(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST), "gone"), b"")
        gc.collect()
    finally:
        loop.set_exception_handler(before)
    assert said == []


async def test_a_refusal_after_the_grant_finds_whoever_waits_for_it(answers: Answers) -> None:
    first, second = answers.refusal_of(1), answers.refusal_of(2)
    answers.of_request(1)
    answers.deliver(grant(1), b"")
    assert not first.done()
    for reason in ("the memory has failed", "and again"):
        answers.deliver(frames.Refuse(1, int(LLMStatusCode.LLM_DEVICE_MEM_ERROR), reason), b"")
    assert str(await first) == "the memory has failed"
    assert (await first).status_code is LLMStatusCode.LLM_DEVICE_MEM_ERROR
    answers.fail(LLMException("lost", status_code=LINK_FAILED))
    assert (await second).status_code is LINK_FAILED


async def test_a_refusal_that_nobody_waits_for_any_more_is_kept_nowhere(answers: Answers) -> None:
    answers.refusal_of(1).cancel()
    await asyncio.sleep(0)
    answers.deliver(frames.Refuse(1, int(LLMStatusCode.LLM_DEVICE_MEM_ERROR), "late"), b"")
    assert not answers._refusals
