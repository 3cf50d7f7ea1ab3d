"""A pull from its arguments to the link: what is checked here, what is asked of the source, where the bytes land.

It must not wait for anything but the link; how a pull runs and ends is the business of `kvpull_async.pull`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from kvpull_async._deadline import Deadline
from kvpull_async._prompt import by_hand
from kvpull_async.managers import caches, checks, peers
from kvpull_async.managers.checks import PullDraft, invalid
from kvpull_async.managers.destinations import IntoBlocks, IntoEntry, key_of
from kvpull_async.managers.dialect import Dialect
from kvpull_async.managers.landed import Landed
from kvpull_async.managers.node import Node
from kvpull_async.observe import Report, new_pull_id
from kvpull_async.pull import Pull
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import BlocksCacheKey
from kvpull_async.values._check import require, type_error

__all__ = ["Prepared", "draft", "prepare_blocks", "prepare_cache", "prepare_layers", "run"]

_PAUSES: Final = (0.001, 0.1)
"""Seconds, doubled each time and at most, before a pull that was woken in vain asks again."""


@dataclass(slots=True)
class Prepared:
    """A checked pull with its deadline, ready to cross to the core; `landed` hears of its layers as they land."""

    draft: PullDraft
    deadline: Deadline
    report: Report
    landed: Landed | None = None


def draft(node: Node, dialect: Dialect, key: object, cache: object, options: dict[str, Any]) -> PullDraft:
    return PullDraft(
        key=key,
        cache=cache,
        batch_index=0,
        size=-1,
        options=options,
        role=node.role,
        decoder_only=dialect.decoder_pulls_only,
        remote_access=dialect.knows_remote_access and node.settings.remote_cache_access,
        default_timeout_ms=node.settings.sync_kv_timeout_ms,
        verify=node.settings.sum_name,
    )


def prepare_cache(dialect: Dialect, given: PullDraft) -> Prepared:
    """The checks that need no table, on the caller's thread. Raises the original's exceptions in its order."""
    _check_cache("pull_cache", dialect, given)
    return _prepared("pull_cache", given)


def prepare_layers(dialect: Dialect, given: PullDraft, landed: Landed) -> Callable[[], Prepared]:
    """The same checks now; the deadline counts from when the result is called. With blocks among the options it is
    blocks that are pulled.
    """
    checks.known_names("pull_layers", given.options, (*checks.PULL_NAMES, "src_blocks", "dst_blocks"))
    options = {**given.options}
    src_blocks, dst_blocks = options.pop("src_blocks", ()), options.pop("dst_blocks", None)
    if len(options) == len(given.options):
        _check_no_blocks(given)
        _check_cache("pull_layers", dialect, given)
    else:
        whole = not isinstance(given.batch_index, bool) and given.batch_index == 0 and given.size == -1
        require(whole, "batch_index and size are for batch entries, src_blocks and dst_blocks name whole blocks")
        given.options = options
        _check_blocks("pull_layers", given, src_blocks, dst_blocks)

    def begun() -> Prepared:
        given.began = time.monotonic()
        return replace(_prepared("pull_layers", given), landed=landed)

    return begun


def _check_no_blocks(given: PullDraft) -> None:
    hint = "; for blocks give dst_blocks= (and src_blocks= for a BlocksCacheKey)"
    if isinstance(given.key, BlocksCacheKey):
        raise type_error("cache_key", given.key, f"CacheKey or CacheKeyByIdAndIndex{hint}")
    require(not getattr(given.cache, "is_blocks_cache", False), f"cache is a blocks cache{hint}")


def _check_cache(operation: str, dialect: Dialect, given: PullDraft) -> None:
    if checks.plain(given):
        return
    checks.known_names(operation, given.options, checks.PULL_NAMES)
    for check in dialect.pull_checks:
        check(given)


def prepare_blocks(given: PullDraft, src_blocks: object, dst_blocks: object) -> Prepared:
    _check_blocks("pull_blocks", given, src_blocks, dst_blocks)
    return _prepared("pull_blocks", given)


def _check_blocks(operation: str, given: PullDraft, src_blocks: object, dst_blocks: object) -> None:
    checks.known_names(operation, given.options, checks.BLOCKS_NAMES)
    checks.role(given)
    checks.block_keys(given)
    checks.cache_type(given)
    checks.block_lists(given, src_blocks, dst_blocks)
    checks.tensors_per_layer(given)
    checks.block_rules(given)
    checks.layer_ranges(given)
    checks.call_options(given)


def _prepared(operation: str, given: PullDraft) -> Prepared:
    report = Report(operation, new_pull_id(), given.traceparent, given.key.cluster_id)
    report.key = partial(key_of, given.key)
    report.started = given.began  # checking the arguments spends the deadline too
    return Prepared(given, Deadline(given.began + given.timeout_ms / 1000), report)


async def run(node: Node, dialect: Dialect, prepared: Prepared) -> None:
    """The pull itself, on the core. LLMException with every field set; CancelledError once it has settled."""
    report = prepared.report
    node.counters.add("pulls_started")
    try:
        await _run(node, prepared)
        if prepared.landed is not None:
            prepared.landed.all_landed()
    except asyncio.CancelledError:
        node.counters.add("pulls_cancelled")
        raise
    except LLMException as error:
        peers.count_failure(node, error, push=False)
        raise peers.described(error, dialect, report) from error.__cause__
    finally:
        if prepared.landed is not None:
            report.ended = time.monotonic()
    node.counters.add("pulls_finished")
    node.counters.add("bytes_pulled", report.bytes)


async def _run(node: Node, prepared: Prepared) -> None:
    given = prepared.draft
    node.registry.drain_drops()
    entry = caches.held(node, given.cache)
    blocks = given.dst_blocks.size > 0
    wanted = IntoBlocks(given, entry) if blocks else IntoEntry(given, entry)
    if prepared.landed is not None:
        wanted.watch(prepared.landed)
    if given.remote_access and not entry.remote_accessible:
        raise invalid(f"with remote cache access on, the local cache {entry.cache_id} must be remote accessible too")
    link = peers.link_to(node, given.key.cluster_id)
    waits = 0
    while True:
        try:
            await Pull(link, wanted.to_link(node, prepared.report, prepared.deadline)).run()
            break
        except LLMException as error:
            if not (given.wait_for_key and entry.alive and _worth_waiting(error, woken=waits > 0)):
                raise
        await by_hand(None)  # from here on it needs a task
        watch, what = wanted.watch_for()
        prepared.report.enter("wait")
        try:
            if waits:  # it was there, and somebody else has used it up, or too many were woken at once
                await asyncio.sleep(min(_PAUSES[1], _PAUSES[0] * 2**waits, prepared.deadline.remaining))
            await peers.published(link, watch, prepared.deadline, what=what)
        finally:
            prepared.report.leave()
        waits += 1


def _worth_waiting(error: LLMException, *, woken: bool) -> bool:
    """Whether what was asked for may yet come, or for one of many that were woken at once: have its turn yet."""
    code = error.status_code
    return code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST or (woken and code == LLMStatusCode.LLM_LINK_BUSY)
