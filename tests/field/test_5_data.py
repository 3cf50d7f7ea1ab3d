"""Reports of wrong data: memory given back too early, layouts that were guessed, sizes and lists that do not match."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpull_async import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMException,
    LLMRole,
    LLMStatusCode,
)
from kvpull_async.protocol import frames
from kvpull_async.transport.shm.remote import Mapped
from tests import duo
from tests.conformance.api import AWAITED, Api
from tests.hostile import HostileSource, payload_head
from tests.integration.content import content
from tests.integration.own_loop import outcome
from tests.integration.processes import Footprint, child
from tests.integration.pushing import ends, laid
from tests.integration.rig import MISSING, SOON, Here, Nodes, begin, each_face, each_path, link_failed, nodes
from tests.loop_nodes import event_log

INVALID = LLMStatusCode.LLM_PARAM_INVALID
CANARY = 0xA5
KIB = 1024
U8 = DataType.DT_UINT8


async def refused(api: Api, call: Any, *args: Any, **options: Any) -> LLMException:
    """The error of a call whose arguments are wrong."""
    with pytest.raises(LLMException) as caught:
        await api.do(call, *args, **options)
    error: LLMException = caught.value
    assert error.status_code is INVALID, error
    assert not error.destination_unsafe
    return error


def canary(shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.full(shape, CANARY, np.uint8)


def addresses(memory: Any) -> list[int]:
    """Of each tensor of an array of (tensors, ...)."""
    return [tensor.ctypes.data for tensor in memory]


async def test_5_2_a_pull_of_several_copies_fails_only_when_all_of_them_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of four copies fails at once while others run: nothing may be written after the error."""
    desc = CacheDesc(4, [1, 4096 * KIB], U8)
    begun, lock = itertools.count(), threading.Lock()
    running: set[int] = set()
    together: list[int] = []
    copy = Mapped.copy

    def slow_but_one(cache: Mapped, *rows: Any) -> int:
        with lock:
            number = next(begun)
            running.add(number)
            together.append(len(running))
        try:
            if number == 1:
                raise OSError("this copy fails at once")
            time.sleep(0.3)
            return copy(cache, *rows)
        finally:
            with lock:
                running.remove(number)

    async with nodes(AWAITED, "shm") as n:
        await n.publish(desc)
        cache = await n.destination(desc)
        monkeypatch.setattr(Mapped, "copy", slow_but_one)
        error = await n.fails(cache)
        assert running == set(), "a copy was still writing"
        assert max(together) > 1, "the copies never ran side by side, which says nothing"
        assert not error.destination_unsafe
        monkeypatch.undo()
        for array in duo.arrays(cache):
            array[:] = CANARY
        await n.check_right(desc, key=0)
        assert all(bool((array == CANARY).all()) for array in duo.arrays(cache))


