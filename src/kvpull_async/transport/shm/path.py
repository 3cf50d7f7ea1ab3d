"""The data path of processes that share a machine: the puller copies out of the source's memory by itself.

Where it cannot, the source sends over a Unix socket. It must not know how the two have met.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvpull_async._deadline import Deadline, absorb
from kvpull_async.memory.base import Batches, Span
from kvpull_async.memory.copying import ORDERED
from kvpull_async.transport.base import PathSeed, Segments, Standing, Transfer
from kvpull_async.transport.shm.reading import Reading
from kvpull_async.transport.shm.remote import Open
from kvpull_async.transport.shm.side import Side
from kvpull_async.transport.stream import StreamPath

__all__ = ["ShmPath"]


@dataclass(frozen=True)
class _Expected:
    grant_id: bytes
    ticket: bytes
    reading: Callable[[], Segments]
    span: Span


class ShmPath(StreamPath):
    name = "shm"
    opens = ORDERED

    def __init__(self, side: Side, seed: PathSeed, *, forget: Callable[[bytes], None]) -> None:
        super().__init__(dials=seed.dialer)
        self._side = side
        self._seed = seed
        self._forget = forget
        self._pulls = (seed.lane == 0) == seed.dialer
        self._expected: _Expected | None = None
        self._readings: set[Reading] = set()
        self._granted: set[bytes] = set()
        side.streams[seed.lane] = self.attach

    # -- the source -------------------------------------------------------------------------------------------------

    def describe(self, grant_id: bytes, span: Span) -> bytes | None:
        self._require_side()
        number = self._side.publish(span.regions)
        if number is None:
            return None
        self._granted.add(grant_id)
        return msgspec.msgpack.encode(number)

    def serve(self, grant_id: bytes, lending: Batches, nbytes: int) -> Transfer:
        if grant_id not in self._granted:
            self._side.drain()  # the connection may be on its way
            if not self._usable():  # the puller did not expect to need one
                self.attach(self._connect())
            return super().serve(grant_id, lending, nbytes)
        lending.close()
        return _Published()

    def release(self, grant_id: bytes) -> None:
        self._granted.discard(grant_id)

    # -- the puller -------------------------------------------------------------------------------------------------

    async def ready(self, deadline: Deadline) -> None:
        """Memory needs no connection, but what can be neither mapped nor read does."""
        self._require_side()
        reads = self._side.process is not None if self._pulls else self._side.read_by_peer
        if not reads:
            await super().ready(deadline)

    async def dial(self, deadline: Deadline) -> socket.socket:
        return self._connect()

    def _connect(self) -> socket.socket:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                self._side.stream(self._seed.lane, theirs)
            except BaseException:
                mine.close()
                raise
        return mine

    def expect(self, grant_id: bytes, ticket: bytes | None, reading: Callable[[], Segments], span: Span) -> None:
        self._expected = None if ticket is None else _Expected(grant_id, ticket, reading, span)

    def standing(self, ticket: bytes) -> Standing | None:
        return Open(self._side.cache(_number(ticket))) if ORDERED else None

    def unproven(self, ticket: bytes) -> bool:
        return not ORDERED

    def fetch(self, grant_id: bytes, landing: Batches, nbytes: int) -> Transfer:
        expected, self._expected = self._expected, None
        if expected is None or expected.grant_id != grant_id:
            self._side.drain()
            return super().fetch(grant_id, landing, nbytes)
        self._require_side()
        cache = self._side.cache(_number(expected.ticket))
        into: Span | Batches = landing
        if expected.span.direct:
            landing.close()
            into = expected.span
        workers = self._seed.workers.fit(direct=expected.span.direct)
        reading = Reading(workers, cache, expected.reading, into, nbytes=nbytes)
        if not reading.settled.done():
            self._readings.add(reading)
            reading.settled.add_done_callback(lambda _: self._readings.discard(reading))
        return reading

    def give_up(self) -> None:
        self._expected = None
        super().give_up()

    # -- both -------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        for reading in self._readings:
            reading.abort()
        super().abort()
        self._side.streams.pop(self._seed.lane, None)
        self._forget(self._seed.token)

    async def aclose(self, deadline: Deadline) -> None:
        self.abort()
        await absorb([reading.settled for reading in self._readings], deadline)
        await super().aclose(deadline)

    def _require_side(self) -> None:
        self._side.drain()
        if self._side.closed:
            raise ConnectionError("the side channel of shared memory has ended")

    def __repr__(self) -> str:
        return f"<ShmPath lane={self._seed.lane} reading={len(self._readings)} {self._side!r}>"


def _number(ticket: bytes) -> int:
    try:
        return msgspec.msgpack.decode(ticket, type=int)
    except msgspec.MsgspecError as error:
        raise ConnectionError(f"the ticket of the grant makes no sense: {error}") from error


class _Published:
    """What the source holds for a grant that the puller reads by itself: nothing here touches memory."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[int] = loop.create_future()
        self.settled: asyncio.Future[None] = loop.create_future()
        self.done.set_result(0)
        self.settled.set_result(None)

    def abort(self) -> bool:
        return True
