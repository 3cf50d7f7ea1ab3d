"""What tests of verified pulls and pushes share: memory whose bytes change at the wrong moment, and what is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpull_async import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMException, LLMStatusCode
from kvpull_async.memory.base import Batches, MemoryBackend, Region, Until
from kvpull_async.testing.faults import WrappedMemory
from tests import duo
from tests.integration.pushing import PUSHER, Ends, Stock

SUMS = ("crc32", "xxh3")
FAILED = LLMStatusCode.LLM_FAILED


class Damaging(WrappedMemory):
    """Another memory. What is lent first is lent as a copy with one bit changed, as if it had been damaged on its way;
    or, with `before`, that is called when something is lent, and may change the memory itself.
    """

    def __init__(self, inner: MemoryBackend, *, before: Callable[[], object] | None = None) -> None:
        super().__init__(inner, kind="damaging")
        self.armed = True
        self._before = before

    def lending(self, regions: Sequence[Region], segments: NDArray[np.int64], *, until: Until | None = None) -> Batches:
        lent = super().lending(regions, segments, until=until)
        if not self.armed:
            return lent
        self.armed = False
        if self._before is None:
            return _changed(lent)
        self._before()
        return lent


def _changed(batches: Batches) -> Batches:
    """The last byte of the first batch is another one."""
    first = True
    for batch in batches:
        if first:
            copied = bytearray(batch[-1])
            copied[-1] ^= 0x10
            yield [*batch[:-1], memoryview(copied)]
        else:
            yield batch
        first = False


def damage(node: Any, *, before: Callable[[], object] | None = None) -> Damaging:
    """From now on the next bytes that are lent there are damaged."""
    registry = duo.engine_of(node).registry
    registry.backend = made = Damaging(registry.backend, before=before)
    return made


def mend(node: Any) -> None:
    registry = duo.engine_of(node).registry
    registry.backend = registry.backend._inner  # type: ignore[attr-defined]


def flip(stock: Stock, tensor: int = 1, entry: int = 0, at: int = 0) -> Callable[[], None]:
    """Changes one bit of that memory."""

    def change() -> None:
        stock.arrays[tensor][entry, at] ^= 1

    return change


def by_id(source: Stock, entry: int = 0) -> CacheKeyByIdAndIndex:
    return CacheKeyByIdAndIndex(PUSHER, source.cache.cache_id, entry)


BLOCKS = BlocksCacheKey(PUSHER, 0)


async def pull(e: Ends, key: Any, to: Stock, *args: Any, **options: Any) -> None:
    """The receiver pulls from the pusher."""
    await e.api.do(e.receiver.cache_manager.pull_cache, key, to.cache, *args, **options)


async def pull_blocks(e: Ends, key: Any, to: Stock, *blocks: Any, **options: Any) -> None:
    await e.api.do(e.receiver.cache_manager.pull_blocks, key, to.cache, *blocks, **options)


async def keyed(e: Ends, shape: Any, *keys: CacheKey) -> Stock:
    """An allocated source with keys."""
    cache = await e.api.do(e.pusher.cache_manager.allocate_cache, shape, list(keys))
    made = Stock(cache, duo.arrays(cache))
    made.fill(3)
    e.kept.append(made)
    return made


def check_mismatch(error: BaseException | None, name: str, node: Any, *, count: int = 1) -> None:
    """What whoever asked is told of bytes that differ, and what its node counts."""
    assert isinstance(error, LLMException), repr(error)
    assert error.status_code is FAILED, error
    assert error.retry_safe
    assert not error.destination_unsafe
    assert error.peer
    assert name in str(error)
    assert "wrong bytes" in str(error)
    assert node.counters["verify_failed"] == count
