"""Takes what a peer pushes: the receiver fetches the bytes of an offer by itself, so that it alone writes its memory.

It must not know links, queues or concrete transports. An offer ends with one RESULT, once nothing writes any more.
"""

from __future__ import annotations

import asyncio
import time
from functools import cached_property
from typing import Final

from kvpull_async import aims, sums
from kvpull_async._deadline import Deadline, absorb
from kvpull_async._workers import Job, Workers
from kvpull_async.aims import Place
from kvpull_async.gathering import fill
from kvpull_async.lane import Lane
from kvpull_async.memory.base import (
    FEW_BYTES,
    FEW_ROWS,
    FEW_TENSORS,
    Batches,
    Span,
    Until,
    copy_batches,
    lend_bytes,
    no_memory,
    planned,
)
from kvpull_async.observe import Counters, Log, key_text
from kvpull_async.protocol import frames
from kvpull_async.registry import Pin, Registry
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.summing import Summed
from kvpull_async.sums import Sum
from kvpull_async.transport.base import DataPath, Transfer, break_off, moved

__all__ = ["Receiving", "log_of"]

_WORD: Final = 8


class Receiving:
    """The receiving side of one lane. `peer` is the cluster that sends; `by_key`: whether it may name caches by key."""

    def __init__(
        self,
        lane: Lane,
        path: DataPath,
        *,
        peer: int,
        registry: Registry,
        workers: Workers,
        log: Log,
        counters: Counters,
        by_key: bool,
        settle_timeout: float,
    ) -> None:
        self._lane = lane
        self._path = path
        self._registry = registry
        self._workers = workers
        self._log = log
        self._counters = counters
        self._by_key = by_key
        self._peer = peer
        self._settle_timeout = settle_timeout

    async def fulfil(self, offer: frames.Offer, tail: bytes, deadline: Deadline) -> None:
        """One offer to its RESULT. Cancelled when the sender or the link gives up."""
        await _Receipt(self, offer, tail, deadline).run()

    def take(self, offer: frames.Offer, tail: bytes) -> bool:
        """The same on the spot, if nothing has to be waited for: few bytes, which came with the offer, into memory that
        the loop may write. False when it has to be fulfilled.
        """
        nbytes, rows = offer.tensors * offer.per_tensor, offer.tensors * max(1, offer.blocks)
        if not offer.inline or nbytes > FEW_BYTES or rows > FEW_ROWS:
            return False
        deadline = Deadline.after_ms(offer.remaining_ms)
        return not deadline.expired and _Receipt(self, offer, tail, deadline).taken()

    def put(self, place: Place) -> None:
        """Few bytes that came with the offer, here and now: into memory that the loop may write."""
        backend, count = self._registry.backend, len(place.regions)
        if place.start is not None and count <= FEW_TENSORS:
            nbytes = place.nbytes // count
            fill(backend.slices(place.regions, range(count), start=place.start, nbytes=nbytes), place.payload)
        else:
            self.copy(place, None)

    def copy(self, place: Place, until: Until | None) -> Transfer | None:
        """Bytes that came with the offer; None when they are in their place already."""
        steps = copy_batches(lend_bytes(place.payload), self.land(place, until))
        if place.nbytes > FEW_BYTES or place.most_rows > FEW_ROWS or not _direct(place):
            return Job(self._workers.fit(direct=_direct(place)), steps)
        for _ in steps:
            pass
        return None

    async def fetch(self, offer: frames.Offer, place: Place, until: Until) -> Transfer:
        """Begin to take bytes that the receiver reads, or that are sent on the data path."""
        path = self._path
        if offer.ticket is None and not offer.begun:
            path.give_up()  # the sender has no connection, whatever this side believes
            await path.ready(until.deadline)
            self._lane.post(frames.Accept(offer.request_id))
        span = Span(place.regions, place.rows, _direct(place), None, place.most_rows, until=until)
        path.expect(offer.grant_id, offer.ticket, place.source, span)
        return path.fetch(offer.grant_id, self.land(place, until), place.nbytes)

    def summed(self, place: Place, growing: Sum, until: Until) -> Summed:
        """What has landed is summed."""
        return Summed(
            growing, self.lend(place, until), place.entries, self._workers,
            nbytes=place.nbytes, rows=place.most_rows, direct=_direct(place), until=until,
        )  # fmt: skip

    def land(self, place: Place, until: Until | None) -> Batches:
        """Where the bytes go."""
        backend = self._registry.backend
        return planned(place.rows, lambda rows: backend.landing(place.regions, rows, until=until))

    def lend(self, place: Place, until: Until | None) -> Batches:
        """What has landed."""
        backend = self._registry.backend
        return planned(place.rows, lambda rows: backend.lending(place.regions, rows, until=until))


