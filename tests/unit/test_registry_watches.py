"""Watches of the registry: who waits for a name is called once, when it is here, and is forgotten without a trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpull_async.registry import Registry
from kvpull_async.values import BlocksCacheKey
from tests.unit.test_registry import Memory, allocated, prefix_key, registered, request_key

NAME = ("request", 1, 0)


@pytest.fixture
def registry() -> Registry:
    return Registry(Memory())


class Calls:
    """One who waits; `also` is done when it is called."""

    def __init__(self, also: Callable[[], object] = lambda: None) -> None:
        self.times = 0
        self._also = also

    def __call__(self) -> None:
        self.times += 1
        self._also()


@pytest.mark.parametrize("make", [allocated, registered], ids=["allocated", "registered"])
def test_a_name_is_here_from_its_binding_to_its_end(registry: Registry, make: Callable[..., object]) -> None:
    early, late = Calls(), Calls()
    registry.watch(NAME, early)
    assert early.times == 0
    make(registry, request_key(1))
    registry.watch(NAME, late)
    assert (early.times, late.times) == (1, 1)


def test_names_of_another_kind_number_or_model_are_others(registry: Registry) -> None:
    others = [Calls() for _ in range(3)]
    for name, calls in zip([("prefix", 1, 0), ("request", 2, 0), ("request", 1, 5)], others, strict=True):
        registry.watch(name, calls)
    allocated(registry, request_key(1))
    assert [calls.times for calls in others] == [0, 0, 0]
    allocated(registry, prefix_key(1))
    assert [calls.times for calls in others] == [1, 0, 0]


def test_all_who_wait_for_a_name_are_called_even_if_one_forgets_itself_or_others(registry: Registry) -> None:
    forgets: list[Callable[[], None]] = []

    def forget_all() -> None:
        for forget in forgets:
            forget()

    waiting = [Calls(forget_all) for _ in range(5)]
    forgets += [registry.watch(NAME, calls) for calls in waiting]
    allocated(registry, request_key(1))
    assert [calls.times for calls in waiting] == [1] * 5
    assert registry._watches == {}


def test_who_watches_again_when_it_is_called_waits_for_the_next_time_only_if_the_name_has_gone(
    registry: Registry,
) -> None:
    again = Calls()
    registry.watch(NAME, Calls(lambda: registry.watch(NAME, again)))
    allocated(registry, request_key(1))
    assert again.times == 1


def test_what_is_taken_back_is_not_called_and_leaves_nothing(registry: Registry) -> None:
    calls, other = Calls(), Calls()
    forget = registry.watch(NAME, calls)
    registry.watch(NAME, other)
    forget()
    forget()
    allocated(registry, request_key(1))
    assert (calls.times, other.times) == (0, 1)
    forget()
    last = registry.watch(("request", 2, 0), calls)
    last()
    assert registry._watches == {}


def test_taking_back_an_old_watch_leaves_a_newer_one_of_the_name_alone(registry: Registry) -> None:
    first, second = Calls(), Calls()
    forget = registry.watch(NAME, first)
    allocated(registry, request_key(1))
    registry.remove_key(request_key(1))
    registry.watch(NAME, second)
    forget()
    allocated(registry, request_key(1))
    assert (first.times, second.times) == (1, 1)


def test_a_cache_appears_with_its_id_and_is_here_while_anything_refers_to_it(registry: Registry) -> None:
    early, late, never = Calls(), Calls(), Calls()
    registry.watch(("cache", 1, 0), early)
    entry = allocated(registry, request_key(1))
    assert early.times == 1
    registry.release(entry)  # its key refers to it still
    registry.watch(("cache", 1, 0), late)
    assert late.times == 1
    registry.remove_key(request_key(1))
    registry.watch(("cache", 1, 0), never)
    assert never.times == 0


def test_a_blocks_cache_appears_with_its_model(registry: Registry) -> None:
    early, late = Calls(), Calls()
    registry.watch(("blocks", 0, 4), early)
    entry = allocated(registry, blocks=True)
    assert early.times == 0
    registry.bind_blocks(entry, BlocksCacheKey(1, 4))
    registry.watch(("blocks", 0, 4), late)
    assert (early.times, late.times) == (1, 1)
    registry.release(entry)
    gone = Calls()
    registry.watch(("blocks", 0, 4), gone)
    assert gone.times == 0
