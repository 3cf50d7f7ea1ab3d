"""The enumerations' values, which callers and the wire share with the original."""

from __future__ import annotations

import pytest

from kvpull_async.values import DataType, LLMRole, Memtype, Placement, RegisterMemStatus


@pytest.mark.parametrize(
    ("name", "value", "nbytes"),
    [
        ("DT_FLOAT", 0, 4),
        ("DT_FLOAT16", 1, 2),
        ("DT_INT8", 2, 1),
        ("DT_INT32", 3, 4),
        ("DT_UINT8", 4, 1),
        ("DT_INT16", 6, 2),
        ("DT_UINT16", 7, 2),
        ("DT_UINT32", 8, 4),
        ("DT_INT64", 9, 8),
        ("DT_UINT64", 10, 8),
        ("DT_DOUBLE", 11, 8),
        ("DT_BOOL", 12, 1),
        ("DT_STRING", 13, 16),
        ("DT_BF16", 27, 2),
    ],
)
def test_data_types(name: str, value: int, nbytes: int) -> None:
    member = DataType[name]
    assert (member.value, member.nbytes) == (value, nbytes)
    assert not isinstance(member, int)


def test_every_data_type_has_a_size() -> None:
    assert len(DataType) == 14
    assert all(member.nbytes for member in DataType)


def test_small_enumerations() -> None:
    assert [(member.name, member.value) for member in Placement] == [("HOST", 0), ("DEVICE", 1)]
    assert [(member.name, member.value) for member in LLMRole] == [("PROMPT", 1), ("DECODER", 2), ("MIX", 3)]
    assert [member.value for member in (RegisterMemStatus.OK, RegisterMemStatus.PREPARING)] == [0, 1]
    assert RegisterMemStatus.FAILED.value == 2
    assert (Memtype.MEM_TYPE_DEVICE.value, Memtype.MEM_TYPE_HOST.value) == (0, 1)
    assert int(LLMRole.DECODER) == 2
    assert f"{Placement.HOST}" == "Placement.HOST"
