"""Whole pulls: plans put together as the two ends of a link do, against a byte-by-byte model of the same pull."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import event, given
from numpy.typing import NDArray

from kvpull_async import plan
from kvpull_async.status import LLMException
from tests.oracle import INVALID, NOT_THERE, CacheModel, Descriptor, PullArguments, Refused, expected
from tests.strategies import PullCase, fitting_pulls, misfit_pulls, thorough


def numbers(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def planned(source: Descriptor, destination: Descriptor, arguments: PullArguments) -> NDArray[np.int64]:
    """The plan for a pull, put together as the two ends of a link do. ValueError: the caches do not have such bytes."""
    per_layer = arguments.tensor_num_per_layer
    src_tensors = plan.layer_tensors("src", arguments.src_layer_range, tensors_per_layer=per_layer)
    dst_tensors = plan.layer_tensors("dst", arguments.dst_layer_range, tensors_per_layer=per_layer)
    if (src_tensors or dst_tensors) and destination.num_tensors % per_layer:
        raise ValueError("indivisible")
    src_tensors = src_tensors or range(source.num_tensors)
    dst_tensors = dst_tensors or range(destination.num_tensors)
    if src_tensors.stop > source.num_tensors or dst_tensors.stop > destination.num_tensors:
        raise ValueError("no such layers")
    sides = blocks_sides if arguments.is_blocks else entry_sides
    src, dst = sides(source, destination, arguments, src_tensors=src_tensors, dst_tensors=dst_tensors)
    plan.check_bounds(src, tensors=source.num_tensors, tensor_nbytes=source.tensor_nbytes)
    plan.check_bounds(dst, tensors=destination.num_tensors, tensor_nbytes=destination.tensor_nbytes)
    return plan.pair(plan.merge(src), plan.merge(dst))


def entry_sides(
    source: Descriptor, destination: Descriptor, arguments: PullArguments, *, src_tensors: range, dst_tensors: range
) -> tuple[plan.Segments, plan.Segments]:
    src_offset, dst_offset = int(arguments.src_cache_offset or 0), int(arguments.dst_cache_offset or 0)
    dst_nbytes = destination.entry_nbytes
    size = int(arguments.size) if arguments.size != -1 else dst_nbytes - dst_offset
    src = plan.entry_segments(
        src_tensors, entry=arguments.src_entry, entry_nbytes=source.entry_nbytes, offset=src_offset, size=size
    )
    dst = plan.entry_segments(
        dst_tensors,
        entry=int(arguments.batch_index),
        entry_nbytes=destination.entry_nbytes,
        offset=dst_offset,
        size=size,
    )
    return src, dst


def blocks_sides(
    source: Descriptor, destination: Descriptor, arguments: PullArguments, *, src_tensors: range, dst_tensors: range
) -> tuple[plan.Segments, plan.Segments]:
    src_blocks, dst_blocks = numbers(*arguments.src_blocks), numbers(*arguments.dst_blocks)
    block_nbytes = destination.entry_nbytes
    if source.blocks:
        plan.check_block_pairs(src_blocks, dst_blocks)
        src = plan.block_segments(src_tensors, src_blocks, block_nbytes=source.entry_nbytes)
        dst = plan.block_segments(dst_tensors, dst_blocks, block_nbytes=block_nbytes)
        if not src.size:
            raise ValueError("nothing to pull")
        return src, dst
    if src_blocks.size or block_nbytes > source.entry_nbytes:
        raise ValueError("not for a contiguous source")
    plan.check_block_pairs(np.arange(dst_blocks.size), dst_blocks)
    size = min(dst_blocks.size * block_nbytes, source.entry_nbytes)
    dst = plan.slice_segments(dst_tensors, dst_blocks, block_nbytes=block_nbytes, per_tensor=size)
    src = plan.entry_segments(
        src_tensors, entry=arguments.src_entry, entry_nbytes=source.entry_nbytes, offset=0, size=size
    )
    return src, dst


def carried_out(case: PullCase, pairs: NDArray[np.int64]) -> list[bytearray]:
    after = [bytearray(tensor) for tensor in case.destination.tensors]
    for src_tensor, src_at, dst_tensor, dst_at, length in pairs.tolist():
        after[dst_tensor][dst_at : dst_at + length] = case.source.tensors[src_tensor][src_at : src_at + length]
    return after


@thorough
@given(fitting_pulls())
def test_p2_a_pull_that_fits_moves_exactly_the_bytes_asked_for(case: PullCase) -> None:
    pairs = planned(case.source.descriptor, case.destination.descriptor, case.arguments)
    after = expected(case.source, case.destination, case.arguments)
    assert not isinstance(after, Refused), "the strategy drew a pull that does not fit"
    assert carried_out(case, pairs) == after


@thorough
@given(misfit_pulls())
def test_p7_a_pull_at_the_limits_is_refused_or_exact(case: PullCase) -> None:
    after = expected(case.source, case.destination, case.arguments)
    event("refused" if isinstance(after, Refused) else "exact")
    if not isinstance(after, Refused):
        pairs = planned(case.source.descriptor, case.destination.descriptor, case.arguments)
        assert carried_out(case, pairs) == after
        return
    with pytest.raises((LLMException, ValueError)):
        planned(case.source.descriptor, case.destination.descriptor, case.arguments)


# Four tensors (two layers) of four entries of 512 bytes, byte value 16 * tensor + entry.
KNOWN = Descriptor(num_tensors=4, shape=(4, 256), data_type="DT_FLOAT16")


def known_source() -> CacheModel:
    return CacheModel(KNOWN, [bytearray(16 * t + b for b in range(4) for _ in range(512)) for t in range(4)])


def zeroed(descriptor: Descriptor) -> CacheModel:
    return CacheModel(descriptor, [bytearray(descriptor.tensor_nbytes) for _ in range(descriptor.num_tensors)])


HALF = Descriptor(num_tensors=4, shape=(4, 128), data_type="DT_FLOAT16")
DOUBLE = Descriptor(num_tensors=4, shape=(4, 512), data_type="DT_FLOAT16")
OTHER_TYPE = Descriptor(num_tensors=4, shape=(4, 512), data_type="DT_INT8")
ONE_LAYER = Descriptor(num_tensors=2, shape=(4, 256), data_type="DT_FLOAT16")

Written = dict[tuple[int, int], tuple[int, int]]  # (tensor, first byte) -> (byte value, bytes)


@pytest.mark.parametrize(
    ("destination", "arguments", "written"),
    [
        (KNOWN, PullArguments(src_entry=1), {(t, 0): (16 * t + 1, 512) for t in range(4)}),
        (HALF, PullArguments(), {(t, 0): (16 * t, 256) for t in range(4)}),
        (DOUBLE, PullArguments(src_entry=3, size=512), {(t, 0): (16 * t + 3, 512) for t in range(4)}),
        (OTHER_TYPE, PullArguments(batch_index=2), {(t, 1024): (16 * t, 512) for t in range(4)}),
        (
            KNOWN,
            PullArguments(src_layer_range=range(1), dst_layer_range=range(1, 2)),
            {(2, 0): (0, 512), (3, 0): (16, 512)},
        ),
        (ONE_LAYER, PullArguments(src_layer_range=range(1, 2)), {(0, 0): (32, 512), (1, 0): (48, 512)}),
        (KNOWN, PullArguments(tensor_num_per_layer=99), {(t, 0): (16 * t, 512) for t in range(4)}),
        (
            KNOWN,
            PullArguments(src_layer_range=range(3, 4), dst_layer_range=range(1), tensor_num_per_layer=1),
            {(0, 0): (48, 512)},
        ),
        (KNOWN, PullArguments(src_entry=2, dst_cache_offset=128), {(t, 128): (16 * t + 2, 384) for t in range(4)}),
        (KNOWN, PullArguments(src_cache_offset=448, size=64), {(t, 0): (16 * t, 64) for t in range(4)}),
    ],
)
def test_known_pulls_by_model_and_plan(destination: Descriptor, arguments: PullArguments, written: Written) -> None:
    case = PullCase(known_source(), zeroed(destination), arguments)
    by_hand = zeroed(destination).tensors
    for (tensor, first), (value, nbytes) in written.items():
        by_hand[tensor][first : first + nbytes] = bytes([value]) * nbytes
    assert expected(case.source, case.destination, arguments) == by_hand
    assert carried_out(case, planned(KNOWN, destination, arguments)) == by_hand


@pytest.mark.parametrize(
    ("destination", "arguments", "kind"),
    [
        (DOUBLE, PullArguments(), INVALID),
        (KNOWN, PullArguments(size=513), INVALID),
        (KNOWN, PullArguments(batch_index=4), INVALID),
        (KNOWN, PullArguments(src_entry=4), NOT_THERE),
        (KNOWN, PullArguments(dst_layer_range=range(1)), INVALID),
        (KNOWN, PullArguments(src_layer_range=range(2), dst_layer_range=range(1)), INVALID),
        (KNOWN, PullArguments(src_layer_range=range(2, 3), dst_layer_range=range(1)), INVALID),
        (KNOWN, PullArguments(src_layer_range=range(1), dst_layer_range=range(2, 3)), INVALID),
        (KNOWN, PullArguments(dst_cache_offset=128, size=385), INVALID),
        (KNOWN, PullArguments(dst_cache_offset=512), INVALID),
        (KNOWN, PullArguments(src_cache_offset=128), INVALID),
    ],
)
def test_known_refusals_by_model_and_plan(destination: Descriptor, arguments: PullArguments, kind: str) -> None:
    assert expected(known_source(), zeroed(destination), arguments) == Refused(frozenset({kind}))
    with pytest.raises((LLMException, ValueError)):
        planned(KNOWN, destination, arguments)
