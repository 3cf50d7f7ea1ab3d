"""Cluster descriptions and little-endian addresses, compared with the platform's own parser."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpull_async.values import LLMClusterInfo, LLMRole, int_to_ip, ip_to_int

GOOD = [
    "127.0.0.1",
    "0.0.0.0",
    "255.255.255.255",
    "127.1",
    "10.1.2",
    "1.2.65535",
    "1.16777215",
    "4294967295",
    "0",
    "010",
]
GOOD += ["0x7f.1", "0X7F.0.0.01", "0177.0.0.1", "1.0xffffff"]
BAD = [
    "",
    " ",
    "a",
    "1.2.3.4.5",
    "1.2.3.256",
    "256.1",
    "1.2.65536",
    "1.16777216",
    "4294967296",
    "1..2",
    ".1",
    "1.",
    "-1",
]
BAD += ["08", "0x", "0xg", "1.2.3.4 ", "1_0", "+1", "\u0661.2.3.4", "9" * 6000, "localhost", "::1", "1.2.3.4\n"]


def by_platform(text: str) -> int:
    return int.from_bytes(socket.inet_aton(text), "little")


@pytest.mark.parametrize("text", GOOD)
def test_text_is_read_as_the_platform_reads_it(text: str) -> None:
    assert ip_to_int(text) == by_platform(text)


@pytest.mark.parametrize("text", BAD)
def test_other_text_is_a_runtime_error(text: str) -> None:
    with pytest.raises(RuntimeError, match="is not an IPv4 address"):
        ip_to_int(text)


@given(st.integers(0, 2**32 - 1))
def test_numbers_and_text_are_each_others_reverse(number: int) -> None:
    assert ip_to_int(int_to_ip(number)) == number == by_platform(int_to_ip(number))


def test_an_address_is_little_endian() -> None:
    assert ip_to_int("127.0.0.1") == 0x0100007F
    assert ip_to_int(np.uint32(0x0100007F)) == 0x0100007F


@pytest.mark.parametrize(
    ("value", "error"), [(None, TypeError), (True, TypeError), (-1, ValueError), (2**32, ValueError)]
)
def test_other_numbers_are_refused(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        ip_to_int(value)


def test_a_new_description_is_empty() -> None:
    info = LLMClusterInfo()
    assert (info.remote_cluster_id, info.remote_role_type) == (None, None)
    assert (info.local_ip_info_list, info.remote_ip_info_list) == ([], [])


def test_a_description_keeps_what_it_is_told() -> None:
    info = LLMClusterInfo()
    info.remote_cluster_id = 2**64 - 1
    info.remote_role_type = LLMRole.PROMPT
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_remote_ip_info(ip="127.0.0.2", port=26000)
    info.append_remote_ip_info(0x0300007F, 26001)
    assert info.remote_cluster_id == 2**64 - 1
    assert info.remote_role_type is LLMRole.PROMPT
    assert info.local_ip_info_list == [(0x0100007F, 0)]
    assert info.remote_ip_info_list == [(0x0200007F, 26000), (0x0300007F, 26001)]
    assert "127.0.0.2:26000" in repr(info)


def test_a_description_hands_out_copies() -> None:
    info = LLMClusterInfo()
    info.append_remote_ip_info("1.2.3.4", 1)
    info.remote_ip_info_list.clear()
    assert len(info.remote_ip_info_list) == 1


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("remote_cluster_id", None, TypeError),
        ("remote_cluster_id", "1", TypeError),
        ("remote_cluster_id", -1, ValueError),
        ("remote_cluster_id", 2**64, ValueError),
        ("remote_role_type", "PROMPT", TypeError),
        ("remote_role_type", True, TypeError),
    ],
)
def test_setters_refuse(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        setattr(LLMClusterInfo(), name, value)


@pytest.mark.parametrize("port", [-1, 65536, None, "1", True])
def test_ports_are_uint16(port: Any) -> None:
    for append in (LLMClusterInfo().append_local_ip_info, LLMClusterInfo().append_remote_ip_info):
        with pytest.raises((TypeError, ValueError), match="port"):
            append("127.0.0.1", port)
