"""CacheDesc: sizes, checks in the original's order, and that nobody's list is shared."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import CacheDesc, DataType, Placement

FP16 = DataType.DT_FLOAT16


class Size(tuple[int, ...]):
    """Stands for torch.Size, which is a tuple too."""

    __slots__ = ()


def make(shape: Any = (4, 256), **changes: Any) -> CacheDesc:
    return CacheDesc(**{"num_tensors": 4, "shape": shape, "data_type": FP16, **changes})


def test_defaults_and_properties() -> None:
    desc = CacheDesc(4, [4, 256], FP16)
    assert (desc.num_tensors, desc.shape, desc.data_type, desc.placement) == (4, [4, 256], FP16, Placement.DEVICE)
    assert (desc.batch_dim, desc.batch_size, desc.seq_len_dim_index, desc.kv_tensor_format) == (0, 4, -1, None)
    assert (desc.size, desc.entries, desc.entry_nbytes) == (2048, 4, 512)
    assert repr(desc) == "CacheDesc(4 x [4, 256] DT_FLOAT16 DEVICE)"


def test_bytes_are_laid_out_by_dimension_0_whatever_the_batch_dimension() -> None:
    desc = make((2, 8, 16), batch_dim_index=1, seq_len_dim_index=2, kv_tensor_format="ND")
    assert (desc.batch_dim, desc.batch_size) == (1, 8)
    assert (desc.entries, desc.entry_nbytes) == (2, 256)
    assert (desc.seq_len_dim_index, desc.kv_tensor_format) == (2, "ND")


@pytest.mark.parametrize(
    ("shape", "seen"),
    [([4, 256], [4, 256]), ((4, 256), (4, 256)), (Size((4, 256)), (4, 256)), ((np.int64(4), np.uint8(2)), (4, 2))],
)
def test_shape_comes_back_in_the_form_it_was_given(shape: Any, seen: object) -> None:
    assert make(shape).shape == seen


def test_the_callers_list_is_not_shared() -> None:
    shape = [4, 256]
    desc = make(shape)
    shape[0] = 9
    assert isinstance(desc.shape, list)
    desc.shape[0] = 9
    assert (desc.shape, desc.size) == ([4, 256], 2048)


@pytest.mark.parametrize("shape", [[4, 256], (4, 256)])
def test_update_dim_changes_shape_sizes_and_batch_size(shape: Any) -> None:
    desc = make(shape)
    snapshot = copy.copy(desc)
    desc.update_dim(0, np.int32(8))
    assert (list(desc.shape), desc.size, desc.batch_size, desc.entries) == ([8, 256], 4096, 8, 8)
    assert (list(snapshot.shape), snapshot.size) == ([4, 256], 2048)


def test_update_dim_checks_its_arguments() -> None:
    desc = make()
    for dim, value, error in [(2, 1, LLMException), (-1, 1, LLMException), (None, 1, TypeError), (0, 1.5, TypeError)]:
        with pytest.raises(error, match="dim_"):
            desc.update_dim(dim, value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dim_value"):
        desc.update_dim(0, 2**63)
    assert desc.shape == (4, 256)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_tensors": None}, TypeError),
        ({"num_tensors": True}, TypeError),
        ({"num_tensors": -1}, ValueError),
        ({"num_tensors": 2**32}, ValueError),
        ({"shape": None}, TypeError),
        ({"shape": "44"}, TypeError),
        ({"shape": range(1, 3)}, TypeError),
        ({"shape": [4, 2.0]}, TypeError),
        ({"shape": [4, 2**63]}, ValueError),
        ({"data_type": None}, TypeError),
        ({"data_type": 1}, TypeError),
        ({"placement": None}, TypeError),
        ({"placement": 0}, TypeError),
        ({"batch_dim_index": None}, TypeError),
        ({"batch_dim_index": 2}, LLMException),
        ({"batch_dim_index": -1}, LLMException),
        ({"batch_dim_index": 2**70}, LLMException),
        ({"shape": []}, LLMException),
        ({"seq_len_dim_index": 2.0}, TypeError),
        ({"seq_len_dim_index": 2**31}, ValueError),
        ({"seq_len_dim_index": 2}, LLMException),
        ({"seq_len_dim_index": -2}, LLMException),
        ({"kv_tensor_format": 1}, TypeError),
    ],
)
def test_refusals(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        make(**changes)
    if isinstance(caught.value, LLMException):
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    else:
        assert next(iter(changes)) in str(caught.value)


def test_types_are_tested_before_values() -> None:
    with pytest.raises(TypeError):
        make((2**63, None))
    with pytest.raises(LLMException):
        make((2**63, 4), batch_dim_index=5)


def test_no_tensors_and_empty_dimensions_pass_until_memory_is_wanted() -> None:
    assert make(num_tensors=0).num_tensors == 0
    assert make((4, 0)).size == 0
    assert make((0, 4)).size == 0


@pytest.mark.parametrize("shape", [(4, -1), (-1, -1), (2**40, 2**40), (2**62,)])
def test_a_shape_without_a_size_is_param_invalid(shape: tuple[int, ...]) -> None:
    desc = make(shape)
    for attribute in ("size", "entry_nbytes"):
        with pytest.raises(LLMException) as caught:
            getattr(desc, attribute)
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


def test_a_shape_without_entries_has_no_entry_size() -> None:
    with pytest.raises(LLMException, match="no batch entries"):
        _ = make((0, 4)).entry_nbytes
