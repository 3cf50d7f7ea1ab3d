"""All links of an engine: dialling, accepting, finding, unlinking. It must not know managers, caches or pulls.

Links that this side dialled are found by the cluster id asked for; those that peers dialled are kept by process,
since several peers may use one id. Each link has its users (`linked.Users`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

import anyio

from kvpull_async._deadline import Deadline, absorb
from kvpull_async.halves import Halves, Refusal
from kvpull_async.lane import Lane
from kvpull_async.link import Link
from kvpull_async.linkage import Connection, LinkContext, LinkState, Route, connect_error
from kvpull_async.linked import ORDINARY, Answers, Changes, Codes, Door, Target, Users, each
from kvpull_async.offers import PeerRecord
from kvpull_async.protocol.session import Peer
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.transport.base import ControlChannel

__all__ = ["Codes", "Links", "Target"]

_RECORDS: Final = 1024
_RETRY_PAUSE: Final = 0.05
_ARRIVAL: Final = 0.2


class Links:
    def __init__(self, context: LinkContext, codes: Codes) -> None:
        self._context = context
        self._codes = codes
        self._dialled: dict[int, Link] = {}
        self._dialling: set[int] = set()
        self._incoming: dict[tuple[int, bytes], Link] = {}
        self._halves = Halves(context)
        self._records: OrderedDict[tuple[int, bytes], PeerRecord] = OrderedDict()
        self._changes = Changes()
        self._closings: set[asyncio.Task[None]] = set()
        self.users: Users = Users()
        self._closed = False
        self._answers = Answers(context.log, context.counters)
        self.reasons: dict[int, str] = self._answers.reasons
        self.forgotten: Callable[[Link, set[int]], None] = lambda *_: None
        """Called with a link that is not one of these any more, and its users; in state READY it was taken leave of."""

    async def prepare(self) -> None:
        """Have anyio import its backend now, while nothing else waits for the core's loop."""
        async with anyio.create_task_group():
            pass

    # -- finding ----------------------------------------------------------------------------------------------------

    def find(self, cluster_id: int) -> Link | None:
        """The link to a cluster: the one dialled here, else the youngest that a peer of that id dialled."""
        dialled = self._dialled.get(cluster_id)
        if dialled is not None:
            return dialled
        incoming = tuple(self._incoming.values())  # small pulls look from other threads
        theirs = [link for link in incoming if link.cluster_id == cluster_id]
        return max(theirs, key=lambda link: (link.state is LinkState.READY, link.created), default=None)

    def record(self, process: tuple[int, bytes]) -> PeerRecord:
        record = self._records.setdefault(process, PeerRecord())
        self._records.move_to_end(process)
        while len(self._records) > _RECORDS:
            self._records.popitem(last=False)
        return record

    def all(self) -> list[Link]:
        return [*self._dialled.values(), *self._incoming.values()]

    # -- dialling ---------------------------------------------------------------------------------------------------

    async def link(self, targets: list[Target], deadline: Deadline) -> list[LLMStatusCode]:
        """Dial all at once; one code per target, in order. Failures are codes, never exceptions."""
        return await each(targets, lambda target: self._link(target, deadline))

    async def _link(self, target: Target, deadline: Deadline) -> LLMStatusCode:
        cluster_id = target.cluster_id
        if target.address is None:
            return self._answers.failed(target, "needs exactly one remote ip", LLMStatusCode.LLM_PARAM_INVALID)
        held = await self._staying(cluster_id, deadline)
        if cluster_id in self._dialling:
            return self._answers.already(target, "is being linked already", self._codes.repeated)
        if held is not None and held.leaving:
            code = LLMStatusCode.LLM_ENGINE_FINALIZED if self._closed else self._codes.timeout
            return self._answers.failed(target, "is being unlinked", code)
        if held is not None and held.address not in (None, target.address) and held.state is not LinkState.READY:
            self.end(held, f"the cluster is to be found at {target!s} now")
        elif held is not None and (held.address is not None or held.state is LinkState.READY):
            return await self._again(target, held, deadline)
        if len(self.all()) >= self._context.settings.max_links:
            limit = f"would exceed {self._context.settings.max_links} links"
            return self._answers.failed(target, limit, LLMStatusCode.LLM_LINK_FAILED)
        with self.only(cluster_id):
            status = await self._dial(target, deadline)
        if status is LLMStatusCode.LLM_SUCCESS and (found := self.find(cluster_id)) is not None:
            self.users.add(found, ORDINARY)
        return status

    async def _staying(self, cluster_id: int, deadline: Deadline) -> Link | None:
        """As `find`, but a link that is being unlinked is waited for: to be forgotten, or used on after all."""
        while (held := self.find(cluster_id)) is not None and held.leaving and not (self._closed or deadline.expired):
            await self._changes.next(deadline)
        return held

    @contextlib.contextmanager
    def only(self, cluster_id: int) -> Iterator[bool]:
        """Around a dial to a cluster: whether it is the only one, or else not to be made."""
        free = cluster_id not in self._dialling
        self._dialling.add(cluster_id)
        try:
            yield free
        finally:
            if free:
                self._dialling.discard(cluster_id)

    async def _again(self, target: Target, held: Link, deadline: Deadline) -> LLMStatusCode:
        """A cluster that is linked. When its connection is lost, "already" is an answer only once it is back."""
        try:
            async with deadline.scope():
                await held.ready(deadline)
        except (LLMException, OSError, asyncio.TimeoutError) as raised:
            if held.leaving:  # unlinked meanwhile: there is no link any more, or soon
                return await self._link(target, deadline)
            error = connect_error(raised, str(target))
            return self._answers.failed(target, f"is linked, and its connection is lost: {error}", self._code_of(error))
        self.users.add(held, ORDINARY)
        status = LLMStatusCode.LLM_ALREADY_LINK if held.address else self._codes.linked_by_peer
        if status is LLMStatusCode.LLM_SUCCESS:
            return status
        return self._answers.already(target, f"is linked already, to {held.peer_name}", status)

    async def _dial(self, target: Target, deadline: Deadline) -> LLMStatusCode:
        link = Link(self._context, target.cluster_id, target.address)
        tries = self._context.settings.link_retry_count
        while True:
            try:
                await link.connect(deadline)
                break
            except (LLMException, OSError, asyncio.TimeoutError) as raised:
                error = connect_error(raised, str(target))
            superseded = error.status_code == LLMStatusCode.LLM_ALREADY_LINK
            if superseded and await self._arrived(target.cluster_id, deadline.sooner(_ARRIVAL)):
                return LLMStatusCode.LLM_SUCCESS
            tries -= not superseded
            if not tries or deadline.expired:
                return self._answers.failed(target, str(error), self._code_of(error))
            await asyncio.sleep(min(_RETRY_PAUSE, deadline.remaining))
        return await self.take(link)

    async def take(self, link: Link) -> LLMStatusCode:
        """Keep a link that has been dialled, unless there is a better one by now."""
        if self._closed:
            await link.close(_finalized(), Deadline.after_ms(100))
            return LLMStatusCode.LLM_ENGINE_FINALIZED
        assert link.peer is not None
        twin, former = self._incoming.get(link.peer.process), self._dialled.get(link.cluster_id)
        ready = [old for old in (twin, former) if old is not None and old.state is LinkState.READY]
        if former in ready or (ready and self._context.identity.incarnation < link.peer.incarnation):
            await link.close(_superseded(), Deadline.after_ms(100))
            return LLMStatusCode.LLM_SUCCESS
        self.users.add(link, *self.users.of(twin, former))
        for old in (twin, former):
            if old is not None and old not in ready:
                self.end(old, "this side has dialled anew")
        self._dialled[link.cluster_id] = link
        return LLMStatusCode.LLM_SUCCESS

    async def _arrived(self, cluster_id: int, deadline: Deadline) -> bool:
        """Both sides dialled at once and the peer's connection is the one that counts. If it does not come in time,
        this side dials again: the peer may have meant another one of this cluster id, or have failed.
        """
        while True:
            found = self.find(cluster_id)
            if found is not None and found.state is LinkState.READY:
                return True
            if deadline.expired:
                return False
            await self._changes.next(deadline)

    def _code_of(self, error: LLMException) -> LLMStatusCode:
        return self._codes.timeout if isinstance(error, LLMTimeoutError) else LLMStatusCode(error.status_code)

    # -- accepting --------------------------------------------------------------------------------------------------

    async def accept(self, route: Route, channel: ControlChannel, door: Door | None = None) -> None:
        """Greet a control channel that a peer opened, and make it half a link or complete one."""
        timeout = self._context.settings.handshake_timeout_ms
        lane = self._context.new_lane(channel, dialer=False, lane=0, token=b"")
        try:
            peer = await lane.accept(Deadline.after_ms(timeout - channel.waited * 1000))
            await self._admit(peer, lane, route, door)
        except (LLMException, OSError, asyncio.TimeoutError) as error:
            self._context.counters.add("links_rejected")
            reason = str(error) or f"no greeting within {timeout} ms"
            self._context.log.warning("link.rejected", peer=channel.peer, reason=reason)
            lane.abort()
        except BaseException:
            lane.abort()
            raise

    async def _admit(self, peer: Peer, lane: Lane, route: Route, door: Door | None) -> None:
        allowed = self._context.settings.allowed_clusters
        if allowed is not None and peer.cluster_id not in allowed:  # it has proven its secret, and may hear why
            stranger = f"cluster {peer.cluster_id} is not among the allowed clusters"
            await lane.reject(LLMStatusCode.LLM_LINK_FAILED, stranger)
            raise LLMException(stranger, status_code=LLMStatusCode.LLM_LINK_FAILED)
        if peer.group or door is not None:
            refusal = self._refusal_at(door, peer)
            if refusal is not None:  # many a one tries several ports, again and again: that is not worth a warning
                self._context.log.debug("link.rejected", peer=lane.channel.peer, reason=refusal[1])
                await lane.reject(*refusal)
                lane.abort()
                return
        refusal = self._refusal(peer)
        if refusal is None and peer.lane == 0:
            refusal = self._halves.begin(peer, lane, route)
        elif refusal is None:
            whole = self._halves.complete(peer, lane)
            if isinstance(whole, Connection):
                self._install(whole, door)
            else:
                refusal = whole
        if refusal is None:
            return
        self._halves.drop(peer.token, refusal[1], of=peer)
        await lane.reject(*refusal)
        raise LLMException(refusal[1], status_code=refusal[0])

    def _refusal_at(self, door: Door | None, peer: Peer) -> Refusal | None:
        if door is None:
            return LLMStatusCode.LLM_LINK_FAILED, "no group meets at this port"
        ours = self._dialled.get(peer.cluster_id)
        known = [self._incoming.get(peer.process), ours if ours is not None and self._same(ours, peer) else None]
        ready = [link for link in known if link is not None and link.state is LinkState.READY and not link.leaving]
        return door.refusal(peer, ready[0] if ready else None)

    def _refusal(self, peer: Peer) -> Refusal | None:
        """Why a peer may not link now; None when it may."""
        if self._closed:
            return LLMStatusCode.LLM_ENGINE_FINALIZED, "this engine is being finalized"
        own = self._context.identity.incarnation
        ours = self._dialled.get(peer.cluster_id)
        if ours is not None and self._same(ours, peer) and ours.returns():
            return LLMStatusCode.LLM_ALREADY_LINK, "this side has dialled the same peer already"
        redialled = peer.process in self._incoming  # the peer restores what it had: that counts
        if peer.cluster_id in self._dialling and own > peer.incarnation and not redialled:
            return LLMStatusCode.LLM_ALREADY_LINK, "both sides dial at once; this side's connection counts"
        if peer.lane == 0:
            limit = self._context.settings.max_links
            full = len(self.all()) + len(self._halves) >= limit
            return (LLMStatusCode.LLM_LINK_FAILED, f"this engine has {limit} links already") if full else None
        return self._halves.refusal(peer)

    def _same(self, link: Link, peer: Peer) -> bool:
        """Whether the link goes to that very process, which is not this one."""
        known = link.peer.incarnation if link.peer is not None else b""
        return known == peer.incarnation != self._context.identity.incarnation

    def _install(self, connection: Connection, door: Door | None) -> None:
        peer = connection.peer
        for process, old in list(self._incoming.items()):
            other = old.cluster_id == peer.cluster_id and process != peer.process
            if other and old.state is not LinkState.READY:
                self.end(old, "the peer was restarted")  # a restarted peer replaces its dead link
        link = self._incoming.get(peer.process)
        if link is None:
            link = self._incoming[peer.process] = Link(self._context, peer.cluster_id, None)
        ours = self._dialled.get(peer.cluster_id)
        if ours is not None and self._same(ours, peer):
            self.users.add(link, *self.users.of(ours))
            self.end(ours, "the peer has dialled anew")
        link.adopt(connection)
        if door is None:
            self.users.add(link, ORDINARY)
        else:
            door.entered(link)
        self._changes.tell()

    # -- ending -----------------------------------------------------------------------------------------------------

    async def unlink(self, targets: list[Target], deadline: Deadline, *, force: bool) -> list[LLMStatusCode]:
        return await each(targets, lambda target: self._unlink(target, deadline, force=force))

    async def _unlink(self, target: Target, deadline: Deadline, *, force: bool) -> LLMStatusCode:
        link = self.find(target.cluster_id)
        if link is None:
            return self._codes.unknown_unlink
        why = f"cluster {target.cluster_id} was unlinked"
        error = LLMException(why, status_code=LLMStatusCode.LLM_NOT_YET_LINK, retry_safe=True)
        link.refuse(error)
        if force:
            await link.drain(deadline.sooner(self._context.settings.settle_timeout_ms / 1000))
            link.wave()
        else:
            try:
                await link.say_goodbye(deadline)
            except (LLMException, OSError, asyncio.TimeoutError) as raised:
                if self._stays(link):
                    known = connect_error(raised, str(target))
                    timed_out = isinstance(known, LLMTimeoutError)
                    status = self._codes.timeout if timed_out else self._codes.unreachable_unlink
                    return self._answers.stayed(target, f"could not be told to unlink: {known}", status)
            except BaseException:
                if not self._stays(link):
                    self.end(link, "this side has unlinked")
                raise
        self.forget(link)
        await link.close(error, Deadline.after_ms(self._context.settings.settle_timeout_ms))
        return LLMStatusCode.LLM_SUCCESS

    def _stays(self, link: Link) -> bool:
        """After a goodbye that was cut short: the link is used on, unless it has ended in that very moment."""
        if self._closed or link.state is LinkState.CLOSED:
            return False
        link.reopen()
        self._changes.tell()
        return True

    def forget(self, link: Link) -> None:
        if self._dialled.get(link.cluster_id) is link:
            del self._dialled[link.cluster_id]
        if link.peer is not None and self._incoming.get(link.peer.process) is link:
            del self._incoming[link.peer.process]
        users = self.users.of(link)
        self.users.forget(link)
        self.forgotten(link, users)
        self._changes.tell()

    def gone(self, link: Link) -> None:
        """The link ended from the peer's side, or was given up."""
        self.end(link, "the peer has gone")

    def end(self, link: Link, reason: str) -> None:
        self.forget(link)
        error = LLMException(reason, status_code=LLMStatusCode.LLM_NOT_YET_LINK, peer=link.peer_name, retry_safe=True)
        bound = Deadline.after_ms(self._context.settings.close_timeout_ms)
        task = asyncio.get_running_loop().create_task(link.close(error, bound), name="kvpull-close-link")
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)

    def refuse(self) -> None:
        """The engine ends: no link is made, accepted or restored any more, and no pull is begun."""
        self._closed = True
        for link in self.all():
            link.refuse(_finalized())
        self._changes.tell()

    async def close(self, deadline: Deadline) -> None:
        """Finalize: end every link, after its acknowledgements had a bounded chance to be heard."""
        self.refuse()
        self._halves.drop_all("this engine is being finalized")
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._close(link, deadline), name="kvpull-close-link") for link in self.all()]
        await absorb([*tasks, *self._closings], deadline)
        self._dialled.clear()
        self._incoming.clear()

    async def _close(self, link: Link, deadline: Deadline) -> None:
        await link.flush(deadline.sooner(0.5))
        link.wave(returns=link.address is None)  # who dials again by itself is left to find this node when it is back
        await link.close(_finalized(), deadline)

    def __repr__(self) -> str:
        return f"<Links dialled={len(self._dialled)} incoming={len(self._incoming)} half={len(self._halves)}>"


def _superseded() -> LLMException:
    return LLMException("the peer's own connection counts", status_code=LLMStatusCode.LLM_ALREADY_LINK, retry_safe=True)


def _finalized() -> LLMException:
    return LLMException("the engine was finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)
