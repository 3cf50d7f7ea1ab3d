"""The receiving side of a push: how the bytes of an offer are taken, what is refused, and how it ends. Nothing but what
was taken is ever written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpull_async.protocol import frames
from kvpull_async.registry import Entry
from kvpull_async.status import LLMStatusCode
from kvpull_async.values import BlocksCacheKey, CacheDesc, DataType, Placement
from tests.loop_nodes import event_log, eventually
from tests.serving import STRIDE, TENSORS, Scene

OK, PARAM_INVALID = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_PARAM_INVALID
NOT_EXIST, LINK_FAILED = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, LLMStatusCode.LLM_LINK_FAILED
NBYTES = TENSORS * STRIDE
BYTES = bytes(range(100, 100 + STRIDE)) + bytes(range(180, 180 - STRIDE, -1))
STREAMED: dict[str, Any] = {"inline": False, "begun": True}
TO_BE_ACCEPTED: dict[str, Any] = {"inline": False}
READ: dict[str, Any] = {"inline": False, "ticket": b"a ticket"}
BEFORE = bytes(range(2 * STRIDE))
"""What each tensor of the scene holds at first."""


def contents(entry: Entry) -> list[bytes]:
    return [bytes(view) for view in entry.views()]


def untouched(scene: Scene) -> bool:
    return contents(scene.entry) == [BEFORE] * TENSORS


def landed(scene: Scene) -> bool:
    """Whether batch entry 1 holds the bytes, and entry 0 what it held."""
    return contents(scene.entry) == [BEFORE[:STRIDE] + BYTES[:STRIDE], BEFORE[:STRIDE] + BYTES[STRIDE:]]


def table(*numbers: int) -> bytes:
    return frames.encode_table(np.array(numbers, np.int64))


def allocated(scene: Scene, shape: list[int], *, blocks: int | None = None, accessible: bool = True) -> Entry:
    """One more cache of one-byte elements; with `blocks` the blocks cache of that model."""
    desc = CacheDesc(TENSORS, shape, DataType.DT_INT8)
    made = scene.registry.backend.allocate(tensors=TENSORS, tensor_nbytes=desc.size, placement=Placement.HOST)
    entry = scene.registry.add(
        desc, made.regions, blocks=blocks is not None, allocation=made, remote_accessible=accessible
    )
    if blocks is not None:
        scene.registry.bind_blocks(entry, BlocksCacheKey(1, blocks))
    return entry


async def goes_on(scene: Scene) -> None:
    """The next offer on the lane is taken."""
    scene.offer(99, BYTES)
    assert (await scene.result(99)).status == OK
    assert landed(scene)
    assert scene.lane.aborted == []
    assert not scene.entry.busy


# --- the ways in which bytes come ---


async def test_bytes_that_ride_on_the_offer_land_where_it_says() -> None:
    scene = Scene()
    with event_log() as events:
        scene.offer(1, BYTES, traceparent="00-trace")
        assert await scene.result(1) == frames.Result(1, OK, "", unsafe=False)
        key = f"cache:{scene.entry.cache_id}:3:1"
        common = {"pull_id": "0123456789abcdef", "request_id": 1, "key": key, "peer": "a peer", "bytes": NBYTES}
        began = await events.first("receive.started", **common)
        assert (began["cache_id"], began["traceparent"]) == (str(scene.entry.cache_id), "00-trace")
        await events.first("receive.finished", inline=True, **common)
    assert landed(scene)
    assert scene.counters.snapshot() == {"receives": 1, "bytes_received": NBYTES}
    await eventually(lambda: scene.lane.ended == [1])
    assert not scene.entry.busy


async def test_few_bytes_that_ride_on_an_offer_are_taken_on_the_spot() -> None:
    """But not before what came earlier, and others have their turns between many."""
    scene = Scene()
    for number in range(1, 12):
        scene.offer(number, BYTES)
    assert [result.request_id for result in scene.of(frames.Result)] == list(range(1, 9))
    await scene.result(11)
    assert [result.request_id for result in scene.of(frames.Result)] == list(range(1, 12))
    assert landed(scene)
    scene.lane.turns += 1
    scene.offer(12, **STREAMED)
    scene.offer(13, BYTES)
    assert len(scene.of(frames.Result)) == 11
    await eventually(lambda: bool(scene.path.transfers))
    scene.path.transfers[0].land(BYTES)
    assert (await scene.result(13)).status == OK
    await eventually(lambda: sorted(scene.lane.ended) == list(range(1, 14)))


async def test_few_bytes_for_blocks_or_for_many_tensors_are_taken_on_the_spot_too() -> None:
    scene = Scene()
    entry = allocated(scene, [4, 8], blocks=5)
    fields = {"key": "blocks", "model_id": 5, "blocks": 2, "block_nbytes": 8, "per_tensor": 12}
    scene.offer(1, table(3, 0) + bytes(range(1, 25)), **fields)
    assert [result.status for result in scene.of(frames.Result)] == [OK]
    ends = [bytes(range(first, first + 8)) for first in (1, 13)]
    assert contents(entry) == [
        bytes(range(f + 8, f + 12)) + bytes(20) + end for f, end in zip((1, 13), ends, strict=True)
    ]
    addresses = [scene.entry.regions[0].address + number for number in range(100)]
    scene.offer(2, table(*addresses) + bytes(range(100, 200)), key="address", tensors=100, per_tensor=1)
    assert [result.status for result in scene.of(frames.Result)] == [OK, OK]
    assert contents(scene.entry)[0][:100] == bytes(range(100, 200))


async def test_a_quarantined_destination_is_not_written_on_the_spot() -> None:
    scene = Scene()
    writer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    scene.entry.quarantine(writer)
    scene.offer(1, BYTES)
    await asyncio.sleep(0.01)
    assert (scene.lane.said, untouched(scene)) == ([], True)
    writer.set_result(None)
    assert (await scene.result(1)).status == OK
    assert landed(scene)


async def test_an_offer_to_addresses_is_told_under_the_first() -> None:
    scene = Scene()
    first, second = (region.address for region in scene.entry.regions)
    with event_log() as events:
        scene.offer(1, table(second, first) + BYTES, key="address", identity=0, entry=0)
        await events.first("receive.finished", key=f"address:{second:#x}")
        scene.offer(2, table(4096, first) + BYTES, key="address", identity=0, entry=0)
        await events.first("receive.refused", key="address:0x1000")


@pytest.mark.parametrize("shape", [[2, 100_000], [2000, 10]], ids=["many bytes", "many rows"])
async def test_much_that_rides_on_the_offer_is_copied_by_a_worker(shape: list[int]) -> None:
    scene = Scene()
    entry = allocated(scene, shape, blocks=5)
    count, nbytes = shape
    data = np.random.default_rng(3).bytes(TENSORS * count * nbytes)
    order = list(range(count))[::-1]
    scene.offer(
        1, table(*order) + data, key="blocks", model_id=5, per_tensor=count * nbytes, blocks=count, block_nbytes=nbytes
    )
    assert (await scene.result(1)).status == OK
    for tensor, got in enumerate(contents(entry)):
        there = np.frombuffer(data, np.uint8).reshape(TENSORS, count, nbytes)[tensor]
        assert got == there[::-1].tobytes()
    await eventually(lambda: not entry.busy)
    scene.workers.close(5.0)


async def test_bytes_that_have_set_out_are_taken_without_a_word() -> None:
    scene = Scene()
    scene.offer(1, **STREAMED)
    await eventually(lambda: bool(scene.path.transfers))
    assert scene.lane.said == []
    assert scene.entry.busy
    scene.path.transfers[0].land(BYTES)
    assert (await scene.result(1)).status == OK
    assert landed(scene)
    assert not scene.entry.busy


async def test_bytes_that_wait_are_asked_for_once_the_path_is_ready() -> None:
    scene = Scene()
    scene.path.stuck = True
    scene.offer(1, **TO_BE_ACCEPTED)
    scene.offer(2, **TO_BE_ACCEPTED)
    await asyncio.sleep(0.01)
    assert scene.lane.said == []
    scene.serving.receive(frames.Cancel(1), b"")
    scene.path.stuck = False
    assert await scene.heard(frames.Accept) == [frames.Accept(2)]
    scene.path.transfers[0].land(BYTES)
    assert (await scene.result(2)).status == OK
    assert landed(scene)


async def test_bytes_to_be_read_are_read_from_where_the_offer_says_into_where_it_says() -> None:
    scene = Scene()
    scene.offer(1, src_tensor=5, start=1000, **READ)
    await eventually(lambda: bool(scene.path.transfers))
    ((grant_id, ticket, reading, span),) = scene.path.expected
    assert (grant_id, ticket) == (bytes(range(16)), b"a ticket")
    assert reading == [[5, 1000, STRIDE], [6, 1000, STRIDE]]
    assert span.regions == scene.entry.regions
    assert span.rows().tolist() == [[0, STRIDE, STRIDE], [1, STRIDE, STRIDE]]
    assert span.most_rows == TENSORS
    assert scene.of(frames.Accept) == []
    scene.path.transfers[0].land(BYTES)
    assert (await scene.result(1)).status == OK
    assert landed(scene)


async def test_blocks_are_read_from_blocks() -> None:
    scene = Scene()
    entry = allocated(scene, [4, 8], blocks=5)
    scene.offer(
        1, table(3, 0) + table(7, 8), key="blocks", model_id=5, first_tensor=1, tensors=1, per_tensor=16, blocks=2,
        block_nbytes=8, src_tensor=2, src_blocks=2, **READ,
    )  # fmt: skip
    await eventually(lambda: bool(scene.path.transfers))
    ((_, _, reading, span),) = scene.path.expected
    assert reading == [[2, 56, 16]]
    assert span.rows().tolist() == [[0, 24, 8], [0, 0, 8]]
    scene.path.transfers[0].land(b"abcdefghABCDEFGH")
    await scene.result(1)
    assert contents(entry) == [bytes(32), b"ABCDEFGH" + bytes(16) + b"abcdefgh"]


async def test_p5_offers_and_requests_of_one_lane_have_their_turns_one_after_another() -> None:
    scene = Scene()
    scene.offer(1, **STREAMED)
    scene.ask(2)
    scene.offer(3, BYTES)
    await eventually(lambda: bool(scene.path.transfers))
    assert scene.lane.said == []
    scene.path.transfers[0].land(BYTES)
    await scene.heard(frames.Grant)
    assert len(scene.of(frames.Result)) == 1
    scene.path.transfers[1].finish()
    assert (await scene.result(3)).status == OK


# --- hostile and mistaken offers ---


Hostile = Iterator[tuple[str, dict[str, Any], bytes, LLMStatusCode]]
"""Name, fields, tail (`@` stands for the address of tensor 0), and the status of the refusal."""
HUGE = 2**63 - 1
IN_BLOCKS = {"key": "blocks", "model_id": 5, "blocks": 2, "block_nbytes": 8, "per_tensor": 16}


def wrong_sizes() -> Hostile:
    yield "no bytes", {"inline": True, "per_tensor": 0}, b"", PARAM_INVALID
    yield "no tensors", {"tensors": 0}, b"", PARAM_INVALID
    yield "payload too short", {}, BYTES[:-1], PARAM_INVALID
    yield "payload too long", {}, BYTES + b"x", PARAM_INVALID
    yield "payload where none belongs", STREAMED, BYTES, PARAM_INVALID
    yield "table shorter than its count", IN_BLOCKS, table(0), PARAM_INVALID
    yield "table of partial values", {**IN_BLOCKS, **READ}, table(0, 1)[:-1], PARAM_INVALID
    yield "source table missing", {**IN_BLOCKS, **READ, "src_blocks": 2}, table(0, 1), PARAM_INVALID
    yield "negative block", {**IN_BLOCKS, "tensors": 1}, table(0, -1) + bytes(16), PARAM_INVALID
    yield "negative source block", {**IN_BLOCKS, **READ, "src_blocks": 2}, table(0, 1, -1, 0), PARAM_INVALID
    yield "block outside", {**IN_BLOCKS, "tensors": 1}, table(0, 4) + bytes(16), PARAM_INVALID
    yield "block far outside", {**IN_BLOCKS, "tensors": 1}, table(0, HUGE) + bytes(16), PARAM_INVALID
    yield (
        "blocks of another size",
        {**IN_BLOCKS, "tensors": 1, "block_nbytes": 16, "per_tensor": 32},
        (table(0, 1) + bytes(32)),
        PARAM_INVALID,
    )
    yield (
        "more than the blocks hold",
        {**IN_BLOCKS, "tensors": 1, "per_tensor": 17},
        table(0, 1) + bytes(17),
        PARAM_INVALID,
    )
    yield "a block left empty", {**IN_BLOCKS, "tensors": 1, "per_tensor": 8}, table(0, 1) + bytes(8), PARAM_INVALID
    yield "source blocks of other bytes", {**IN_BLOCKS, **READ, "src_blocks": 1}, table(0, 1, 0), PARAM_INVALID
    yield "huge number of blocks", {**IN_BLOCKS, "blocks": HUGE}, table(0, 1), PARAM_INVALID
    yield "huge number of source blocks", {**IN_BLOCKS, **READ, "src_blocks": HUGE}, table(0, 1), PARAM_INVALID
    yield "huge number of tensors", {**STREAMED, "tensors": HUGE}, b"", PARAM_INVALID
    yield "huge tensors", {**STREAMED, "per_tensor": HUGE}, b"", PARAM_INVALID
    yield (
        "huge block size",
        {**IN_BLOCKS, **STREAMED, "block_nbytes": HUGE, "per_tensor": HUGE},
        table(0, 1),
        PARAM_INVALID,
    )


def wrong_keys() -> Hostile:
    yield "tensors outside", {"first_tensor": 1}, BYTES, PARAM_INVALID
    yield "tensors far outside", {"first_tensor": 2**32 - 1}, BYTES, PARAM_INVALID
    yield "entry outside", {"entry": 2}, BYTES, PARAM_INVALID
    yield "entry far outside", {"entry": HUGE}, BYTES, PARAM_INVALID
    yield "longer than an entry", {"entry": 0, "per_tensor": STRIDE + 1}, bytes(2 * STRIDE + 2), PARAM_INVALID
    yield "no such cache", {"identity": 77}, BYTES, NOT_EXIST
    yield "a negative cache", {"identity": -1}, BYTES, NOT_EXIST
    yield "no such blocks cache", {**IN_BLOCKS, "model_id": 6}, table(0, 1) + bytes(32), NOT_EXIST
    yield "not accessible", {"identity": 3}, BYTES, PARAM_INVALID
    yield "blocks of a contiguous cache", {"blocks": 1, "block_nbytes": STRIDE}, table(0) + BYTES, PARAM_INVALID
    yield "an entry of a blocks cache", {"identity": 2, "per_tensor": 8}, bytes(16), PARAM_INVALID
    yield "keys nobody knows", {"key": "request"}, BYTES, PARAM_INVALID


def wrong_addresses() -> Hostile:
    at = {"key": "address", "identity": 0, "entry": 0}
    yield "address 0", at, table(0, 0) + BYTES, PARAM_INVALID
    yield "negative address", at, table(-1, -4096) + BYTES, PARAM_INVALID
    yield "address of nothing", at, table(1 << 40, 1 << 41) + BYTES, PARAM_INVALID
    yield "last address", {**at, "tensors": 1}, table(HUGE) + bytes(STRIDE), PARAM_INVALID
    yield "addresses missing", {**at, **STREAMED}, table(4096), PARAM_INVALID
    yield (
        "beyond the end of a tensor",
        {**at, "tensors": 1, "per_tensor": 2 * STRIDE + 1},
        (b"@" + bytes(2 * STRIDE + 1)),
        PARAM_INVALID,
    )
    yield (
        "a block beyond its end",
        {**at, "tensors": 1, "blocks": 1, "block_nbytes": STRIDE},
        (b"@" + table(2) + bytes(STRIDE)),
        PARAM_INVALID,
    )
    yield "the same address twice", at, b"@@" + BYTES, PARAM_INVALID
    yield "address of a cache that is not accessible", {**at, "tensors": 1}, b"!" + bytes(STRIDE), PARAM_INVALID
    yield "too many addresses", {**at, **STREAMED, "tensors": 5000, "per_tensor": 1}, table(*range(5000)), PARAM_INVALID


HOSTILE = {name: rest for name, *rest in (*wrong_sizes(), *wrong_keys(), *wrong_addresses())}


@pytest.mark.parametrize("name", HOSTILE)
async def test_p8_an_offer_that_does_not_fit_is_refused_and_nothing_is_written(name: str) -> None:
    fields, tail, status = HOSTILE[name]
    scene = Scene()
    others = [allocated(scene, [4, 8], blocks=5), allocated(scene, [2, STRIDE], accessible=False)]
    assert [entry.cache_id for entry in others] == [2, 3]
    open_, closed = (table(entry.regions[0].address) for entry in (scene.entry, others[1]))
    if fields.get("key") == "address":
        tail = tail.replace(b"@", open_).replace(b"!", closed)
    with event_log() as events:
        scene.offer(1, tail, **fields)
        result = await scene.result(1)
        await events.first("receive.refused", status=status.name, reason=result.reason)
    assert (result.status, result.unsafe) == (status, False)
    assert result.reason
    assert untouched(scene)
    assert not any(any(content) for entry in others for content in contents(entry))
    assert scene.path.transfers == []
    assert scene.of(frames.Accept) == []
    assert scene.counters.snapshot() == {"receives_refused": 1}
    assert not any(entry.busy for entry in (scene.entry, *others))
    await goes_on(scene)


async def test_two_addresses_whose_bytes_would_overlap_are_refused() -> None:
    scene = Scene()
    address = scene.entry.regions[0].address
    scene.offer(1, table(address + STRIDE // 2, address) + BYTES, key="address")
    result = await scene.result(1)
    assert (result.status, untouched(scene)) == (PARAM_INVALID, True)
    assert f"less than the {STRIDE} bytes apart" in result.reason
    scene.offer(2, table(address + STRIDE, address) + BYTES, key="address")
    assert (await scene.result(2)).status == OK
    assert contents(scene.entry) == [BYTES[STRIDE:] + BYTES[:STRIDE], BEFORE]


async def test_without_remote_cache_access_only_addresses_may_be_named() -> None:
    scene = Scene(pushes_by_key=False)
    allocated(scene, [4, 8], blocks=5)
    scene.offer(1, BYTES)
    scene.offer(2, table(0, 1) + bytes(32), key="blocks", model_id=5, blocks=2, block_nbytes=8, per_tensor=16)
    for number in (1, 2):
        result = await scene.result(number)
        assert result.status == PARAM_INVALID
        assert "remote cache access is off here" in result.reason
    assert untouched(scene)
    addresses = [region.address + STRIDE for region in scene.entry.regions]
    scene.offer(3, table(*addresses) + BYTES, key="address")
    assert (await scene.result(3)).status == OK
    assert landed(scene)


async def test_a_registered_cache_without_memory_is_refused_before_anything_writes() -> None:
    scene = Scene()
    regions = scene.registry.backend.adopt([4096] * TENSORS, tensor_nbytes=STRIDE, placement=Placement.HOST)
    entry = scene.registry.add(CacheDesc(TENSORS, [1, STRIDE], DataType.DT_INT8), regions, blocks=False)
    for number, fields in enumerate([{}, STREAMED], 1):
        tail = b"" if fields else BYTES
        scene.offer(number, tail, identity=entry.cache_id, entry=0, **fields)
        result = await scene.result(number)
        assert result.status == PARAM_INVALID
        assert "there is no memory at the address" in result.reason
    assert scene.path.transfers == []
    await goes_on(scene)


async def test_a_reason_longer_than_a_frame_allows_is_cut() -> None:
    scene = Scene()
    scene.path.broken = ConnectionError("x" * 5000)
    scene.offer(1, **TO_BE_ACCEPTED)
    assert len((await scene.result(1)).reason) == 1000
