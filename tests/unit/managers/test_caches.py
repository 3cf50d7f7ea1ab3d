"""Making, releasing and copying local caches: budgets, keys, what a release waits for, and what a copy moves."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpull_async import CacheDesc, CacheKey, DataType, LLMException, LLMRole, LLMStatusCode, Placement
from kvpull_async.crossing import awaited
from kvpull_async.managers import caches
from kvpull_async.testing.faults import GatedMemory
from tests.loop_nodes import eventually
from tests.unit.side import DESC, Side, quarantine, status

BIG = CacheDesc(2, [2, 3 * 1024 * 1024], DataType.DT_UINT8)
PARAM_INVALID, NOT_EXIST = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
OUT_OF_MEMORY = {"kv": LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY, "cache": LLMStatusCode.LLM_OUT_OF_MEMORY}


@pytest.fixture(params=["kv", "cache"])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    made = Side(request.param, LLMRole.PROMPT)
    yield made
    made.close()


@pytest.fixture
def newer() -> Iterator[Side]:
    made = Side("cache", LLMRole.MIX)
    yield made
    made.close()


# -- making ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("desc", "message"),
    [
        (CacheDesc(0, [2, 8], DataType.DT_INT8), "num_tensors"),
        (CacheDesc(1, [2, 0], DataType.DT_INT8), "above 0"),
        (CacheDesc(1, [2, -1], DataType.DT_INT8), "above 0"),
        (CacheDesc(1, [1] * 32, DataType.DT_INT8), "rank 32"),
        (CacheDesc(2**31, [2**31, 4], DataType.DT_INT8), "2\\*\\*63 bytes"),
    ],
)
def test_a_layout_that_cannot_be(side: Side, desc: CacheDesc, message: str) -> None:
    for call in (
        lambda: side.allocate(desc),
        lambda: side.blocks(desc),
    ):
        with pytest.raises(LLMException, match=message) as caught:
            call()
        assert caught.value.status_code == PARAM_INVALID
    assert side.allocate(CacheDesc(1, [1] * 31, DataType.DT_INT8)).cache_id > 0


@pytest.mark.parametrize("kind", ["kv", "cache"])
def test_a_pool_that_is_used_up_refuses_with_the_managers_code_and_recovers(kind: str) -> None:
    made = Side(kind, LLMRole.PROMPT, mem_pool_cfg='{"memory_size": 1024}')
    try:
        desc = CacheDesc(1, [2, 512], DataType.DT_INT8)
        cache = made.allocate(desc)
        assert status(made.allocate, desc) == OUT_OF_MEMORY[kind]
        made.allocate(CacheDesc(1, [2, 512], DataType.DT_INT8, Placement.HOST))
        made.run(made.manager.deallocate(cache, blocks=None))
        made.allocate(desc)
    finally:
        made.close()


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_p10_an_allocation_without_a_thread_is_out_of_memory(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stack is memory too."""
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert "OUT_OF_MEMORY" in status(side.allocate).name
    side.allocate()


def no_memory(*_: object) -> Iterator[int]:
    yield 0
    raise MemoryError("no room")


@pytest.mark.parametrize("broken", [(threading.Thread, "start", refuse), (caches, "copy_batches", no_memory)])
def test_p10_a_copy_without_memory_is_out_of_memory(side: Side, monkeypatch: pytest.MonkeyPatch, broken: Any) -> None:
    memory = [np.zeros((2, 3, 64), np.uint8) for _ in range(2)]
    dst, src = (side.register(array) for array in memory)
    with monkeypatch.context() as patched:
        patched.setattr(*broken)
        assert status(side.run, side.copy(dst, src)) == OUT_OF_MEMORY[side.kind]
    memory[1][:] = 7
    side.run(side.copy(dst, src))
    assert memory[0][:, 0].all()


def test_keys_that_are_refused_take_no_memory(side: Side) -> None:
    side.allocate(keys=[CacheKey(1, 1)])
    before = repr(side.engine.memory)
    for keys in ([CacheKey(1, 1)], [CacheKey(1, n) for n in range(2, 6)]):
        assert status(side.allocate, DESC, keys) in (PARAM_INVALID, LLMStatusCode.LLM_FAILED)
    assert repr(side.engine.memory) == before


