"""Arrays in memory that peers can map: zeroed, whole, alive as long as anything refers to them."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import kvpull_async
import kvpull_sync
from kvpull_async import LLMException, LLMStatusCode
from kvpull_async.memory import shared
from kvpull_async.memory.arrays import allocate_shared
from tests import memfds


def test_both_packages_offer_it() -> None:
    assert kvpull_async.allocate_shared is kvpull_sync.allocate_shared is allocate_shared


@pytest.mark.parametrize("dtype", [np.uint8, "float16", np.float64, "<i8", np.bool_])
def test_an_array_is_zeroed_contiguous_and_writable(dtype: object) -> None:
    array = allocate_shared((3, 5, 7), dtype)  # type: ignore[arg-type]
    assert array.shape == (3, 5, 7)
    assert array.dtype == np.dtype(dtype)  # type: ignore[call-overload]
    assert array.flags.c_contiguous
    assert not array.any()
    array[...] = 1
    assert array.all()


def test_a_number_is_a_shape() -> None:
    assert allocate_shared(4096).shape == (4096,)
    assert allocate_shared(np.int64(8)).shape == (8,)  # type: ignore[arg-type]


def test_its_memory_is_found_as_a_shared_file_also_from_within() -> None:
    array = allocate_shared((4, 1000), np.int32)
    found = shared.find(array[2].ctypes.data, array[2].nbytes)
    assert found is not None
    assert found[1] == 2 * 4000
    assert found[0].nbytes == array.nbytes


def test_a_view_keeps_the_memory_and_the_last_one_gives_it_back() -> None:
    view = allocate_shared((2, 4096))[1]
    address = view.ctypes.data
    gc.collect()
    view[:] = 7
    assert (view == 7).all()
    assert shared.find(address, 1) is not None
    del view
    gc.collect()
    assert shared.find(address, 1) is None


def test_a_forked_child_writes_to_the_same_memory() -> None:
    array = allocate_shared((2, 4096))

    def child() -> str:
        array[1] = 7
        return "written"

    assert memfds.in_child(child) == "written"
    assert (array[1] == 7).all()


@pytest.mark.parametrize("shape", [(), 0, (3, 0), (-1,), (4, -2)])
def test_a_shape_without_elements_is_refused(shape: object) -> None:
    with pytest.raises(ValueError, match="dimensions of at least 1"):
        allocate_shared(shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("12", np.uint8),
        (2.5, np.uint8),
        ((2, None), np.uint8),
        (True, np.uint8),
        ((4, np.True_), np.uint8),
        (2, object),
    ],
)
def test_what_is_no_shape_or_type_is_a_type_error(shape: object, dtype: object) -> None:
    with pytest.raises(TypeError):
        allocate_shared(shape, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [2**46, (2**40, 2**40)])
def test_more_than_there_is_is_out_of_memory(shape: object) -> None:
    with pytest.raises(LLMException) as caught:
        allocate_shared(shape)  # type: ignore[arg-type]
    assert caught.value.status_code == LLMStatusCode.LLM_OUT_OF_MEMORY
