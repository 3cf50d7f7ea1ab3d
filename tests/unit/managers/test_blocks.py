"""Copies of blocks within a node: against a model that copies byte by byte, and what is refused."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvpull_async import Cache, CacheDesc, DataType, KvCache, LLMException, LLMRole, LLMStatusCode, Placement
from kvpull_async.memory.base import PIECE_BYTES
from kvpull_async.testing.faults import GatedMemory
from tests.strategies import EXAMPLES
from tests.unit.side import Side, status

HOST, DEVICE = Placement.HOST, Placement.DEVICE
PARAM_INVALID, NOT_EXIST = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
TENSORS, BLOCKS, NBYTES = 2, 6, 40

some = settings(max_examples=EXAMPLES // 2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def desc(
    *, blocks: int = BLOCKS, nbytes: int = NBYTES, tensors: int = TENSORS, placement: Placement = DEVICE
) -> CacheDesc:
    return CacheDesc(tensors, [blocks, nbytes], DataType.DT_UINT8, placement)


@pytest.fixture(params=["kv", "cache"])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    made = Side(request.param, LLMRole.MIX)
    yield made
    made.close()


@pytest.fixture(params=["direct", "staged"])
def shared(request: pytest.FixtureRequest) -> Iterator[Side]:
    """For property tests: one with host memory, and one with memory that hands out pieces only."""
    made = Side("cache", LLMRole.MIX)
    if request.param == "staged":
        made.engine.registry.backend = GatedMemory(made.engine.memory)
    yield made
    made.close()


def cpu(side: Side, array: NDArray[np.uint8]) -> Any:
    """A handle on an array of shape (tensors, blocks, bytes)."""
    layout = desc(tensors=len(array), blocks=array.shape[1], nbytes=array.shape[2], placement=HOST)
    kind = KvCache if side.kind == "kv" else Cache
    return kind.create_cpu_cache(layout, [tensor.ctypes.data for tensor in array])


def numbered(blocks: int = BLOCKS, nbytes: int = NBYTES) -> NDArray[np.uint8]:
    """No two blocks of all tensors are alike."""
    return np.random.default_rng(blocks).integers(0, 256, (TENSORS, blocks, nbytes)).astype(np.uint8)


def fill(side: Side, cache: Any, content: NDArray[np.uint8]) -> None:
    for tensor, values in enumerate(content):
        side.tensor(cache, tensor)[:] = values


def content(side: Side, cache: Any, *, tensors: int = TENSORS) -> NDArray[np.uint8]:
    return np.stack([side.tensor(cache, tensor) for tensor in range(tensors)])


def copy_blocks(side: Side, cache: Any, info: Any) -> None:
    side.run(side.manager.copy_blocks(cache, info))


def swap_blocks(side: Side, src: Any, dst: Any, pairs: Any) -> None:
    side.run(side.manager.swap_blocks(src, dst, pairs))


# -- what is copied ----------------------------------------------------------------------------------------------------


def carried_out(
    source: NDArray[np.uint8], target: NDArray[np.uint8], pairs: list[tuple[int, int]]
) -> NDArray[np.uint8] | None:
    """Byte by byte; None for what has to be refused."""
    if len({dst for _, dst in set(pairs)}) < len(set(pairs)):
        return None
    if any(src >= source.shape[1] or dst >= target.shape[1] for src, dst in pairs):
        return None
    after: NDArray[np.uint8] = target.copy()
    for src, dst in pairs:
        for tensor in range(len(after)):
            for at in range(after.shape[2]):
                after[tensor, dst, at] = source[tensor, src, at]
    return after


def judge(side: Side, cache: Any, wanted: NDArray[np.uint8] | None, before: NDArray[np.uint8], call: Any) -> None:
    event("refused" if wanted is None else "copied")
    if wanted is None:
        assert status(side.run, call) == PARAM_INVALID
    else:
        side.run(call)
    assert np.array_equal(content(side, cache), before if wanted is None else wanted)


numbers = st.integers(0, BLOCKS)  # the last of which no cache has


@st.composite
def one_to_many(draw: st.DrawFn) -> Mapping[int, list[int]]:
    """Mostly each destination once, as runs, in disorder, to themselves, or in circles; some wrong ones, too."""
    if draw(st.booleans()):
        return draw(st.dictionaries(numbers, st.lists(numbers, max_size=4), max_size=5))
    of = draw(st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=BLOCKS))
    to = draw(st.permutations(range(BLOCKS)))
    copies: dict[int, list[int]] = {}
    for src, dst in zip(of, to, strict=False):
        copies.setdefault(src, []).append(dst)
    return copies


@some
@given(copies=one_to_many())
def test_p2_copies_are_those_of_a_model_that_reads_every_block_first(
    shared: Side, copies: Mapping[int, list[int]]
) -> None:
    cache, before = shared.blocks(desc()), numbered()
    fill(shared, cache, before)
    pairs = [(src, dst) for src, found in copies.items() for dst in found]
    wanted = carried_out(before, before, [*pairs, *[(src, src) for src in copies if src >= BLOCKS]])
    judge(shared, cache, wanted, before, shared.manager.copy_blocks(cache, dict(copies)))
    shared.run(shared.manager.deallocate(cache, blocks=True))


@some
@given(pairs=st.dictionaries(numbers, st.integers(0, BLOCKS + 2), max_size=BLOCKS), inward=st.booleans())
def test_p2_swaps_are_those_of_a_model(shared: Side, pairs: dict[int, int], *, inward: bool) -> None:
    """The device cache has two blocks more."""
    larger, smaller = numbered(BLOCKS + 2), numbered()
    device, host = shared.blocks(desc(blocks=BLOCKS + 2)), shared.blocks(desc(placement=HOST))
    fill(shared, device, larger)
    fill(shared, host, smaller)
    src, dst, read, before = (host, device, smaller, larger) if inward else (device, host, larger, smaller)
    wanted = carried_out(read, before, list(pairs.items()))
    judge(shared, dst, wanted, before, shared.manager.swap_blocks(src, dst, pairs))
    assert np.array_equal(content(shared, src), read)
    for cache in (device, host):
        shared.run(shared.manager.deallocate(cache, blocks=True))


def test_blocks_are_set_aside_where_a_copy_overwrites_what_it_reads(side: Side) -> None:
    before = numbered()
    for copies, order in (
        ({0: [1], 1: [0]}, [1, 0, 2, 3, 4, 5]),  # trade places
        ({n: [n + 1] for n in range(5)}, [0, 0, 1, 2, 3, 4]),  # all one up
        ({n + 1: [n] for n in range(5)}, [1, 2, 3, 4, 5, 5]),
        ({0: [1, 2, 3], 3: [0], 5: [5]}, [3, 0, 0, 0, 4, 5]),
    ):
        cache = side.blocks(desc())
        fill(side, cache, before)
        copy_blocks(side, cache, copies)
        assert np.array_equal(content(side, cache), before[:, order]), copies


def test_blocks_that_are_larger_than_one_piece(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    large, copying, rows = 2 * PIECE_BYTES + 5, side.engine.memory.copying, []

    def counted(sources: Any, destinations: Any, pairs: Any, **options: Any) -> Any:
        rows.extend(pairs[:, 4].tolist())
        return copying(sources, destinations, pairs, **options)

    monkeypatch.setattr(side.engine.memory, "copying", counted)
    cache = side.blocks(desc(blocks=4, nbytes=large, tensors=1))
    for block in range(4):
        side.tensor(cache, 0)[block] = block + 1
    copy_blocks(side, cache, {0: [1, 2], 1: [3]})
    assert content(side, cache, tensors=1)[0].min(axis=1).tolist() == [1, 1, 1, 2]
    assert content(side, cache, tensors=1)[0].max(axis=1).tolist() == [1, 1, 1, 2]
    assert sum(rows) == 4 * large  # three, and one set aside
    assert max(rows) <= PIECE_BYTES  # what a cancellation may have to wait for


def test_numbers_may_come_from_arrays(side: Side) -> None:
    cache, before = side.blocks(desc()), numbered()
    fill(side, cache, before)
    copy_blocks(side, cache, {np.int64(2): list(np.array([0, 5]))})
    assert np.array_equal(content(side, cache), before[:, [2, 1, 2, 3, 4, 2]])
    array = np.zeros((TENSORS, 3, NBYTES), np.uint8)
    swap_blocks(side, cache, cpu(side, array), {np.uint8(4): np.int32(2)})
    assert np.array_equal(array[:, 2], before[:, 4])
    assert not array[:, :2].any()


def test_nothing_to_copy_copies_nothing(side: Side) -> None:
    cache, before, array = side.blocks(desc()), numbered(), numbered()
    fill(side, cache, before)
    nothing: tuple[dict[int, list[int]], ...] = ({}, {3: []}, {3: [3], 0: [0, 0]})
    for copies in nothing:
        copy_blocks(side, cache, copies)
    swap_blocks(side, cpu(side, array), cache, {})
    assert np.array_equal(content(side, cache), before)


def test_blocks_go_out_to_memory_of_the_caller_and_come_back(side: Side) -> None:
    cache, before = side.blocks(desc()), numbered()
    array = np.zeros((TENSORS, 3, NBYTES), np.uint8)
    fill(side, cache, before)
    handle = cpu(side, array)
    swap_blocks(side, cache, handle, {4: 0, 1: 2})
    assert np.array_equal(array[:, [0, 2]], before[:, [4, 1]])
    assert not array[:, 1].any()
    array[:, 0] = 9
    swap_blocks(side, handle, cache, {0: 5})
    assert (content(side, cache)[:, 5] == 9).all()
    assert np.array_equal(content(side, cache)[:, :5], before[:, :5])
    assert not handle.quarantined
    side.run(side.manager.settled(handle, None))


def test_a_handle_of_the_caller_serves_several_nodes(side: Side) -> None:
    other = Side(side.kind, LLMRole.MIX)
    try:
        array, before = np.zeros((TENSORS, 3, NBYTES), np.uint8), numbered()
        handle = cpu(side, array)
        for node in (side, other, side):
            cache = node.blocks(desc())
            fill(node, cache, before)
            array[:] = 0
            swap_blocks(node, cache, handle, {3: 1})
            assert np.array_equal(array[:, 1], before[:, 3])
    finally:
        other.close()


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copies",
    [None, [(0, 1)], {0: 1}, {0: (1,)}, {0: None}, {0: [None]}, {0: [True]}, {True: [0]}, {"0": [1]}, {0: [1.0]}],
)
def test_copies_of_a_wrong_type_are_refused_at_once(side: Side, copies: Any) -> None:
    cache = side.blocks(desc())
    with pytest.raises(TypeError, match="copy_block_info"):
        side.manager.copy_blocks(cache, copies)


@pytest.mark.parametrize("copies", [{-1: [0]}, {0: [-1]}, {0: [2**64]}])
def test_a_number_that_no_block_has_is_of_the_wrong_type_in_the_newer_manager(side: Side, copies: Any) -> None:
    cache = side.blocks(desc())
    with pytest.raises(ValueError if side.kind == "kv" else TypeError, match="blocks must be in 0"):
        side.manager.copy_blocks(cache, copies)


@pytest.mark.parametrize(
    "copies", [{0: [1], BLOCKS: []}, {0: [1], 2: [BLOCKS]}, {0: [1], 2: [2**64 - 1]}, {0: [1], 2: [1]}]
)
def test_all_is_checked_before_anything_is_copied(side: Side, copies: Any) -> None:
    cache, before = side.blocks(desc()), numbered()
    fill(side, cache, before)
    assert status(copy_blocks, side, cache, copies) == PARAM_INVALID
    assert np.array_equal(content(side, cache), before)


@pytest.mark.parametrize(
    ("pairs", "error"),
    [(None, TypeError), ([(0, 1)], TypeError), ({0: None}, TypeError), ({0: [1]}, TypeError), ({False: 1}, TypeError),
     ({0: -1}, LLMException), ({-1: 0}, LLMException)],
)  # fmt: skip
def test_swaps_that_cannot_be_are_refused_at_once(side: Side, pairs: Any, error: type[Exception]) -> None:
    cache, handle = side.blocks(desc()), cpu(side, numbered())
    with pytest.raises(error, match="src_to_dst"):
        side.manager.swap_blocks(handle, cache, pairs)


def test_a_wrong_cache_is_named(side: Side) -> None:
    cache, names = side.blocks(desc()), ("src", "dst") if side.kind == "kv" else ("src_cache", "dst_cache")
    with pytest.raises(TypeError, match=r"^cache must be"):
        side.manager.copy_blocks(None, {})
    with pytest.raises(TypeError, match=f"^{names[0]} must be"):
        side.manager.swap_blocks(None, cache, {})
    with pytest.raises(TypeError, match=f"^{names[1]} must be"):
        side.manager.swap_blocks(cache, 1, {})


def test_contiguous_caches_have_no_blocks(side: Side) -> None:
    contiguous, blocks, handle = side.allocate(desc()), side.blocks(desc()), cpu(side, numbered())
    assert status(copy_blocks, side, contiguous, {0: [1]}) == PARAM_INVALID
    assert status(swap_blocks, side, handle, contiguous, {0: 1}) == PARAM_INVALID
    assert status(swap_blocks, side, side.allocate(desc(placement=HOST)), blocks, {0: 1}) == PARAM_INVALID


def test_swaps_between_caches_that_do_not_match_are_refused(side: Side) -> None:
    device, handle = side.blocks(desc()), cpu(side, numbered())
    for src, dst in (
        (device, side.blocks(desc())),
        (handle, side.blocks(desc(placement=HOST))),
        (cpu(side, numbered(nbytes=NBYTES - 1)), device),
        (cpu(side, numbered()[:1]), device),
    ):
        assert status(swap_blocks, side, src, dst, {0: 0}) == PARAM_INVALID
    assert not content(side, device).any()


def test_memory_of_the_caller_for_another_number_of_devices_or_at_no_address_is_refused(side: Side) -> None:
    device, layout = side.blocks(desc()), desc(placement=HOST)
    if side.kind == "kv":
        array = numbered()
        addresses = [tensor.ctypes.data for tensor in array]
        assert status(swap_blocks, side, KvCache.create_cpu_cache(layout, [addresses] * 2), device, {}) == PARAM_INVALID
        swap_blocks(side, KvCache.create_cpu_cache(layout, [addresses]), device, {1: 0})
        assert np.array_equal(content(side, device)[:, 0], array[:, 1])
    else:
        assert status(swap_blocks, side, Cache.create_cpu_cache(layout, [0, 0]), device, {0: 0}) == PARAM_INVALID
        assert status(swap_blocks, side, Cache(-1, layout, [], None, False, True), device, {0: 0}) == PARAM_INVALID


def test_memory_of_the_caller_that_was_freed_since_the_last_swap_is_refused(side: Side) -> None:
    device, room = side.blocks(desc()), mmap.mmap(-1, TENSORS * BLOCKS * NBYTES)
    lent = np.frombuffer(room, np.uint8).reshape(TENSORS, BLOCKS, NBYTES)
    handle = cpu(side, lent)
    swap_blocks(side, handle, device, {0: 0})
    del lent
    room.close()
    assert status(swap_blocks, side, handle, device, {0: 0}) == PARAM_INVALID


def test_a_cache_that_is_gone_or_of_another_node(side: Side) -> None:
    theirs, handle = Side(side.kind, LLMRole.MIX), cpu(side, numbered())
    try:
        gone, foreign = side.blocks(desc()), theirs.blocks(desc())
        side.blocks(desc())
        assert status(copy_blocks, side, foreign, {0: [1]}) == NOT_EXIST
        assert status(swap_blocks, side, handle, foreign, {0: 1}) == NOT_EXIST
        side.run(side.manager.deallocate(gone, blocks=True if side.kind == "cache" else None))
        assert status(copy_blocks, side, gone, {0: [1]}) == NOT_EXIST
        assert status(swap_blocks, side, handle, gone, {0: 1}) == PARAM_INVALID
        assert status(copy_blocks, side, handle, {0: [1]}) == NOT_EXIST
    finally:
        theirs.close()
