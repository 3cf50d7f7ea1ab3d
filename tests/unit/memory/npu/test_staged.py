"""Bytes through the slots: all of them, in step with who fills or reads, and no slot another's while it is copied."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpull_async.memory.base import PIECE_BYTES
from kvpull_async.status import LLMException
from tests.unit.memory.emulated import Thread, eventually, pattern
from tests.unit.memory.npu.staged_side import (
    DEPTH,
    ROOM,
    SHARED,
    fill,
    read,
    scattered,
    side,
    spread,
    whole,
)

# -- every byte --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [whole(ROOM), whole(5, 3), scattered(), whole(0)], ids=["all", "few", "many", "none"])
def test_what_is_filled_lands_and_what_is_there_is_lent(rows: NDArray[np.int64]) -> None:
    with side(delay_us_min=0, delay_us_max=5000) as here:
        here.memory()[:] = pattern(ROOM, seed=2)
        data = pattern(int(rows[:, 2].sum()), seed=3)
        expected = spread(rows, data, here.memory())
        fill(here.landing(rows), data)
        assert np.array_equal(here.memory(), expected)
        assert read(here.lending(rows)) == bytes(data)


def test_p1_what_is_said_to_have_landed_is_on_the_device_already() -> None:
    with side(delay_us_min=0, delay_us_max=20_000) as here:
        rows = scattered()
        data = pattern(int(rows[:, 2].sum()), seed=4)
        heard: list[int] = []
        before = here.memory().copy()

        def landed(nbytes: int) -> None:
            heard.append(nbytes)
            left = nbytes
            for _, start, length in rows.tolist():
                n = min(left, length)
                at = nbytes - left
                assert np.array_equal(here.memory()[start : start + n], data[at : at + n])
                left -= n

        fill(here.landing(rows, landed=landed), data)
        assert heard == sorted(heard)
        assert heard[-1] == data.size
        assert len(heard) > 3
        assert np.array_equal(here.memory(), spread(rows, data, before))


def test_what_is_lent_is_for_reading_only() -> None:
    with side() as here, closing(here.lending(whole(100))) as lending:
        (view,) = next(lending)
        assert view.readonly


# -- in step -----------------------------------------------------------------------------------------------------------


def test_one_slot_fills_while_the_one_before_is_copied() -> None:
    with side() as here:
        landing = here.landing(whole(ROOM))
        here.emulator.hang()
        next(landing)
        next(landing)  # although the first hangs
        eventually(lambda: here.npu.running() == 1)
        here.emulator.resume()
        landing.close()
        assert len(here.made) <= DEPTH


def test_slots_are_fetched_ahead_while_one_is_read() -> None:
    with side() as here:
        lending = here.lending(whole(ROOM))
        next(lending)
        eventually(lambda: here.emulator.count("aclrtMemcpyAsync") == DEPTH)
        eventually(lambda: here.npu.running() == 0)
        here.emulator.hang(times=-1)
        for _ in range(DEPTH - 1):
            next(lending)  # was fetched already
        here.emulator.resume()
        lending.close()
        assert len(here.made) == DEPTH


def test_a_transfer_alone_takes_few_slots_however_long_it_is() -> None:
    with side() as here:
        here.works()
        fill(here.landing(whole(ROOM)), pattern(ROOM))
        read(here.lending(whole(ROOM)))
        assert len(here.made) <= DEPTH


def test_landings_that_stand_still_hold_a_slot_each_and_others_go_on() -> None:
    with side() as here:
        standing = [here.landing(whole(2 * PIECE_BYTES)) for _ in range(SHARED + 10)]
        for landing in standing:
            next(landing)
        assert len(here.made) == SHARED + 10
        here.works()
        assert len(here.made) == SHARED + 11  # one, and no second
        for landing in standing:
            landing.close()
        assert len(here.made) == SHARED + 11


def test_lendings_that_stand_still_hold_what_they_have_and_others_go_on() -> None:
    with side() as here:
        standing = [here.lending(whole(ROOM)) for _ in range(SHARED)]
        for lending in standing:
            next(lending)
        here.works()
        for lending in standing:
            lending.close()


def test_many_threads_at_once_each_get_their_own_bytes() -> None:
    with side(delay_us_min=0, delay_us_max=2000) as here:
        step = ROOM // 8

        def work(number: int) -> None:
            rows = whole(step - number, number * step)
            for turn in range(4):
                data = pattern(step - number, seed=number * 10 + turn)
                fill(here.landing(rows), data)
                assert read(here.lending(rows)) == bytes(data)

        threads = [Thread() for _ in range(8)]
        ends = [thread.begin(partial(work, number)) for number, thread in enumerate(threads)]
        for end in ends:
            end()
        for thread in threads:
            thread.close()


def test_bytes_are_said_to_have_landed_though_no_more_of_them_come() -> None:
    """Whoever fills may be waiting for a slow peer, with one slot in its hands."""
    with side() as here:
        heard: list[int] = []
        landing = here.landing(whole(ROOM), landed=heard.append)
        for _ in range(3):
            next(landing)
        eventually(lambda: heard == [PIECE_BYTES, 2 * PIECE_BYTES])
        landing.close()
        assert len(heard) == 2


def test_nothing_is_said_to_have_landed_after_what_failed() -> None:
    with side(delay_us=5000) as here:
        heard: list[int] = []
        here.emulator.inject("aclrtMemcpyAsync", 507899, after=1)
        with pytest.raises(LLMException):
            for _ in here.landing(whole(ROOM), landed=heard.append):
                pass
        told = list(heard)
        assert told in ([], [PIECE_BYTES])
        time.sleep(0.03)
        assert heard == told
