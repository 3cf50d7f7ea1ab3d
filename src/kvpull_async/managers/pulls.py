"""A pull from its arguments to the link: what is checked here, what is asked of the source, where the bytes land.

It must not wait for anything but the link; how a pull runs and ends is the business of `kvpull_async.pull`.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async import plan
from kvpull_async._deadline import Deadline
from kvpull_async.managers import caches, checks
from kvpull_async.managers.checks import PullDraft, invalid
from kvpull_async.managers.dialect import Dialect
from kvpull_async.managers.landed import Landed
from kvpull_async.managers.node import Node
from kvpull_async.memory.base import FEW_TENSORS, Batches, Span, planned, watched
from kvpull_async.observe import PullReport, new_pull_id
from kvpull_async.protocol import frames
from kvpull_async.pull import Pull, Wanted
from kvpull_async.registry import Entry
from kvpull_async.standing import Offered
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.values import BlocksCacheKey, CacheKey

__all__ = ["Prepared", "draft", "prepare_blocks", "prepare_cache", "prepare_layers", "run"]

_TENSORS_LIMIT: Final = 2**32 - 1
"""Most tensors that a descriptor can have."""


@dataclass(slots=True)
class Prepared:
    """A checked pull with its deadline, ready to cross to the core; `landed` hears of its layers as they land."""

    draft: PullDraft
    deadline: Deadline
    report: PullReport
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
    )


def prepare_cache(dialect: Dialect, given: PullDraft) -> Prepared:
    """The checks that need no table, on the caller's thread. Raises the original's exceptions in its order."""
    _check_cache("pull_cache", dialect, given)
    return _prepared("pull_cache", given)


def prepare_layers(dialect: Dialect, given: PullDraft, landed: Landed) -> Callable[[], Prepared]:
    """The same checks now; the deadline counts from when the result is called."""
    _check_cache("pull_layers", dialect, given)

    def begun() -> Prepared:
        given.began = time.monotonic()
        return replace(_prepared("pull_layers", given), landed=landed)

    return begun


def _check_cache(operation: str, dialect: Dialect, given: PullDraft) -> None:
    if checks.plain(given):
        return
    checks.known_names(operation, given.options, checks.PULL_NAMES)
    for check in dialect.pull_checks:
        check(given)


def prepare_blocks(given: PullDraft, src_blocks: object, dst_blocks: object) -> Prepared:
    checks.known_names("pull_blocks", given.options, checks.BLOCKS_NAMES)
    checks.role(given)
    checks.block_keys(given)
    checks.cache_type(given)
    checks.block_lists(given, src_blocks, dst_blocks)
    checks.tensors_per_layer(given)
    checks.block_rules(given)
    checks.layer_ranges(given)
    checks.call_options(given)
    return _prepared("pull_blocks", given)


def _prepared(operation: str, given: PullDraft) -> Prepared:
    report = PullReport(operation, new_pull_id(), given.traceparent, given.key.cluster_id)
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
        raise _described(error, node, dialect, report) from error.__cause__
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
    wanted = _Blocks(given, entry) if blocks else _Entry(given, entry)
    if prepared.landed is not None:
        wanted.watch(prepared.landed)
    if given.remote_access and not entry.remote_accessible:
        raise invalid(f"with remote cache access on, the local cache {entry.cache_id} must be remote accessible too")
    link = node.find_link(given.key.cluster_id)
    if link is None:
        if given.key.cluster_id == node.settings.cluster_id:
            raise invalid(
                f"cluster {given.key.cluster_id} is this node itself, and no link to another of that id exists"
            )
        raise LLMException(
            f"no link to cluster {given.key.cluster_id}", status_code=LLMStatusCode.LLM_NOT_YET_LINK, retry_safe=True
        )
    await Pull(link, wanted.to_link(node, prepared)).run()


def _described(error: LLMException, node: Node, dialect: Dialect, report: PullReport) -> LLMException:
    if isinstance(error, LLMTimeoutError):
        node.counters.add("pulls_timed_out")
        described: LLMException = LLMTimeoutError(*error.args, status_code=dialect.timeout_status)
        described.retry_safe, described.destination_unsafe = error.retry_safe, error.destination_unsafe
    else:
        node.counters.add("pulls_failed")
        described = error
    described.peer = described.peer or report.peer or report.cluster_id
    described.operation = report.operation
    described.elapsed_ms = round(report.elapsed_ms, 3)
    return described


class _Destination:
    """What the two kinds of pull have in common: which tensors, and how many of them the source must have."""

    def __init__(self, given: PullDraft, entry: Entry) -> None:
        self.given = given
        self.entry = entry
        held, src, dst = entry.desc.num_tensors, given.src_tensors, given.dst_tensors
        if src is not None or dst is not None:
            self._whole_layers()
        if dst is not None and dst.stop > held:
            raise invalid(f"dst_layer_range reaches tensor {dst.stop - 1}, the destination has {held}")
        if src is not None and src.stop > _TENSORS_LIMIT:
            raise invalid(f"src_layer_range reaches tensor {src.stop - 1}, no cache has more than {_TENSORS_LIMIT}")
        self.tensors = range(held) if dst is None else dst
        if src is not None and len(src) != len(self.tensors):
            raise invalid(f"src_layer_range names {len(src)} tensors, the destination side {len(self.tensors)}")

    def _whole_layers(self) -> None:
        held, per_layer = self.entry.desc.num_tensors, self.given.per_layer
        if held % per_layer:
            raise invalid(f"tensor_num_per_layer {per_layer} does not divide the destination's {held} tensors")

    def watch(self, landed: Landed) -> None:
        """Let `landed` hear of layers as they land."""
        self._whole_layers()
        per_layer, tensors = self.given.per_layer, self.tensors
        layers = range(tensors.start // per_layer, tensors.stop // per_layer)
        landed.expect(layers, per_layer * self.per_tensor)
        self._landed = landed.bytes_landed

    def request(self, request_id: int, remaining_ms: int) -> frames.Request:
        given, key, report = self.given, self.given.key, self._report
        if isinstance(key, CacheKey):
            kind, identity = ("prefix", key.prefix_id) if key.is_prefix else ("request", key.req_id)
            model, entry = key.model_id, 0
        elif isinstance(key, BlocksCacheKey):
            kind, identity, model, entry = "blocks", 0, key.model_id, 0
        else:
            kind, identity, model, entry = "cache", key.cache_id, 0, key.batch_index
        size, blocks = self.asked()
        return frames.Request(
            request_id=request_id,
            pull_id=report.pull_id,
            traceparent=report.traceparent,
            remaining_ms=remaining_ms,
            key=kind,
            identity=identity,
            model_id=model,
            entry=entry,
            first_tensor=-1 if given.src_tensors is None else given.src_tensors.start,
            tensors=len(self.tensors),
            size=size,
            offset=given.src_offset,
            offset_pull=given.offset_pull,
            blocks=blocks,
            remote_access=given.remote_access,
            inline_limit=self._inline_limit,
        )

    def to_link(self, node: Node, prepared: Prepared) -> Wanted:
        self._node, self._report = node, prepared.report
        self._inline_limit = node.settings.inline_limit
        return Wanted(
            request=self.request,
            table=self.table(),
            at_most=len(self.tensors) * self.per_tensor,
            land=self.land,
            reading=self.reading,
            known=self.known,
            open_cache=self._open_cache(),
            span=self.span,
            entry=self.entry,
            deadline=prepared.deadline,
            report=prepared.report,
            pieces=self.pieces,
        )

    def pieces(self) -> list[memoryview] | None:
        """Where exactly the bytes of one tensor after the other land, if that can be said at once."""
        return None

    _landed: Callable[[int], None] | None = None
    per_tensor: int
    """The most bytes that may come for one tensor."""

    def asked(self) -> tuple[int, int]:
        """The size of the request and its number of blocks."""
        raise NotImplementedError

    def table(self) -> bytes:
        return b""

    def segments(self, per_tensor: int) -> NDArray[np.int64]:
        raise NotImplementedError

    def fits(self, per_tensor: int) -> bool:
        return per_tensor == self.per_tensor

    def _open_cache(self) -> int | None:
        given = self.given
        asks = self.entry.blocks or bool(given.traceparent)  # a report of reads has no place for traces
        return given.key.cache_id if given.remote_access and not asks else None

    def known(self, offered: Offered) -> frames.Grant | None:
        """What the source would grant of a cache whose layout is known; None for what it has to refuse by itself."""
        given, memory, size = self.given, offered.memory, offered.entry_nbytes
        src = range(len(self.tensors)) if given.src_tensors is None else given.src_tensors
        start = given.key.batch_index * size + given.src_offset
        inside = given.src_offset + self.per_tensor <= size and start + self.per_tensor <= memory.tensor_nbytes
        if not inside or src.stop > memory.tensors or (given.src_tensors is None and src.stop != memory.tensors):
            return None
        return frames.Grant(
            request_id=0,
            grant_id=secrets.token_bytes(16),
            tensors=len(src),
            per_tensor=self.per_tensor,
            inline=False,
            wants_done=False,
            ticket=offered.ticket,
            start=start,
        )

    def reading(self, grant: frames.Grant) -> Callable[[], NDArray[np.int64]]:
        """Which rows of the source's tensors the grant is for; the source has checked them against its cache."""
        src = self.given.src_tensors
        tensors = range(len(self.tensors)) if src is None else src
        if isinstance(self.given.key, BlocksCacheKey):
            return partial(plan.block_segments, tensors, self.given.src_blocks, block_nbytes=self.entry.entry_nbytes)
        return partial(plan.run_segments, tensors, start=grant.start, size=grant.per_tensor)

    def span(self, grant: frames.Grant) -> Span:
        most_rows = len(self.tensors) * max(1, self.given.dst_blocks.size)
        return Span(self.entry.regions, partial(self.segments, grant.per_tensor), self._landed, most_rows)

    def land(self, grant: frames.Grant) -> tuple[Batches, int]:
        if grant.tensors != len(self.tensors) or not self.fits(grant.per_tensor):
            raise LLMException(
                f"the source granted {grant.per_tensor} bytes of {grant.tensors} tensors, "
                f"{self.per_tensor} of {len(self.tensors)} were asked for",
                status_code=LLMStatusCode.LLM_FAILED,
            )
        backend, span = self._node.registry.backend, self.span(grant)
        landing = planned(span.rows, lambda rows: backend.landing(span.regions, rows))
        if span.landed is not None and backend.direct:
            landing = watched(landing, span.landed)
        return landing, grant.tensors * grant.per_tensor


