"""The comms of an engine, by id: beginning them, listening for their members, ending them with what only they use. It
must not know tables, or how members meet.

Used by the core's loop only.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from kvpull_async._deadline import Deadline, absorb
from kvpull_async.comm import Comm
from kvpull_async.config.rank_table import Gathering, Member
from kvpull_async.config.settings import SAFEGUARDS
from kvpull_async.link import Link
from kvpull_async.linkage import LinkContext, Route
from kvpull_async.links import Links
from kvpull_async.listening import close_all, is_here, listen
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import OnChannel
from kvpull_async.values import RegisterMemStatus
from kvpull_async.values._check import require

__all__ = ["Comms"]

_GOODBYE: Final = 1.0
"""Seconds that a peer may take to answer the goodbye of a link that nobody uses any more."""
_STOPPING: Final = 1.0
"""Seconds that tasks may take to end once they have been cancelled."""


@dataclass
class Comms:
    """All of them, by id: those that were linked and not unlinked since."""

    links: Links
    context: LinkContext
    _comms: dict[int, Comm] = field(default_factory=dict)
    _ended: set[Comm] = field(default_factory=set)
    """Their listeners stay, for links that came in there and are used on."""
    _closings: set[asyncio.Task[None]] = field(default_factory=set)
    _last: int = 0
    _closed: bool = False

    def __post_init__(self) -> None:
        self.links.forgotten = self._forgotten

    # -- the three calls --------------------------------------------------------------------------------------------

    async def link(self, wanted: Gathering) -> int:
        """Begin, and give the comm's id. LLM_PARAM_INVALID when no address of this node can be listened on."""
        require(not self._closed, "the engine was finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)
        former = next((comm for comm in self._living() if comm.wanted.group == wanted.group), None)
        if former is not None:
            failed = former.status() is RegisterMemStatus.FAILED  # and given up, then
            already = f"comm {former.comm_id} is {wanted.name!r} with these ranks"
            require(failed, already, status_code=LLMStatusCode.LLM_ALREADY_LINK)
        most = self.context.settings.max_comms
        room = sum(comm is not former for comm in self._living()) < most
        require(room, f"{most} comms exist", status_code=LLMStatusCode.LLM_LINK_FAILED)
        for member in wanted.dials:
            if not member.hosts:
                raise _nowhere(member, {})
        self._last += 1
        comm = Comm(self._last, wanted, self.links, self.context, partial(self._leave_aside, self._last))
        self._comms[comm.comm_id] = comm  # before anything is waited for: the group has one
        try:
            await self._begin(comm, former)
        except BaseException:
            self._comms.pop(comm.comm_id, None)
            await self._end(comm)
            raise
        return comm.comm_id

    def _living(self) -> list[Comm]:
        """Those that were not given up."""
        return [comm for comm in self._comms.values() if not comm.over]

    async def _begin(self, comm: Comm, former: Comm | None) -> None:
        if former is not None:
            await self._end(former)
            given_up = [one.comm_id for one in self._comms.values() if one.over]
            for comm_id in given_up[: -self.context.settings.max_comms]:
                del self._comms[comm_id]
        await self._listen(comm)
        if comm.over:
            gone = LLMStatusCode.LLM_ENGINE_FINALIZED if self._closed else LLMStatusCode.LLM_NOT_YET_LINK
            raise LLMException(f"comm {comm.comm_id} was ended before it began", status_code=gone)
        comm.start(self.context)

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

    def _find(self, comm_id: int) -> Comm:
        comm = self._comms.get(comm_id)
        if comm is None:
            raise LLMException(f"there is no comm {comm_id}", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        return comm

    # -- listening --------------------------------------------------------------------------------------------------

    async def _listen(self, comm: Comm) -> None:
        """On one port of each host where a member may look. Each member needs one."""
        against: dict[str, str] = {}
        for host in dict.fromkeys(host for member in comm.wanted.awaits for host in member.hosts):
            if reason := await self._open(comm, host):
                against[host] = reason
        for member in comm.wanted.awaits:
            if all(host in against for host in member.hosts):
                raise _nowhere(member, against)

    async def _open(self, comm: Comm, host: str) -> str:
        """Why it is not possible to listen there; "" when it is."""
        if not is_here(host):
            return "it is no address of this machine"
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

    async def _end(self, comm: Comm) -> None:
        """And the links that only it uses. Its listeners stay while others use a link that came in there: more
        connections of such a link may come.
        """
        comm.end()
        self._ended.add(comm)
        self._keep(comm.tasks)
        links = [self.links.users.link(comm.comm_id, cluster_id) for cluster_id in comm.pairs]
        try:
            leaving = self._aside(*(self._leave(link, comm.comm_id) for link in links if link is not None))
            if leaving:
                await asyncio.wait(leaving)  # a caller who is cancelled leaves them to go on
            if comm.tasks:
                await asyncio.wait(comm.tasks, timeout=_STOPPING)
        finally:
            await self._sweep()

    def _leave_aside(self, comm_id: int, link: Link) -> None:
        self._aside(self._leave(link, comm_id))

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
        self._keep(tasks)
        return tasks

    def _keep(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        """For `close` to wait for."""
        for task in tasks:
            self._closings.add(task)
            task.add_done_callback(self._closings.discard)

    async def close(self, deadline: Deadline) -> None:
        """Finalize: nobody is looked for or let in any more. The links are left to `Links.close`."""
        self._closed = True
        comms = [*self._comms.values(), *self._ended]
        self._comms.clear()
        self._ended.clear()
        for comm in comms:
            comm.end()
            await close_all(comm.listeners)
        await absorb([*self._closings, *(task for comm in comms for task in comm.tasks)], deadline)

    def __repr__(self) -> str:
        return f"<Comms {list(self._comms.values())!r}>"


def _acceptor(links: Links, comm: Comm, route: Route) -> OnChannel:
    return lambda channel: links.accept(route, channel, comm)


def _nowhere(member: Member, against: dict[str, str]) -> LLMException:
    why = "; ".join(f"{host}: {against[host]}" for host in member.hosts) or "the rank table has no IPv4 address"
    return LLMException(
        f"this node cannot meet cluster {member.cluster_id}: {why}. kvpull.RankHosts (KVPULL_RANK_HOSTS) says "
        "which addresses to use for those of the rank table, kvpull.RankPortBase (KVPULL_RANK_PORT_BASE) which ports",
        status_code=LLMStatusCode.LLM_PARAM_INVALID,
    )
