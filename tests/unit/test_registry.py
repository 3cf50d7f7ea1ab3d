"""Which caches a node has, how they are found, what keeps them alive, and when their memory may go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from kvpull_async._deadline import NEVER, Deadline
from kvpull_async.memory.base import Allocation, Region
from kvpull_async.memory.host import HostMemory
from kvpull_async.registry import Entry, Registry, describe, key_id
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import INVALID_ID, BlocksCacheKey, CacheDesc, CacheKey, DataType, Placement

DESC = CacheDesc(4, [3, 16], DataType.DT_INT8)
PARAM_INVALID, NOT_EXIST = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


class Memory(HostMemory):
    """Ordinary memory without memory files, which remembers what was given back."""

    def __init__(self) -> None:
        super().__init__()
        self.freed = 0

    def allocate(self, *, tensors: int, tensor_nbytes: int, placement: Placement) -> Allocation:
        owner = np.zeros(tensors * tensor_nbytes, np.uint8)
        base = owner.ctypes.data
        regions = tuple(Region(base + i * tensor_nbytes, tensor_nbytes, placement, owner) for i in range(tensors))
        return Allocation(regions, 0, placement)

    def free(self, allocation: Allocation) -> None:
        self.freed += 1
        super().free(allocation)


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def registry(memory: Memory) -> Registry:
    return Registry(memory)


def allocated(registry: Registry, *keys: CacheKey, blocks: bool = False) -> Entry:
    allocation = registry.backend.allocate(tensors=4, tensor_nbytes=48, placement=Placement.HOST)
    registry.check_keys(DESC, keys)
    entry = registry.add(DESC, allocation.regions, blocks=blocks, allocation=allocation)
    registry.bind(entry, keys)
    return entry


def registered(registry: Registry, *keys: CacheKey, blocks: bool = False) -> Entry:
    regions = registry.backend.adopt([1 << 20] * 4, tensor_nbytes=48, placement=Placement.HOST)
    entry = registry.add(DESC, regions, blocks=blocks)
    registry.bind(entry, keys)
    return entry


def request_key(number: int, model: int = 0) -> CacheKey:
    return CacheKey(1, number, model)


def prefix_key(number: int, model: int = 0) -> CacheKey:
    return CacheKey(cluster_id=1, req_id=INVALID_ID, model_id=model, prefix_id=number)


def found(registry: Registry, key: CacheKey) -> tuple[Entry, int] | None:
    binding = registry.find_key(key_id(key))
    return None if binding is None else (binding.entry, binding.index)


def future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


# -- ids and keys ------------------------------------------------------------------------------------------------------


def test_ids_start_at_one_count_up_and_are_never_used_again(registry: Registry) -> None:
    first = allocated(registry)
    registry.release(first)
    assert [first.cache_id, registered(registry).cache_id, allocated(registry).cache_id] == [1, 2, 3]


def test_the_ith_key_names_batch_entry_i(registry: Registry) -> None:
    keys = [request_key(10), prefix_key(10), request_key(10, model=1)]
    entry = allocated(registry, *keys)
    assert [found(registry, key) for key in keys] == [(entry, 0), (entry, 1), (entry, 2)]
    assert found(registry, prefix_key(10, model=1)) is None


def test_padding_keys_reserve_a_place_and_bind_nothing(registry: Registry) -> None:
    padding = CacheKey(1, INVALID_ID)
    entry = allocated(registry, padding, padding, request_key(5))
    assert found(registry, request_key(5)) == (entry, 2)
    assert list(entry.bindings) == [2]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([request_key(n) for n in range(4)], "4 keys for 3 batch entries"),
        ([request_key(7), request_key(7)], "given twice"),
        ([request_key(1)], "req_id 1 of model 0 is bound already"),
        ([prefix_key(2)], "prefix_id 2 of model 0 is bound already"),
    ],
)
def test_keys_that_cannot_be_bound(registry: Registry, keys: list[CacheKey], message: str) -> None:
    allocated(registry, request_key(1), prefix_key(2))
    with pytest.raises(LLMException, match=message) as caught:
        registry.check_keys(DESC, keys)
    assert caught.value.status_code == PARAM_INVALID


def test_of_two_registrations_of_a_key_the_first_keeps_it(registry: Registry) -> None:
    first, second = registered(registry, request_key(1)), registered(registry, request_key(1), request_key(2))
    assert found(registry, request_key(1)) == (first, 0)
    assert found(registry, request_key(2)) == (second, 1)


def test_a_blocks_key_bound_again_moves_to_the_newer_cache(registry: Registry) -> None:
    old, new = registered(registry, blocks=True), registered(registry, blocks=True)
    registry.bind_blocks(old, BlocksCacheKey(1, 5))
    registry.bind_blocks(new, BlocksCacheKey(1, 5))
    assert registry.find_blocks(5) is new
    registry.release(old)
    assert registry.find_blocks(5) is new
    registry.release(new)
    assert registry.find_blocks(5) is None


def test_a_miss_names_the_nearest_keys(registry: Registry) -> None:
    allocated(registry, request_key(100), request_key(7), prefix_key(8))
    near = registry.nearest_keys(key_id(request_key(9)), limit=2)
    assert near == ["req_id 7 of model 0", "req_id 100 of model 0"]
    assert describe(key_id(prefix_key(8))) == "prefix_id 8 of model 0"


def test_the_descriptor_is_the_registrys_own(registry: Registry) -> None:
    desc = CacheDesc(1, [2, 8], DataType.DT_INT8)
    entry = registry.add(desc, (Region(64, 16, Placement.DEVICE),), blocks=False)
    desc.update_dim(1, 4096)
    assert entry.desc.shape == [2, 8]
    assert entry.entry_nbytes == 8


# -- what keeps a cache ------------------------------------------------------------------------------------------------


def test_a_cache_without_keys_goes_with_its_id(registry: Registry, memory: Memory) -> None:
    entry = allocated(registry)
    assert registry.local(entry.cache_id) is entry
    registry.release(entry)
    assert registry.local(entry.cache_id) is None
    assert registry.find(entry.cache_id) is None
    assert memory.freed == 1


def test_keys_keep_a_released_cache_by_key_and_by_id(registry: Registry, memory: Memory) -> None:
    entry = allocated(registry, request_key(1), request_key(2))
    registry.release(entry)
    assert registry.local(entry.cache_id) is None
    by_id = registry.find_id(entry.cache_id, 1)
    assert by_id is not None
    assert by_id[0] is entry
    registry.remove_key(request_key(1))
    assert found(registry, request_key(2)) == (entry, 1)
    assert memory.freed == 0
    registry.remove_key(request_key(2))
    assert registry.find_id(entry.cache_id, 1) is None
    assert memory.freed == 1


@pytest.mark.parametrize("blocks", [False, True])
def test_registered_and_blocks_caches_lose_their_keys_at_once(registry: Registry, *, blocks: bool) -> None:
    entry = allocated(registry, request_key(1), blocks=True) if blocks else registered(registry, request_key(1))
    registry.release(entry)
    assert found(registry, request_key(1)) is None
    assert registry.find(entry.cache_id) is None


def test_keys_of_registered_caches_and_unknown_keys_are_not_removed(registry: Registry) -> None:
    entry = registered(registry, request_key(1))
    registry.remove_key(request_key(1))
    registry.remove_key(request_key(99))
    assert found(registry, request_key(1)) == (entry, 0)


@pytest.mark.parametrize("index", [-1, 3, 2**40])
def test_outside_the_batch_there_is_nothing_to_find(registry: Registry, index: int) -> None:
    assert registry.find_id(allocated(registry).cache_id, index) is None


# -- consumption -------------------------------------------------------------------------------------------------------


def generation(registry: Registry, key: CacheKey) -> int:
    binding = registry.find_key(key_id(key))
    assert binding is not None
    return binding.generation


def test_a_key_is_consumed_when_every_tensor_has_been_pulled(registry: Registry, memory: Memory) -> None:
    entry = allocated(registry, request_key(1))
    number = generation(registry, request_key(1))
    registry.release(entry)
    assert not registry.consume(number, range(2))
    assert not registry.consume(number, range(2))
    assert found(registry, request_key(1)) is not None
    assert registry.consume(number, range(1, 4))
    assert found(registry, request_key(1)) is None
    assert memory.freed == 1


def test_tensors_are_ticked_off_per_key(registry: Registry) -> None:
    allocated(registry, request_key(1), request_key(2))
    assert registry.consume(generation(registry, request_key(1)), range(4))
    assert not registry.consume(generation(registry, request_key(2)), range(2))
    assert found(registry, request_key(2)) is not None


def test_a_late_consumption_cannot_take_a_later_key(registry: Registry) -> None:
    allocated(registry, request_key(1))
    old = generation(registry, request_key(1))
    registry.remove_key(request_key(1))
    entry = allocated(registry, request_key(1))
    assert not registry.consume(old, range(4))
    assert found(registry, request_key(1)) == (entry, 0)


# -- uses of the memory ------------------------------------------------------------------------------------------------


def nothing() -> None:
    """A cut that has nothing to cut."""


async def test_memory_stays_while_it_is_pinned(registry: Registry, memory: Memory) -> None:
    entry = allocated(registry)
    first, second = entry.pin(nothing), entry.pin(nothing)
    registry.release(entry)
    assert entry.busy
    assert registry.find(entry.cache_id) is entry
    first.release()
    first.release()
    assert memory.freed == 0
    second.release()
    assert memory.freed == 1
    assert registry.find(entry.cache_id) is None


async def test_waiting_for_idle_ends_with_the_last_pin(registry: Registry) -> None:
    entry = allocated(registry)
    pins = [entry.pin(nothing) for _ in range(2)]
    waiting = [asyncio.ensure_future(entry.idle(deadline)) for deadline in (NEVER, Deadline.after_ms(60_000))]
    for pin in pins:
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        pin.release()
    assert await asyncio.gather(*waiting) == [True, True]
    assert await entry.idle(Deadline(0))


async def test_waiting_for_idle_is_bounded(registry: Registry) -> None:
    entry = allocated(registry)
    pin = entry.pin(nothing)
    assert not await entry.idle(Deadline.after_ms(5))
    pin.release()


async def test_cutting_reaches_every_pin_also_those_that_go_meanwhile(registry: Registry) -> None:
    entry = allocated(registry)
    cut: list[int] = []

    def cutter(number: int) -> Callable[[], None]:
        def run() -> None:
            cut.append(number)
            pins[number].release()

        return run

    pins = [entry.pin(cutter(number)) for number in range(3)]
    entry.cut_pins()
    assert sorted(cut) == [0, 1, 2]
    assert not entry.busy


# -- quarantine --------------------------------------------------------------------------------------------------------


async def test_quarantine_ends_when_every_writer_has_settled(registry: Registry, memory: Memory) -> None:
    entry = allocated(registry)
    writers = [future(), future()]
    for writer in writers:
        entry.quarantine(writer)
    assert entry.quarantined
    registry.release(entry)
    waiting = asyncio.ensure_future(entry.idle(NEVER, writers_only=True))
    writers[0].set_result(None)
    await asyncio.sleep(0)
    assert entry.quarantined
    assert memory.freed == 0
    writers[1].set_result(None)
    assert await waiting
    assert not entry.quarantined
    assert memory.freed == 1


async def test_waiting_for_writers_does_not_wait_for_readers(registry: Registry) -> None:
    entry = allocated(registry)
    pin = entry.pin(nothing)
    assert await entry.idle(Deadline(0), writers_only=True)
    pin.release()


async def test_a_caller_who_went_on_leaves_what_is_pinned_quarantined(registry: Registry) -> None:
    entry = allocated(registry)
    pin = entry.pin(nothing)
    assert not entry.quarantined
    entry.abandon()
    assert entry.quarantined
    waiting = asyncio.ensure_future(entry.idle(NEVER, writers_only=True))
    await asyncio.sleep(0)
    pin.release()
    assert await waiting
    assert not entry.quarantined


async def test_abandoning_what_has_ended_already_quarantines_no_later_use(registry: Registry) -> None:
    entry = allocated(registry)
    entry.abandon()
    pin = entry.pin(nothing)
    assert not entry.quarantined
    pin.release()


# -- handles that were dropped -----------------------------------------------------------------------------------------


def test_a_dropped_handle_releases_its_cache_at_the_next_occasion(registry: Registry, memory: Memory) -> None:
    entry, other = allocated(registry), allocated(registry)
    entry.dropped()
    assert registry.local(entry.cache_id) is entry
    registry.drain_drops()
    assert registry.local(entry.cache_id) is None
    assert registry.local(other.cache_id) is other
    assert memory.freed == 1


def test_a_cache_dropped_and_released_is_released_once(registry: Registry, memory: Memory) -> None:
    entry = allocated(registry)
    entry.dropped()
    registry.release(entry)
    registry.drain_drops()
    assert memory.freed == 1


def test_the_owner_of_the_registry_may_handle_drops_itself(memory: Memory) -> None:
    dropped: list[int] = []
    registry = Registry(memory, dropped=dropped.append)
    entry = allocated(registry)
    entry.dropped()
    assert dropped == [entry.cache_id]
    registry.drain_drops()
    assert registry.local(entry.cache_id) is entry


def test_after_the_end_nobody_is_told_of_drops(memory: Memory) -> None:
    dropped: list[int] = []
    registry = Registry(memory, dropped=dropped.append)
    entry = allocated(registry)
    registry.closed = True
    entry.dropped()
    assert dropped == []
