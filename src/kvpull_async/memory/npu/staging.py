"""Host memory that a device copies to and from by itself: slots of page-locked memory, kept to be used again.

It must not know what is in them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Final

from kvpull_async._deadline import Deadline
from kvpull_async.memory.base import Until
from kvpull_async.memory.npu.layout import SLOT_BYTES

__all__ = ["Slot", "Slots"]

_SHARED: Final = 64
"""Slots among which transfers may take a second one and more. Beyond it each has one, so that a slow peer, which holds
its own, keeps no other transfer waiting.
"""


class Slot:
    """SLOT_BYTES of page-locked memory."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.view: memoryview = memoryview((ctypes.c_char * SLOT_BYTES).from_address(address)).cast("B")

    def __repr__(self) -> str:
        return f"<Slot {self.address:#x}>"


class Slots:
    """`make` gives the address of a new slot's memory, `free` takes it back; either may take long."""

    def __init__(self, make: Callable[[Until], int], free: Callable[[int], object]) -> None:
        self._make = make
        self._free = free
        self._lock = threading.Condition()  # protects what is below; told when none is taken
        self._idle: list[Slot] = []
        self._taken = 0
        self._closed = False

    def take(self, until: Until, *, must: bool) -> Slot | None:
        """A slot for the caller alone; None only unless it `must`, when there are enough of them in use."""
        with self._lock:
            if not must and self._taken >= _SHARED:
                return None
            self._taken += 1
            if self._idle:
                return self._idle.pop()
        try:
            return Slot(self._make(until))
        except BaseException:
            self._untake()
            raise

    def give(self, slot: Slot) -> None:
        """Nothing reads or writes it any more."""
        with self._lock:
            kept = len(self._idle) < _SHARED and not self._closed
            if kept:
                self._idle.append(slot)
        if not kept:
            self._free(slot.address)
        self._untake()

    def lose(self) -> None:
        """One that may still be in use, for ever."""
        self._untake()

    def close(self) -> None:
        """Free those nobody has, and from now on every one that is given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for slot in idle:
            self._free(slot.address)

    def returned(self, deadline: Deadline) -> bool:
        """Wait until nobody has one any more; whether that is so."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._taken, deadline.remaining)

    def _untake(self) -> None:
        with self._lock:
            self._taken -= 1
            if not self._taken:
                self._lock.notify_all()

    def __repr__(self) -> str:
        return f"<Slots taken={self._taken} idle={len(self._idle)}>"