async def test_an_allocation_whose_caller_is_cancelled_gives_the_memory_back(side: Side) -> None:
    gate, entered = threading.Event(), threading.Event()
    allocate, before = side.engine.memory.allocate, repr(side.engine.memory)

    def slow(**arguments: Any) -> Any:
        entered.set()
        assert gate.wait(20)
        return allocate(**arguments)

    side.engine.memory.allocate = slow  # type: ignore[method-assign]
    task = asyncio.ensure_future(awaited(side.engine, side.manager.allocate_cache(DESC, ())))
    await asyncio.to_thread(entered.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    await eventually(lambda: side.engine.workers.submit(lambda: True).result() and repr(side.engine.memory) == before)


@pytest.mark.parametrize(
    ("addrs", "error"),
    [
        ([4096, -1], ValueError),
        ([4096, 2**64], ValueError),
        ([4096, "8192"], TypeError),
        ([4096, None], TypeError),
        ([4096, True], TypeError),
        ([4096], LLMException),
        ([4096, 8192, 12288], LLMException),
        ([], LLMException),
        ([4096, 0], LLMException),
    ],
)
def test_addresses_that_cannot_be(newer: Side, addrs: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        newer.run(newer.manager.register_cache(DESC, addrs, (), None))
    with pytest.raises(error):
        newer.run(newer.manager.register_blocks_cache(DESC, addrs, None, None))


@pytest.mark.parametrize(
    ("placement", "given", "accessible"),
    [
        (Placement.DEVICE, None, True),
        (Placement.HOST, None, False),
        (Placement.HOST, True, True),
        (Placement.DEVICE, False, False),
    ],
)
def test_what_peers_may_read_by_themselves(newer: Side, placement: Placement, given: Any, *, accessible: bool) -> None:
    desc = CacheDesc(1, [2, 8], DataType.DT_UINT8, placement)
    cache = newer.run(newer.manager.register_cache(desc, [4096], (), given))
    assert cache._binding.remote_accessible is accessible
    with pytest.raises(TypeError, match="remote_accessible"):
        newer.run(newer.manager.register_cache(desc, [4096], (), 1))


def test_after_a_link_by_rank_table_what_is_registered_is_not_remote_accessible(side: Side) -> None:
    arrays = np.zeros((2, DESC.size), np.uint8)
    addresses = [array.ctypes.data for array in arrays]
    side.engine.node.ranked = True
    for wanted in (None, False):
        assert not side.run(side.manager.register_cache(DESC, addresses, (), wanted))._binding.remote_accessible
    with pytest.raises(LLMException, match="after link"):
        side.run(side.manager.register_cache(DESC, addresses, (), True))
    assert side.run(side.manager.allocate_cache(DESC, ()))._binding.remote_accessible


def test_registering_does_not_touch_the_memory(newer: Side) -> None:
    newer.run(newer.manager.register_cache(DESC, [1, 2], (), None))  # nothing is there


def given(desc: CacheDesc = DESC) -> list[Any]:
    return [np.full(desc.size, 7, np.uint8) for _ in range(desc.num_tensors)]


def test_tensors_instead_of_addresses_stay_until_they_are_unregistered(newer: Side) -> None:
    tensors = given()
    addresses = [tensor.ctypes.data for tensor in tensors]
    gone = [weakref.ref(tensor) for tensor in tensors]
    plain = newer.run(newer.manager.register_cache(DESC, None, (), None, tensors))
    blocks = newer.run(newer.manager.register_blocks_cache(DESC, None, None, None, tuple(tensors)))
    assert plain.tensor_addrs == blocks.tensor_addrs == addresses
    assert all((tensor == 7).all() for tensor in tensors)
    del tensors
    newer.run(newer.manager.unregister_cache(plain.cache_id))
    gc.collect()
    assert [look() is None for look in gone] == [False, False]
    view = newer.tensor(blocks, 1)
    newer.run(newer.manager.unregister_cache(blocks.cache_id))
    gc.collect()
    assert [look() is None for look in gone] == [True, False]
    assert (view == 7).all()
    del view
    gc.collect()
    assert gone[1]() is None


@pytest.mark.parametrize("name", ["register_cache", "register_blocks_cache"])
def test_memory_is_said_in_one_way(newer: Side, name: str) -> None:
    register = getattr(newer.manager, name)
    for addrs, tensors in (([4096, 8192], given()), ([], given()), (None, given()[:1])):
        assert status(register, DESC, addrs, (), None, tensors) == PARAM_INVALID
    for other in (None, 4096, given()[0]):
        with pytest.raises(TypeError, match=r"addrs|tensors"):
            register(DESC, None, (), None, other)


def test_wrong_addresses_are_told_when_they_are_used(newer: Side) -> None:
    wrong = newer.run(newer.manager.register_cache(DESC, [1, 4096], (), None))
    right = newer.run(newer.manager.register_cache(DESC, None, (), None, given()))
    for dst, src in ((wrong, right), (right, wrong)):
        with pytest.raises(LLMException, match="no memory at the address") as caught:
            newer.run(newer.copy(dst, src))
        assert caught.value.status_code == PARAM_INVALID


# -- releasing ---------------------------------------------------------------------------------------------------------


async def test_a_release_waits_for_what_uses_the_memory_and_then_cuts_it() -> None:
    made = Side("cache", LLMRole.MIX, settle_timeout=20)
    try:
        cache = made.allocate()
        entry, loop = cache._binding, made.engine.core.loop
        pins: list[Any] = []
        cuts: list[bool] = []

        def cut() -> None:
            cuts.append(entry.alive)
            pins[0].release()

        loop.call_soon_threadsafe(lambda: pins.append(entry.pin(cut)))
        await eventually(lambda: bool(pins))
        await awaited(made.engine, made.manager.deallocate(cache, blocks=False))
        assert cuts == [False]
        assert made.engine.registry.find(cache.cache_id) is None
    finally:
        await asyncio.to_thread(made.close)


async def test_keys_keep_the_memory_and_nobody_is_waited_for(side: Side) -> None:
    cache = side.allocate(keys=[CacheKey(1, 1)])
    entry, held = cache._binding, []
    side.engine.core.loop.call_soon_threadsafe(lambda: held.append(entry.pin(lambda: None)))
    await eventually(lambda: bool(held))
    await awaited(side.engine, side.manager.deallocate(cache, blocks=None))
    assert side.engine.registry.find(entry.cache_id) is entry
    side.engine.core.loop.call_soon_threadsafe(held[0].release)
    await awaited(side.engine, side.manager.remove_cache_key(CacheKey(1, 1)))
    assert side.engine.registry.find(entry.cache_id) is None


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ((-1,), ValueError),
        ((0, 2**32), ValueError),
        ((0, 0, -1), ValueError),
        ((0, 0, 0, 2**63), ValueError),
        ((0, 0, 0, -1, -1), ValueError),
        ((None,), TypeError),
        ((True,), TypeError),
        ((0, 0, 0, None), TypeError),
        ((0, 0, 0, 0), LLMException),
        ((0, 0, 0, -2), LLMException),
    ],
)
def test_wrong_arguments_of_a_copy_are_refused_at_once(side: Side, more: Any, error: type[Exception]) -> None:
    dst, src = side.allocate(), side.allocate()
    with pytest.raises(error):
        side.copy(dst, src, *more)


