"""Keys kept for longer, or given up: here, or at the peer that holds them. It must not wait for anything but the link.

What may be done with a key is decided where it is, by `kvpull_async.leasing`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvpull_async import leasing
from kvpull_async._deadline import Deadline
from kvpull_async.link import Link
from kvpull_async.linkage import connect_error, lost_with
from kvpull_async.managers import checks, peers
from kvpull_async.managers.dialect import Dialect
from kvpull_async.managers.node import Node
from kvpull_async.observe import Report, new_pull_id
from kvpull_async.protocol import frames
from kvpull_async.registry import key_id
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError, status_of, worth_repeating
from kvpull_async.values import CacheKey, CacheKeyByIdAndIndex
from kvpull_async.values._check import instance, integer, require

__all__ = ["Asked", "asked", "lease_ms", "run"]

_LONGEST: Final = 2**31 - 1


@dataclass(frozen=True)
class Asked:
    """A checked call. `lease` is in ms, 0 gives the key up."""

    key: CacheKey
    lease: int
    deadline: Deadline
    report: Report


def lease_ms(lease: object) -> int:
    """TypeError, ValueError."""
    return integer("lease", lease, low=1, high=_LONGEST)


def asked(node: Node, operation: str, key: object, lease: int, timeout: object) -> Asked:
    """The checks of a call that need no table, on the caller's thread."""
    require(not isinstance(key, CacheKeyByIdAndIndex), "cache_key names a cache by its id, which has no lease")
    known = instance("cache_key", key, CacheKey)
    require(not known.is_padding, "cache_key names nothing: neither req_id nor prefix_id is set")
    default = node.settings.sync_kv_timeout_ms
    patience = default if timeout is None else checks.timeout_ms("timeout", timeout)
    report = Report(operation, new_pull_id(), cluster_id=known.cluster_id)
    return Asked(known, lease, Deadline.after_ms(patience), report)


async def run(node: Node, dialect: Dialect, given: Asked) -> None:
    """On the core. LLMException with every field set."""
    name, peer = key_id(given.key), given.key.cluster_id
    try:
        if peer == node.settings.cluster_id and node.find_link(peer) is None:
            if given.lease:
                leasing.renew(node.registry, name, given.lease / 1000)
            else:
                leasing.give_up(node.registry, name)
        else:
            await _at_peer(peers.link_to(node, peer), given)
    except LLMException as error:
        raise peers.described(error, dialect, given.report) from error.__cause__


async def _at_peer(link: Link, given: Asked) -> None:
    """One round trip, beside the queue of pulls; again, if the connection is lost before anything was said."""
    kind, number, model = key_id(given.key)
    words = partial(_words, pull_id=given.report.pull_id, key=kind, identity=number, model_id=model, lease=given.lease)
    try:
        async with given.deadline.scope(), link.key_turns:
            while (result := await _answer(link, words, given.deadline)) is None:
                pass
    except asyncio.TimeoutError as error:
        reason = f"{link.peer_name} did not answer in time; it may have done what was asked"
        raise LLMTimeoutError(reason, retry_safe=True, peer=link.peer_name) from error
    except OSError as error:
        raise connect_error(error, link.peer_name) from error
    status = status_of(result.status)
    if status is not LLMStatusCode.LLM_SUCCESS:
        again = worth_repeating(status)
        raise LLMException(result.reason, status_code=status, peer=link.peer_name, retry_safe=again)


async def _answer(link: Link, words: partial[frames.Lease], deadline: Deadline) -> frames.Result | None:
    """None when the connection was lost before anything was said: it has to be made anew. OSError when only a part of
    it has broken.
    """
    lane = await link.ready(deadline)
    request_id, data, result = lane.lease(words)
    try:
        await lane.channel.send(data)
        return await result
    except OSError:
        if not await lost_with(lane, deadline):
            raise
        return None
    finally:
        lane.give_up(request_id, tell=False)


def _words(request_id: int, *, pull_id: str, key: str, identity: int, model_id: int, lease: int) -> frames.Lease:
    return frames.Lease(request_id, pull_id, key, identity, model_id, 0, lease)
