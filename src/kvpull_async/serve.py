"""Answers a peer's requests from the registry, and sees to its offers. It must not know links, queues of pulls or
concrete transports.

Every request is checked here against this node's own descriptor, whatever the peer claims. Requests of one lane are
served one after another; the source's memory stays pinned until its bytes have left or the lease has ended.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from kvpull_async import offers, sums
from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers
from kvpull_async.gathering import gathered
from kvpull_async.granting import Granted
from kvpull_async.lane import Lane
from kvpull_async.leasing import Leasing
from kvpull_async.memory.base import FEW_BYTES, FEW_ROWS, FEW_TENSORS, Span, Until, no_memory
from kvpull_async.observe import Counters, Log
from kvpull_async.offers import Offer, PeerRecord
from kvpull_async.protocol import frames
from kvpull_async.protocol.frames import Message
from kvpull_async.receiving import Receiving, log_of
from kvpull_async.registry import Pin, Registry
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import DataPath
from kvpull_async.watching import Watching

__all__ = ["Serving"]

_AT_ONCE: Final = 8
"""Most requests answered on the spot of those that came together; for the others, others have their turns first."""


_Asked = tuple["frames.Request | frames.Offer", bytes, Deadline]


class Serving:
    """The serving side of one lane; `peer` is the cluster that asks."""

    def __init__(
        self,
        lane: Lane,
        path: DataPath,
        *,
        peer: int,
        registry: Registry,
        record: PeerRecord,
        workers: Workers,
        log: Log,
        counters: Counters,
        inline_limit: int,
        lease_margin: float,
        settle_timeout: float,
        pushes_by_key: bool,
        peer_left: Callable[[bool], None],
    ) -> None:
        self._lane = lane
        self._path = path
        self._peer = peer
        self._registry = registry
        self._record = record
        self._workers = workers
        self._log = log.bind(peer=lane.channel.peer)
        self._counters = counters
        self._inline_limit = inline_limit
        self._lease_margin = lease_margin
        self._peer_left = peer_left
        self._receiving = Receiving(
            lane,
            path,
            peer=peer,
            registry=registry,
            workers=workers,
            log=self._log,
            counters=counters,
            by_key=pushes_by_key,
            settle_timeout=settle_timeout,
        )
        self._watching = Watching(lane, registry, peer)
        self._leasing = Leasing(lane, registry, peer, log=self._log, counters=counters)
        self._waiting: deque[_Asked] = deque()
        self._task: asyncio.Task[None] | None = None
        self._current: frames.Request | frames.Offer | None = None
        self._released = False
        self._granted = Granted(
            lane,
            path,
            registry=registry,
            workers=workers,
            log_of=lambda request: log_of(self._log, request, b""),
            counters=counters,
        )
        self._streamed = 0  # the last offer whose bytes are sent
        self._turn = self._in_turn = 0

    def receive(self, message: Message, tail: bytes) -> None:
        """A message of the peer's requesting side. Never waits."""
        if isinstance(message, frames.Request):
            if self._task is not None or self._waiting or not self._answered(message, tail):
                self._queue(message, tail)
        elif isinstance(message, frames.Offer):
            if not message.inline and message.ticket is None:
                self._streamed = message.request_id
            if self._task is not None or self._waiting or not self._taken(message, tail):
                self._queue(message, tail)
        elif isinstance(message, frames.Watch):
            self._watching.begin(message)
        elif isinstance(message, frames.Lease):
            self._leasing.receive(message)
        elif isinstance(message, frames.Cancel):
            self._cancel(message.request_id)
        elif isinstance(message, frames.Done):
            self._done(message)
        else:
            self._hear(message)

    def _hear(self, message: Message) -> None:
        """What is about no request: whether a grant holds, what was read, that the peer goes."""
        if isinstance(message, frames.Check):
            self._lane.post(frames.Checked(message.grant_id, message.grant_id in self._granted))
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
            self._peer_left(message.returns)

    def abort(self) -> None:
        """The lane is over: stop everything and give the pins back as it settles."""
        self._waiting.clear()
        self._watching.abort()
        if self._task is not None:
            self._task.cancel()
        self._granted.abort()

    # -- one after another ------------------------------------------------------------------------------------------

    def _queue(self, asked: frames.Request | frames.Offer, tail: bytes) -> None:
        self._waiting.append((asked, tail, Deadline.after_ms(asked.remaining_ms)))
        self._next()

    def _next(self) -> None:
        if self._task is None and self._waiting:
            asked, tail, deadline = self._waiting.popleft()
            self._current, self._released = asked, False
            serve = self._serve if isinstance(asked, frames.Request) else self._receive
            work = serve(asked, tail, deadline)  # type: ignore[arg-type]  # each gets its own kind
            self._task = asyncio.get_running_loop().create_task(work, name="kvpull-serve")
            self._task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        current, self._task, self._current = self._current, None, None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)
        elif task.cancelled() and isinstance(current, frames.Offer):
            self._never_took(current)  # it may not even have begun; a second word on it is dropped there
        self._next()

    async def _receive(self, offer: frames.Offer, tail: bytes, deadline: Deadline) -> None:
        try:
            await self._receiving.fulfil(offer, tail, deadline)
        finally:
            self._lane.session.end_request(offer.request_id)

    def _never_took(self, offer: frames.Offer) -> None:
        reason = "the offer was withdrawn before it was taken"
        self._lane.post(frames.Result(offer.request_id, int(LLMStatusCode.LLM_LINK_FAILED), reason, unsafe=False))

    def _cancel(self, request_id: int) -> None:
        """The peer has given up: stop, and break the payload connection that may hold bytes of that request."""
        for asked, _, _ in self._waiting:
            if asked.request_id == request_id and isinstance(asked, frames.Offer):
                self._never_took(asked)
        self._waiting = deque(item for item in self._waiting if item[0].request_id != request_id)
        self._watching.end(request_id)
        self._lane.session.end_request(request_id)
        if self._current is not None and self._current.request_id == request_id and self._task is not None:
            self._task.cancel()
        self._granted.cancel(request_id)
        if request_id == self._streamed:
            self._path.give_up()

    def _answered(self, request: frames.Request, tail: bytes) -> bool:
        """Answer on the spot, if that can be done without waiting: a few bytes of memory that the loop may read."""
        limit, backend = min(self._inline_limit, request.inline_limit, FEW_BYTES), self._registry.backend
        asked = request.tensors * request.size * max(request.blocks, 1)
        if tail or asked > limit or request.tensors > FEW_TENSORS:
            return False
        if not self._may_at_once() or self._opens(request):
            return False
        began = time.monotonic()
        try:
            growing = sums.asked(request.verify, where="the source") if request.verify else None
            offer = offers.find(self._registry, request, tail, peer=self._peer)
            if not offer.entry.direct:
                return False
            pieces = backend.slices(offer.entry.regions, offer.tensors, start=offer.start, nbytes=offer.per_tensor)
            if growing is not None:  # before the grant: then the puller need not wait for it
                self._lane.post(frames.Digest(request.request_id, sums.sum_of(growing, [pieces])))
            self._lane.post(self._grant(request, offer, inline=True), *pieces)
        except LLMException as error:
            self._refuse(request, error, log_of(self._log, request, b""))
        except Exception as error:  # noqa: BLE001  (ends the lane, with the reason in the log)
            self._failed(error)
        else:
            self._count(offer)
            if self._log.debugging:
                log = log_of(self._log, request, b"")
                log.debug("serve.started", cache_id=offer.entry.cache_id, bytes=offer.nbytes)
                self._tell_finished(log, offer, inline=True, began=began)
        self._lane.session.end_request(request.request_id)
        return True

    def _opens(self, request: frames.Request) -> bool:
        """Whether the next ones like it need not even be asked for: not where each needs a sum from here."""
        return request.remote_access and self._path.opens and not request.verify

    def _may_at_once(self) -> bool:
        """Whether one more may have its turn on the spot."""
        if not self._lane.channel.ready:
            return False
        self._turn, self._in_turn = self._lane.turns, self._in_turn + 1 if self._turn == self._lane.turns else 1
        return self._in_turn <= _AT_ONCE

    def _taken(self, offer: frames.Offer, tail: bytes) -> bool:
        """Take what an offer brings along on the spot, if that needs no wait."""
        try:
            if not offer.inline or not self._may_at_once() or not self._receiving.take(offer, tail):
                return False
        except Exception as error:  # noqa: BLE001  (ends the lane, with the reason in the log)
            self._failed(error)
        self._lane.session.end_request(offer.request_id)
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
        log = log_of(self._log, request, b"")
        pin: Pin | None = None
        try:
            offer = offers.find(self._registry, request, tail, peer=self._peer)
            pin = offer.entry.pin(self._cut)  # before anything waits: the memory may be the caller's to free
            log.debug("serve.started", cache_id=offer.entry.cache_id, bytes=offer.nbytes)
            lease_ends = deadline.later(self._lease_margin)
            async with lease_ends.scope():
                inline = await self._answer(request, offer, lease_ends)
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
        if isinstance(error, OSError):
            error = no_memory(error, "source", reading=True) or error
        status = getattr(error, "status_code", LLMStatusCode.LLM_LINK_FAILED)
        reason = str(error) or "the time for this request was over"
        if request.waits and status == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
            self._counters.add("serves_awaited")
            log.debug("serve.awaited", reason=reason)
        else:
            self._counters.add("serves_refused")
            log.info("serve.refused", status=LLMStatusCode(status).name, reason=reason)
        if not self._lane.lost.done():
            refusal = frames.Refuse(request.request_id, int(status), reason[: frames.REASON_LIMIT])
            self._lane.post(refusal)

    async def _answer(self, request: frames.Request, offer: Offer, lease_ends: Deadline) -> bool:
        """Grant and deliver; True when the bytes rode on the grant."""
        small = offer.nbytes <= min(self._inline_limit, request.inline_limit)
        opens, growing = self._opens(request), sums.asked(request.verify, where="the source")
        grant, ticket = self._grant(request, offer, inline=small), None
        if not small:
            await self._path.ready(lease_ends)
        if opens or not small:
            span = Span(offer.entry.regions, offer.plan, offer.entry.direct)
            ticket = self._path.describe(grant.grant_id, span)
        if small and ticket is None:
            here, until = offer.entry.direct and offer.rows <= FEW_ROWS, Until(lease_ends)
            lending = self._granted.lend(offer, until)
            payload = await gathered(lending, offer.entry, self._workers, here=here, until=until)
            await self._lane.send(grant, payload)
            if growing is not None:
                await self._granted.sum(request, offer, growing, lease_ends)
            return True
        if ticket is not None:
            open_ = offer.entry.entry_nbytes if opens and not offer.entry.blocks else 0
            grant = msgspec.structs.replace(grant, inline=False, ticket=ticket, wants_done=True, entry_nbytes=open_)
        await self._granted.deliver(request, grant, offer, lease_ends, growing)
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

    def _done(self, done: frames.Done) -> None:
        issued = self._record.issued.pop(done.grant_id, None)
        if issued is not None and self._registry.consume(issued.generation, issued.tensors):
            self._counters.add("keys_consumed")
            self._log.debug("serve.key_consumed", pull_id=done.pull_id)
        self._granted.done(done.grant_id)
        self._lane.post(frames.DoneAck(done.grant_id))

    def __repr__(self) -> str:
        return f"<Serving {self._lane.channel.peer} waiting={len(self._waiting)} granted={len(self._granted)}>"
