"""What the application sees of a cache's memory, and for how long; and what an entry says of itself."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import pytest

from kvpull_async.registry import Entry, Registry
from kvpull_async.status import LLMException, LLMStatusCode
from tests.unit.test_registry import Memory, allocated, nothing, registered, request_key


@pytest.fixture
def registry() -> Registry:
    return Registry(Memory())


def contents(views: Sequence[memoryview]) -> list[bytes]:
    return [bytes(view) for view in views]


def test_views_are_the_memory_and_keep_it_after_the_cache_has_gone(registry: Registry) -> None:
    entry = allocated(registry)
    views = entry.views()
    views[1][3:5] = b"ab"
    assert contents(entry.views())[1][:6] == b"\0\0\0ab\0"
    registry.release(entry)
    del entry
    gc.collect()
    assert contents(views)[1][:6] == b"\0\0\0ab\0"


@pytest.mark.parametrize("make", [allocated, registered])
def test_a_released_cache_gives_no_new_views(registry: Registry, make: Callable[[Registry], Entry]) -> None:
    entry = make(registry)
    registry.release(entry)
    with pytest.raises(LLMException, match="released") as caught:
        entry.views()
    assert caught.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_the_text_of_an_entry_says_what_it_is(registry: Registry) -> None:
    entry = allocated(registry, request_key(1), blocks=True)
    entry.pin(nothing)
    assert repr(entry) == "<Entry 1 blocks keys=1 pins=1>"
    registry.release(entry)
    assert repr(entry) == "<Entry 1 blocks keys=0 pins=1 released>"
    assert repr(registry) == "<Registry caches=1 keys=0 blocks=0>"
