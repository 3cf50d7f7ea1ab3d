"""The end of a transfer, blocking: what `transfer_cache_async` of the blocking managers returns, and the call.

It must not contain more than the waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpull_async import (
    Cache,
    KvCache,
    LayerSynchronizer,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from kvpull_async.entry import Ended, Engine, Manager, TransferTask, wait_seconds

__all__ = ["CacheTask", "Transferring"]


class CacheTask:
    """A transfer, which runs whether or not anybody waits for it.

    Any number of threads may wait for it, any number of times. What goes wrong in a transfer is not raised here: it is
    a status, and in `exceptions`.
    """

    def __init__(self, task: TransferTask) -> None:
        self._task = task

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """As `kvpull_async.CacheTask.synchronize`, blocking."""
        self._until_over(timeout_in_millis)
        return self._task.overall

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """As `kvpull_async.CacheTask.get_results`, blocking."""
        self._until_over(timeout_in_millis)
        return self._task.results

    def done(self) -> bool:
        """As `kvpull_async.CacheTask.done`."""
        return self._task.over

    @property
    def exceptions(self) -> list[BaseException | None]:
        """As `kvpull_async.CacheTask.exceptions`."""
        return self._task.exceptions

    def _until_over(self, timeout_in_millis: object) -> None:
        bound, ended = wait_seconds(timeout_in_millis), Ended()
        self._task.when_over(ended.set)
        try:
            ended.wait(bound)
        finally:
            self._task.forget(ended.set)

    def __repr__(self) -> str:
        return f"<CacheTask {self._task!r}>"


class Transferring:
    """What both managers have of it."""

    _engine: Engine
    _manager: Manager

    def transfer_cache_async(
        self,
        src_cache: Cache | KvCache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[TransferConfig] | Sequence[TransferWithCacheKeyConfig],
        src_block_indices: Sequence[int] | None = None,
        dst_block_indices: Sequence[int] | None = None,
        dst_block_memory_size: int | None = None,
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
    ) -> CacheTask:
        """As `kvpull_async.KvCacheManager.transfer_cache_async` and `kvpull_async.CacheManager.transfer_cache_async`.
        The task blocks, and `synchronize_layer` cannot be a coroutine function or return an awaitable.
        """
        blocks = (src_block_indices, dst_block_indices, dst_block_memory_size)
        options = {"timeout": timeout, "traceparent": traceparent}
        asked = self._manager.transfer_cache_async(
            src_cache, layer_synchronizer, transfer_configs, *blocks, options=options, caller=None
        )
        return CacheTask(TransferTask(self._engine, asked))
