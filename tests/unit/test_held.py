"""What uses a cache from beside the core's loop: claims keep the memory, and end when the cache does."""

from __future__ import annotations

import asyncio
import gc
import mmap
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.memory.host import HostMemory
from kvpull_async.registry import Entry, Registry
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.testing.faults import GatedMemory
from kvpull_async.values import CacheDesc, DataType, Placement
from tests.loop_nodes import eventually

DESC = CacheDesc(1, [2, 8], DataType.DT_INT8)


class Held:
    """A registry with one cache in the test's own memory."""

    def __init__(self) -> None:
        self.memory = np.zeros(16, np.uint8)
        self.registry = Registry(HostMemory())
        address = self.memory.ctypes.data
        regions = self.registry.backend.adopt([address], tensor_nbytes=16, placement=Placement.HOST)
        self.entry: Entry = self.registry.add(DESC, regions, blocks=False)


def soon() -> Deadline:
    return Deadline.after_ms(20_000)


async def test_a_claimed_cache_is_busy_until_it_is_given_back() -> None:
    held, loop = Held(), asyncio.get_running_loop()
    assert held.entry.claim("me")
    assert held.entry.busy
    assert not await held.entry.idle(Deadline.after_ms(10))
    held.entry.unclaim("me", loop)
    assert not held.entry.busy
    assert await held.entry.idle(soon())


async def test_who_waits_is_woken_by_another_threads_last_claim() -> None:
    held, loop = Held(), asyncio.get_running_loop()
    assert held.entry.claim(True)
    assert held.entry.claim(False)
    waiting = asyncio.ensure_future(held.entry.idle(soon()))
    await asyncio.sleep(0)
    for still in (True, False):
        thread = threading.Thread(target=held.entry.unclaim, args=(still, loop))
        thread.start()
        thread.join()
        assert held.entry.busy is still
    assert await waiting


async def test_p7_a_released_cache_is_claimed_no_more_and_goes_with_its_last_claim() -> None:
    held, loop = Held(), asyncio.get_running_loop()
    assert held.entry.claim("me")
    held.registry.release(held.entry)
    assert not held.entry.claim("me")
    assert held.registry.find(held.entry.cache_id) is held.entry, "gone while its memory is in use"
    held.entry.unclaim("me", loop)
    await eventually(lambda: held.registry.find(held.entry.cache_id) is None)


async def test_p1_a_quarantined_cache_is_not_claimed() -> None:
    held, loop = Held(), asyncio.get_running_loop()
    writer: asyncio.Future[None] = loop.create_future()
    held.entry.quarantine(writer)
    assert not held.entry.claim("me")
    writer.set_result(None)
    await asyncio.sleep(0)
    assert held.entry.claim("me")
    held.entry.unclaim("me", loop)


async def test_claims_of_many_threads_are_all_counted() -> None:
    held, loop = Held(), asyncio.get_running_loop()

    def work() -> None:
        for turn in range(500):
            token = (threading.get_ident(), turn)
            assert held.entry.claim(token)
            held.entry.unclaim(token, loop)
            held.entry.unclaim(token, loop)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        await held.entry.idle(Deadline.after_ms(1))
    for thread in threads:
        thread.join()
    assert not held.entry.busy
    assert await held.entry.idle(soon())


# -- memory of the caller ----------------------------------------------------------------------------------------------


def at(address: int) -> Entry:
    registry = Registry(HostMemory())
    regions = registry.backend.adopt([address], tensor_nbytes=16, placement=Placement.HOST)
    return registry.add(DESC, regions, blocks=False)


def test_addresses_are_looked_at_when_they_are_first_used() -> None:
    held = Held()
    assert not held.entry.reached
    held.entry.reach()
    assert (held.entry.reached, held.entry.writable) == (True, False)
    held.entry.reach(writing=True)
    assert held.entry.writable
    wrong = at(4096)
    for writing in (False, True, False):
        with pytest.raises(LLMException, match="tensor 0") as caught:
            wrong.reach(writing=writing)
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
        assert not wrong.reached
        assert not wrong.writable


def test_memory_that_was_read_is_looked_at_again_before_it_is_written() -> None:
    constant = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ), np.uint8)
    entry = at(constant.ctypes.data)
    entry.reach()
    with pytest.raises(LLMException, match="read-only"):
        entry.reach(writing=True)
    entry.reach()


class Mover:
    """A tensor that its library may give other memory."""

    def __init__(self) -> None:
        self.bytes = np.zeros(16, np.uint8)

    def data_ptr(self) -> int:
        return self.bytes.ctypes.data


def test_a_tensor_that_moved_is_used_no_more_until_it_is_back() -> None:
    array, mover = np.zeros(16, np.uint8), Mover()
    addresses = [array.ctypes.data, mover.data_ptr()]
    registry = Registry(HostMemory())
    regions = registry.backend.adopt(addresses, tensor_nbytes=16, placement=Placement.HOST, owners=[array, mover])
    entry = registry.add(CacheDesc(2, [2, 8], DataType.DT_INT8), regions, blocks=False)
    entry.reach(writing=True)
    assert entry.moved(range(2)) is None
    registered, mover.bytes = mover.bytes, np.zeros(16, np.uint8)
    for use in (entry.reach, lambda: entry.reach(writing=True), entry.views):
        with pytest.raises(LLMException, match="tensor 1 of cache 1 moved while it was registered") as caught:
            use()
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
    assert (entry.moved(range(2)), entry.moved(range(1))) == (1, None)
    mover.bytes = registered
    entry.reach(writing=True)
    registry.release(entry)
    assert entry.moved(range(2)) is None, "what told is let go, too"


def test_what_keeps_the_callers_memory_goes_with_the_registration() -> None:
    held = Held()
    owner = np.zeros(16, np.uint8)
    gone, backend = weakref.ref(owner), held.registry.backend
    regions = backend.adopt([owner.ctypes.data], tensor_nbytes=16, placement=Placement.HOST, owners=[owner])
    entry = held.registry.add(DESC, regions, blocks=False)
    del owner, regions
    gc.collect()
    assert gone() is not None
    held.registry.release(entry)
    gc.collect()
    assert gone() is None
    assert entry.regions[0].nbytes == 16


async def test_it_does_not_go_before_it_is_out_of_use() -> None:
    held, loop = Held(), asyncio.get_running_loop()
    owner = np.zeros(16, np.uint8)
    gone = weakref.ref(owner)
    regions = held.registry.backend.adopt(
        [owner.ctypes.data], tensor_nbytes=16, placement=Placement.HOST, owners=[owner]
    )
    entry = held.registry.add(DESC, regions, blocks=False)
    del owner, regions
    pin, writer = entry.pin(lambda: None), loop.create_future()
    entry.quarantine(writer)
    held.registry.release(entry)
    pin.release()
    gc.collect()
    assert gone() is not None
    writer.set_result(None)
    await asyncio.sleep(0)
    gc.collect()
    assert gone() is None


def test_a_loop_may_touch_only_what_the_host_reaches() -> None:
    held = Held()
    assert held.entry.direct
    there = tuple(replace(region, device=0) for region in held.entry.regions)
    assert not held.registry.add(DESC, there, blocks=False).direct
    staged = Registry(GatedMemory(HostMemory()))
    assert not staged.add(DESC, held.entry.regions, blocks=False).direct
