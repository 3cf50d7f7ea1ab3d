"""Turns what a pull asks for (layers, batch entry, size, offsets, blocks) into rows of bytes to copy.

Pure arithmetic on numpy arrays: no I/O, no waiting, no memory access, and no Python loop over rows, since a paged cache
has tens of thousands of blocks. It knows tensor numbers and byte offsets only, never addresses, links or keys; the
caller knows the caches and says how large they are.

A *segment table* is an int64 array of shape (n, 3). Its columns are tensor index, byte offset in that tensor, and byte
length; the order of the rows is the order of the bytes in the stream. Building a table takes 24 bytes per row, so
callers check a layer range against the cache's tensor count before they build one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpull_async.status import LLMException, LLMStatusCode

__all__ = [
    "Pieces",
    "Segments",
    "block_pieces",
    "block_segments",
    "check_block_pairs",
    "check_bounds",
    "cut",
    "entry_segments",
    "layer_tensors",
    "merge",
    "pair",
    "run_segments",
    "shared_runs",
    "slice_segments",
    "total",
]

Segments = NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """The same pieces of each of some tensors: byte offsets and lengths within a tensor, in order."""

    tensors: range
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]


_UINT32_MAX = 2**32 - 1
_MOST_ROWS = 2**24
"""Pieces of one pull: 400 MB of table. A peer decides how many it asks for."""
_INT64_MAX = 2**63 - 1
_COUNTED = 64
"""Counting so many blocks for each one named is still faster than sorting those."""


def layer_tensors(name: str, value: range | None, *, tensors_per_layer: int) -> range | None:
    """The tensor indices that a layer range names, or None when it names all of them.

    LLM-DataDist documentation: layers are numbered from 0, step 1, and layer i owns the tensors from
    i * tensors_per_layer on. An empty range counts as not given.

    Args:
        name: the argument's name, for the message.
        value: a range of layers, or None.
        tensors_per_layer: at least 1; checked by the caller.

    Raises:
        TypeError: not a range.
        LLMException: LLM_PARAM_INVALID for a step other than 1 (also on an empty range) or a negative first layer.
        ValueError: the first or last layer is above 2**32 - 1.

    The result has no upper bound but that one: compare ``.stop`` with the cache's tensor count next.
    """
    if value is None:
        return None
    if not isinstance(value, range):
        raise TypeError(f"{name} must be a range or None, not {type(value).__name__}")
    if value.step != 1:
        raise _invalid(f"{name} must have step 1, not {value.step}")
    if not value:
        return None
    if value.start < 0:
        raise _invalid(f"{name} must not begin with a negative layer, but begins with {value.start}")
    if value.stop - 1 > _UINT32_MAX:
        raise ValueError(f"{name} must hold layers from 0 to {_UINT32_MAX}, but is {value}")
    return range(value.start * tensors_per_layer, value.stop * tensors_per_layer)


def entry_segments(tensors: range, *, entry: int, entry_nbytes: int, offset: int, size: int) -> Segments:
    """One row per tensor: ``size`` bytes from ``offset`` on, inside batch entry ``entry`` of ``entry_nbytes`` bytes.

    Raises LLMException with LLM_PARAM_INVALID when the bytes do not lie inside one entry, or are none; the next entry
    belongs to another request. Whether the cache has that entry is for ``check_bounds`` or the caller.
    """
    if offset < 0 or size < 1 or offset + size > entry_nbytes:
        raise _invalid(f"{size} bytes from offset {offset} on do not lie inside a batch entry of {entry_nbytes} bytes")
    if entry < 0:
        raise _invalid(f"batch entry {entry} does not exist")
    return run_segments(tensors, start=entry * entry_nbytes + offset, size=size)


def run_segments(tensors: range, *, start: int, size: int) -> Segments:
    """One row per tensor: ``size`` bytes from byte ``start`` of the tensor on."""
    _require_int64(start + size)
    return _for_each_tensor(tensors, np.array([start], dtype=np.int64), np.array([size], dtype=np.int64))


def block_segments(
    tensors: range,
    blocks: NDArray[np.int64],
    *,
    block_nbytes: int,
    runs: NDArray[np.intp] | None = None,
) -> Segments:
    """The given blocks of every tensor, in the given order, tensor after tensor.

    Consecutive block numbers share one row, so a table may hold far fewer rows than blocks; with ``runs`` (see
    ``shared_runs``) only where these say so. No blocks give no rows.
    Raises LLMException with LLM_PARAM_INVALID for a negative block; the upper end is for ``check_bounds``.
    """
    return _for_each_tensor(tensors, *_runs(blocks, block_nbytes, runs))


def block_pieces(tensors: range, blocks: NDArray[np.int64], *, block_nbytes: int, runs: NDArray[np.intp]) -> Pieces:
    """As ``block_segments``, without a row for each tensor."""
    return Pieces(tensors, *_runs(blocks, block_nbytes, runs))


def shared_runs(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.intp]:
    """Where, in two lists of blocks of one length, runs begin that are consecutive in both.

    Tables made with them are cut alike, so that ``pair`` has little to do.
    """
    begins = np.ones(one.size, dtype=np.bool_)
    begins[1:] = (np.diff(one) != 1) | (np.diff(other) != 1)
    return np.flatnonzero(begins)


def slice_segments(tensors: range, blocks: NDArray[np.int64], *, block_nbytes: int, per_tensor: int) -> Segments:
    """Where the first ``per_tensor`` bytes of a contiguous entry land: in the given blocks, one after the other.

    The last block is filled only as far as the bytes go. Differs from the original, which shortens it by a remainder of
    the whole tensor and so can cut a full block or read into the next entry.

    Raises LLMException with LLM_PARAM_INVALID unless every block gets at least one byte and all bytes find a place.
    """
    unused = blocks.size * block_nbytes - per_tensor
    if not blocks.size or not 0 <= unused < block_nbytes:
        raise _invalid(f"{per_tensor} bytes do not fill {blocks.size} blocks of {block_nbytes} bytes")
    offsets, lengths = _runs(blocks, block_nbytes)
    lengths[-1] -= unused
    return _for_each_tensor(tensors, offsets, lengths)


def merge(segments: Segments) -> Segments:
    """The same bytes in the same order with as few rows as possible: neighbours join, rows without bytes go.

    Only for tables that passed ``check_bounds``, or were built here: offsets near 2**63 would wrap.
    """
    rows = _with_bytes(segments)
    if not rows.size:
        return rows
    ends = rows[:, 1] + rows[:, 2]
    starts_row = np.ones(len(rows), dtype=np.bool_)
    starts_row[1:] = (rows[1:, 0] != rows[:-1, 0]) | (rows[1:, 1] != ends[:-1])
    first = np.flatnonzero(starts_row)
    merged = rows[first]
    merged[:, 2] = ends[np.append(first[1:], len(rows)) - 1] - merged[:, 1]
    return merged


def total(segments: Segments) -> int:
    """Bytes in a table, exact even where the sum leaves int64 (a table may come from a peer)."""
    lengths = segments[:, 2]
    return (int((lengths >> 32).sum()) << 32) + int((lengths & 0xFFFFFFFF).sum())


def pair(src: Segments, dst: Segments) -> NDArray[np.int64]:
    """Which bytes go where: rows of source tensor, source offset, destination tensor, destination offset, length.

    Both tables describe one stream, cut differently; the result is cut at every boundary of either, in stream order,
    and holds no empty row. Shape (m, 5) with m <= len(src) + len(dst).

    Raises ValueError when the tables do not hold the same number of bytes, or a length is negative.
    """
    if not _cut_alike(src, dst):
        _require_same_total(src, dst)
        src, dst = _with_bytes(src), _with_bytes(dst)
    if np.array_equal(src[:, 2], dst[:, 2]):
        return np.concatenate((src[:, :2], dst), axis=1)
    src_ends, dst_ends = np.cumsum(src[:, 2]), np.cumsum(dst[:, 2])
    ends = _union(src_ends, dst_ends)
    starts = np.zeros_like(ends)
    starts[1:] = ends[:-1]
    pairs = np.empty((len(ends), 5), dtype=np.int64)
    pairs[:, 0:2] = _locate(src, src_ends, starts)
    pairs[:, 2:4] = _locate(dst, dst_ends, starts)
    pairs[:, 4] = ends - starts
    return pairs


def cut(pairs: NDArray[np.int64], *, limit: int) -> NDArray[np.int64]:
    """The same rows of ``pair``, those of more than ``limit`` bytes cut into several."""
    lengths = pairs[:, 4]
    if not len(pairs) or int(lengths.max()) <= limit:
        return pairs
    pieces = -(-lengths // limit)
    rows = np.repeat(pairs, pieces, axis=0)
    done = (np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * limit
    rows[:, 1] += done
    rows[:, 3] += done
    rows[:, 4] = np.minimum(rows[:, 4] - done, limit)
    return rows


def check_bounds(segments: Segments, *, tensors: int, tensor_nbytes: int) -> None:
    """Raises ValueError unless every row has bytes, all inside one of ``tensors`` tensors of ``tensor_nbytes`` bytes.

    Safe for any int64 values, so a table that came from a peer may be given as it is.
    """
    if segments.ndim != 2 or segments.shape[1] != 3 or segments.dtype != np.int64:
        raise ValueError(f"a segment table is int64 of shape (n, 3), not {segments.dtype} of {segments.shape}")
    tensor, offset, length = segments.T
    nbytes = min(tensor_nbytes, _INT64_MAX)
    outside = (tensor < 0) | (tensor >= tensors) | (offset < 0) | (length < 1)
    outside |= offset > nbytes - length  # wraps for negative lengths only, and those are marked already
    if outside.any():
        index, start, size = segments[int(np.argmax(outside))].tolist()
        raise ValueError(
            f"{size} bytes from offset {start} on of tensor {index} are outside a cache of {tensors} tensors of"
            f" {tensor_nbytes} bytes"
        )


def check_block_pairs(src_blocks: NDArray[np.int64], dst_blocks: NDArray[np.int64]) -> None:
    """Raises LLMException with LLM_PARAM_INVALID for lists that no copy can be made from.

    Those are lists of different lengths, and two different source blocks for one destination block, which would then
    hold either. A pair given twice is harmless. Differs from the original, which leaves the second case open.
    """
    if src_blocks.size != dst_blocks.size:
        raise _invalid(f"{src_blocks.size} source blocks cannot go to {dst_blocks.size} destination blocks")
    if _all_different(dst_blocks):
        return
    order = np.argsort(dst_blocks, kind="stable")
    src, dst = src_blocks[order], dst_blocks[order]
    clash = np.flatnonzero((dst[1:] == dst[:-1]) & (src[1:] != src[:-1]))
    if clash.size:
        at = int(clash[0])
        raise _invalid(f"source blocks {src[at]} and {src[at + 1]} both go to destination block {dst[at]}")


def _all_different(blocks: NDArray[np.int64]) -> bool:
    """Whether that can be told without sorting them, as it mostly can; False says nothing."""
    if not blocks.size or int(blocks.min()) < 0 or int(blocks.max()) > _COUNTED * blocks.size:
        return False
    return int(np.bincount(blocks).max()) == 1


def _runs(
    blocks: NDArray[np.int64], block_nbytes: int, first: NDArray[np.intp] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Byte offsets and byte lengths of the runs of consecutive blocks; ``first`` says where they begin, if known."""
    if block_nbytes < 1:
        raise _invalid(f"a block of {block_nbytes} bytes cannot be pulled")
    if not blocks.size:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    if blocks.min() < 0:
        raise _invalid(f"block {blocks.min()} does not exist")
    _require_int64((int(blocks.max()) + 1) * block_nbytes)
    if first is None:  # the prepended number never continues a run
        first = np.flatnonzero(np.diff(blocks, prepend=blocks[0] - 2) != 1)
    return blocks[first] * block_nbytes, np.diff(first, append=blocks.size) * block_nbytes


