"""Tensors over shared memory: no copy unless asked for, and bfloat16 widened exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpull_async.values import DataType, Tensor, TensorDesc

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
