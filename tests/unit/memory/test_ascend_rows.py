"""Rows that lie over each other, or of the host and of the device: every byte, in the order they came."""

from __future__ import annotations

import numpy as np
import pytest

from kvpull_async.memory.base import PIECE_BYTES, Allocation, Region, copy_batches
from kvpull_async.values import Placement
from tests.unit.memory.ascend_side import (
    DEVICE,
    HOST,
    MIB,
    Rows,
    Side,
    iter_once,
    side,
)
from tests.unit.memory.emulated import Bytes, pattern

# -- rows over each other ----------------------------------------------------------------------------------------------


def expected_of(here: Side, regions: tuple[Region, ...], rows: Rows, data: Bytes) -> list[Bytes]:
    """What the regions hold when the rows were written one after another."""
    found, at = [here.look(region).copy() for region in regions], 0
    for tensor, start, length in rows.tolist():
        found[tensor][start : start + length] = data[at : at + length]
        at += length
    return found


def alike(here: Side, regions: tuple[Region, ...], expected: list[Bytes]) -> bool:
    return all(np.array_equal(here.look(region), wanted) for region, wanted in zip(regions, expected, strict=True))


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 0, 4096), (0, 8192, 4096), (0, 0, 4096)],
        [(0, 0, 640), (0, 64, 640), (0, 100, 77), (0, 128, 64)],
        [(0, 0, 3 * MIB), (0, MIB, MIB), (0, 64, 2 * MIB)],
        [(1, 3, MIB), (0, 5, 70), (1, 0, 2 * MIB), (0, 5, 69)],
        [(0, at * 64 % 640, 64) for at in range(3000)],
    ],
    ids=["same", "partly", "across slots", "odd", "many"],
)
def test_p1_of_rows_that_write_the_same_bytes_the_later_one_counts(rows: list[tuple[int, int, int]]) -> None:
    with side(delay_us_min=0, delay_us_max=3000, bandwidth=200_000_000) as here:
        table = np.array(rows, np.int64)
        source, target = here.cache(8 * MIB), here.cache(4 * MIB, 2)
        data, heard = pattern(int(table[:, 2].sum())), list[int]()
        expected = expected_of(here, target.regions, table, data)
        for _ in copy_batches(iter_once(data), here.memory.landing(target.regions, table, landed=heard.append)):
            pass
        assert alike(here, target.regions, expected)
        assert heard == sorted(heard)
        assert heard[-1] == data.size
        bounded = table[table[:, 2] <= PIECE_BYTES]
        places = np.cumsum(bounded[:, 2]) - bounded[:, 2]
        here.look(source.regions[0])[: data.size] = data
        again = expected_of(here, target.regions, bounded, data)
        list(here.memory.copying(source.regions, target.regions, np.column_stack([places * 0, places, bounded])))
        assert alike(here, target.regions, again)
        here.memory.free(source)
        here.memory.free(target)


# -- rows of both kinds ------------------------------------------------------------------------------------------------

MIXED: Rows = np.array(
    [(0, 0, 100), (1, 5, MIB), (2, 0, 70), (3, 64, 2 * MIB), (1, 2 * MIB, 64), (0, 4096, MIB), (2, 128, 0), (3, 0, 64)],
    np.int64,
)


def caches(here: Side, *placements: Placement) -> tuple[list[Allocation], tuple[Region, ...]]:
    made = [here.cache(3 * MIB, 1, placement) for placement in placements]
    return made, tuple(cache.regions[0] for cache in made)


def test_rows_of_the_host_and_of_the_device_go_in_one_transfer() -> None:
    with side(delay_us_min=0, delay_us_max=3000) as here:
        made, regions = caches(here, HOST, DEVICE, DEVICE, HOST)
        data, heard = pattern(int(MIXED[:, 2].sum())), list[int]()
        expected = expected_of(here, regions, MIXED, data)

        def landed(nbytes: int) -> None:
            heard.append(nbytes)
            there = [here.look(regions[tensor])[at : at + length] for tensor, at, length in MIXED.tolist()]
            assert np.array_equal(np.concatenate(there)[:nbytes], data[:nbytes])

        for _ in copy_batches(iter_once(data), here.memory.landing(regions, MIXED, landed=landed)):
            pass
        assert alike(here, regions, expected)
        assert heard == sorted(heard)
        assert heard[-1] == data.size
        assert here.read(regions, MIXED) == bytes(data)
        others, targets = caches(here, DEVICE, DEVICE, HOST, HOST)
        rows = MIXED[MIXED[:, 2] <= PIECE_BYTES]
        assert sum(here.memory.copying(regions, targets, np.column_stack([rows[:, :2], rows]))) == rows[:, 2].sum()
        assert here.read(targets, rows) == here.read(regions, rows)
        for cache in (*made, *others):
            here.memory.free(cache)


@pytest.mark.parametrize("way", ["landing", "lending"])
@pytest.mark.parametrize("batches", range(1, 5))
def test_p1_a_mixed_transfer_that_is_closed_early_leaves_nothing_running(way: str, batches: int) -> None:
    with side(delay_us=10_000) as here:
        made, regions = caches(here, HOST, DEVICE, DEVICE, HOST)
        transfer = getattr(here.memory, way)(regions, MIXED)
        for _ in range(batches):
            next(transfer)
        transfer.close()
        assert here.npu.running() == 0
        for cache in made:
            here.memory.free(cache)
