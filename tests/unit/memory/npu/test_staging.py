"""Slots of page-locked memory: everybody who must has one, few have several, and what is lost is never used again."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from kvpull_async.memory.base import Until
from kvpull_async.memory.npu.layout import SLOT_BYTES
from kvpull_async.memory.npu.staging import Slot, Slots

SHARED = 64


class Pinned:
    """Stands for page-locked memory, which ordinary memory is to everybody but the device."""

    def __init__(self) -> None:
        self.made: dict[int, object] = {}
        self.freed: list[int] = []
        self.refuses = False

    def make(self, until: Until) -> int:
        if self.refuses:
            raise MemoryError("no page-locked memory")
        room = np.zeros(SLOT_BYTES, np.uint8)
        address = int(room.ctypes.data)
        self.made[address] = room
        return address

    def free(self, address: int) -> None:
        assert address in self.made
        assert address not in self.freed, "freed twice"
        self.freed.append(address)


def taken(slots: Slots, count: int, *, must: bool = True) -> list[Slot]:
    found = [slots.take(Until(), must=must) for _ in range(count)]
    assert all(slot is not None for slot in found)
    return [slot for slot in found if slot is not None]


def test_a_slot_is_memory_for_one_at_a_time() -> None:
    pinned = Pinned()
    slots = Slots(pinned.make, pinned.free)
    one, other = taken(slots, 2)
    assert one.address != other.address
    one.view[:3] = b"abc"
    assert one.view.nbytes == SLOT_BYTES
    assert one.view.format == "B"
    assert ctypes.string_at(one.address, 3) == b"abc"


def test_what_is_given_back_is_taken_again_before_anything_is_made() -> None:
    pinned = Pinned()
    slots = Slots(pinned.make, pinned.free)
    for _ in range(10):
        (slot,) = taken(slots, 1)
        slots.give(slot)
    assert len(pinned.made) == 1


def test_whoever_must_always_gets_one_and_others_only_while_few_are_taken() -> None:
    pinned = Pinned()
    slots = Slots(pinned.make, pinned.free)
    held = taken(slots, SHARED - 1)
    held += taken(slots, 1, must=False)
    assert slots.take(Until(), must=False) is None
    held += taken(slots, 50)
    for slot in held[:51]:
        assert slots.take(Until(), must=False) is None
        slots.give(slot)
    assert slots.take(Until(), must=False) is not None


def test_no_more_are_kept_than_may_be_shared() -> None:
    pinned = Pinned()
    slots = Slots(pinned.make, pinned.free)
    for slot in taken(slots, SHARED + 10):
        slots.give(slot)
    assert len(pinned.freed) == 10
    slots.close()
    assert sorted(pinned.freed) == sorted(pinned.made)


def test_a_lost_slot_is_neither_used_nor_freed_nor_counted() -> None:
    pinned = Pinned()
    slots = Slots(pinned.make, pinned.free)
    lost = taken(slots, SHARED)
    assert slots.take(Until(), must=False) is None
    for _ in lost:
        slots.lose()
    others = taken(slots, SHARED, must=False)
    assert not {slot.address for slot in lost} & {slot.address for slot in others}
    for slot in others:
        slots.give(slot)
    slots.close()
    assert not {slot.address for slot in lost} & set(pinned.freed)


def test_a_slot_that_cannot_be_made_does_not_count() -> None:
    pinned = Pinned()
    slots = Slots(pinned.make, pinned.free)
    pinned.refuses = True
    for _ in range(SHARED):
        with pytest.raises(MemoryError):
            slots.take(Until(), must=True)
    pinned.refuses = False
    assert slots.take(Until(), must=False) is not None


def test_closing_frees_what_nobody_has_at_once_and_the_rest_when_it_comes_back() -> None:
    pinned = Pinned()
    slots = Slots(pinned.make, pinned.free)
    idle, held = taken(slots, 2)
    slots.give(idle)
    slots.close()
    assert pinned.freed == [idle.address]
    slots.give(held)
    assert pinned.freed == [idle.address, held.address]
    slots.close()
    assert len(pinned.freed) == 2


def test_threads_never_share_a_slot() -> None:
    pinned, held, clashes = Pinned(), set(), []
    slots = Slots(pinned.make, pinned.free)
    guard = threading.Lock()

    def work() -> None:
        for _ in range(300):
            (slot,) = taken(slots, 1)
            with guard:
                if slot.address in held:
                    clashes.append(slot)
                held.add(slot.address)
            with guard:
                held.discard(slot.address)
            slots.give(slot)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
    assert len(pinned.made) <= 4
    assert "taken=0" in repr(slots)
