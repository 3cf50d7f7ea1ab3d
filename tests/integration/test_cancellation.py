"""Cancelled and timed out pulls, as their callers see them: settled when they raise, the link usable, the key kept."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpull_async import CacheKey, LLMException, LLMRole, LLMStatusCode, LLMTimeoutError
from kvpull_async._deadline import Deadline
from kvpull_async.core import Call
from kvpull_async.links import Target
from kvpull_async.managers import pulls
from kvpull_async.values import Placement
from tests import duo, npu
from tests.canaries import intact, set_canary
from tests.inject import gated_memories, stubborn_inproc
from tests.integration.own_loop import LoopNode, Suspended, loop_pair, outcome, prefix_key, stopped_at, within
from tests.integration.processes import sockets
from tests.loop_nodes import eventually

pytestmark = pytest.mark.smoke

SIZES = {"inline": duo.SMALL, "streamed": duo.BIG}
KINDS = [(path, size) for path in ("tcp", "inproc", "shm") for size in SIZES]


class HeldCore:
    """Holds the core still at the `number`-th await of the next pull, until its caller has asked to cancel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        self.reached = False
        self._cancelled = threading.Event()
        self._on_hold: Callable[[], object] = bool
        run, cancel = pulls.run, Call.cancel

        async def held_run(*args: Any) -> None:
            await Suspended(run(*args), self.number, self._hold, at="now")

        def told_cancel(call: Call[Any]) -> None:
            cancel(call)
            self._cancelled.set()

        monkeypatch.setattr(pulls, "run", held_run)
        monkeypatch.setattr(Call, "cancel", told_cancel)

    def arm(self, number: int, on_hold: Callable[[], object]) -> None:
        self.number, self.reached, self._on_hold = number, False, on_hold
        self._cancelled.clear()

    def disarm(self) -> None:
        self.number = 0

    def _hold(self) -> None:
        self.reached = True
        self._on_hold()
        assert self._cancelled.wait(20), "the caller never cancelled"


@pytest.mark.parametrize("path", ["tcp", "inproc", "shm", "stubborn"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("again", [False, True], ids=["once", "repeatedly"])
async def test_p1_cancelled_by_the_caller_at_every_await_of_the_core(
    monkeypatch: pytest.MonkeyPatch, path: str, size: str, again: bool
) -> None:
    if path == "stubborn":
        stubborn_inproc(monkeypatch)
    held, loop = HeldCore(monkeypatch), asyncio.get_running_loop()
    async with duo.duo(transport="inproc" if path == "stubborn" else path) as pair:
        manager = pair.decoder.kv_cache_manager
        await pair.publish(SIZES[size])
        stopped, other = await pair.destination(SIZES[size]), await pair.destination(SIZES[size])
        number = 0
        while True:
            number += 1
            task = loop.create_task(manager.pull_cache(CacheKey(duo.PROMPT, 0), stopped, 0, src_cache_offset=0))
            held.arm(number, lambda task=task: loop.call_soon_threadsafe(task.cancel))  # type: ignore[misc]
            while again and not task.done():
                await asyncio.sleep(0)
                if held.reached:
                    task.cancel()
            error = await outcome(task)
            set_canary(stopped)
            if not held.reached:
                break
            assert isinstance(error, asyncio.CancelledError), error
            assert not stopped.quarantined
            held.disarm()
            await manager.pull_cache(CacheKey(duo.PROMPT, 1), other, 1, src_cache_offset=0)
            assert duo.holds(other, entry=1, source=1), f"after a pull cancelled at await {number}"
            assert intact(stopped), f"written after the pull cancelled at await {number} had raised"
        assert error is None
        assert number > 1


@pytest.mark.parametrize(("path", "size"), KINDS)
async def test_p1_wait_for_raises_only_once_the_pull_has_settled(
    monkeypatch: pytest.MonkeyPatch, path: str, size: str
) -> None:
    memories = gated_memories(monkeypatch, after=0 if size == "inline" else 1)
    async with duo.duo(transport=path, settle_timeout=20_000) as pair:
        await pair.publish(SIZES[size])
        cache, gate = await pair.destination(SIZES[size]), memories[1].landing_gate
        gate.close()
        loop = asyncio.get_running_loop()
        pull = loop.create_task(pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 0), cache))
        await gate.reached()
        waiting = loop.create_task(asyncio.wait_for(pull, 0.05))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done, "wait_for returned while a thread was about to write to the destination"
        gate.open()
        assert isinstance(await outcome(waiting), asyncio.TimeoutError)
        set_canary(cache)
        other = await pair.destination(SIZES[size])
        await pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 0), other)
        assert duo.holds(other, entry=0, source=0), "the cancelled pull must not have consumed the key"
        assert intact(cache)


