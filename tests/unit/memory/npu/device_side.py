"""What the tests of a device share: one of the emulator's, open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvpull_async._deadline import Deadline
from kvpull_async.memory.base import Region
from kvpull_async.memory.npu.device import Device
from kvpull_async.values import Placement
from tests.unit.memory.emulated import BOUND, Npu, emulated

__all__ = ["KIB", "Side", "side"]

KIB = 1024


class Side:
    def __init__(self, npu: Npu, number: int, *without: str) -> None:
        self.npu = npu
        self.emulator = npu.emulator
        self.failures: list[BaseException] = []
        self.device = Device(npu.without(*without), number)
        self.device.failed = self.failures.append

    def region(self, address: int, nbytes: int) -> Region:
        return Region(address, nbytes, Placement.DEVICE, device=self.device.number)


@contextmanager
def side(*without: str, number: int = 0, clean: bool = True, **settings: int) -> Iterator[Side]:
    """A device, open."""
    with emulated(clean=clean, **settings) as npu:
        made = Side(npu, number, *without)
        made.device.open()
        try:
            yield made
        finally:
            npu.emulator.resume()
            assert made.device.copiers.close(Deadline.after_ms(BOUND * 1000)) == 0
