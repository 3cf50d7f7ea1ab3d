"""Keys that end by themselves, what became of keys, and caches for some clusters only, as the tables have them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvpull_async.registry import Entry, Registry, key_id
from kvpull_async.values import BlocksCacheKey, CacheKey, Placement
from tests.loop_nodes import eventually
from tests.unit.test_registry import DESC, Memory, allocated, found, generation, prefix_key, request_key


@pytest.fixture
def registry() -> Registry:
    return Registry(Memory())


# -- leases and fates --------------------------------------------------------------------------------------------------


class Told:
    """What a registry says of keys that have expired."""

    def __init__(self) -> None:
        self.names: list[tuple[str, int, int]] = []
        self.registry = Registry(Memory(), expired=lambda gone: self.names.extend(one.key for one in gone))

    def leased(self, *keys: CacheKey, lease: float) -> Entry:
        entry = allocated(self.registry)
        self.registry.bind(entry, keys, lease=lease)
        return entry


async def test_a_lease_ends_a_key_and_with_the_last_one_the_cache() -> None:
    told = Told()
    entry = told.leased(request_key(1), request_key(2), lease=0.02)
    told.registry.release(entry)
    assert told.registry.entries() == [entry]
    await eventually(lambda: not told.registry.entries())
    assert sorted(told.names) == [("request", 1, 0), ("request", 2, 0)]
    assert not told.registry.consume(1, range(4))


async def test_a_key_whose_time_is_over_is_gone_for_whoever_looks_and_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told()
    registry, now = told.registry, time.monotonic()
    monkeypatch.setattr(registry._leases, "_clock", lambda: now)
    entry = told.leased(request_key(1), request_key(2), prefix_key(3), lease=3600)
    now += 3599
    assert found(registry, request_key(1)) == (entry, 0)
    now += 1
    assert registry.nearest_keys(key_id(request_key(1))) == []
    assert found(registry, request_key(1)) is None
    by_id = registry.find_id(entry.cache_id, 1)
    assert by_id == (entry, None)
    told_of: list[int] = []
    registry.watch(("prefix", 3, 0), lambda: told_of.append(3))
    assert told_of == []
    registry.check_keys(DESC, [prefix_key(3)])
    registry.bind(entry, [request_key(1)])  # its place and its name are free
    assert found(registry, request_key(1)) == (entry, 0)
    assert sorted(told.names) == [("prefix", 3, 0), ("request", 1, 0), ("request", 2, 0)]
    registry.close()


async def test_a_released_cache_whose_last_key_is_over_is_not_found_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    now = time.monotonic()
    monkeypatch.setattr(told.registry._leases, "_clock", lambda: now)
    entry = told.leased(request_key(1), request_key(2), lease=3600)
    told.registry.release(entry)
    assert told.registry.find_id(entry.cache_id, 2) == (entry, None)
    now += 3600
    assert told.registry.find_id(entry.cache_id, 2) is None
    assert told.registry.entries() == []


def test_p6_a_released_cache_with_many_keys_is_found_in_a_step(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer may ask for it again and again."""
    entry = allocated(registry, *map(request_key, range(1, DESC.entries + 1)))
    registry.release(entry)
    looked, bound = [], registry.bound
    monkeypatch.setattr(registry, "bound", lambda entry, index: looked.append(index) or bound(entry, index))
    found = registry.find_id(entry.cache_id, DESC.entries - 1)
    assert found is not None
    assert found[1] is not None
    assert len(looked) == 2


async def test_a_key_that_goes_in_another_way_takes_its_lease_along() -> None:
    told = Told()
    registry = told.registry
    entry = told.leased(request_key(1), request_key(2), request_key(3), lease=0.02)
    registry.remove_key(request_key(1))
    assert registry.consume(generation(registry, request_key(2)), range(4))
    registry.bind(told.leased(lease=1), [request_key(1)])
    assert len(registry._leases) == 1
    registry.discard(entry)
    assert len(registry._leases) == 0
    await asyncio.sleep(0.05)
    assert found(registry, request_key(1)) is not None
    assert told.names == []


