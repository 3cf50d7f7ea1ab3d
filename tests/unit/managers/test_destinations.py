"""What does not fit a pull's destination, what is asked of the source, and where the bytes land."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvpull_async import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMStatusCode,
    plan,
)
from kvpull_async.protocol import frames
from kvpull_async.values import INVALID_ID
from tests.unit.managers.pulling import KEY, STRIDE, UNLINKED, Table, refused


@pytest.fixture
async def table() -> AsyncIterator[Table]:
    made = Table()
    yield made
    made.close()


# -- before anything is asked ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"index": 3}, "batch_index 3: the destination has 3"),
        ({"size": 101}, "101 bytes from offset 0 on do not fit an entry of 100"),
        ({"size": 51, "dst_cache_offset": 50}, "51 bytes from offset 50"),
        ({"dst_cache_offset": 100}, "0 bytes from offset 100"),
        ({"dst_cache_offset": 101}, "do not fit"),
        ({"size": 2**62, "dst_cache_offset": 2**62}, "do not fit"),
        ({"dst_layer_range": range(1, 3)}, "reaches tensor 5, the destination has 4"),
        ({"src_layer_range": range(1)}, "src_layer_range names 2 tensors, the destination side 4"),
        ({"src_layer_range": range(2), "dst_layer_range": range(1)}, "names 4 tensors, the destination side 2"),
        ({"dst_layer_range": range(1), "tensor_num_per_layer": 3}, "3 does not divide the destination's 4"),
    ],
)
async def test_what_does_not_fit_the_destination_is_refused_before_the_link_is_looked_for(
    table: Table, arguments: dict[str, Any], text: str
) -> None:
    for key in (KEY, UNLINKED):
        error = await refused(table.pull(key, **arguments), text=text)
        assert error.operation == "pull_cache"
    assert table.link.lane.requests == []
    assert not table.memory.any()


@pytest.mark.parametrize(
    ("src", "dst", "text"),
    [([0], [3], "dst_blocks holds 3, the destination has 3 blocks"), ([0, 1], [0, 2**40], "has 3 blocks")],
)
async def test_blocks_outside_the_destination(table: Table, src: Any, dst: Any, text: str) -> None:
    await refused(table.pull_blocks(BlocksCacheKey(1, 0), src, dst), text=text)


async def test_each_kind_of_cache_has_its_own_call(table: Table) -> None:
    await refused(table.pull(cache=table.blocks), text="use pull_blocks")
    await refused(table.pull_blocks(KEY, [], [0], cache=table.entries), text="use pull_cache")


# -- what is asked -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (KEY, ("request", 7, 3, 0)),
        (CacheKey(cluster_id=1, req_id=INVALID_ID, model_id=4, prefix_id=9), ("prefix", 9, 4, 0)),
        (CacheKeyByIdAndIndex(1, 5, 2), ("cache", 5, 0, 2)),
        (CacheKeyByIdAndIndex(1, -1, 2), ("cache", -1, 0, 2)),
    ],
)
async def test_the_key_as_the_source_reads_it(table: Table, key: Any, expected: tuple[Any, ...]) -> None:
    await table.pull(key)
    asked = table.asked
    assert (asked.key, asked.identity, asked.model_id, asked.entry) == expected


@pytest.mark.parametrize(
    ("arguments", "first", "tensors", "size", "offset", "offset_pull"),
    [
        ({}, -1, 4, 100, 0, False),
        ({"size": 7}, -1, 4, 7, 0, False),
        ({"src_cache_offset": 5}, -1, 4, 100, 5, True),
        ({"dst_cache_offset": 30}, -1, 4, 70, 0, True),
        ({"src_layer_range": range(3, 5)}, 6, 4, 100, 0, False),
        ({"dst_layer_range": range(1, 2)}, -1, 2, 100, 0, False),
        ({"src_layer_range": range(8, 9), "dst_layer_range": range(1)}, 16, 2, 100, 0, False),
        ({"src_layer_range": range(5, 7), "dst_layer_range": range(2), "tensor_num_per_layer": 1}, 5, 2, 100, 0, False),
        ({"src_layer_range": range(0), "tensor_num_per_layer": 99}, -1, 4, 100, 0, False),
    ],
)
async def test_the_part_as_the_source_reads_it(
    table: Table,
    arguments: dict[str, Any],
    first: int,
    tensors: int,
    size: int,
    offset: int,
    offset_pull: bool,
) -> None:
    await table.pull(**arguments)
    asked = table.asked
    assert (asked.first_tensor, asked.tensors, asked.size, asked.offset) == (first, tensors, size, offset)
    assert asked.offset_pull is offset_pull


async def test_blocks_as_the_source_reads_them(table: Table) -> None:
    table.link.granted = {"per_tensor": 200}
    await table.pull_blocks(BlocksCacheKey(1, 6), [8, 9], [2, 0])
    assert (table.asked.key, table.asked.model_id, table.asked.size, table.asked.blocks) == ("blocks", 6, STRIDE, 0)
    assert frames.decode_table(table.link.lane.tables[-1]).tolist() == [8, 9]
    table.link.granted = {"per_tensor": 150}
    await table.pull_blocks(KEY, [], [0, 1])
    assert (table.asked.key, table.asked.size, table.asked.blocks) == ("request", STRIDE, 2)
    assert table.link.lane.tables[-1] == b""


async def test_the_call_itself_is_told_to_the_source(table: Table) -> None:
    parent = "00-" + "4b" * 16 + "-" + "0f" * 8 + "-01"
    await table.pull(traceparent=parent, timeout=50_000)
    assert table.asked.traceparent == parent
    assert 1000 < table.asked.remaining_ms <= 50_000
    assert len(table.asked.pull_id) == 16
    await table.pull()
    assert table.asked.traceparent == ""
    assert table.asked.remaining_ms <= 1000  # what the settings say


# -- where the bytes land ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "landed"),
    [
        ({"index": 2}, [(tensor, 2, 0, 100) for tensor in range(4)]),
        ({"size": 7}, [(tensor, 0, 0, 7) for tensor in range(4)]),
        ({"index": 1, "dst_cache_offset": 30}, [(tensor, 1, 30, 70) for tensor in range(4)]),
        ({"src_layer_range": range(7, 8), "dst_layer_range": range(1, 2)}, [(2, 0, 0, 100), (3, 0, 0, 100)]),
        ({"dst_layer_range": range(2, 3), "tensor_num_per_layer": 1, "size": 5}, [(2, 0, 0, 5)]),
    ],
)
async def test_bytes_land_where_they_were_asked_for(table: Table, arguments: Any, landed: list[Any]) -> None:
    await table.pull(**arguments)
    assert table.landed() == landed


async def test_blocks_land_in_the_order_of_the_list_and_the_last_may_be_shorter(table: Table) -> None:
    table.link.granted = {"per_tensor": 150}
    await table.pull_blocks(KEY, [], [2, 0])
    assert table.landed(1) == [row for tensor in range(4) for row in ((tensor, 0, 0, 50), (tensor, 2, 0, 100))]


@pytest.mark.parametrize(
    "granted", [{"per_tensor": 99}, {"per_tensor": 101}, {"tensors": 3}, {"tensors": 5}, {"per_tensor": 0}]
)
async def test_a_grant_that_is_not_what_was_asked_for_is_refused(table: Table, granted: dict[str, int]) -> None:
    table.link.granted = granted
    await refused(table.pull(), LLMStatusCode.LLM_FAILED, text="were asked for")
    assert not table.memory.any()
    assert table.link.done == []


@pytest.mark.parametrize("per_tensor", [0, 100, 201])
async def test_a_sliced_grant_must_reach_into_the_last_block(table: Table, per_tensor: int) -> None:
    table.link.granted = {"per_tensor": per_tensor}
    await refused(table.pull_blocks(KEY, [], [2, 0]), LLMStatusCode.LLM_FAILED)
    assert not table.memory.any()


# -- which rows of the source they are ---------------------------------------------------------------------------------


@pytest.fixture
async def streamed() -> AsyncIterator[Table]:
    """Whatever is pulled is not inside the answer."""
    made = Table(inline_limit=0)
    made.link.inline_limit = 0
    yield made
    made.close()


@pytest.mark.parametrize(
    ("arguments", "start", "rows"),
    [
        ({}, 0, [(tensor, 0, 100) for tensor in range(4)]),
        ({"size": 7}, 300, [(tensor, 300, 7) for tensor in range(4)]),
        ({"src_cache_offset": 5, "size": 9, "index": 2}, 205, [(tensor, 205, 9) for tensor in range(4)]),
        ({"src_layer_range": range(3, 5)}, 100, [(tensor, 100, 100) for tensor in range(6, 10)]),
        ({"dst_layer_range": range(1, 2)}, 100, [(0, 100, 100), (1, 100, 100)]),
        ({"src_layer_range": range(8, 9), "dst_layer_range": range(1), "size": 3}, 2, [(16, 2, 3), (17, 2, 3)]),
    ],
)
async def test_what_is_read_is_what_was_asked_for_from_where_the_grant_says(
    streamed: Table, arguments: Any, start: int, rows: list[Any]
) -> None:
    streamed.link.granted = {"start": start}
    for key in (KEY, CacheKeyByIdAndIndex(1, 5, 2)):
        await streamed.pull(key, **arguments)
        assert [tuple(row) for row in streamed.link.path.expected[-1].reading().tolist()] == rows


@pytest.mark.parametrize("direct", [True, False])
async def test_a_path_hears_whether_it_may_fill_by_itself_and_until_when_memory_is_waited_for(
    streamed: Table, direct: bool
) -> None:
    streamed.registry.local(streamed.entries.cache_id).direct = direct  # type: ignore[union-attr]
    await streamed.pull(KEY)
    span = streamed.link.path.expected[-1].span
    assert span.direct is direct
    assert span.until is not None
    assert not span.until.over


@pytest.mark.parametrize(("layers", "first"), [({}, 0), ({"src_layer_range": range(5, 7)}, 10)])
async def test_blocks_are_read_where_they_were_asked_for(streamed: Table, layers: Any, first: int) -> None:
    streamed.link.granted = {"per_tensor": 300, "start": 12345}  # what the source says of a start is not for blocks
    await streamed.pull_blocks(BlocksCacheKey(1, 6), [8, 9, 4], [2, 0, 1], **layers)
    expected = streamed.link.path.expected[-1]
    assert [tuple(row) for row in expected.reading().tolist()] == [
        row for tensor in range(first, first + 4) for row in ((tensor, 800, 200), (tensor, 400, 100))
    ]
    assert plan.total(expected.reading()) == plan.total(expected.span.rows())
    src, dst = expected.span.alike()  # cut where either side is
    assert (src.tensors, src.offsets.tolist()) == (range(first, first + 4), [800, 900, 400])
    assert (dst.tensors, dst.offsets.tolist()) == (range(4), [200, 0, 100])
    assert src.lengths.tolist() == dst.lengths.tolist() == [100] * 3


async def test_an_entry_cut_into_blocks_is_read_in_one_run_of_each_tensor(streamed: Table) -> None:
    streamed.link.granted = {"per_tensor": 150, "start": 600}
    await streamed.pull_blocks(KEY, [], [2, 0])
    expected = streamed.link.path.expected[-1]
    assert [tuple(row) for row in expected.reading().tolist()] == [(tensor, 600, 150) for tensor in range(4)]
    assert plan.total(expected.reading()) == plan.total(expected.span.rows())
