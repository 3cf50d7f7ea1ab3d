"""Which cache has the memory at an address, up to the last byte."""

from __future__ import annotations

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


def adopted(registry: Registry, *begins: int, nbytes: int = 100, accessible: bool = True) -> Entry:
    """A cache of tensors at made up addresses, which nothing here touches."""
    addresses = [BASE + begin for begin in begins]
    regions = registry.backend.adopt(addresses, tensor_nbytes=nbytes, placement=Placement.HOST)
    desc = CacheDesc(len(begins), [1, nbytes], DataType.DT_INT8)
    return registry.add(desc, regions, blocks=False, remote_accessible=accessible)


@pytest.fixture
def registry() -> Registry:
    return Registry(PlainMemory())


def found(registry: Registry, begin: int, nbytes: int = 1) -> tuple[int, int] | None:
    """The cache and the beginning of its tensor."""
    hit = registry.find_address(BASE + begin, nbytes)
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


@pytest.mark.parametrize("address", [-1, -(2**63), 0, 2**63 - 1, 2**63, 2**64])
@pytest.mark.parametrize("nbytes", [-1, 0, 1, 2**63 - 1, 2**63, 2**70])
def test_numbers_at_the_edges_name_nothing(registry: Registry, address: int, nbytes: int) -> None:
    adopted(registry, 0)
    assert registry.find_address(address, nbytes) is None
    assert registry.find_address(BASE, 2**63 - 1) is None


def test_without_caches_nothing_is_found(registry: Registry) -> None:
    assert registry.find_address(BASE, 1) is None


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


def test_the_table_is_made_once_for_many_questions() -> None:
    made: list[int] = []
    registry = Registry(PlainMemory())
    entry = adopted(registry, 0)

    def entries() -> list[Entry]:
        made.append(1)
        return [entry]

    addresses = Addresses(entries)
    for _ in range(3):
        assert addresses.find(BASE, 1) is not None
    assert len(made) == 1
    addresses.forget()
    addresses.find(BASE, 1)
    assert len(made) == 2


@thorough
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 60), min_size=1, max_size=3), st.integers(1, 30)), max_size=5),
    st.integers(-5, 95),
    st.integers(0, 35),
)
def test_it_finds_what_a_plain_search_finds(caches: list[tuple[list[int], int]], begin: int, nbytes: int) -> None:
    registry = Registry(PlainMemory())
    expected = None
    for begins, size in caches:
        entry = adopted(registry, *begins, nbytes=size)
        for start in begins:
            if nbytes and start <= begin and begin + nbytes <= start + size:
                expected = (entry.cache_id, start)
    assert found(registry, begin, nbytes) == expected
    assert registry.find_address(int(np.int64(BASE + begin)), nbytes) == registry.find_address(BASE + begin, nbytes)
