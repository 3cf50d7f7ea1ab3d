"""What both blocking managers do with keys of caches that are there already. It must not contain logic of its own."""

from __future__ import annotations

from typing import TypeVar

from kvpull_async import Cache, CacheKey, KvCache
from kvpull_async.entry import Manager, Operation

__all__ = ["Keys"]

T = TypeVar("T")


class Keys:
    """What both managers have of it."""

    _manager: Manager

    def _run(self, operation: Operation[T]) -> T:
        raise NotImplementedError

    def publish_cache(self, cache: Cache | KvCache, cache_keys: list[CacheKey], *, lease: int | None = None) -> None:
        """As `kvpull_async.KvCacheManager.publish_cache` and `kvpull_async.CacheManager.publish_cache`, blocking."""
        self._run(self._manager.publish_cache(cache, cache_keys, lease))

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """As `kvpull_async.KvCacheManager.remove_cache_key` and `kvpull_async.CacheManager.remove_cache_key`."""
        self._run(self._manager.remove_cache_key(cache_key))

    def renew_key(self, cache_key: CacheKey, lease: int, *, timeout: float | None = None) -> None:
        """As `kvpull_async.KvCacheManager.renew_key` and `kvpull_async.CacheManager.renew_key`, blocking."""
        self._run(self._manager.renew_key(cache_key, lease, timeout))

    def release_key(self, cache_key: CacheKey, *, timeout: float | None = None) -> None:
        """As `kvpull_async.KvCacheManager.release_key` and `kvpull_async.CacheManager.release_key`, blocking."""
        self._run(self._manager.release_key(cache_key, timeout))