@pytest.mark.parametrize("path", ["tcp", "inproc", "shm"])
async def test_p2_a_cancellation_that_comes_too_late_says_so(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """The bytes are whole and the key is consumed, and yet the caller gets what he asked for: CancelledError."""
    caplog.set_level(logging.DEBUG, "kvpull")
    async with duo.duo(transport=path) as pair:
        await pair.publish()
        cache = await pair.destination()
        task = asyncio.get_running_loop().create_task(
            pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 0), cache)
        )
        await asyncio.sleep(0)
        give_up = time.monotonic() + 20
        while not pair.decoder.counters.get("pulls_finished") and time.monotonic() < give_up:
            time.sleep(0.001)  # noqa: ASYNC251  (this loop is not to hear of the end)
        task.cancel()
        assert isinstance(await outcome(task), asyncio.CancelledError)
        assert duo.holds(cache, entry=0, source=0)
        with pytest.raises(LLMException) as raised:
            await pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 0), cache)
        assert raised.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        finished = [record.kvpull for record in caplog.records if record.getMessage().startswith("pull.finished")]  # type: ignore[attr-defined]
        assert [event.get("cancelled_late") for event in finished] == [True]


@pytest.mark.parametrize("at", ["wait", "wake"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "repeatedly"])
async def test_p4_pulls_cancelled_in_the_queue_hold_up_nobody(
    monkeypatch: pytest.MonkeyPatch, at: str, again: bool
) -> None:
    """`wake`: the slot has just been granted to the pull that is cancelled, which must hand it on."""
    memories = gated_memories(monkeypatch, after=1)
    async with loop_pair(duo.BIG, transport="tcp") as pair:
        caches = [await pair.puller.allocate(duo.BIG) for _ in range(5)]
        memories[1].landing_gate.close()
        loop = asyncio.get_running_loop()
        running = loop.create_task(pair.puller.pull(prefix_key(), caches[0]))
        await memories[1].landing_gate.reached()
        cancelled = [
            loop.create_task(
                stopped_at(lambda cache=cache: pair.puller.pull(prefix_key(), cache), 1, at=at, again=again)
            )  # type: ignore[misc]
            for cache in caches[1:4]
        ]
        last = loop.create_task(pair.puller.pull(prefix_key(3), caches[4]))
        await asyncio.sleep(0.01)
        memories[1].landing_gate.open()
        await within(asyncio.gather(running, last))
        for reached, error in await within(asyncio.gather(*cancelled)):
            assert reached
            assert isinstance(error, asyncio.CancelledError)
        assert duo.holds(caches[0], entry=0, source=0)
        assert duo.holds(caches[4], entry=0, source=3)
        assert all(duo.untouched(cache) for cache in caches[1:4])


@pytest.mark.parametrize(("path", "size"), KINDS)
async def test_p4_hundreds_of_tiny_timeouts_leave_the_link_right_and_nothing_behind(path: str, size: str) -> None:
    async with duo.duo(transport=path, settle_timeout=20_000) as pair:  # a busy machine is no reason to quarantine
        manager = pair.decoder.kv_cache_manager
        await pair.publish(SIZES[size])
        cache = await pair.destination(SIZES[size])
        await manager.pull_cache(CacheKey(duo.PROMPT, 0), cache, 0, src_cache_offset=0)
        held = Held(pair)
        timeouts, longest = 0, 0.4 if size == "inline" else 4
        for i in range(300):
            timeout = longest / 40 * (1 + i % 40)
            pull = manager.pull_cache(CacheKey(duo.PROMPT, 1), cache, 1, src_cache_offset=0, timeout=timeout)
            (error,) = await asyncio.gather(pull, return_exceptions=True)
            assert error is None or isinstance(error, LLMTimeoutError), error
            assert error is None or not error.destination_unsafe
            timeouts += error is not None
        assert timeouts > 30
        set_canary(cache)
        other = await pair.destination(SIZES[size])
        await manager.pull_cache(CacheKey(duo.PROMPT, 2), other, 0)
        assert duo.holds(other, entry=0, source=2)
        assert intact(cache)
        assert pair.decoder.counters["links_up"] == 1, "none of them may cost the link its connection"
        await held.check()


