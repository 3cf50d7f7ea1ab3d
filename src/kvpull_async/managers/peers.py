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

__all__ = ["described", "differs", "link_to", "missing", "published", "unreachable"]


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


def differs(node: Node, report: Report, name: str, *, source: bytes, destination: bytes) -> LLMException:
    """The exception for bytes that are not those of the source, which is counted and told; an empty sum of the source
    is one that it could not make.
    """
    if not source:
        reason = f"the source made no {name} sum of its bytes: its cache was taken away meanwhile, or cannot be read"
        return LLMException(reason, status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, retry_safe=True)
    here, there = source.hex(), destination.hex() or "none"
    node.counters.add("verify_failed")
    node.log.warning(
        "verify.failed", operation=report.operation, pull_id=report.pull_id, cluster_id=report.cluster_id,
        peer=report.peer, path=report.path, sum=name, source=here, destination=there,
    )  # fmt: skip
    where = f"the destination at {report.peer}" if report.push else f"the destination, pulled from {report.peer},"
    reason = f"{where} holds wrong bytes: their {name} is {there}, that of the source {here}"
    return LLMException(reason, status_code=LLMStatusCode.LLM_FAILED, retry_safe=True)


def unreachable(error: LLMException) -> bool:
    """Whether the way to the peer failed, or there is none."""
    return error.status_code in (LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_NOT_YET_LINK)


def missing(error: LLMException) -> bool:
    """Whether what the call was about was not there, or no longer."""
    return bool(error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)


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
