"""P1 and P4 for pushes: whatever ended one, at whatever await, nothing writes to the receiver's destination afterwards.

It is refilled with a canary right after the raise, and must not change. Both cores run on the test's own loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvpull_async import CacheKeyByIdAndIndex, LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.values import CacheDesc, LLMRole
from tests import duo, npu
from tests.inject import faulty_transports, gated_memories, stubborn_inproc
from tests.integration.own_loop import LoopNode, Suspended, outcome, stopped_at, within
from tests.integration.pushing import PUSHER, RECEIVER, Stock, desc, laid, options_for

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
PATHS = ("tcp", "inproc", "mapped", "read", "streamed", "stubborn")
SIZES = {"inline": desc(64), "large": desc(1_300_000)}
SENT = ("tcp", "inproc", "streamed")
"""Whose copies go through the pieces of the receiver's memory, where a gate can hold them."""
SHORT = 60


@dataclass
class Pushing:
    """A source and two destinations; pushes are coroutines of this loop."""

    pusher: LoopNode
    receiver: LoopNode
    source: Stock
    stopped: Stock
    other: Stock

    def push(self, to: Stock, entry: int = 0, *, of: int = 1, **options: Any) -> Coroutine[Any, Any, None]:
        key = CacheKeyByIdAndIndex(RECEIVER, to.cache.cache_id, entry)
        given = {"timeout": duo.TIMEOUT_MS, "traceparent": None, **options}
        return self.pusher.manager.push_cache(key, self.source.cache, of, None, None, -1, 2, given).start()

    def begin(self, to: Stock, entry: int = 0, **options: Any) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(self.push(to, entry, **options))

    def whole(self, to: Stock, entry: int, of: int) -> bool:
        return np.array_equal(to.image, laid(to, [(t, entry, self.source.arrays[t][of]) for t in range(4)]))

    async def check_next(self, number: int = 0) -> None:
        """The next push on the link is right, without linking again, and then the canary still stands."""
        entry = number % 3
        self.other.set_canary()
        await within(self.push(self.other, entry, of=2))
        assert self.whole(self.other, entry, 2), f"the push after the one stopped at await {number}"
        assert self.stopped.untouched, f"written after the push stopped at await {number} had raised"
        assert not self.stopped.cache.quarantined
        assert self.pusher.engine.counters.snapshot()["links_up"] == 1


@contextlib.asynccontextmanager
async def pushing(path: str, shape: CacheDesc, *, dials: str = "pusher", **more: Any) -> AsyncIterator[Pushing]:
    properties = options_for("inproc" if path == "stubborn" else path, **more)
    del properties["enable_cache_manager"]  # as all nodes there
    pusher, receiver = [LoopNode(LLMRole.MIX, cluster, **properties) for cluster in (PUSHER, RECEIVER)]
    try:
        await pusher.open()
        await receiver.open()
        await (pusher.link(receiver) if dials == "pusher" else receiver.link(pusher))
        while pusher.engine.links.find(RECEIVER) is None:  # noqa: ASYNC110  (the dialled side hears a moment later)
            await asyncio.sleep(0.001)
        stocks = [await stock(node, shape, path) for node in (pusher, receiver, receiver)]
        stocks[0].fill(3)
        yield Pushing(pusher, receiver, *stocks)
    finally:
        await pusher.close()
        await receiver.close()


async def stock(node: LoopNode, shape: CacheDesc, path: str) -> Stock:
    if path not in ("read", "streamed"):
        cache = await node.allocate(shape)
        made = Stock(cache, duo.arrays(cache))
    else:
        arrays = [npu.room(shape.entries, shape.entry_nbytes) for _ in range(shape.num_tensors)]
        addresses = npu.addresses(arrays)
        made = Stock(await within(node.manager.register_cache(shape, addresses, [], None, None).start()), arrays)
    made.set_canary()
    return made


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """ "stubborn" is inproc with fetches that refuse to abort."""
    if request.param == "stubborn":
        stubborn_inproc(monkeypatch)
    return str(request.param)