class _Entry(_Destination):
    """Into one batch entry: `size` bytes of each tensor."""

    def __init__(self, given: PullDraft, entry: Entry) -> None:
        if entry.blocks:
            raise invalid(f"cache {entry.cache_id} is a blocks cache; use pull_blocks")
        if given.batch_index >= entry.desc.entries:
            raise invalid(f"batch_index {given.batch_index}: the destination has {entry.desc.entries} batch entries")
        stride, offset = entry.entry_nbytes, given.dst_offset
        self.per_tensor = stride - offset if given.size == -1 else given.size
        if self.per_tensor < 1 or offset + self.per_tensor > stride:
            raise invalid(f"{self.per_tensor} bytes from offset {offset} on do not fit an entry of {stride} bytes")
        super().__init__(given, entry)

    def asked(self) -> tuple[int, int]:
        return self.per_tensor, 0

    def pieces(self) -> list[memoryview] | None:
        given, entry, backend = self.given, self.entry, self._node.registry.backend
        if not backend.direct or len(self.tensors) > FEW_TENSORS or self._landed is not None:
            return None
        start = given.batch_index * entry.entry_nbytes + given.dst_offset
        return backend.slices(entry.regions, self.tensors, start=start, nbytes=self.per_tensor)

    def segments(self, per_tensor: int) -> NDArray[np.int64]:
        return plan.entry_segments(
            self.tensors,
            entry=self.given.batch_index,
            entry_nbytes=self.entry.entry_nbytes,
            offset=self.given.dst_offset,
            size=per_tensor,
        )


