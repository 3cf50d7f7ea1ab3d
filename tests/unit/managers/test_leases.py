"""Keys kept for longer or given up: what is checked at once, where it is done, and what a peer's answer becomes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.link import KEYS_AT_ONCE
from kvpull_async.managers import leases
from kvpull_async.managers.dialect import CACHE, KV, Dialect
from kvpull_async.protocol import frames
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.values import INVALID_ID, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from tests.loop_nodes import eventually
from tests.serving import Scene

OWN, THEIRS = 1, 2
SUCCESS, MISSING = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NEVER = None
"""For an answer that does not come."""
Answer = LLMStatusCode | OSError | LLMException | None


class FakeLink:
    """To a peer that answers each lease as the test says. It is its own lane and channel."""

    peer_name = "a peer"

    def __init__(self, *answers: Answer, stays: bool = False) -> None:
        """With `stays` an error of the connection does not end it."""
        self._loop = asyncio.get_running_loop()
        self._answers = list(answers)
        self.asked: list[frames.Lease] = []
        self.open: dict[int, asyncio.Future[frames.Result]] = {}
        self.most = 0
        self._stays = stays
        self.lost: asyncio.Future[LLMException] = self._loop.create_future()
        self.channel = self
        self.key_turns = asyncio.Semaphore(KEYS_AT_ONCE)

    async def ready(self, deadline: Deadline) -> FakeLink:
        if self.lost.done():
            self.lost = self._loop.create_future()
        return self

    def lease(self, words: Any) -> tuple[int, bytes, asyncio.Future[frames.Result]]:
        message = words(len(self.asked) + 1)
        self.asked.append(message)
        answer = self.open[message.request_id] = self._loop.create_future()
        self.most = max(self.most, len(self.open))
        return message.request_id, message.request_id.to_bytes(4, "big"), answer

    async def send(self, data: bytes) -> None:
        answer, number = self._answers.pop(0), int.from_bytes(data, "big")
        if isinstance(answer, OSError):
            if not self._stays:
                self.lost.set_result(LLMException("lost"))
            raise answer
        if isinstance(answer, LLMException):
            self.open[number].set_exception(answer)
        elif answer is not NEVER:
            result = frames.Result(number, int(answer), f"answer {answer.name}", unsafe=False)
            self._loop.call_later(0.001, self.open[number].set_result, result)

    def give_up(self, request_id: int, *, tell: bool) -> None:
        assert not tell
        del self.open[request_id]


def node(link: FakeLink | None = None, **more: Any) -> Any:
    settings = SimpleNamespace(cluster_id=OWN, sync_kv_timeout_ms=20_000)
    return SimpleNamespace(settings=settings, find_link={THEIRS: link}.get, **more)


async def do(
    one: Any, key: CacheKey, lease: int = 0, *, timeout: float | None = None, dialect: Dialect = CACHE
) -> None:
    name = "renew_key" if lease else "release_key"
    await leases.run(one, dialect, leases.asked(one, name, key, lease, timeout))


@pytest.mark.parametrize("value", [1, 2**31 - 1, np.int32(7)])
def test_a_lease_is_a_number_of_ms(value: Any) -> None:
    assert leases.lease_ms(value) == int(value)


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-5, ValueError), (2**31, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_other_leases_are_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="lease"):
        leases.lease_ms(value)


def test_only_keys_of_batch_entries_have_a_lease() -> None:
    one = node()
    for key in (BlocksCacheKey(1, 2), None, ("request", 7)):
        with pytest.raises(TypeError, match="cache_key"):
            leases.asked(one, "renew_key", key, 5, None)
    for named in (CacheKeyByIdAndIndex(1, 2, 3), CacheKey(1, INVALID_ID)):
        with pytest.raises(LLMException) as caught:
            leases.asked(one, "renew_key", named, 5, None)
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID


async def test_a_key_of_this_node_is_changed_here() -> None:
    scene = Scene()
    here = node(registry=scene.registry)
    await do(here, CacheKey(OWN, 7), 60_000)
    binding = scene.registry.find_key(("request", 7, 0))
    assert binding is not None
    assert binding.ends is not None
    await do(here, CacheKey(OWN, 7))
    assert not scene.held
    for lease in (0, 100):
        with pytest.raises(LLMException, match="released") as caught:
            await do(here, CacheKey(OWN, 7), lease)
        assert (caught.value.status_code, caught.value.peer) == (MISSING, OWN)
        assert caught.value.operation == ("renew_key" if lease else "release_key")
        assert caught.value.elapsed_ms is not None


async def test_where_a_peer_has_the_same_id_it_is_asked() -> None:
    link = FakeLink(SUCCESS)
    one = node(None)
    one.find_link = {OWN: link}.get
    await do(one, CacheKey(OWN, 7), 5)
    assert len(link.asked) == 1


async def test_a_peer_is_asked_in_one_message() -> None:
    link = FakeLink(SUCCESS, SUCCESS)
    await do(node(link), CacheKey(THEIRS, 7, 3), 1234)
    await do(node(link), CacheKey(THEIRS, INVALID_ID, 4, 9))
    renewed, released = link.asked
    assert (renewed.key, renewed.identity, renewed.model_id, renewed.lease_ms) == ("request", 7, 3, 1234)
    assert (released.key, released.identity, released.model_id, released.lease_ms) == ("prefix", 9, 4, 0)
    assert renewed.pull_id != released.pull_id
    assert link.open == {}


HOPELESS = (LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_FEATURE_NOT_ENABLED)


@pytest.mark.parametrize("status", [MISSING, *HOPELESS, LLMStatusCode.LLM_FAILED])
async def test_a_refusal_is_raised_in_the_peers_words(status: LLMStatusCode) -> None:
    link = FakeLink(status)
    with pytest.raises(LLMException, match=f"answer {status.name}") as caught:
        await do(node(link), CacheKey(THEIRS, 7))
    assert (caught.value.status_code, caught.value.peer) == (status, "a peer")
    assert caught.value.retry_safe == (status not in HOPELESS)
    assert link.open == {}


async def test_without_a_link_it_says_so() -> None:
    with pytest.raises(LLMException, match="no link to cluster 2") as caught:
        await do(node(), CacheKey(THEIRS, 7))
    assert caught.value.status_code == LLMStatusCode.LLM_NOT_YET_LINK


@pytest.mark.parametrize("dialect", [KV, CACHE], ids=lambda dialect: dialect.name)
async def test_an_answer_that_does_not_come_ends_with_the_timeout(dialect: Dialect) -> None:
    link = FakeLink(NEVER)
    with pytest.raises(LLMTimeoutError, match="may have done") as caught:
        await do(node(link), CacheKey(THEIRS, 7), timeout=20, dialect=dialect)
    assert caught.value.status_code == dialect.timeout_status
    assert caught.value.retry_safe
    assert link.open == {}


async def test_it_is_asked_again_only_if_nothing_had_been_said() -> None:
    link = FakeLink(ConnectionResetError("broken"), SUCCESS)
    await do(node(link), CacheKey(THEIRS, 7))
    assert len(link.asked) == 2
    said = FakeLink(LLMException("lost", status_code=LLMStatusCode.LLM_LINK_FAILED), SUCCESS)
    with pytest.raises(LLMException, match="lost"):
        await do(node(said), CacheKey(THEIRS, 7))
    assert len(said.asked) == 1
    assert link.open == said.open == {}


async def test_p10_a_connection_that_breaks_by_half_is_the_callers_link_failed() -> None:
    """What cannot be sent may fail before, or without, the loss of the connection."""
    link = FakeLink(OSError(105, "No buffer space available"), SUCCESS, stays=True)
    with pytest.raises(LLMException, match=r"a peer: .*No buffer space") as caught:
        await do(node(link), CacheKey(THEIRS, 7), timeout=20_000)
    assert caught.value.status_code == LLMStatusCode.LLM_LINK_FAILED
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.retry_safe
    assert len(link.asked) == 1
    assert link.open == {}


async def test_few_of_many_are_under_way_at_a_time() -> None:
    link = FakeLink(*[SUCCESS] * 200)
    await asyncio.gather(*(do(node(link), CacheKey(THEIRS, number), 5) for number in range(200)))
    assert len(link.asked) == 200
    assert 1 < link.most <= 32


async def test_one_that_is_cancelled_gives_its_place_to_the_next() -> None:
    link = FakeLink(*[NEVER] * 16, SUCCESS)
    stuck = [asyncio.ensure_future(do(node(link), CacheKey(THEIRS, number))) for number in range(16)]
    await eventually(lambda: len(link.asked) == 16)
    later = asyncio.ensure_future(do(node(link), CacheKey(THEIRS, 99)))
    for _ in range(20):  # turns of the loop, in which it would ask
        await asyncio.sleep(0)
    assert len(link.asked) == 16
    stuck[3].cancel()
    await later
    for one in stuck:
        one.cancel()
    ends = await asyncio.gather(*stuck, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    assert link.open == {}