def test_blocks_caches_are_not_copied_by_entry(newer: Side) -> None:
    cache, blocks = newer.allocate(), newer.blocks()
    assert status(newer.copy, blocks, cache) == PARAM_INVALID
    assert status(newer.copy, cache, blocks) == PARAM_INVALID


@pytest.mark.parametrize(
    ("more", "where", "copied"),
    [
        ((1, 2), 1, (0, 64)),
        ((np.int32(0), np.uint8(2), np.int64(10)), 0, (10, 64)),
        ((2, 2, 10, 5), 2, (10, 15)),
    ],
)
def test_a_copy_moves_what_was_asked_and_nothing_else(side: Side, more: Any, where: int, copied: Any) -> None:
    dst, src = side.allocate(), side.allocate()
    for tensor in (0, 1):
        side.tensor(src, tensor)[2] = np.arange(1, 65) + tensor
    side.run(side.copy(dst, src, *more))
    for tensor in (0, 1):
        expected = np.zeros((3, 64), np.uint8)
        expected[where, copied[0] : copied[1]] = side.tensor(src, tensor)[2, copied[0] : copied[1]]
        assert np.array_equal(side.tensor(dst, tensor), expected)


@pytest.mark.parametrize("ends", [False, True])
async def test_a_copy_into_what_is_quarantined_waits_and_raises_if_that_does_not_end(*, ends: bool) -> None:
    made = Side("cache", LLMRole.MIX, settle_timeout=20_000 if ends else 20)
    try:
        dst, src, loop = made.allocate(), made.allocate(), made.engine.core.loop
        writer = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(quarantine(dst), loop))
        copying = asyncio.ensure_future(awaited(made.engine, made.copy(dst, src)))
        if ends:
            loop.call_soon_threadsafe(writer.set_result, None)
            await copying
            return
        with pytest.raises(LLMException, match="quarantined") as caught:
            await copying
        assert caught.value.destination_unsafe
        loop.call_soon_threadsafe(writer.set_result, None)
    finally:
        await asyncio.to_thread(made.close)


