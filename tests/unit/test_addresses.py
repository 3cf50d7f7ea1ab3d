"""Which cache has the memory at an address, up to the last byte."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpull_async.addresses import Addresses
from kvpull_async.registry import Entry, Registry
from kvpull_async.values import CacheDesc, DataType, Placement
from tests.loop_nodes import PlainMemory
from tests.strategies import thorough

BASE = 1 << 32


def adopted(
    registry: Registry, *begins: int, nbytes: int = 100, accessible: bool = True, allowed: frozenset[int] | None = None
) -> Entry:
    """A cache of tensors at made up addresses, which nothing here touches."""
    addresses = [BASE + begin for begin in begins]
    regions = registry.backend.adopt(addresses, tensor_nbytes=nbytes, placement=Placement.HOST)
    desc = CacheDesc(len(begins), [1, nbytes], DataType.DT_INT8)
    return registry.add(desc, regions, blocks=False, remote_accessible=accessible, allowed=allowed)


@pytest.fixture
def registry() -> Registry:
    return Registry(PlainMemory())


def found(registry: Registry, begin: int, nbytes: int = 1) -> tuple[int, int] | None:
    """The cache and the beginning of its tensor."""
    (hit,) = registry.find_addresses(np.array([BASE + begin], np.int64), nbytes)
    return None if hit is None else (hit[0].cache_id, hit[1].address - BASE)


def test_a_tensor_has_the_bytes_between_its_ends(registry: Registry) -> None:
    entry = adopted(registry, 1000, 5000).cache_id
    assert found(registry, 1000, 100) == (entry, 1000)
    assert found(registry, 5099, 1) == (entry, 5000)
    assert found(registry, 5050, 50) == (entry, 5000)
    for begin, nbytes in ((999, 1), (999, 50), (1000, 101), (1100, 1), (1001, 100), (4999, 102), (5099, 2)):
        assert found(registry, begin, nbytes) is None


def test_no_bytes_run_over_from_one_tensor_into_the_next(registry: Registry) -> None:
    entry = adopted(registry, 0, 100).cache_id
    assert found(registry, 0, 100) == (entry, 0)
    assert found(registry, 100, 100) == (entry, 100)
    assert found(registry, 50, 100) is None


@pytest.mark.parametrize("address", [-1, -(2**63), 0, 2**63 - 1])
@pytest.mark.parametrize("nbytes", [-1, 0, 1, 2**63 - 1, 2**63, 2**70])
def test_numbers_at_the_edges_name_nothing(registry: Registry, address: int, nbytes: int) -> None:
    adopted(registry, 0)
    adopted(registry, 2**63 - 50 - BASE, 2**64 - 50 - BASE)  # beyond what an offer can name
    assert found(registry, address - BASE, nbytes) is None
    assert found(registry, 0, 2**63 - 1) is None


def test_without_caches_nothing_is_found(registry: Registry) -> None:
    assert found(registry, 0) is None


def test_of_several_that_have_the_memory_the_youngest_counts(registry: Registry) -> None:
    older, younger = adopted(registry, 0, nbytes=1000), adopted(registry, 500)
    assert found(registry, 550) == (younger.cache_id, 500)
    assert found(registry, 550, 100) == (older.cache_id, 0)
    registry.release(younger)
    assert found(registry, 550) == (older.cache_id, 0)


def test_a_cache_is_found_as_long_as_it_is_registered(registry: Registry) -> None:
    entry = adopted(registry, 0)
    assert found(registry, 0) == (entry.cache_id, 0)
    pin = entry.pin(lambda: None)
    registry.release(entry)  # still in use, but nobody's any more
    assert found(registry, 0) is None
    pin.release()
    again = adopted(registry, 0)
    assert found(registry, 0) == (again.cache_id, 0)
    registry.close()
    assert found(registry, 0) is None


def test_a_cache_that_peers_must_not_reach_is_not_found(registry: Registry) -> None:
    adopted(registry, 0, accessible=False)
    assert found(registry, 0) is None


def test_many_addresses_are_answered_each_in_its_place(registry: Registry) -> None:
    older = adopted(registry, 0, nbytes=1000)
    closed, younger = adopted(registry, 200, accessible=False), adopted(registry, 500, 100)
    begins = [550, 2000, 100, 0, 999, 550, 200]
    hits = registry.find_addresses(np.array(begins, np.int64) + BASE, 1)
    at = [None if hit is None else (hit[0].cache_id, hit[1].address - BASE) for hit in hits]
    first, second = (older.cache_id, 0), (younger.cache_id, 500)
    assert at == [second, None, (younger.cache_id, 100), first, first, second, first]
    assert closed.alive
    assert registry.find_addresses(np.zeros(0, np.int64), 1) == []


def test_caches_that_come_and_go_do_not_fill_the_table(registry: Registry) -> None:
    stays = adopted(registry, 0)
    for number in range(1, 60):
        begins = [1000 * number + 100 * tensor for tensor in range(100)]
        goes = adopted(registry, *begins)
        assert found(registry, begins[-1]) == (goes.cache_id, begins[-1])
        registry.release(goes)
        assert found(registry, begins[0]) is None
    assert found(registry, 0) == (stays.cache_id, 0)
    assert len(registry._addresses._begins) < 4000


def test_a_cache_that_is_not_in_the_table_may_be_taken_out(registry: Registry) -> None:
    entry = adopted(registry, 0)
    addresses = Addresses()
    addresses.remove(entry)
    addresses.add(entry)
    for _ in range(2):
        addresses.remove(entry)
    assert "caches=0 rows=0" in repr(addresses)


def test_p6_a_lookup_takes_no_step_for_each_cache() -> None:
    """As many lines of Python, however many caches there are and however they overlap."""
    counts = []
    asked = np.arange(BASE, BASE + 12_800, 100)
    for caches, apart in ((1, 0), (40, 2**20), (40, 0)):
        registry = Registry(PlainMemory())
        for number in range(caches):
            adopted(registry, *(number * apart + 100 * tensor for tensor in range(128)))
        counts.append(lines(partial(registry.find_addresses, asked, 1)))
        assert found(registry, 150) == (1 if apart else caches, 100)
    assert len(set(counts)) == 1


def lines(call: Callable[[], object]) -> int:
    """How many lines of Python a call takes."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@thorough
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 60), min_size=1, max_size=3), st.integers(1, 30), st.booleans()), max_size=8
    ),
    st.lists(st.integers(-5, 95), max_size=12),
    st.integers(0, 35),
)
def test_it_finds_what_a_plain_search_finds(
    caches: list[tuple[list[int], int, bool]], asked: list[int], nbytes: int
) -> None:
    """Whatever overlaps, and whichever caches are gone again."""
    registry = Registry(PlainMemory())
    expected: list[tuple[int, int] | None] = [None] * len(asked)
    gone: list[Entry] = []
    for begins, size, stays in caches:
        entry = adopted(registry, *begins, nbytes=size)
        if not stays:
            gone.append(entry)
            continue
        for start in begins:
            for number, begin in enumerate(asked):
                if nbytes and start <= begin and begin + nbytes <= start + size:
                    expected[number] = (entry.cache_id, start)
    for entry in gone:
        registry.release(entry)
    hits = registry.find_addresses(np.array(asked, np.int64) + BASE, nbytes)
    assert [None if hit is None else (hit[0].cache_id, hit[1].address - BASE) for hit in hits] == expected


