"""The transports and kinds of data path of one engine, as far as its settings allow. It must not use them itself."""

from __future__ import annotations

from collections.abc import Iterator

from kvpull_async._deadline import Deadline
from kvpull_async.config import Settings
from kvpull_async.linkage import Route
from kvpull_async.memory.base import MemoryBackend
from kvpull_async.memory.publications import Publications
from kvpull_async.observe import Log
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import PathKind, Transport
from kvpull_async.transport.inproc import InprocTransport
from kvpull_async.transport.shm.kind import ShmPaths
from kvpull_async.transport.tcp import TcpTransport
from kvpull_async.transport.tls import Tls

__all__ = ["Routes", "certificates"]


class Routes:
    """Best first: within a process from memory to memory; else control over TCP, with the best path both sides have.

    None before `begin`: what peers may read by themselves is known once the engine has its memory.
    """

    def __init__(self, settings: Settings, log: Log, *, tls: Tls | None = None) -> None:
        self._settings = settings
        self._log = log
        self._tls = tls
        self._all: tuple[Route, ...] = ()

    def begin(self, memory: MemoryBackend, publications: Publications) -> None:
        settings, log = self._settings, self._log
        inproc = InprocTransport(log, memory)
        tcp = TcpTransport(log, greeting_timeout=settings.handshake_timeout_ms / 1000, certificates=self._tls)
        shm = ShmPaths(publications, log, process_reads=settings.allow_process_vm_read)
        backend = settings.transfer_backend
        beside: list[tuple[Transport, tuple[PathKind, ...]]] = [(inproc, (inproc,)), (tcp, (shm, tcp))]
        chosen = [(transport, _allowed(kinds, backend)) for transport, kinds in beside]
        self._all = tuple(Route(transport, kinds) for transport, kinds in chosen if kinds)

    def __iter__(self) -> Iterator[Route]:
        return iter(self._all)

    def close_after_fork(self) -> None:
        for route in self._all:
            route.transport.close_after_fork()
            for kind in route.kinds:
                kind.close_after_fork()

    async def aclose(self, deadline: Deadline) -> None:
        for route in self._all:
            for kind in route.kinds:
                await kind.aclose(deadline)


def certificates(settings: Settings) -> Tls | None:
    """What the settings name; LLM_PARAM_INVALID with the file that cannot be used."""
    if not settings.tls:
        return None
    try:
        return Tls.load(certificate=settings.tls_certificate, key=settings.tls_key, authority=settings.tls_authority)
    except OSError as error:
        raise LLMException(f"TLS: {error}", status_code=LLMStatusCode.LLM_PARAM_INVALID) from error


def _allowed(kinds: tuple[PathKind, ...], backend: str) -> tuple[PathKind, ...]:
    """`auto`, and the original's `hixl`, take what works best; any other name is the only one allowed."""
    return kinds if backend in ("auto", "hixl") else tuple(kind for kind in kinds if kind.name == backend)
