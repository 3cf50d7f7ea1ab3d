"""P1: once a pull returned or raised, nothing writes to its destination any more, or the cache says so.

The destination is refilled with a canary right after the raise, and must not change: whatever ended the pull, at
whatever await, on every path.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from kvpull_async import LLMTimeoutError
from tests import duo
from tests.canaries import intact, set_canary
from tests.inject import stubborn_inproc
from tests.integration.own_loop import LoopPair, Suspended, loop_pair, prefix_key, stopped_at, within

pytestmark = pytest.mark.smoke

PATHS = ("tcp", "inproc", "shm", "stubborn")
SIZES = {"inline": duo.SMALL, "streamed": duo.BIG}


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the transport to use; "stubborn" is inproc with fetches that refuse to abort."""
    if request.param == "stubborn":
        stubborn_inproc(monkeypatch)
        return "inproc"
    return str(request.param)


def blank(cache: Any) -> None:
    for array in duo.arrays(cache):
        array[:] = 0


async def check_after(pair: LoopPair, stopped: Any, other: Any, *, number: int) -> None:
    """The next pull on the link is right, and when it is over the canary still stands."""
    assert not stopped.quarantined
    entry = number % 4
    blank(other)
    await within(pair.puller.pull(prefix_key(entry), other, 1))
    assert duo.holds(other, entry=1, source=entry), f"the pull after the one stopped at await {number}"
    assert intact(stopped), f"written after the pull stopped at await {number} had raised"


@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dialer", ["puller", "source"])
@pytest.mark.parametrize("at", ["wait", "wake"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "repeatedly"])
async def test_p1_cancelled_at_every_await_of_the_core(path: str, size: str, dialer: str, at: str, again: bool) -> None:
    async with loop_pair(SIZES[size], dialer=dialer, transport=path) as pair:
        stopped, other = [await pair.puller.allocate(SIZES[size]) for _ in range(2)]
        number, reached = 0, True
        while reached:
            number += 1
            blank(stopped)
            reached, error = await stopped_at(
                lambda: pair.puller.pull(prefix_key(), stopped), number, at=at, again=again
            )
            if reached:
                set_canary(stopped)
                assert isinstance(error, asyncio.CancelledError), error
            else:
                assert error is None
                assert duo.holds(stopped, entry=0, source=0)
                set_canary(stopped)
            await check_after(pair, stopped, other, number=number)
        assert number > 1, "a pull that never waits cannot have asked anybody"


@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize("size", SIZES)
async def test_p1_the_deadline_passes_at_every_await_of_the_core(path: str, size: str) -> None:
    """The loop is held at the k-th await until the deadline is over."""
    async with loop_pair(SIZES[size], transport=path) as pair:
        stopped, other = [await pair.puller.allocate(SIZES[size]) for _ in range(2)]
        await within(pair.puller.pull(prefix_key(), other))
        raised = 0
        for number in range(1, 12):
            blank(stopped)
            error = await deadline_at(pair, stopped, number)
            if error is None:
                assert duo.holds(stopped, entry=0, source=0)
            else:
                assert isinstance(error, LLMTimeoutError), error
                raised += 1
            set_canary(stopped)
            await check_after(pair, stopped, other, number=number)
        assert raised


async def deadline_at(pair: LoopPair, cache: Any, number: int) -> BaseException | None:
    end = time.monotonic() + 0.05
    pull = pair.puller.pull(prefix_key(), cache, timeout=50)
    steps = Suspended(pull, number, lambda: time.sleep(max(0.0, end + 0.01 - time.monotonic())))

    async def run() -> None:
        await steps

    (result,) = await within(asyncio.gather(run(), return_exceptions=True))
    return result  # type: ignore[no-any-return]
