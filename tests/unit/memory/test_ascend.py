"""Memory on an NPU: cleared, within budget, copied every way there is, and given back only when nothing touches it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.memory.ascend import open_memory
from kvpull_async.memory.base import PIECE_BYTES, Until, copy_batches
from kvpull_async.memory.npu.codes import AclError, meaning
from kvpull_async.memory.npu.streams import Unsettled
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.values import Placement
from tests.unit.memory.ascend_side import DEVICE, HOST, MIB, free_what_is_left, iter_once, pairs, side, whole
from tests.unit.memory.emulated import BOUND, Thread, emulated, pattern

# -- regions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 100, 4096, 3 * MIB + 5])
def test_tensors_are_on_the_device_cleared_aligned_and_apart(nbytes: int) -> None:
    with side(number=1) as here:
        made = here.cache(nbytes, tensors=3)
        assert [region.nbytes for region in made.regions] == [nbytes] * 3
        assert {region.device for region in made.regions} == {1}
        assert {region.placement for region in made.regions} == {DEVICE}
        assert all(region.address % 64 == 0 for region in made.regions)
        for region, following in zip(made.regions, made.regions[1:], strict=False):
            assert following.address >= region.address + nbytes + 32
        assert not any(here.look(region).any() for region in made.regions)
        assert here.npu.left().get("device_blocks", 0) == 1
        here.memory.free(made)


def test_memory_that_is_used_again_is_cleared_again() -> None:
    with side() as here:
        first = here.cache()
        address = first.regions[0].address
        here.write(first.regions, whole(MIB), pattern(MIB))
        here.memory.free(first)
        again = here.cache()
        assert again.regions[0].address == address
        assert not here.look(again.regions[0]).any()
        assert here.emulator.count("aclrtMalloc") == 1
        here.memory.free(again)


def test_caches_of_the_host_are_in_host_memory() -> None:
    with side() as here:
        made = here.cache(placement=HOST)
        assert made.regions[0].device is None
        here.memory.views(made.regions)[0][:3] = b"abc"
        assert here.read(made.regions, whole(3)) == b"abc"
        assert here.npu.left().get("device_blocks", 0) == 0
        here.memory.free(made)


def test_the_host_cannot_look_into_the_device() -> None:
    with side() as here:
        made = here.cache()
        with pytest.raises(LLMException, match="copy_cache") as caught:
            here.memory.views(made.regions)
        assert caught.value.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
        assert here.memory.views([]) == []
        here.memory.free(made)


def test_memory_of_a_callers_own_is_used_where_it_is() -> None:
    with side() as here:
        address = here.memory.device.malloc(MIB)
        owner = object()
        regions = here.memory.adopt([address], tensor_nbytes=MIB, placement=DEVICE, owners=[owner])
        assert (regions[0].address, regions[0].device, regions[0].owner) == (address, 0, owner)
        data = pattern(MIB - 3)
        here.write(regions, whole(MIB - 3, start=3), data)
        assert np.array_equal(here.look(regions[0])[3:], data)
        here.memory.disown(regions)
        here.memory.device.free(address).result(BOUND)


def test_it_describes_itself_and_publishes_only_what_the_host_has() -> None:
    with side(number=1) as here:
        assert here.memory.describe()["device_id"] == 1
        assert here.memory.publications is not None
        assert not here.memory.returning(DEVICE)
        assert "AscendMemory" in repr(here.memory)


# -- budgets and full devices ------------------------------------------------------------------------------------------


def test_the_budget_of_the_device_is_kept() -> None:
    with side(budgets={DEVICE: 4 * MIB, HOST: MIB}) as here:
        first = here.cache(3 * MIB)
        with pytest.raises(LLMException, match="DEVICE memory") as caught:
            here.cache(2 * MIB)
        assert caught.value.status_code == LLMStatusCode.LLM_OUT_OF_MEMORY
        with pytest.raises(LLMException, match="HOST memory"):
            here.cache(2 * MIB, placement=HOST)
        here.memory.free(first)
        here.memory.free(here.cache(3 * MIB + 5))


def test_a_full_device_says_so_and_takes_nothing_of_the_budget() -> None:
    with side(device_bytes=8 * MIB, budgets={DEVICE: 100 * MIB}) as here:
        for _ in range(20):
            with pytest.raises(AclError) as caught:
                here.cache(10 * MIB)
            assert caught.value.status_code == LLMStatusCode.LLM_OUT_OF_MEMORY
        here.memory.free(here.cache(6 * MIB))


def test_memory_that_is_kept_is_given_back_before_the_device_is_said_to_be_full() -> None:
    with side(device_bytes=100 * MIB, call_us=2000) as here:
        for _ in range(4):
            kept = [here.cache(12 * MIB) for _ in range(7)]
            for cache in kept:
                here.memory.free(cache)
            here.memory.free(here.cache(90 * MIB))


@pytest.mark.parametrize("code", [207001, 507899, 107002])
@pytest.mark.parametrize("function", ["aclrtMalloc", "aclrtMemset"])
def test_an_allocation_that_fails_says_why_and_leaves_nothing(function: str, code: int) -> None:
    with side(budgets={DEVICE: 2 * MIB}) as here:
        for _ in range(5):
            here.emulator.inject(function, code)
            with pytest.raises(AclError) as caught:
                here.cache()
            assert caught.value.status_code == meaning(code).status
        here.memory.free(here.cache())
        assert here.npu.left().get("device_blocks", 0) == 1


@pytest.mark.parametrize("code", [507012, 107020])
def test_p1_memory_whose_clearing_nobody_saw_end_is_never_used_again(code: int) -> None:
    with side(budgets={DEVICE: 3 * MIB}, clean=False) as here:  # it counts for ever
        here.emulator.inject("aclrtMemset", code)
        with pytest.raises(AclError):
            here.cache()
        again = here.cache()
        assert here.emulator.count("aclrtMalloc") == 2
        here.memory.free(again)
        here.memory.close()
        assert here.npu.left().get("device_blocks", 0) == 1
        free_what_is_left(here.npu)


@pytest.mark.parametrize("way", ["copy", "landing"])
def test_p1_a_copy_whose_end_nobody_saw_hangs_until_the_end_and_no_memory_is_freed(way: str) -> None:
    with side(clean=False) as here:
        cache, other = here.cache(), here.cache()
        here.emulator.inject("aclrtMemcpy", 507012)
        ways: dict[str, Callable[[], object]] = {
            "copy": lambda: list(here.memory.copying(other.regions, cache.regions, pairs((0, 1, 0, 1, 100)))),
            "landing": lambda: here.write(cache.regions, whole(100, start=1), pattern(100)),
        }
        thread = Thread()
        end = thread.begin(ways[way])
        with pytest.raises(TimeoutError, match="has not ended"):
            end(0.2)
        here.works()
        here.memory.close()
        with pytest.raises(Unsettled):
            end()
        here.memory.free(cache)
        assert here.emulator.count("aclrtFree") == 0
        thread.close()
        free_what_is_left(here.npu)


# -- copies ------------------------------------------------------------------------------------------------------------

SCATTERED = pairs(
    (0, 0, 1, 0, 4096), (0, 4096, 1, 8192, 100), (1, 5000, 0, 5001, 3000), (0, 64 * 1024, 1, 128 * 1024, PIECE_BYTES),
    (1, 64, 0, 64, 64), (1, 100_000, 0, 1_300_000, 1), (0, 20_000, 1, 20_032, 5_000),
)  # fmt: skip


@pytest.mark.parametrize("into", [HOST, DEVICE])
@pytest.mark.parametrize("out_of", [HOST, DEVICE])
def test_a_copy_goes_between_any_two_places(out_of: Placement, into: Placement) -> None:
    with side(delay_us_min=0, delay_us_max=3000) as here:
        source, target = here.cache(2 * MIB, 2, out_of), here.cache(2 * MIB, 2, into)
        for number, region in enumerate((*source.regions, *target.regions)):
            here.look(region)[:] = pattern(2 * MIB, seed=number)
        expected = [here.look(region).copy() for region in target.regions]
        for src, at, dst, place, length in SCATTERED.tolist():
            expected[dst][place : place + length] = here.look(source.regions[src])[at : at + length]
        steps = list(here.memory.copying(source.regions, target.regions, SCATTERED))
        assert sum(steps) == int(SCATTERED[:, 4].sum())
        assert max(steps) <= PIECE_BYTES
        for region, wanted in zip(target.regions, expected, strict=True):
            assert np.array_equal(here.look(region), wanted)
        here.memory.free(source)
        here.memory.free(target)


@pytest.mark.parametrize("release", ["8.0", "8.2", "8.5"])
def test_older_releases_carry_the_same_bytes(release: str) -> None:
    """Up to 8.1 an asynchronous copy of addresses that 64 does not divide delivers garbage."""
    with side(release=release) as here:
        source, target = here.cache(2 * MIB), here.cache(2 * MIB)
        rows = np.array([(0, at * 700 + at % 3, 300 + at % 350) for at in range(1000)] + [(0, MIB - 1, MIB)], np.int64)
        data = pattern(int(rows[:, 2].sum()))
        here.write(source.regions, rows, data)
        assert here.read(source.regions, rows) == bytes(data)
        across = np.concatenate([rows[:, :2], rows], axis=1)
        assert sum(here.memory.copying(source.regions, target.regions, across)) == data.size
        assert here.read(target.regions, rows) == bytes(data)
        here.memory.free(source)
        here.memory.free(target)


def test_a_copy_of_very_many_rows_goes_in_bounded_steps() -> None:
    with side(delay_us=0) as here:
        source, target = here.cache(), here.cache()
        here.look(source.regions[0])[:] = data = pattern(MIB)
        count = 10_000
        table = np.zeros((count, 5), np.int64)
        table[:, 1] = table[:, 3] = np.arange(count) * 64
        table[:, 4] = 64
        steps = list(here.memory.copying(source.regions, target.regions, table))
        assert sum(steps) == count * 64
        assert len(steps) >= 3
        assert np.array_equal(here.look(target.regions[0])[: count * 64], data[: count * 64])
        assert list(here.memory.copying(source.regions, target.regions, table[:0])) == []
        here.memory.free(source)
        here.memory.free(target)


@pytest.mark.parametrize("ending", ["deadline", "stop", "close"])
@pytest.mark.parametrize("into", [HOST, DEVICE])
def test_p1_a_copy_that_is_over_touches_nothing_any_more(into: Placement, ending: str) -> None:
    with side() as here:
        source, target = here.cache(4 * MIB), here.cache(4 * MIB, placement=into)
        rows = pairs(*((0, at * PIECE_BYTES, 0, at * PIECE_BYTES, PIECE_BYTES) for at in range(4)))
        until = Until(Deadline.after_ms(100) if ending == "deadline" else Deadline.after_ms(BOUND * 1000))
        copy = here.memory.copying(source.regions, target.regions, rows, until=until)
        if ending == "close":
            next(copy)
        else:
            here.emulator.hang(times=-1)
            if ending == "stop":
                threading.Timer(0.05, until.stop).start()
            with pytest.raises(LLMTimeoutError if ending == "deadline" else LLMException):
                list(copy)
        copy.close()
        assert here.npu.running() == 0
        here.memory.free(source)
        here.memory.free(target)
        here.emulator.resume()
        here.works()


@pytest.mark.parametrize("code", [507053, 107000, 207001])
@pytest.mark.parametrize("function", ["task", "aclrtMemcpyAsync", "aclrtMemcpy"])
def test_an_error_within_the_device_is_raised_and_later_copies_work(function: str, code: int) -> None:
    with side() as here:
        source, target = here.cache(), here.cache()
        rows = pairs((0, 0, 0, 0, 640), (0, 1001, 0, 1001, 640))
        here.emulator.inject(function, code)
        with pytest.raises(AclError) as caught:
            list(here.memory.copying(source.regions, target.regions, rows))
        assert caught.value.status_code == meaning(code).status
        assert sum(here.memory.copying(source.regions, target.regions, rows)) == 1280
        here.memory.free(source)
        here.memory.free(target)


def test_p1_what_has_landed_is_said_in_the_order_of_the_stream() -> None:
    with side(delay_us_min=0, delay_us_max=10_000) as here:
        cache = here.cache(6 * MIB)
        data, heard = pattern(6 * MIB), list[int]()

        def landed(nbytes: int) -> None:
            heard.append(nbytes)
            assert np.array_equal(here.look(cache.regions[0])[:nbytes], data[:nbytes])

        landing = here.memory.landing(cache.regions, whole(6 * MIB), landed=landed)
        for _ in copy_batches(iter_once(data), landing):
            pass
        assert heard == sorted(heard)
        assert heard[-1] == 6 * MIB
        here.memory.free(cache)


def test_nothing_to_copy_is_nothing_to_wait_for() -> None:
    with side() as here:
        cache = here.cache()
        before = here.emulator.counts()
        assert list(here.memory.landing(cache.regions, whole(0))) == []
        assert list(here.memory.lending(cache.regions, whole(0))) == []
        assert list(here.memory.lending((), whole(0)[:0])) == []
        assert list(here.memory.landing(cache.regions, whole(0)[:0])) == []
        assert list(here.memory.lending(cache.regions, whole(0)[:0])) == []
        assert here.emulator.counts() == before
        here.memory.free(cache)


# -- opening -----------------------------------------------------------------------------------------------------------


def test_a_device_that_is_not_there_cannot_be_opened() -> None:
    with emulated(devices=1) as npu:
        with pytest.raises(LLMException, match="no device 1") as caught:
            open_memory(npu.acl, device_id=1, budgets={})
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID


def test_two_memories_of_one_device_do_not_disturb_each_other() -> None:
    with side() as here:
        other = open_memory(here.npu.acl, device_id=0, budgets={})
        cache = other.allocate(tensors=1, tensor_nbytes=MIB, placement=DEVICE)
        here.works()
        other.close()
        here.works()
        assert cache.regions[0].device == 0


def test_nobodys_context_changes_by_what_the_memory_does() -> None:
    with side() as here:
        thread = Thread()
        library: Any = ctypes.CDLL(str(here.emulator.path))

        def use(own: int | None) -> None:
            here.works()
            source = here.cache()
            list(here.memory.copying(source.regions, here.cache().regions, pairs((0, 0, 0, 0, MIB))))
            assert here.npu.context() == own

        def with_own() -> None:
            here.npu.bind()
            own = ctypes.c_void_p()
            assert library.aclrtCreateContext(ctypes.byref(own), 1) == 0
            use(own.value)
            assert library.aclrtDestroyContext(own) == 0

        thread.run(lambda: use(None))
        thread.run(with_own)
        thread.close()
