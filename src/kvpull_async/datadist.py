"""What both faces' `LLMDataDist` do before and after crossing: checks, modes, the original's codes.

It must not wait.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from kvpull_async.config import Settings
from kvpull_async.config.kinds import host_pairs
from kvpull_async.config.rank_table import gathering
from kvpull_async.config.settings import unknown_names
from kvpull_async.engine import Engine
from kvpull_async.links import Target
from kvpull_async.managers import dialect
from kvpull_async.managers.manager import Manager, Operation
from kvpull_async.observe import Counters
from kvpull_async.registry import Entry
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import Cache, KvCache, LLMClusterInfo, LLMRole, RegisterMemStatus, int_to_ip
from kvpull_async.values._check import instance, int32, require, uint64

__all__ = ["DataDist", "LinkResult"]

H = TypeVar("H", Cache, KvCache)
LinkResult = tuple[LLMStatusCode, list[LLMStatusCode]]
_OLDER_LIMIT: Final = 16
_LISTEN: Final = "llm.listenIpInfo"
_HARMLESS: Final = (LLMStatusCode.LLM_ALREADY_LINK, LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_REPEAT_REQUEST)


class DataDist:
    """`dropped` is called when a `KvCache` handle is garbage-collected while its cache exists."""

    def __init__(self, role: object, cluster_id: object, *, dropped: Callable[[int], None] | None) -> None:
        self.role: LLMRole = instance("role", role, LLMRole)
        self.cluster_id: int = uint64("cluster_id", cluster_id)
        self._dropped = dropped
        self._lock = threading.Lock()  # protects _engine: of two threads that call `init` or `finalize`, one does it
        self._engine: Engine | None = None
        self._counted: Counters | None = None
        self._given: dict[str, str] = {}

    # -- life -------------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """RuntimeError before `init` and after `finalize`, as in the original."""
        if self._engine is None:
            what = ": call init(options) first" if self._counted is None else " any more: call init(options) again"
            raise RuntimeError(f"LLMDataDist is not initialised{what}")
        return self._engine

    def snapshot(self) -> dict[str, int]:
        """The counters of the running engine, or those of the last one. RuntimeError before the first `init`."""
        if self._engine is None and self._counted is not None:
            return self._counted.snapshot()
        return self.engine.snapshot()

    def start(self, options: object) -> Operation[None] | None:
        """The step that opens a new engine; None when there is one already. After a failure call `drop`."""
        with self._lock:
            if self._engine is not None:
                self._tell_of_other(options, self._engine)
                return None
            given: Mapping[str, str] = instance("options", options, dict)
            settings = Settings.from_options(self.role, self.cluster_id, given, environ=os.environ)
            self._engine = engine = _engine(settings, self._dropped)
            self._given = dict(given)
        return Operation("init", engine.open, lasting=True)

    def _tell_of_other(self, options: object, engine: Engine) -> None:
        """LLM-DataDist documentation: `init` of a live object does nothing, whatever it is given."""
        again = options if isinstance(options, Mapping) else {}
        names = {*self._given, *again}
        other = sorted(str(name) for name in names if self._given.get(name) != again.get(name))
        if other:
            reason = "the node runs with the options of its first init"
            engine.log.warning("config.init_again", options=" ".join(other), reason=reason)

    def drop(self) -> Engine | None:
        """Forget the engine; the face then stops its threads."""
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            self.role = engine.node.role
            self._counted = engine.counters
        return engine

    @property
    def newer(self) -> bool:
        """Whether the options chose cache manager mode."""
        return self.engine.settings.cache_manager_mode

    # -- managers ---------------------------------------------------------------------------------------------------

    def manager(self, kind: str, owner: object) -> Manager:
        """The operations of the "kv" or the "cache" manager; `owner` is the face's manager object."""
        if kind == "kv":

            def wrap_kv(entry: Entry) -> KvCache:
                addresses = [region.address for region in entry.regions]
                return _bound(KvCache(entry.cache_id, entry.desc, [addresses], owner), entry)

            return Manager(self.engine.node, dialect.KV, wrap_kv)

        def wrap(entry: Entry) -> Cache:
            addresses = [region.address for region in entry.regions]
            handle = Cache(entry.cache_id, entry.desc, addresses, owner, entry.registered, entry.blocks)
            return _bound(handle, entry)

        return Manager(self.engine.node, dialect.CACHE, wrap)

    # -- links ------------------------------------------------------------------------------------------------------

    def link_clusters(self, clusters: object, timeout: object, *, raises: bool = False) -> Operation[LinkResult]:
        engine = self.engine
        milliseconds = _timeout(timeout)
        targets = _targets(clusters)
        outcome = _Outcome("link_clusters", engine, targets, self.newer, raises)
        if not targets:
            return outcome.refused(LLMStatusCode.LLM_PARAM_INVALID, "clusters is empty")
        if not self.newer and engine.node.role is not LLMRole.DECODER:
            reason = f"in the older mode role DECODER links, this node is {engine.node.role.name}"
            return outcome.refused(LLMStatusCode.LLM_PARAM_INVALID, reason)
        if not self.newer and len(targets) > _OLDER_LIMIT:
            reason = f"{len(targets)} clusters in one call, at most {_OLDER_LIMIT} are allowed"
            return outcome.refused(LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT, reason)
        return outcome.of(partial(engine.link, targets, milliseconds), failed=None)

    def unlink_clusters(
        self, clusters: object, timeout: object, force: object, *, raises: bool = False
    ) -> Operation[LinkResult]:
        engine = self.engine
        milliseconds = _timeout(timeout)
        targets = _targets(clusters)
        forced = instance("force", force, bool)
        outcome = _Outcome("unlink_clusters", engine, targets, self.newer, raises)
        if not targets:
            return outcome.refused(LLMStatusCode.LLM_PARAM_INVALID, "clusters is empty")
        failed = None if self.newer else LLMStatusCode.LLM_UNLINK_FAILED
        return outcome.of(partial(engine.unlink, targets, milliseconds, force=forced), failed=failed)

    def link(self, comm_name: object, cluster_rank_info: object, rank_table: object) -> Operation[int]:
        engine = self._ranks("link")
        settings = engine.settings
        wanted = gathering(
            comm_name,
            cluster_rank_info,
            rank_table,
            own=self.cluster_id,
            port_base=settings.rank_port_base,
            renamed=host_pairs("rank_hosts", settings.rank_hosts),
        )
        return Operation("link", lambda: engine.link_ranks(wanted), lasting=True, undo=engine.comms.take_back)

    def unlink(self, comm_id: object) -> Operation[None]:
        engine, number = self._ranks("unlink"), uint64("comm_id", comm_id)
        return Operation("unlink", lambda: engine.comms.unlink(number), lasting=True)

    def query_register_mem_status(self, comm_id: object) -> Operation[RegisterMemStatus]:
        engine, number = self._ranks("query_register_mem_status"), uint64("comm_id", comm_id)
        return Operation("query_register_mem_status", lambda: engine.comms.status(number))

    def _ranks(self, name: str) -> Engine:
        """LLM-DataDist documentation: the older mode has no links by rank table, nor has the hixl backend."""
        engine = self.engine
        require(self.newer, f"{name} is for cache manager mode (llm.EnableCacheManager)")
        here = engine.settings.transfer_backend != "hixl"
        require(here, f"{name} is not for hixl", status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)
        return engine

    def check_link_status(self, remote_cluster_id: object) -> Operation[None]:
        engine = self.engine
        require(not self.newer, "check_link_status is for the older mode (llm.EnableCacheManager is on)")
        cluster_id = uint64("remote_cluster_id", remote_cluster_id)
        return Operation("check_link_status", lambda: engine.check_link_status(cluster_id))

    def switch_role(self, role: object, switch_options: object) -> Operation[None]:
        """LLM-DataDist documentation: the older mode needs `enable_switch_role`, another role, and for PROMPT an
        address to listen on; the newer mode needs that no link exists.
        """
        engine = self.engine
        wanted = instance("role", role, LLMRole)
        options: dict[str, str] = {} if switch_options is None else instance("switch_options", switch_options, dict)
        unknown = unknown_names(options)
        listen = options.get(_LISTEN)
        if not self.newer:
            require(wanted is not engine.node.role, f"the role is {wanted.name} already")
            require(wanted is not LLMRole.PROMPT or listen is not None, f"role PROMPT needs {_LISTEN}")
            if not engine.settings.enable_switch_role:
                raise LLMException(
                    "switch_role needs enable_switch_role in the options",
                    status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
                )
        settings = engine.settings.with_listen(listen)

        async def run() -> None:
            for name, nearest in unknown:
                engine.log.warning("config.unknown_option", option=name, nearest=nearest)
            if self.newer and engine.links.all():
                raise LLMException("a link exists; unlink first", status_code=LLMStatusCode.LLM_EXIST_LINK)
            await engine.switch_role(wanted, settings)

        return Operation("switch_role", run, lasting=True)


