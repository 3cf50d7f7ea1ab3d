"""A second opinion on what a pull does: one byte at a time, in plain Python, slow on purpose.

It shares no code with the library and must not import any of it, numpy included: two implementations that agree are
evidence only while they are independent. It says which bytes the destination holds afterwards, or which errors are
right. It knows nothing of links, keys or time; the caller says to which batch entry a key leads.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod
from typing import Any

ELEMENT_NBYTES = {
    "DT_INT8": 1,
    "DT_UINT8": 1,
    "DT_BOOL": 1,
    "DT_FLOAT16": 2,
    "DT_BF16": 2,
    "DT_FLOAT": 4,
    "DT_INT64": 8,
    "DT_DOUBLE": 8,
    "DT_STRING": 16,
}

WRONG_TYPE = "TypeError"
WRONG_VALUE = "ValueError"
INVALID = "LLM_PARAM_INVALID"
NOT_THERE = "LLM_KV_CACHE_NOT_EXIST"


@dataclass(frozen=True)
class Descriptor:
    """What a CacheDesc says, with the data type by name. `blocks`: the first dimension counts blocks, not entries."""

    num_tensors: int
    shape: tuple[int, ...]
    data_type: str = "DT_INT8"
    blocks: bool = False

    @property
    def tensor_nbytes(self) -> int:
        return prod(self.shape) * ELEMENT_NBYTES[self.data_type]

    @property
    def entries(self) -> int:
        return self.shape[0]

    @property
    def entry_nbytes(self) -> int:
        """Bytes of one batch entry, or of one block, in one tensor."""
        return self.tensor_nbytes // self.shape[0]


@dataclass(frozen=True)
class CacheModel:
    """A cache: its descriptor and one bytearray per tensor."""

    descriptor: Descriptor
    tensors: list[bytearray]


@dataclass(frozen=True)
class PullArguments:
    """The arguments of one pull, right or wrong. With `dst_blocks` it is a pull_blocks, without it a pull_cache.

    `src_entry` is the batch entry that the key leads to; one that the source does not have can only be named by cache
    id and index. The source's kind decides the kind of key: a blocks cache is pulled by its BlocksCacheKey. Fields are
    typed Any because a test gives wrong types too.
    """

    src_entry: int = 0
    batch_index: Any = 0
    size: Any = -1
    src_layer_range: Any = None
    dst_layer_range: Any = None
    tensor_num_per_layer: Any = 2
    src_cache_offset: Any = None
    dst_cache_offset: Any = None
    src_blocks: Any = ()
    dst_blocks: Any = None

    @property
    def is_blocks(self) -> bool:
        return self.dst_blocks is not None


@dataclass(frozen=True)
class Refused:
    """The pull must fail with one of these, and change nothing: exception class names or status names.

    More than one when several arguments are wrong; which of them is reported is a matter of the order of the checks.
    """

    kinds: frozenset[str]


def expected(source: CacheModel, destination: CacheModel, arguments: PullArguments) -> list[bytearray] | Refused:
    """The destination's tensors after the pull, or how it fails. Changes nothing it was given."""
    faults = _argument_faults(arguments) | _kind_faults(source.descriptor, destination.descriptor, arguments)
    if not faults:
        faults = _cache_faults(source.descriptor, destination.descriptor, arguments)
    if faults:
        return Refused(frozenset(faults))
    after = [bytearray(tensor) for tensor in destination.tensors]
    pairs = _tensor_pairs(source.descriptor, destination.descriptor, arguments)
    moves = _byte_moves(source.descriptor, destination.descriptor, arguments)
    for src_tensor, dst_tensor in pairs:
        for src_at, dst_at in moves:
            after[dst_tensor][dst_at] = source.tensors[src_tensor][src_at]
    return after


# --- what the arguments alone give away ---


