"""Two processes' ends of shared memory in one process: both lanes of a link, and pulls over them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpull_async._deadline import Deadline, absorb
from kvpull_async._workers import Workers
from kvpull_async.memory.base import Region, Span
from kvpull_async.transport.base import PathSeed, Transfer
from kvpull_async.transport.shm.path import ShmPath
from tests.sides import NBYTES, heap_regions, this_process
from tests.unit.transport.shm.meetings import Kind, kinds
from tests.unit.transport.shm.readings import table

Rows = NDArray[np.int64]
WHOLE = table((0, 0, NBYTES))


@dataclass
class Link:
    """Both halves of both lanes of one link; this side of it, the one that dialled, pulls on lane 0."""

    accepting: Kind
    meeting: Kind
    token: bytes
    sources: list[ShmPath]
    pullers: list[ShmPath]
    lost: list[str]

    async def grant(
        self, regions: tuple[Region, ...], rows: Rows, *, lane: int = 0
    ) -> tuple[bytes, bytes | None, Transfer]:
        await self.pullers[lane].ready(soon())
        await self.sources[lane].ready(soon())
        grant, source = secrets.token_bytes(16), self.sources[lane]
        ticket = source.describe(grant, Span(regions, lambda: rows, direct=True))
        kind = self.accepting if lane == 0 else self.meeting
        return grant, ticket, source.serve(grant, kind.memory.lending(regions, rows), int(rows[:, 2].sum()))

    def fetch(
        self, grant: bytes, ticket: bytes | None, src: Rows, dst: Rows, into: tuple[Region, ...], lane: int = 0
    ) -> Transfer:
        kind = self.meeting if lane == 0 else self.accepting
        self.pullers[lane].expect(grant, ticket, lambda: src, Span(into, lambda: dst, direct=True))
        return self.pullers[lane].fetch(grant, kind.memory.landing(into, dst), int(dst[:, 2].sum()))

    async def pull(self, regions: tuple[Region, ...], *, lane: int = 0) -> bytes:
        """The first tensor, whole."""
        into = heap_regions()
        grant, ticket, serving = await self.grant(regions, WHOLE, lane=lane)
        fetching = self.fetch(grant, ticket, WHOLE, WHOLE, into, lane)
        assert await done(fetching) == NBYTES
        await done(serving)
        self.sources[lane].release(grant)
        return ctypes.string_at(into[0].address, NBYTES)


def soon() -> Deadline:
    return Deadline.after_ms(20_000)


async def done(transfer: Transfer) -> int:
    assert await absorb([transfer.settled], soon()), "it never settled"
    return transfer.done.result()


@contextlib.asynccontextmanager
async def linked(*, process_reads: str = "auto") -> AsyncIterator[Link]:
    if process_reads != "off":
        this_process()
    workers = Workers(3)
    async with kinds(accepting=process_reads, meeting=process_reads) as (accepting, meeting):
        token = secrets.token_bytes(16)
        await meeting.meet(token, accepting.offer(token))
        lost: list[str] = []
        theirs, ours = (
            [kind.path(PathSeed(token, lane, kind is meeting, None, workers, lost.append)) for lane in (0, 1)]
            for kind in (accepting, meeting)
        )
        link = Link(accepting, meeting, token, [theirs[0], ours[1]], [ours[0], theirs[1]], lost)
        try:
            yield link
        finally:
            for path in (*theirs, *ours):
                await path.aclose(soon())
                await path.aclose(soon())
            del link, theirs, ours
    assert await asyncio.to_thread(workers.close, 20) == 0