@pytest.mark.parametrize("which", ["src", "dst"])
async def test_a_copy_whose_cache_is_released_under_it_says_so(which: str) -> None:
    made = Side("cache", LLMRole.MIX, settle_timeout=100)
    gated = made.engine.registry.backend = GatedMemory(made.engine.memory)
    try:
        caches = {name: made.allocate(BIG) for name in ("src", "dst")}
        gated.landing_gate.close()
        copying = asyncio.ensure_future(awaited(made.engine, made.copy(caches["dst"], caches["src"])))
        await gated.landing_gate.reached()
        releasing = asyncio.ensure_future(awaited(made.engine, made.manager.deallocate(caches[which], blocks=False)))
        with pytest.raises(LLMException, match="was released during the copy") as caught:
            await copying
        assert caught.value.status_code == NOT_EXIST
        assert caught.value.operation == "copy_cache"
        gated.landing_gate.open()
        await asyncio.gather(releasing, return_exceptions=True)  # it may have had to give up by now
        await awaited(made.engine, made.manager.deallocate(caches[which], blocks=False))
    finally:
        gated.landing_gate.open()
        await asyncio.to_thread(made.close)


async def test_a_cancelled_copy_leaves_a_destination_that_nobody_writes_to() -> None:
    made = Side("cache", LLMRole.MIX)
    gated = made.engine.registry.backend = GatedMemory(made.engine.memory)
    try:
        dst, src = made.allocate(BIG), made.allocate(BIG)
        made.tensor(src, 0)[0] = 1
        gated.landing_gate.close()
        copying = asyncio.ensure_future(awaited(made.engine, made.copy(dst, src)))
        await gated.landing_gate.reached()
        copying.cancel()
        await asyncio.sleep(0.01)
        assert not copying.done()  # the piece that runs is waited for
        gated.landing_gate.open()
        with pytest.raises(asyncio.CancelledError):
            await copying
        assert not dst.quarantined
        made.tensor(dst, 0)[0] = 7
        await asyncio.to_thread(made.engine.workers.submit(lambda: None).result)
        assert (made.tensor(dst, 0)[0] == 7).all()
    finally:
        gated.landing_gate.open()
        await asyncio.to_thread(made.close)


async def test_a_cancelled_copy_that_does_not_stop_in_time_quarantines_its_destination() -> None:
    made = Side("cache", LLMRole.MIX, settle_timeout=20)
    gated = made.engine.registry.backend = GatedMemory(made.engine.memory)
    try:
        dst, src = made.allocate(BIG), made.allocate(BIG)
        gated.landing_gate.close()
        copying = asyncio.ensure_future(awaited(made.engine, made.copy(dst, src)))
        await gated.landing_gate.reached()
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        assert dst.quarantined
        gated.landing_gate.open()
        await awaited(made.engine, made.manager.settled(dst, None))
        assert not dst.quarantined
    finally:
        gated.landing_gate.open()
        await asyncio.to_thread(made.close)
