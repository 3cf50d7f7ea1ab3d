"""Unfinished greetings: how many there are, and whose go when there are too many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvpull_async.transport.greetings import Greetings

Task = asyncio.Task[None]


class Crowd:
    """Tasks that wait for ever, by name."""

    def __init__(self, most: int) -> None:
        self.greetings = Greetings(most)
        self.tasks: dict[str, Task] = {}
        self.blamed: str | None = None
        """The address of who had to go last."""

    def come(self, name: str, host: str) -> str | None:
        """Who had to go."""
        self.tasks[name] = asyncio.ensure_future(self._wait())
        gone = self.greetings.add(self.tasks[name], host)
        self.blamed = gone and gone[1]
        return next((known for known, task in self.tasks.items() if gone and task is gone[0]), None)

    @staticmethod
    async def _wait() -> None:
        await asyncio.Event().wait()


@pytest.fixture
async def crowd() -> AsyncIterator[Crowd]:
    made = Crowd(4)
    yield made
    for task in made.tasks.values():
        task.cancel()
    await asyncio.gather(*made.tasks.values(), return_exceptions=True)


async def test_nobody_goes_as_long_as_there_is_room(crowd: Crowd) -> None:
    assert [crowd.come(str(n), "a") for n in range(4)] == [None] * 4
    assert len(crowd.greetings) == 4


async def test_of_one_address_the_oldest_goes(crowd: Crowd) -> None:
    assert [crowd.come(str(n), "a") for n in range(6)] == [None] * 4 + ["0", "1"]
    assert len(crowd.greetings) == 4


async def test_a_crowd_from_one_address_pushes_out_its_own(crowd: Crowd) -> None:
    crowd.come("honest", "b")
    gone = [crowd.come(str(n), "a") for n in range(50)]
    assert gone == [None] * 3 + [str(n) for n in range(47)]
    assert crowd.blamed == "a"
    assert crowd.tasks["honest"] in crowd.greetings.all()


async def test_where_every_address_has_as_many_the_oldest_goes(crowd: Crowd) -> None:
    assert [crowd.come(str(n), str(n)) for n in range(6)] == [None] * 4 + ["0", "1"]


async def test_who_is_through_makes_room_and_counts_no_more(crowd: Crowd) -> None:
    for n in range(3):
        crowd.come(f"a{n}", "a")
    crowd.come("b0", "b")
    for n in (0, 1, 1):
        crowd.greetings.discard(crowd.tasks[f"a{n}"])
    assert [crowd.come("b1", "b"), crowd.come("c0", "c")] == [None, None]
    assert crowd.come("c1", "c") == "b0"
    assert crowd.greetings.all() == tuple(crowd.tasks[name] for name in ("a2", "b1", "c0", "c1"))