class _Receipt:
    """One offer on its way."""

    def __init__(self, receiving: Receiving, offer: frames.Offer, tail: bytes, deadline: Deadline) -> None:
        self._receiving = receiving
        self._offer = offer
        self._tail = tail
        self._deadline = deadline
        self._began = time.monotonic()
        self._first = tail[:_WORD]
        self._task: asyncio.Task[object] | None = None
        self._place: Place | None = None
        self._pins: list[Pin] = []
        self._transfer: Transfer | None = None
        self._until: Until | None = None
        self._released = False
        self._sum: Sum | None = None
        self._digest = b""
        self._summed: Summed | None = None

    @cached_property
    def _log(self) -> Log:
        return log_of(self._receiving._log, self._offer, self._first)

    def taken(self) -> bool:
        """False when it would have to wait, and nothing has happened then."""
        try:
            self._place = place = self._find()
            if any(entry.quarantined or not entry.direct for entry in place.entries):
                return False
            self._tell_started(place)
            self._receiving.put(place)
            if self._sum is not None:
                self._digest = sums.sum_of(self._sum, self._receiving.lend(place, None))
        except (LLMException, OSError, ValueError) as error:
            self._refuse(error, unsafe=False)
        else:
            self._succeed()
        return True

    async def run(self) -> None:
        self._task = asyncio.current_task()
        try:
            async with self._deadline.scope():
                await self._take()
        except (LLMException, OSError, ValueError, asyncio.TimeoutError) as error:
            self._refuse(error, unsafe=await self._settle())
        except asyncio.CancelledError:
            unsafe = await self._settle()
            if self._released:
                gone = LLMException("the cache was released", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
                self._refuse(gone, unsafe=unsafe)
            else:
                self._refuse(ConnectionAbortedError("the sender gave up, or the link ended"), unsafe=unsafe)
            raise
        else:
            self._succeed()
        finally:
            for pin in self._pins:
                pin.release()

    async def _take(self) -> None:
        receiving, offer = self._receiving, self._offer
        self._place = place = self._find()
        self._until = until = Until(self._deadline)
        self._tail = b""
        if self._deadline.expired:  # in the queue: what needs no wait would not notice
            raise asyncio.TimeoutError
        while (unsafe := next((entry for entry in place.entries if entry.quarantined), None)) is not None:
            if not await unsafe.idle(self._deadline, writers_only=True):
                raise asyncio.TimeoutError
        for entry in place.entries:
            if not entry.alive:
                raise LLMException("the cache was released", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
            self._pins.append(entry.pin(self._cut))
        self._tell_started(place)
        if offer.inline:
            self._transfer = receiving.copy(place, until)
        else:
            self._transfer = await receiving.fetch(offer, place, until)
        if self._transfer is not None:
            await moved(self._transfer)
        if self._sum is not None:
            await self._verify(place, self._sum, until)

    async def _verify(self, place: Place, growing: Sum, until: Until) -> None:
        """What has landed is summed for the sender, which compares."""
        if self._transfer is not None:
            await asyncio.wait([self._transfer.settled])
        self._summed = self._receiving.summed(place, growing, until)
        self._digest = await self._summed.digest()

    def _find(self) -> Place:
        receiving, tail = self._receiving, self._tail
        self._sum = sums.asked(self._offer.verify, where="the receiver")
        by_key, peer = receiving._by_key, receiving._peer
        return aims.find(receiving._registry, self._offer, tail, peer=peer, by_key=by_key)

    def _tell_started(self, place: Place) -> None:
        if self._receiving._log.debugging:
            caches = " ".join(str(entry.cache_id) for entry in place.entries)
            self._log.debug("receive.started", cache_id=caches, bytes=place.nbytes)

    def _cut(self) -> None:
        """The cache is being taken away."""
        self._released = True
        if self._task is not None:
            self._task.cancel()

    async def _settle(self) -> bool:
        """Stop what runs and wait until it has; True when the destination had to be quarantined instead."""
        transfer, offer = self._transfer, self._offer
        break_off(transfer, self._until)
        if self._summed is not None:
            self._summed.abort()  # it keeps the memory until it has settled, and writes nothing
        if transfer is None:
            if not offer.inline and offer.ticket is None:
                self._receiving._path.give_up()  # bytes may be on their way
            return False
        if await absorb([transfer.settled], Deadline.after_ms(self._receiving._settle_timeout * 1000)):
            return False
        assert self._place is not None
        for entry in self._place.entries:
            entry.quarantine(transfer.settled)
            self._receiving._counters.add("regions_quarantined")
            self._log.warning("region.quarantined", cache_id=entry.cache_id)
        return True

    def _succeed(self) -> None:
        assert self._place is not None
        counters = self._receiving._counters
        counters.add("receives")
        counters.add("bytes_received", self._place.nbytes)
        if self._receiving._log.debugging:
            took = round((time.monotonic() - self._began) * 1000, 3)
            self._log.debug("receive.finished", bytes=self._place.nbytes, inline=self._offer.inline, elapsed_ms=took)
        self._answer(LLMStatusCode.LLM_SUCCESS, "", unsafe=False)

    def _refuse(self, error: Exception, *, unsafe: bool) -> None:
        status, reason = _explained(error)
        self._receiving._counters.add("receives_refused")
        self._log.info("receive.refused", status=status.name, reason=reason)
        self._answer(status, reason, unsafe=unsafe)

    def _answer(self, status: LLMStatusCode, reason: str, *, unsafe: bool) -> None:
        result = frames.Result(self._offer.request_id, int(status), reason[: frames.REASON_LIMIT], unsafe, self._digest)
        self._receiving._lane.post(result)


def _direct(place: Place) -> bool:
    return all(entry.direct for entry in place.entries)


def _explained(error: Exception) -> tuple[LLMStatusCode, str]:
    if isinstance(error, LLMException):
        return LLMStatusCode(error.status_code), str(error)
    if isinstance(error, asyncio.TimeoutError):
        return LLMStatusCode.LLM_TIMEOUT, "the time for this push was over"
    if isinstance(error, OSError):
        unreachable = no_memory(error, "destination", reading=False)
        if unreachable is not None:
            return LLMStatusCode.LLM_PARAM_INVALID, str(unreachable)
    if isinstance(error, ValueError):  # the sender's rows leave its memory, or are not as many bytes
        return LLMStatusCode.LLM_PARAM_INVALID, str(error)
    return LLMStatusCode.LLM_LINK_FAILED, str(error)


def log_of(log: Log, asked: frames.Request | frames.Offer, tail: bytes) -> Log:
    """For all that is told of a request or an offer. Of several addresses, with which the tail begins, the first stands
    for all.
    """
    number = int.from_bytes(tail[:_WORD], "little", signed=True) if asked.key == "address" else asked.identity
    key = key_text(asked.key, number, asked.model_id, asked.entry)
    bound = log.bind(pull_id=asked.pull_id, request_id=asked.request_id, key=key)
    return bound.bind(traceparent=asked.traceparent) if asked.traceparent else bound
