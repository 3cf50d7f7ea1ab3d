"""A stream's copies: every byte, by whichever call the release has, or an error once nothing is touched any more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.memory.emulated import pattern
from tests.unit.memory.npu.stream_side import (
    ABORT,
    ALIGNED,
    BATCH,
    MIXED,
    QUERY,
    ROOM,
    TIMED,
    UNSUPPORTED,
    side,
)

# -- every byte --------------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "9.0": {},
    "8.5": {"release": "8.5"},
    "8.2": {"release": "8.2"},
    "8.0": {"release": "8.0"},
    "batches refused": {"batch_supported": 0},
    "queries refused": {"query_works": 0, "delay_us": 30_000},
    "slow": {"delay_us": 30_000},
}


@pytest.mark.parametrize("rows", [ALIGNED, MIXED, MIXED[3:], ALIGNED[:1]], ids=["aligned", "mixed", "odd", "one"])
@pytest.mark.parametrize("way", WAYS)
def test_every_byte_goes_where_it_belongs_and_no_other_is_touched(way: str, rows: tuple[Any, ...]) -> None:
    with side(**WAYS[way]) as here:
        for make, look in (
            (here.upward, lambda: here.npu.look(here.device, ROOM)),
            (here.within, lambda: here.npu.look(here.other, ROOM)),
            (here.downward, here.view.copy),
        ):
            for place in (here.device, here.other):
                here.emulator.memory(place, ROOM)[:] = pattern(ROOM, seed=place % 97)
            here.view[:] = pattern(ROOM, seed=7)
            source = here.view.copy() if make == here.upward else here.npu.look(here.device, ROOM)
            expected = look()
            for into, out_of, nbytes in rows:
                expected[into : into + nbytes] = source[out_of : out_of + nbytes]
            here.copy(make(*rows))
            assert np.array_equal(look(), expected)


@pytest.mark.parametrize("without", [(), (BATCH,), (TIMED,), (QUERY,), (ABORT,), (BATCH, TIMED, ABORT)])
def test_what_a_release_lacks_is_done_in_another_way(without: tuple[str, ...]) -> None:
    with side(*without, delay_us=20_000) as here:
        here.works()
        counts = here.emulator.counts()
    assert not counts.keys() & set(without)


def test_many_rows_are_few_batches() -> None:
    with side() as here:
        rows = tuple((at * 64, at * 64, 64) for at in range(5000))
        here.view[:] = data = pattern(ROOM)
        here.copy(here.upward(*rows))
        assert np.array_equal(here.npu.look(here.device, 5000 * 64), data[: 5000 * 64])
        assert here.emulator.count(BATCH) == 2
        assert here.emulator.count("aclrtMemcpyAsync") == 0


def test_batches_that_are_refused_are_not_tried_again() -> None:
    with side(batch_supported=0) as here:
        for _ in range(3):
            here.works()
        assert here.emulator.count(BATCH) == 1
        assert here.emulator.count("aclrtMemcpyAsync") == 6


def test_batches_that_are_refused_later_lose_no_row() -> None:
    with side() as here:
        here.emulator.inject(BATCH, UNSUPPORTED, after=1)
        rows = tuple((at * 64, at * 64, 64) for at in range(5000))
        here.view[:] = data = pattern(ROOM)
        here.copy(here.upward(*rows))
        assert np.array_equal(here.npu.look(here.device, 5000 * 64), data[: 5000 * 64])


def test_within_the_device_no_batches_are_used() -> None:
    with side() as here:
        here.copy(here.within(*ALIGNED))
        assert here.emulator.count(BATCH) == 0


def test_rows_that_are_not_aligned_never_run_on_by_themselves() -> None:
    with side() as here:
        here.copy(here.upward((1, 0, 100), (200, 300, 100)))
        assert here.emulator.count("aclrtMemcpy") == 2
        assert here.emulator.count("aclrtMemcpyAsync") == here.emulator.count(BATCH) == 0


@pytest.mark.parametrize("make", ["upward", "within"])
def test_rows_that_write_the_same_bytes_are_written_one_after_another(make: str) -> None:
    with side() as here:
        for place in (here.device, here.other):
            here.emulator.memory(place, ROOM)[:] = pattern(ROOM, seed=place % 89)
        here.view[:] = pattern(ROOM, seed=9)
        target, source = (
            (here.device, here.view) if make == "upward" else (here.other, here.npu.look(here.device, ROOM))
        )
        rows = ((0, 0, 4096), (64, 8192, 4096), (0, 16384, 100), (50, 32768, 77), (64, 65536, 64))
        expected = here.npu.look(target, ROOM)
        for into, out_of, nbytes in rows:
            expected[into : into + nbytes] = source[out_of : out_of + nbytes]
        here.copy(getattr(here, make)(*rows, ordered=True))
        assert np.array_equal(here.npu.look(target, ROOM), expected)
