"""Keys that end by themselves: each in its time, with one timer, in bounded steps."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvpull_async import leases as source
from kvpull_async.held import Binding
from kvpull_async.leases import Leases
from tests.loop_nodes import eventually


def binding(number: int) -> Binding:
    return Binding(cast("Any", None), 0, ("request", number, 0), number)


class Kept:
    """Leases, and what they told."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.at: dict[int, float] = {}
        self.turns: list[int] = []
        self.leases = Leases(self._ended, lambda gone: self.turns.append(len(gone)), clock=clock)

    def _ended(self, gone: Binding) -> None:
        assert gone.key[1] not in self.at
        self.at[gone.key[1]] = time.monotonic()
        self.leases.drop(gone)

    async def all(self, count: int) -> None:
        await eventually(lambda: len(self.at) == count, f"{count} ends, not {len(self.at)}")


def timers() -> int:
    loop: Any = asyncio.get_running_loop()
    return sum(not handle.cancelled() for handle in loop._scheduled)


async def test_keys_end_in_time_and_not_before() -> None:
    kept, began, rng = Kept(), time.monotonic(), random.Random(5)
    wanted = {number: rng.uniform(0.001, 0.3) for number in range(300)}
    for number, seconds in wanted.items():
        kept.leases.set(binding(number), seconds)
    assert len(kept.leases) == 300
    await kept.all(300)
    for number, at in kept.at.items():
        assert at >= began + wanted[number]
    assert len(kept.leases) == 0
    assert sum(kept.turns) == 300
    assert len(kept.turns) < 150, "those of about the same time are told together"


async def test_there_is_one_timer_however_many_there_are() -> None:
    kept, before = Kept(), timers()
    many = [binding(number) for number in range(20_000)]
    for number, one in enumerate(many):
        kept.leases.set(one, 5 + number % 60)
    assert timers() <= before + 1
    assert len(kept.leases._steps) < 5000
    for one in many:
        kept.leases.drop(one)
    assert timers() == before
    assert (len(kept.leases), kept.leases._steps, kept.leases._due) == (0, [], {})


async def test_what_comes_and_goes_all_the_time_leaves_nothing_behind() -> None:
    """A key that was pulled long before its end has no place in a heap until then."""
    kept = Kept()
    stays = binding(-1)
    kept.leases.set(stays, 3600)
    for number in range(5000):
        one = binding(number)
        kept.leases.set(one, 3600 + number % 1000)
        kept.leases.drop(one)
    assert len(kept.leases) == 1
    assert len(kept.leases._steps) < 500
    kept.leases.clear()


async def test_an_end_may_be_put_off_and_brought_forward() -> None:
    kept, began = Kept(), time.monotonic()
    later, sooner, gone = binding(1), binding(2), binding(3)
    kept.leases.set(later, 0.02)
    kept.leases.set(sooner, 3600)
    kept.leases.set(gone, 0.02)
    for _ in range(50):
        kept.leases.set(later, 0.2)
    kept.leases.set(sooner, 0.05)
    kept.leases.drop(gone)
    assert not kept.leases.over(later)
    await kept.all(2)
    assert set(kept.at) == {1, 2}
    assert kept.at[2] <= kept.at[1]
    assert kept.at[1] >= began + 0.2
    assert not kept.leases.over(gone)


async def test_many_ends_at_once_are_spread_over_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_SLICE", 0.0)  # every look at the clock finds it over
    kept = Kept()
    for number in range(50):
        kept.leases.set(binding(number), 0.01)
    await kept.all(50)
    assert max(kept.turns) <= 2


async def test_whoever_looks_knows_to_the_millisecond() -> None:
    now = 1000.0
    kept = Kept(clock=lambda: now)
    one = binding(1)
    kept.leases.set(one, 3600)
    now += 3599.999
    assert not kept.leases.over(one)
    now += 0.001
    assert kept.leases.over(one)
    kept.leases.clear()


@pytest.mark.parametrize("seconds", [0.001, 0.009, 0.5, 1.0, 60.0, 3600.0, 2**31 / 1000])
def test_a_step_comes_at_or_shortly_after_the_end(seconds: float) -> None:
    rng = random.Random(seconds)
    for _ in range(1000):
        now = rng.uniform(0, 1e6)
        late = source._step(now, seconds) - (now + seconds) * 1000
        assert 0 <= late <= max(10, seconds * 1000 / 64)