# -- at every await of the pusher --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dials", ["pusher", "receiver"])
@pytest.mark.parametrize("at", ["wait", "wake"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "repeatedly"])
async def test_p1_p4_a_push_cancelled_at_every_await(path: str, size: str, dials: str, at: str, again: bool) -> None:
    async with pushing(path, SIZES[size], dials=dials) as e:
        number, reached = 0, True
        while reached:
            number += 1
            reached, error = await stopped_at(lambda: e.push(e.stopped), number, at=at, again=again)
            if reached:
                assert isinstance(error, asyncio.CancelledError), error
            else:
                assert error is None
                assert e.whole(e.stopped, 0, 1)
            e.stopped.set_canary()
            await e.check_next(number)
        assert number > 1, "a push that never waits cannot have told anybody"
        counted = e.pusher.engine.counters.snapshot()
        assert counted["pushes_started"] == counted["pushes_finished"] + counted.get("pushes_cancelled", 0)


@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize("size", SIZES)
async def test_p1_p4_the_deadline_of_a_push_passes_at_every_await(path: str, size: str) -> None:
    """The loop is held at the k-th await until the deadline is over."""
    async with pushing(path, SIZES[size]) as e:
        await within(e.push(e.other))
        raised = 0
        for number in range(1, 9):
            e.stopped.set_canary()
            end = time.monotonic() + 0.05
            push = Suspended(e.push(e.stopped, timeout=50), number, partial(sleep_until, end + 0.01))
            error = await outcome(asyncio.get_running_loop().create_task(awaited(push)))
            if error is None:
                assert e.whole(e.stopped, 0, 1)
            else:
                assert isinstance(error, LLMTimeoutError), error
                assert error.status_code is LLMStatusCode.LLM_TIMEOUT
                raised += 1
                if error.destination_unsafe:
                    await asyncio.sleep(0.05)  # told to stop, it has not said yet that it did
            e.stopped.set_canary()
            await e.check_next(number)
        assert raised or size == "inline"  # whose result may be there before anybody looks at the clock


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


async def awaited(steps: Suspended) -> None:
    await steps


@pytest.mark.parametrize("path", PATHS, indirect=True)
async def test_p1_wait_for_ends_a_push_and_leaves_nothing_behind(path: str) -> None:
    async with pushing(path, SIZES["large"]) as e:
        for number in range(8):
            try:
                await asyncio.wait_for(e.push(e.stopped), 0.0004 * number)
            except asyncio.TimeoutError:
                pass
            else:
                assert e.whole(e.stopped, 0, 1)
            e.stopped.set_canary()
            await e.check_next(number)


async def test_p4_hundreds_of_pushes_that_time_out_at_once_leave_the_link_usable() -> None:
    async with pushing("tcp", SIZES["large"], dials="receiver") as e:
        for number in range(100):
            error = await outcome(e.begin(e.stopped, timeout=1 + number % 3))
            assert error is None or isinstance(error, LLMTimeoutError), error
        await within(e.push(e.other, 0, of=2))
        e.stopped.set_canary()
        await e.check_next()


# -- a receiver whose copy stands still --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", SENT)
@pytest.mark.parametrize("size", SIZES)
async def test_p1_p3_a_receiver_that_cannot_stop_writing_says_so(
    monkeypatch: pytest.MonkeyPatch, way: str, size: str
) -> None:
    """Its cache is quarantined, the pusher hears `destination_unsafe`, and the next push there waits for the end."""
    memories = gated_memories(monkeypatch, after=0 if size == "inline" else 1)
    async with pushing(way, SIZES[size], settle_timeout=30) as e:
        gate = memories[1].landing_gate
        gate.close(times=1)
        error, timeout = None, float(SHORT)
        while not gate.held:
            began = time.monotonic()
            error, timeout = await outcome(e.begin(e.stopped, timeout=timeout)), 2 * timeout
        assert isinstance(error, LLMTimeoutError), error
        assert error.destination_unsafe
        assert not error.retry_safe
        assert time.monotonic() - began < timeout / 1000 + 2
        while not e.stopped.cache.quarantined:  # noqa: ASYNC110  (the receiver's own clock)
            await asyncio.sleep(0.001)
        late = e.begin(e.stopped, 2, timeout=SHORT)
        error = await outcome(late)
        assert isinstance(error, LLMTimeoutError), error
        waiting = e.begin(e.stopped, 1, of=0)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        gate.open()
        assert await outcome(waiting) is None
        assert not e.stopped.cache.quarantined
        for tensor in range(4):
            assert np.array_equal(e.stopped.arrays[tensor][1], e.source.arrays[tensor][0])
            assert (e.stopped.arrays[tensor][2] == 0xA5).all(), "the push that had raised wrote to it"
        e.stopped.set_canary()
        await e.check_next()


