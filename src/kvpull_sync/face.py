"""The blocking face: the same classes and names, each method blocking its thread until the core has answered.

Thread-safe: callers of one link are served in order. Ctrl-C cancels the running call, waits until nothing writes to its
destination any more and raises KeyboardInterrupt; a second one raises at once and leaves the destination quarantined.
It must not contain logic of its own.
"""

from __future__ import annotations

from types import TracebackType
from typing import ClassVar

from kvpull_async import (
    LLMClusterInfo,
    LLMRole,
    RegisterMemStatus,
)
from kvpull_async.entry import (
    Address,
    DataDist,
    LinkResult,
    blocked,
    close_bounded,
)
from kvpull_sync.face_managers import CacheManager, KvCacheManager
from kvpull_sync.face_tasks import CacheTask

__all__ = ["CacheManager", "CacheTask", "KvCacheManager", "LLMDataDist"]


class LLMDataDist:
    """One node: `init`, link to others, pull, `finalize`. Any number of them may live in one process.

    `with LLMDataDist(role, cluster_id) as datadist` finalizes at the end; call `init` inside.
    """

    llm_engine_instance: ClassVar[LLMDataDist | None] = None
    """The instance initialised last, as the original keeps it."""

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        self._core = DataDist(role, cluster_id, dropped=None)
        self._kv: KvCacheManager | None = None
        self._cache: CacheManager | None = None

    def init(self, options: dict[str, str]) -> None:
        """As `kvpull_async.LLMDataDist.init`, blocking."""
        opening = self._core.start(options)
        if opening is None:
            return
        engine = self._core.engine
        try:
            blocked(engine, opening)
        except BaseException:
            self._core.drop()
            close_bounded(engine)  # it may have opened after all: interrupted too late
            raise
        LLMDataDist.llm_engine_instance = self

    def finalize(self) -> None:
        """As `kvpull_async.LLMDataDist.finalize`, blocking."""
        engine = self._core.drop()
        self._kv = self._cache = None
        if LLMDataDist.llm_engine_instance is self:
            LLMDataDist.llm_engine_instance = None
        if engine is not None:
            close_bounded(engine)

    def __enter__(self) -> LLMDataDist:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finalize()

    @property
    def cluster_id(self) -> int:
        """As `kvpull_async.LLMDataDist.cluster_id`, blocking."""
        return self._core.cluster_id

    @property
    def listen_address(self) -> Address | None:
        """As `kvpull_async.LLMDataDist.listen_address`, blocking."""
        return self._core.engine.listen_address

    @property
    def counters(self) -> dict[str, int]:
        """As `kvpull_async.LLMDataDist.counters`, blocking."""
        return self._core.snapshot()

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """As `kvpull_async.LLMDataDist.kv_cache_manager`, blocking."""
        self._core.engine.core.check_process()
        if self._kv is None:
            self._kv = KvCacheManager(self._core, "kv")
        return self._kv

    @property
    def cache_manager(self) -> CacheManager:
        """As `kvpull_async.LLMDataDist.cache_manager`, blocking."""
        self._core.engine.core.check_process()
        if self._cache is None:
            self._cache = CacheManager(self._core, "cache")
        return self._cache

    def link_clusters(
        self, clusters: list[LLMClusterInfo], timeout: int = 3000, *, raise_on_error: bool = False
    ) -> LinkResult:
        """As `kvpull_async.LLMDataDist.link_clusters`, blocking."""
        operation = self._core.link_clusters(clusters, timeout, raises=raise_on_error)
        return blocked(self._core.engine, operation)

    def unlink_clusters(
        self, clusters: list[LLMClusterInfo], timeout: int = 3000, force: bool = False, *, raise_on_error: bool = False
    ) -> LinkResult:
        """As `kvpull_async.LLMDataDist.unlink_clusters`, blocking."""
        operation = self._core.unlink_clusters(clusters, timeout, force, raises=raise_on_error)
        return blocked(self._core.engine, operation)

    def check_link_status(self, remote_cluster_id: int) -> None:
        """As `kvpull_async.LLMDataDist.check_link_status`, blocking."""
        blocked(self._core.engine, self._core.check_link_status(remote_cluster_id))

    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        """As `kvpull_async.LLMDataDist.switch_role`, blocking."""
        blocked(self._core.engine, self._core.switch_role(role, switch_options))

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """As `kvpull_async.LLMDataDist.link`, blocking."""
        return blocked(self._core.engine, self._core.link(comm_name, cluster_rank_info, rank_table))

    def unlink(self, comm_id: int) -> None:
        """As `kvpull_async.LLMDataDist.unlink`, blocking."""
        blocked(self._core.engine, self._core.unlink(comm_id))

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """As `kvpull_async.LLMDataDist.query_register_mem_status`, blocking."""
        return blocked(self._core.engine, self._core.query_register_mem_status(comm_id))

    def __repr__(self) -> str:
        return f"<LLMDataDist cluster={self.cluster_id} {self._core.role.name}>"
