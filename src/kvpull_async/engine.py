"""The engine behind one `LLMDataDist`: owns the core loop and everything on it, from `init` to `finalize`.

It must not contain what a pull, a link or a cache does. Both faces use it, by way of `crossing`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import dataclasses
import os
import secrets
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, TypeVar

from kvpull_async import observe
from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers, report_to
from kvpull_async.call import finalized
from kvpull_async.comms import Comms
from kvpull_async.config import Settings
from kvpull_async.config.rank_table import Gathering
from kvpull_async.config.settings import WEAK_BELOW
from kvpull_async.core import Call, CoreLoop
from kvpull_async.lane import Lane
from kvpull_async.linkage import LinkContext, Route, Server
from kvpull_async.links import Codes, Links, Target
from kvpull_async.listening import close_all, listen
from kvpull_async.managers.manager import Operation
from kvpull_async.managers.node import Node
from kvpull_async.memory import choosing
from kvpull_async.memory.base import MemoryBackend
from kvpull_async.protocol import frames
from kvpull_async.protocol.session import Identity, Peer
from kvpull_async.registry import Binding, Registry
from kvpull_async.routes import Routes, certificates
from kvpull_async.serve import Serving
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.transport.base import Address, DataPath, Listener, OnChannel
from kvpull_async.values import LLMRole

__all__ = [
    "CODES",
    "Engine",
    "close_awaited",
    "close_bounded",
    "end",
    "end_awaited",
    "live_engines",
]

T = TypeVar("T")
_WORKERS: Final = max(2, min(4, os.cpu_count() or 1))
"""Threads for copies and allocations: four fill the memory bus of most machines."""
_POLL: Final = 0.001
_TEARDOWN: Final = 0.5
"""Seconds that threads have to end after what they did has been stopped."""
_NAMED: Final = 8
"""Most names in one event about keys."""
_PATIENCE: Final = 5.0
"""Seconds on top of `settle_timeout` that a cancelled caller waits for a core that should have answered long ago."""

CODES: Final[Mapping[bool, Codes]] = {
    True: Codes(
        timeout=LLMStatusCode.LLM_TIMEOUT,
        repeated=LLMStatusCode.LLM_ALREADY_LINK,
        unknown_unlink=LLMStatusCode.LLM_SUCCESS,
        unreachable_unlink=LLMStatusCode.LLM_UNLINK_FAILED,
    ),
    False: Codes(
        timeout=LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
        repeated=LLMStatusCode.LLM_REPEAT_REQUEST,
        unknown_unlink=LLMStatusCode.LLM_NOT_YET_LINK,
        unreachable_unlink=LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED,
    ),
}
"""By cache manager mode: what the newer and the older mode of the original answer."""

_live: weakref.WeakSet[Engine] = weakref.WeakSet()


def _codes(settings: Settings) -> Codes:
    """LLM-DataDist documentation: of the hixl backend each side links for itself, as its sample does."""
    codes = CODES[settings.cache_manager_mode]
    hixl = settings.transfer_backend == "hixl"
    return dataclasses.replace(codes, linked_by_peer=LLMStatusCode.LLM_SUCCESS) if hixl else codes


def _identity(settings: Settings) -> Identity:
    own, others = settings.link_secret, dict(settings.link_secrets)
    return Identity(settings.cluster_id, secrets.token_bytes(16), secret=own, secrets=others)


def live_engines() -> list[Engine]:
    """Engines that have been initialised and not finalised yet."""
    return list(_live)


class Engine:
    """Made by `init`; `open` and `close` run on its core."""

    def __init__(self, settings: Settings, *, dropped: Callable[[int], None] | None) -> None:
        tls = certificates(settings)  # before there is anything to be taken back
        self.settings: Settings = settings
        self.counters: observe.Counters = observe.Counters()
        self.core: CoreLoop = CoreLoop(name=f"kvpull-core-{settings.cluster_id}", on_bug=self._bug)
        self.events: observe.EventQueue = observe.EventQueue()
        self.log: observe.Log = observe.Log(self.events, local_cluster_id=settings.cluster_id)
        self.workers: Workers = Workers(_WORKERS)
        self.memory: MemoryBackend = choosing.Unopened()
        self.registry: Registry = Registry(self.memory, dropped=dropped, expired=self._expired)
        self._routes = Routes(settings, self.log, tls=tls)
        context = self._context()
        self.links: Links = Links(context, _codes(settings))
        self.comms: Comms = Comms(self.links, context)
        loop, find, log = self.core.loop, self.links.find, self.log
        self.node: Node = Node(settings.role, settings, self.registry, self.workers, self.counters, log, loop, find)
        self._listeners: list[Listener] = []
        self._closed = False
        self._memory_closed: Callable[[float], bool] | None = None
        try:
            self.core.start()
        except RuntimeError:
            self.events.close(1.0)
            raise
        _live.add(self)

    def _context(self) -> LinkContext:
        return LinkContext(
            identity=_identity(self.settings),
            settings=self.settings,
            log=self.log,
            counters=self.counters,
            workers=self.workers,
            routes=self._routes,
            serve=self._serve,
            gone=lambda link: self.links.gone(link),  # noqa: PLW0108  (`links` is made with this context)
        )

    def _serve(self, lane: Lane, path: DataPath, peer: Peer, peer_left: Callable[[bool], None]) -> Server:
        return Serving(
            lane,
            path,
            peer=peer.cluster_id,
            registry=self.registry,
            record=self.links.record(peer.process),
            workers=self.workers,
            log=self.log.bind(cluster_id=peer.cluster_id),
            counters=self.counters,
            inline_limit=frames.INLINE_MOST,  # the peer's own decides: who expects bytes there has no other connection
            lease_margin=self.settings.lease_margin_ms / 1000,
            settle_timeout=self.settings.settle_timeout_ms / 1000,
            pushes_by_key=self.settings.remote_cache_access,
            peer_left=peer_left,
        )

    # -- on the core ------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the memory, and listen when the settings say so. LLMException when either is impossible."""
        await self._open_memory()
        await self.links.prepare()
        for name, nearest in self.settings.unknown_options:
            self.log.warning("config.unknown_option", option=name, nearest=nearest)
        for name in self.settings.ignored_options:
            self.log.info("config.ignored_option", option=name, reason="its value has no meaning here")
        for name, nearest in self.settings.unknown_variables:
            self.log.warning("config.unknown_variable", variable=name, nearest=nearest)
        if self.settings.weak_secret:
            self.log.warning("config.weak_secret", reason=f"a link secret has fewer than {WEAK_BELOW} bytes")
        if self.settings.listen is not None:
            await self.listen(self.settings.listen)
        if self.settings.allow_insecure_network and not self.settings.authenticates:
            self.log.warning("link.insecure", reason="allow_insecure_network is on: peers are not authenticated")

    async def _open_memory(self) -> None:
        wanted = self.settings
        chosen = await choosing.choose_apart(
            wanted.device_backend, budgets=wanted.budgets, device_ids=wanted.device_ids, environ=os.environ
        )
        if self._closed:  # meanwhile, and nobody would close this one
            choosing.closing(chosen.memory, failed=self._bug)
            raise finalized()
        self.memory = self.registry.backend = chosen.memory
        self._routes.begin(chosen.memory, chosen.publications)
        chosen.attend(self.log)

    async def listen(self, address: Address) -> None:
        try:
            opened = await listen(self._routes, address, self._acceptor)
        except OSError as error:
            text = f"cannot listen on {address[0]}:{address[1]}: {error}"
            raise LLMException(text, status_code=LLMStatusCode.LLM_FAILED) from error
        if self._closed:  # meanwhile, and nobody would close these
            await close_all(opened)
            raise finalized()
        self._listeners += opened
        host, port = self._listeners[-1].address
        self.log.info("link.listening", address=f"{host}:{port}")

    def _acceptor(self, route: Route) -> OnChannel:
        return lambda channel: self.links.accept(route, channel)

    async def stop_listening(self) -> None:
        listeners, self._listeners = self._listeners, []
        await close_all(listeners)

    @property
    def listen_address(self) -> Address | None:
        return self._listeners[-1].address if self._listeners else None

    async def close(self) -> None:
        """Everything down to the last thread, within `close_timeout`; what cannot be stopped is left and named."""
        deadline = Deadline.after_ms(self.settings.close_timeout_ms)
        self._closed = True
        await self.stop_listening()
        await self.comms.close(deadline)
        await self.links.close(deadline)
        await self._routes.aclose(deadline)
        settled = deadline.sooner(self.settings.settle_timeout_ms / 1000)
        for entry in self.registry.entries():
            entry.bar()
            if not await entry.idle(settled):  # a peer in this process still reads it, or a transfer writes to it
                entry.leak()
                self.counters.add("regions_leaked")
                self.log.error("region.leaked", cache_id=entry.cache_id, reason="a transfer could not be stopped")
        self.registry.close()

    async def check_link_status(self, cluster_id: int) -> None:
        link = self.links.find(cluster_id)
        if link is None:
            raise LLMException(f"no link to cluster {cluster_id}", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        try:
            await link.check(Deadline.after_ms(self.settings.sync_kv_timeout_ms))
        except asyncio.TimeoutError as error:
            code = CODES[self.settings.cache_manager_mode].timeout
            fields: dict[str, Any] = {"operation": "check_link_status", "peer": cluster_id, "retry_safe": True}
            raise LLMTimeoutError(f"cluster {cluster_id} did not answer", status_code=code, **fields) from error

    async def link(self, targets: list[Target], timeout_ms: int) -> list[LLMStatusCode]:
        return await self.links.link(targets, Deadline.after_ms(timeout_ms))

    async def unlink(self, targets: list[Target], timeout_ms: int, *, force: bool) -> list[LLMStatusCode]:
        return await self.links.unlink(targets, Deadline.after_ms(timeout_ms), force=force)

    async def link_ranks(self, wanted: Gathering) -> int:
        comm_id = await self.comms.link(wanted)
        self.node.ranked = True
        return comm_id

    async def switch_role(self, role: LLMRole, listen: Settings) -> None:
        """Take a role and listen as `listen` says; on failure the node keeps the old role and no listener."""
        wanted, held = listen.listen, self.listen_address
        if wanted != held:
            await self.stop_listening()
            if wanted is not None:
                await self.listen(wanted)
        self.settings = listen
        self.node.role = role
        self.log.info("role.switched", role=role.name)

    # -- around the core --------------------------------------------------------------------------------------------

    def call(self, operation: Operation[T]) -> Call[T]:
        context = contextvars.Context() if operation.lasting else None
        patience = self.settings.settle_timeout_ms / 1000 + _PATIENCE
        call = self.core.call(operation.start, patience=patience, context=context, prompt=operation.prompt)
        call.undo = operation.undo
        call.orphaned = partial(self._orphaned, operation)
        return call

    def _orphaned(self, operation: Operation[Any]) -> None:
        fields = {"pull_id": operation.report.pull_id} if operation.report is not None else {}
        self.log.warning("pull.orphaned", operation=operation.name, reason="the caller's loop has closed", **fields)

    def ask_to_stop(self) -> None:
        """Begin to end the threads; `ended` says whether they have."""
        _live.discard(self)
        report_to(self.core.loop, self.links.refuse)  # also when `close` was interrupted: nothing begins anew
        self.core.stop(0)

    def ended(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the core's and the workers' threads to end; 0 is only a look."""
        deadline = Deadline.after_ms(timeout * 1000)
        return self.core.stop(deadline.remaining) and not self.workers.close(deadline.remaining)

    def memory_closed(self, timeout: float) -> bool:
        """Close the memory, once nothing uses it any more; wait at most `timeout` seconds for that."""
        if self._memory_closed is None:
            self._memory_closed = choosing.closing(self.memory, failed=self._bug)
        return self._memory_closed(timeout)

    def stuck(self) -> None:
        """They did not: say which, if they have not by now."""
        workers, core, memory = self.workers.close(0), not self.core.stop(0), not self.memory_closed(0)
        if workers or core or memory:
            self.log.error("engine.stuck", workers=workers, core=core, memory=memory)

    def snapshot(self) -> dict[str, int]:
        """The counters, with that of the log; from any thread."""
        lost = {"events_dropped": self.events.dropped} if self.events.dropped else {}
        return {**self.counters.snapshot(), **lost}

    @property
    def stopped(self) -> bool:
        return self.core.stopped

    def close_after_fork(self) -> None:
        self.node.live = False
        self._routes.close_after_fork()
        self.core.close_after_fork()

    def _expired(self, keys: list[Binding]) -> None:
        """Of one turn of the core's loop."""
        self.counters.add("keys_expired", len(keys))
        names = " ".join(observe.key_text(*binding.key) for binding in keys[:_NAMED])
        self.log.info("key.expired", keys=len(keys), key=names)

    def _bug(self, message: str) -> None:
        self.log.error("engine.bug", reason=message)

    def __repr__(self) -> str:
        return f"<Engine cluster={self.settings.cluster_id} {self.links!r} {self.registry!r}>"


def _after_fork() -> None:
    for engine in live_engines():
        engine.close_after_fork()
    _live.clear()


def close_bounded(engine: Engine) -> None:
    """`Engine.close` and the end of the threads, blocking, bounded even when the core is stuck."""
    call, deadline = engine.call(Operation("finalize", engine.close)), _closing(engine)
    try:
        call.wait(deadline.remaining)
    finally:
        end(engine, deadline)


async def close_awaited(engine: Engine) -> None:
    """As `close_bounded`, without holding the caller's loop."""
    call, deadline = engine.call(Operation("finalize", engine.close)), _closing(engine)
    try:
        await call.result(deadline.remaining)
    finally:
        await end_awaited(engine, deadline)


def end(engine: Engine, deadline: Deadline | None = None) -> None:
    """End the threads, the log's last."""
    bound = deadline or _closing(engine)
    engine.ask_to_stop()
    ended = engine.ended(max(bound.remaining, _TEARDOWN))
    if not (engine.memory_closed(max(bound.remaining, _TEARDOWN)) and ended):
        engine.stuck()
    engine.events.close(max(bound.remaining, _TEARDOWN))


async def end_awaited(engine: Engine, deadline: Deadline | None = None) -> None:
    """As `end`, without holding the caller's loop. When it is cancelled the threads end by themselves."""
    bound = deadline or _closing(engine)
    engine.ask_to_stop()
    try:
        ended = await _until(engine.ended, max(bound.remaining, _TEARDOWN))
        if not (await _until(engine.memory_closed, max(bound.remaining, _TEARDOWN)) and ended):
            engine.stuck()
        await _until(engine.events.close, max(bound.remaining, _TEARDOWN))
    finally:
        engine.memory_closed(0)
        engine.events.close(0)


def _closing(engine: Engine) -> Deadline:
    return Deadline.after_ms(engine.settings.close_timeout_ms).later(_TEARDOWN)


async def _until(done: Callable[[float], bool], timeout: float) -> bool:
    """Look until it is done: a thread that ends sets no event."""
    deadline = Deadline.after_ms(timeout * 1000)
    while not done(0.0):
        if deadline.expired:
            return False
        await asyncio.sleep(_POLL)
    return True


def _at_exit() -> None:
    """A program that forgot `finalize`: peers are told and threads end, within `close_timeout`."""
    with contextlib.ExitStack() as stack:  # one that cannot be closed must not keep the others from it
        for engine in live_engines():
            stack.callback(close_bounded, engine)


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
