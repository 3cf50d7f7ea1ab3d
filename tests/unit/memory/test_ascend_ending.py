"""The end of memory on an NPU: everything goes back, but nothing that a copy may still touch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.memory import ascend
from kvpull_async.memory.base import Until
from kvpull_async.memory.npu import pool
from kvpull_async.memory.npu.streams import Unsettled
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.values import Placement
from tests.unit.memory.ascend_side import MIB, free_what_is_left, pairs, side, whole
from tests.unit.memory.emulated import BOUND, Thread, eventually, in_a_child, pattern

# -- the end -----------------------------------------------------------------------------------------------------------


def test_closing_gives_everything_back_also_what_nobody_released() -> None:
    with side() as here:
        held, freed = here.cache(3 * MIB, tensors=4), here.cache(5 * MIB)
        here.works()
        here.memory.free(freed)
        here.memory.close()
        assert not here.npu.left()
        here.memory.free(held)
        here.memory.close()
        assert here.failures == []


def test_a_closed_memory_says_so() -> None:
    with side() as here:
        cache = here.cache()
        other = here.cache()
        here.memory.close()
        for use in (
            here.cache,
            lambda: here.read(cache.regions, whole(64)),
            lambda: here.write(cache.regions, whole(64), pattern(64)),
            lambda: list(here.memory.copying(cache.regions, other.regions, pairs((0, 0, 0, 0, 64)))),
        ):
            with pytest.raises(LLMException) as caught:
                use()
            assert caught.value.status_code == LLMStatusCode.LLM_ENGINE_FINALIZED


def test_closing_waits_for_a_copy_that_ends_soon() -> None:
    with side(delay_us=100_000) as here:
        cache = here.cache()
        thread = Thread()
        end = thread.begin(lambda: here.read(cache.regions, whole(MIB)))
        eventually(lambda: here.npu.running() == 1)
        here.memory.close()
        assert end() == bytes(MIB)
        assert here.npu.left().get("device_blocks", 0) == 0
        thread.close()


def test_closing_ends_a_copy_that_was_stopped_and_hangs() -> None:
    with side() as here:
        cache, until = here.cache(), Until()
        here.emulator.hang()
        thread = Thread()
        end = thread.begin(lambda: here.read(cache.regions, whole(MIB), until))
        eventually(lambda: here.npu.running() == 1)
        until.stop()
        here.memory.close()
        with pytest.raises(LLMException, match="stopped"):
            end()
        assert here.npu.left().get("device_blocks", 0) == 0
        thread.close()


@pytest.mark.parametrize("within", [True, False])
def test_p1_closing_under_a_copy_that_cannot_be_stopped_gives_nothing_back(
    monkeypatch: pytest.MonkeyPatch, *, within: bool
) -> None:
    with side(abort_works=0, clean=False) as here:
        cache, other, idle = here.cache(), here.cache(), here.cache()
        here.memory.free(idle)
        monkeypatch.setattr(pool, "_KEPT", 0)  # what is given back from now on is freed at once, or not at all
        until = Until(Deadline.after_ms(50))
        here.emulator.hang()
        thread = Thread()

        def work() -> None:
            try:
                if within:
                    list(here.memory.copying(cache.regions, other.regions, pairs((0, 0, 0, 0, MIB)), until=until))
                else:
                    here.write(cache.regions, whole(MIB), pattern(MIB), until)
            finally:
                here.memory.free(cache)
                freed.set()

        freed, abandon = threading.Event(), here.memory._pool.abandon
        monkeypatch.setattr(here.memory._pool, "abandon", lambda: freed.wait(BOUND) and abandon())  # the worst moment
        end = thread.begin(work)
        eventually(lambda: here.npu.running() == 1)
        here.memory.close()
        with pytest.raises(Unsettled) as caught:
            end()
        assert caught.value.destination_unsafe
        assert here.npu.left().get("device_blocks", 0) == 3
        assert here.npu.running() == 1
        assert here.emulator.violations() == []
        here.emulator.resume()
        eventually(lambda: here.npu.running() == 0)
        thread.close()
        free_what_is_left(here.npu)


def test_p1_closing_under_a_call_that_does_not_return_gives_nothing_back_and_is_bounded() -> None:
    with side(clean=False) as here:
        cache = here.cache()
        here.emulator.hang_sync()
        thread = Thread()
        end = thread.begin(lambda: here.write(cache.regions, whole(100, start=1), pattern(100)))
        eventually(lambda: here.npu.running() == 1)
        began = time.monotonic()
        here.memory.close()
        assert time.monotonic() - began < BOUND / 3
        assert here.npu.left().get("device_blocks", 0) == 1
        assert here.emulator.violations() == []
        here.emulator.resume()
        end()
        thread.close()
        eventually(lambda: here.npu.left().get("streams", 0) == 0)
        free_what_is_left(here.npu)


@pytest.mark.parametrize("turn", range(6))
def test_p1_whatever_runs_when_the_memory_closes_no_copy_meets_memory_that_was_freed(turn: int) -> None:
    """The emulator names every copy to or from memory that is not allocated, and every free under a copy."""
    with side(delay_us_min=0, delay_us_max=3000, seed=turn + 1) as here:
        caches = [here.cache(3 * MIB) for _ in range(6)]
        begun = threading.Semaphore(0)

        def work(number: int) -> LLMException | None:
            regions, until = caches[number].regions, Until(Deadline.after_ms(BOUND * 1000))
            begun.release()
            try:
                while True:
                    if number % 3 == 0:
                        self_copy = pairs((0, 0, 0, 2 * MIB, MIB))
                        list(here.memory.copying(regions, regions, self_copy, until=until))
                    elif number % 3 == 1:
                        here.write(regions, whole(3 * MIB), pattern(3 * MIB), until)
                    else:
                        here.read(regions, whole(3 * MIB), until)
            except LLMException as error:
                return error
            finally:
                here.memory.free(caches[number])

        threads = [Thread() for _ in caches]
        ends: list[Callable[..., LLMException | None]] = [
            thread.begin(partial(work, number)) for number, thread in enumerate(threads)
        ]
        for _ in threads:
            assert begun.acquire(timeout=BOUND)
        time.sleep(0.01 * turn)
        here.memory.close()
        for end in ends:
            error = end()
            assert error is not None
            assert error.status_code == LLMStatusCode.LLM_ENGINE_FINALIZED
        for thread in threads:
            thread.close()
        assert here.emulator.violations() == []
        assert not here.npu.left()
        assert here.failures == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_p1_a_forked_child_cannot_use_the_memory_and_closing_it_there_ends_nothing() -> None:
    with side() as here:
        cache, own = here.cache(), here.cache(placement=Placement.HOST)
        data = pattern(MIB)
        here.write(cache.regions, whole(MIB), data)
        before = here.emulator.counts()

        def check() -> None:
            for use in (
                here.cache,
                here.works,
                lambda: here.read(cache.regions, whole(64)),
            ):
                with pytest.raises(LLMException, match="forked child"):
                    use()
            assert here.read(own.regions, whole(64)) == bytes(64)
            here.memory.free(cache)
            here.memory.close()
            assert here.emulator.counts() == before

        assert in_a_child(check) == ""
        assert here.read(cache.regions, whole(MIB)) == bytes(data)
        here.memory.free(cache)
        here.memory.free(own)


# -- what a peer or a sick device may still use ------------------------------------------------------------------------


def test_p1_memory_that_somebody_may_use_for_ever_stays_when_the_rest_goes() -> None:
    with side(clean=False) as here:
        shared, own = here.cache(3 * MIB), here.cache(5 * MIB)
        here.memory.leak(shared.regions)
        before = here.memory._budget.used
        here.memory.free(shared)
        assert here.memory._budget.used == before, "memory that is gone for ever counts for ever"
        here.memory.free(own)
        assert here.memory._budget.used < before
        here.memory.close()
        assert here.npu.left().get("device_blocks", 0) == 1
        here.look(shared.regions[0])[:] = 7
        assert here.emulator.violations() == []
        free_what_is_left(here.npu)


def test_memory_of_the_caller_or_of_the_host_can_be_leaked_too() -> None:
    with side() as here:
        address = here.memory.device.malloc(MIB)
        here.memory.leak(here.memory.adopt([address], tensor_nbytes=MIB, placement=Placement.DEVICE))
        own = here.cache(placement=Placement.HOST)
        here.memory.leak(own.regions)
        here.memory.free(own)
        here.memory.device.free(address).result(BOUND)
        here.works()


def test_p1_a_close_that_leaves_memory_says_so_once() -> None:
    with side(abort_works=0, clean=False) as here:
        cache = here.cache()
        here.emulator.hang()
        thread = Thread()
        end = thread.begin(lambda: here.write(cache.regions, whole(MIB), pattern(MIB), Until(Deadline.after_ms(50))))
        eventually(lambda: here.npu.running() == 1)
        here.memory.close()
        here.memory.close()
        with pytest.raises(Unsettled):
            end()
        assert [str(error) for error in here.failures if "could not be stopped" in str(error)] != []
        assert len(here.failures) == 1
        here.emulator.resume()
        eventually(lambda: here.npu.running() == 0)
        thread.close()
        free_what_is_left(here.npu)


@pytest.mark.parametrize("what", ["taking", "clearing"])
def test_p1_a_device_that_does_not_answer_ends_an_allocation_and_what_it_may_clear_is_lost(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(ascend, "LONGEST", 0.1)
    with side(clean=False) as here:
        if what == "clearing":
            here.emulator.hang_sync()
        else:
            here.emulator.configure(call_us=400_000)
        with pytest.raises(LLMTimeoutError) as caught:
            here.cache()
        assert caught.value.status_code == LLMStatusCode.LLM_TIMEOUT
        assert bool(here.memory._budget.used) == (what == "clearing")
        here.emulator.configure(call_us=0)
        here.works()
        here.emulator.resume()
        here.memory.close()
        assert here.npu.left().get("device_blocks", 0) == (what == "clearing")
        free_what_is_left(here.npu)


@pytest.mark.parametrize("code", [107020, 507010])
def test_p1_a_block_whose_clearing_nobody_saw_end_is_lost_and_no_other(code: int) -> None:
    with side(clean=False) as here:
        here.emulator.inject("aclrtMemset", code)
        with pytest.raises(LLMException):
            here.cache()
        lost = here.memory._budget.used
        assert lost
        for _ in range(5):
            here.works()
        assert here.memory._budget.used == lost
        here.memory.close()
        assert here.npu.left().get("device_blocks", 0) == 1
        free_what_is_left(here.npu)