class _Blocks(_Destination):
    """Into blocks: from blocks of the same size, or from a contiguous entry cut into blocks."""

    def __init__(self, given: PullDraft, entry: Entry) -> None:
        if not entry.blocks:
            raise invalid(f"cache {entry.cache_id} is not a blocks cache; use pull_cache")
        highest = int(given.dst_blocks.max())
        if highest >= entry.desc.entries:
            raise invalid(f"dst_blocks holds {highest}, the destination has {entry.desc.entries} blocks")
        self.per_tensor = given.dst_blocks.size * entry.entry_nbytes
        super().__init__(given, entry)

    @property
    def _sliced(self) -> bool:
        return self.given.src_blocks.size == 0

    def asked(self) -> tuple[int, int]:
        return self.entry.entry_nbytes, self.given.dst_blocks.size if self._sliced else 0

    def table(self) -> bytes:
        return frames.encode_table(self.given.src_blocks)

    def fits(self, per_tensor: int) -> bool:
        if self._sliced:
            return self.per_tensor - self.entry.entry_nbytes < per_tensor <= self.per_tensor
        return per_tensor == self.per_tensor

    def segments(self, per_tensor: int) -> NDArray[np.int64]:
        blocks, size = self.given.dst_blocks, self.entry.entry_nbytes
        if self._sliced:
            return plan.slice_segments(self.tensors, blocks, block_nbytes=size, per_tensor=per_tensor)
        return plan.block_segments(self.tensors, blocks, block_nbytes=size)
