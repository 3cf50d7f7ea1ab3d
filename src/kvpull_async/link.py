"""One remote cluster: its two connections, their loss and return, and the order of the pulls on it.

It must not know managers, caches' contents or concrete transports. Used by the core's loop only.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Final

from kvpull_async._deadline import Deadline, absorb, finish
from kvpull_async._workers import Workers
from kvpull_async.dialling import dial
from kvpull_async.fifo import Fifo
from kvpull_async.lane import Lane
from kvpull_async.linkage import Connection, LinkContext, LinkState, Server, away, first, reconnect_error, text
from kvpull_async.observe import Report
from kvpull_async.pauses import Pauses
from kvpull_async.protocol import frames
from kvpull_async.protocol.frames import Message
from kvpull_async.protocol.session import Peer
from kvpull_async.receipts import Receipts
from kvpull_async.registry import Entry
from kvpull_async.standing import Standings
from kvpull_async.status import LLMException, LLMStatusCode, fresh
from kvpull_async.transport.base import Address, DataPath
from kvpull_async.turn import Turn

__all__ = ["KEYS_AT_ONCE", "Link"]

KEYS_AT_ONCE: Final = 16
"""Most keys that are being renewed or released at the peer at a time: a share of the requests that it lets be open."""
_RETURNS: Final = 5.0
"""Seconds after a loss within which the side that dialled is the one to bring the link back."""
_INCOMING_KEPT: Final = 30.0
"""Seconds that a link which the peer dialled waits for that peer to come back."""
_HEARD: Final = 0.1
"""Seconds that a peer has to hear a goodbye before the connection is closed: else it could take that for a loss."""


class Link:
    """`address` is None for a link that the peer dialled; only the side that dialled reconnects."""

    def __init__(self, context: LinkContext, cluster_id: int, address: Address | None) -> None:
        self.cluster_id: int = cluster_id
        self.address: Address | None = address
        self.state: LinkState = LinkState.NEW
        self.peer: Peer | None = None
        self.created: float = time.monotonic()
        self._context = context
        self._log = context.log.bind(cluster_id=cluster_id)
        settings = context.settings
        self.inline_limit: int = settings.inline_limit
        self.settle_timeout: float = settings.settle_timeout_ms / 1000
        self.workers: Workers = context.workers
        self._fifo = Fifo(limit=settings.queue_limit, wait=settings.link_busy_policy == "queue")
        self._active: Turn | None = None
        self._lanes: dict[int, Lane] = {}
        self._paths: dict[int, DataPath] = {}
        self._server: Server | None = None
        self._unacknowledged = Receipts()
        self.key_turns: asyncio.Semaphore = asyncio.Semaphore(KEYS_AT_ONCE)
        self._finalized = False  # whether the peer has said that it ends, and may be found again at its address
        self._bye: asyncio.Future[None] | None = None
        self.standing: Standings = Standings(lambda reads: self._lanes[self._own_lane].post(reads))  # noqa: PLW0108  (come later)
        self._watchers: set[asyncio.Future[LLMException | None]] = set()
        self._pauses = Pauses(settings.heartbeat_interval_ms / 1000)
        self._reconnecting: asyncio.Task[None] | None = None
        self.lost_at: float = 0.0  # by `time.monotonic`
        self._losses = 0
        self._reborn_after = (0, LLMException())
        self._trouble: LLMException | None = None
        self._closed_with: LLMException | None = None

    # -- what a pull needs ------------------------------------------------------------------------------------------

    @property
    def peer_name(self) -> str:
        lane = self._lanes.get(0)
        return lane.channel.peer if lane is not None else text(self.address)

    @property
    def trouble(self) -> str:
        """Why it is not connected, to be appended to a message."""
        return f": {self._trouble}" if self._trouble is not None else ""

    @property
    def path(self) -> DataPath:  # on which bytes come to this side
        return self._paths[self._own_lane]

    @property
    def _own_lane(self) -> int:
        return 0 if self.address is not None else 1

    def enter_now(self, turn: Turn) -> bool:
        """Take the link's slot if it is free, without waiting."""
        turn.losses_seen = self._losses
        self._admit(turn)
        if self._fifo.claim(turn):
            self._active = turn
        return self._active is turn

    async def enter(self, turn: Turn) -> None:
        """Take the link's slot, in order of arrival."""
        turn.losses_seen = self._losses
        self._admit(turn)
        await self._fifo.acquire()
        try:
            self._admit(turn)
        except LLMException:
            self._fifo.release()
            raise
        self._active = turn

    def _admit(self, turn: Turn) -> None:
        if self._closed_with is not None:
            raise fresh(self._closed_with)
        if turn.losses_seen < self._reborn_after[0]:
            raise fresh(self._reborn_after[1])

    def claim(self, token: object) -> bool:
        """From any thread: the slot for a moment, if it is free. False, with or without it, when the link is not up."""
        return self._fifo.claim(token) and self.state is LinkState.READY and self._closed_with is None

    def unclaim(self, token: object, loop: asyncio.AbstractEventLoop) -> None:
        self._fifo.unclaim(token, loop)

    def leave(self, turn: Turn) -> None:
        if self._active is turn:
            self._active = None
        self._fifo.release()

    def ready_now(self) -> Lane | None:
        """The connection to ask on, if it is there and takes a request without waiting."""
        lane = self._lanes[self._own_lane] if self.state is LinkState.READY else None
        return lane if lane is not None and not lane.lost.done() and lane.channel.ready else None

    async def ready(self, deadline: Deadline) -> Lane:
        """The connection to ask on, reconnecting first if need be. Fails fast when the peer is long gone."""
        while self.state is not LinkState.READY:
            if self._closed_with is not None:
                raise fresh(self._closed_with)
            self._pauses.hurry()
            trouble = await self._watch(deadline)
            if trouble and time.monotonic() - self.lost_at > self._context.settings.reconnect_grace_ms / 1000:
                self._fifo.fail_waiters(trouble)  # not an attempt for each of those that wait behind this one
                raise fresh(trouble)
        return self._lanes[self._own_lane]

    def tell_done(self, done: frames.Done) -> None:
        """Tell the source that a grant has landed, until it acknowledges or turns out to be another incarnation."""
        self._unacknowledged.add(done)
        if self.state is LinkState.READY:
            self._lanes[self._own_lane].mention(done)

    def quarantine(self, entry: Entry, settled: asyncio.Future[None], report: Report) -> None:
        entry.quarantine(settled)
        self._context.counters.add("regions_quarantined")
        self._log.warning("region.quarantined", cache_id=entry.cache_id, pull_id=report.pull_id, peer=self.peer_name)

    # -- connecting -------------------------------------------------------------------------------------------------

    async def connect(self, deadline: Deadline) -> None:
        """Dial, greet, and open both connections. LLMException, OSError or asyncio.TimeoutError."""
        assert self.address is not None
        self.state = LinkState.CONNECTING
        try:
            connection = await dial(self._context, self.cluster_id, self.address, deadline)
        except BaseException:
            if self.state is not LinkState.CLOSED:
                self.state = LinkState.POISONED if self.peer is not None else LinkState.NEW
            raise
        if self._closed_with is not None:  # closed while the last greeting was on its way
            connection.abort()
            raise fresh(self._closed_with)
        self.adopt(connection)

    def adopt(self, connection: Connection) -> None:
        """Take connections that have been greeted, whichever side dialled them."""
        peer, lanes = connection.peer, connection.lanes
        if self.peer is not None and self.peer.incarnation != peer.incarnation:
            self._reborn()
        self._break("the peer connected anew")  # so it has lost what it had, whether or not this side has noticed
        self.peer, self._lanes, self._paths = peer, lanes, connection.paths
        served = lanes[1 - self._own_lane]
        self._server = self._context.serve(served, self._paths[1 - self._own_lane], peer, self._peer_left)
        served.start(self._server.receive)
        lanes[self._own_lane].start(self._receive)
        for lane in lanes.values():
            lane.lost.add_done_callback(partial(self._lane_lost, lane))
        self.state, self._trouble, self._finalized = LinkState.READY, None, False
        self._context.counters.add("links_up")
        dialled, path, why = self.address is not None, self.path.name, connection.why
        self._log.info("link.up", peer=self.peer_name, path=path, why=why, dialled=dialled, protocol=peer.version)
        for done in self._unacknowledged:
            lanes[self._own_lane].post(done)
        self._notify(None)

    def _reborn(self) -> None:
        """The peer is another process now: pulls from before it was lost fail, and what was promised to it is void."""
        error = away(f"the peer {self.peer_name} was restarted (another incarnation); what it held is gone")
        self._context.counters.add("incarnation_changes")
        self._log.warning("link.incarnation_changed", peer=self.peer_name)
        self._unacknowledged.clear()
        self._reborn_after = (self._losses, error)  # for those that wait in the queue
        if self._active is not None and self._active.losses_seen < self._losses:
            self._active.stop(error)

    def _receive(self, message: Message, tail: bytes) -> None:
        if isinstance(message, frames.DoneAck):
            self._unacknowledged.acknowledged(message.grant_id)
        elif isinstance(message, frames.ByeAck) and self._bye is not None and not self._bye.done():
            self._bye.set_result(None)
            self.state = LinkState.CLOSED  # the peer hangs up now, which is no loss

    # -- losing and regaining the connection ------------------------------------------------------------------------

    def _lane_lost(self, lane: Lane, lost: asyncio.Future[LLMException]) -> None:
        answering = self._bye is not None and lane is not self._lanes[self._own_lane]  # to a goodbye, by hanging up
        if answering or self.state is not LinkState.READY or lane not in self._lanes.values():
            return
        self.state, self.lost_at = LinkState.POISONED, time.monotonic()
        self._losses += 1
        self._trouble = error = lost.result()
        if self._finalized:
            self._trouble = away(f"the peer {self.peer_name} was finalized; the link comes back when it does")
            self._log.info("link.away", peer=self.peer_name, reason="the peer was finalized")
        else:
            self._context.counters.add("links_lost")
            self._log.warning("link.lost", peer=self.peer_name, reason=str(error))
        self._break(str(error))
        if self.address is not None:
            self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect(), name="kvpull-reconnect")
        else:
            asyncio.get_running_loop().call_later(_INCOMING_KEPT, self._not_back, self.lost_at)

    def _not_back(self, lost_at: float) -> None:
        if self.state is LinkState.POISONED and self.lost_at == lost_at:
            self.refuse(LLMException(f"the peer is gone{self.trouble}", status_code=LLMStatusCode.LLM_NOT_YET_LINK))
            self._context.gone(self)

    def _break(self, reason: str) -> None:
        for lane in self._lanes.values():
            lane.abort(reason)
        for path in self._paths.values():
            path.abort()
        if unreported := self.standing.clear():
            self._context.counters.add("reads_unreported", unreported)
        if self._server is not None:
            self._server.abort()

    async def _reconnect(self) -> None:
        """Try until it works or the link is closed, with growing pauses; a waiting pull cuts a pause short."""
        self._pauses.begin()
        while self._closed_with is None:
            await self._pauses.next()
            try:
                await self.connect(Deadline.after_ms(self._context.settings.handshake_timeout_ms))
                self._context.counters.add("reconnects")
                return
            except Exception as error:  # noqa: BLE001  (also after a mistake of ours the link must come back)
                self._trouble = reconnect_error(error, text(self.address))
                self._log.debug("link.reconnect_failed", peer=text(self.address), reason=str(self._trouble))
                self._notify(self._trouble)

    async def _watch(self, deadline: Deadline) -> LLMException | None:
        """What the next attempt to connect comes to; for a link the peer dialled, whether it comes back."""
        watcher: asyncio.Future[LLMException | None] = asyncio.get_running_loop().create_future()
        self._watchers.add(watcher)
        grace = self._context.settings.reconnect_grace_ms / 1000
        bound = deadline if self.address is not None else deadline.sooner(grace)
        try:
            done, _ = await asyncio.wait([watcher], timeout=bound.remaining)
        finally:
            self._watchers.discard(watcher)
        if done:
            return watcher.result()
        if deadline.expired:
            raise asyncio.TimeoutError
        return away(f"the peer {self.peer_name}, which dialled this link, is gone{self.trouble}")

    def _notify(self, trouble: LLMException | None) -> None:
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(trouble)

    # -- checking and ending ----------------------------------------------------------------------------------------

    async def check(self, deadline: Deadline) -> None:
        """One round trip to the peer, beside the queue of pulls."""
        async with deadline.scope():
            await (await self.ready(deadline)).ping(deadline)

    async def say_goodbye(self, deadline: Deadline) -> None:
        """Finish what is queued, flush acknowledgements, and have the peer drop its end too. OSError, LLMException or
        asyncio.TimeoutError when the peer cannot be told.
        """
        async with deadline.scope():
            await self._fifo.idle()
            if self.state is not LinkState.READY:
                raise LLMException(f"the link is down{self.trouble}", status_code=LLMStatusCode.LLM_LINK_FAILED)
            lane = self._lanes[self._own_lane]
            await self.flush(deadline)
            self._bye = asyncio.get_running_loop().create_future()
            await lane.send(frames.Bye())
            await first(self._bye, lane.lost)
            if not self._bye.done():
                raise fresh(lane.lost.result())

    async def drain(self, deadline: Deadline) -> bool:
        """Wait for the running pull; those that wait for it are not waited for."""
        return await absorb([self._fifo.idle()], deadline)

    async def flush(self, deadline: Deadline) -> bool:
        """Wait, bounded, until the peer has acknowledged every DONE."""
        self.standing.report()
        if self.state is not LinkState.READY:
            return not self._unacknowledged
        return await self._unacknowledged.settled(self._lanes[self._own_lane].lost, timeout=deadline.remaining)

    def refuse(self, error: LLMException) -> None:
        """Accept no pull from now on; those that wait end with `error`."""
        if self._closed_with is None:
            self._closed_with = error
            self._fifo.fail_waiters(error)

    @property
    def leaving(self) -> bool:
        """Whether it accepts no pull any more, though it may be there still."""
        return self._closed_with is not None

    def reopen(self) -> None:
        """Take back `refuse`: the goodbye failed and the link stays."""
        self._closed_with, bye, self._bye = None, self._bye, None
        if bye is not None:  # the peer may act on it whenever it likes; a new connection makes it void
            self._lanes[self._own_lane].abort("a goodbye on it was not answered")
        if self.state is LinkState.POISONED and self._reconnecting is not None and self._reconnecting.done():
            self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect(), name="kvpull-reconnect")

    def wave(self, *, returns: bool = False) -> None:
        """Tell the peer, without waiting, that this end goes: else the side that dialled would only dial again. With
        `returns` it may, since this end may be back at its address.
        """
        if self.state is LinkState.READY:
            self._bye = asyncio.get_running_loop().create_future()
            self._lanes[self._own_lane].post(frames.Bye(returns))

    def returns(self) -> bool:
        """Whether it is there, or about to be back, now in a hurry: lost just now, and the peer did not refuse."""
        self._pauses.hurry()
        refused = self._trouble is not None and self._trouble.status_code == LLMStatusCode.LLM_ALREADY_LINK
        return self.state is LinkState.READY or (not refused and time.monotonic() - self.lost_at < _RETURNS)

    async def close(self, error: LLMException, deadline: Deadline) -> None:
        """End it and what is on it, to the last thread and task, within the deadline; then raise a cancellation."""
        self.refuse(error)
        tasks = [task for lane in self._lanes.values() for task in lane.tasks]
        if self._active is not None:
            self._active.stop(error)
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            tasks.append(self._reconnecting)
        self._notify(error)
        await finish(self._close(tasks, error, deadline), deadline)

    async def _close(self, tasks: list[asyncio.Task[None]], error: LLMException, deadline: Deadline) -> None:
        await self.drain(deadline.sooner(self.settle_timeout))
        if self._bye is not None and self.state is LinkState.READY:
            await first(self._bye, self._lanes[self._own_lane].lost, timeout=deadline.sooner(_HEARD).remaining)
        self.state = LinkState.CLOSED
        self._break(str(error))
        self._log.info("link.closed", peer=self.peer_name, reason=str(error))
        await absorb(tasks, deadline)
        for path in self._paths.values():
            await path.aclose(deadline)

    def _peer_left(self, returns: bool) -> None:
        """The peer said goodbye: drop this end too, without waiting for a pull that runs; unless it will be back."""
        if returns and self.address is not None:
            self._finalized = True
            return
        error = LLMException(
            f"the peer {self.peer_name} has unlinked", status_code=LLMStatusCode.LLM_NOT_YET_LINK, retry_safe=True
        )
        self.refuse(error)
        self._context.gone(self)

    def __repr__(self) -> str:
        return f"<Link cluster={self.cluster_id} {self.peer_name} {self.state.value} {self._fifo!r}>"
