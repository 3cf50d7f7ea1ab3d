"""Rank tables: what is understood and refused, who dials whom, and at which addresses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpull_async.config.rank_table import Gathering, gathering, places
from kvpull_async.status import LLMException, LLMStatusCode
from tests.ranks import device, table, together

BASE = 21000


def made(own: int = 1, ranks: Any = None, text: str = "", **more: Any) -> Gathering:
    options: dict[str, Any] = {"port_base": BASE, "renamed": {}, **more}
    name = options.pop("name", "comm")
    return gathering(name, {1: 0, 2: 1} if ranks is None else ranks, text or together(), own=own, **options)


def refused(error: type[Exception] = LLMException, **arguments: Any) -> str:
    with pytest.raises(error) as caught:
        made(**arguments)
    if isinstance(caught.value, LLMException):
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    return str(caught.value)


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0", "1.2"])
def test_both_versions_are_read(version: str) -> None:
    found = places(table([device(0, "10.1.1.1")], [device(1, "10.1.1.2", super_device_id="7")], version=version))
    assert sorted(found) == [0, 1]
    assert (found[1].server, found[1].server_id, found[1].device_id, found[1].device_ip) == (
        1,
        "node_1",
        "1",
        "10.1.1.2",
    )


def test_what_may_be_missing_or_a_number() -> None:
    bare = {"server_list": [{"device": [{"rank_id": 0}, {"rank_id": "1", "device_id": 5}]}]}
    found = places(json.dumps(bare))
    assert (found[0].server_id, found[0].device_ip, found[1].device_id) == ("", "", "5")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        "[" * 100_000,
        json.dumps({"version": "2.0", "server_list": []}),
        json.dumps({"server_list": {}}),
        json.dumps({"server_list": [1]}),
        json.dumps({"server_list": [{"device": None}]}),
        json.dumps({"server_list": [{"device": ["0"]}]}),
        json.dumps({"server_list": [{"device": [{"rank_id": "x"}]}]}),
        json.dumps({"server_list": [{"device": [{"rank_id": str(2**32)}]}]}),
        json.dumps({"server_list": [{"device": [{"rank_id": True}]}]}),
        json.dumps({"server_list": [{"device": [{"rank_id": "0", "device_ip": []}]}]}),
        json.dumps({"server_list": [{"device": [{"rank_id": "0"}, {"rank_id": 0}]}]}),
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_table(text: str) -> None:
    with pytest.raises(LLMException, match=r"rank_table|an entry of") as caught:
        places(text)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


@given(
    st.text(max_size=60) | st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5).map(json.dumps)
)
def test_no_text_raises_anything_else(text: str) -> None:
    with pytest.raises(LLMException):
        places(text)


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"name": 1}, TypeError),
        ({"name": ""}, LLMException),
        ({"name": "x" * 128}, LLMException),
        ({"ranks": [(1, 0), (2, 1)]}, TypeError),
        ({"ranks": {1: 0}}, LLMException),
        ({"ranks": {i: i for i in range(5)}}, LLMException),
        ({"ranks": {"1": 0, 2: 1}}, TypeError),
        ({"ranks": {True: 0, 2: 1}}, TypeError),
        ({"ranks": {-1: 0, 2: 1}}, ValueError),
        ({"ranks": {2**64: 0, 2: 1}}, ValueError),
        ({"ranks": {1: "0", 2: 1}}, TypeError),
        ({"ranks": {1: None, 2: 1}}, TypeError),
        ({"ranks": {1: 0, 2: 2**32}}, ValueError),
        ({"ranks": {1: 1, 2: 0}}, LLMException),
        ({"ranks": {1: 0, 2: 0}}, LLMException),
        ({"ranks": {1: 0, 2: 7}}, LLMException),
        ({"own": 3}, LLMException),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    refused(error, **arguments)


def test_a_table_is_a_string() -> None:
    with pytest.raises(TypeError, match="rank_table"):
        gathering("comm", {1: 0, 2: 1}, {}, own=1, port_base=BASE, renamed={})


def test_the_longest_name_and_the_largest_id() -> None:
    assert made(name="x" * 127, ranks={1: 0, 2**64 - 1: 1}).members == (2**64 - 1,)


# -- who meets whom ----------------------------------------------------------------------------------------------------


def test_the_lower_rank_listens_and_the_higher_one_dials_it_there() -> None:
    low, high = made(1), made(2)
    assert (low.dials, high.awaits) == ((), ())
    assert [member.cluster_id for member in low.awaits] == [2]
    assert [member.cluster_id for member in high.dials] == [1]
    assert high.dials[0].ports == low.ports == low.awaits[0].ports
    assert high.dials[0].hosts == low.awaits[0].hosts


def test_four_members() -> None:
    ranks = {10: 0, 20: 2, 30: 5, 40: 6}
    text = together(0, 1, 2, 5, 6)
    all_of_them = {own: made(own, ranks, text) for own in ranks}
    assert [[m.cluster_id for m in one.dials] for one in all_of_them.values()] == [[], [10], [10, 20], [10, 20, 30]]
    assert [[m.cluster_id for m in one.awaits] for one in all_of_them.values()] == [[20, 30, 40], [30, 40], [40], []]
    assert len({one.group for one in all_of_them.values()}) == 1
    assert len({one.ports for one in all_of_them.values()}) == 4


def test_the_ports_lie_above_the_base_and_below_what_the_system_gives_away() -> None:
    for number in range(200):
        ports = made(name=f"comm {number}").ports
        assert list(ports) == list(range(ports[0], ports[0] + 8))
        assert BASE <= ports[0] <= ports[-1] < 32768
    assert made(port_base=40000).ports[0] - 40000 == made().ports[0] - BASE


@pytest.mark.parametrize(
    "other",
    [
        {"name": "another"},
        {"ranks": {1: 0, 3: 1}},
        {"ranks": {1: 0, 2: 2}, "text": together(0, 1, 2)},
        {"text": together(ip="10.1.1.9")},
        {"text": table([{**device(0, "10.1.1.1"), "device_id": "4"}, device(1, "10.1.1.1")])},
    ],
    ids=["name", "cluster", "rank", "address", "device"],
)
def test_another_name_rank_or_device_is_another_group(other: dict[str, Any]) -> None:
    assert made().group != made(**other).group


def test_what_the_two_sides_may_write_differently_makes_no_other_group() -> None:
    one = table([device(0, "10.1.1.1")], [device(1, "10.1.1.2")])
    other = table([device(1, "10.1.1.2")], [device(0, "10.1.1.1")], version="1.2", names=["b", "a"])
    assert made(text=one).group == made(2, text=other).group


# -- addresses ---------------------------------------------------------------------------------------------------------


def hosts(text: str, **renamed: str) -> tuple[str, ...]:
    low, high = (made(own, text=text, renamed=renamed) for own in (1, 2))
    assert low.awaits[0].hosts == high.dials[0].hosts
    return high.dials[0].hosts


def test_ranks_of_one_server_meet_on_the_loopback_first() -> None:
    assert hosts(together()) == ("127.0.0.1", "10.1.1.1")
    assert hosts(table([device(0, None)], [device(1, None)], names=["same", "same"])) == ("127.0.0.1",)


def test_ranks_of_two_servers_meet_at_what_the_table_says() -> None:
    both = ([device(0, "10.1.1.1", host_ip="10.9.9.9")], [device(1, "10.1.1.2")])
    assert hosts(table(*both, names=["10.7.7.7"])) == ("10.9.9.9", "10.7.7.7", "10.1.1.1")
    assert hosts(table([device(0, "127.0.0.2")], [device(1, "127.0.0.3")])) == ("127.0.0.2",)


@pytest.mark.parametrize("ip", [None, "", "fe80::1", "10.1.1", "10.1.1.256", "10.1.1.1.1", "host"])
def test_what_is_no_address_is_none(ip: str | None) -> None:
    assert hosts(table([device(0, ip)], [device(1, ip)])) == ()


def test_names_of_the_table_can_be_given_other_addresses() -> None:
    text = table([device(0, "10.1.1.1")], [device(1, "10.1.1.2")])
    assert hosts(text, node_0="192.168.0.4") == ("192.168.0.4", "10.1.1.1")
    assert hosts(text, **{"10.1.1.1": "127.0.0.1"}) == ("127.0.0.1",)
    assert made(1, text=text).group == made(1, text=text, renamed={"node_0": "192.168.0.4"}).group
