"""What became of keys: told with the time that has passed, to those who may know, and not remembered for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvpull_async import fates
from kvpull_async.fates import Fates
from kvpull_async.held import Entry, KeyId


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def entry(*allowed: int, restricted: bool = False) -> Entry:
    return cast("Entry", SimpleNamespace(allowed=frozenset(allowed) if allowed or restricted else None))


def name(number: int) -> KeyId:
    return ("request", number, 0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def made(clock: Clock, **options: Any) -> Fates:
    return Fates(clock=clock, **options)


@pytest.mark.parametrize("what", [fates.PULLED, fates.EXPIRED, fates.RELEASED, fates.UNMADE])
def test_what_became_of_a_key_and_how_long_ago(clock: Clock, what: str) -> None:
    told = made(clock)
    told.note(name(1), what, entry())
    clock.now += 1.2344
    assert told.of(name(1), peer=5) == f"{what} 1234 ms ago"
    assert told.of(name(2), peer=5) == "never published"


def test_the_last_thing_that_happened_counts(clock: Clock) -> None:
    told = made(clock)
    told.note(name(1), fates.PULLED, entry())
    clock.now += 10
    told.note(name(1), fates.EXPIRED, entry(), since=clock.now - 2)
    assert told.of(name(1), peer=None) == "expired 2000 ms ago"
    assert len(told) == 1


def test_who_may_not_know_of_a_cache_hears_nothing_of_its_keys(clock: Clock) -> None:
    told = made(clock)
    told.note(name(1), fates.PULLED, entry(7, 8))
    told.note(name(2), fates.PULLED, entry(restricted=True))
    assert told.of(name(1), peer=7) == told.of(name(1), peer=None) == "pulled already 0 ms ago"
    assert told.of(name(1), peer=9) == told.of(name(2), peer=7) == told.of(name(3), peer=9) == "never published"
    assert told.of(name(2), peer=None) == "pulled already 0 ms ago"


def test_it_forgets_the_oldest_and_says_that_it_may_have(clock: Clock) -> None:
    told = made(clock, limit=3)
    for number in (1, 2, 3, 1, 4):
        told.note(name(number), fates.PULLED, entry(7))
    assert len(told) == 3
    assert told.of(name(2), peer=7) == told.of(name(1), peer=9) == "never published, or not among the last 3 that went"
    assert [told.of(name(number), peer=7) for number in (1, 3, 4)] == ["pulled already 0 ms ago"] * 3


def test_thousands_are_remembered_and_no_more() -> None:
    told = Fates()
    for number in range(10_000):
        told.note(name(number), fates.PULLED, entry())
    assert len(told) == 4096
    assert "pulled already" in told.of(name(9_000), peer=1)
    assert "last 4096" in told.of(name(1_000), peer=1)


def test_what_others_may_not_know_of_is_no_news_to_them(clock: Clock) -> None:
    """Not even by the words that they heard before being replaced."""
    known = made(clock)
    known.note(name(5), fates.PULLED, entry())
    clock.now += 1
    known.note(name(5), fates.RELEASED, entry(7))
    assert known.of(name(5), peer=2) == "pulled already 1000 ms ago"
    assert known.of(name(5), peer=7) == "released 0 ms ago"
    assert known.of(name(5), peer=None) == "released 0 ms ago"
