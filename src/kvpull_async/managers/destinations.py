"""Where a pull's bytes land, and what of the source they are: one batch entry, or blocks. It must not wait.

The arguments are checked here against the destination; what the source holds is checked there.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async import offers, plan
from kvpull_async._deadline import Deadline
from kvpull_async.managers import peers
from kvpull_async.managers.checks import PullDraft, invalid
from kvpull_async.managers.landed import Landed
from kvpull_async.managers.node import Node
from kvpull_async.memory.base import FEW_TENSORS, Batches, Span, Until, planned
from kvpull_async.observe import Report, key_text
from kvpull_async.protocol import frames
from kvpull_async.pull import Verifying, Wanted
from kvpull_async.registry import Entry, describe
from kvpull_async.standing import Offered
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex

__all__ = ["IntoBlocks", "IntoEntry", "key_of"]

_TENSORS_LIMIT: Final = 2**32 - 1
"""Most tensors that a descriptor can have."""


_Key = CacheKey | BlocksCacheKey | CacheKeyByIdAndIndex


def _named(key: _Key) -> tuple[str, int, int, int]:
    """The key as requests say it: kind, identity, model, batch entry."""
    if isinstance(key, CacheKey):
        kind, identity = ("prefix", key.prefix_id) if key.is_prefix else ("request", key.req_id)
        return kind, identity, key.model_id, 0
    if isinstance(key, BlocksCacheKey):
        return "blocks", 0, key.model_id, 0
    return "cache", key.cache_id, 0, key.batch_index


def key_of(key: _Key) -> str:
    """As events name it."""
    return key_text(*_named(key))


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
        self.tensors: range = range(held) if dst is None else dst
        if src is not None and len(src) != len(self.tensors):
            raise invalid(f"src_layer_range names {len(src)} tensors, the destination side {len(self.tensors)}")

    def _whole_layers(self) -> None:
        held, per_layer = self.entry.desc.num_tensors, self.given.per_layer
        if held % per_layer:
            raise invalid(f"tensor_num_per_layer {per_layer} does not divide the destination's {held} tensors")

    def watch(self, landed: Landed) -> None:
        """Let `landed` hear of layers as they land, or all at once where they are verified first."""
        self._whole_layers()
        self._layers, self._landed = landed, None if self.given.verify else landed.bytes_landed

    def watch_for(self) -> tuple[Callable[[int], frames.Watch], str]:
        """What is missing at the source: to ask for it, and in words."""
        kind, identity, model, entry = _named(self.given.key)
        words = {"cache": f"cache {identity} with batch entry {entry}", "blocks": f"a blocks cache of model {model}"}
        what = words.get(kind) or describe((kind, identity, model))
        return lambda number: frames.Watch(number, kind, identity, model, entry), what

    def request(self, request_id: int, remaining_ms: int) -> frames.Request:
        given, report = self.given, self._report
        kind, identity, model, entry = _named(given.key)
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
            layout=self._layout() if given.strict_layout else None,
            waits=given.wait_for_key,
            verify=given.verify,
        )

    def _layout(self) -> tuple[int, list[int]]:
        """Data type and shape of one entry; slices of a contiguous entry have another shape than it."""
        dtype, shape = offers.layout_of(self.entry.desc)
        sliced = self.entry.blocks and not isinstance(self.given.key, BlocksCacheKey)
        return dtype, [] if sliced else shape

    def to_link(self, node: Node, report: Report, deadline: Deadline) -> Wanted:
        self._node, self._report = node, report
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
            deadline=deadline,
            report=report,
            pieces=self.pieces,
            verifying=Verifying(given.verify, self._lend, self._differs) if (given := self.given).verify else None,
        )

    def _lend(self, grant: frames.Grant, until: Until) -> Batches:
        backend, span = self._node.registry.backend, self.span(grant, until)
        return planned(span.rows, lambda rows: backend.lending(span.regions, rows, until=until))

    def _differs(self, source: bytes, here: bytes) -> LLMException:
        """The source's sum of the bytes is another one."""
        return peers.mismatch(self._node, self._report, self.given.verify, source=source, destination=here)

    def pieces(self) -> list[memoryview] | None:
        """Where exactly the bytes of one tensor after the other land, if that can be said at once."""
        return None

    _layers: Landed | None = None
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

    def alike(self) -> Callable[[], tuple[plan.Pieces, plan.Pieces]] | None:
        """For a path that reads by itself: the same pieces of all tensors, on both sides."""
        return None

    def fits(self, per_tensor: int) -> bool:
        return per_tensor == self.per_tensor

    def _open_cache(self) -> int | None:
        given = self.given
        asks = self.entry.blocks or bool(given.traceparent) or given.strict_layout  # reports have no place for these
        asks = asks or bool(given.verify)  # the sum comes from the source
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

    def span(self, grant: frames.Grant, until: Until) -> Span:
        most_rows = len(self.tensors) * max(1, self.given.dst_blocks.size)
        rows = partial(self.segments, grant.per_tensor)
        return Span(self.entry.regions, rows, self.entry.direct, self._landed, most_rows, self.alike(), until)

    def land(self, grant: frames.Grant, span: Span) -> tuple[Batches, int]:
        if grant.tensors != len(self.tensors) or not self.fits(grant.per_tensor):
            raise LLMException(
                f"the source granted {grant.per_tensor} bytes of {grant.tensors} tensors, "
                f"{self.per_tensor} of {len(self.tensors)} were asked for",
                status_code=LLMStatusCode.LLM_FAILED,
            )
        if self._layers is not None:
            tensors, each = self.tensors, self.given.per_layer
            self._layers.expect(range(tensors.start // each, tensors.stop // each), each * grant.per_tensor)
        backend, until = self._node.registry.backend, span.until
        landing = planned(span.rows, lambda rows: backend.landing(span.regions, rows, until=until, landed=span.landed))
        return landing, grant.tensors * grant.per_tensor


class IntoEntry(_Destination):
    """Into one batch entry: `size` bytes of each tensor."""

    def __init__(self, given: PullDraft, entry: Entry) -> None:
        if entry.blocks:
            raise invalid(f"cache {entry.cache_id} is a blocks cache; use pull_blocks")
        if given.batch_index >= entry.desc.entries:
            raise invalid(f"batch_index {given.batch_index}: the destination has {entry.desc.entries} batch entries")
        stride, offset = entry.entry_nbytes, given.dst_offset
        self.per_tensor: int = stride - offset if given.size == -1 else given.size
        if self.per_tensor < 1 or offset + self.per_tensor > stride:
            raise invalid(f"{self.per_tensor} bytes from offset {offset} on do not fit an entry of {stride} bytes")
        super().__init__(given, entry)

    def asked(self) -> tuple[int, int]:
        return self.per_tensor, 0

    def pieces(self) -> list[memoryview] | None:
        given, entry, backend = self.given, self.entry, self._node.registry.backend
        if not entry.direct or len(self.tensors) > FEW_TENSORS or self._layers is not None:
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


class IntoBlocks(_Destination):
    """Into blocks: from blocks of the same size, or from a contiguous entry cut into blocks."""

    def __init__(self, given: PullDraft, entry: Entry) -> None:
        if not entry.blocks:
            raise invalid(f"cache {entry.cache_id} is not a blocks cache; use pull_cache")
        highest = int(given.dst_blocks.max())
        if highest >= entry.desc.entries:
            raise invalid(f"dst_blocks holds {highest}, the destination has {entry.desc.entries} blocks")
        self.per_tensor: int = given.dst_blocks.size * entry.entry_nbytes
        super().__init__(given, entry)

    def alike(self) -> Callable[[], tuple[plan.Pieces, plan.Pieces]] | None:
        return None if self._sliced else self._pieces

    def _pieces(self) -> tuple[plan.Pieces, plan.Pieces]:
        given, size = self.given, self.entry.entry_nbytes
        runs = plan.shared_runs(given.src_blocks, given.dst_blocks)
        src = range(len(self.tensors)) if given.src_tensors is None else given.src_tensors
        return (
            plan.block_pieces(src, given.src_blocks, block_nbytes=size, runs=runs),
            plan.block_pieces(self.tensors, given.dst_blocks, block_nbytes=size, runs=runs),
        )

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