async def test_a_lease_is_prolonged_or_set_anew() -> None:
    told = Told()
    told.leased(request_key(1), lease=100)
    binding = told.registry.find_key(key_id(request_key(1)))
    assert binding is not None
    first = binding.ends
    assert first is not None
    told.registry.lease(binding, 50, at_least=True)
    assert binding.ends == first
    told.registry.lease(binding, 150, at_least=True)
    assert binding.ends > first
    told.registry.lease(binding, 50)
    assert binding.ends < first
    told.registry.close()


async def test_what_became_of_a_key_is_remembered(registry: Registry) -> None:
    entry = allocated(registry, request_key(1), request_key(2), request_key(3))
    registry.remove_key(request_key(1))
    registry.consume(generation(registry, request_key(2)), range(4))
    registry.discard(entry)
    allocated(registry, request_key(5))
    for number, what in (
        (1, "released"),
        (2, "pulled already"),
        (3, "released with its cache"),
        (4, "never published"),
    ):
        message = registry.missing(key_id(request_key(number)))
        assert message.startswith(f"req_id {number} of model 0 is not here: {what}"), message
        assert message.endswith("(held: req_id 5 of model 0)")


# -- whom a cache is for -----------------------------------------------------------------------------------------------


FRIEND, STRANGER = 7, 8


def only(registry: Registry, *keys: CacheKey, allowed: Iterable[int] = (FRIEND,), blocks: bool = False) -> Entry:
    allocation = registry.backend.allocate(tensors=4, tensor_nbytes=48, placement=Placement.HOST)
    entry = registry.add(DESC, allocation.regions, blocks=blocks, allocation=allocation, allowed=frozenset(allowed))
    registry.bind(entry, keys)
    return entry


@pytest.mark.parametrize(
    ("allowed", "peer", "there"),
    [((FRIEND,), FRIEND, True), ((FRIEND,), STRANGER, False), ((FRIEND,), None, True), ((), FRIEND, False)],
)
def test_a_cache_is_found_by_those_it_is_for(
    registry: Registry, allowed: tuple[int, ...], peer: int | None, there: bool
) -> None:
    entry, blocks = only(registry, request_key(1), allowed=allowed), only(registry, allowed=allowed, blocks=True)
    registry.bind_blocks(blocks, BlocksCacheKey(1, 3))
    address = np.array([entry.regions[0].address], np.int64)
    looks: list[Any] = [
        registry.find_key(key_id(request_key(1)), peer=peer),
        registry.find_id(entry.cache_id, 0, peer=peer),
        registry.find_blocks(3, peer=peer),
        registry.local(entry.cache_id, peer=peer),
        registry.find_addresses(address, 48, peer=peer)[0],
        registry.nearest_keys(key_id(request_key(2)), peer=peer) or None,
    ]
    assert [look is not None for look in looks] == [there] * len(looks)


def test_the_reason_is_that_of_a_key_which_never_was(registry: Registry) -> None:
    only(registry, request_key(1), request_key(2))
    registry.remove_key(request_key(1))
    for number in (1, 2, 3):
        message = registry.missing(key_id(request_key(number)), peer=STRANGER)
        assert message == f"req_id {number} of model 0 is not here: never published (held: none at all)"
    assert "released" in registry.missing(key_id(request_key(1)), peer=FRIEND)


def test_only_those_it_is_for_are_told_that_it_is_here(registry: Registry) -> None:
    told: list[int] = []
    for peer in (FRIEND, STRANGER):
        registry.watch(("request", 1, 0), partial(told.append, peer), peer=peer)
        registry.watch(("blocks", 0, 3), partial(told.append, 10 * peer), peer=peer)
    only(registry, request_key(1))
    registry.bind_blocks(only(registry, blocks=True), BlocksCacheKey(1, 3))
    assert told == [FRIEND, 10 * FRIEND]
    for peer in (FRIEND, STRANGER):
        registry.watch(("cache", 1, 0), partial(told.append, 100 * peer), peer=peer)
    assert told[2:] == [100 * FRIEND]
    registry.remove_key(request_key(1))
    allocated(registry, request_key(1))
    assert told[3:] == [STRANGER]
