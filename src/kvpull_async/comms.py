"""The comms of an engine: groups of ranks that meet where a rank table says. It must not know tables, or how links
live.

Each pair of a comm is linked once, also when several comms have it, or `link_clusters` has made the link; who else
uses it stands in `Links.users`. Used by the core's loop only.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from kvpull_async._deadline import Deadline, absorb
from kvpull_async.config.rank_table import Gathering, Member
from kvpull_async.config.settings import SAFEGUARDS
from kvpull_async.dialling import acknowledged
from kvpull_async.halves import Refusal
from kvpull_async.link import Link
from kvpull_async.linkage import LinkContext, LinkState, Route, connect_error
from kvpull_async.linked import Target
from kvpull_async.links import Links
from kvpull_async.listening import close_all, listen
from kvpull_async.protocol.session import Peer
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import Listener, OnChannel
from kvpull_async.values import RegisterMemStatus
from kvpull_async.values._check import require

__all__ = ["Comms"]

_PAUSES: Final = (0.02, 0.25)
"""Seconds between the first two attempts to find a peer, and at most between later ones."""
_GROWTH: Final = 1.2
_NEARBY: Final = 1.0
"""Seconds that a member is looked for on this machine only, if that is where the table has it: other addresses take
time when they lead nowhere.
"""
_GOODBYE: Final = 1.0
"""Seconds that a peer may take to answer the goodbye of a link that nobody uses any more."""
_STOPPING: Final = 1.0
"""Seconds that tasks may take to end once they have been cancelled."""
OK, PREPARING, FAILED = RegisterMemStatus.OK, RegisterMemStatus.PREPARING, RegisterMemStatus.FAILED


@dataclass
class _Pair:
    """This node and another member."""

    met: bool = False
    left: bytes = b""
    """The incarnation that has unlinked since; only another one, or a new comm, links again."""
    lost_at: float | None = None


class _Comm:
    """One `link()`. It is a door: members of higher rank come in there."""

    def __init__(self, comm_id: int, wanted: Gathering, links: Links, context: LinkContext) -> None:
        self.comm_id: int = comm_id
        self.wanted: Gathering = wanted
        self.pairs: dict[int, _Pair] = {cluster_id: _Pair() for cluster_id in wanted.members}
        self.listeners: list[Listener] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.troubles: dict[int, str] = {}
        self.came: set[Link] = set()
        """The links that came in here."""
        self.over: bool = False
        self._links = links
        self._log = context.log.bind(comm_id=comm_id, comm_name=wanted.name)
        self._began = time.monotonic()
        self._patience = context.settings.meeting_ms / 1000
        self._deadline = Deadline.after_ms(context.settings.meeting_ms)
        self._expiry: asyncio.TimerHandle | None = None

    def start(self, context: LinkContext) -> None:
        """Begin to look for members of lower rank."""
        loop = asyncio.get_running_loop()
        where = [f"{host}:{port}" for host, port in (listener.address for listener in self.listeners)]
        self._log.info("comm.linking", clusters=_text(self.pairs), addresses=_text(sorted(set(where))))
        for member in self.wanted.dials:
            self.tasks.append(loop.create_task(self._find(member, context), name="kvpull-comm"))
        self._expiry = loop.call_later(self._deadline.remaining, self._expire)

    # -- how it stands ----------------------------------------------------------------------------------------------

    def status(self) -> RegisterMemStatus:
        states = {self._state(cluster_id, pair) for cluster_id, pair in self.pairs.items()}
        return FAILED if FAILED in states else PREPARING if PREPARING in states else OK

    def _state(self, cluster_id: int, pair: _Pair) -> RegisterMemStatus:
        if self.over:
            return FAILED
        link = self._links.users.link(self.comm_id, cluster_id)
        if not pair.met:
            return FAILED if self._deadline.expired else PREPARING
        if link is None:
            return FAILED
        if link.state is LinkState.READY:
            pair.lost_at = None
            return OK
        pair.lost_at = pair.lost_at or time.monotonic()
        return PREPARING if time.monotonic() - pair.lost_at < self._patience else FAILED

    def _expire(self) -> None:
        missing = [cluster_id for cluster_id, pair in self.pairs.items() if not pair.met]
        why = "; ".join(f"cluster {one}: {self.troubles.get(one, 'it did not come')}" for one in missing)
        self._log.warning("comm.failed", clusters=_text(missing), reason=f"not met within {self._patience:g} s: {why}")

    # -- meeting ----------------------------------------------------------------------------------------------------

    async def _find(self, member: Member, context: LinkContext) -> None:
        """Look for a member of lower rank until it is there; what it says meanwhile is kept for the log."""
        pause, handshake = _PAUSES[0], context.settings.handshake_timeout_ms / 1000
        near = [address for address in member.addresses if address[0].startswith("127.")] or member.addresses
        nearby, everywhere = (
            (context.meeting(self.wanted.group, addresses), Target(member.cluster_id, addresses[0]))
            for addresses in (near, member.addresses)
        )
        while not self._deadline.expired:
            meeting, target = nearby if time.monotonic() - self._began < _NEARBY else everywhere
            try:
                link = await self._meet(meeting, target, self._deadline.sooner(handshake))
            except (LLMException, OSError, asyncio.TimeoutError) as error:
                self.troubles[member.cluster_id] = str(connect_error(error, str(target)))
            else:
                if link is not None:
                    self._met(link)
                    return
            await asyncio.sleep(min(pause, self._deadline.remaining))
            pause = min(pause * _GROWTH, _PAUSES[1])

    async def _meet(self, meeting: LinkContext, target: Target, deadline: Deadline) -> Link | None:
        """None when it is about to be linked in another way."""
        assert target.address is not None
        held = self._links.find(target.cluster_id)
        if held is not None and held.state is LinkState.READY:
            await acknowledged(meeting, target.cluster_id, target.address, deadline)
            return held if held in self._links.all() else None
        most = meeting.settings.max_links
        room = held is not None or len(self._links.all()) < most
        require(room, f"this engine has {most} links already", status_code=LLMStatusCode.LLM_LINK_FAILED)
        with self._links.only(target.cluster_id) as free:
            if not free:
                return None
            link = Link(meeting, target.cluster_id, target.address)
            await link.connect(deadline)
            await self._links.take(link)
        return link if self._links.find(target.cluster_id) is link else None

    def refusal(self, peer: Peer, held: Link | None) -> Refusal | None:
        """As a door. One without paths only asks whether this side, too, counts the link that exists as the comm's."""
        expected = {member.cluster_id for member in self.wanted.awaits}
        if peer.group != self.wanted.group or peer.cluster_id not in expected:
            return LLMStatusCode.LLM_LINK_FAILED, "it is no member of the group that meets at this port"
        known = self._links.users.link(self.comm_id, peer.cluster_id)
        back = self.over and any(link.peer and link.peer.incarnation == peer.incarnation for link in self.needed())
        if back:
            return None
        if self.over or peer.incarnation == self.pairs[peer.cluster_id].left:
            return LLMStatusCode.LLM_LINK_FAILED, "the comm was unlinked, and not linked again yet"
        if known is not None and known is not held and known.state is LinkState.READY:
            return LLMStatusCode.LLM_LINK_FAILED, "another process of that cluster is in the comm"
        if peer.paths or peer.lane:
            return None
        if held is None:
            return LLMStatusCode.LLM_LINK_FAILED, "there is no link yet"
        self._met(held)
        return LLMStatusCode.LLM_ALREADY_LINK, "the link that exists is the comm's, too"

    def needed(self) -> set[Link]:
        """Links that came in here and live."""
        return self.came.intersection(self._links.all())

    def entered(self, link: Link) -> None:
        self.came = self.needed() | {link}
        if not self.over:
            self._met(link)

    def _met(self, link: Link) -> None:
        pair = self.pairs[link.cluster_id]
        pair.met, pair.left = True, b""
        self._links.users.add(link, self.comm_id)
        if self._expiry is not None and all(pair.met for pair in self.pairs.values()):
            self._expiry.cancel()
            self._expiry = None
            elapsed = round((time.monotonic() - self._began) * 1000, 3)
            self._log.info("comm.ready", clusters=_text(self.pairs), elapsed_ms=elapsed)

    def lost(self, link: Link) -> None:
        """A link of it has ended."""
        if link.state is LinkState.READY and link.peer is not None and not self._here(link.cluster_id):
            self.pairs[link.cluster_id].left = link.peer.incarnation
        asyncio.get_running_loop().call_soon(self._missed, link)  # unless a new one takes its place at once

    def _missed(self, link: Link) -> None:
        if not self.over and not self._here(link.cluster_id):
            self._log.warning(
                "comm.failed", clusters=_text([link.cluster_id]), reason=f"the link to {link.peer_name} has ended"
            )

    def _here(self, cluster_id: int) -> bool:
        return self._links.users.link(self.comm_id, cluster_id) is not None

    # -- ending -----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        if self.over:
            return
        self.over = True
        if self._expiry is not None:
            self._expiry.cancel()
        for task in self.tasks:
            task.cancel()
        self._log.info("comm.closed", clusters=_text(self.pairs))

    def __repr__(self) -> str:
        return f"<Comm {self.comm_id} {self.wanted.name!r} {self.status().name}>"


