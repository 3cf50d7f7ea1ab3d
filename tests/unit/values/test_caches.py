"""Handles on caches: addresses, quarantine, release, and what garbage collection tells the binding."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import Cache, CacheDesc, DataType, KvCache, Placement

DESC = CacheDesc(2, [4, 8], DataType.DT_INT8)
HOST = CacheDesc(2, [4, 8], DataType.DT_INT8, Placement.HOST)


class Binding:
    def __init__(self) -> None:
        self.quarantined = False
        self.drops = 0

    def views(self) -> Sequence[memoryview]:
        return []

    def dropped(self) -> None:
        self.drops += 1


def cache() -> Cache:
    return Cache(3, DESC, [16, 32], None, False, True)


def kv_cache() -> KvCache:
    return KvCache(3, DESC, [[16, 32]], None)


def addresses(handle: Cache | KvCache) -> list[Any]:
    return handle.tensor_addrs if isinstance(handle, Cache) else handle.per_device_tensor_addrs


def test_members() -> None:
    new, old = cache(), kv_cache()
    assert (new.cache_id, new.cache_desc, new.tensor_addrs) == (3, DESC, [16, 32])
    assert (new.is_blocks_cache, new.is_registered) == (True, False)
    assert (old.cache_id, old.cache_desc, old.per_device_tensor_addrs) == (3, DESC, [[16, 32]])


@pytest.mark.parametrize("make", [cache, kv_cache])
def test_addresses_are_copies(make: Any) -> None:
    handle = make()
    addresses(handle).clear()
    assert len(addresses(handle)) > 0


@pytest.mark.parametrize("make", [cache, kv_cache])
def test_quarantine_is_the_bindings_word(make: Any) -> None:
    handle, binding = make(), Binding()
    assert not handle.quarantined
    handle._binding = binding
    assert not handle.quarantined
    binding.quarantined = True
    assert handle.quarantined
    assert "quarantined" in repr(handle)


@pytest.mark.parametrize("make", [cache, kv_cache])
def test_release_empties_and_unbinds(make: Any) -> None:
    handle, binding = make(), Binding()
    handle._binding = binding
    handle._release()
    handle._release()
    assert addresses(handle) == []
    assert not handle.quarantined
    assert "released" in repr(handle)
    del handle
    gc.collect()
    assert binding.drops == 0


def test_a_dropped_kv_cache_tells_its_binding_once() -> None:
    handle, binding = kv_cache(), Binding()
    handle._binding = binding
    del handle
    gc.collect()
    assert binding.drops == 1


def test_a_kv_cache_that_was_never_made_or_bound_is_dropped_quietly() -> None:
    with pytest.raises(TypeError):
        KvCache(1)  # type: ignore[call-arg]
    del_me = kv_cache()
    del del_me
    gc.collect()


def test_cpu_cache_of_the_newer_manager() -> None:
    handle = Cache.create_cpu_cache(HOST, [16, np.int64(32)])
    assert (handle.cache_id, handle.tensor_addrs, handle.is_blocks_cache) == (-1, [16, 32], True)


@pytest.mark.parametrize("addrs", [[16, 32], [[16, 32]]])
def test_cpu_cache_of_the_older_manager_takes_both_forms(addrs: Any) -> None:
    handle = KvCache.create_cpu_cache(HOST, addrs)
    assert (handle.cache_id, handle.per_device_tensor_addrs) == (-1, [[16, 32]])


def test_cpu_cache_on_two_devices() -> None:
    assert KvCache.create_cpu_cache(HOST, [[1, 2], [3, 4]]).per_device_tensor_addrs == [[1, 2], [3, 4]]


@pytest.mark.parametrize("kind", [Cache, KvCache])
@pytest.mark.parametrize(
    ("desc", "addrs", "error"),
    [
        (None, [1, 2], TypeError),
        (HOST, None, TypeError),
        (HOST, (1, 2), TypeError),
        (HOST, [1, "2"], TypeError),
        (HOST, [1, [2]], TypeError),
        (HOST, [-1, 2], ValueError),
        (HOST, [1], LLMException),
        (HOST, [], LLMException),
    ],
)
def test_cpu_cache_refusals(kind: Any, desc: Any, addrs: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        kind.create_cpu_cache(desc, addrs)


def test_cpu_cache_of_the_newer_manager_must_be_placed_on_host() -> None:
    with pytest.raises(LLMException) as caught:
        Cache.create_cpu_cache(DESC, [1, 2])
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


@pytest.mark.parametrize("addrs", [[[1, 2], 3], [[1, 2], (3, 4)], [[]]])
def test_cpu_cache_of_the_older_manager_refuses_mixtures(addrs: Any) -> None:
    with pytest.raises((TypeError, LLMException)):
        KvCache.create_cpu_cache(HOST, addrs)
