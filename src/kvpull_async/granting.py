"""What has been granted to a peer and is not over: memory that stays pinned until its bytes have left, or have been
read and summed. It must not know how a request was looked up, or links.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvpull_async._deadline import Deadline, absorb
from kvpull_async._workers import Workers
from kvpull_async.lane import Lane
from kvpull_async.memory.base import Batches, Until, planned
from kvpull_async.observe import Counters, Log
from kvpull_async.offers import Offer
from kvpull_async.protocol import frames
from kvpull_async.registry import Pin, Registry
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.summing import Summed
from kvpull_async.sums import Sum
from kvpull_async.transport.base import DataPath, Transfer, break_off, moved

__all__ = ["Granted"]

_MOST: Final = 1024
"""Most grants that a peer may leave open on a link: pulls run one at a time, so an honest one has few."""
_SETTLE_MS: Final = 50
"""How long the next request waits for bytes that were broken off. The memory stays pinned until they have settled."""


@dataclass
class _Open:
    """A grant whose memory is still pinned."""

    request_id: int
    grant_id: bytes
    pin: Pin
    transfer: Transfer
    until: Until
    timer: asyncio.TimerHandle

    def abort(self) -> None:
        """Read the memory no longer than it takes to stop."""
        break_off(self.transfer, self.until)


class Granted:
    """Keeps what one lane has granted pinned for as long as somebody may read it."""

    def __init__(
        self,
        lane: Lane,
        path: DataPath,
        *,
        registry: Registry,
        workers: Workers,
        log_of: Callable[[frames.Request], Log],
        counters: Counters,
    ) -> None:
        self._lane = lane
        self._path = path
        self._registry = registry
        self._workers = workers
        self._log_of = log_of
        self._counters = counters
        self._open: dict[bytes, _Open] = {}
        self._last: tuple[int, Transfer, Until] | None = None  # no lease, whose pin would keep the memory

    def __contains__(self, grant_id: bytes) -> bool:
        return grant_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    def lend(self, offer: Offer, until: Until) -> Batches:
        backend, regions = self._registry.backend, offer.entry.regions
        return planned(offer.plan, lambda segments: backend.lending(regions, segments, until=until))

    async def deliver(
        self, request: frames.Request, grant: frames.Grant, offer: Offer, ends: Deadline, growing: Sum | None
    ) -> None:
        """By other means than the grant itself: the source sends, or with a ticket the puller reads."""
        lease, summed = self._lease(request, grant, offer, ends), None
        try:
            await self._lane.send(grant)
            if growing is not None:
                summed = self._summed(offer, growing, ends)
            await moved(lease.transfer)
        except BaseException:
            if summed is not None:
                self._say(request, summed, b"")
            lease.abort()
            await absorb([lease.transfer.settled], Deadline.after_ms(_SETTLE_MS))
            self._end(lease)
            raise
        if grant.ticket is None:
            self._end(lease)
        if summed is not None:
            await self._tell(request, summed)

    def cancel(self, request_id: int) -> None:
        """The puller has given up."""
        if self._last is not None and self._last[0] == request_id:
            break_off(*self._last[1:])
        for lease in [lease for lease in self._open.values() if lease.request_id == request_id]:
            self._withdraw(lease.grant_id)

    def done(self, grant_id: bytes) -> None:
        """The puller has every byte of it."""
        lease = self._open.get(grant_id)
        if lease is not None:
            self._end(lease)

    def abort(self) -> None:
        """The lane is over: give the pins back as it settles."""
        for grant_id in list(self._open):
            self._withdraw(grant_id)

    # -- sums -------------------------------------------------------------------------------------------------------

    async def sum(self, request: frames.Request, offer: Offer, growing: Sum, ends: Deadline) -> None:
        """Say what the bytes sum to here. The memory must be held while this is called."""
        await self._tell(request, self._summed(offer, growing, ends))

    def _summed(self, offer: Offer, growing: Sum, ends: Deadline) -> Summed:
        until, entry = Until(ends), offer.entry
        return Summed(
            growing, self.lend(offer, until), [entry], self._workers,
            nbytes=offer.nbytes, rows=offer.rows, direct=entry.direct, until=until,
        )  # fmt: skip

    async def _tell(self, request: frames.Request, summed: Summed) -> None:
        """Whatever comes of it the puller, which waits for it, hears something."""
        digest = b""
        try:
            digest = await summed.digest()
        except (LLMException, OSError) as error:
            log = self._log_of(request)
            log.info("serve.not_summed", sum=request.verify, reason=str(error))
        finally:
            self._say(request, summed, digest)

    def _say(self, request: frames.Request, summed: Summed, digest: bytes) -> None:
        """The end of a sum; b"" for none."""
        summed.abort()
        self._lane.post(frames.Digest(request.request_id, digest))

    # -- leases -----------------------------------------------------------------------------------------------------

    def _lease(self, request: frames.Request, grant: frames.Grant, offer: Offer, ends: Deadline) -> _Open:
        if len(self._open) >= _MOST:
            self._path.release(grant.grant_id)
            raise LLMException(
                f"{_MOST} grants of this link are not over yet",
                status_code=LLMStatusCode.LLM_LINK_BUSY,
                retry_safe=True,
            )
        until = Until(ends)
        transfer = self._path.serve(grant.grant_id, self.lend(offer, until), offer.nbytes)
        pin = offer.entry.pin(partial(self._withdraw, grant.grant_id))
        loop, log = asyncio.get_running_loop(), self._log_of(request)
        timer = loop.call_later(ends.remaining, self._expire, grant.grant_id, log)
        lease = _Open(request.request_id, grant.grant_id, pin, transfer, until, timer)
        self._open[grant.grant_id] = lease
        self._last = (request.request_id, transfer, until)
        return lease

    def _withdraw(self, grant_id: bytes) -> None:
        """The cache is being taken away: it may go once this side reads it no more, whatever the puller does."""
        lease = self._open.get(grant_id)
        if lease is not None:
            lease.abort()
            self._end(lease)

    def _expire(self, grant_id: bytes, log: Log) -> None:
        lease = self._open.get(grant_id)
        if lease is not None:
            self._counters.add("leases_expired")
            log.warning("serve.lease_expired")
            self._withdraw(grant_id)

    def _end(self, lease: _Open) -> None:
        """The memory may go once nothing reads it any more."""
        if self._open.pop(lease.grant_id, None) is None:
            return
        lease.timer.cancel()
        self._path.release(lease.grant_id)
        lease.transfer.settled.add_done_callback(lambda _: lease.pin.release())

    def __repr__(self) -> str:
        return f"<Granted open={len(self._open)}>"
