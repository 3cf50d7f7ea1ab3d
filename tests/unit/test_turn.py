"""What pulls and pushes share of their way: how they are ended from elsewhere, what they hold, the caller's error."""

from __future__ import annotations

import asyncio
import errno
import mmap
import time
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.memory.host import HostMemory
from kvpull_async.observe import Report
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.turn import GRACE, Turn, cause_of
from kvpull_async.values import CacheDesc, DataType, Placement
from tests.loop_nodes import eventually
from tests.serving import Scene

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


class Wait(Turn):
    """A turn that takes the memory and then waits for what it is given."""

    def __init__(self, scene: Scene, work: Callable[[], Awaitable[Any]], timeout_ms: float = 60_000) -> None:
        self.left: list[Turn] = []
        link = SimpleNamespace(settle_timeout=5.0, peer_name="peer:1", leave=self.left.append)
        report = Report("a_call", "p")
        super().__init__(link, scene.entry, Deadline.after_ms(timeout_ms), report)  # type: ignore[arg-type]
        self._work = work
        self.unsafe = False

    async def run(self) -> None:
        self._task = asyncio.current_task()
        timer = asyncio.get_running_loop().call_at(self._deadline.at, self._interrupt)
        try:
            self._holds_slot = True
            self._claim_memory()
            await self._work()
            self._committed = True
        except BaseException as error:
            if self._wished(error):
                raise
            raise self._explain(error, self.unsafe) from cause_of(error)
        finally:
            timer.cancel()
            self._leave()

    def _where(self) -> str:
        return "while it waited"


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


async def failure(turn: Wait) -> LLMException:
    with pytest.raises(LLMException) as caught:
        await turn.run()
    return caught.value


async def begun(turn: Wait) -> asyncio.Task[None]:
    task = asyncio.ensure_future(turn.run())
    await eventually(lambda: turn._pin is not None)
    return task


def raising(error: BaseException) -> Callable[[], Awaitable[None]]:
    async def work() -> None:
        raise error

    return work


async def test_it_holds_memory_and_slot_as_long_as_it_runs() -> None:
    scene = Scene()
    gate = asyncio.Event()
    turn = Wait(scene, gate.wait)
    task = await begun(turn)
    assert scene.entry.busy
    assert turn.left == []
    gate.set()
    await task
    assert not scene.entry.busy
    assert turn.left == [turn]


async def test_who_stops_it_first_says_with_what_it_ends() -> None:
    scene = Scene()
    turn = Wait(scene, forever)
    task = await begun(turn)
    given = LLMException("unlinked", status_code=LLMStatusCode.LLM_NOT_YET_LINK, retry_safe=True)
    turn.stop(given)
    turn.stop(LLMException("another"))
    with pytest.raises(LLMException, match="unlinked") as caught:
        await task
    assert caught.value is not given  # an exception that several callers see would collect their tracebacks
    assert (caught.value.status_code, caught.value.retry_safe) == (given.status_code, True)
    assert not scene.entry.busy


async def test_a_stop_is_no_cancellation_of_the_task() -> None:
    turn = Wait(Scene(), forever)

    async def caller() -> str:
        with pytest.raises(LLMException):
            await turn.run()
        await asyncio.sleep(0)
        count = getattr(asyncio.current_task(), "cancelling", lambda: 0)  # what scopes of Python 3.11 and later look at
        return "went on" if not count() else "counts as cancelled"

    task = asyncio.ensure_future(caller())
    await eventually(lambda: turn._pin is not None)
    turn.stop(LLMException("stop"))
    assert await task == "went on"


async def test_what_has_happened_cannot_be_stopped_any_more() -> None:
    turn = Wait(Scene(), lambda: asyncio.sleep(0))

    async def caller() -> str:
        await turn.run()
        turn.stop(LLMException("too late"))
        await asyncio.sleep(0)
        return "went on"

    assert await asyncio.ensure_future(caller()) == "went on"


async def test_the_callers_cancellation_stays_one() -> None:
    task = await begun(turn := Wait(Scene(), forever))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert turn.left == [turn]