def _engine(settings: Settings, dropped: Callable[[int], None] | None) -> Engine:
    try:
        return Engine(settings, dropped=dropped)
    except (OSError, RuntimeError) as error:  # no descriptor, or no thread
        if isinstance(error, LLMException):
            raise
        raise LLMException(f"the engine cannot start: {error}", status_code=LLMStatusCode.LLM_FAILED) from error


def _bound(handle: H, entry: Entry) -> H:
    handle._binding = entry
    return handle


@dataclass(frozen=True)
class _Outcome:
    """How a call about links ends: with codes, or with `raises` in an exception that says why."""

    name: str
    engine: Engine
    targets: list[Target]
    newer: bool
    raises: bool

    def refused(self, status: LLMStatusCode, reason: str) -> Operation[LinkResult]:
        async def run() -> LinkResult:
            if self.raises:
                raise LLMException(f"{self.name}: {reason}", status_code=status)
            return status, []

        return Operation(self.name, run)

    def of(
        self, run: Callable[[], Coroutine[Any, Any, list[LLMStatusCode]]], *, failed: LLMStatusCode | None
    ) -> Operation[LinkResult]:
        async def with_overall() -> LinkResult:
            codes = await run()
            overall = _overall(codes, newer=self.newer, failed=failed)
            if self.raises and overall is not LLMStatusCode.LLM_SUCCESS:
                raise self._error(overall, codes)
            return overall, codes

        return Operation(self.name, with_overall, lasting=True)

    def _error(self, overall: LLMStatusCode, codes: list[LLMStatusCode]) -> LLMException:
        bad = [(t, c) for t, c in zip(self.targets, codes, strict=True) if c is not LLMStatusCode.LLM_SUCCESS]
        reasons = self.engine.links.reasons
        told = "; ".join(f"{t.described}: {c.name}, {reasons.get(t.cluster_id, '')}" for t, c in bad)
        peer = bad[0][0].cluster_id if len(bad) == 1 else None
        return LLMException(f"{self.name}: {told}", status_code=overall, peer=peer, operation=self.name)


def _timeout(timeout: object) -> int:
    milliseconds = int32("timeout", timeout)
    require(milliseconds > 0, f"timeout must be above 0 (ms), got {milliseconds}")
    return milliseconds


def _targets(clusters: object) -> list[Target]:
    items: Sequence[Any] = instance("clusters", clusters, list, tuple)
    infos = [instance(f"clusters[{i}]", item, LLMClusterInfo) for i, item in enumerate(items)]
    return [_target(info) for info in infos]


def _target(info: LLMClusterInfo) -> Target:
    addresses = [(int_to_ip(ip), port) for ip, port in info.remote_ip_info_list]
    cluster_id = uint64("remote_cluster_id", info.remote_cluster_id)
    return Target(cluster_id, addresses[0] if len(addresses) == 1 else None)


def _overall(codes: list[LLMStatusCode], *, newer: bool, failed: LLMStatusCode | None) -> LLMStatusCode:
    """The newer mode answers with the last failing code. The older one calls it a success when clusters were merely
    linked or unlinked already.
    """
    failures = [code for code in codes if code != LLMStatusCode.LLM_SUCCESS and (newer or code not in _HARMLESS)]
    if not failures:
        return LLMStatusCode.LLM_SUCCESS
    return failures[-1] if failed is None else failed
