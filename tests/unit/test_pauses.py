"""The pauses between attempts: none at first, then growing, bounded, and cut short by whoever waits."""

from __future__ import annotations

import asyncio
import time

from kvpull_async.pauses import Pauses


async def waits(pauses: Pauses, times: int) -> list[float]:
    took = []
    for _ in range(times):
        began = time.monotonic()
        await pauses.next()
        took.append(time.monotonic() - began)
    return took


async def test_there_is_none_before_the_first_attempt_and_then_they_grow_to_the_longest() -> None:
    pauses = Pauses(0.08)
    took = await waits(pauses, 6)
    assert took[1] >= 0.015
    assert all(pause >= 0.035 for pause in took[4:])  # half of the longest, at least
    assert took[0] < min(took[4:])
    assert repr(pauses) == "<Pauses next=0.08 s>"


async def test_who_waits_cuts_one_short_but_attempts_stay_apart() -> None:
    pauses = Pauses(30.0)
    for _ in range(12):  # by now a pause is a second or more
        pauses.hurry()
        await pauses.next()
    loop = asyncio.get_running_loop()
    loop.call_later(0.05, pauses.hurry)
    (took,) = await waits(pauses, 1)
    assert took < 0.9
    began = time.monotonic()
    for _ in range(5):
        pauses.hurry()
        await pauses.next()
    assert time.monotonic() - began >= 0.08


async def test_a_new_loss_begins_without_a_pause() -> None:
    pauses = Pauses(30.0)
    for _ in range(12):
        pauses.hurry()
        await pauses.next()
    pauses.begin()
    (took,) = await waits(pauses, 1)
    assert took < 0.5
