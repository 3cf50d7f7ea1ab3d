"""Plans: the right bytes in the right order, in few rows, and refused where they would leave what was asked for."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvpull_async import plan
from kvpull_async.status import LLMException, LLMStatusCode
from tests.strategies import thorough

INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)


def table(*rows: tuple[int, int, int]) -> plan.Segments:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def numbers(*values: int) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def rows_of(array: NDArray[np.int64]) -> list[tuple[int, ...]]:
    return [tuple(row) for row in array.tolist()]


def positions(segments: plan.Segments) -> list[tuple[int, int]]:
    """(tensor, byte offset) of every byte in stream order."""
    return [(tensor, offset + at) for tensor, offset, length in segments.tolist() for at in range(length)]


@contextmanager
def invalid(match: str) -> Iterator[None]:
    with pytest.raises(LLMException, match=match) as raised:
        yield
    assert raised.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


rows = st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 6))
tables = st.lists(rows, max_size=12).map(lambda drawn: table(*drawn))


# --- layer ranges ---


@pytest.mark.parametrize(
    ("layers", "per_layer", "tensors"),
    [
        (None, 2, None),
        (range(1), 2, range(2)),
        (range(2, 4), 2, range(4, 8)),
        (range(3, 4), 1, range(3, 4)),
        (range(1), 4, range(4)),
        (range(2**32 - 1, 2**32), 2, range(2**33 - 2, 2**33)),
        (range(0), 2, None),
        (range(5, 5), 2, None),
        (range(3, 1), 2, None),
        (range(-3, -3), 2, None),
    ],
)
def test_layer_range_names_consecutive_tensors_and_an_empty_one_names_all(
    layers: range | None, per_layer: int, tensors: range | None
) -> None:
    assert plan.layer_tensors("src_layer_range", layers, tensors_per_layer=per_layer) == tensors


@pytest.mark.parametrize("layers", [[0, 1], (0, 1), 1, "0", slice(0, 1)])
def test_layer_range_of_another_type_is_a_type_error_naming_the_argument(layers: Any) -> None:
    with pytest.raises(TypeError, match=f"src_layer_range.*{type(layers).__name__}"):
        plan.layer_tensors("src_layer_range", layers, tensors_per_layer=2)


@pytest.mark.parametrize("layers", [range(0, 2, 2), range(1, 0, -1), range(0, 0, 2), range(-1, 1), range(-2, -1)])
def test_layer_range_with_a_step_or_a_negative_layer_is_invalid(layers: range) -> None:
    with invalid("dst_layer_range"):
        plan.layer_tensors("dst_layer_range", layers, tensors_per_layer=2)


@pytest.mark.parametrize("layers", [range(2**32, 2**32 + 1), range(2**32 + 1), range(2**70)])
def test_layer_range_beyond_uint32_is_a_value_error(layers: range) -> None:
    with pytest.raises(ValueError, match="dst_layer_range"):
        plan.layer_tensors("dst_layer_range", layers, tensors_per_layer=2)


# --- tables ---


def test_entry_gives_one_row_per_tensor() -> None:
    segments = plan.entry_segments(range(2, 4), entry=2, entry_nbytes=512, offset=128, size=64)
    assert rows_of(segments) == [(2, 1152, 64), (3, 1152, 64)]
    assert segments.dtype == np.int64


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 513), (128, 385), (512, 1), (513, 1), (-1, 1), (0, 0), (512, 0), (0, -1), (0, 2**63)]
)
def test_p7_entry_never_reaches_into_another_entry(offset: int, size: int) -> None:
    with invalid("512 bytes"):
        plan.entry_segments(range(1), entry=1, entry_nbytes=512, offset=offset, size=size)


def test_entry_that_no_cache_can_have_is_invalid() -> None:
    with invalid("-1"):
        plan.entry_segments(range(1), entry=-1, entry_nbytes=512, offset=0, size=1)
    with invalid("no cache"):
        plan.entry_segments(range(1), entry=2**32 - 1, entry_nbytes=2**40, offset=0, size=1)


def test_a_run_gives_the_same_bytes_of_every_tensor() -> None:
    assert rows_of(plan.run_segments(range(1, 4), start=96, size=7)) == [(1, 96, 7), (2, 96, 7), (3, 96, 7)]
    assert rows_of(plan.run_segments(range(0), start=96, size=7)) == []


def test_a_run_that_no_cache_can_have_is_invalid() -> None:
    assert rows_of(plan.run_segments(range(1), start=INT64_MAX - 1, size=1)) == [(0, INT64_MAX - 1, 1)]
    with invalid("no cache"):
        plan.run_segments(range(1), start=INT64_MAX, size=1)


def test_consecutive_blocks_share_a_row_within_a_tensor_only() -> None:
    segments = plan.block_segments(range(2), numbers(4, 5, 6, 2, 1, 7, 8), block_nbytes=16)
    one_tensor = [(64, 48), (32, 16), (16, 16), (112, 32)]
    assert rows_of(segments) == [(tensor, *row) for tensor in (0, 1) for row in one_tensor]


def test_last_block_of_one_tensor_and_first_of_the_next_stay_apart() -> None:
    assert rows_of(plan.block_segments(range(2), numbers(0), block_nbytes=8)) == [(0, 0, 8), (1, 0, 8)]


def test_no_blocks_give_no_rows() -> None:
    assert plan.block_segments(range(3), numbers(), block_nbytes=16).shape == (0, 3)


def test_blocks_that_no_cache_can_have_are_invalid() -> None:
    with invalid("-2"):
        plan.block_segments(range(1), numbers(3, -2), block_nbytes=16)
    with invalid("no cache"):
        plan.block_segments(range(1), numbers(0, 2**60), block_nbytes=16)
    with invalid("-2"):
        plan.slice_segments(range(1), numbers(3, -2), block_nbytes=16, per_tensor=17)


def test_block_without_bytes_is_invalid() -> None:
    with invalid("0 bytes"):
        plan.block_segments(range(1), numbers(1), block_nbytes=0)


@thorough
@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 5), st.integers(0, 3))
def test_block_rows_hold_every_byte_of_every_block_in_order(blocks: list[int], nbytes: int, tensors: int) -> None:
    segments = plan.block_segments(range(tensors), numbers(*blocks), block_nbytes=nbytes)
    each = [(tensor, block * nbytes + at) for tensor in range(tensors) for block in blocks for at in range(nbytes)]
    assert positions(segments) == each
    assert rows_of(plan.merge(segments)) == rows_of(segments)


@pytest.mark.parametrize(
    ("per_tensor", "one_tensor"),
    [(48, [(0, 80, 16), (0, 32, 32)]), (47, [(0, 80, 16), (0, 32, 31)]), (33, [(0, 80, 16), (0, 32, 17)])],
)
def test_slices_shorten_the_last_block(per_tensor: int, one_tensor: list[tuple[int, int, int]]) -> None:
    segments = plan.slice_segments(range(1), numbers(5, 2, 3), block_nbytes=16, per_tensor=per_tensor)
    assert rows_of(segments) == one_tensor


def test_slices_shorten_the_last_block_of_every_tensor() -> None:
    segments = plan.slice_segments(range(1, 3), numbers(5, 2), block_nbytes=16, per_tensor=20)
    assert rows_of(segments) == [(1, 80, 16), (1, 32, 4), (2, 80, 16), (2, 32, 4)]


@pytest.mark.parametrize("per_tensor", [49, 32, 0, -1])
def test_slices_that_leave_a_block_empty_or_bytes_over_are_invalid(per_tensor: int) -> None:
    with invalid("3 blocks of 16 bytes"):
        plan.slice_segments(range(1), numbers(5, 2, 3), block_nbytes=16, per_tensor=per_tensor)


def test_slices_into_no_blocks_are_invalid() -> None:
    with invalid("0 blocks"):
        plan.slice_segments(range(1), numbers(), block_nbytes=16, per_tensor=0)


# --- merge, total ---


def test_merge_joins_neighbours_of_one_tensor_only() -> None:
    merged = plan.merge(table((0, 0, 8), (0, 8, 8), (1, 16, 8), (1, 24, 4), (1, 20, 4), (1, 24, 1)))
    assert rows_of(merged) == [(0, 0, 16), (1, 16, 12), (1, 20, 5)]


@thorough
@given(tables)
def test_merge_keeps_every_byte_in_order_and_leaves_nothing_to_join(segments: plan.Segments) -> None:
    before = segments.copy()
    merged = plan.merge(segments)
    assert positions(merged) == positions(segments)
    assert (merged[:, 2] > 0).all()
    assert not any(a[0] == b[0] and a[1] + a[2] == b[1] for a, b in pairwise(rows_of(merged)))
    assert np.array_equal(segments, before)


def test_total_is_exact_beyond_int64() -> None:
    assert plan.total(table()) == 0
    assert plan.total(table((0, 0, 5), (1, 9, 7))) == 12
    assert plan.total(table((0, 0, INT64_MAX), (0, 0, INT64_MAX), (0, 0, INT64_MAX))) == 3 * INT64_MAX


# --- pair ---


def test_pair_cuts_at_the_boundaries_of_both_sides() -> None:
    pairs = plan.pair(table((0, 100, 10), (2, 0, 6)), table((1, 8, 4), (1, 40, 9), (3, 0, 3)))
    assert rows_of(pairs) == [(0, 100, 1, 8, 4), (0, 104, 1, 40, 6), (2, 0, 1, 46, 3), (2, 3, 3, 0, 3)]
    assert pairs.dtype == np.int64


def test_pair_of_nothing_is_empty() -> None:
    assert plan.pair(table(), table((0, 3, 0))).shape == (0, 5)


@thorough
@given(tables, st.data())
def test_pair_sends_the_nth_byte_of_the_source_to_the_nth_of_the_destination(
    src: plan.Segments, data: st.DataObject
) -> None:
    dst = data.draw(cut_differently(plan.total(src)))
    pairs = plan.pair(src, dst)
    assert positions(pairs[:, [0, 1, 4]]) == positions(src)
    assert positions(pairs[:, [2, 3, 4]]) == positions(dst)
    assert (pairs[:, 4] > 0).all()
    assert len(pairs) <= len(src) + len(dst)


@st.composite
def cut_differently(draw: st.DrawFn, nbytes: int) -> plan.Segments:
    """A table with that many bytes, some rows empty."""
    cuts = sorted(draw(st.lists(st.integers(0, nbytes), max_size=9)))
    ends = [*cuts, nbytes]
    lengths = [end - start for start, end in zip([0, *cuts], ends, strict=True)]
    return table(*[(draw(st.integers(0, 2)), draw(st.integers(0, 99)), length) for length in lengths])


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (table((0, 0, 8)), table((0, 0, 7))),
        (table((0, 0, 8)), table()),
        (table((0, 0, 9), (0, 9, -1)), table((0, 0, 8))),
        (table((0, 0, 8)), table((0, 0, -1), (0, 9, 9))),
        (table((0, 0, INT64_MAX), (0, 0, INT64_MAX), (0, 0, 3)), table((0, 0, 1))),  # wraps to 1 in int64
        (table((0, 0, 1)), table((0, 0, INT64_MAX), (0, 0, INT64_MAX), (0, 0, 3))),
        (table((0, 0, INT64_MAX), (0, 0, 1)), table((0, 0, INT64_MAX), (0, 0, 1))),
    ],
)
def test_p2_pair_refuses_sides_that_do_not_agree(src: plan.Segments, dst: plan.Segments) -> None:
    with pytest.raises(ValueError, match=r"bytes|negative"):
        plan.pair(src, dst)


# --- checks ---


def test_check_bounds_accepts_what_lies_inside() -> None:
    plan.check_bounds(table((0, 0, 64), (3, 63, 1), (1, 8, 8)), tensors=4, tensor_nbytes=64)
    plan.check_bounds(table(), tensors=0, tensor_nbytes=0)
    plan.check_bounds(table((0, 1, INT64_MAX - 1)), tensors=1, tensor_nbytes=2**70)


@pytest.mark.parametrize(
    "row",
    [
        (4, 0, 1),
        (-1, 0, 1),
        (0, -1, 1),
        (0, 64, 1),
        (0, 1, 64),
        (0, 0, 65),
        (0, 0, 0),
        (0, 0, -1),
        (0, INT64_MAX, INT64_MAX),
        (0, INT64_MAX, 1),
        (0, INT64_MAX, INT64_MIN),
        (0, INT64_MIN, INT64_MIN),
        (INT64_MIN, 0, 1),
    ],
)
def test_p7_check_bounds_refuses_any_row_outside_and_names_it(row: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=f"^{row[2]} bytes from offset {row[1]} on of tensor {row[0]} "):
        plan.check_bounds(table((0, 0, 64), row, (9, 9, 9)), tensors=4, tensor_nbytes=64)


@pytest.mark.parametrize("segments", [np.zeros(3, np.int64), np.zeros((1, 2), np.int64), np.zeros((1, 3), np.int32)])
def test_p7_check_bounds_refuses_what_is_no_table(segments: Any) -> None:
    with pytest.raises(ValueError, match="segment table"):
        plan.check_bounds(segments, tensors=4, tensor_nbytes=64)


@thorough
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8))
def test_two_sources_for_one_destination_block_are_invalid_and_repeated_pairs_are_not(
    block_pairs: list[tuple[int, int]],
) -> None:
    src, dst = numbers(*[pair[0] for pair in block_pairs]), numbers(*[pair[1] for pair in block_pairs])
    if len(set(block_pairs)) == len({pair[1] for pair in block_pairs}):
        plan.check_block_pairs(src, dst)
    else:
        with invalid("both go to destination block"):
            plan.check_block_pairs(src, dst)


def test_block_lists_of_different_lengths_are_invalid() -> None:
    with invalid("2 source blocks"):
        plan.check_block_pairs(numbers(1, 2), numbers(1))


block_copies = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=8) | st.builds(
    lambda src, dst, count: [(src + i, dst + i) for i in range(count)],  # a run
    *[st.integers(0, 6), st.integers(0, 6), st.integers(1, 6)],
)


@thorough
@given(block_copies, st.integers(1, 5), st.integers(1, 3), st.integers(1, 12))
def test_p2_block_copies_move_each_byte_where_the_oracle_says(
    copies: list[tuple[int, int]], nbytes: int, tensors: int, limit: int
) -> None:
    """Runs, blocks given twice, one source for many destinations; runs of both sides are one row."""
    src, dst = (numbers(*[copy[side] for copy in copies]) for side in (0, 1))
    of_all = range(tensors)
    pairs = plan.pair(
        plan.block_segments(of_all, src, block_nbytes=nbytes), plan.block_segments(of_all, dst, block_nbytes=nbytes)
    )
    runs = 1 + sum((a + 1, b + 1) != after for (a, b), after in pairwise(copies))
    assert len(pairs) == tensors * runs
    short = plan.cut(pairs, limit=limit)
    assert short[:, 4].max() <= limit
    oracle = [
        ((tensor, a * nbytes + at), (tensor, b * nbytes + at))
        for tensor in of_all
        for a, b in copies
        for at in range(nbytes)
    ]
    cut_alike = [
        plan.block_segments(of_all, blocks, block_nbytes=nbytes, runs=plan.shared_runs(src, dst))
        for blocks in (src, dst)
    ]
    assert cut_alike[0][:, 2].tolist() == cut_alike[1][:, 2].tolist()
    assert plan.pair(*cut_alike).tolist() == pairs.tolist()
    for rows in (pairs, short):
        assert list(zip(positions(rows[:, [0, 1, 4]]), positions(rows[:, 2:]), strict=True)) == oracle


# --- what keeps it fast ---


def test_nothing_loops_over_rows_in_python() -> None:
    loops = (ast.For, ast.While, ast.comprehension)
    assert not [node for node in ast.walk(ast.parse(inspect.getsource(plan))) if isinstance(node, loops)]
