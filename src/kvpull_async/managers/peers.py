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

__all__ = ["count_failure", "described", "link_to", "mismatch", "published"]


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


def mismatch(node: Node, report: Report, name: str, *, source: bytes, destination: bytes) -> LLMException:
    """Counts and logs bytes that are not those of the source, and returns the exception for the caller. An empty sum of
    the source is one that it could not make: neither counted nor logged.
    """
    if not source:
        why = "its cache was taken away meanwhile or cannot be read, or it had no thread for that"
        reason = f"the source made no {name} sum of its bytes: {why}"
        return LLMException(reason, status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, retry_safe=True)
    source_sum, found_sum = source.hex(), destination.hex() or "none"
    node.counters.add("verify_failed")
    node.log.warning(
        "verify.failed", operation=report.operation, pull_id=report.pull_id, cluster_id=report.cluster_id,
        peer=report.peer, path=report.path, sum=name, source=source_sum, destination=found_sum,
    )  # fmt: skip
    where = f"the destination at {report.peer}" if report.push else f"the destination, pulled from {report.peer},"
    reason = f"{where} holds wrong bytes: their {name} is {found_sum}, that of the source {source_sum}"
    return LLMException(reason, status_code=LLMStatusCode.LLM_FAILED, retry_safe=True)


def count_failure(node: Node, error: LLMException, *, push: bool) -> None:
    """One more pull or push has failed, and in which way."""
    if isinstance(error, LLMTimeoutError):
        node.counters.add("pushes_timed_out" if push else "pulls_timed_out")
        return
    node.counters.add("pushes_failed" if push else "pulls_failed")
    if _unreachable(error):
        node.counters.add("pushes_failed_link" if push else "pulls_failed_link")
    elif _missing(error):
        node.counters.add("pushes_failed_missing" if push else "pulls_failed_missing")
    else:
        node.counters.add("pushes_failed_other" if push else "pulls_failed_other")


def _unreachable(error: LLMException) -> bool:
    """Whether the way to the peer failed, or there is none."""
    return error.status_code in (LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_NOT_YET_LINK)


def _missing(error: LLMException) -> bool:
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
