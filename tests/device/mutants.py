"""Memories of an NPU that are wrong on purpose, each in one way, and what the suite for memories says of them.

python -m tests.device.mutants <name> <release> <abort_on_violation>   in a process of its own, which it may bring down
"""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async.memory import _acl
from kvpull_async.memory._acl import MemcpyKind
from kvpull_async.memory.ascend import open_memory
from kvpull_async.memory.base import MemoryBackend, Region, Until
from kvpull_async.memory.npu.device import Device
from kvpull_async.memory.npu.staging import Slot, Slots
from kvpull_async.memory.npu.streams import Copies, Stream
from kvpull_async.testing.contracts import MemoryContract
from kvpull_async.values import Placement
from tests import npu

TESTS: Final[tuple[Callable[[Any], None], ...]] = (
    MemoryContract.test_what_was_landed_is_lent,
    MemoryContract.test_what_stands_in_the_memory_is_lent,
    MemoryContract.test_a_landing_closed_early_leaves_the_rest_alone,
    MemoryContract.test_each_step_may_be_taken_in_another_thread,
    MemoryContract.test_a_copy_inside_that_is_closed_early_writes_no_more,
)
"""Enough of the suite to catch each of them."""
LATE: Final = {"delay_us_min": 3000, "delay_us_max": 6000}
"""Copies begin so late that whoever does not wait for them comes too early."""
_kept: list[mmap.mmap] = []


def nothing() -> None:
    """The memory as it is."""


def skip_the_synchronise() -> None:
    """A copy counts as done once it was issued."""
    Stream._synchronized = lambda *_: True  # type: ignore[method-assign]


def drop_the_pin() -> None:
    """The staging memory is not page-locked."""

    def malloc_host(self: Device, nbytes: int, until: Until | None = None) -> int:
        _kept.append(mmap.mmap(-1, nbytes))
        return int(np.frombuffer(_kept[-1], np.uint8).ctypes.data)

    Device.malloc_host = malloc_host  # type: ignore[method-assign]
    Device.free_host = lambda *_: _done()  # type: ignore[method-assign]


def forget_the_context() -> None:
    """The threads that copy do not set the device."""
    inner = _acl.load

    def load(environ: Any) -> _acl.Acl:
        acl = inner(environ)
        acl.aclrtSetDevice = lambda *_: 0
        return acl

    _acl.load = load


def free_early() -> None:
    """The staging memory is freed when a copy from it was issued, not when it is over."""
    inner = Stream._issue

    def issue(self: Stream, copies: Copies, until: Until) -> bool:
        left = inner(self, copies, until)
        if copies.kind == MemcpyKind.HOST_TO_DEVICE:
            self._acl.aclrtFreeHost(int(copies.sources[0]))  # the first row stands where the slot begins
        return left

    def give(self: Slots, slot: Slot) -> None:
        self._untake()

    Stream._issue = issue  # type: ignore[method-assign]
    Slots.give = give  # type: ignore[method-assign]


def _done() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


MUTANTS: Final[dict[str, Callable[[], None]]] = {
    made.__name__: made for made in (nothing, skip_the_synchronise, drop_the_pin, forget_the_context, free_early)
}


class Suite(MemoryContract):
    """Of the memory as it is in this process."""

    host_views = False
    foreign_placement = Placement.DEVICE

    def __init__(self, home: str) -> None:
        self.home = home

    def make_memory(self) -> MemoryBackend:
        return open_memory(_acl.load({"ASCEND_HOME_PATH": self.home}), device_id=0, budgets={})

    def look(self, memory: MemoryBackend, region: Region) -> NDArray[np.uint8]:
        found = npu.eye(region.address, region.nbytes)
        assert found is not None
        return found

    def foreign(self, nbytes: int) -> tuple[int, NDArray[np.uint8], object]:
        made = npu.room(nbytes)
        return npu.address(made), made, made


def main(name: str, release: str, abort_on_violation: str) -> None:
    """What failed, and what the emulator saw, as JSON."""
    with suppress(AssertionError), npu.serving(npu.Variant(release, release, settings=LATE)) as emulator:
        emulator.configure(abort_on_violation=int(abort_on_violation))
        MUTANTS[name]()
        suite, failed = Suite(str(emulator.home)), {}
        for test in TESTS:
            try:
                test(suite)
            except Exception as error:  # noqa: BLE001  (told to whoever asked)
                failed[test.__name__] = f"{type(error).__name__}: {error}"[:300]
        sys.stdout.write(json.dumps({"failed": failed, "violations": emulator.violations()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
