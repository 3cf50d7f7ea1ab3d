"""A serving lane for tests: a registry with one cache, and below it a lane and a data path that only keep a record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers
from kvpull_async.lane import Lane
from kvpull_async.memory.base import Batches, Span
from kvpull_async.observe import Counters, Log
from kvpull_async.offers import PeerRecord
from kvpull_async.protocol import frames
from kvpull_async.protocol.frames import Message
from kvpull_async.registry import Entry, Registry
from kvpull_async.serve import Serving
from kvpull_async.status import LLMException
from kvpull_async.transport.base import DataPath
from kvpull_async.values import CacheDesc, CacheKey, DataType, Placement
from tests.loop_nodes import PlainMemory, eventually
from tests.wire import SAMPLES

STRIDE, TENSORS = 64, 2
PEER = 2
"""The cluster that asks."""


class FakeTransfer:
    """Bytes on their way for as long as the test likes; an abort settles it, unless it refuses."""

    def __init__(self, *, finished: bool = False, landing: Batches | None = None) -> None:
        self._landing = landing
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[int] = loop.create_future()
        self.settled: asyncio.Future[None] = loop.create_future()
        self.aborts = 0
        self.refuses = False
        if finished:
            self.done.set_result(0)

    def finish(self, error: Exception | None = None) -> None:
        if error is None:
            self.done.set_result(STRIDE)
        else:
            self.done.set_exception(error)
        self.settled.set_result(None)

    def land(self, data: bytes) -> None:
        """Fill the destination, and finish."""
        assert self._landing is not None
        at = 0
        for batch in self._landing:
            for view in batch:
                view[:] = data[at : at + len(view)]
                at += len(view)
        assert at == len(data)
        self.finish()

    def abort(self) -> bool:
        self.aborts += 1
        if not self.refuses and not self.settled.done():
            if not self.done.done():
                self.done.set_exception(ConnectionAbortedError("aborted"))
                self.done.exception()
            self.settled.set_result(None)
        return not self.refuses


class FakePath(DataPath):
    name = "fake"

    def __init__(self) -> None:
        self.transfers: list[FakeTransfer] = []
        self.released: list[bytes] = []
        self.stuck = False
        self.broken: OSError | None = None
        self.ticket: bytes | None = None
        self.described: list[tuple[bytes, Span]] = []
        self.expected: list[tuple[bytes, bytes | None, list[list[int]], Span]] = []
        self.given_up = 0
        self.refusing = False
        """Transfers that are begun from now on cannot be aborted."""

    async def ready(self, deadline: Deadline) -> None:
        if self.broken is not None:
            raise self.broken
        if self.stuck:
            await asyncio.Event().wait()

    def expect(
        self, grant_id: bytes, ticket: bytes | None, reading: Callable[[], NDArray[np.int64]], span: Span
    ) -> None:
        self.expected.append((grant_id, ticket, reading().tolist(), span))

    def fetch(self, grant_id: bytes, landing: Batches, nbytes: int) -> FakeTransfer:
        self.transfers.append(FakeTransfer(landing=landing))
        self.transfers[-1].refuses = self.refusing
        return self.transfers[-1]

    def give_up(self) -> None:
        self.given_up += 1

    def serve(self, grant_id: bytes, lending: Batches, nbytes: int) -> FakeTransfer:
        self.bytes = b"".join(bytes(view) for batch in lending for view in batch)
        self.transfers.append(FakeTransfer(finished=self.ticket is not None))
        return self.transfers[-1]

    def describe(self, grant_id: bytes, span: Span) -> bytes | None:
        self.described.append((grant_id, span))
        return self.ticket

    def release(self, grant_id: bytes) -> None:
        self.released.append(grant_id)

    def abort(self) -> None: ...

    async def aclose(self, deadline: Deadline) -> None: ...


class FakeLane:
    """What serving sees of its lane: it keeps what is said."""

    def __init__(self) -> None:
        self.channel = SimpleNamespace(peer="a peer", ready=True)
        self.turns = 0
        self.ended: list[int] = []
        self.session = SimpleNamespace(end_request=self.ended.append)
        self.lost: asyncio.Future[LLMException] = asyncio.get_running_loop().create_future()
        self.said: list[tuple[Message, bytes]] = []
        self.aborted: list[str] = []

    def post(self, message: Message, *tail: bytes | memoryview) -> None:
        self.said.append((message, b"".join(tail)))

    async def send(self, message: Message, tail: bytes = b"") -> None:
        self.said.append((message, tail))

    def abort(self, reason: str) -> None:
        self.aborted.append(reason)


class Scene:
    """A serving lane over a registry with one cache, whose first entry is request 7, its second request 8."""

    def __init__(
        self,
        *,
        one_sided: bool = False,
        inline_limit: int = 0,
        lease_margin: float = 60.0,
        settle_timeout: float = 5.0,
        pushes_by_key: bool = True,
    ) -> None:
        self.registry = Registry(PlainMemory())
        allocation = self.registry.backend.allocate(tensors=TENSORS, tensor_nbytes=2 * STRIDE, placement=Placement.HOST)
        desc = CacheDesc(TENSORS, [2, STRIDE], DataType.DT_INT8)
        self.entry: Entry = self.registry.add(desc, allocation.regions, blocks=False, allocation=allocation)
        self.registry.bind(self.entry, [CacheKey(1, 7), CacheKey(1, 8)])
        for view in self.entry.views():
            view[:] = bytes(range(2 * STRIDE))
        self.counters = Counters()
        self.record = PeerRecord()
        self.lane = FakeLane()
        self.path = FakePath()
        self.path.ticket = b"a ticket" if one_sided else None
        self.left = 0
        self.workers = Workers(1)
        self.serving = Serving(
            cast("Lane", self.lane), self.path, peer=PEER, registry=self.registry, record=self.record,
            workers=self.workers, log=Log(), counters=self.counters, inline_limit=inline_limit,
            lease_margin=lease_margin, settle_timeout=settle_timeout, pushes_by_key=pushes_by_key, peer_left=self._left,
        )  # fmt: skip

    def _left(self, returns: bool = False) -> None:
        self.left += 1

    def ask(self, number: int, **fields: Any) -> None:
        base = {"tensors": TENSORS, "size": STRIDE, "remaining_ms": 60_000, "request_id": number}
        self.serving.receive(msgspec.structs.replace(SAMPLES["Request"].message, **{**base, **fields}), b"")

    def offer(self, number: int, tail: bytes = b"", **fields: Any) -> None:
        """Of 64 bytes for each tensor of entry 1, inside the offer unless the fields say something else."""
        base: dict[str, Any] = {
            "request_id": number, "remaining_ms": 60_000, "key": "cache", "identity": self.entry.cache_id, "entry": 1,
            "first_tensor": 0, "tensors": TENSORS, "per_tensor": STRIDE, "blocks": 0, "block_nbytes": 0,
            "src_tensor": 0, "start": 0, "src_blocks": 0, "inline": True, "begun": False, "ticket": None,
        }  # fmt: skip
        self.serving.receive(msgspec.structs.replace(SAMPLES["Offer"].message, **{**base, **fields}), tail)

    async def result(self, number: int) -> frames.Result:
        """The one RESULT of that offer."""
        await eventually(
            lambda: any(said.request_id == number for said in self.of(frames.Result)), f"a result in {self.lane.said}"
        )
        found: frames.Result = next(said for said in self.of(frames.Result) if said.request_id == number)
        return found

    async def heard(self, kind: type[Message], count: int = 1) -> list[Any]:
        """The messages of that kind that were said, once there are `count`."""
        await eventually(lambda: len(self.of(kind)) >= count, f"{kind.__name__} in {self.lane.said}")
        return self.of(kind)

    def of(self, kind: type[Message]) -> list[Any]:
        return [message for message, _ in self.lane.said if isinstance(message, kind)]

    async def granted(self) -> frames.Grant:
        (grant,) = await self.heard(frames.Grant)
        assert isinstance(grant, frames.Grant)
        return grant

    @property
    def held(self) -> bool:
        """Whether request 7 can still be pulled."""
        return self.registry.find_key(("request", 7, 0)) is not None
