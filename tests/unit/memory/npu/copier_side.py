"""What the tests of a device's threads share: them, and work that goes on until it may end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from kvpull_async._deadline import Deadline
from kvpull_async.memory.npu.copiers import Copiers
from kvpull_async.memory.npu.streams import Stream
from tests.unit.memory.emulated import BOUND, Npu, emulated, eventually

__all__ = ["Side", "names", "side"]


class Side:
    def __init__(self, npu: Npu) -> None:
        self.npu = npu
        self.emulator = npu.emulator
        self.failures: list[BaseException] = []
        self.holds: list[bool] = []
        assert npu.acl.aclInit(None) in (0, 100002)
        self.copiers = Copiers(npu.acl, 0, failed=self.failures.append)
        self.copiers.held = self.holds.append
        self.gates: list[threading.Event] = []

    def gate(self) -> Callable[[Stream], int]:
        """A work that goes on until the test has ended, or until its gate is opened."""
        opened = threading.Event()
        self.gates.append(opened)

        def work(_: Stream) -> int:
            assert opened.wait(BOUND)
            return 1

        return work

    def busy(self, count: int = 4) -> list[Future[int]]:
        """All threads have something to do."""
        works = [self.copiers.submit(self.gate()) for _ in range(count)]
        eventually(lambda: all(work.running() for work in works))
        return works

    def open_gates(self) -> None:
        for opened in self.gates:
            opened.set()


@contextmanager
def side(*, clean: bool = True, **settings: int) -> Iterator[Side]:
    with emulated(clean=clean, **settings) as npu:
        made = Side(npu)
        try:
            yield made
        finally:
            made.open_gates()
            npu.emulator.resume()
            assert made.copiers.close(Deadline.after_ms(BOUND * 1000)) == 0


def names(_: Stream | None = None) -> str:
    return threading.current_thread().name
