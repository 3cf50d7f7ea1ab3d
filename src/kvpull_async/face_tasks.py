"""The end of a transfer, for event loops: what `transfer_cache_async` of the awaitable managers returns, and the call.

It must not contain more than the waiting.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

from kvpull_async._workers import report_to, resolve
from kvpull_async.entry import Engine, Manager, TransferTask, wait_seconds
from kvpull_async.status import LLMStatusCode
from kvpull_async.values import Cache, KvCache, LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig

__all__ = ["CacheTask", "Transferring"]


class CacheTask:
    """A transfer, which runs whether or not anybody waits for it. `await task` is `await task.synchronize()`.

    Any number of tasks, of any event loops, may wait for it, any number of times. Cancelling one of them ends its wait
    and nothing else. What goes wrong in a transfer is not raised here: it is a status, and in `exceptions`.
    """

    def __init__(self, task: TransferTask) -> None:
        self._task = task

    async def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Wait (ms, uint32; None for as long as it takes) and return the first status other than LLM_SUCCESS.

        LLM_SUCCESS if there is none. While the transfer still runs: LLM_TIMEOUT, or from the older manager
        LLM_WAIT_PROCESS_TIMEOUT. Errors: TypeError, ValueError.
        """
        await self._until_over(timeout_in_millis)
        return self._task.overall

    async def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Wait as `synchronize` does and return one status per config, in order: what `synchronize` would return while
        the transfer still runs, and None for a config whose layers had not all gone when another one failed.
        """
        await self._until_over(timeout_in_millis)
        return self._task.results

    def __await__(self) -> Generator[Any, None, LLMStatusCode]:
        return self.synchronize().__await__()

    def done(self) -> bool:
        """Whether the transfer has ended, however. Our own."""
        return self._task.over

    @property
    def exceptions(self) -> list[BaseException | None]:
        """What was raised, one per config, in order; None where nothing was, or not yet. Our own."""
        return self._task.exceptions

    async def _until_over(self, timeout_in_millis: object) -> None:
        bound, loop = wait_seconds(timeout_in_millis), asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        waiter = partial(report_to, loop, resolve, over)
        self._task.when_over(waiter)
        try:
            await asyncio.wait([over], timeout=None if math.isinf(bound) else bound)
        finally:
            self._task.forget(waiter)

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
        """Send layers of a cache to peers as they are computed. Returns at once; the task says how it ended.

        For each layer that a config wants, in order, `layer_synchronizer.synchronize_layer(layer, None)` is called
        once. Then the two tensors of that layer go to every config that wants them, to all clusters at the same time.
        The first failure ends the transfer after that layer. Keys are not consumed. The older manager: role PROMPT.

        Args:
            src_cache: the local cache.
            layer_synchronizer: says when a layer may be sent.
            transfer_configs: where to; a list or tuple, which is read now. With remote cache access on (newer manager)
                of `TransferWithCacheKeyConfig`, else of `TransferConfig`, whose addresses must lie in caches of the
                receiver.
            src_block_indices: list or tuple of the blocks to send; for a blocks cache. Else the batch entry
                `src_batch_index` of each config goes.
            dst_block_indices: list or tuple of the receiver's blocks, in which they land. Without, an entry lands in
                one piece. As with `pull_blocks`, the i-th block gets the i-th block-sized slice of an entry: a list
                that has no room for all of it sends the beginning.
            dst_block_memory_size: bytes of a receiver's block. To send an entry into blocks it must be given; the last
                block may get less. An address inside a blocks cache must be the beginning of its tensor, and this its
                block size.
            timeout: ms for each layer, counted from when it may be sent, instead of `sync_kv_timeout`.
            traceparent: W3C trace context, to be found in the log events of both sides.

        Errors: TypeError, ValueError; LLMException with LLM_PARAM_INVALID, LLM_ENGINE_FINALIZED. What goes wrong later,
        in `synchronize_layer` or on the way, is the status of the configs concerned: that of an LLMException, else
        LLM_FAILED; LLM_PARAM_INVALID where `synchronize_layer` returned False.
        """
        blocks = (src_block_indices, dst_block_indices, dst_block_memory_size)
        options = {"timeout": timeout, "traceparent": traceparent}
        try:
            caller = asyncio.get_running_loop()
        except RuntimeError:  # called where none runs: a coroutine function is refused then
            caller = None
        asked = self._manager.transfer_cache_async(
            src_cache, layer_synchronizer, transfer_configs, *blocks, options=options, caller=caller
        )
        return CacheTask(TransferTask(self._engine, asked))
