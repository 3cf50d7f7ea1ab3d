"""One push through a link: offered to the receiver, which fetches the bytes. It must not know managers or transports.

The receiver alone writes its memory, and says when nothing writes any more. A push that ends without that word raises
with `destination_unsafe`.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvpull_async import sums
from kvpull_async._deadline import Deadline, absorb
from kvpull_async._prompt import Prompt, by_hand
from kvpull_async.gathering import gathered, join
from kvpull_async.held import Entry
from kvpull_async.linkage import lost_with
from kvpull_async.memory.base import FEW_BYTES, FEW_ROWS, FEW_TENSORS, Batches, Span, Until, planned
from kvpull_async.observe import Report
from kvpull_async.protocol import frames
from kvpull_async.status import TIMEOUTS, LLMException, LLMStatusCode, LLMTimeoutError, status_of, worth_repeating
from kvpull_async.summing import Summed
from kvpull_async.transport.base import DataPath, Transfer, break_off
from kvpull_async.turn import Turn, cause_of

if TYPE_CHECKING:
    from kvpull_async.lane import Lane
    from kvpull_async.link import Link
    from kvpull_async.memory.base import MemoryBackend

__all__ = ["Outgoing", "Push"]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What a manager asks to have pushed: `rows` of the cache `entry`, `nbytes` in all. `offer` says where they go; how
    they travel is added here. `table` names the receiver's blocks or addresses, `src_table` the blocks here.
    """

    entry: Entry
    backend: MemoryBackend
    rows: Callable[[], NDArray[np.int64]]
    most_rows: int
    nbytes: int
    offer: frames.Offer
    table: bytes
    src_table: bytes
    deadline: Deadline
    report: Report
    differs: Callable[[bytes, bytes], LLMException] | None = None
    """Hears of both sums, this side's first, if those that `offer.verify` asks for differ."""


