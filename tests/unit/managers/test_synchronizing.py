"""Where the caller's `synchronize_layer` runs, and what becomes of its answer, its exceptions and its blocking."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvpull_async import LayerSynchronizer, LLMException, LLMStatusCode
from kvpull_async.managers.synchronizing import asker
from tests.transferring import BOUND, Held, Ready, ReadyLater

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("WHO", default="nobody")


class Foreign:
    """An event loop on a thread of its own, as a caller's is, seen from the core."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="callers-loop", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close it under whatever still waits there."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(BOUND)
        self.loop.close()


@pytest.fixture
async def foreign() -> AsyncIterator[Foreign]:
    made = Foreign()
    yield made
    if not made.loop.is_closed():
        made.stop()


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


async def test_a_plain_function_runs_on_one_thread_of_its_own() -> None:
    ready = Ready(lambda layer: layer < 2)
    asking = asker(ready, None, name="the-thread")
    assert not named("the-thread"), "none before it is needed"
    assert [await asking.ask(layer) for layer in (0, 1, 2)] == [(True, None), (True, None), (False, None)]
    assert ready.asked == [(0, None), (1, None), (2, None)]
    assert {(thread.name, thread.daemon) for thread in ready.threads} == {("the-thread", True)}
    assert len({thread.ident for thread in ready.threads}) == 1
    assert await asking.end()


async def test_it_does_not_hold_the_loop_that_asks() -> None:
    held = Held()
    asking = asker(held, None, name="the-thread")
    asked = asyncio.create_task(asking.ask(0))
    while not held.entered.is_set():  # noqa: ASYNC110  (another thread sets it)
        await asyncio.sleep(0.001)
    assert not asked.done()
    held.let_go()
    assert await asked == (True, None)
    assert await asking.end()


async def test_a_function_that_does_not_return_is_left_behind_with_word_of_it() -> None:
    held = Held()
    asking = asker(held, None, name="the-thread")
    asked = asyncio.create_task(asking.ask(0))
    while not held.entered.is_set():  # noqa: ASYNC110  (another thread sets it)
        await asyncio.sleep(0.001)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert not await asking.end()
    held.let_go()
    (thread,) = named("the-thread")
    await asyncio.to_thread(thread.join, BOUND)
    assert not thread.is_alive(), "once its function returns it ends"


async def test_ending_what_never_began_is_easy() -> None:
    assert await asker(Ready(), None, name="the-thread").end()


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), StopIteration(), GeneratorExit()]
)
async def test_whatever_it_raises_is_handed_over(error: BaseException) -> None:
    def refuse(layer: int) -> bool:
        raise error

    asking = asker(Ready(refuse), None, name="the-thread")
    assert await asking.ask(0) == (False, error)
    assert await asking.ask(1) == (False, error), "the thread has survived it"
    assert await asking.end()


@pytest.mark.parametrize("answer", [None, 0, "", []])
async def test_what_is_not_true_is_a_refusal(answer: Any) -> None:
    asking = asker(Ready(lambda _: answer), None, name="the-thread")
    assert await asking.ask(0) == (False, None)
    assert await asking.end()


@pytest.mark.filterwarnings("error")
async def test_an_awaitable_is_not_taken_for_true() -> None:
    async def later() -> bool:
        return True

    asking = asker(Ready(lambda _: later()), None, name="the-thread")
    ready, error = await asking.ask(0)
    assert not ready
    assert isinstance(error, TypeError)
    assert "awaitable API" in str(error)
    assert await asking.end()


async def test_what_an_ordinary_function_returns_is_awaited_on_the_callers_loop(foreign: Foreign) -> None:
    """A decorated coroutine function does not look like one."""
    loops: list[asyncio.AbstractEventLoop] = []

    async def later(layer: int) -> bool:
        loops.append(asyncio.get_running_loop())
        if layer == 2:
            raise KeyError("two")
        return layer == 0

    asking = asker(Ready(later), foreign.loop, name="the-thread")
    assert [await asking.ask(layer) for layer in (0, 1)] == [(True, None), (False, None)]
    _, error = await asking.ask(2)
    assert isinstance(error, KeyError)
    assert loops == [foreign.loop] * 3
    assert await asking.end()


async def test_the_callers_context_is_there() -> None:
    WHO.set("the caller")
    seen: list[str] = []
    asking = asker(Ready(lambda _: not seen.append(WHO.get())), None, name="the-thread")
    assert await asking.ask(0) == (True, None)
    assert seen == ["the caller"]
    assert await asking.end()


# -- coroutine functions -----------------------------------------------------------------------------------------------


def test_a_coroutine_function_needs_a_loop() -> None:
    with pytest.raises(TypeError, match="awaitable API and a running event loop"):
        asker(ReadyLater(), None, name="the-thread")


async def test_a_coroutine_function_runs_on_the_callers_loop(foreign: Foreign) -> None:
    later = ReadyLater(lambda layer: layer == 0)
    asking = asker(later, foreign.loop, name="the-thread")
    assert [await asking.ask(layer) for layer in (0, 1)] == [(True, None), (False, None)]
    assert later.loops == [foreign.loop] * 2
    assert not named("the-thread")
    assert await asking.end()


async def test_what_a_coroutine_raises_is_handed_over(foreign: Foreign) -> None:
    error = ValueError("no")

    def refuse(layer: int) -> bool:
        raise error

    asking = asker(ReadyLater(refuse), foreign.loop, name="the-thread")
    assert await asking.ask(0) == (False, error)
    assert await asking.end()


class Forever(LayerSynchronizer):
    """Its task is `task`; it ends by cancellation only."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None
        self.cancelled = threading.Event()

    async def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.task = asyncio.current_task()
        try:
            await asyncio.sleep(BOUND)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return True


async def begun(asking: Any, forever: Forever) -> asyncio.Task[Any]:
    asked = asyncio.create_task(asking.ask(0))
    give_up = time.monotonic() + BOUND
    while forever.task is None and time.monotonic() < give_up:  # noqa: ASYNC110  (another thread sets it)
        await asyncio.sleep(0.001)
    return asked


async def test_a_coroutine_that_its_loop_cancels_is_a_failure(foreign: Foreign) -> None:
    forever = Forever()
    asking = asker(forever, foreign.loop, name="the-thread")
    asked = await begun(asking, forever)
    assert forever.task is not None
    foreign.loop.call_soon_threadsafe(forever.task.cancel)
    _, error = await asked
    assert isinstance(error, LLMException)
    assert error.status_code is LLMStatusCode.LLM_FAILED
    assert "cancelled" in str(error)


async def test_nobody_waits_for_a_coroutine_whose_loop_has_closed(foreign: Foreign) -> None:
    forever = Forever()
    asking = asker(forever, foreign.loop, name="the-thread")
    asked = await begun(asking, forever)
    foreign.stop()
    for _, error in (await asked, await asking.ask(1)):
        assert isinstance(error, LLMException)
        assert error.status_code is LLMStatusCode.LLM_FAILED
        assert "event loop" in str(error)
    assert await asking.end()
    assert forever.task is not None
    forever.task._log_destroy_pending = False  # type: ignore[attr-defined]  # its loop was closed under it, on purpose


async def test_the_end_cancels_a_coroutine(foreign: Foreign) -> None:
    forever = Forever()
    asking = asker(forever, foreign.loop, name="the-thread")
    asked = await begun(asking, forever)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert await asking.end()
    assert await asyncio.to_thread(forever.cancelled.wait, BOUND)
