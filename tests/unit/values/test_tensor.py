"""Tensors over shared memory: no copy unless asked for, and bfloat16 widened exactly."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from kvpull_async.values import DataType, Tensor, TensorDesc
from tests.torch_cpu import torch_cpu

BF16 = DataType.DT_BF16


def test_desc() -> None:
    shape = [2, 3]
    desc = TensorDesc(DataType.DT_FLOAT, shape)
    shape.clear()
    desc.shape.clear()
    assert (desc.dtype, desc.shape) == (DataType.DT_FLOAT, [2, 3])
    assert TensorDesc(DataType.DT_FLOAT, (4,)).shape == [4]


@pytest.mark.parametrize(("dtype", "shape"), [(None, [1]), (0, [1]), (BF16, None), (BF16, [1.0])])
def test_desc_refusals(dtype: Any, shape: Any) -> None:
    with pytest.raises(TypeError):
        TensorDesc(dtype, shape)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (np.float32, DataType.DT_FLOAT),
        (np.float16, DataType.DT_FLOAT16),
        (np.uint16, DataType.DT_UINT16),
        (np.bool_, DataType.DT_BOOL),
        ("S5", DataType.DT_STRING),
        ("U5", DataType.DT_STRING),
    ],
)
def test_an_array_brings_its_own_type_and_shape(dtype: Any, expected: DataType) -> None:
    tensor = Tensor(np.zeros((2, 3), dtype))
    assert (tensor.dtype, tensor.shape) == (expected, [2, 3])


def test_numpy_shares_memory_unless_a_copy_is_asked_for() -> None:
    data = np.arange(6, dtype=np.float16).reshape(2, 3)
    tensor = Tensor(data)
    copied = tensor.numpy(copy=True)
    tensor.numpy()[0, 0] = 9
    assert data[0, 0] == 9
    assert copied[0, 0] == 0
    assert np.shares_memory(tensor.view(), data)


def test_bfloat16_is_widened_by_numpy_and_not_by_view() -> None:
    bits = np.array([0x3F80, 0xC000, 0x7F80, 0x0001], np.uint16)
    tensor = Tensor(bits, TensorDesc(BF16, [4]))
    widened = tensor.numpy()
    assert widened.dtype == np.float32
    assert widened.tolist()[:3] == [1.0, -2.0, float("inf")]
    assert widened.view(np.uint32).tolist() == [int(b) << 16 for b in bits]
    assert np.shares_memory(tensor.view(), bits)


def test_a_buffer_is_shared() -> None:
    memory = bytearray(8)
    tensor = Tensor.from_buffer(memoryview(memory), TensorDesc(BF16, (2, 2)))
    tensor.view()[1, 1] = 0x3F80
    assert memory[6:] == b"\x80\x3f"
    assert tensor.shape == [2, 2]


@pytest.mark.parametrize("nbytes", [0, 6, 7, 10])
def test_a_buffer_of_another_size_is_refused(nbytes: int) -> None:
    with pytest.raises(RuntimeError, match="do not hold"):
        Tensor.from_buffer(memoryview(bytearray(nbytes)), TensorDesc(BF16, [4]))


def test_a_tensor_of_a_tensor_shares_data_and_type() -> None:
    first = Tensor(np.zeros(2, np.uint16), TensorDesc(BF16, [2]))
    second = Tensor(first)
    assert (second.dtype, second.shape) == (BF16, [2])
    assert np.shares_memory(first.view(), second.view())


def test_one_int() -> None:
    assert (Tensor(5).dtype, Tensor(5).shape) == (DataType.DT_INT64, [])
    assert Tensor(5, TensorDesc(DataType.DT_INT8, [])).numpy().dtype == np.int8


def test_strings_need_a_copy() -> None:
    tensor = Tensor(np.array(["a", "bc"]))
    with pytest.raises(RuntimeError, match="copy=True"):
        tensor.numpy()
    assert tensor.numpy(copy=True).tolist() == ["a", "bc"]


@pytest.mark.parametrize(
    ("data", "desc"),
    [
        (np.zeros((2, 2), np.float32), TensorDesc(DataType.DT_FLOAT, [4])),
        (np.zeros(2, np.float32), TensorDesc(DataType.DT_INT32, [2])),
        (np.zeros(2, np.float32), TensorDesc(DataType.DT_STRING, [2])),
        (np.zeros((2, 4), np.float32)[:, ::2], None),
        (np.zeros(2, np.complex64), None),
        (Tensor(np.zeros(2, np.uint16)), TensorDesc(BF16, [2])),
        (Tensor(np.zeros(2, np.uint16)), TensorDesc(DataType.DT_UINT16, [1, 2])),
        (5, TensorDesc(DataType.DT_INT8, [1])),
    ],
)
def test_disagreement_is_a_runtime_error(data: Any, desc: TensorDesc | None) -> None:
    with pytest.raises(RuntimeError):
        Tensor(data, desc)


@pytest.mark.parametrize(("data", "desc"), [(None, None), ([1], None), (True, None), (1.5, None), (1, "desc")])
def test_other_data_is_a_type_error(data: Any, desc: Any) -> None:
    with pytest.raises(TypeError):
        Tensor(data, desc)


# -- other libraries ---------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_numpy_takes_it_without_a_copy() -> None:
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = Tensor(data)
    taken = np.from_dlpack(tensor)
    assert tensor.__dlpack_device__() == (1, 0)
    assert taken.shape == (2, 3)
    assert np.shares_memory(taken, data)
    data[1, 2] = 9
    assert taken[1, 2] == 9


@pytest.mark.smoke
def test_the_bits_of_bfloat16_come_as_uint16() -> None:
    bits = np.array([0x3F80, 0xC000], np.uint16)
    taken = np.from_dlpack(Tensor(bits, TensorDesc(BF16, [2])))
    assert taken.dtype == np.uint16
    assert np.shares_memory(taken, bits)


def test_strings_have_no_form_that_others_take() -> None:
    with pytest.raises((BufferError, TypeError)):
        np.from_dlpack(Tensor(np.array(["a"])))


@pytest.mark.smoke
@pytest.mark.skipif(sys.version_info < (3, 12), reason="classes of Python give buffers from 3.12 on")
def test_it_is_a_buffer() -> None:
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    buffer: Any = Tensor(data)
    with memoryview(buffer) as view:
        assert (view.format, view.shape, view.readonly) == ("f", (2, 3), False)
    np.frombuffer(buffer, np.float32)[5] = 7
    assert data[1, 2] == 7


TORCH_TYPES = {
    DataType.DT_FLOAT: "float32",
    DataType.DT_FLOAT16: "float16",
    DataType.DT_INT8: "int8",
    DataType.DT_INT32: "int32",
    DataType.DT_UINT8: "uint8",
    DataType.DT_INT16: "int16",
    DataType.DT_UINT16: "uint16",
    DataType.DT_UINT32: "uint32",
    DataType.DT_INT64: "int64",
    DataType.DT_UINT64: "uint64",
    DataType.DT_DOUBLE: "float64",
    DataType.DT_BOOL: "bool",
    DataType.DT_BF16: "uint16",
}


@pytest.mark.parametrize("dtype", TORCH_TYPES)
def test_torch_takes_it_without_a_copy_and_both_see_what_is_written(dtype: DataType) -> None:
    torch = torch_cpu()
    memory = bytearray(6 * dtype.nbytes)
    tensor = Tensor.from_buffer(memoryview(memory), TensorDesc(dtype, [2, 3]))
    taken = torch.from_dlpack(tensor)
    assert (taken.dtype, tuple(taken.shape)) == (getattr(torch, TORCH_TYPES[dtype]), (2, 3))
    taken.view(torch.uint8).fill_(1)
    assert memory == b"\1" * (6 * dtype.nbytes)
    memory[-1] = 0
    assert taken.view(torch.uint8).flatten()[-1] == 0


def test_torch_sees_bfloat16_for_nothing() -> None:
    torch = torch_cpu()
    bits = np.array([0x3F80, 0xC000], np.uint16)
    values = torch.from_dlpack(Tensor(bits, TensorDesc(BF16, [2]))).view(torch.bfloat16)
    assert values.tolist() == [1.0, -2.0]
    values[1] = 1.0
    assert bits.tolist() == [0x3F80, 0x3F80]