# -- whom a cache is for -----------------------------------------------------------------------------------------------


def test_a_cache_for_others_is_not_found_and_hides_no_older_one(registry: Registry) -> None:
    def look(begin: int, peer: int | None) -> int | None:
        (hit,) = registry.find_addresses(np.array([BASE + begin], np.int64), 10, peer=peer)
        return None if hit is None else hit[0].cache_id

    everyone = adopted(registry, 1000).cache_id
    mine = adopted(registry, 1050, allowed=frozenset({7})).cache_id
    theirs = adopted(registry, 1040, allowed=frozenset({8, 9})).cache_id
    nobodys = adopted(registry, 5000, allowed=frozenset()).cache_id
    assert [look(1060, peer) for peer in (7, 8, 9, 10)] == [mine, theirs, theirs, everyone]
    assert [look(1130, peer) for peer in (7, 8, 10)] == [mine, theirs, None]
    assert [look(5000, peer) for peer in (7, 8)] == [None, None]
    assert [look(begin, None) for begin in (1060, 5000)] == [theirs, nobodys]


def test_it_stays_so_while_the_table_grows_and_shrinks(registry: Registry) -> None:
    crowds = [None, frozenset({7}), frozenset({8}), frozenset({7, 8})]
    entries = [adopted(registry, 1000 * i, 1000 * i + 500, allowed=crowds[i % 4]) for i in range(3000)]
    for i, entry in enumerate(entries):
        if i % 3:
            registry.release(entry)
    points = np.array([BASE + 1000 * i + 500 for i in range(0, 3000, 3)], np.int64)
    for peer in (7, 8, 9):
        hits = registry.find_addresses(points, 100, peer=peer)
        wanted = [crowds[i % 4] is None or peer in (crowds[i % 4] or ()) for i in range(0, 3000, 3)]
        assert [hit is not None for hit in hits] == wanted


def test_lists_that_come_and_go_do_not_pile_up(registry: Registry) -> None:
    """And those that stay are told apart as before."""
    stays = adopted(registry, 0, allowed=frozenset({7}))
    for number in range(1, 5000):
        registry.release(adopted(registry, 1000 * number, allowed=frozenset({10 * number})))
    assert len(registry._addresses._allowed) < 4000
    everyone = adopted(registry, 500)
    asked = np.array([BASE, BASE + 500], np.int64)
    for peer, wanted in ((7, [stays, everyone]), (8, [None, everyone]), (10, [None, everyone])):
        hits = registry.find_addresses(asked, 100, peer=peer)
        assert [None if hit is None else hit[0] for hit in hits] == wanted


def test_p6_a_lookup_takes_no_step_for_the_lists_of_caches_elsewhere() -> None:
    counts = []
    for caches in (2, 400):
        registry = Registry(PlainMemory())
        for number in range(caches):
            adopted(registry, 1000 * number, allowed=frozenset({number}))
        counts.append(lines(partial(registry.find_addresses, np.array([BASE + 1000], np.int64), 1, peer=1)))
    assert counts[0] == counts[1]
