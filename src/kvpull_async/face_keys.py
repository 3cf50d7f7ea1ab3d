"""What both awaitable managers do with keys of caches that are there already. It must not contain logic of its own."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from kvpull_async.entry import Manager, Operation
from kvpull_async.values import Cache, CacheKey, KvCache

__all__ = ["Keys"]

T = TypeVar("T")


class Keys:
    """What both managers have of it."""

    _manager: Manager

    def _run(self, operation: Operation[T]) -> Coroutine[Any, Any, T]:
        raise NotImplementedError

    async def publish_cache(
        self, cache: Cache | KvCache, cache_keys: list[CacheKey], *, lease: int | None = None
    ) -> None:
        """Name the entries of a cache that was made without keys, once their bytes are there. New here.

        `allocate_cache` with keys lets peers pull before anything has been computed. The i-th key names batch entry i,
        a padding key skips one; who waits with `wait_for_key` is told. The older manager: role PROMPT.

        With a `lease` (ms, 1 to 2**31-1) the keys go by themselves when it is over, as by `remove_cache_key`, and those
        of a registered cache, too. A pull that has begun ends whole; a later one is LLM_KV_CACHE_NOT_EXIST, which says
        how long ago. The memory goes with the last reference: with the key, if the cache has been deallocated.

        Errors: TypeError, ValueError; LLMException with LLM_PARAM_INVALID (too many keys, an entry has one, a blocks
        cache), LLM_KV_CACHE_NOT_EXIST, and for a key that is bound already as `allocate_cache`.
        """
        await self._run(self._manager.publish_cache(cache, cache_keys, lease))

    async def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Forget a key (older manager: role PROMPT); unknown keys, and those of registered caches, are left alone.

        The memory goes with the last reference.
        """
        await self._run(self._manager.remove_cache_key(cache_key))

    async def renew_key(self, cache_key: CacheKey, lease: int, *, timeout: float | None = None) -> None:
        """Keep a key for `lease` ms (1 to 2**31-1) from now on. New here.

        On the node that has it (`cache_key.cluster_id` is its own, and no linked peer's) this is its new end, sooner or
        later than the old one, also for a key that had none. A peer can only put the end off, and a key without a lease
        has none. For that it asks the linked cluster that the key names, even one with its own id: one round trip,
        beside its pulls, at most `timeout` ms long (without it `sync_kv_timeout`).

        Errors: TypeError, ValueError; LLMException with LLM_KV_CACHE_NOT_EXIST (its message says what became of the
        key), LLM_PARAM_INVALID (also for a `CacheKeyByIdAndIndex`), LLM_NOT_YET_LINK, LLM_LINK_FAILED; LLMTimeoutError
        with the manager's code, after which it may have happened all the same.
        """
        await self._run(self._manager.renew_key(cache_key, lease, timeout))

    async def release_key(self, cache_key: CacheKey, *, timeout: float | None = None) -> None:
        """Give a key up that nobody will pull any more, here or at the linked cluster that it names. New here.

        It goes as by `remove_cache_key`, prefixes included, whether or not it has a lease; one of a registered cache
        only if it has, else LLM_PARAM_INVALID. Pulls that have begun end whole. What is not there is
        LLM_KV_CACHE_NOT_EXIST, and the message says what became of it: after a lost connection that may be this very
        call. The rest as for `renew_key`.
        """
        await self._run(self._manager.release_key(cache_key, timeout))
