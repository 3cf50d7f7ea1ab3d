"""Bytes on their way to a device and from it, through page-locked slots: one is copied while the next one fills.

It must not know where the device's memory comes from, or who fills the slots.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Final

from kvpull_async.memory._acl import MemcpyKind
from kvpull_async.memory.base import Batches, Until
from kvpull_async.memory.npu.device import Device
from kvpull_async.memory.npu.layout import Load
from kvpull_async.memory.npu.staging import Slot, Slots
from kvpull_async.memory.npu.streams import Copies, Unsettled

__all__ = ["Staged"]

_DEPTH: Final = 3
"""Slots of one transfer: one fills or empties, one is copied, one is between the two."""


class _Progress:
    """Tells how many bytes are on the device, in stream order, as soon as they are: from any thread, one at a time."""

    def __init__(self, landed: Callable[[int], None]) -> None:
        self._landed = landed
        self._lock = threading.Lock()  # protects what is below, and the order in which is told
        self._coming: deque[tuple[Future[None], int]] = deque()
        self._total = 0
        self._error: BaseException | None = None

    def follow(self, copy: Future[None], nbytes: int) -> None:
        """The next bytes of the stream are there when this has ended well."""
        with self._lock:
            self._coming.append((copy, nbytes))
        copy.add_done_callback(self._look)

    def tell(self) -> None:
        """In the landing's own thread: what is there has been told when this returns. Raises what was raised there."""
        self._look()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Nothing is told any more."""
        with self._lock:
            self._coming.clear()

    def _look(self, _: Future[None] | None = None) -> None:
        with self._lock:
            while self._coming and _well(self._coming[0][0]):
                self._total += self._coming.popleft()[1]
                try:
                    self._landed(self._total)
                except BaseException as error:  # noqa: BLE001  (ends the landing, in its own thread)
                    self._error = error
                    self._coming.clear()


def _well(copy: Future[None]) -> bool:
    return copy.done() and not copy.cancelled() and copy.exception() is None


class Staged:
    """The ways to and from one device's memory. `Load`s say which bytes share a slot."""

    def __init__(self, device: Device, slots: Slots) -> None:
        self._device = device
        self._slots = slots

    def landing(
        self, plan: Iterator[Load], until: Until, landed: Callable[[int], None], *, ordered: bool = False
    ) -> Batches:
        """`landed` hears from the thread in which a copy ended: who fills may be waiting for bytes meanwhile.
        `ordered`: some rows write what others have written. Then no two copies run at once.
        """
        running: deque[tuple[Slot, Future[None]]] = deque()
        progress = _Progress(landed)
        try:
            for load in plan:
                slot = None
                while slot is None:
                    full = len(running) >= _DEPTH - 1
                    slot = None if full else self._slots.take(until, must=not running)
                    if slot is None:
                        self._arrived(running, until, progress)
                try:
                    yield load.views(slot.view)
                    into, out_of = load.addresses, slot.address + load.places
                    copies = Copies(into, out_of, load.lengths, MemcpyKind.HOST_TO_DEVICE, ordered)
                    future = self._device.copy(copies, until)
                except BaseException:
                    self._slots.give(slot)
                    raise
                running.append((slot, future))
                progress.follow(future, load.nbytes)
                while running and (ordered or running[0][1].done()):
                    self._arrived(running, until, progress)
            while running:
                self._arrived(running, until, progress)
        finally:
            progress.end()
            self._settle(running, until)

    def _arrived(self, running: deque[tuple[Slot, Future[None]]], until: Until, progress: _Progress) -> None:
        """The oldest is on the device."""
        slot, future = running[0]
        self._device.copiers.wait(future, until, beside=[each for _, each in running if each is not future])
        running.popleft()
        self._slots.give(slot)
        progress.tell()

    def lending(self, plan: Iterator[Load], until: Until) -> Batches:
        coming: deque[tuple[Slot, Future[None], Load]] = deque()
        load = next(plan, None)
        try:
            while coming or load is not None:
                while load is not None and len(coming) < _DEPTH:
                    slot = self._slots.take(until, must=not coming)
                    if slot is None:
                        break
                    coming.append((slot, self._fetch(slot, load, until), load))
                    load = next(plan, None)
                slot, future, here = coming[0]
                self._device.copiers.wait(future, until, beside=[each for _, each, _ in coming if each is not future])
                yield [view.toreadonly() for view in here.views(slot.view)]
                coming.popleft()
                self._slots.give(slot)
        finally:
            self._settle([(slot, future) for slot, future, _ in coming], until)

    def _fetch(self, slot: Slot, load: Load, until: Until) -> Future[None]:
        copies = Copies(slot.address + load.places, load.addresses, load.lengths, MemcpyKind.DEVICE_TO_HOST)
        try:
            return self._device.copy(copies, until)
        except BaseException:
            self._slots.give(slot)
            raise

    def _settle(self, running: Iterable[tuple[Slot, Future[None]]], until: Until) -> None:
        """A transfer is not over before each of its copies is: only then are its slots another's."""
        left = list(running)
        while left:
            slot, future = left.pop(0)
            beside = [each for _, each in left]
            if isinstance(self._device.copiers.outcome(future, until, beside=beside), Unsettled):
                self._slots.lose()
            else:
                self._slots.give(slot)

    def __repr__(self) -> str:
        return f"<Staged {self._slots!r}>"