@dataclass
class Comms:
    """All of them, by id: those that were linked and not unlinked since."""

    links: Links
    context: LinkContext
    _comms: dict[int, _Comm] = field(default_factory=dict)
    _ended: set[_Comm] = field(default_factory=set)
    """Their listeners stay, for links that came in there and are used on."""
    _closings: set[asyncio.Task[None]] = field(default_factory=set)
    _last: int = 0

    def __post_init__(self) -> None:
        self.links.forgotten = self._forgotten

    # -- the three calls --------------------------------------------------------------------------------------------

    async def link(self, wanted: Gathering) -> int:
        """Begin, and give the comm's id. LLM_PARAM_INVALID when no address of this node can be listened on."""
        most = self.context.settings.max_comms
        require(len(self._comms) < most, f"{most} comms exist", status_code=LLMStatusCode.LLM_LINK_FAILED)
        former = next((comm for comm in self._comms.values() if comm.wanted.group == wanted.group), None)
        if former is not None:
            failed = former.status() is FAILED  # and given up, then
            already = f"comm {former.comm_id} is {wanted.name!r} with these ranks"
            require(failed, already, status_code=LLMStatusCode.LLM_ALREADY_LINK)
            await self._end(former)
        for member in wanted.dials:
            if not member.hosts:
                raise _nowhere(member, {})
        self._last += 1
        comm = _Comm(self._last, wanted, self.links, self.context)
        await self._listen(comm)
        self._comms[comm.comm_id] = comm
        comm.start(self.context)
        return comm.comm_id

    async def unlink(self, comm_id: int) -> None:
        comm = self._find(comm_id)
        del self._comms[comm_id]
        await self._end(comm)

    def take_back(self, comm_id: int) -> None:
        """As `unlink`, without waiting: nobody has heard of the comm."""
        if comm_id in self._comms:
            self._aside(self.unlink(comm_id))

    async def status(self, comm_id: int) -> RegisterMemStatus:
        return self._find(comm_id).status()

    def _find(self, comm_id: int) -> _Comm:
        comm = self._comms.get(comm_id)
        if comm is None:
            raise LLMException(f"there is no comm {comm_id}", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        return comm

    # -- listening --------------------------------------------------------------------------------------------------

    async def _listen(self, comm: _Comm) -> None:
        """On one port of each host where a member may look. Each member needs one."""
        against: dict[str, str] = {}
        try:
            for host in dict.fromkeys(host for member in comm.wanted.awaits for host in member.hosts):
                if reason := await self._open(comm, host):
                    against[host] = reason
            for member in comm.wanted.awaits:
                if all(host in against for host in member.hosts):
                    raise _nowhere(member, against)
        except BaseException:
            await close_all(comm.listeners)
            raise

    async def _open(self, comm: _Comm, host: str) -> str:
        """Why it is not possible to listen there; "" when it is."""
        if not self.context.settings.may_listen_on(host):
            return f"it is beyond this machine, which needs one of: {SAFEGUARDS}"
        reason = ""
        for port in comm.wanted.ports:
            try:
                comm.listeners += await listen(self.context.routes, (host, port), partial(_acceptor, self.links, comm))
            except OSError as error:
                reason = str(error)
                if error.errno != errno.EADDRINUSE:
                    break
            else:
                return ""
        return reason

    # -- ending -----------------------------------------------------------------------------------------------------

    async def _end(self, comm: _Comm) -> None:
        """And the links that only it uses. Its listeners stay while others use a link that came in there: more
        connections of such a link may come.
        """
        comm.end()
        self._ended.add(comm)
        links = [self.links.users.link(comm.comm_id, cluster_id) for cluster_id in comm.pairs]
        try:
            leaving = self._aside(*(self._leave(link, comm.comm_id) for link in links if link is not None))
            if leaving:
                await asyncio.wait(leaving)  # a caller who is cancelled leaves them to go on
            await absorb(comm.tasks, Deadline.after_ms(_STOPPING * 1000))
        finally:
            await self._sweep()

    async def _leave(self, link: Link, comm_id: int) -> None:
        if self.links.users.drop(link, comm_id) or link not in self.links.all():
            return
        error = LLMException("this side has unlinked", status_code=LLMStatusCode.LLM_NOT_YET_LINK, retry_safe=True)
        settling = Deadline.after_ms(self.context.settings.settle_timeout_ms)
        link.refuse(error)
        try:
            await link.drain(settling)
            await link.say_goodbye(Deadline.after_ms(_GOODBYE * 1000))
        except (LLMException, OSError, asyncio.TimeoutError):
            link.wave()  # whatever is in the way, the peer has been told
        self.links.forget(link)
        await link.close(error, Deadline.after_ms(self.context.settings.settle_timeout_ms))

    async def _sweep(self) -> None:
        """Close what ended comms have open still and nobody needs any more."""
        for comm in [comm for comm in self._ended if not comm.needed()]:
            self._ended.discard(comm)
            await close_all(comm.listeners)

    def _forgotten(self, link: Link, users: set[int]) -> None:
        for comm in [self._comms[user] for user in users if user in self._comms]:
            comm.lost(link)
        if any(link in comm.came for comm in self._ended):
            self._aside(self._sweep())

    def _aside(self, *steps: Coroutine[Any, Any, None]) -> set[asyncio.Task[None]]:
        tasks = {asyncio.get_running_loop().create_task(step, name="kvpull-comm") for step in steps}
        self._closings.update(tasks)
        for task in tasks:
            task.add_done_callback(self._closings.discard)
        return tasks

    async def close(self, deadline: Deadline) -> None:
        """Finalize: nobody is looked for or let in any more. The links are left to `Links.close`."""
        comms = [*self._comms.values(), *self._ended]
        self._comms.clear()
        self._ended.clear()
        for comm in comms:
            comm.end()
            await close_all(comm.listeners)
        await absorb([*self._closings, *(task for comm in comms for task in comm.tasks)], deadline)

    def __repr__(self) -> str:
        return f"<Comms {list(self._comms.values())!r}>"


def _text(items: Iterable[object]) -> str:
    return " ".join(map(str, items))


def _acceptor(links: Links, comm: _Comm, route: Route) -> OnChannel:
    return lambda channel: links.accept(route, channel, comm)


def _nowhere(member: Member, against: dict[str, str]) -> LLMException:
    why = "; ".join(f"{host}: {against[host]}" for host in member.hosts) or "the rank table has no IPv4 address"
    return LLMException(
        f"this node cannot meet cluster {member.cluster_id}: {why}. kvpull.RankHosts (KVPULL_RANK_HOSTS) says "
        "which addresses to use for those of the rank table, kvpull.RankPortBase (KVPULL_RANK_PORT_BASE) which ports",
        status_code=LLMStatusCode.LLM_PARAM_INVALID,
    )
