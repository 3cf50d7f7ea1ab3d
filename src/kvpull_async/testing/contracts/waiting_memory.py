"""What a memory must do that has to wait for a device, besides what every memory must."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kvpull_async._deadline import NEVER, Deadline
from kvpull_async.memory.base import PIECE_BYTES, MemoryBackend, Region, Until
from kvpull_async.status import LLMException, LLMTimeoutError
from kvpull_async.testing.contracts.memory import MemoryContract

__all__ = ["WaitingMemoryContract"]

_PATIENCE = 60.0
_NBYTES = 3 * PIECE_BYTES
_SECONDS = 0.1
"""A wait, and what might still be written after its end."""
_Work = Callable[[Sequence[Region], Until], object]


class WaitingMemoryContract(MemoryContract):
    """Its waits end with the `Until` that they were given, and nothing is written afterwards."""

    def stall(self, memory: MemoryBackend) -> None:
        """What this memory does on its device from now on does not end."""
        raise NotImplementedError

    def go_on(self, memory: MemoryBackend) -> None:
        """It ends again. Called more than once."""
        raise NotImplementedError

    def stoppable(self, memory: MemoryBackend) -> bool:
        """Whether a wait can be ended. Where it cannot, it is over once the device has done its work, well maybe."""
        return True

    def test_a_wait_ends_at_its_deadline(self) -> None:
        for error in self._errors(lambda: Until(Deadline.after_ms(_SECONDS * 1000)), stop=False):
            assert isinstance(error, LLMTimeoutError), repr(error)

    def test_a_wait_ends_when_nobody_wants_the_bytes_any_more(self) -> None:
        for error in self._errors(lambda: Until(NEVER), stop=True):
            assert isinstance(error, LLMException), repr(error)
            assert not isinstance(error, LLMTimeoutError), repr(error)

    def test_what_is_over_before_it_begins_writes_nothing_late(self) -> None:
        def check(memory: MemoryBackend) -> None:
            regions, until = self.regions(memory, tensors=2, nbytes=_NBYTES), Until(NEVER)
            until.stop()
            for work in self._works(memory):
                with contextlib.suppress(LLMException):
                    work(regions, until)
                self._stays(memory, regions[0])

        self.with_memory(check)

    def _errors(self, make: Callable[[], Until], *, stop: bool) -> list[BaseException | None]:
        """How each kind of work ends that the device holds up."""
        errors: list[BaseException | None] = []

        def check(memory: MemoryBackend) -> None:
            regions = self.regions(memory, tensors=2, nbytes=_NBYTES)
            for work in self._works(memory):
                self.stall(memory)
                until = make()
                try:
                    ended = _begun(partial(work, regions, until))
                    time.sleep(2 * _SECONDS)
                    if stop:
                        until.stop()
                    stoppable = self.stoppable(memory)
                    if not stoppable:
                        self.go_on(memory)
                    error = ended()
                finally:
                    self.go_on(memory)
                if stoppable or error is not None:
                    errors.append(error)
                self._stays(memory, regions[0])

        self.with_memory(check)
        return errors

    def _works(self, memory: MemoryBackend) -> Sequence[_Work]:
        whole, pairs = np.array([(0, 0, _NBYTES)], np.int64), np.zeros((3, 5), np.int64)
        pairs[:, 1] = pairs[:, 3] = np.arange(3) * PIECE_BYTES
        pairs[:, 4] = PIECE_BYTES

        def land(regions: Sequence[Region], until: Until) -> None:
            for batch in memory.landing(regions, whole, until=until):
                for view in batch:
                    np.frombuffer(view, np.uint8)[:] = 7

        def lend(regions: Sequence[Region], until: Until) -> None:
            for _ in memory.lending(regions, whole, until=until):
                pass

        def copy(regions: Sequence[Region], until: Until) -> None:
            for _ in memory.copying(regions[1:], regions[:1], pairs, until=until):
                pass

        return land, lend, copy

    def _stays(self, memory: MemoryBackend, region: Region) -> None:
        found = self.look(memory, region)
        found[:] = 9
        time.sleep(_SECONDS)
        assert (found == 9).all(), "something is still written"


def _begun(work: Callable[[], object]) -> Callable[[], BaseException | None]:
    """It runs in a thread. The result waits for its end and says what it raised."""
    errors: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            errors.append(None)
        except BaseException as error:  # noqa: BLE001  (looked at by the test)
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def ended() -> BaseException | None:
        thread.join(_PATIENCE)
        assert not thread.is_alive(), "it waits on"
        return errors[0]

    return ended
