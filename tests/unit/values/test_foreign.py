"""Tensors of numpy and torch as memory to register: what is read of them, what is refused and how it is named."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import CacheDesc, DataType, Placement
from kvpull_async.values.foreign import Foreign, pointers, read
from tests.torch_cpu import torch_cpu

HALF = CacheDesc(1, [2, 8], DataType.DT_FLOAT16)
BYTES = CacheDesc(1, [2, 16], DataType.DT_UINT8)


def one(tensor: Any, desc: CacheDesc = HALF) -> Foreign:
    (found,) = read(desc, [tensor])
    return found


def refusal(tensor: Any, desc: CacheDesc = HALF) -> str:
    with pytest.raises(LLMException) as caught:
        read(desc, [tensor])
    assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
    return str(caught.value)


# -- numpy -------------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_an_array_is_read_where_it_lies_and_held() -> None:
    array = np.zeros((2, 8), np.float16)
    found = one(array)
    assert (found.address, found.nbytes) == (array.ctypes.data, 32)
    gone = weakref.ref(array)
    del array
    gc.collect()
    assert gone() is not None
    del found
    gc.collect()
    assert gone() is None


def test_a_contiguous_part_of_a_larger_array_counts_by_itself() -> None:
    whole = np.zeros((3, 2, 8), np.float16)
    assert one(whole[1]).address == whole.ctypes.data + 32


def test_the_shape_is_of_no_consequence_and_a_tuple_will_do() -> None:
    desc = CacheDesc(2, [2, 8], DataType.DT_FLOAT16)
    arrays = (np.zeros(16, np.float16), np.zeros((4, 1, 4), np.float16))
    assert [found.address for found in read(desc, arrays)] == [array.ctypes.data for array in arrays]


def test_reading_does_not_touch_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.write_bytes(b"")
    with path.open("r+b") as file:
        file.truncate(4096)
    array = np.memmap(path, np.uint8, "r+", shape=(4096,))
    path.write_bytes(b"")  # from now on a look at it is a SIGBUS
    assert one(array, CacheDesc(1, [4096], DataType.DT_UINT8)).nbytes == 4096


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((2, 16), np.float16)[:, ::2], r"tensors\[0\] is not contiguous"),
        (np.zeros((8, 2), np.float16).T, r"tensors\[0\] is not contiguous"),
        (np.broadcast_to(np.float16(0), (2, 8)), "not contiguous"),
        (np.zeros(15, np.float16), r"tensors\[0\] has 30 bytes, cache_desc says 32"),
        (np.zeros(32, np.float16), "64 bytes"),
        (np.zeros(0, np.float16), "0 bytes"),
        (np.zeros(4, object), "Python objects"),
        (np.frombuffer(bytes(32), np.float16), "read-only"),
    ],
)
def test_what_cannot_be_registered_is_named(array: Any, said: str) -> None:
    with pytest.raises(LLMException, match=said):
        one(array)
    refusal(array)


@pytest.mark.parametrize(
    "item", [None, 4096, [1.0], bytes(32), bytearray(32), memoryview(bytearray(32)), np.float16(1)]
)
def test_other_objects_are_a_type_error_with_their_place(item: Any) -> None:
    desc = CacheDesc(2, [2, 8], DataType.DT_FLOAT16)
    with pytest.raises(TypeError, match=r"tensors\[1\] must be a torch tensor or a numpy array"):
        read(desc, [np.zeros(16, np.float16), item])


@pytest.mark.parametrize("tensors", [np.zeros((1, 2, 8), np.float16), {0: np.zeros(16, np.float16)}, "tensors", 1])
def test_they_come_in_a_list_or_a_tuple(tensors: Any) -> None:
    with pytest.raises(TypeError, match="tensors must be list or tuple"):
        read(HALF, tensors)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_one_is_needed_for_each_of_the_descriptors(count: int) -> None:
    desc = CacheDesc(2, [2, 8], DataType.DT_FLOAT16)
    with pytest.raises(LLMException, match=f"tensors has {count} tensors for 2"):
        read(desc, [np.zeros(16, np.float16)] * count)


def test_a_descriptor_without_a_size_is_refused() -> None:
    desc = copy.copy(HALF)
    desc.update_dim(0, -2)
    refusal(np.zeros(16, np.float16), desc)


# -- types -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [np.uint8, np.int16, np.uint16, np.int64, np.bool_, np.complex64, "V2", "S4", ">f2"])
def test_bytes_count_whatever_they_are_called(given: Any) -> None:
    assert one(np.zeros(32 // np.dtype(given).itemsize, given)).nbytes == 32


@pytest.mark.parametrize("given", [np.float16, np.float32, np.float64])
def test_any_type_may_be_registered_as_bytes(given: Any) -> None:
    assert one(np.zeros(32 // np.dtype(given).itemsize, given), BYTES).nbytes == 32


@pytest.mark.parametrize(
    ("given", "said"),
    [(np.float16, DataType.DT_BF16), (np.float32, DataType.DT_FLOAT16), (np.float64, DataType.DT_FLOAT)],
)
def test_one_floating_point_type_is_not_another(given: Any, said: DataType) -> None:
    desc = CacheDesc(1, [32 // said.nbytes], said)
    told = refusal(np.zeros(32 // np.dtype(given).itemsize, given), desc)
    assert np.dtype(given).name in told
    assert said.name in told


# -- torch -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool", "float8_e4m3fn"],
)
def test_tensors_of_every_type(name: str) -> None:
    torch = torch_cpu()
    kinds = {"float32": DataType.DT_FLOAT, "float16": DataType.DT_FLOAT16, "bfloat16": DataType.DT_BF16}
    kinds["float64"] = DataType.DT_DOUBLE
    kind = kinds.get(name, DataType.DT_UINT8)
    tensor = torch.zeros(32, dtype=torch.uint8).view(getattr(torch, name))
    found = one(tensor, CacheDesc(1, [32 // kind.nbytes], kind, Placement.HOST))
    assert (found.address, found.nbytes, found.dtype) == (tensor.data_ptr(), 32, name)


def test_a_tensor_that_is_trained_and_a_parameter() -> None:
    torch = torch_cpu()
    for tensor in (
        torch.zeros(16, dtype=torch.float16, requires_grad=True),
        torch.nn.Parameter(torch.zeros(16, dtype=torch.float16)),
        torch.zeros(16, dtype=torch.float16, requires_grad=True) * 2,
    ):
        assert one(tensor).address == tensor.data_ptr()


def test_the_memory_stays_when_the_tensor_is_dropped_or_given_other_memory() -> None:
    torch = torch_cpu()
    array = np.zeros(16, np.float16)
    gone, address = weakref.ref(array), array.ctypes.data
    tensor = torch.from_numpy(array)
    del array
    found = one(tensor)
    tensor.data = torch.ones(16, dtype=torch.float16)
    gc.collect()
    assert gone() is not None
    assert found.address == address
    del tensor, found
    gc.collect()
    assert gone() is None


def test_where_arrays_are_now_is_asked_only_beside_tensors() -> None:
    torch = torch_cpu()
    array, tensor = np.zeros(16, np.float16), torch.zeros(16, dtype=torch.float16)
    assert pointers([array, None]) == ()
    desc = CacheDesc(2, [2, 8], DataType.DT_FLOAT16)
    found = read(desc, [array, tensor])
    told = pointers([memory.owner for memory in found])
    assert [pointer() for pointer in told] == [memory.address for memory in found]


@pytest.mark.parametrize("moving", ["share_memory_", "resize"])
def test_what_is_held_tells_when_a_tensor_was_given_other_memory_in_place(moving: str) -> None:
    torch = torch_cpu()
    tensor = torch.zeros(16, dtype=torch.float16)
    found = one(tensor)
    (pointer,) = pointers([found.owner])
    assert pointer() == found.address
    if moving == "resize":
        tensor.untyped_storage().resize_(2**24)
    else:
        tensor.share_memory_()
    assert pointer() == tensor.data_ptr() != found.address


def test_a_part_of_a_tensor_begins_where_it_begins() -> None:
    torch = torch_cpu()
    whole = torch.zeros(3, 2, 8, dtype=torch.float16)
    assert one(whole[2]).address == whole.data_ptr() + 64


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda torch: torch.zeros(8, 2, dtype=torch.float16).t(), "not contiguous"),
        (lambda torch: torch.zeros(2, 16, dtype=torch.float16)[:, ::2], "not contiguous"),
        (lambda torch: torch.zeros(1, 8, dtype=torch.float16).expand(2, 8), "not contiguous"),
        (lambda torch: torch.zeros(2, 8, dtype=torch.float16, device="meta"), "on meta"),
        (lambda torch: torch.zeros(2, 8, dtype=torch.float16).to_sparse(), "not contiguous"),
        (lambda torch: torch.zeros(2, 8).to_mkldnn(), "no memory to register"),
        (lambda torch: torch.zeros(0, dtype=torch.float16), "no memory"),
        (lambda torch: torch.zeros(15, dtype=torch.float16), "30 bytes, cache_desc says 32"),
        (lambda torch: torch.zeros(2, 8, dtype=torch.bfloat16), "holds bfloat16, cache_desc says DT_FLOAT16"),
        (lambda torch: torch.zeros(8, dtype=torch.float32), "holds float32, cache_desc says DT_FLOAT16"),
    ],
)
def test_tensors_that_cannot_be_registered(made: Any, said: str) -> None:
    torch = torch_cpu()
    told = refusal(made(torch))
    assert said in told
    assert "tensors[0]" in told


def test_the_class_of_tensors_is_none() -> None:
    torch = torch_cpu()
    with pytest.raises(TypeError, match=r"tensors\[0\]"):
        one(torch.Tensor)
