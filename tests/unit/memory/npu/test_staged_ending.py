"""Transfers that end early: nothing runs any more, every slot is back, and what may still be written is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.memory.base import PIECE_BYTES, Until
from kvpull_async.memory.npu.codes import AclError
from kvpull_async.memory.npu.layout import Load
from kvpull_async.memory.npu.streams import Unsettled
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from tests.acl_emulator import Emulator
from tests.unit.memory.emulated import BOUND, Thread, eventually, pattern
from tests.unit.memory.npu.staged_side import (
    ROOM,
    fill,
    nobody,
    put,
    read,
    side,
    whole,
)

# -- ends that come early ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("way", ["landing", "lending"])
def test_p1_closing_early_leaves_nothing_running_and_copies_nothing_more(way: str, batches: int) -> None:
    with side(delay_us=20_000) as here:
        here.memory()[:] = 0
        transfer = getattr(here, way)(whole(ROOM))
        for batch in (next(transfer) for _ in range(batches)):
            if way == "landing":
                put(batch, np.full(PIECE_BYTES, 7, np.uint8), 0)
        transfer.close()
        assert here.npu.running() == 0
        assert here.idle()
        filled = max(0, batches - 1) * PIECE_BYTES if way == "landing" else 0
        assert not here.memory()[filled:].any()
        here.works()


@pytest.mark.parametrize("ending", ["deadline", "stop"])
@pytest.mark.parametrize("way", ["landing", "lending"])
def test_p1_a_transfer_that_is_over_ends_with_nothing_running(way: str, ending: str) -> None:
    with side() as here:
        here.works()
        until = Until(Deadline.after_ms(200 if ending == "deadline" else BOUND * 1000))
        here.emulator.hang(times=-1)
        transfer = getattr(here, way)(whole(ROOM), until)
        if ending == "stop":
            threading.Timer(0.05, until.stop).start()
        error = LLMTimeoutError if ending == "deadline" else LLMException
        began = time.monotonic()
        with pytest.raises(error, match="in time" if ending == "deadline" else "stopped"):
            for _ in transfer:
                pass
        assert time.monotonic() - began < BOUND / 3
        assert here.npu.running() == 0
        assert here.idle()
        here.emulator.resume()
        here.works()


@pytest.mark.parametrize("way", ["landing", "lending"])
def test_a_transfer_that_is_over_before_it_begins_copies_nothing(way: str) -> None:
    with side() as here:
        until = Until()
        until.stop()
        before = here.emulator.count("aclrtMemcpyAsync")
        with pytest.raises(LLMException, match="stopped"):
            for _ in getattr(here, way)(whole(ROOM), until):
                pass
        assert here.emulator.count("aclrtMemcpyAsync") == before


@pytest.mark.parametrize("way", ["landing", "lending"])
def test_waiting_for_a_slot_ends_with_the_transfers_time(way: str) -> None:
    with side() as here:
        gate = threading.Event()
        busy = [here.device.copiers.submit(lambda _: gate.wait(BOUND)) for _ in range(4)]
        eventually(lambda: all(work.running() for work in busy))
        with pytest.raises(LLMTimeoutError):
            next(getattr(here, way)(whole(ROOM), Until(Deadline.after_ms(50))))
        gate.set()


@pytest.mark.parametrize("way", ["landing", "lending"])
def test_p1_slots_of_a_copy_that_hangs_are_nobody_elses_until_it_ends(way: str) -> None:
    with side(abort_works=0) as here:
        until = Until(Deadline.after_ms(50))
        here.emulator.hang()
        transfer = getattr(here, way)(whole(4 * PIECE_BYTES, 4 * PIECE_BYTES), until)
        thread = Thread()
        end = thread.begin(lambda: sum(1 for _ in transfer))
        eventually(lambda: here.npu.running() == 1)
        time.sleep(0.2)
        for _ in range(3):
            here.works()  # the emulator sees whoever touches what a copy uses
        with pytest.raises(TimeoutError, match="has not ended"):
            end(0.05)
        here.emulator.resume()
        with pytest.raises(LLMTimeoutError):
            end()
        thread.close()
        assert here.idle()


@pytest.mark.parametrize("way", ["landing", "lending"])
def test_p1_a_slot_that_may_be_written_for_ever_is_lost(way: str) -> None:
    with side(abort_works=0, clean=False) as here:
        here.emulator.hang()
        thread = Thread()
        transfer = getattr(here, way)(whole(PIECE_BYTES), Until(Deadline.after_ms(50)))
        end = thread.begin(lambda: sum(1 for _ in transfer))
        eventually(lambda: here.npu.running() == 1)
        assert not here.device.copiers.stop(Deadline.after_ms(300))
        with pytest.raises(Unsettled):
            end()
        assert here.idle()
        here.slots.close()
        time.sleep(0.05)
        assert here.npu.left().get("pinned_blocks", 0) == 1
        assert here.npu.running() == 1
        here.emulator.resume()
        eventually(lambda: here.npu.running() == 0)
        thread.close()


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("function", ["task", "aclrtMemcpyAsync", "aclrtSynchronizeStreamWithTimeout"])
@pytest.mark.parametrize("way", ["landing", "lending"])
def test_p1_an_error_of_the_device_ends_the_transfer_with_nothing_running(way: str, function: str, after: int) -> None:
    with side(delay_us=5000) as here:
        here.emulator.inject(function, 507053, after=after)
        with pytest.raises(AclError) as caught:
            for _ in getattr(here, way)(whole(ROOM)):
                pass
        assert caught.value.status_code == LLMStatusCode.LLM_DEVICE_MEM_ERROR
        assert here.npu.running() == 0
        assert here.idle()
        here.works()


def test_without_page_locked_memory_a_transfer_says_so_and_a_later_one_works() -> None:
    with side() as here:
        for way in (here.landing, here.lending):
            here.emulator.inject("aclrtMallocHost", 207001)
            with pytest.raises(AclError) as caught:
                next(way(whole(ROOM)))
            assert caught.value.status_code == LLMStatusCode.LLM_OUT_OF_MEMORY
        here.works()


@pytest.mark.parametrize("way", ["landing", "lending"])
def test_a_second_slot_that_cannot_be_had_ends_a_transfer_with_nothing_running(way: str) -> None:
    with side(delay_us=20_000) as here:
        here.emulator.inject("aclrtMallocHost", 207001, after=1)
        with pytest.raises(AclError):
            for _ in getattr(here, way)(whole(ROOM)):
                pass
        assert here.npu.running() == 0
        assert here.idle()


@pytest.mark.parametrize("way", ["landing", "lending"])
def test_a_plan_that_fails_ends_a_transfer_with_nothing_running(way: str) -> None:
    with side(delay_us=20_000) as here:

        def plan() -> Iterator[Load]:
            for number, load in enumerate(here.plan(whole(ROOM))):
                if number == 2:
                    raise ValueError("no more rows")
                yield load

        ways: dict[str, Any] = {
            "landing": lambda: here.staged.landing(plan(), Until(), nobody),
            "lending": lambda: here.staged.lending(plan(), Until()),
        }
        with pytest.raises(ValueError, match="no more rows"):
            for _ in ways[way]():
                pass
        assert here.npu.running() == 0
        assert here.idle()


def test_whoever_is_told_and_fails_ends_the_landing() -> None:
    def landed(nbytes: int) -> None:
        raise ValueError("not now")

    with side(delay_us=5000) as here:
        with pytest.raises(ValueError, match="not now"):
            fill(here.landing(whole(ROOM), landed=landed), pattern(ROOM))
        assert here.npu.running() == 0
        assert here.idle()


@pytest.mark.parametrize("way", ["landing", "lending"])
def test_a_device_that_has_been_closed_copies_nothing_and_keeps_no_slot(way: str) -> None:
    with side() as here:
        here.works()
        here.device.copiers.stop(Deadline.after_ms(BOUND * 1000))
        with pytest.raises(LLMException, match="closed") as caught:
            for _ in getattr(here, way)(whole(ROOM)):
                pass
        assert caught.value.status_code == LLMStatusCode.LLM_ENGINE_FINALIZED


# -- everything at once ------------------------------------------------------------------------------------------------

FAULTS = ("task", "aclrtMemcpyAsync", "aclrtSynchronizeStreamWithTimeout", "aclrtStreamQuery", "aclrtCreateStream",
          "aclrtDestroyStream", "aclrtMallocHost")  # fmt: skip


def storm(emulator: Emulator, random: Random) -> None:
    """One thing that goes wrong, or right again."""
    kind = random.random()
    if kind < 0.3:
        emulator.inject(random.choice(FAULTS), random.choice([507053, 207001, 507899, 107003]))
    elif kind < 0.6:
        emulator.hang()
    elif kind < 0.9:
        emulator.resume()
    else:
        emulator.configure(abort_works=random.randrange(2))


@pytest.mark.parametrize("release", ["9.0", "8.0"])
def test_p1_whatever_goes_wrong_no_rule_is_broken_no_byte_wrong_and_no_slot_lost(release: str) -> None:
    """The emulator watches: nobody touches, frees or fills what a copy uses."""
    with side(release=release, delay_us_min=0, delay_us_max=4000) as here:
        end = time.monotonic() + 1.5

        def work(number: int) -> int:
            random, step, landings = Random(number), ROOM // 8, 0
            while time.monotonic() < end:
                rows = whole(step - random.choice([0, 1, 64, 4096]), number * step)
                data = pattern(int(rows[0, 2]), seed=random.randrange(1000))
                until = Until(Deadline.after_ms(random.choice([5, 30, 200, 2000])))
                with suppress(LLMException):
                    fill(here.landing(rows, until), data)
                    landings += 1
                    assert read(here.lending(rows, until)) == bytes(data)
            return landings

        threads = [Thread() for _ in range(8)]
        ends = [thread.begin(partial(work, number)) for number, thread in enumerate(threads)]
        random = Random(release)
        while time.monotonic() < end:
            storm(here.emulator, random)
            time.sleep(0.01)
        here.emulator.resume()
        assert sum(finish() for finish in ends) > 0
        for thread in threads:
            thread.close()
        assert here.npu.running() == 0
        assert here.idle()
        assert here.emulator.violations() == []
        here.emulator.reset()
        here.works()