def _argument_faults(arguments: PullArguments) -> set[str]:
    faults = _integer_faults(arguments.tensor_num_per_layer, low=0, high=2**32 - 1)
    if not faults and arguments.tensor_num_per_layer == 0:
        faults.add(INVALID)
    faults |= _range_faults(arguments.src_layer_range) | _range_faults(arguments.dst_layer_range)
    if arguments.is_blocks:
        return faults | _block_list_faults(arguments)
    faults |= _integer_faults(arguments.batch_index, low=0, high=2**32 - 1)
    size_faults = _integer_faults(arguments.size, low=-(2**63), high=2**63 - 1)
    if not size_faults and arguments.size != -1 and arguments.size <= 0:
        size_faults.add(INVALID)
    faults |= size_faults
    for offset in (arguments.src_cache_offset, arguments.dst_cache_offset):
        if offset is not None:
            faults |= _integer_faults(offset, low=0, high=2**63 - 1)
    return faults


def _integer_faults(value: Any, *, low: int, high: int) -> set[str]:
    if not _is_integer(value):
        return {WRONG_TYPE}
    return set() if low <= operator.index(value) <= high else {WRONG_VALUE}


def _is_integer(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__")


def _range_faults(value: Any) -> set[str]:
    if value is None:
        return set()
    if not isinstance(value, range):
        return {WRONG_TYPE}
    if value.step != 1:
        return {INVALID}
    if value.start >= value.stop:
        return set()
    faults = set()
    if value[0] < 0:
        faults.add(INVALID)
    if value[-1] > 2**32 - 1:
        faults.add(WRONG_VALUE)
    return faults


def _block_list_faults(arguments: PullArguments) -> set[str]:
    faults: set[str] = set()
    for blocks in (arguments.src_blocks, arguments.dst_blocks):
        if not isinstance(blocks, (list, tuple)) or not all(_is_integer(block) for block in blocks):
            faults.add(WRONG_TYPE)
        elif any(block < 0 for block in blocks):
            faults |= {WRONG_VALUE, INVALID}  # the original's own answer is not known for certain
    if not faults and len(arguments.dst_blocks) == 0:
        faults.add(INVALID)
    return faults


# --- what shows before any cache is looked at: the handle's and the key's kind, and which blocks go together ---


def _kind_faults(source: Descriptor, destination: Descriptor, arguments: PullArguments) -> set[str]:
    if arguments.is_blocks != destination.blocks:
        return {INVALID}
    if not arguments.is_blocks or _block_list_faults(arguments):
        return set()
    src_blocks, dst_blocks = arguments.src_blocks, arguments.dst_blocks
    if bool(src_blocks) != source.blocks:
        return {INVALID}
    if not source.blocks:
        src_blocks = range(len(dst_blocks))  # the entry's slices, each of them once
    came_from: dict[int, int] = {}
    one_each = all(came_from.setdefault(dst, src) == src for src, dst in zip(src_blocks, dst_blocks, strict=False))
    return set() if one_each and len(src_blocks) == len(dst_blocks) else {INVALID}


# --- what the arguments say about these two caches ---


def _cache_faults(source: Descriptor, destination: Descriptor, arguments: PullArguments) -> set[str]:
    faults = _layer_faults(source, destination, arguments)
    if arguments.is_blocks:
        faults |= _block_faults(source, destination, arguments)
    else:
        faults |= _entry_faults(source, destination, arguments)
    return faults


def _layer_faults(source: Descriptor, destination: Descriptor, arguments: PullArguments) -> set[str]:
    src_given, dst_given = bool(arguments.src_layer_range), bool(arguments.dst_layer_range)
    per_layer = operator.index(arguments.tensor_num_per_layer)
    if (src_given or dst_given) and destination.num_tensors % per_layer != 0:
        return {INVALID}
    src_first, src_count = _tensor_span(source, arguments.src_layer_range, per_layer)
    dst_first, dst_count = _tensor_span(destination, arguments.dst_layer_range, per_layer)
    fits = src_first + src_count <= source.num_tensors and dst_first + dst_count <= destination.num_tensors
    return set() if fits and src_count == dst_count else {INVALID}


def _tensor_span(descriptor: Descriptor, layers: range | None, per_layer: int) -> tuple[int, int]:
    if not layers:
        return 0, descriptor.num_tensors
    return layers.start * per_layer, (layers.stop - layers.start) * per_layer


def _entry_faults(source: Descriptor, destination: Descriptor, arguments: PullArguments) -> set[str]:
    faults = set()
    if source.blocks or destination.blocks:
        faults.add(INVALID)
    if arguments.src_entry >= source.entries:
        faults.add(NOT_THERE)
    if arguments.batch_index >= destination.entries:
        faults.add(INVALID)
    size = _entry_size(destination, arguments)
    if size <= 0 or _offset(arguments.dst_cache_offset) + size > destination.entry_nbytes:
        faults.add(INVALID)
    if _offset(arguments.src_cache_offset) + size > source.entry_nbytes:
        faults.add(INVALID)
    return faults


def _entry_size(destination: Descriptor, arguments: PullArguments) -> int:
    if arguments.size == -1:
        return destination.entry_nbytes - _offset(arguments.dst_cache_offset)
    return operator.index(arguments.size)


def _offset(value: Any) -> int:
    return 0 if value is None else operator.index(value)


def _block_faults(source: Descriptor, destination: Descriptor, arguments: PullArguments) -> set[str]:
    faults = set()
    if any(block >= destination.entries for block in arguments.dst_blocks):
        faults.add(INVALID)
    if source.blocks:
        return faults | _paged_source_faults(source, destination, arguments)
    return faults | _contiguous_source_faults(source, destination, arguments)


def _paged_source_faults(source: Descriptor, destination: Descriptor, arguments: PullArguments) -> set[str]:
    if any(block >= source.entries for block in arguments.src_blocks):
        return {INVALID}
    return set() if source.entry_nbytes == destination.entry_nbytes else {INVALID}


def _contiguous_source_faults(source: Descriptor, destination: Descriptor, arguments: PullArguments) -> set[str]:
    faults = set()
    if arguments.src_entry >= source.entries:
        faults.add(NOT_THERE)
    if destination.entry_nbytes > source.entry_nbytes:
        faults.add(INVALID)
    if (len(arguments.dst_blocks) - 1) * destination.entry_nbytes >= source.entry_nbytes:
        faults.add(INVALID)  # the last block would get nothing
    return faults


# --- where every byte goes ---


def _tensor_pairs(source: Descriptor, destination: Descriptor, arguments: PullArguments) -> list[tuple[int, int]]:
    per_layer = operator.index(arguments.tensor_num_per_layer)
    src_first, count = _tensor_span(source, arguments.src_layer_range, per_layer)
    dst_first, _ = _tensor_span(destination, arguments.dst_layer_range, per_layer)
    return [(src_first + number, dst_first + number) for number in range(count)]


def _byte_moves(source: Descriptor, destination: Descriptor, arguments: PullArguments) -> list[tuple[int, int]]:
    """(position in the source tensor, position in the destination tensor) of every byte; the same for every tensor."""
    if not arguments.is_blocks:
        src_start = arguments.src_entry * source.entry_nbytes + _offset(arguments.src_cache_offset)
        dst_start = operator.index(arguments.batch_index) * destination.entry_nbytes
        dst_start += _offset(arguments.dst_cache_offset)
        return [(src_start + number, dst_start + number) for number in range(_entry_size(destination, arguments))]
    moves: list[tuple[int, int]] = []
    for position, dst_block in enumerate(arguments.dst_blocks):
        dst_start = operator.index(dst_block) * destination.entry_nbytes
        if source.blocks:
            src_start = operator.index(arguments.src_blocks[position]) * source.entry_nbytes
            src_end = src_start + source.entry_nbytes
        else:
            src_start = arguments.src_entry * source.entry_nbytes + position * destination.entry_nbytes
            src_end = (arguments.src_entry + 1) * source.entry_nbytes
        count = min(destination.entry_nbytes, src_end - src_start)
        moves += [(src_start + number, dst_start + number) for number in range(count)]
    return moves