async def test_the_deadline_is_told_with_its_length_and_where_it_passed() -> None:
    began = time.monotonic()
    error = await failure(Wait(Scene(), forever, 40))
    assert time.monotonic() - began < 5
    assert isinstance(error, LLMTimeoutError)
    assert "the deadline of 40 ms passed while it waited" in str(error)
    assert error.retry_safe


@pytest.mark.parametrize("unsafe", [False, True])
async def test_what_may_still_be_written_must_not_be_tried_again(unsafe: bool) -> None:
    turn = Wait(Scene(), raising(LLMException("x", retry_safe=True)))
    turn.unsafe = unsafe
    error = await failure(turn)
    assert (error.destination_unsafe, error.retry_safe) == (unsafe, not unsafe)


async def test_a_released_cache_is_not_used() -> None:
    scene = Scene()
    scene.registry.discard(scene.entry)
    error = await failure(Wait(scene, forever))
    assert (str(error), error.status_code) == (f"cache {scene.entry.cache_id} was released", NOT_EXIST)


async def test_memory_that_may_only_be_read_is_good_for_turns_that_read_it() -> None:
    scene, constant = Scene(), np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ), np.uint8)
    regions = HostMemory().adopt([constant.ctypes.data], tensor_nbytes=16, placement=Placement.HOST)
    scene.entry = scene.registry.add(CacheDesc(1, [2, 8], DataType.DT_INT8), regions, blocks=False)
    await Wait(scene, partial(asyncio.sleep, 0)).run()
    writer = Wait(scene, partial(asyncio.sleep, 0))
    writer.writes = True
    error = await failure(writer)
    assert (error.status_code, scene.entry.busy) == (LLMStatusCode.LLM_PARAM_INVALID, False)
    assert "read-only" in str(error)


async def test_a_cache_that_is_taken_away_ends_what_uses_it() -> None:
    scene = Scene()
    task = await begun(Wait(scene, forever))
    scene.registry.release(scene.entry)
    scene.entry.cut_pins()
    with pytest.raises(LLMException, match=f"cache {scene.entry.cache_id} was released meanwhile") as caught:
        await task
    assert caught.value.status_code == NOT_EXIST


async def test_a_broken_transfer_is_the_links_trouble_and_a_bug_is_called_one() -> None:
    reset = ConnectionResetError(errno.ECONNRESET, "reset")
    error = await failure(Wait(Scene(), raising(reset)))
    assert (error.status_code, error.retry_safe) == (LLMStatusCode.LLM_LINK_FAILED, True)
    assert error.__cause__ is reset
    error = await failure(Wait(Scene(), raising(ZeroDivisionError("oh"))))
    assert "internal error: ZeroDivisionError('oh')" in str(error)
    assert (error.status_code, error.retry_safe) == (LLMStatusCode.LLM_FAILED, False)


async def test_what_is_being_stopped_is_waited_for_within_the_promise() -> None:
    late = Wait(Scene(), forever, -5_000)._bound()
    assert 0 < late.remaining < 1  # a core that comes late waits a little all the same
    turn = Wait(Scene(), forever, 1_000)
    assert turn._bound().remaining <= 1 + GRACE
    turn._link.settle_timeout = 0.01
    assert turn._bound().remaining <= 0.01


def test_the_cause_is_what_was_raised_below() -> None:
    below = OSError("below")
    wrapped = LLMException("x")
    wrapped.__cause__ = below
    assert cause_of(below) is below
    assert cause_of(wrapped) is below
    assert cause_of(asyncio.CancelledError()) is None


async def test_p1_an_error_that_says_itself_that_the_memory_may_still_be_written_goes_on_saying_so() -> None:
    async def closed() -> None:
        raise LLMException("closed under a copy", retry_safe=True, destination_unsafe=True)

    with pytest.raises(LLMException, match="closed under") as caught:
        await Wait(Scene(), closed).run()
    assert caught.value.destination_unsafe
    assert not caught.value.retry_safe