def _for_each_tensor(tensors: range, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> Segments:
    if len(tensors) * len(offsets) > _MOST_ROWS:
        raise _invalid(f"{len(tensors)} tensors x {len(offsets)} runs of blocks are more than {_MOST_ROWS} pieces")
    rows = np.empty((len(tensors), len(offsets), 3), dtype=np.int64)
    rows[:, :, 0] = np.arange(tensors.start, tensors.stop, tensors.step, dtype=np.int64)[:, np.newaxis]
    rows[:, :, 1] = offsets
    rows[:, :, 2] = lengths
    return rows.reshape(-1, 3)


def _with_bytes(segments: Segments) -> Segments:
    keep = segments[:, 2] != 0
    return segments if keep.all() else segments[keep]


def _union(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """The values of two ascending arrays, each once."""
    both = np.concatenate((one, other))
    both.sort(kind="stable")  # merges the two halves in linear time; np.union1d took 40 times as long
    keep = np.ones(len(both), dtype=np.bool_)
    keep[1:] = both[1:] != both[:-1]
    return both[keep]


def _locate(rows: Segments, ends: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tensor index and byte offset of each stream position; ``ends`` are the stream positions where the rows end."""
    at = np.searchsorted(ends, positions, side="right")
    found = rows[at, :2]
    found[:, 1] += positions - (ends[at] - rows[at, 2])
    return found


def _cut_alike(src: Segments, dst: Segments) -> bool:
    """Whether nothing is wrong with two tables and nothing has to be done, as is mostly so. False says nothing."""
    lengths = dst[:, 2]
    few = 0 < len(src) == len(dst) and len(src) * int(lengths.max()) <= _INT64_MAX
    return few and int(lengths.min()) > 0 and np.array_equal(src[:, 2], lengths)


def _require_same_total(src: Segments, dst: Segments) -> None:
    if (src[:, 2] < 0).any() or (dst[:, 2] < 0).any():
        raise ValueError("a segment has a negative length")
    if total(src) != total(dst):
        raise ValueError(f"the source gives {total(src)} bytes, but the destination takes {total(dst)}")
    if total(src) > _INT64_MAX:
        raise ValueError(f"{total(src)} bytes are more than one plan can hold")


def _require_int64(end: int) -> None:
    if end > _INT64_MAX:
        raise _invalid(f"no cache reaches to byte {end}")


def _invalid(message: str) -> LLMException:
    return LLMException(message, status_code=LLMStatusCode.LLM_PARAM_INVALID)
