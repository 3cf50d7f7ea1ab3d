"""Transfers that do not stop, on purpose, as those of some native engines.

For tests of the library. Nothing but tests may import it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvpull_async._deadline import Deadline, absorb
from kvpull_async.memory.base import Batches, Span
from kvpull_async.transport.base import (
    Address,
    ControlChannel,
    DataPath,
    Listener,
    OnChannel,
    PathKind,
    PathSeed,
    Segments,
    Transfer,
    Transport,
)

__all__ = ["StubbornPath", "StubbornTransfer", "StubbornTransport"]


class StubbornTransfer:
    """A transfer that cannot be stopped, as those of some native engines."""

    def __init__(self, inner: Transfer) -> None:
        self._inner = inner

    @property
    def done(self) -> asyncio.Future[int]:
        return self._inner.done

    @property
    def settled(self) -> asyncio.Future[None]:
        return self._inner.settled

    def abort(self) -> bool:
        return False


class StubbornPath(DataPath):
    """Another path whose fetches refuse to abort: only their own end, or the source's, settles them.

    The path below must be able to begin a transfer while another one runs.
    """

    def __init__(self, inner: DataPath) -> None:
        self.name: str = inner.name
        self._inner = inner
        self._running: set[asyncio.Future[None]] = set()
        self._aborted = False

    @property
    def prepared(self) -> bool:  # type: ignore[override]  # as the path below is
        return self._inner.prepared

    async def ready(self, deadline: Deadline) -> None:
        await self._inner.ready(deadline)

    def fetch(self, grant_id: bytes, landing: Batches, nbytes: int) -> StubbornTransfer:
        transfer = StubbornTransfer(self._inner.fetch(grant_id, landing, nbytes))
        self._running.add(transfer.settled)
        transfer.settled.add_done_callback(self._settled)
        return transfer

    def serve(self, grant_id: bytes, lending: Batches, nbytes: int) -> Transfer:
        return self._inner.serve(grant_id, lending, nbytes)

    def describe(self, grant_id: bytes, span: Span) -> bytes | None:
        return self._inner.describe(grant_id, span)

    def expect(self, grant_id: bytes, ticket: bytes | None, reading: Callable[[], Segments], span: Span) -> None:
        self._inner.expect(grant_id, ticket, reading, span)

    def unproven(self, ticket: bytes) -> bool:
        return self._inner.unproven(ticket)

    def give_up(self) -> None:
        self._inner.give_up()

    def release(self, grant_id: bytes) -> None:
        self._inner.release(grant_id)

    def abort(self) -> None:
        self._aborted = True
        if not self._running:
            self._inner.abort()

    async def aclose(self, deadline: Deadline) -> None:
        self.abort()
        if await absorb(self._running, deadline):
            await self._inner.aclose(deadline)

    def _settled(self, settled: asyncio.Future[None]) -> None:
        self._running.discard(settled)
        if self._aborted and not self._running:
            self._inner.abort()

    def __repr__(self) -> str:
        return f"<StubbornPath running={len(self._running)} of {self._inner!r}>"


class StubbornTransport(Transport, PathKind):
    """Another transport whose paths are stubborn."""

    def __init__(self, inner: Transport) -> None:
        self.name: str = inner.name
        self._inner = inner

    async def listen(self, address: Address, on_channel: OnChannel) -> Listener:
        return await self._inner.listen(address, on_channel)

    async def dial(self, address: Address) -> ControlChannel:
        return await self._inner.dial(address)

    def path(self, seed: PathSeed) -> DataPath:
        assert isinstance(self._inner, PathKind)
        return StubbornPath(self._inner.path(seed))

    def reaches(self, address: Address) -> bool:
        return self._inner.reaches(address)
