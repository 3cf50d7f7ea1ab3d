"""How rows share slots: every byte once, in stream order, aligned where it can be, in as few pieces as there can be."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvpull_async.memory.base import PIECE_VIEWS, Region
from kvpull_async.memory.npu import layout
from kvpull_async.memory.npu.layout import ALIGNMENT, SLOT_BYTES, Load, aligned, bases_of, loads, named, overlapping
from kvpull_async.values import Placement

MIB = 1024 * 1024
BASE = 1 << 44
Bytes = NDArray[np.uint8]


def regions(*sizes: int, apart: int = 96, base: int = BASE) -> list[Region]:
    """Tensors in a row, with so many bytes between them."""
    found = []
    for size in sizes:
        found.append(Region(base, size, Placement.DEVICE, device=0))
        base += size + apart
    return found


def rows(*segments: tuple[int, int, int]) -> NDArray[np.int64]:
    return np.array(segments, np.int64).reshape(-1, 3)


def through(where: Sequence[Region], segments: NDArray[np.int64], device: Bytes) -> tuple[list[Load], bytes]:
    """The loads, and what their views give once each slot was filled from the device, which begins at BASE."""
    made, stream = [], bytearray()
    for load in loads(where, segments):
        slot = np.full(SLOT_BYTES, 0xEE, np.uint8)
        for address, place, length in zip(load.addresses, load.places, load.lengths, strict=True):
            slot[place : place + length] = device[address - BASE : address - BASE + length]
        views = load.views(memoryview(slot))
        assert sum(view.nbytes for view in views) == load.nbytes
        for view in views:
            stream += view
        made.append(load)
    return made, bytes(stream)


def checked(where: Sequence[Region], segments: NDArray[np.int64]) -> list[Load]:
    """The loads of these segments, each within its bounds, all of them with exactly the segments' bytes in order."""
    end = max(region.address + region.nbytes for region in where) - BASE
    device = np.random.default_rng(5).integers(0, 256, end).astype(np.uint8)
    made, stream = through(where, segments, device)
    starts = [where[tensor].address - BASE + offset for tensor, offset, _ in segments.tolist()]
    assert stream == b"".join(
        bytes(device[start : start + length]) for start, length in zip(starts, segments[:, 2].tolist(), strict=True)
    )
    for load in made:
        ends = load.places + load.lengths
        assert load.nbytes > 0
        assert load.places[0] == 0
        assert (load.lengths > 0).all()
        assert (load.places[1:] >= ends[:-1]).all(), "two rows share bytes of a slot"
        assert int(ends[-1]) <= SLOT_BYTES
        assert len(load.views(memoryview(bytearray(SLOT_BYTES)))) <= PIECE_VIEWS
        assert (load.places % ALIGNMENT == 0)[load.addresses % ALIGNMENT == 0].all()
        joinable = (load.addresses[1:] == load.addresses[:-1] + load.lengths[:-1]) & (load.places[1:] == ends[:-1])
        of_one = ~np.isin(load.addresses[1:], [region.address for region in where])
        assert not (joinable & of_one).any(), "neighbours on both sides are two rows"
        ends_of = np.array([region.address + region.nbytes for region in where])
        for address, length in zip(load.addresses, load.lengths, strict=True):
            assert not ((ends_of > address) & (ends_of < address + length)).any(), "a copy spans two tensors"
    return made


# -- any segments ------------------------------------------------------------------------------------------------------

SIZES = (100, 4096, 3 * MIB + 7, 64)
LENGTHS = st.one_of(
    st.integers(0, 300),
    st.sampled_from([0, 1, 63, 64, 65, 128, 4096, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, 2 * SLOT_BYTES + 64]),
)


@st.composite
def segments_of(draw: st.DrawFn) -> tuple[list[Region], NDArray[np.int64]]:
    where = regions(*SIZES, apart=draw(st.sampled_from([0, 28, 96])), base=BASE + draw(st.sampled_from([0, 4])))
    made = []
    for _ in range(draw(st.integers(1, 12))):
        tensor = draw(st.integers(0, len(SIZES) - 1))
        length = min(draw(LENGTHS), SIZES[tensor])
        room = SIZES[tensor] - length
        offset = min(draw(st.one_of(st.integers(0, room), st.sampled_from([0, 64, 128, 4096]))), room)
        repeated = draw(st.sampled_from([1, 1, 2, 40]))
        made += [(tensor, offset, length)] * (repeated if length < 5000 else 1)
    return where, rows(*made)


@settings(deadline=None, max_examples=150)
@given(segments_of())
def test_the_loads_carry_exactly_the_bytes_of_the_segments_in_order(
    given_: tuple[list[Region], NDArray[np.int64]],
) -> None:
    checked(*given_)


