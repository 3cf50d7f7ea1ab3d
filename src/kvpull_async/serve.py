"""Answers a peer's requests from the registry. It must not know links, queues of pulls or concrete transports.

Every request is checked here against this node's own descriptor, whatever the peer claims. Requests of one lane are
served one after another; the source's memory stays pinned until its bytes have left or the lease has ended.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from kvpull_async import offers
from kvpull_async._deadline import Deadline, absorb
from kvpull_async._workers import Workers
from kvpull_async.lane import Lane
from kvpull_async.memory.base import FEW_ROWS, FEW_TENSORS, Batches, Span, planned
from kvpull_async.observe import Counters, Log
from kvpull_async.offers import Issued, Offer
from kvpull_async.protocol import frames
from kvpull_async.protocol.frames import Message
from kvpull_async.registry import Pin, Registry
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import DataPath, Transfer, moved

__all__ = ["PeerRecord", "Serving"]

_ISSUED_LIMIT: Final = 4096
_REASON_LIMIT: Final = 1000
_SMALL: Final = 128 * 1024
"""Most bytes of an answer that is made on the spot."""
_AT_ONCE: Final = 8
"""Most requests answered on the spot of those that came together; for the others, others have their turns first."""


@dataclass
class PeerRecord:
    """What one incarnation of a peer holds. It outlives connections, since a DONE may come on a later one."""

    issued: OrderedDict[bytes, Issued] = field(default_factory=OrderedDict)

    def issue(self, grant_id: bytes, issued: Issued) -> None:
        self.issued[grant_id] = issued
        if len(self.issued) > _ISSUED_LIMIT:
            self.issued.popitem(last=False)


@dataclass
class _Lease:
    """A grant whose memory is still pinned."""

    request_id: int
    grant_id: bytes
    pin: Pin
    transfer: Transfer
    timer: asyncio.TimerHandle


class Serving:
    """The serving side of one lane."""

    def __init__(
        self,
        lane: Lane,
        path: DataPath,
        *,
        registry: Registry,
        record: PeerRecord,
        workers: Workers,
        log: Log,
        counters: Counters,
        inline_limit: int,
        lease_margin: float,
        peer_left: Callable[[], None],
    ) -> None:
        self._lane = lane
        self._path = path
        self._registry = registry
        self._record = record
        self._workers = workers
        self._log = log.bind(peer=lane.channel.peer)
        self._counters = counters
        self._inline_limit = inline_limit
        self._lease_margin = lease_margin
        self._peer_left = peer_left
        self._waiting: deque[tuple[frames.Request, bytes, Deadline]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._current: int | None = None
        self._released = False
        self._leases: dict[bytes, _Lease] = {}
        self._last: tuple[int, Transfer] | None = None
        self._turn = self._in_turn = 0

    def receive(self, message: Message, tail: bytes) -> None:
        """A message of the peer's requesting side. Never waits."""
        if isinstance(message, frames.Request):
            if self._task is not None or self._waiting or not self._answered(message, tail):
                self._waiting.append((message, tail, Deadline.after_ms(message.remaining_ms)))
                self._next()
        elif isinstance(message, frames.Cancel):
            self._cancel(message.request_id)
        elif isinstance(message, frames.Done):
            self._done(message)
        elif isinstance(message, frames.Check):
            self._lane.post(frames.Checked(message.grant_id, message.grant_id in self._leases))
        elif isinstance(message, frames.Read):
            self._counters.add("reads_reported", message.pulls)
            self._counters.add("bytes_served", message.nbytes)
            self._log.debug(
                "serve.read",
                cache_id=message.cache_id,
                pulls=message.pulls,
                bytes=message.nbytes,
                pull_ids=" ".join(message.pull_ids),
            )
        elif isinstance(message, frames.Bye):
            self._lane.post(frames.ByeAck())
            self._peer_left()

    def abort(self) -> None:
        """The lane is over: stop everything and give the pins back as it settles."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
        for grant_id in list(self._leases):
            self._withdraw(grant_id)

    # -- one after another ------------------------------------------------------------------------------------------

    def _next(self) -> None:
        if self._task is None and self._waiting:
            request, tail, deadline = self._waiting.popleft()
            self._current, self._released = request.request_id, False
            self._task = asyncio.get_running_loop().create_task(
                self._serve(request, tail, deadline), name="kvpull-serve"
            )
            self._task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._task = self._current = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)
        self._next()

    def _cancel(self, request_id: int) -> None:
        """The puller has given up: stop, and break the payload connection that may hold bytes of that request."""
        self._waiting = deque(item for item in self._waiting if item[0].request_id != request_id)
        self._lane.session.end_request(request_id)
        if self._current == request_id and self._task is not None:
            self._task.cancel()
        if self._last is not None and self._last[0] == request_id:
            self._last[1].abort()
        for lease in [lease for lease in self._leases.values() if lease.request_id == request_id]:
            self._withdraw(lease.grant_id)

    def _answered(self, request: frames.Request, tail: bytes) -> bool:
        """Answer on the spot, if that can be done without waiting: a few bytes of memory that the loop may read."""
        limit, backend = min(self._inline_limit, request.inline_limit, _SMALL), self._registry.backend
        asked = request.tensors * request.size * max(request.blocks, 1)
        if tail or asked > limit or request.tensors > FEW_TENSORS or not (backend.direct and self._lane.channel.ready):
            return False
        self._turn, self._in_turn = self._lane.turns, self._in_turn + 1 if self._turn == self._lane.turns else 1
        if self._in_turn > _AT_ONCE:
            return False
        if request.remote_access and self._path.opens:
            return False
        began = time.monotonic()
        try:
            offer = offers.find(self._registry, request, tail)
            pieces = backend.slices(offer.entry.regions, offer.tensors, start=offer.start, nbytes=offer.per_tensor)
            self._lane.post(self._grant(request, offer, inline=True), *pieces)
        except LLMException as error:
            self._refuse(request, error, self._log_of(request))
        except Exception as error:  # noqa: BLE001  (ends the lane, with the reason in the log)
            self._failed(error)
        else:
            self._count(offer)
            if self._log.debugging:
                log = self._log_of(request)
                log.debug("serve.started", cache_id=offer.entry.cache_id, bytes=offer.nbytes)
                self._tell_finished(log, offer, inline=True, began=began)
        self._lane.session.end_request(request.request_id)
        return True

    def _count(self, offer: Offer) -> None:
        self._counters.add("serves")
        self._counters.add("bytes_served", offer.nbytes)

    @staticmethod
    def _tell_finished(log: Log, offer: Offer, *, inline: bool, began: float) -> None:
        took = round((time.monotonic() - began) * 1000, 3)
        log.debug("serve.finished", bytes=offer.nbytes, inline=inline, elapsed_ms=took)

    def _failed(self, error: BaseException) -> None:
        self._log.error("serve.bug", reason=repr(error))
        self._lane.abort(f"internal error while serving: {error!r}")

    async def _serve(self, request: frames.Request, tail: bytes, deadline: Deadline) -> None:
        began = time.monotonic()
        log = self._log_of(request)
        pin: Pin | None = None
        try:
            offer = offers.find(self._registry, request, tail)
            pin = offer.entry.pin(self._cut)  # before anything waits: the memory may be the caller's to free
            log.debug("serve.started", cache_id=offer.entry.cache_id, bytes=offer.nbytes)
            lease_ends = deadline.later(self._lease_margin)
            async with lease_ends.scope():
                inline = await self._answer(request, offer, lease_ends, blocks=len(tail) // 8)
        except (LLMException, OSError, asyncio.TimeoutError) as error:
            self._refuse(request, error, log)
        except asyncio.CancelledError:
            if self._released:
                gone = LLMException("the cache was released", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
                self._refuse(request, gone, log)
            else:
                log.debug("serve.cancelled", reason="the puller gave up, or the link ended")
            raise
        else:
            self._count(offer)
            self._tell_finished(log, offer, inline=inline, began=began)
        finally:
            if pin is not None:
                pin.release()
            self._lane.session.end_request(request.request_id)

    def _cut(self) -> None:
        """The cache of the running request is being taken away."""
        self._released = True
        if self._task is not None:
            self._task.cancel()

    def _refuse(self, request: frames.Request, error: Exception, log: Log) -> None:
        status = getattr(error, "status_code", LLMStatusCode.LLM_LINK_FAILED)
        reason = str(error) or "the time for this request was over"
        self._counters.add("serves_refused")
        log.info("serve.refused", status=LLMStatusCode(status).name, reason=reason)
        if not self._lane.lost.done():
            refusal = frames.Refuse(request.request_id, int(status), reason[:_REASON_LIMIT])
            self._lane.post(refusal)

    async def _answer(self, request: frames.Request, offer: Offer, lease_ends: Deadline, *, blocks: int) -> bool:
        """Grant and deliver; True when the bytes rode on the grant."""
        small = offer.nbytes <= min(self._inline_limit, request.inline_limit)
        opens = request.remote_access and self._path.opens  # then the next ones need not even be asked for
        grant, ticket = self._grant(request, offer, inline=small), None
        if not small:
            await self._path.ready(lease_ends)
        if opens or not small:
            ticket = self._path.describe(grant.grant_id, Span(offer.entry.regions, offer.plan))
        if small and ticket is None:
            await self._lane.send(grant, await self._gather(offer, rows=blocks * len(offer.tensors)))
            return True
        if ticket is not None:
            open_ = offer.entry.entry_nbytes if opens and not offer.entry.blocks else 0
            grant = msgspec.structs.replace(grant, inline=False, ticket=ticket, wants_done=True, entry_nbytes=open_)
        await self._deliver(request, grant, offer, lease_ends)
        return False

    def _grant(self, request: frames.Request, offer: Offer, *, inline: bool) -> frames.Grant:
        grant_id, consumes = secrets.token_bytes(16), offers.consumes(request, offer)
        if consumes is not None:
            self._record.issue(grant_id, consumes)
        return frames.Grant(
            request_id=request.request_id,
            grant_id=grant_id,
            tensors=len(offer.tensors),
            per_tensor=offer.per_tensor,
            inline=inline,
            wants_done=consumes is not None,
            start=offer.start,
        )

    async def _gather(self, offer: Offer, *, rows: int) -> bytes:
        lending = self._lend(offer)
        if self._registry.backend.direct and rows <= FEW_ROWS:
            return _join(lending)
        pin = offer.entry.pin(lambda: None)  # as long as the thread reads, also when nobody waits for it any more
        reading = asyncio.get_running_loop().run_in_executor(self._workers, _join, lending)
        reading.add_done_callback(lambda _: pin.release())
        return await asyncio.shield(reading)

    async def _deliver(self, request: frames.Request, grant: frames.Grant, offer: Offer, lease_ends: Deadline) -> None:
        """By other means than the grant itself: the source sends, or with a ticket the puller reads."""
        lease = self._lease(request, grant, offer, lease_ends)
        try:
            await self._lane.send(grant)
            await moved(lease.transfer)
        except BaseException:
            lease.transfer.abort()
            await absorb([lease.transfer.settled], Deadline.after_ms(1000))
            self._end_lease(lease)
            raise
        if grant.ticket is None:
            self._end_lease(lease)

    def _lend(self, offer: Offer) -> Batches:
        backend, regions = self._registry.backend, offer.entry.regions
        return planned(offer.plan, lambda segments: backend.lending(regions, segments))

    def _lease(self, request: frames.Request, grant: frames.Grant, offer: Offer, ends: Deadline) -> _Lease:
        transfer = self._path.serve(grant.grant_id, self._lend(offer), offer.nbytes)
        self._last = (request.request_id, transfer)
        pin = offer.entry.pin(partial(self._withdraw, grant.grant_id))
        loop, log = asyncio.get_running_loop(), self._log_of(request)
        timer = loop.call_later(ends.remaining, self._expire, grant.grant_id, log)
        lease = self._leases[grant.grant_id] = _Lease(request.request_id, grant.grant_id, pin, transfer, timer)
        return lease

    def _withdraw(self, grant_id: bytes) -> None:
        """The cache is being taken away: it may go once this side reads it no more, whatever the puller does."""
        lease = self._leases.get(grant_id)
        if lease is not None:
            lease.transfer.abort()
            self._end_lease(lease)

    def _expire(self, grant_id: bytes, log: Log) -> None:
        lease = self._leases.get(grant_id)
        if lease is not None:
            self._counters.add("leases_expired")
            log.warning("serve.lease_expired")
            self._withdraw(grant_id)

    def _end_lease(self, lease: _Lease) -> None:
        """The memory may go once nothing reads it any more."""
        if self._leases.pop(lease.grant_id, None) is None:
            return
        lease.timer.cancel()
        self._path.release(lease.grant_id)
        lease.transfer.settled.add_done_callback(lambda _: lease.pin.release())

    def _done(self, done: frames.Done) -> None:
        issued = self._record.issued.pop(done.grant_id, None)
        if issued is not None and self._registry.consume(issued.generation, issued.tensors):
            self._counters.add("keys_consumed")
            self._log.debug("serve.key_consumed", pull_id=done.pull_id)
        lease = self._leases.get(done.grant_id)
        if lease is not None:
            self._end_lease(lease)
        self._lane.post(frames.DoneAck(done.grant_id))

    def _log_of(self, request: frames.Request) -> Log:
        log = self._log.bind(pull_id=request.pull_id, request_id=request.request_id, key=_name(request))
        return log.bind(traceparent=request.traceparent) if request.traceparent else log

    def __repr__(self) -> str:
        return f"<Serving {self._lane.channel.peer} waiting={len(self._waiting)} leases={len(self._leases)}>"


def _join(lending: Batches) -> bytes:
    return b"".join(view for batch in lending for view in batch)


def _name(request: frames.Request) -> str:
    return f"{request.key}:{request.identity}:{request.model_id}" + (f":{request.entry}" if request.entry else "")
