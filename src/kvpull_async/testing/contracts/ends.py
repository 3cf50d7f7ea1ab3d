"""Both ends of one path as the suite for paths uses them: granted pulls, and pushes that are offered and taken."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpull_async._deadline import Deadline
from kvpull_async.memory.base import Batches, MemoryBackend, Region, Span
from kvpull_async.testing.contracts._waiting import PATIENCE, within
from kvpull_async.testing.faults import GatedMemory
from kvpull_async.transport.base import DataPath, Transfer

__all__ = ["Ends", "rows", "viewed"]


def viewed(memory: MemoryBackend, region: Region) -> NDArray[np.uint8]:
    """The bytes of a region that the host reaches, writable."""
    return np.frombuffer(memory.views([region])[0], np.uint8)


@dataclass
class Ends:
    """Both halves of one path, and what they read and fill."""

    puller: DataPath
    source: DataPath
    memory: GatedMemory
    reading: Sequence[Region]
    writing: Sequence[Region]
    look: Callable[[MemoryBackend, Region], NDArray[np.uint8]] = viewed
    """How the suite sees the bytes of a region."""
    reads: bool = True
    """Whether a path that reads by itself may do so here."""
    fills: bool = True
    """The same of one that fills by itself."""

    @property
    def destination(self) -> NDArray[np.uint8]:
        return self.look(self.memory, self.writing[0])

    @property
    def original(self) -> NDArray[np.uint8]:
        return self.look(self.memory, self.reading[0])

    def lending(self, segments: NDArray[np.int64]) -> Batches:
        return self.memory.lending(self.reading, segments)

    def landing(self, segments: NDArray[np.int64]) -> Batches:
        return self.memory.landing(self.writing, segments)

    async def ready(self) -> None:
        """As a pull does it: the puller before its request, the source before its grant."""
        await within(self.puller.ready(Deadline.after_ms(PATIENCE * 1000)))
        await within(self.source.ready(Deadline.after_ms(PATIENCE * 1000)))

    async def grant(
        self, segments: NDArray[np.int64], *, lending: Batches | None = None
    ) -> tuple[bytes, bytes | None, Transfer]:
        """What the source does for one pull: the grant's id, its ticket if the path has one, the source's transfer."""
        await self.ready()
        grant, nbytes = secrets.token_bytes(16), int(segments[:, 2].sum())
        ticket = self.source.describe(grant, Span(tuple(self.reading), lambda: segments, self.reads))
        return grant, ticket, self.source.serve(grant, lending or self.lending(segments), nbytes)

    async def start(
        self,
        segments: NDArray[np.int64],
        into: NDArray[np.int64],
        *,
        lending: Batches | None = None,
        landing: Batches | None = None,
    ) -> tuple[Transfer, Transfer]:
        """One granted pull: the source's transfer and the puller's."""
        grant, ticket, serving = await self.grant(segments, lending=lending)
        self.puller.expect(grant, ticket, lambda: segments, Span(tuple(self.writing), lambda: into, self.fills))
        return serving, self.puller.fetch(grant, landing or self.landing(into), int(segments[:, 2].sum()))

    async def pull(self, segments: NDArray[np.int64], into: NDArray[np.int64]) -> None:
        """One pull that must succeed."""
        serving, fetching = await self.start(segments, into)
        assert await within(asyncio.shield(fetching.done)) == int(segments[:, 2].sum())
        await within(asyncio.shield(serving.done))
        await within(asyncio.shield(fetching.settled))

    async def offer(self, segments: NDArray[np.int64]) -> tuple[bytes, bytes | None, Transfer | None]:
        """What the pushing side does for one push, on the half with which it pulls: the grant's id, its ticket if the
        path has one, and its transfer if it may begin before the receiver says that it is ready.
        """
        grant, nbytes, path = secrets.token_bytes(16), int(segments[:, 2].sum()), self.puller
        ticket = path.describe(grant, Span(tuple(self.reading), lambda: segments, self.reads))
        if ticket is None:
            await within(path.ready(Deadline.after_ms(PATIENCE * 1000)))
        begins = ticket is not None or path.prepared
        return grant, ticket, path.serve(grant, self.lending(segments), nbytes) if begins else None

    async def start_push(self, segments: NDArray[np.int64], into: NDArray[np.int64]) -> tuple[Transfer, Transfer]:
        """One push that has been taken: the pusher's transfer and the receiver's."""
        grant, ticket, serving = await self.offer(segments)
        nbytes, path = int(segments[:, 2].sum()), self.source
        if serving is None:
            path.give_up()
            await within(path.ready(Deadline.after_ms(PATIENCE * 1000)))
            serving = self.puller.serve(grant, self.lending(segments), nbytes)
        path.expect(grant, ticket, lambda: segments, Span(tuple(self.writing), lambda: into, self.fills))
        return serving, path.fetch(grant, self.landing(into), nbytes)

    async def push(self, segments: NDArray[np.int64], into: NDArray[np.int64]) -> None:
        """One push that must succeed."""
        serving, fetching = await self.start_push(segments, into)
        assert await within(asyncio.shield(fetching.done)) == int(segments[:, 2].sum())
        await within(asyncio.shield(serving.done))
        await within(asyncio.shield(fetching.settled))

    async def check_next(self) -> None:
        """A whole pull delivers every byte."""
        await self._check(self.pull)

    async def check_next_push(self) -> None:
        """A whole push delivers every byte."""
        await self._check(self.push)

    async def _check(self, move: Callable[[NDArray[np.int64], NDArray[np.int64]], Awaitable[None]]) -> None:
        self.destination[:] = 0
        whole = rows((0, self.original.size))
        await move(whole, whole)
        assert np.array_equal(self.destination, self.original)


def rows(*spans: tuple[int, int]) -> NDArray[np.int64]:
    """Segments of tensor 0, each (offset, length)."""
    return np.array([(0, offset, length) for offset, length in spans], np.int64).reshape(-1, 3)