@settings(deadline=None, max_examples=25)
@given(segments_of(), st.integers(1, 9))
def test_a_long_table_is_worked_through_in_windows(given_: tuple[list[Region], NDArray[np.int64]], window: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(layout, "_WINDOW", window)
        checked(*given_)


@settings(deadline=None, max_examples=100)
@given(segments_of())
def test_segments_overlap_when_a_byte_is_in_two_of_them(given_: tuple[list[Region], NDArray[np.int64]]) -> None:
    where, segments = given_
    seen = np.zeros(sum(SIZES) + 1000, np.uint8)
    for tensor, offset, length in segments.tolist():
        start = where[tensor].address - BASE + offset
        seen[start : start + length] += 1
    assert overlapping(where, segments) == bool((seen > 1).any())


# -- few pieces --------------------------------------------------------------------------------------------------------


def test_nothing_to_carry_needs_no_slot() -> None:
    assert list(loads(regions(64), rows())) == []
    assert list(loads(regions(64), rows((0, 0, 0), (0, 8, 0)))) == []


def test_neighbouring_rows_are_one_copy_and_one_view() -> None:
    (load,) = checked(regions(4096), rows((0, 0, 64), (0, 64, 100), (0, 164, 0), (0, 164, 28), (0, 192, 1000)))
    assert (load.addresses.tolist(), load.places.tolist(), load.lengths.tolist()) == ([BASE], [0], [1192])
    assert len(load.views(memoryview(bytearray(SLOT_BYTES)))) == 1


def test_tensors_that_lie_side_by_side_are_separate_copies() -> None:
    """They may be two allocations."""
    (load,) = checked(regions(4096, 4096, apart=0), rows((0, 0, 4096), (1, 0, 4096)))
    assert load.lengths.tolist() == [4096, 4096]
    assert len(load.views(memoryview(bytearray(SLOT_BYTES)))) == 1


def test_aligned_rows_from_everywhere_lie_side_by_side_as_one_view() -> None:
    (load,) = checked(regions(65536), rows(*((0, at * 256, 64) for at in range(200))))
    assert load.places.tolist() == [at * 64 for at in range(200)]
    assert len(load.views(memoryview(bytearray(SLOT_BYTES)))) == 1


def test_rows_of_odd_lengths_each_begin_at_a_multiple_of_64() -> None:
    (load,) = checked(regions(65536), rows(*((0, at * 256, 100) for at in range(200))))
    assert load.places.tolist() == [at * 128 for at in range(200)]
    assert [view.nbytes for view in load.views(memoryview(bytearray(SLOT_BYTES)))] == [100] * 200


def test_as_many_odd_rows_share_a_slot_as_one_batch_may_have_views() -> None:
    made = checked(regions(65536), rows(*((0, at * 100, 30) for at in range(600))))
    assert [len(load.lengths) for load in made] == [256, 256, 88]


def test_aligned_rows_do_not_count_against_the_views() -> None:
    (load,) = checked(regions(MIB), rows(*((0, at * 128, 64) for at in range(5000))))
    assert len(load.lengths) == 5000


def test_a_long_row_fills_slot_by_slot_and_stays_aligned() -> None:
    made = checked(regions(3 * MIB + 7), rows((0, 0, 3 * MIB + 7)))
    assert [load.nbytes for load in made] == [SLOT_BYTES] * 3 + [7]
    assert all((load.addresses % ALIGNMENT == 0).all() for load in made)


def test_a_row_that_does_not_fit_any_more_begins_the_next_slot() -> None:
    made = checked(regions(MIB, MIB), rows((0, 0, SLOT_BYTES - 64), (1, 0, 65)))
    assert [load.nbytes for load in made] == [SLOT_BYTES - 64, 65]


def test_addresses_in_the_upper_half_are_addresses_as_any() -> None:
    (load,) = loads([Region(2**64 - 4096, 4096, Placement.DEVICE, device=0)], rows((0, 64, 128)))
    assert load.addresses.view(np.uint64).tolist() == [2**64 - 4096 + 64]
    assert aligned(load.addresses, load.places).all()


def test_p5_a_table_of_a_million_rows_is_not_worked_through_at_once() -> None:
    """Whoever wants the first slot waits for some of the rows and not for all; each later slot takes a moment, too."""
    count = 1_000_000
    table = np.zeros((count, 3), np.int64)
    table[:, 1] = np.arange(count) * 200
    table[:, 2] = 100
    whole = time.thread_time()
    list(loads(regions(200 * count), table))
    whole = time.thread_time() - whole
    first = time.thread_time()
    next(iter(loads(regions(200 * count), table)))
    assert time.thread_time() - first < whole / 4


# -- alignment ---------------------------------------------------------------------------------------------------------


def test_a_row_is_aligned_when_all_its_addresses_are() -> None:
    first, second = np.array([0, 64, 128, 63]), np.array([64, 1, 64, 64])
    assert aligned(first, second).tolist() == [True, False, True, False]
    assert aligned(first).tolist() == [True, True, True, False]


class Untouched(list[Region]):
    """Regions of a large cache, of which only a few may be looked at."""

    def __iter__(self) -> Iterator[Region]:
        raise AssertionError("all of them were looked at")


@pytest.mark.parametrize("rows", [3, 1000])
def test_only_the_tensors_that_are_named_are_looked_at(rows: int) -> None:
    regions = Untouched([Region(4096 * number, 4096, Placement.DEVICE) for number in range(5000)])
    segments = np.array([(row % 3 * 7, 0, 64) for row in range(rows)], np.int64)
    assert named(regions, segments[:, 0]) == {number: regions[number] for number in (0, 7, 14)}
    assert bases_of(regions, segments[:, 0])[[0, 7, 14]].tolist() == [0, 7 * 4096, 14 * 4096]
    assert overlapping(regions, segments) == (rows > 3)
    assert sum(load.nbytes for load in loads(regions, segments)) == 64 * rows


def test_no_row_names_no_tensor() -> None:
    assert named([], np.zeros(0, np.int64)) == {}
