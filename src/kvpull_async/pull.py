"""One pull through a link, from its place in the queue to the last byte. It must not know managers or transports.

Whatever ends a pull, nothing writes to its destination afterwards, or the destination is quarantined until it is so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kvpull_async import sums
from kvpull_async._deadline import Deadline, absorb
from kvpull_async._prompt import Prompt, by_hand
from kvpull_async._workers import Job
from kvpull_async.gathering import fill
from kvpull_async.linkage import lost_with
from kvpull_async.memory.base import FEW_ROWS, Batches, Span, Until, copy_batches, lend_bytes, no_memory
from kvpull_async.observe import Report
from kvpull_async.protocol import frames
from kvpull_async.registry import Entry
from kvpull_async.standing import Offered
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.summing import Summed
from kvpull_async.transport.base import DataPath, Segments, Transfer, break_off, moved
from kvpull_async.turn import Turn, cause_of

if TYPE_CHECKING:
    from kvpull_async.lane import Answer, Lane
    from kvpull_async.link import Link

__all__ = ["Pull", "Verifying", "Wanted"]

_TINY: Final = 128 * 1024
"""Most bytes copied with the interpreter lock held: giving it up would take longer."""
_WHY: Final = 0.2
"""Seconds that a source has to say why it has broken off; half of what the deadline leaves, if that is less: then there
is time to say that the connection broke.
"""


@dataclass(frozen=True, slots=True)
class Verifying:
    """The sum `name`, as the source makes it too: `lend` gives the destination's bytes in the order of the request, and
    `failed` hears of both sums, the source's first, if they differ.
    """

    name: str
    lend: Callable[[frames.Grant, Until], Batches]
    failed: Callable[[bytes, bytes], LLMException]


@dataclass(slots=True)
class Wanted:
    """What a manager asks of a link. `span` says where in memory a grant's bytes go; `land` turns that into the pieces
    to fill and their number of bytes, and refuses a grant that does not fit; `reading` says which rows of the source
    they are. `open_cache` is the id of a remote cache that may be read without asking once the source lets this side,
    and `known` what it would grant, or None when it has to be asked.
    """

    request: Callable[[int, int], frames.Request]
    table: bytes
    at_most: int
    land: Callable[[frames.Grant, Span], tuple[Batches, int]]
    reading: Callable[[frames.Grant], Callable[[], Segments]]
    span: Callable[[frames.Grant, Until], Span]
    known: Callable[[Offered], frames.Grant | None]
    open_cache: int | None
    entry: Entry
    deadline: Deadline
    report: Report
    pieces: Callable[[], list[memoryview] | None] = lambda: None
    """Asked for while the source answers: the part of each tensor that is filled by `at_most` bytes, or None."""
    verifying: Verifying | None = None


class Pull(Turn):
    """A turn on the link whose entry is the destination."""

    writes = True

    def __init__(self, link: Link, wanted: Wanted) -> None:
        super().__init__(link, wanted.entry, wanted.deadline, wanted.report)
        self._wanted = wanted
        self._path: DataPath | None = None
        self._request_id: int | None = None
        self._answer: Prompt[Answer] | None = None
        self._transfer: Transfer | None = None
        self._refusal: asyncio.Future[LLMException] | None = None
        self._digest: asyncio.Future[bytes] | None = None
        self._summed: Summed | None = None
        self._waits: Until | None = None
        self._verifies = False
        self._pieces: list[memoryview] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        """A small pull needs no task: see `by_hand`."""
        unsafe = False
        self._loop = loop = asyncio.get_running_loop()
        timer = loop.call_at(self._wanted.deadline.at, self._interrupt)
        try:
            self._begin()
            await self._until(self._answer)
            await self._steps()
        except BaseException as error:
            timer.cancel()
            unsafe = await self._clean_up()
            if self._wished(error):
                raise
            raise self._explain(error, unsafe) from cause_of(error)
        finally:
            timer.cancel()
            if self._refusal is not None:
                self._refusal.cancel()
            self._pieces = None
            self._leave()

    async def _until(self, answer: Prompt[Answer] | None) -> None:
        """Wait for the answer if that needs no task, else for a task."""
        await by_hand(answer)
        self._task = asyncio.current_task(self._loop)
        if self._stop is not None or self._expired:  # meanwhile
            raise asyncio.CancelledError

    def _cancel(self) -> None:
        super()._cancel()
        if self._task is None and self._answer is not None:
            self._answer.cancel()

    # -- the way there ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """As far as it gets without waiting: a small pull on an idle link up to its request."""
        wanted, link, report = self._wanted, self._link, self._wanted.report
        report.enter("queue")
        if wanted.entry.quarantined or not link.enter_now(self):
            return
        self._holds_slot = True
        self._claim_memory()
        lane = link.ready_now() if wanted.at_most <= link.inline_limit else None
        if lane is not None and self._known() is None:
            report.enter("connect")
            self._use(lane, link.path)
            lane.channel.post(self._ask(lane))
            self._prepare()

    async def _steps(self) -> None:
        wanted, link, report = self._wanted, self._link, self._wanted.report
        if not self._holds_slot:
            await self._quarantine_over()  # outside the link's slot, which others need meanwhile
            await link.enter(self)
            self._holds_slot = True
            await self._quarantine_over()
            self._claim_memory()
        grant, payload = await (self._granted() if self._answer is None else self._answer)
        if wanted.deadline.expired:  # a core that was held up may see the answer before the timer
            raise asyncio.TimeoutError
        report.enter("copy")
        if grant.inline and self._pieces is not None and self._fits(grant, payload):
            fill(self._pieces, payload)
            report.bytes = len(payload)
        else:
            self._waits = waits = Until(wanted.deadline)
            span, path = wanted.span(grant, waits), self._path
            assert path is not None
            unproven = not grant.inline and grant.ticket is not None and path.unproven(grant.ticket)
            if unproven:
                span = replace(span, landed=None)  # nothing is final before the source has said so
            landing, report.bytes = wanted.land(grant, span)
            payload = bytes(payload)
            if self._task is None:
                await self._until(None)
            if grant.inline:
                await self._land(landing, payload, report.bytes, rows=grant.tensors * len(wanted.table) // 8)
            else:
                await self._fetch(path, grant, span, landing, report.bytes)
                if unproven:
                    await self._prove(grant)
        if self._digest is not None:
            await self._verify(grant, self._digest)
        self._commit(grant, self._path)

    async def _granted(self) -> Answer:
        self._wanted.report.enter("connect")
        lane, path = await self._connected()
        self._use(lane, path)
        grant = self._known()
        if grant is not None:
            return grant, b""
        data = self._ask(lane)
        await lane.channel.send(data)
        self._prepare()
        assert self._answer is not None
        return await self._answer

    def _known(self) -> frames.Grant | None:
        """What the source would grant, where it lets this side read without asking."""
        cache_id = self._wanted.open_cache
        offered = None if cache_id is None else self._link.standing.find(cache_id)
        return None if offered is None else self._wanted.known(offered)

    def _use(self, lane: Lane, path: DataPath) -> None:
        report = self._wanted.report
        self._lane, self._path = lane, path
        report.peer, report.path = self._link.peer_name, path.name
        report.enter("request")

    def _ask(self, lane: Lane) -> bytes:
        """Register the request: the bytes to be sent."""
        wanted = self._wanted
        self._request_id, data, self._answer = lane.ask(
            lambda number: wanted.request(number, wanted.deadline.remaining_ms), wanted.table
        )
        if wanted.at_most > self._link.inline_limit:
            self._refusal = lane.refusal(self._request_id)
        if wanted.verifying is not None:
            self._digest = lane.digest(self._request_id)
        return data

    async def _fetch(self, path: DataPath, grant: frames.Grant, span: Span, landing: Batches, nbytes: int) -> None:
        path.expect(grant.grant_id, grant.ticket, self._wanted.reading(grant), span)
        self._transfer = path.fetch(grant.grant_id, landing, nbytes)
        try:
            await moved(self._transfer)
        except ValueError as error:  # outside of what it shares, or not as many bytes
            reason = f"the source granted what its cache does not have: {error}"
            raise LLMException(reason, status_code=LLMStatusCode.LLM_FAILED) from error
        except LLMException:  # a device's may be a TimeoutError, and so an OSError
            raise
        except OSError as error:
            if grant.ticket is None and no_memory(error, "destination", reading=False) is None:
                await self._hear_why(error)
            raise

    async def _hear_why(self, error: OSError) -> None:
        """A source whose memory fails can only break off sending. Why, it says beside that."""
        refusal = self._refusal
        if refusal is None:
            return
        await asyncio.wait([refusal], timeout=min(_WHY, self._deadline.remaining / 2))
        if refusal.done() and not refusal.cancelled() and refusal.result().status_code != LLMStatusCode.LLM_LINK_FAILED:
            raise refusal.result() from error

    async def _quarantine_over(self) -> None:
        entry = self._wanted.entry
        if entry.quarantined and not await entry.idle(self._wanted.deadline, writers_only=True):
            raise asyncio.TimeoutError

    async def _connected(self) -> tuple[Lane, DataPath]:
        """The connection to ask on and the path on which the bytes will come. As long as nothing has been asked, a
        connection that breaks is only one that has to be made anew.
        """
        link, deadline = self._link, self._wanted.deadline
        while True:
            lane, path = await link.ready(deadline), link.path
            try:
                if self._wanted.at_most > link.inline_limit:
                    await path.ready(deadline)
            except OSError:
                if not await lost_with(lane, deadline):
                    raise
            else:
                if not lane.lost.done():
                    return lane, path
                await lost_with(lane, deadline)

    async def _land(self, landing: Batches, payload: bytes, nbytes: int, *, rows: int) -> None:
        if len(payload) != nbytes or nbytes > self._link.inline_limit:
            landing.close()
            raise ConnectionError(
                f"the grant is for {nbytes} bytes, {len(payload)} came with it, {self._link.inline_limit} may"
            )
        if not (self._entry.direct and rows <= FEW_ROWS):
            workers = self._link.workers.fit(direct=self._entry.direct)
            self._transfer = job = Job(workers, copy_batches(lend_bytes(payload), landing))
            await moved(job)
        else:  # at most inline_limit bytes: shorter than handing it to a thread
            _exhaust(copy_batches(lend_bytes(payload), landing))

    def _prepare(self) -> None:
        """While the source looks for what was asked."""
        if self._wanted.at_most <= min(self._link.inline_limit, _TINY):
            self._pieces = self._wanted.pieces()

    def _fits(self, grant: frames.Grant, payload: bytes | memoryview) -> bool:
        """Whether the answer is for just the bytes that were asked for."""
        assert self._pieces is not None
        asked = self._wanted.at_most
        return len(self._pieces) == grant.tensors and grant.tensors * grant.per_tensor == len(payload) == asked

    async def _prove(self, grant: frames.Grant) -> None:
        """The bytes are right only if the source still holds the memory that they were read from."""
        lane = self._lane
        assert lane is not None
        if not await lane.check(grant.grant_id):
            raise LLMException(
                "the source took its cache away while it was being read",
                status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
                retry_safe=True,
            )

    async def _verify(self, grant: frames.Grant, digest: asyncio.Future[bytes]) -> None:
        """The bytes count only if they sum to the same here as at the source."""
        wanted, transfer = self._wanted, self._transfer
        verifying = wanted.verifying
        assert verifying is not None
        wanted.report.enter("verify")
        self._verifies = True
        if transfer is not None:  # and a task, then
            await asyncio.wait([transfer.settled])
        growing, until = sums.begin(verifying.name, where="this side"), Until(wanted.deadline)
        self._summed = Summed(
            growing, verifying.lend(grant, until), [wanted.entry], self._link.workers,
            nbytes=wanted.report.bytes, rows=wanted.span(grant, until).most_rows,
            direct=wanted.entry.direct, until=until,
        )  # fmt: skip
        if self._task is None and not (self._summed.settled and digest.done()):
            await self._until(None)
        found, expected = await self._summed.digest(), await digest
        if found != expected:
            raise verifying.failed(expected, found)

    def _commit(self, grant: frames.Grant, path: DataPath | None) -> None:
        """No step between the last byte and this may wait: afterwards the pull has happened."""
        self._committed = True
        report, cache_id = self._wanted.report, self._wanted.open_cache
        if grant.wants_done:
            self._link.tell_done(frames.Done(grant.grant_id, report.pull_id))
        if self._request_id is None:
            self._link.standing.note(cache_id or 0, report.bytes, report.pull_id)
        elif path is not None and cache_id is not None and grant.ticket is not None and grant.entry_nbytes:
            with contextlib.suppress(LLMException, OSError):  # the source has taken it back in this very moment
                memory = path.standing(grant.ticket)
                if memory is not None:
                    self._link.standing.remember(cache_id, Offered(grant.ticket, grant.entry_nbytes, memory))

    # -- the way out ------------------------------------------------------------------------------------------------

    async def _clean_up(self) -> bool:
        """Stop what runs and wait until it has; True when the destination had to be quarantined instead."""
        transfer, unsafe = self._transfer, False
        if self._lane is not None and self._request_id is not None:
            self._lane.give_up(self._request_id, tell=True)
        if transfer is None and self._path is not None and self._unanswered():
            self._path.give_up()
        if self._summed is not None:
            self._summed.abort()  # it keeps the memory until it has settled, and writes nothing
        break_off(transfer, self._waits)
        if transfer is not None:
            self._wanted.report.enter("settle")
            unsafe = not await absorb([transfer.settled], self._bound())
            if unsafe:
                self._link.quarantine(self._wanted.entry, transfer.settled, self._wanted.report)
        return unsafe

    def _unanswered(self) -> bool:
        """Whether bytes may have been sent for a grant that nobody takes: unless the source refused, or never heard."""
        answer = self._answer
        if answer is None or self._wanted.at_most <= self._link.inline_limit:
            return False
        return not answer.done() or answer.cancelled() or answer.exception() is None

    def _where(self) -> str:
        if self._pin is None and self._wanted.entry.quarantined:
            return "while its destination was quarantined"
        if not self._holds_slot:
            return "while the pull waited for earlier ones on its link"
        if self._request_id is None and self._transfer is None:
            return f"while the link was being connected{self._link.trouble}"
        if self._verifies:
            return f"while the bytes that came from {self._link.peer_name} were verified"
        if self._transfer is None:
            return f"while the peer {self._link.peer_name} did not answer"
        return f"while bytes came from {self._link.peer_name}"

    def __repr__(self) -> str:
        return f"<Pull {self._wanted.report.pull_id} slot={self._holds_slot} request={self._request_id}>"


def _exhaust(steps: Generator[int, None, None]) -> None:
    with contextlib.closing(steps):
        for _ in steps:
            pass