class Push(Turn):
    """A turn on the link whose entry is the source."""

    def __init__(self, link: Link, outgoing: Outgoing) -> None:
        super().__init__(link, outgoing.entry, outgoing.deadline, outgoing.report)
        self._outgoing = outgoing
        self._grant_id = secrets.token_bytes(16)
        self._path: DataPath | None = None
        self._request_id: int | None = None
        self._result: asyncio.Future[frames.Result] | None = None
        self._heard: Prompt[None] | None = None
        """Ends with the result, or before it when nobody waits for that any more."""
        self._transfer: Transfer | None = None
        self._waits: Until | None = None
        self._summed: Summed | None = None
        self._on_accept = False
        """Whether the bytes go once the receiver says that it is ready for them."""

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        unsafe = False
        timer = loop.call_at(self._deadline.at, self._interrupt)
        try:
            self._start()
            await by_hand(self._heard)
            self._task = asyncio.current_task(loop)
            if self._stop is not None or self._expired:  # meanwhile
                raise asyncio.CancelledError
            await self._steps()
        except BaseException as error:
            timer.cancel()
            nearest = self._nearest(error)  # before it is stopped, which is a failure, too
            if self._result is not None and not self._result.done() and asyncio.current_task(loop) is None:
                await by_hand(None)  # what follows needs a task
            unsafe = await self._clean_up()
            if self._wished(error):
                raise
            raise self._explain(nearest, unsafe) from cause_of(nearest)
        finally:
            timer.cancel()
            if self._path is not None:
                self._path.release(self._grant_id)
            self._keep()
            self._leave()

    def _cancel(self) -> None:
        super()._cancel()
        if self._task is None and self._heard is not None:
            self._heard.cancel()

    def _start(self) -> None:
        """As far as it gets without waiting: a small push on an idle link up to its offer."""
        link, outgoing = self._link, self._outgoing
        self._report.enter("queue")
        self._holds_slot = link.enter_now(self)
        if not self._holds_slot:
            return
        self._claim_memory()
        lane = link.ready_now() if outgoing.nbytes <= min(link.inline_limit, FEW_BYTES) and self._brief else None
        if lane is not None:
            self._report.enter("connect")
            self._use(lane, link.path)
            pieces = self._pieces()
            self._request_id, data = self._register(lane, *pieces, inline=True)
            lane.channel.post(data)
            if outgoing.offer.verify:
                self._begin_sum()

    async def _steps(self) -> None:
        link, report = self._link, self._report
        if not self._holds_slot:
            await link.enter(self)
            self._holds_slot = True
            self._claim_memory()
        while self._request_id is None and not await self._offered():
            pass
        report.enter("copy")
        assert self._result is not None
        assert self._heard is not None
        await self._heard  # when that is cancelled the result is still to come
        result = self._result.result()
        _check(result)
        if self._summed is not None:
            await self._verify(self._summed, result)
        self._committed = True
        report.bytes = self._outgoing.nbytes

    async def _offered(self) -> bool:
        """False when the connection was lost before anything was said: it has to be made anew."""
        self._report.enter("connect")
        lane = await self._link.ready(self._deadline)
        path = self._use(lane, self._link.path)
        try:
            await self._offer(lane, path)
        except LLMException:  # a device's may be a TimeoutError, and so an OSError
            raise
        except OSError:
            if self._request_id is not None or self._transfer is not None:
                raise
            if not await lost_with(lane, self._deadline):
                raise
            return False
        return True

    async def _offer(self, lane: Lane, path: DataPath) -> None:
        """Say what there is, and how its bytes come: with these words, to be read there, or on the data path."""
        outgoing = self._outgoing
        payload, ticket, begun = b"", None, False
        inline = outgoing.nbytes <= self._link.inline_limit
        if inline:
            until = Until(self._deadline)
            payload = await gathered(
                self._lend(until), outgoing.entry, self._link.workers, here=self._brief, until=until
            )
        else:
            ticket = path.describe(self._grant_id, Span(outgoing.entry.regions, outgoing.rows, outgoing.entry.direct))
            if ticket is None:
                await path.ready(self._deadline)
                begun = path.prepared
        if lane.lost.done():  # while this side waited
            raise ConnectionResetError("the connection was lost")
        if begun or ticket is not None:
            self._begin(path)
        self._on_accept = not (inline or begun or ticket is not None)
        request_id, data = self._register(lane, payload, inline=inline, begun=begun, ticket=ticket)
        try:
            await lane.channel.send(data)
        except BaseException:  # then nothing has been said
            lane.give_up(request_id, tell=False)
            self._result = self._heard = None
            raise
        self._request_id = request_id
        if outgoing.offer.verify:
            self._begin_sum()

    def _begin_sum(self) -> None:
        """What the bytes sum to here, while the receiver takes them."""
        outgoing = self._outgoing
        growing, until = sums.begin(outgoing.offer.verify, where="this side"), Until(self._deadline)
        self._summed = Summed(
            growing, self._lend(until), [outgoing.entry], self._link.workers,
            nbytes=outgoing.nbytes, rows=outgoing.most_rows, direct=outgoing.entry.direct, until=until,
        )  # fmt: skip

    async def _verify(self, summed: Summed, result: frames.Result) -> None:
        """The receiver's sum must be the same."""
        self._report.enter("verify")
        found = await summed.digest()
        if found != result.digest:
            assert self._outgoing.differs is not None
            raise self._outgoing.differs(found, result.digest)

    def _use(self, lane: Lane, path: DataPath) -> DataPath:
        self._lane, self._path = lane, path
        self._report.peer, self._report.path = self._link.peer_name, path.name
        return path

    def _register(
        self, lane: Lane, *payload: bytes | memoryview, inline: bool, begun: bool = False, ticket: bytes | None = None
    ) -> tuple[int, bytes]:
        """The number of the offer, and the bytes to be sent."""
        outgoing = self._outgoing
        tables = (outgoing.table, outgoing.src_table if ticket is not None else b"")
        words = partial(self._words, inline=inline, begun=begun, ticket=ticket)
        request_id, data, self._result = lane.offer(words, *tables, *payload, accepted=self._accepted)
        self._heard = heard = Prompt[None](loop=self._result.get_loop())
        self._result.add_done_callback(lambda _: None if heard.done() else heard.hand(None))
        return request_id, data

    def _pieces(self) -> list[memoryview] | list[bytes]:
        """The bytes, which are few, read here and now."""
        outgoing, offer = self._outgoing, self._outgoing.offer
        if offer.src_blocks or offer.tensors > FEW_TENSORS:
            return [join(self._lend(None))]
        tensors = range(offer.src_tensor, offer.src_tensor + offer.tensors)
        return outgoing.backend.slices(outgoing.entry.regions, tensors, start=offer.start, nbytes=offer.per_tensor)

    @property
    def _brief(self) -> bool:
        """Whether the loop itself may read what is small."""
        return self._entry.direct and self._outgoing.most_rows <= FEW_ROWS

    def _words(self, request_id: int, *, inline: bool, begun: bool, ticket: bytes | None) -> frames.Offer:
        offer, remaining = self._outgoing.offer, self._deadline.remaining_ms
        return frames.Offer(
            request_id, self._grant_id, offer.pull_id, offer.traceparent, remaining, offer.key, offer.identity,
            offer.model_id, offer.entry, offer.first_tensor, offer.tensors, offer.per_tensor, offer.blocks,
            offer.block_nbytes, offer.src_tensor, offer.start, offer.src_blocks if ticket is not None else 0,
            inline, begun, ticket, offer.verify,
        )  # fmt: skip

    def _begin(self, path: DataPath) -> None:
        """Let the bytes go."""
        if self._transfer is None:
            self._waits = until = Until(self._deadline)
            self._transfer = path.serve(self._grant_id, self._lend(until), self._outgoing.nbytes)

    def _accepted(self) -> None:
        """The receiver is ready for them."""
        if not self._on_accept:  # it was not to be asked, or is too late
            return
        assert self._path is not None
        try:
            self._begin(self._path)
        except (OSError, RuntimeError) as error:  # the latter when no thread can be started
            self.stop(self._explain(error, unsafe=False))

    def _lend(self, until: Until | None) -> Batches:
        outgoing = self._outgoing
        regions, backend = outgoing.entry.regions, outgoing.backend
        return planned(outgoing.rows, lambda rows: backend.lending(regions, rows, until=until))

    # -- the way out ------------------------------------------------------------------------------------------------

    async def _clean_up(self) -> bool:
        """Stop what runs here and there. True when the receiver has not said that nothing writes any more."""
        self._report.enter("settle")
        self._on_accept = False
        transfer, result, bound = self._transfer, self._result, self._bound()
        if self._summed is not None:
            self._summed.abort()  # it keeps the memory until it has settled
        break_off(transfer, self._waits)
        unsafe = False
        if result is not None and self._lane is not None and self._request_id is not None:
            if not result.done():
                self._lane.post(frames.Cancel(self._request_id))
                await absorb([result], bound)
            unsafe = not result.done() or result.exception() is not None or result.result().unsafe
            self._lane.give_up(self._request_id, tell=False)
        if transfer is not None:
            await absorb([transfer.settled], bound)
        return unsafe

    def _nearest(self, error: BaseException) -> BaseException:
        """Where the memory here could not be read the receiver knows only that no more bytes came."""
        done = None if self._transfer is None else self._transfer.done
        if isinstance(error, LLMException) and done is not None and done.done() and not done.cancelled():
            failure = done.exception()
            if isinstance(failure, LLMException) or (isinstance(failure, OSError) and failure.errno == errno.EFAULT):
                return failure.with_traceback(None)
        return error

    def _keep(self) -> None:
        """The memory here stays as long as it is read, also when nobody waits for that any more."""
        transfer = self._transfer
        if transfer is not None and not transfer.settled.done():
            reading = self._entry.pin(lambda: None)
            transfer.settled.add_done_callback(lambda _: reading.release())

    def _where(self) -> str:
        if not self._holds_slot:
            return "while the push waited for earlier calls on its link"
        if self._request_id is None:
            return f"while the link was being connected{self._link.trouble}"
        return f"while {self._link.peer_name} took the bytes"

    def __repr__(self) -> str:
        return f"<Push {self._report.pull_id} slot={self._holds_slot} request={self._request_id}>"


def _check(result: frames.Result) -> None:
    """Raise what the receiver says has gone wrong."""
    status = status_of(result.status)
    if status is LLMStatusCode.LLM_SUCCESS:
        return
    kind = LLMTimeoutError if status in TIMEOUTS else LLMException
    raise kind(result.reason, status_code=status, retry_safe=worth_repeating(status))