@pytest.mark.parametrize("path", ["tcp", "inproc", "shm"])
async def test_p4_many_cancellations_in_a_row_leave_the_link_right(path: str) -> None:
    async with duo.duo(transport=path) as pair:
        manager = pair.decoder.kv_cache_manager
        await pair.publish(duo.BIG)
        cache, other = await pair.destination(duo.BIG), await pair.destination(duo.BIG)
        held = Held(pair)
        for i in range(200):
            task = asyncio.ensure_future(manager.pull_cache(CacheKey(duo.PROMPT, 1), cache, 1, src_cache_offset=0))
            await asyncio.sleep(0.0001 * (i % 50))
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            if i % 20 == 19:
                set_canary(cache)
                await manager.pull_cache(CacheKey(duo.PROMPT, 2), other, 0, src_cache_offset=0)
                assert duo.holds(other, entry=0, source=2)
                assert intact(cache)
        await held.check()


class Held:
    """What the process holds: threads, descriptors, tasks of the cores."""

    def __init__(self, pair: duo.Duo) -> None:
        self._cores = [duo.engine_of(node).core for node in (pair.prompt, pair.decoder)]
        self._before = self._now()

    def _now(self) -> list[int]:
        tasks = [len(core.pending()) for core in self._cores]
        threads = [thread for thread in threading.enumerate() if not thread.name.startswith("kvpull-acl")]
        return [len(threads), len(list(Path("/proc/self/fd").iterdir())), *tasks]

    async def check(self) -> None:
        """As before, but for what an engine may start late and keep: a worker, a payload connection and its thread."""
        give_up = time.monotonic() + 20
        while any(now > before + 4 for now, before in zip(self._now(), self._before, strict=True)):
            assert time.monotonic() < give_up, f"grew from {self._before} to {self._now()}"
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("path", ["tcp", "inproc", "shm"])
@pytest.mark.parametrize("at", ["wait", "wake"])
async def test_p8_linking_cancelled_at_every_await_leaves_nothing_and_can_be_repeated(path: str, at: str) -> None:
    source = LoopNode(LLMRole.MIX, duo.PROMPT, transport=path, handshake_timeout=1000)
    puller = LoopNode(LLMRole.MIX, duo.DECODER, transport=path)
    try:
        await source.open()
        await puller.open()
        links, target = puller.engine.links, Target(duo.PROMPT, source.engine.listen_address)
        before, number, reached = sockets() + (path == "shm"), 0, True  # which waits at one from its first link on
        tasks = len(asyncio.all_tasks())
        while reached:
            number += 1
            deadline = Deadline.after_ms(duo.TIMEOUT_MS)
            reached, error = await stopped_at(lambda: links._link(target, deadline), number, at=at)  # noqa: B023
            assert isinstance(error, asyncio.CancelledError) if reached else error is None
            assert (links.find(duo.PROMPT) is None) == reached
        assert number > 2
        link = links.find(duo.PROMPT)
        assert link is not None
        await link.check(Deadline.after_ms(duo.TIMEOUT_MS))
        await links._unlink(target, Deadline.after_ms(duo.TIMEOUT_MS), force=False)
        # (What the other side accepted in part, it drops once its handshake timeout is over.)
        await eventually(lambda: sockets() == before, lambda: f"{before} sockets before, {sockets()} now")
        await eventually(lambda: len(asyncio.all_tasks()) == tasks)
    finally:
        await puller.close()
        await source.close()


async def test_p8_allocating_and_copying_cancelled_at_every_await_leave_nothing() -> None:
    async with loop_pair(duo.BIG, transport="inproc") as pair:
        manager, memory = pair.puller.manager, pair.puller.engine.memory
        src, dst = [await pair.puller.allocate(duo.BIG) for _ in range(2)]
        set_canary(src)
        used = npu.used(memory, Placement.DEVICE)
        for make in (
            lambda: manager.copy_cache(dst, src, 0, 0, 0, -1, None).start(),
            lambda: manager.allocate_cache(duo.BIG, []).start(),
        ):
            number, reached = 0, True
            while reached:
                number += 1
                reached, error = await stopped_at(make, number)
                assert isinstance(error, asyncio.CancelledError) if reached else error is None
                for array in duo.arrays(dst):
                    array[:] = 0
                await asyncio.sleep(0.02)
                assert duo.untouched(dst), "written after the call had raised"
            assert number > 1
        assert npu.used(memory, Placement.DEVICE) == used + used // 2, "one allocation succeeded"
