"""A link without a network, for tests of pushes on the test's own loop. The receiver behind it takes the bytes that it
is offered, refuses them, or says nothing, as it is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvpull_async import plan
from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers, resolve
from kvpull_async.fifo import Fifo
from kvpull_async.memory.base import Batches, Span
from kvpull_async.memory.host import HostMemory
from kvpull_async.observe import Report
from kvpull_async.protocol import frames
from kvpull_async.push import Outgoing, Push
from kvpull_async.registry import Entry, Registry
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import CacheDesc, DataType, Placement
from tests.loop_nodes import eventually
from tests.pull_link import LONG_MS, STEP

WAYS = ("at once", "inline", "ticket", "begun", "accepted")
"""How the bytes of a push travel: with the offer (which the link takes without a wait, or not), read by the receiver,
sent at once, or sent once it is ready.
"""
OK = int(LLMStatusCode.LLM_SUCCESS)
DESC = CacheDesc(4, [2, 700_000], DataType.DT_UINT8)


class Sending:
    """Reads its lending into `sent`, a batch at a time. An abort takes effect after one more batch, or never."""

    def __init__(self, lending: Batches, *, stubborn: bool, stuck: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[int] = self.loop.create_future()
        self.settled: asyncio.Future[None] = self.loop.create_future()
        self.aborted = False
        self.stuck = stuck
        self.sent = bytearray()
        self._lending = lending
        self._stubborn = stubborn
        self._next()

    def _next(self) -> None:
        self.loop.call_later(STEP, self._step)

    def _step(self) -> None:
        if self.settled.done():
            return
        if self.stuck and (self._stubborn or not self.aborted):
            self._next()
            return
        stop = self.aborted and not self._stubborn
        batch = next(self._lending, None)
        for view in batch or ():
            self.sent += view
        if batch is not None and not stop:
            self._next()
            return
        self._lending.close()
        self.done.set_result(len(self.sent))
        self.settled.set_result(None)

    def breaks(self, error: OSError) -> None:
        self._lending.close()
        self.done.set_exception(error)
        self.settled.set_result(None)

    def abort(self) -> bool:
        self.aborted = True
        return not self._stubborn


class Lent:
    """What the receiver reads by itself: done at once, settled when it is given back."""

    def __init__(self, lending: Batches) -> None:
        lending.close()
        loop = asyncio.get_running_loop()
        self.done: asyncio.Future[int] = loop.create_future()
        self.done.set_result(0)
        self.settled: asyncio.Future[None] = loop.create_future()
        self.aborted = False

    def abort(self) -> bool:
        self.aborted = True
        resolve(self.settled)
        return True


class PushPath:
    name = "loop"

    def __init__(self, link: PushLink) -> None:
        self._link = link
        self.transfers: list[Sending | Lent] = []
        self.described: dict[bytes, Span] = {}
        self.released: list[bytes] = []
        self.broken: Exception | None = None

    @property
    def prepared(self) -> bool:
        return self._link.way == "begun"

    def describe(self, grant_id: bytes, span: Span) -> bytes | None:
        self.described[grant_id] = span
        return b"ticket" if self._link.way == "ticket" else None

    async def ready(self, deadline: Deadline) -> None:
        await asyncio.sleep(0)

    def serve(self, grant_id: bytes, lending: Batches, nbytes: int) -> Sending | Lent:
        if self.broken is not None:
            raise self.broken
        link = self._link
        lent = link.way == "ticket"
        made = Lent(lending) if lent else Sending(lending, stubborn=link.stubborn, stuck=link.stuck)
        self.transfers.append(made)
        return made

    def release(self, grant_id: bytes) -> None:
        self.released.append(grant_id)
        if self._link.way == "ticket" and self.transfers:
            self.transfers[-1].abort()


class PushChannel:
    """`clogged` makes `send` wait for ever; `broken` makes it fail."""

    def __init__(self, lane: PushLane) -> None:
        self._lane = lane
        self.clogged = False
        self.broken: OSError | None = None

    def post(self, data: bytes) -> None:
        self._lane.sent()

    async def send(self, data: bytes) -> None:
        await asyncio.sleep(0)
        if self.clogged:
            await asyncio.get_running_loop().create_future()
        if self.broken is not None:
            raise self.broken
        self._lane.sent()


@dataclass
class Offered:
    """An offer as the receiver has it."""

    offer: frames.Offer
    tail: bytes
    accepted: Callable[[], None]
    result: asyncio.Future[frames.Result]


class PushLane:
    def __init__(self, link: PushLink) -> None:
        self._link = link
        self.channel = PushChannel(self)
        self.lost: asyncio.Future[LLMException] = asyncio.get_running_loop().create_future()
        self.offers: dict[int, Offered] = {}
        self.cancels: list[int] = []
        self.heard: list[Offered] = []
        self._number = 0

    def offer(
        self, offer: Callable[[int], frames.Offer], *tail: bytes, accepted: Callable[[], None]
    ) -> tuple[int, bytes, asyncio.Future[frames.Result]]:
        self._number += 1
        made = Offered(offer(self._number), b"".join(tail), accepted, asyncio.get_running_loop().create_future())
        self.offers[self._number] = made
        return self._number, b"offer", made.result

    def sent(self) -> None:
        """The newest offer has come to the receiver."""
        made = self.offers[self._number]
        self.heard.append(made)
        self._link.receive(made)

    def post(self, message: Any) -> None:
        assert isinstance(message, frames.Cancel)
        self.cancels.append(message.request_id)
        asyncio.get_running_loop().call_later(STEP, self._link.withdrawn, self.offers[message.request_id])

    def give_up(self, request_id: int, *, tell: bool) -> None:
        assert not tell
        del self.offers[request_id]

    def lose(self, reason: str) -> None:
        """The connection breaks, and with it all that waits on it."""
        error = LLMException(reason, status_code=LLMStatusCode.LLM_LINK_FAILED, retry_safe=True)
        self.lost.set_result(error)
        for made in self.offers.values():
            if not made.result.done():
                made.result.set_exception(error)
                made.result.exception()


class PushLink:
    """What a push needs of a link. By default the receiver takes what it is offered; see the attributes."""

    def __init__(self, way: str, *, settle_timeout: float = 5.0) -> None:
        self.way = way
        self.inline_limit = 2**20 if way in ("inline", "at once") else 0
        self.settle_timeout = settle_timeout
        self.silent = False
        """The receiver does not take what it is offered."""
        self.deaf = False
        """It does not answer a CANCEL either."""
        self.unsafe = False
        """Its answer to a CANCEL is that something still writes."""
        self.stubborn = False
        """Transfers refuse to abort."""
        self.stuck = False
        """Transfers do not get on."""
        self.unreachable = False
        self.answer: frames.Result | None = None
        """What the receiver answers instead of taking the bytes."""
        self.workers = Workers(1)
        self.peer_name = "peer:1"
        self.trouble = ": nobody is there"
        self.lane = PushLane(self)
        self.path = PushPath(self)
        self.fifo = Fifo(limit=8, wait=True)
        self.received: list[bytes] = []
        self._taking: dict[int, asyncio.Task[None]] = {}

    def enter_now(self, push: object) -> bool:
        return self.fifo.claim(push)

    async def enter(self, push: object) -> None:
        await self.fifo.acquire()

    def leave(self, push: object) -> None:
        self.fifo.release()

    def ready_now(self) -> PushLane | None:
        channel = self.lane.channel
        ready = not (self.lane.lost.done() or self.unreachable or channel.clogged or channel.broken)
        return self.lane if ready and self.way == "at once" else None

    async def ready(self, deadline: Deadline) -> PushLane:
        await asyncio.sleep(0)
        if self.unreachable:
            await asyncio.get_running_loop().create_future()
        if self.lane.lost.done():
            self.lane, self.path = PushLane(self), PushPath(self)
        return self.lane

    # -- the receiver -----------------------------------------------------------------------------------------------

    def receive(self, made: Offered) -> None:
        if not self.silent:
            task = asyncio.get_running_loop().create_task(self._take(made))
            self._taking[id(made)] = task
            task.add_done_callback(lambda _: self._taking.pop(id(made), None))

    async def _take(self, made: Offered) -> None:
        await asyncio.sleep(STEP)
        if self.answer is None:
            self.received.append(await self._bytes_of(made))
        say(made, self.answer or frames.Result(made.offer.request_id, OK, "", unsafe=False))

    async def _bytes_of(self, made: Offered) -> bytes:
        offer, path = made.offer, self.path
        if offer.inline:
            return made.tail[len(made.tail) - offer.tensors * offer.per_tensor :]  # behind the tables
        if offer.ticket is not None:
            span = path.described[offer.grant_id]
            pieces = HostMemory().lending(span.regions, span.rows())
            return b"".join(view for batch in pieces for view in batch)
        if not offer.begun:
            made.accepted()
        transfer = path.transfers[-1]
        await asyncio.wait([transfer.done])
        assert isinstance(transfer, Sending)
        return bytes(transfer.sent)

    def withdrawn(self, made: Offered) -> None:
        """A CANCEL has come."""
        taking = self._taking.get(id(made))
        if taking is not None:
            taking.cancel()
        if not self.deaf:
            say(made, frames.Result(made.offer.request_id, 27, "the sender gave up", self.unsafe))

    async def close(self) -> None:
        """Wait for what still goes on beside the pushes."""
        for transfer in self.path.transfers:
            if isinstance(transfer, Sending):
                transfer.aborted, transfer.stuck = True, False
                await asyncio.wait([transfer.settled])
        await eventually(lambda: not self._taking)
        self.workers.close(5.0)


def say(made: Offered, result: frames.Result) -> None:
    if not made.result.done():
        made.result.set_result(result)


class PushBench:
    """A source of the test's own memory, and pushes of its batch entry 1 over a link without a network."""

    def __init__(self, way: str, **link: Any) -> None:
        self.link = PushLink(way, **link)
        self.memory = np.random.default_rng(7).integers(0, 256, (4, 2, 700_000)).astype(np.uint8)
        self.registry = Registry(HostMemory())
        addresses = [tensor.ctypes.data for tensor in self.memory]
        regions = self.registry.backend.adopt(addresses, tensor_nbytes=DESC.size, placement=Placement.HOST)
        self.entry: Entry = self.registry.add(DESC, regions, blocks=False)
        self.reports: list[Report] = []
        self.size = 1024 if self.link.inline_limit else 700_000

    def push(self, timeout_ms: float = LONG_MS, *, most_rows: int = 4) -> Push:
        report = Report("push_cache", f"push-{len(self.reports)}", push=True)
        self.reports.append(report)
        offer = frames.Offer(
            0, bytes(16), report.pull_id, "", 0, "cache", 3, 0, 1, 2, 4, self.size, 0, 0, 0, 700_000,
            0 if self.link.way == "at once" else 5,
            inline=False, begun=False,
        )  # fmt: skip
        outgoing = Outgoing(
            entry=self.entry,
            backend=self.registry.backend,
            rows=partial(plan.run_segments, range(4), start=700_000, size=self.size),
            most_rows=most_rows,
            nbytes=4 * self.size,
            offer=offer,
            table=b"",
            src_table=b"rows" * 10,
            deadline=Deadline.after_ms(timeout_ms),
            report=report,
        )
        return Push(self.link, outgoing)  # type: ignore[arg-type]  # what a push uses of a link is there

    @property
    def expected(self) -> bytes:
        return self.memory[:, 1, : self.size].tobytes()

    def quiet(self) -> None:
        """Nothing of a push is left: its pin, its place on the link, its offer, its grant."""
        assert not self.entry.busy, repr(self.entry)
        assert not self.link.fifo.busy, repr(self.link.fifo)
        assert all(made.result.done() for made in self.link.lane.offers.values())  # the others were given up
        assert all(transfer.settled.done() for transfer in self.link.path.transfers)

    async def next_one(self) -> None:
        """The next push on the link is right."""
        link = self.link
        link.silent = link.deaf = link.unsafe = link.stubborn = link.stuck = link.unreachable = False
        link.answer, link.lane.channel.clogged, link.lane.channel.broken = None, False, None
        link.received.clear()
        self.memory[:, 1] ^= 0xFF
        await self.push().run()
        assert link.received == [self.expected]
        await eventually(lambda: not self.entry.busy)
        self.quiet()
