"""What pulls and pushes have in common on their way to a peer: its link, and how their errors are told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvpull_async._deadline import Deadline
from kvpull_async.link import Link
from kvpull_async.linkage import lost_with
from kvpull_async.managers.checks import invalid
from kvpull_async.managers.dialect import Dialect
from kvpull_async.managers.node import Node
from kvpull_async.observe import Report
from kvpull_async.protocol import frames
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError

__all__ = ["described", "link_to", "published"]


def link_to(node: Node, cluster_id: int) -> Link:
    """LLM_NOT_YET_LINK when there is none; LLM_PARAM_INVALID for this node's own id."""
    link = node.find_link(cluster_id)
    if link is not None:
        return link
    if cluster_id == node.settings.cluster_id:
        raise invalid(f"cluster {cluster_id} is this node itself, and no link to another of that id exists")
    raise LLMException(f"no link to cluster {cluster_id}", status_code=LLMStatusCode.LLM_NOT_YET_LINK, retry_safe=True)


async def published(link: Link, watch: Callable[[int], frames.Watch], deadline: Deadline, *, what: str) -> None:
    """Wait, outside the link's queue, until the peer has what the watch names. The link may be lost and come back.

    LLMTimeoutError, which says `what` was waited for, when the deadline comes first.
    """
    try:
        async with deadline.scope():
            while not await _appeared(link, watch, deadline):
                pass
    except asyncio.TimeoutError as error:
        reason = f"the deadline passed while {what} had not been published"
        raise LLMTimeoutError(reason, retry_safe=True, peer=link.peer_name) from error


async def _appeared(link: Link, watch: Callable[[int], frames.Watch], deadline: Deadline) -> bool:
    """False when the connection was lost meanwhile."""
    lane, named = await link.ready(deadline), watch(0)
    try:
        await lane.appeared(named, watch)
    except LLMException as error:
        if error.status_code == LLMStatusCode.LLM_LINK_BUSY:
            raise
        if not await lost_with(lane, deadline):
            raise
        return False
    return True


def described(error: LLMException, dialect: Dialect, report: Report) -> LLMException:
    """The error with every field set, a timeout with the status of its manager."""
    known = error
    if isinstance(error, LLMTimeoutError):
        known = LLMTimeoutError(*error.args, status_code=dialect.timeout_status)
        known.retry_safe, known.destination_unsafe = error.retry_safe, error.destination_unsafe
    known.peer = known.peer or report.peer or report.cluster_id
    known.operation = report.operation
    known.elapsed_ms = round(report.elapsed_ms, 3)
    return known
