"""What every contender is made of: a source in one process and a puller in another. It must not know any contender."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from workloads import Arena, Shape, Workload

__all__ = ["Puller", "SeedSource", "Source", "repeat", "repeat_awaiting"]

AwaitableCall = Callable[[], Awaitable[object]]


class Source(ABC):
    """Holds the memory and answers pulls in threads of its own."""

    @abstractmethod
    def open(self, shape: Shape, works: Sequence[Workload], *, seed: int) -> Any:
        """Fill the memory and begin to serve. What the puller must know, as something a pipe can carry."""

    def arenas(self) -> Sequence[Arena]:
        """The memory that pulls read."""
        return ()

    def close(self) -> None:
        """Stop serving; the process ends afterwards."""


class SeedSource(Source):
    """For contenders of one process: the puller makes what it reads, out of the same seed."""

    def __init__(self, *, huge: bool = False) -> None:
        """The size of pages is the puller's matter."""

    def open(self, shape: Shape, works: Sequence[Workload], *, seed: int) -> Any:
        return seed


class Puller(ABC):
    """Pulls into memory of its own."""

    @abstractmethod
    def open(self, shape: Shape, works: Sequence[Workload], *, told: Any) -> None:
        """Connect. `told` comes from the source."""

    @abstractmethod
    def arena(self, work: Workload) -> Arena:
        """The memory that this workload's pulls fill."""

    @abstractmethod
    def pull(self, work: Workload, count: int, mode: str = "") -> list[float]:
        """The seconds of each of `count` repetitions of the workload, or of fewer within its budget.

        `mode` is one of the ways of pulling that the contender knows.
        """

    def close(self) -> None:
        """Disconnect; the process ends afterwards."""


def repeat(calls: Sequence[Callable[[], object]], count: int, *, budget: float) -> list[float]:
    """Make all the calls in turn, `count` times or until the budget (s) is spent; the seconds of each time."""
    seconds: list[float] = []
    clock = time.perf_counter
    end = clock() + budget
    while len(seconds) < count:
        began = clock()
        for call in calls:
            call()
        ended = clock()
        seconds.append(ended - began)
        if ended > end:
            break
    return seconds


async def repeat_awaiting(calls: Sequence[AwaitableCall], count: int, *, budget: float) -> list[float]:
    """As `repeat`, awaiting each call on one event loop."""
    seconds: list[float] = []
    clock = time.perf_counter
    end = clock() + budget
    while len(seconds) < count:
        began = clock()
        for call in calls:
            await call()
        ended = clock()
        seconds.append(ended - began)
        if ended > end:
            break
        await asyncio.sleep(0)
    return seconds