@each_path
@each_face
async def test_5_4_two_caches_over_one_base_address_keep_their_own_block_sizes(path: str, api: Api) -> None:
    """At the source and at the destination: each layout counts for its own cache."""
    source, destination = content(1, 0, 0, nbytes=2 * 64 * KIB).reshape(2, -1).copy(), canary((2, 64 * KIB))
    descs = [CacheDesc(2, [blocks, 64 * KIB // blocks], U8) for blocks in (64, 16)]
    async with nodes(api, path) as n:
        for model, desc in enumerate(descs):
            await api.do(
                n.prompt.cache_manager.register_blocks_cache, desc, addresses(source), BlocksCacheKey(duo.PROMPT, model)
            )
        into = [
            await api.do(n.decoder.cache_manager.register_blocks_cache, desc, addresses(destination)) for desc in descs
        ]
        for model, desc in enumerate(descs):
            destination[:] = CANARY
            pull = n.decoder.cache_manager.pull_blocks
            await api.do(pull, BlocksCacheKey(duo.PROMPT, model), into[model], [5, 6, 9], [2, 0, 12])
            expected = canary((2, desc.shape[0], desc.shape[1]))
            expected[:, [2, 0, 12]] = source.reshape(expected.shape)[:, [5, 6, 9]]
            assert np.array_equal(destination.reshape(expected.shape), expected)


SHAPE = (2, 8, 256)


def test_5_5_memory_whose_strides_are_not_those_of_its_shape_is_refused_by_name() -> None:
    base = np.zeros((8, 2, 256), np.uint8)
    wrong = {
        "blocks first, K and V halves behind": base.transpose(1, 0, 2)[0],
        "every other row": np.zeros((16, 256), np.uint8)[::2],
        "a column of a wider row": np.zeros((8, 512), np.uint8)[:, :256],
        "backwards": np.zeros((8, 256), np.uint8)[::-1],
        "one row for all": np.broadcast_to(np.zeros(256, np.uint8), (8, 256)),
        "column by column": np.asfortranarray(np.zeros((8, 256), np.uint8)),
    }
    good = np.zeros((8, 256), np.uint8)

    async def body() -> None:
        async with nodes(AWAITED) as n:
            register = n.prompt.cache_manager.register_blocks_cache
            for name, array in wrong.items():
                error = await refused(AWAITED, register, CacheDesc(2, [8, 256], U8), tensors=[good, array])
                assert "tensors[1] is not contiguous" in str(error), name

    AWAITED.run(body())


@each_path
async def test_5_5_the_two_halves_of_one_allocation_are_two_tensors_byte_by_byte(path: str) -> None:
    """K blocks first, then V blocks, in one array: each half is contiguous and counts by itself."""
    split = content(3, 0, 0, nbytes=2 * 8 * 256).reshape(SHAPE).copy()
    into = canary(SHAPE)
    desc = CacheDesc(2, [8, 256], U8)
    async with nodes(AWAITED, path) as n:
        key = BlocksCacheKey(duo.PROMPT, 0)
        await n.prompt.cache_manager.register_blocks_cache(desc, None, key, tensors=list(split))
        cache = await n.decoder.cache_manager.register_blocks_cache(desc, tensors=list(into))
        await n.decoder.cache_manager.pull_blocks(key, cache, [7, 0, 3], [1, 2, 6])
        expected = canary(SHAPE)
        expected[:, [1, 2, 6]] = split[:, [7, 0, 3]]
        assert np.array_equal(into, expected)


@each_path
@each_face
async def test_5_6_blocks_of_other_sizes_are_refused_with_both_numbers(path: str, api: Api) -> None:
    """A link carries caches of any sizes, so it is the first pull that is refused: before a byte has moved."""
    async with nodes(api, path) as n:
        ours, theirs = CacheDesc(2, [8, 16 * 128], U8), CacheDesc(2, [4, 32 * 128], U8)
        key = BlocksCacheKey(duo.PROMPT, 0)
        kept = await api.do(n.prompt.cache_manager.allocate_blocks_cache, theirs, key)
        cache = await api.do(n.decoder.cache_manager.allocate_blocks_cache, ours)
        for array in duo.arrays(cache):
            array[:] = CANARY
        error = await refused(api, n.decoder.cache_manager.pull_blocks, key, cache, [0, 1], [0, 1])
        assert {"2048", "4096"} <= set(str(error).split())
        assert all(bool((array == CANARY).all()) for array in duo.arrays(cache))
        assert "bytes_served" not in n.prompt.counters
        del kept


@pytest.mark.parametrize("way", ["inproc", "tcp", "mapped"])
@each_face
async def test_5_6_a_push_of_other_block_sizes_is_refused_with_both_numbers(way: str, api: Api) -> None:
    async with ends(api, way) as e:
        source = await e.source(CacheDesc(4, [8, 2048], U8), blocks=True)
        destination = await e.destination(CacheDesc(4, [8, 4096], U8), blocks=True)
        error = await e.refused(e.push_blocks, source, [0, 1], [0, 1])
        assert error.status_code is INVALID
        assert {"2048", "4096"} <= set(str(error).split())
        assert destination.untouched


@pytest.mark.parametrize("path", ["tcp", "shm"])
async def test_5_9_pulls_from_a_dead_peer_fail_at_once_and_fill_no_log(path: str) -> None:
    """Each pull tells its own caller; what is wrong with the link is said once, and it is not dialled for each pull."""
    with event_log() as log:
        async with (
            child("PROMPT", duo.PROMPT, listen=True, transport=path) as prefill,
            duo.node(LLMRole.DECODER, duo.DECODER, transport=path, reconnect_grace=100) as node,
        ):
            here, footprint = Here(node), Footprint(node)
            await prefill.ask("publish", "published", nbytes=300_000, first=0)
            await here.link(prefill)
            cache = await here.cache(300_000)
            prefill.kill()
            began = time.monotonic()
            for _ in range(5):
                for pull in [here.pull(cache) for _ in range(20)]:
                    link_failed(await outcome(pull))
            assert time.monotonic() - began < SOON
            told = [event["event"] for event in log.warnings]
            assert told.count("pull.failed") == node.counters["pulls_failed"] == 100
            assert told.count("link.lost") == 1
            assert set(told) == {"pull.failed", "link.lost"}
            assert len(log.named("link.reconnect_failed")) < 50
            info = duo.cluster(duo.PROMPT, prefill.address)
            await node.unlink_clusters([info], 5000, force=True)
            await footprint.check()


async def test_5_9_a_source_whose_every_payload_breaks_off_costs_nothing_that_stays() -> None:
    """The path below fails each time; every pull says so, and neither sockets nor threads nor tasks pile up."""
    async with HostileSource().listening() as source, duo.node(LLMRole.DECODER, duo.DECODER) as node:
        grant = b"g" * 16
        source.answer = lambda asked: [(frames.Grant(asked.request_id, grant, 2, 300_000, False, False), b"")]
        source.payload = payload_head(grant, 17)
        footprint, here = Footprint(node), Here(node)
        info = duo.cluster(duo.PROMPT, source.address)
        await node.link_clusters([info], duo.TIMEOUT_MS, raise_on_error=True)
        cache = await here.cache(300_000)
        for _ in range(25):
            error = link_failed(await outcome(here.pull(cache)))
            assert "carries another transfer" in str(error), error
        assert node.counters["links_up"] == 1
        await node.unlink_clusters([info], 5000, force=True)
        await footprint.check()


LISTS: dict[str, tuple[Any, Any, str]] = {
    "fewer of ours": ([1, 2], [1], "2 source blocks cannot go to 1 destination blocks"),
    "none of theirs": ([], [1, 2], "src_blocks must not be empty"),
    "none of ours": ([1, 2], [], "dst_blocks must not be empty"),
    "one place for two": ([1, 2], [3, 3], "source blocks 1 and 2 both go to destination block 3"),
    "below nothing": ([1, -1], [1, 2], "block indices must be 0 or above, got -1"),
    "below nothing here": ([1, 2], [1, -7], "block indices must be 0 or above, got -7"),
    "beyond ours": ([1, 2], [1, 8], "outside|8"),
    "very many": (list(range(5000)), list(range(4999)), "5000 source blocks cannot go to 4999"),
}


@pytest.mark.parametrize("case", LISTS)
@each_face
async def test_5_10_lists_of_blocks_that_do_not_match_are_refused(case: str, api: Api) -> None:
    src, dst, text = LISTS[case]
    async with nodes(api) as n:
        desc, key = CacheDesc(2, [8, 256], U8), BlocksCacheKey(duo.PROMPT, 0)
        kept = await api.do(n.prompt.cache_manager.allocate_blocks_cache, desc, key)
        cache = await api.do(n.decoder.cache_manager.allocate_blocks_cache, desc)
        error = await refused(api, n.decoder.cache_manager.pull_blocks, key, cache, src, dst)
        assert any(part in str(error) for part in text.split("|")), error
        assert len(str(error)) < 300, "a list of blocks belongs into no message"
        assert not {"serves", "serves_refused"} & set(n.prompt.counters), "the peer was asked"
        await api.do(n.decoder.cache_manager.pull_blocks, key, cache, [1, 2], [2, 1])
        del kept


@each_path
async def test_5_11_a_pull_before_the_publication_waits_for_it_if_it_is_told_to(path: str) -> None:
    async with nodes(AWAITED, path) as n:
        cache, manager = await n.destination(), n.prompt.kv_cache_manager
        pull = n.decoder.kv_cache_manager.pull_cache
        early = begin(pull(CacheKey(duo.PROMPT, 5), cache, 1, wait_for_key=True))
        late = await manager.allocate_cache(duo.SMALL)
        await AWAITED.until(lambda: n.prompt.counters.get("serves_awaited", 0) == 1)
        duo.fill(late)
        await manager.publish_cache(late, [CacheKey(duo.PROMPT, 5)])
        await early
        assert duo.holds(cache, entry=1, source=0)


@each_path
@each_face
async def test_5_11_a_key_that_is_not_there_is_explained(path: str, api: Api) -> None:
    """The same code for all, at once; what became of each; and what the source has instead."""
    fates = {10: "pulled already", 11: "released", 20: "expired", 77: "never published"}
    async with nodes(api, path) as n:
        await n.publish(first=10)
        manager = n.prompt.kv_cache_manager
        n.kept.append(await api.do(manager.allocate_cache, duo.SMALL))
        await api.do(manager.publish_cache, n.kept[-1], [CacheKey(duo.PROMPT, 20)], lease=1)
        cache, pull = await n.destination(), n.decoder.kv_cache_manager.pull_cache
        await api.do(pull, CacheKey(duo.PROMPT, 10), cache)
        await api.do(manager.remove_cache_key, CacheKey(duo.PROMPT, 11))
        for key, fate in fates.items():
            with pytest.raises(LLMException, match=rf"req_id {key} .* {fate}.*\(held: .*12") as caught:
                await api.do(pull, CacheKey(duo.PROMPT, key), cache)
            assert caught.value.status_code is MISSING
            assert caught.value.retry_safe
        await api.do(pull, CacheKey(duo.PROMPT, 12), cache)
        assert duo.holds(cache, entry=0, source=2)


TENSORS = 12
ENTRY = 48


def copied(src: Any, dst: Any, per_layer: int, layers: tuple[range | None, range | None], into: int) -> Any:
    """What a pull of entry 1 makes of the destination, or None where it must be refused."""
    taken, filled = (
        range(TENSORS) if not some else range(some.start * per_layer, some.stop * per_layer) for some in layers
    )
    expected = dst.copy()
    if max(taken.stop, filled.stop) > TENSORS or len(taken) != len(filled):
        return None
    for one, other in zip(taken, filled, strict=True):
        expected[other, into] = src[one, 1]
    return expected


layer_ranges = st.one_of(
    st.none(), st.builds(lambda first, count: range(first, first + count), st.integers(0, 7), st.integers(0, 6))
)


class Ranges:
    """Two nodes with registered memory between which layers are pulled."""

    def __init__(self, n: Nodes) -> None:
        self._n = n
        self._source = content(9, 0, 0, nbytes=TENSORS * 3 * ENTRY).reshape(TENSORS, 3, ENTRY).copy()
        self._into = canary((TENSORS, 3, ENTRY))

    async def register(self) -> None:
        desc = CacheDesc(TENSORS, [3, ENTRY], U8)
        self._made = await self._n.prompt.cache_manager.register_cache(desc, addresses(self._source))
        self._cache = await self._n.decoder.cache_manager.register_cache(desc, addresses(self._into))

    async def check(self, src: range | None, dst: range | None, per_layer: int, entry: int) -> None:
        self._into[:] = CANARY
        expected = copied(self._source, self._into, per_layer, (src, dst), entry)
        options = {"src_layer_range": src, "dst_layer_range": dst, "tensor_num_per_layer": per_layer}
        key = CacheKeyByIdAndIndex(duo.PROMPT, self._made.cache_id, 1)
        pull = self._n.decoder.cache_manager.pull_cache
        if expected is None:
            await refused(AWAITED, pull, key, self._cache, entry, **options)
            expected = canary(self._into.shape)
        else:
            await pull(key, self._cache, entry, **options)
        assert np.array_equal(self._into, expected)


@pytest.mark.parametrize("path", ["inproc", "tcp"])
def test_5_15_any_ranges_of_layers_are_copied_as_a_plain_loop_would_or_refused(path: str) -> None:
    cases = st.tuples(layer_ranges, layer_ranges, st.integers(1, 4), st.integers(0, 2))

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(cases, min_size=1, max_size=12))
    def holds(asked: list[tuple[range | None, range | None, int, int]]) -> None:
        async def body() -> None:
            async with nodes(AWAITED, path) as n:
                ranges = Ranges(n)
                await ranges.register()
                for case in asked:
                    await ranges.check(*case)

        AWAITED.run(body())

    holds()


@pytest.mark.parametrize("bad", [range(0, 4, 2), range(3, 0, -1), range(-1, 2)])
@each_face
async def test_5_15_a_range_of_layers_goes_up_by_one_from_0_on(bad: range, api: Api) -> None:
    async with ends(api, "inproc") as e:
        shape = CacheDesc(4, [3, 96], U8)
        source, destination = await e.source(shape), await e.destination(shape)
        for ranges in ((bad, range(2)), (range(2), bad)):
            error = await e.refused(e.push, destination, source, 0, *ranges, early=True)
            assert error.status_code is INVALID
        with pytest.raises(LLMException):  # a push goes to as many layers as it comes from
            await e.push(destination, source, 0, range(2), range(1))
        assert destination.untouched
        await e.push(destination, source, 0, range(1), range(1, 2))
        assert np.array_equal(destination.image, laid(destination, [(t + 2, 0, source.arrays[t][0]) for t in (0, 1)]))
