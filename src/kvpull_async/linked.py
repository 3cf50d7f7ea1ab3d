"""What links are asked for and what is answered, who uses them, and who waits for them: targets, codes, answers, doors,
users, changes. It must not make or end a link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

import anyio

from kvpull_async._deadline import Deadline
from kvpull_async.halves import Refusal
from kvpull_async.link import Link
from kvpull_async.linkage import LinkState
from kvpull_async.observe import Counters, Log
from kvpull_async.protocol.session import Peer
from kvpull_async.status import LLMStatusCode
from kvpull_async.transport.base import Address

__all__ = ["ORDINARY", "Answers", "Changes", "Codes", "Door", "Target", "Users", "each"]

ORDINARY: Final = 0
"""The user of a link that `link_clusters` made, on whichever side. Comms are users by their ids, which begin at 1."""


@dataclass(frozen=True)
class Codes:
    """What the two modes answer differently."""

    timeout: LLMStatusCode
    repeated: LLMStatusCode
    unknown_unlink: LLMStatusCode
    unreachable_unlink: LLMStatusCode
    linked_by_peer: LLMStatusCode = LLMStatusCode.LLM_ALREADY_LINK
    """For a cluster that has dialled this side."""


@dataclass(frozen=True)
class Target:
    """A remote cluster as a caller named it; `address` is None when it was not given exactly one."""

    cluster_id: int
    address: Address | None

    def __str__(self) -> str:
        return "no address" if self.address is None else f"{self.address[0]}:{self.address[1]}"

    @property
    def described(self) -> str:
        """For a message that must say which one it is about."""
        return f"cluster {self.cluster_id}{f' at {self}' if self.address is not None else ''}"


class Answers:
    """Tells the log and the counters what a caller is answered for a cluster, when it is not plain success."""

    def __init__(self, log: Log, counters: Counters) -> None:
        self._log = log
        self._counters = counters
        self.reasons: dict[int, str] = {}
        """Of the last such answer for each cluster."""

    def failed(self, target: Target, reason: str, status: LLMStatusCode) -> LLMStatusCode:
        """It could not be linked."""
        self._counters.add("links_failed")
        log = self._noted(target, reason, status)
        log.warning("link.failed")
        return status

    def already(self, target: Target, reason: str, status: LLMStatusCode) -> LLMStatusCode:
        """It is linked, or about to be, without this call."""
        log = self._noted(target, reason, status)
        log.info("link.already")
        return status

    def stayed(self, target: Target, reason: str, status: LLMStatusCode) -> LLMStatusCode:
        """It could not be unlinked."""
        self._counters.add("unlinks_failed")
        log = self._noted(target, reason, status)
        log.warning("link.unlink_failed")
        return status

    def _noted(self, target: Target, reason: str, status: LLMStatusCode) -> Log:
        self.reasons[target.cluster_id] = reason
        return self._log.bind(cluster_id=target.cluster_id, peer=str(target), status=status.name, reason=reason)


class Door(Protocol):
    """Where peers of one group come in, instead of at the ordinary listener."""

    def refusal(self, peer: Peer, held: Link | None) -> Refusal | None:
        """Why it may not come in. `held` is the READY link to it, if there is one."""
        ...

    def entered(self, link: Link) -> None:
        """It has come in."""
        ...


class Users:
    """Who needs each link."""

    def __init__(self) -> None:
        self._of: dict[Link, set[int]] = {}

    def add(self, link: Link, *users: int) -> None:
        self._of.setdefault(link, set()).update(users)

    def of(self, *links: Link | None) -> set[int]:
        """Those of all these links."""
        return {user for link in links if link is not None for user in self._of.get(link, ())}

    def link(self, user: int, cluster_id: int) -> Link | None:
        """The one by which it reaches a cluster."""
        found = [link for link, users in self._of.items() if link.cluster_id == cluster_id and user in users]
        return max(found, key=lambda link: link.state is LinkState.READY, default=None)

    def drop(self, link: Link, user: int) -> bool:
        """It needs the link no more; whether anybody does."""
        users = self._of.get(link, set())
        users.discard(user)
        return bool(users)

    def forget(self, link: Link) -> None:
        self._of.pop(link, None)

    def __repr__(self) -> str:
        return f"<Users links={len(self._of)}>"


class Changes:
    """Wakes those who wait for a link to come or to go, or to stay after all."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    async def next(self, deadline: Deadline) -> None:
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(change)
        try:
            await asyncio.wait([change], timeout=deadline.remaining)
        finally:
            self._waiting.discard(change)

    def tell(self) -> None:
        for change in self._waiting:
            if not change.done():
                change.set_result(None)

    def __repr__(self) -> str:
        return f"<Changes waiting={len(self._waiting)}>"


async def each(targets: list[Target], one: Callable[[Target], Awaitable[LLMStatusCode]]) -> list[LLMStatusCode]:
    """The codes of all targets, in order, asked for at once."""
    codes = [LLMStatusCode.LLM_FAILED] * len(targets)

    async def run(index: int) -> None:
        codes[index] = await one(targets[index])

    async with anyio.create_task_group() as group:
        for index in range(len(targets)):
            group.start_soon(run, index)
    return codes
