"""The awaitable face: the original's classes, each method checked here and run on the engine's core.

Every coroutine may be awaited from any event loop of any thread. It must not contain logic of its own.
"""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import ClassVar

from kvpull_async.entry import (
    Address,
    DataDist,
    LinkResult,
    awaited,
    close_awaited,
)
from kvpull_async.face_managers import CacheManager, KvCacheManager
from kvpull_async.face_tasks import CacheTask
from kvpull_async.values import (
    LLMClusterInfo,
    LLMRole,
    RegisterMemStatus,
)

__all__ = ["CacheManager", "CacheTask", "KvCacheManager", "LLMDataDist"]


def _warn_dropped(cache_id: int) -> None:
    warnings.warn(f"KvCache {cache_id} was dropped without deallocate_cache", ResourceWarning, stacklevel=2)


class LLMDataDist:
    """One node: `init`, link to others, pull, `finalize`. Any number of them may live in one process.

    `async with LLMDataDist(role, cluster_id) as datadist` finalizes at the end; call `init` inside.
    """

    llm_engine_instance: ClassVar[LLMDataDist | None] = None
    """The instance initialised last, as the original keeps it."""

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        self._core = DataDist(role, cluster_id, dropped=_warn_dropped)
        self._kv: KvCacheManager | None = None
        self._cache: CacheManager | None = None

    async def init(self, options: dict[str, str]) -> None:
        """Start the engine. Does nothing when it is running already; may be called again after a failure.

        `options` come from `LLMConfig.generate_options()`. Errors: TypeError, ValueError; LLMException with
        LLM_PARAM_INVALID (an option), LLM_FAILED (the address is taken), LLM_FEATURE_NOT_ENABLED.
        """
        opening = self._core.start(options)
        if opening is None:
            return
        engine = self._core.engine
        try:
            await awaited(engine, opening)
        except BaseException:
            self._core.drop()
            await close_awaited(engine)  # it may have opened after all: cancelled too late
            raise
        LLMDataDist.llm_engine_instance = self

    async def finalize(self) -> None:
        """End the engine within `close_timeout`, whatever peers do; calls that wait end with LLM_ENGINE_FINALIZED."""
        engine = self._core.drop()
        self._kv = self._cache = None
        if LLMDataDist.llm_engine_instance is self:
            LLMDataDist.llm_engine_instance = None
        if engine is not None:
            await close_awaited(engine)

    async def __aenter__(self) -> LLMDataDist:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.finalize()

    @property
    def cluster_id(self) -> int:
        """This node's id."""
        return self._core.cluster_id

    @property
    def listen_address(self) -> Address | None:
        """Where peers dial: (ip, port), the port being the real one when 0 was asked for. Our own."""
        return self._core.engine.listen_address

    @property
    def counters(self) -> dict[str, int]:
        """What happened since `init`, by name, also after `finalize`: docs/events.md lists them. Our own."""
        return self._core.snapshot()

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """The older manager. Differs from the original: reachable in both modes."""
        self._core.engine.core.check_process()
        if self._kv is None:
            self._kv = KvCacheManager(self._core, "kv")
        return self._kv

    @property
    def cache_manager(self) -> CacheManager:
        """The newer manager. Differs from the original: reachable in both modes."""
        self._core.engine.core.check_process()
        if self._cache is None:
            self._cache = CacheManager(self._core, "cache")
        return self._cache

    async def link_clusters(
        self, clusters: list[LLMClusterInfo], timeout: int = 3000, *, raise_on_error: bool = False
    ) -> LinkResult:
        """Link to clusters, all at once, within `timeout` ms: (overall status, one status per cluster in order).

        A failure is a code, never an exception, unless `raise_on_error` (our own). Wrong arguments raise. The link
        serves both sides, and comes back by itself when its connection is lost.
        """
        operation = self._core.link_clusters(clusters, timeout, raises=raise_on_error)
        return await awaited(self._core.engine, operation)

    async def unlink_clusters(
        self, clusters: list[LLMClusterInfo], timeout: int = 3000, force: bool = False, *, raise_on_error: bool = False
    ) -> LinkResult:
        """Unlink; returns as `link_clusters`. With `force` this side is torn down without waiting for the peer, which
        is only told; a dead or unknown one is no failure.
        """
        operation = self._core.unlink_clusters(clusters, timeout, force, raises=raise_on_error)
        return await awaited(self._core.engine, operation)

    async def check_link_status(self, remote_cluster_id: int) -> None:
        """One round trip within `sync_kv_timeout`. LLM_NOT_YET_LINK, LLM_LINK_FAILED, or LLM_WAIT_PROCESS_TIMEOUT."""
        await awaited(self._core.engine, self._core.check_link_status(remote_cluster_id))

    async def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        """Take another role. LLM_PARAM_INVALID, LLM_FEATURE_NOT_ENABLED (older mode), LLM_EXIST_LINK (newer mode)."""
        await awaited(self._core.engine, self._core.switch_role(role, switch_options))

    async def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Link to the other members of a comm, where the rank table says: the id of the comm, at once.

        `comm_name` has 1 to 127 characters, `cluster_rank_info` 2 to 4 clusters with their ranks, this one among them,
        in ascending order of ranks, `rank_table` is JSON. All members call it with the same, in any order. At once
        means that this side listens, and looks for the others, but waits for none: `query_register_mem_status` tells
        how it goes. Memory registered afterwards is not remote accessible.

        Errors: TypeError, ValueError; LLMException with LLM_PARAM_INVALID (also when this node can listen at no address
        of its rank), LLM_ALREADY_LINK (a comm of this name, these ranks and devices exists and has not failed),
        LLM_LINK_FAILED (512 comms exist), LLM_FEATURE_NOT_ENABLED (`transfer_backend` "hixl").
        """
        return await awaited(self._core.engine, self._core.link(comm_name, cluster_rank_info, rank_table))

    async def unlink(self, comm_id: int) -> None:
        """End a comm, and the links that nothing else uses. LLM_NOT_YET_LINK when there is none of that id."""
        await awaited(self._core.engine, self._core.unlink(comm_id))

    async def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """OK when all members are linked, PREPARING until then and while a lost link comes back; FAILED after the time
        to meet (`link_total_time`, `rank_link_timeout`), or when a member has left. LLM_NOT_YET_LINK as for `unlink`.
        """
        return await awaited(self._core.engine, self._core.query_register_mem_status(comm_id))

    def __repr__(self) -> str:
        return f"<LLMDataDist cluster={self.cluster_id} {self._core.role.name}>"
