"""A push from its arguments to the link: what is checked before anything is offered, what is offered, and what the
caller's error says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from kvpull_async import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMException,
    LLMRole,
    LLMStatusCode,
    LLMTimeoutError,
    Placement,
)
from kvpull_async._deadline import Deadline
from kvpull_async._workers import Workers
from kvpull_async.config import Settings
from kvpull_async.managers import pushes
from kvpull_async.managers.dialect import CACHE, KV
from kvpull_async.managers.node import Node
from kvpull_async.managers.pushes import Aim, Parcel
from kvpull_async.memory.host import HostMemory
from kvpull_async.observe import Counters, Log, new_pull_id
from kvpull_async.protocol import frames
from kvpull_async.registry import Registry
from tests.loop_nodes import event_log, eventually
from tests.pull_link import LONG_MS
from tests.unit.push_link import PushLink

PARAM_INVALID, NOT_EXIST = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
STRIDE = 100
KEY, BLOCKS = CacheKeyByIdAndIndex(1, 44, 2), BlocksCacheKey(1, 6)


class Table:
    """A node with one entry cache and one blocks cache (both 4 tensors of 3 x 100 bytes) and a link to cluster 1, whose
    receiver takes what it is offered.
    """

    def __init__(self, **settings: Any) -> None:
        self.link = PushLink("inline")
        self.memory = np.random.default_rng(5).integers(0, 256, (2, 4, 3, STRIDE)).astype(np.uint8)
        self.registry = Registry(HostMemory())
        self.counters = Counters()
        self.node = Node(
            LLMRole.PROMPT,
            Settings(LLMRole.PROMPT, 2, **{"remote_cache_access": True, **settings}),
            self.registry,
            Workers(1),
            self.counters,
            Log(),
            asyncio.get_running_loop(),
            lambda cluster_id: self.link if cluster_id == 1 else None,  # type: ignore[arg-type,return-value]
        )
        self.entries, self.blocks = self.handle(0, blocks=False), self.handle(1, blocks=True)

    def handle(self, number: int, *, blocks: bool, accessible: bool = True) -> Cache:
        desc = CacheDesc(4, [3, STRIDE], DataType.DT_UINT8)
        addresses = [tensor.ctypes.data for tensor in self.memory[number]]
        regions = self.registry.backend.adopt(addresses, tensor_nbytes=desc.size, placement=Placement.HOST)
        entry = self.registry.add(desc, regions, blocks=blocks, remote_accessible=accessible)
        handle = Cache(entry.cache_id, desc, addresses, None, is_registered=True, is_blocks_cache=blocks)
        handle._binding = entry
        return handle

    async def push(
        self, key: Any = KEY, cache: Any = None, index: Any = 0, src: Any = None, dst: Any = None, size: Any = -1,
        per_layer: Any = 1, **options: Any,
    ) -> None:  # fmt: skip
        cache = self.entries if cache is None else cache
        prepared = pushes.prepare_cache(self.node, key, cache, index, src, dst, size, per_layer, options)
        await pushes.run(self.node, CACHE, prepared)

    async def push_blocks(
        self, src: Any, dst: Any, key: Any = BLOCKS, cache: Any = None, of: Any = None, to: Any = None,
        per_layer: Any = 1, **options: Any,
    ) -> None:  # fmt: skip
        cache = self.blocks if cache is None else cache
        prepared = pushes.prepare_blocks(self.node, key, cache, src, dst, of, to, per_layer, options)
        await pushes.run(self.node, CACHE, prepared)

    @property
    def offered(self) -> frames.Offer:
        return self.link.lane.heard[-1].offer

    @property
    def table(self) -> list[int]:
        made = self.link.lane.heard[-1]
        count = made.offer.blocks + (made.offer.tensors if made.offer.key == "address" else 0)
        return frames.decode_table(made.tail[: 8 * count]).tolist()

    async def close(self) -> None:
        self.node.workers.close(5.0)
        await self.link.close()


@pytest.fixture
async def table() -> AsyncIterator[Table]:
    made = Table()
    yield made
    await made.close()


async def refused(call: Any, status: LLMStatusCode = PARAM_INVALID, *, text: str | None = None) -> LLMException:
    with pytest.raises(LLMException, match=text) as caught:
        await call
    assert caught.value.status_code == status
    return caught.value


# -- before anything is offered ----------------------------------------------------------------------------------------

Given = dict[str, Any]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"src": range(5)}, "src_layer_range reaches layer 4, the source has 4"),
        ({"src": range(2), "dst": range(3)}, "src_layer_range names 2 layers, dst_layer_range 3"),
        ({"dst": range(2)}, "src_layer_range names 4 layers, dst_layer_range 2"),
        ({"src": range(0, 4, 2)}, "src_layer_range must be a range of layers"),
        ({"src": range(3, 1)}, "src_layer_range must be a range of layers"),
        ({"dst": range(-1, 3)}, "dst_layer_range must be a range of layers"),
        ({"dst": range(2**32, 2**32 + 4)}, "dst_layer_range reaches layer"),
        ({"dst": range(2**32 - 2, 2**32), "src": range(2), "per_layer": 2}, "dst_layer_range reaches tensor"),
        ({"per_layer": 0}, "tensor_num_per_layer must be above 0"),
        ({"per_layer": 3}, "tensor_num_per_layer 3 does not divide the source's 4 tensors"),
        ({"index": 3}, "src_batch_index 3: the source has 3 batch entries"),
        ({"size": 100}, "size must be -1"),
        ({"size": 0}, "size must be -1"),
    ],
)
async def test_arguments_that_do_not_fit_are_refused(table: Table, given: Given, text: str) -> None:
    await refused(table.push(**given), text=text)
    assert table.link.lane.heard == []


@pytest.mark.parametrize(
    ("src", "dst", "given", "text"),
    [
        ([], [0], {}, "src_blocks must not be empty"),
        ([0], [], {}, "dst_blocks must not be empty"),
        ([0], [0, 1], {}, "1 source blocks cannot go to 2 destination blocks"),
        ([0, 1], [2, 2], {}, "both go to destination block 2"),
        ([-1], [0], {}, "block indices must be 0 or above, got -1"),
        ([0], [-2], {}, "block indices must be 0 or above, got -2"),
        ([3], [0], {}, "src_blocks holds 3, the source has 3 blocks"),
        ([0], [0], {"of": range(1, 5), "to": range(4)}, "src_layer_range reaches layer 4, the source has 4"),
    ],
)
async def test_blocks_that_do_not_fit_are_refused(table: Table, src: Any, dst: Any, given: Given, text: str) -> None:
    await refused(table.push_blocks(src, dst, **given), text=text)
    assert table.link.lane.heard == []


@pytest.mark.parametrize("given", [{"key": CacheKey(1, 7)}, {"key": BLOCKS}, {"cache": 5}, {"index": "0"}, {"src": 2}])
async def test_arguments_of_another_type_are_refused(table: Table, given: Given) -> None:
    with pytest.raises(TypeError):
        await table.push(**given)


async def test_each_kind_of_cache_has_its_own_push(table: Table) -> None:
    await refused(table.push(cache=table.blocks), text="use push_blocks")
    await refused(table.push_blocks([0], [0], cache=table.entries), text="use push_cache")
    with pytest.raises(TypeError):
        await table.push_blocks([0], [0], key=KEY)


async def test_pushes_by_key_need_remote_cache_access() -> None:
    table = Table(remote_cache_access=False)
    await refused(table.push(), text="push_cache needs remote cache access")
    await refused(table.push_blocks([0], [0]), text="push_blocks needs remote cache access")
    await table.close()


async def test_a_cache_that_is_not_accessible_is_not_pushed(table: Table) -> None:
    closed = table.handle(0, blocks=False, accessible=False)
    await refused(table.push(cache=closed), text="must be remote accessible to be pushed")


async def test_a_cache_that_is_gone_or_of_another_node_is_not_pushed(table: Table) -> None:
    other = Table()
    with pytest.raises(LLMException, match="cache"):
        await table.push(cache=other.entries)
    table.registry.release(table.entries._binding)  # type: ignore[arg-type]
    await refused(table.push(), NOT_EXIST, text="does not exist on this node")
    assert table.link.lane.heard == []
    await other.close()


async def test_without_a_link_nothing_is_pushed(table: Table) -> None:
    error = await refused(table.push(CacheKeyByIdAndIndex(9, 1, 0)), LLMStatusCode.LLM_NOT_YET_LINK)
    assert (error.retry_safe, error.operation, error.peer) == (True, "push_cache", 9)
    await refused(table.push(CacheKeyByIdAndIndex(2, 1, 0)), text="cluster 2 is this node itself")


# -- what is offered ---------------------------------------------------------------------------------------------------


async def test_a_batch_entry_goes_to_the_entry_that_the_key_names(table: Table) -> None:
    await table.push(index=1)
    offer = table.offered
    assert (offer.key, offer.identity, offer.entry, offer.first_tensor) == ("cache", 44, 2, 0)
    assert (offer.tensors, offer.per_tensor, offer.blocks, offer.src_blocks) == (4, STRIDE, 0, 0)
    assert (offer.src_tensor, offer.start) == (0, STRIDE)
    assert table.link.received == [table.memory[0, :, 1].tobytes()]


async def test_layers_are_tensors_in_groups(table: Table) -> None:
    await table.push(src=range(1, 2), dst=range(5, 6), per_layer=2)
    assert (table.offered.first_tensor, table.offered.src_tensor, table.offered.tensors) == (10, 2, 2)
    assert table.link.received == [table.memory[0, 2:4, 0].tobytes()]


async def test_blocks_go_to_the_blocks_of_the_model(table: Table) -> None:
    await table.push_blocks([2, 0], np.array([7, 5]), of=range(1, 3), to=range(2))
    offer = table.offered
    assert (offer.key, offer.model_id, offer.tensors, offer.first_tensor) == ("blocks", 6, 2, 0)
    assert (offer.blocks, offer.block_nbytes, offer.per_tensor) == (2, STRIDE, 2 * STRIDE)
    assert table.table == [7, 5]
    assert table.link.received == [table.memory[1, 1:3][:, [2, 0]].tobytes()]


async def test_blocks_that_the_receiver_reads_are_named_too(table: Table) -> None:
    table.link.way, table.link.inline_limit = "ticket", 0
    await table.push_blocks([2, 0], [7, 5])
    assert table.offered.src_blocks == 2
    assert frames.decode_table(table.link.lane.heard[-1].tail).tolist() == [7, 5, 2, 0]
    assert table.link.received == [table.memory[1][:, [2, 0]].tobytes()]


def parcel(table: Table, **fields: Any) -> Parcel:
    aim = Aim(1, "address", addresses=(4096, 8192))
    return Parcel(**{"source": table.entries._binding, "tensors": range(2, 4), "aim": aim, **fields})


async def send(table: Table, made: Parcel, **more: Any) -> None:
    deadline = Deadline.after_ms(more.pop("timeout_ms", LONG_MS))
    told = {"pull_id": new_pull_id(), "part_of": {}, "operation": "transfer_cache_async", **more}
    await pushes.send(table.node, CACHE, made, deadline=deadline, **told)


async def test_a_parcel_may_name_addresses(table: Table) -> None:
    await send(table, parcel(table, src_index=2), traceparent="00-trace")
    offer = table.offered
    assert (offer.key, offer.tensors, offer.per_tensor, offer.traceparent) == ("address", 2, STRIDE, "00-trace")
    assert table.table == [4096, 8192]
    assert table.link.received == [table.memory[0, 2:4, 2].tobytes()]


@pytest.mark.parametrize(("blocks", "nbytes"), [([5], 40), ([5, 1], 80), ([5, 1, 0], 100)])
async def test_an_entry_may_be_cut_into_blocks_as_far_as_they_go(table: Table, blocks: list[int], nbytes: int) -> None:
    await send(table, parcel(table, dst_blocks=np.array(blocks), block_nbytes=40))
    assert (table.offered.per_tensor, table.offered.block_nbytes) == (nbytes, 40)
    assert table.table == [4096, 8192, *blocks]
    assert table.link.received == [table.memory[0, 2:4, 0, :nbytes].tobytes()]


async def test_more_blocks_than_the_entry_fills_are_refused(table: Table) -> None:
    made = parcel(table, dst_blocks=np.array([0, 1, 2, 3]), block_nbytes=40)
    await refused(send(table, made), text="4 blocks of 40 bytes are named, the batch entry has 100 bytes")


@pytest.mark.parametrize("address", [0, -4096, 2**63])
async def test_numbers_that_are_no_addresses_are_refused_here(table: Table, address: int) -> None:
    made = parcel(table, aim=Aim(1, "address", addresses=(4096, address)))
    await refused(send(table, made), text="no cache is at")
    assert table.link.lane.heard == []


# -- how it ends -------------------------------------------------------------------------------------------------------


async def test_a_push_is_counted_when_it_starts_and_in_one_of_its_ends(table: Table) -> None:
    await table.push()
    gone, lost = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, LLMStatusCode.LLM_LINK_FAILED
    for status in (PARAM_INVALID, gone, lost):
        table.link.answer = frames.Result(1, int(status), "no", unsafe=False)
        await refused(table.push(), status)
    table.link.answer, table.link.silent = None, True
    with pytest.raises(LLMTimeoutError):
        await table.push(timeout=30)
    task = asyncio.ensure_future(table.push())
    await eventually(lambda: len(table.link.lane.heard) == 6)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert table.counters.snapshot() == {
        "pushes_started": 6,
        "pushes_finished": 1,
        "pushes_failed": 3,
        "pushes_failed_link": 1,
        "pushes_failed_missing": 1,
        "pushes_failed_other": 1,
        "pushes_timed_out": 1,
        "pushes_cancelled": 1,
        "bytes_pushed": 4 * STRIDE,
    }


@pytest.mark.parametrize("dialect", [KV, CACHE], ids=lambda dialect: dialect.name)
async def test_a_timeout_has_every_field_and_the_status_of_its_manager(table: Table, dialect: Any) -> None:
    table.link.silent = True
    with pytest.raises(LLMTimeoutError) as caught:
        await pushes.send(
            table.node, dialect, parcel(table), pull_id="p", operation="transfer_cache_async",
            deadline=Deadline.after_ms(30), part_of={},
        )  # fmt: skip
    error = caught.value
    assert (error.status_code, error.operation, error.peer) == (
        dialect.timeout_status,
        "transfer_cache_async",
        "peer:1",
    )
    assert (error.destination_unsafe, error.retry_safe) == (False, True)
    assert error.elapsed_ms is not None
    assert error.elapsed_ms >= 30


async def test_a_parcel_writes_events_of_its_own(table: Table) -> None:
    part_of = {"transfer_id": "t", "config": 1, "layer": 3}
    with event_log() as events:
        await send(table, parcel(table), traceparent="00-trace", part_of=part_of)
        finished = await events.first("push.finished", operation="transfer_cache_async", cluster_id=1, peer="peer:1")
        assert (finished["bytes"], finished["traceparent"], finished["path"]) == (2 * STRIDE, "00-trace", "loop")
        table.link.answer = frames.Result(1, int(NOT_EXIST), "gone", unsafe=True)
        await refused(send(table, parcel(table), part_of=part_of), NOT_EXIST)
        failed = await events.first("push.failed", status="LLM_KV_CACHE_NOT_EXIST")
        for event in (finished, failed):
            assert {name: event[name] for name in part_of} == part_of
            assert (event["local_cluster_id"], event["key"]) == (table.node.settings.cluster_id, "address:0x1000")
        assert (failed["reason"], failed["destination_unsafe"]) == ("gone", True)
    assert table.offered.pull_id == failed["pull_id"] != finished["pull_id"]


@pytest.mark.parametrize("call", [Table.push, lambda table: table.push_blocks([1], [1])], ids=["cache", "blocks"])
async def test_the_calls_options_bound_and_name_the_push(table: Table, call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="timeout"):
        await table.push(timeout=0)
    parent = f"00-{'a' * 32}-{'b' * 16}-01"
    await table.push(timeout=5_000, traceparent=parent)
    assert table.offered.traceparent == parent
    assert table.offered.remaining_ms <= 5_000
    await call(table)
    assert table.offered.remaining_ms <= table.node.settings.sync_kv_timeout_ms
