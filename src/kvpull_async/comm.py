"""One comm: a group of ranks that meet, the door where its members come in, and the search for the others. It must not
open or close listeners, nor end a link.

Each pair of a comm is linked once, also when several comms have it, or `link_clusters` has made the link; who else
uses it stands in `Links.users`. Used by the core's loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final

from kvpull_async._deadline import NEVER, Deadline
from kvpull_async.config.rank_table import Gathering, Member
from kvpull_async.dialling import acknowledged
from kvpull_async.halves import Refusal
from kvpull_async.link import Link
from kvpull_async.linkage import LinkContext, LinkState, connect_error
from kvpull_async.linked import Target
from kvpull_async.links import Links
from kvpull_async.protocol.session import Peer
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import Listener
from kvpull_async.values import RegisterMemStatus
from kvpull_async.values._check import require

__all__ = ["Comm"]

_PAUSES: Final = (0.02, 0.08)
"""Seconds between the first two attempts to find a peer, and at most between later ones."""
_GROWTH: Final = 1.2
_NEARBY: Final = 1.0
"""Seconds that a member is looked for on this machine only, if that is where the table has it: other addresses take
time when they lead nowhere.
"""
OK, PREPARING, FAILED = RegisterMemStatus.OK, RegisterMemStatus.PREPARING, RegisterMemStatus.FAILED


@dataclass
class _Pair:
    """This node and another member."""

    met: bool = False
    left: bytes = b""
    """The incarnation that has unlinked since; only another one, or a new comm, links again."""


class Comm:
    """One `link()`. It is a door: members of higher rank come in there."""

    def __init__(
        self, comm_id: int, wanted: Gathering, links: Links, context: LinkContext, leave: Callable[[Link], None]
    ) -> None:
        """`leave` ends a link that this comm was the last to use."""
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
        self._leave = leave
        self._log = context.log.bind(comm_id=comm_id, comm_name=wanted.name)
        self._began = time.monotonic()
        self._patience = context.settings.meeting_ms / 1000
        self._deadline = NEVER
        """Of the meeting, once that has begun."""
        self._expiry: asyncio.TimerHandle | None = None

    def start(self, context: LinkContext) -> None:
        """Begin to look for members of lower rank."""
        loop = asyncio.get_running_loop()
        self._began, self._deadline = time.monotonic(), Deadline.after_ms(self._patience * 1000)
        where = [f"{host}:{port}" for host, port in (listener.address for listener in self.listeners)]
        self._log.info("comm.linking", clusters=_text(self.pairs), addresses=_text(sorted(set(where))))
        for member in self.wanted.dials:
            self.tasks.append(loop.create_task(self._find(member, context), name="kvpull-comm"))
        self._expiry = loop.call_later(self._deadline.remaining, self._expire)
        self._complete()  # they may have come in already

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
            return OK
        return PREPARING if time.monotonic() - link.lost_at < self._patience else FAILED

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
        while not (self.over or self._deadline.expired):
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
        """None when it is about to be linked in another way, or unlinked."""
        assert target.address is not None
        held = self._links.find(target.cluster_id)
        if held is not None and held.leaving:
            return None
        if held is not None and held.state is LinkState.READY:
            return await self._share(held, acknowledged(meeting, target.cluster_id, target.address, deadline))
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

    async def _share(self, held: Link, asking: Coroutine[Any, Any, None]) -> Link | None:
        """Use a link that exists, if the peer says so. It is this comm's from the question on, as it is the peer's from
        the answer on: others may leave it meanwhile.
        """
        self._links.users.add(held, self.comm_id)
        try:
            await asking
        except BaseException:
            if self.comm_id in self._links.users.of(held) and not self._links.users.drop(held, self.comm_id):
                self._leave(held)
            raise
        return held if held in self._links.all() else None

    def refusal(self, peer: Peer, held: Link | None) -> Refusal | None:
        """As a door. One without paths only asks whether this side, too, counts the link that exists as the comm's."""
        expected = {member.cluster_id for member in self.wanted.awaits}
        if peer.group != self.wanted.group or peer.cluster_id not in expected:
            return LLMStatusCode.LLM_LINK_FAILED, "it is no member of the group that meets at this port"
        known = self._links.users.link(self.comm_id, peer.cluster_id)
        back = self.over and any(link.peer and link.peer.process == peer.process for link in self.needed())
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
        self._met(link)

    def _met(self, link: Link) -> None:
        if self.over:
            return
        pair = self.pairs[link.cluster_id]
        pair.met, pair.left = True, b""
        self._links.users.add(link, self.comm_id)
        self._complete()

    def _complete(self) -> None:
        if self._expiry is not None and all(pair.met for pair in self.pairs.values()):
            self._expiry.cancel()
            self._expiry = None
            elapsed = round((time.monotonic() - self._began) * 1000, 3)
            self._log.info("comm.ready", clusters=_text(self.pairs), elapsed_ms=elapsed)

    def lost(self, link: Link) -> None:
        """A link of it has ended."""
        if not self.pairs[link.cluster_id].met:
            return  # it was only asked about
        parted = link.state is LinkState.READY
        if parted and link.peer is not None and not self._here(link.cluster_id):
            self.pairs[link.cluster_id].left = link.peer.incarnation
        unlinked = parted or link.state is LinkState.CLOSED  # by the peer, or with a goodbye that it has answered
        asyncio.get_running_loop().call_soon(self._missed, link, unlinked)  # unless a new one takes its place at once

    def _missed(self, link: Link, unlinked: bool) -> None:
        if self.over or self._here(link.cluster_id):
            return
        clusters = _text([link.cluster_id])
        if unlinked:
            self._log.info("comm.failed", clusters=clusters, reason=f"the link to {link.peer_name} was unlinked")
        else:
            self._log.warning("comm.failed", clusters=clusters, reason=f"the link to {link.peer_name} has ended")

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
        if self._deadline is not NEVER:
            self._log.info("comm.closed", clusters=_text(self.pairs))

    def __repr__(self) -> str:
        return f"<Comm {self.comm_id} {self.wanted.name!r} {self.status().name}>"


def _text(items: Iterable[object]) -> str:
    return " ".join(map(str, items))