@pytest.mark.parametrize("way", SENT)
async def test_p1_a_cancelled_push_waits_until_the_receiver_writes_no_more(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    memories = gated_memories(monkeypatch, after=1)
    async with pushing(way, SIZES["large"], settle_timeout=20_000) as e:
        gate = memories[1].landing_gate
        gate.close(times=1)
        push = e.begin(e.stopped)
        await gate.reached()
        for _ in range(5):
            push.cancel()
            await asyncio.sleep(0.01)
        assert not push.done(), "it ended while a thread was about to write to the destination"
        gate.open()
        assert isinstance(await outcome(push), asyncio.CancelledError)
        e.stopped.set_canary()
        await e.check_next()


# -- the memory of either side is taken back ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", SENT)
@pytest.mark.parametrize("side", ["source", "destination"])
async def test_p7_a_release_waits_for_the_push(monkeypatch: pytest.MonkeyPatch, way: str, side: str) -> None:
    memories = gated_memories(monkeypatch, after=1)
    async with pushing(way, SIZES["large"], settle_timeout=20_000) as e:
        gate = memories[1].landing_gate
        gate.close(times=1)
        push = e.begin(e.stopped)
        await gate.reached()
        release = asyncio.ensure_future(taken_back(e, side, way))
        await asyncio.sleep(0.02)
        assert not release.done(), "it was released under a push"
        gate.open()
        assert await outcome(push) is None
        assert await outcome(release) is None


@pytest.mark.parametrize("way", SENT)
@pytest.mark.parametrize("side", ["source", "destination"])
async def test_p7_a_release_cuts_a_push_that_does_not_end(monkeypatch: pytest.MonkeyPatch, way: str, side: str) -> None:
    """The source's memory is held, so nothing is being written, and both sides know it."""
    memories = gated_memories(monkeypatch, after=1)
    async with pushing(way, SIZES["large"], settle_timeout=100) as e:
        gate = memories[0].lending_gate
        gate.close(times=1)
        push = e.begin(e.stopped)
        await gate.reached()
        began = time.monotonic()
        release = asyncio.ensure_future(taken_back(e, side, way))
        error = await outcome(push)
        assert isinstance(error, LLMException), error
        assert error.status_code is NOT_EXIST
        assert error.destination_unsafe == (way == "inproc")  # where the receiver itself is held in that memory
        refusal = await outcome(release)
        gate.open()
        if side == "source" or way == "inproc":  # a thread is still about to read it, or to write to it
            assert isinstance(refusal, LLMException), refusal
            assert refusal.status_code is LLMStatusCode.LLM_TIMEOUT
            assert refusal.destination_unsafe
        else:
            assert refusal is None
        assert time.monotonic() - began < 5
        if refusal is not None:
            await within(taken_back(e, side, way))
        again = await outcome(e.begin(e.stopped))
        assert isinstance(again, LLMException), again
        assert again.status_code is NOT_EXIST


async def taken_back(e: Pushing, side: str, way: str) -> None:
    node, held = (e.pusher, e.source) if side == "source" else (e.receiver, e.stopped)
    if way == "streamed":
        await node.manager.unregister_cache(held.cache.cache_id).start()
    else:
        await node.manager.deallocate(held.cache, blocks=False).start()


# -- connections that break --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tcp", "inproc", "shm"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("cut", ["pusher", "receiver"])
async def test_p1_p4_a_connection_cut_at_every_frame_of_a_push(
    monkeypatch: pytest.MonkeyPatch, name: str, size: str, cut: str
) -> None:
    faults = faulty_transports(monkeypatch, name)
    async with pushing("mapped" if name == "shm" else name, SIZES[size]) as e:
        side = faults[0 if cut == "pusher" else 1]
        for frame in range(1, 5):
            side.cut_at(frame)
            error = await outcome(e.begin(e.stopped))
            happened = not side.frames_left
            side.cut_at(0)
            if error is None:
                assert e.whole(e.stopped, 0, 1)
            else:
                assert happened
                assert isinstance(error, LLMException), error
                assert error.status_code is LLMStatusCode.LLM_LINK_FAILED
                await asyncio.sleep(0.05)  # the receiver learns of the loss, too
            e.stopped.set_canary()
            e.other.set_canary()
            while (error := await outcome(e.begin(e.other, of=2))) is not None:
                assert isinstance(error, LLMException), error
                assert error.retry_safe or error.destination_unsafe
            assert e.whole(e.other, 0, 2)
            assert e.stopped.untouched
