"""A link without a network, for tests of pulls on the test's own loop: it answers as it is told, and its transfers
write to their destination until they have settled.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvpull_async import plan
from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers
from kvpull_async.fifo import Fifo
from kvpull_async.memory.base import Batches, Span, Until
from kvpull_async.memory.host import HostMemory
from kvpull_async.observe import Report
from kvpull_async.protocol import frames
from kvpull_async.pull import Pull, Wanted
from kvpull_async.registry import Entry, Registry
from kvpull_async.standing import Standings
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import CacheDesc, DataType, Placement

INLINE, STREAMED = 65536, 0
"""Inline limits with which the pulls of a `Bench` ride on the answer, or do not."""
LONG_MS = 60_000
GRANT_ID = b"g" * 16
UNPROVEN = b"unproven"
"""The ticket of a grant whose bytes count only once the source has confirmed them."""
STEP = 0.0005
"""Seconds between two steps of what goes on beside the pull."""


class LoopTransfer:
    """Fills its landing with `byte`, a batch at a time. An abort takes effect after one more batch, or never."""

    def __init__(self, landing: Batches, *, byte: int, stubborn: bool, stuck: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: asyncio.Future[int] = self.loop.create_future()
        self.settled: asyncio.Future[None] = self.loop.create_future()
        self.aborted = False
        self.stuck = stuck
        self._landing = landing
        self._byte = byte
        self._stubborn = stubborn
        self._moved = 0
        self._next()

    def _next(self) -> None:
        self.loop.call_later(STEP, self._step)

    def _step(self) -> None:
        if self.stuck and (self._stubborn or not self.aborted):
            self._next()
            return
        stop = self.aborted and not self._stubborn
        batch = next(self._landing, None)
        for view in batch or ():
            np.frombuffer(view, np.uint8)[:] = self._byte
            self._moved += view.nbytes
        if batch is not None and not stop:
            self._next()
            return
        self._landing.close()
        if not self.done.done():
            self.done.set_result(self._moved)
        self.settled.set_result(None)

    def abort(self) -> bool:
        self.aborted = True
        return not self._stubborn

    def fail(self, error: Exception) -> None:
        self.aborted = True
        self.done.set_exception(error)


@dataclass(frozen=True)
class Expected:
    """What a path was told of a grant before its fetch."""

    grant_id: bytes
    ticket: bytes | None
    reading: Callable[[], plan.Segments]
    span: Span


class LoopPath:
    name = "loop"

    def __init__(self, link: LoopLink) -> None:
        self._link = link
        self.transfers: list[LoopTransfer] = []
        self.expected: list[Expected] = []
        self.given_up = 0

    async def ready(self, deadline: Deadline) -> None:
        await asyncio.sleep(0)

    def expect(self, grant_id: bytes, ticket: bytes | None, reading: Callable[[], plan.Segments], span: Span) -> None:
        self.expected.append(Expected(grant_id, ticket, reading, span))

    def unproven(self, ticket: bytes) -> bool:
        return ticket == UNPROVEN

    def fetch(self, grant_id: bytes, landing: Batches, nbytes: int) -> LoopTransfer:
        link = self._link
        transfer = LoopTransfer(landing, byte=link.byte, stubborn=link.stubborn, stuck=link.stuck)
        self.transfers.append(transfer)
        return transfer

    def standing(self, ticket: bytes) -> None:
        return None

    def give_up(self) -> None:
        self.given_up += 1


class LoopChannel:
    def post(self, data: bytes) -> None: ...

    async def send(self, data: bytes) -> None:
        await asyncio.sleep(0)


class LoopLane:
    def __init__(self, link: LoopLink) -> None:
        self._link = link
        self.channel = LoopChannel()
        self.lost: asyncio.Future[LLMException] = asyncio.get_running_loop().create_future()
        self.requests: list[frames.Request] = []
        self.tables: list[bytes] = []
        self.given_up: list[int] = []
        self.checked: list[bytes] = []
        self.refusals: list[asyncio.Future[LLMException]] = []
        self._check: asyncio.Future[bool] | None = None

    def ask(self, request: Callable[[int], frames.Request], tail: bytes) -> tuple[int, bytes, asyncio.Future[Any]]:
        asked = request(len(self.requests) + 1)
        self.requests.append(asked)
        self.tables.append(tail)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._link.silent:
            asyncio.get_running_loop().call_later(STEP, self._link.answer, asked, answer)
        return asked.request_id, b"request", answer

    def refusal(self, request_id: int) -> asyncio.Future[LLMException]:
        assert request_id == len(self.requests)
        self.refusals.append(asyncio.get_running_loop().create_future())
        return self.refusals[-1]

    def give_up(self, request_id: int, *, tell: bool) -> None:
        assert tell
        self.given_up.append(request_id)

    async def check(self, grant_id: bytes) -> bool:
        self.checked.append(grant_id)
        self._check = asyncio.get_running_loop().create_future()
        if self._link.valid is not None:
            asyncio.get_running_loop().call_later(STEP, _settle, self._check, self._link.valid)
        return await self._check

    def confirm(self, *, valid: bool) -> None:
        assert self._check is not None
        _settle(self._check, valid)


class LoopLink:
    """What a pull needs of a link. By default every request is granted whole; see the attributes."""

    def __init__(self, *, settle_timeout: float = 5.0, inline_limit: int = 65536) -> None:
        self.byte = 0x5A
        self.silent = False
        self.unreachable = False
        self.stubborn = False
        """Transfers refuse to abort."""
        self.stuck = False
        """Transfers do not get on."""
        self.refusal: LLMException | None = None
        self.granted: dict[str, Any] = {}
        """Fields of the grant that differ from what was asked."""
        self.payload: bytes | None = None
        self.ticket: bytes | None = None
        """What comes with the grant of a pull that is not inside the answer."""
        self.valid: bool | LLMException | None = True
        """What the source says when it is asked whether it still holds a grant; None: nothing."""
        self.inline_limit = inline_limit
        self.settle_timeout = settle_timeout
        self.workers = Workers(1)
        self.peer_name = "peer:1"
        self.trouble = ": nobody is there"
        self.lane = LoopLane(self)
        self.path = LoopPath(self)
        self.fifo = Fifo(limit=8, wait=True)
        self.done: list[frames.Done] = []
        self.reads: list[frames.Read] = []
        self.standing = Standings(self.reads.append)
        self.quarantined: list[Entry] = []

    def enter_now(self, pull: object) -> bool:
        return self.fifo.claim(pull)

    def ready_now(self) -> LoopLane | None:
        return None if self.unreachable else self.lane

    async def enter(self, pull: object) -> None:
        await self.fifo.acquire()

    def leave(self, pull: object) -> None:
        self.fifo.release()

    async def ready(self, deadline: Deadline) -> LoopLane:
        await asyncio.sleep(0)
        if self.unreachable:
            await asyncio.get_running_loop().create_future()
        return self.lane

    def answer(self, asked: frames.Request, answer: asyncio.Future[Any]) -> None:
        if answer.done():
            return
        if self.refusal is not None:
            answer.set_exception(self.refusal)
            return
        fields: dict[str, Any] = {
            "tensors": asked.tensors,
            "per_tensor": asked.size,
            "wants_done": True,
            **self.granted,
        }
        nbytes = fields["tensors"] * fields["per_tensor"]
        inline = nbytes <= min(self.inline_limit, asked.inline_limit)
        fields.setdefault("ticket", None if inline else self.ticket)
        grant = frames.Grant(request_id=asked.request_id, grant_id=GRANT_ID, inline=inline, **fields)
        payload = bytes([self.byte]) * nbytes if self.payload is None else self.payload
        answer.set_result((grant, payload if inline else b""))

    def tell_done(self, done: frames.Done) -> None:
        self.done.append(done)

    def quarantine(self, entry: Entry, settled: asyncio.Future[None], report: Report) -> None:
        entry.quarantine(settled)
        self.quarantined.append(entry)

    def broken(self, error: OSError) -> LLMException:
        return LLMException(f"broke: {error}", status_code=LLMStatusCode.LLM_LINK_FAILED, retry_safe=True)

    async def close(self) -> None:
        """Wait for what still goes on beside the pulls."""
        for transfer in self.path.transfers:
            transfer.aborted, transfer.stuck = True, False
            await asyncio.wait([transfer.settled])
        self.workers.close(5.0)


def _settle(answer: asyncio.Future[bool], outcome: bool | LLMException) -> None:
    if answer.done():
        return
    if isinstance(outcome, LLMException):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


@types.coroutine
def counted(coroutine: Coroutine[Any, Any, Any], suspended: Callable[[], None]) -> Generator[Any, Any, Any]:
    """Run a coroutine in the current task, and call `suspended` each time it waits."""
    error: BaseException | None = None
    while True:
        try:
            waiting = coroutine.send(None) if error is None else coroutine.throw(error)
        except StopIteration as stop:
            return stop.value
        suspended()
        error = None
        try:
            yield waiting
        except BaseException as raised:  # noqa: BLE001  (handed on into the coroutine)
            error = raised


DESC = CacheDesc(4, [2, 700_000], DataType.DT_UINT8)
"""Two batches of a megabyte each, and one more."""


class Bench:
    """A destination of the test's own memory, and pulls into its batch entry 1 over a link without a network."""

    def __init__(self, **link: Any) -> None:
        self.link = LoopLink(**link)
        self.memory = np.zeros((4, 2, 700_000), np.uint8)
        self.registry = Registry(HostMemory())
        addresses = [tensor.ctypes.data for tensor in self.memory]
        regions = self.registry.backend.adopt(addresses, tensor_nbytes=DESC.size, placement=Placement.HOST)
        self.entry: Entry = self.registry.add(DESC, regions, blocks=False)
        self.reports: list[Report] = []
        self.until: Until | None = None
        """What the last landing was made with."""
        self.landed_bytes: Callable[[int], None] | None = None
        """Hears how many bytes of a pull are final."""
        self.size = 1024 if link.get("inline_limit") == INLINE else 700_000

    def pull(self, timeout_ms: float = LONG_MS) -> Pull:
        report = Report("pull_cache", f"pull-{len(self.reports)}")
        self.reports.append(report)
        wanted = Wanted(
            request=self._request,
            table=b"table",
            at_most=4 * self.size,
            land=self._land,
            reading=lambda grant: partial(plan.run_segments, range(4), start=grant.start, size=grant.per_tensor),
            span=self._span,
            known=lambda _: None,
            open_cache=None,
            entry=self.entry,
            deadline=Deadline.after_ms(timeout_ms),
            report=report,
        )
        return Pull(self.link, wanted)  # type: ignore[arg-type]  # what a pull uses of a link is there

    def _request(self, request_id: int, remaining_ms: int) -> frames.Request:
        return frames.Request(
            request_id=request_id, pull_id=self.reports[-1].pull_id, traceparent="", remaining_ms=remaining_ms,
            key="request", identity=1, model_id=0, entry=0, first_tensor=-1, tensors=4, size=self.size, offset=0,
            offset_pull=False, blocks=0, remote_access=False, inline_limit=self.link.inline_limit,
        )  # fmt: skip

    def _span(self, grant: frames.Grant, until: Until) -> Span:
        return Span(self.entry.regions, self._rows, self.entry.direct, self.landed_bytes, until=until)

    def _land(self, grant: frames.Grant, span: Span) -> tuple[Batches, int]:
        if grant.per_tensor != self.size:
            raise LLMException("does not fit", status_code=LLMStatusCode.LLM_FAILED)
        self.until, backend = span.until, self.registry.backend
        landing = backend.landing(span.regions, span.rows(), until=span.until, landed=span.landed)
        return landing, 4 * self.size

    def _rows(self) -> plan.Segments:
        return plan.entry_segments(range(4), entry=1, entry_nbytes=700_000, offset=0, size=self.size)

    def landed(self) -> bool:
        return bool((self.memory[:, 1, : self.size] == self.link.byte).all()) and not self.memory[:, 0].any()

    def quiet(self) -> None:
        """Nothing of a pull is left: its pin, its place on the link."""
        assert not self.entry.busy, repr(self.entry)
        assert not self.link.fifo.busy, repr(self.link.fifo)

    async def canary(self) -> None:
        """Refill the destination and let everything that may go on do so: nobody writes to it any more."""
        self.memory[:] = 0xC3
        await asyncio.sleep(0.01)
        assert (self.memory == 0xC3).all()

    async def next_one(self) -> None:
        """The next pull on the link is right."""
        self.memory[:], self.link.byte = 0, self.link.byte ^ 0xFF
        self.link.silent = self.link.stuck = self.link.stubborn = self.link.unreachable = False
        self.link.refusal, self.link.payload, self.link.granted, self.link.valid = None, None, {}, True
        await self.pull().run()
        assert self.landed()
