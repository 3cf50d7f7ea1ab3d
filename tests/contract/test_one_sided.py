"""The path contract carries engines that move memory by themselves: a ticket says what to read, a span where to."""

from __future__ import annotations

from collections.abc import Callable, Generator

import msgspec
import pytest

from kvpull_async import CacheKey, plan
from kvpull_async._workers import Job
from kvpull_async.memory.base import Batches, MemoryBackend, Span
from kvpull_async.memory.host import HostMemory
from kvpull_async.observe import Log
from kvpull_async.transport.base import DataPath, PathSeed, Segments, Transport
from kvpull_async.transport.inproc import InprocPath, InprocTransport
from tests import duo


class ReadingPath(InprocPath):
    """Reads the source's memory through what the ticket says and never touches the pieces it is handed."""

    name = "inproc"

    def __init__(self, seed: PathSeed) -> None:
        super().__init__(seed, None)
        self._host = HostMemory()
        self._tickets: dict[bytes, tuple[bytes, Callable[[], Segments], Span]] = {}

    def describe(self, grant_id: bytes, span: Span) -> bytes:
        return msgspec.msgpack.encode([(region.address, region.nbytes) for region in span.regions])

    def expect(self, grant_id: bytes, ticket: bytes | None, reading: Callable[[], Segments], span: Span) -> None:
        assert ticket is not None
        self._tickets[grant_id] = ticket, reading, span

    def fetch(self, grant_id: bytes, landing: Batches, nbytes: int) -> Job:
        landing.close()
        return Job(self._workers, self._read(*self._tickets.pop(grant_id)))

    def _read(self, ticket: bytes, reading: Callable[[], Segments], span: Span) -> Generator[int, None, None]:
        regions = msgspec.msgpack.decode(ticket)
        source = [self._host.adopt([a], tensor_nbytes=n, placement=span.regions[0].placement)[0] for a, n in regions]
        theirs, ours = self._host.views(source), self._host.views(span.regions)
        for src, at, dst, to, n in plan.pair(reading(), span.rows()).tolist():
            ours[dst][to : to + n] = theirs[src][at : at + n]
            yield n


class ReadingTransport(InprocTransport):
    def path(self, seed: PathSeed) -> DataPath:
        return ReadingPath(seed)


async def test_an_engine_that_copies_by_itself_needs_no_more_than_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    def transport(log: Log, _: MemoryBackend) -> Transport:
        return ReadingTransport(log)

    monkeypatch.setattr("kvpull_async.routes.InprocTransport", transport)
    async with duo.duo(transport="inproc") as pair:
        await pair.publish(duo.BIG)
        cache = await pair.destination(duo.BIG)
        for _ in range(2):
            await pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 1), cache, 0, src_cache_offset=0)
            assert duo.holds(cache, entry=0, source=1)
