"""Host memory: zeroed, aligned, within budget, alive as long as anyone sees it, and handed out in bounded pieces."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvpull_async.memory.base import PIECE_BYTES, PIECE_VIEWS, Region, copy_batches
from kvpull_async.memory.host import HostMemory
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import Placement

HOST, DEVICE = Placement.HOST, Placement.DEVICE


def rows(*segments: tuple[int, int, int]) -> NDArray[np.int64]:
    return np.array(segments, np.int64).reshape(-1, 3)


# -- allocation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nbytes", "alignment"), [(1, 64), (100, 64), (4096, 4096), (5000, 4096)])
@pytest.mark.parametrize("placement", [HOST, DEVICE])
def test_tensors_are_zeroed_aligned_and_apart(nbytes: int, alignment: int, placement: Placement) -> None:
    memory = HostMemory()
    allocation = memory.allocate(tensors=3, tensor_nbytes=nbytes, placement=placement)
    assert [region.nbytes for region in allocation.regions] == [nbytes] * 3
    assert all(region.address % alignment == 0 for region in allocation.regions)
    assert {region.placement for region in allocation.regions} == {placement}
    views = memory.views(allocation.regions)
    assert all(bytes(view) == bytes(nbytes) for view in views)
    for number, view in enumerate(views, start=1):
        view[:] = bytes([number]) * nbytes
    assert [bytes(view) for view in views] == [bytes([number]) * nbytes for number in (1, 2, 3)]


def test_a_cache_holds_one_descriptor_however_many_tensors_and_no_file() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    allocation = HostMemory().allocate(tensors=80, tensor_nbytes=8192, placement=HOST)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
    assert allocation.nbytes == 80 * 8192
    del allocation
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_addresses_are_plain_memory_for_anyone() -> None:
    allocation = HostMemory().allocate(tensors=1, tensor_nbytes=16, placement=HOST)
    ctypes.memset(allocation.regions[0].address, 7, 16)
    assert bytes(HostMemory().views(allocation.regions)[0]) == b"\7" * 16


def test_a_view_keeps_the_memory_after_the_cache_has_gone() -> None:
    memory = HostMemory()
    allocation = memory.allocate(tensors=1, tensor_nbytes=4096, placement=HOST)
    view = memory.views(allocation.regions)[0]
    view[:3] = b"abc"
    memory.free(allocation)
    del allocation
    gc.collect()
    assert bytes(view[:3]) == b"abc"


# -- budgets -----------------------------------------------------------------------------------------------------------


def test_a_pool_gives_what_it_has_and_takes_it_back() -> None:
    memory = HostMemory({DEVICE: 8192})
    first = memory.allocate(tensors=1, tensor_nbytes=4096, placement=DEVICE)
    second = memory.allocate(tensors=1, tensor_nbytes=4096, placement=DEVICE)
    with pytest.raises(LLMException, match=r"0 of .*8192 are free") as caught:
        memory.allocate(tensors=1, tensor_nbytes=1, placement=DEVICE)
    assert caught.value.status_code == LLMStatusCode.LLM_OUT_OF_MEMORY
    memory.free(first)
    memory.free(second)
    memory.free(memory.allocate(tensors=2, tensor_nbytes=4096, placement=DEVICE))
    assert repr(memory) == "<HostMemory used: HOST=0, DEVICE=0>"


def test_each_placement_has_a_budget_of_its_own_or_none() -> None:
    memory = HostMemory({DEVICE: 64, HOST: None})
    memory.allocate(tensors=1, tensor_nbytes=64, placement=DEVICE)
    memory.allocate(tensors=1, tensor_nbytes=1 << 20, placement=HOST)
    with pytest.raises(LLMException, match="DEVICE memory"):
        memory.allocate(tensors=1, tensor_nbytes=1, placement=DEVICE)


@pytest.mark.parametrize("nbytes", [1 << 60, (1 << 62) + 1])
def test_more_than_the_machine_has_is_refused_and_counts_for_nothing(nbytes: int) -> None:
    memory = HostMemory()
    with pytest.raises(LLMException, match="bytes could not be allocated") as caught:
        memory.allocate(tensors=1, tensor_nbytes=nbytes, placement=HOST)
    assert caught.value.status_code == LLMStatusCode.LLM_OUT_OF_MEMORY
    assert repr(memory) == "<HostMemory used: HOST=0, DEVICE=0>"


def test_threads_that_allocate_at_once_stay_within_the_budget() -> None:
    memory = HostMemory({HOST: 64 * 5})
    refused: list[LLMException] = []

    def allocate() -> None:
        try:
            memory.allocate(tensors=1, tensor_nbytes=64, placement=HOST)
        except LLMException as error:
            refused.append(error)

    threads = [threading.Thread(target=allocate) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3
    assert "HOST=320" in repr(memory)


# -- memory of the caller ----------------------------------------------------------------------------------------------


def test_adopting_does_not_touch_the_memory() -> None:
    regions = HostMemory({HOST: 1}).adopt([0x10, 2**64 - 64], tensor_nbytes=64, placement=HOST)
    assert regions == (Region(0x10, 64, HOST), Region(2**64 - 64, 64, HOST))


def test_adopted_memory_is_seen_by_both_sides() -> None:
    array = np.zeros(64, np.uint8)
    memory = HostMemory()
    view = memory.views(memory.adopt([array.ctypes.data], tensor_nbytes=64, placement=HOST))[0]
    view[5] = 9
    array[6] = 8
    assert array[5] == 9
    assert view[6] == 8


def test_addresses_without_memory_are_told_by_tensor() -> None:
    array, memory = np.zeros(64, np.uint8), HostMemory()
    for writing in (False, True):
        with pytest.raises(LLMException, match=r"tensor 1 .*0x10,") as caught:
            memory.reach(memory.adopt([array.ctypes.data, 0x10], tensor_nbytes=64, placement=HOST), writing=writing)
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID


def test_read_only_memory_may_be_read_and_the_tensor_that_cannot_be_written_is_named() -> None:
    array, memory = np.zeros(64, np.uint8), HostMemory()
    constant = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ), np.uint8)
    regions = memory.adopt([array.ctypes.data, constant.ctypes.data], tensor_nbytes=64, placement=HOST)
    memory.reach(regions, writing=False)
    with pytest.raises(LLMException, match=r"tensor 1 .* cannot be written: it is read-only") as caught:
        memory.reach(regions, writing=True)
    assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID


# -- pieces ------------------------------------------------------------------------------------------------------------


def adopted(memory: HostMemory, *arrays: NDArray[np.uint8]) -> tuple[Region, ...]:
    return memory.adopt([array.ctypes.data for array in arrays], tensor_nbytes=arrays[0].nbytes, placement=HOST)


def test_what_is_lent_cannot_be_written() -> None:
    array = np.zeros(64, np.uint8)
    memory = HostMemory()
    (batch,) = memory.lending(adopted(memory, array), rows((0, 8, 16)))
    assert [view.readonly for view in batch] == [True]
    (batch,) = memory.landing(adopted(memory, array), rows((0, 8, 16)))
    assert [(view.readonly, view.nbytes) for view in batch] == [(False, 16)]


def test_pieces_are_bounded_in_bytes() -> None:
    array = np.zeros(3 * PIECE_BYTES + 5, np.uint8)
    memory = HostMemory()
    batches = list(memory.lending(adopted(memory, array), rows((0, 3, array.size - 3))))
    sizes = [sum(view.nbytes for view in batch) for batch in batches]
    assert sizes == [PIECE_BYTES] * 3 + [2]


def test_pieces_are_bounded_in_number() -> None:
    array = np.zeros(4 * PIECE_VIEWS, np.uint8)
    memory = HostMemory()
    table = rows(*((0, 2 * i, 1) for i in range(2 * PIECE_VIEWS - 1)))
    batches = list(memory.lending(adopted(memory, array), table))
    assert [len(batch) for batch in batches] == [PIECE_VIEWS, PIECE_VIEWS - 1]


def test_no_segments_no_pieces() -> None:
    memory = HostMemory()
    assert list(memory.lending(adopted(memory, np.zeros(4, np.uint8)), rows())) == []


segments = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 50), st.integers(0, 14)).map(lambda row: (row[0], row[1], row[2])),
    max_size=12,
)


@given(segments)
def test_the_pieces_are_the_segments_in_order(table: list[tuple[int, int, int]]) -> None:
    arrays = [np.arange(64, dtype=np.uint8), np.arange(64, 128, dtype=np.uint8)]
    memory = HostMemory()
    lent = b"".join(bytes(view) for batch in memory.lending(adopted(memory, *arrays), rows(*table)) for view in batch)
    assert lent == b"".join(bytes(arrays[tensor][offset : offset + n]) for tensor, offset, n in table)


def test_p6_a_hundred_thousand_rows_are_no_work_for_the_garbage_collector() -> None:
    """It would hold up every thread, for the longer the more there is in the process."""
    backend = HostMemory()
    made = backend.allocate(tensors=1, tensor_nbytes=1_600_000, placement=Placement.HOST)
    table = np.zeros((100_000, 3), np.int64)
    table[:, 1], table[:, 2] = np.arange(100_000) * 16, 8
    gc.collect()
    before = sum(generation["collections"] for generation in gc.get_stats())
    for _ in backend.landing(made.regions, table):
        pass
    assert sum(generation["collections"] for generation in gc.get_stats()) - before < 20
    backend.free(made)


def test_a_landing_is_filled_where_the_segments_say_and_nowhere_else() -> None:
    source, target = np.arange(1, 65, dtype=np.uint8), np.zeros(64, np.uint8)
    memory = HostMemory()
    reading, writing = rows((0, 10, 4), (0, 30, 2)), rows((0, 60, 3), (0, 0, 3))
    list(
        copy_batches(memory.lending(adopted(memory, source), reading), memory.landing(adopted(memory, target), writing))
    )
    expected = np.zeros(64, np.uint8)
    expected[60:63], expected[0:3] = (11, 12, 13), (14, 31, 32)
    assert target.tolist() == expected.tolist()


def test_a_copy_inside_takes_as_many_rows_at_a_time_as_make_a_piece() -> None:
    source, target = (
        np.arange(4 * PIECE_BYTES // 4, dtype=np.uint32).view(np.uint8),
        np.zeros(4 * PIECE_BYTES, np.uint8),
    )
    memory, each = HostMemory(), PIECE_BYTES // 4
    pairs = np.array([(0, i * each, 0, (15 - i) * each, each) for i in range(16)], np.int64)
    assert list(memory.copying(adopted(memory, source), adopted(memory, target), pairs)) == [PIECE_BYTES] * 4
    assert np.array_equal(target.reshape(16, each), source.reshape(16, each)[::-1])
    assert list(memory.copying(adopted(memory, source), adopted(memory, target), pairs[:0])) == []


def test_closing_the_backend_twice_is_harmless() -> None:
    memory = HostMemory()
    memory.close()
    memory.close()


def test_p8_closing_the_backend_gives_descriptors_back_and_leaves_the_memory_to_its_holders() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    memory = HostMemory()
    made = memory.allocate(tensors=2, tensor_nbytes=4096, placement=Placement.HOST)
    view = memory.views(made.regions)[1]
    view[:4] = b"kept"
    memory.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert bytes(view[:4]) == b"kept"
