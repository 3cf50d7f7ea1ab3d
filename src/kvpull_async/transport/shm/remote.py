"""The peer's memory as it can be read from here: mapped, or through the kernel. It must not know the side channel.

A read counts only if `check` passes before and after it: the cache was still published then.
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvpull_async.memory.copying import (
    CancelFlag,
    Words,
    copy_checked,
    copy_rows,
    copy_rows_checked,
    load_word,
    read_process,
)
from kvpull_async.memory.shared import Mapping
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.shm.messages import Layout

__all__ = ["Cache", "Incomplete", "Mapped", "Open", "PeerProcess", "Private", "gone"]

_WORD: Final = 8


class Cache(Protocol):
    """One publication of the peer. `bases` holds an address for each tensor, in whichever memory `copy` reads."""

    @property
    def bases(self) -> NDArray[np.int64]: ...

    @property
    def tensors(self) -> int: ...

    @property
    def tensor_nbytes(self) -> int: ...

    def copy(self, destinations: Words, sources: Words, lengths: Words, flag: CancelFlag) -> int:
        """Copy rows; the bytes copied, fewer than all only if the flag was set. OSError when they cannot be read."""
        ...

    def check(self) -> None:
        """LLMException or OSError unless the peer still publishes it."""
        ...

    @property
    def valid(self) -> bool: ...

    def read(self, first: int, start: int, destinations: Sequence[int], nbytes: int) -> bool: ...


def gone() -> LLMException:
    return LLMException(
        "the source took its cache away", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, retry_safe=True
    )


class _Published:
    def __init__(self, layout: Layout, bases: NDArray[np.int64], page: Mapping) -> None:
        self.bases = bases
        self.tensors: int = len(bases)
        self.tensor_nbytes: int = layout.tensor_nbytes
        self.epoch: int = layout.epoch
        self.epoch_address: int = page.address + layout.slot * _WORD
        self._page = page

    @property
    def valid(self) -> bool:
        return load_word(self.epoch_address) == self.epoch

    def check(self) -> None:
        if not self.valid:
            raise gone()

    def _require(self, first: int, start: int, tensors: int, nbytes: int) -> None:
        if not (0 <= first <= len(self.bases) - tensors and 0 <= start <= self.tensor_nbytes - nbytes and nbytes > 0):
            raise ValueError(f"{nbytes} bytes from {start} on of tensors {first}..{first + tensors - 1} are not there")

    def _rows(self, first: int, start: int, destinations: Sequence[int], nbytes: int) -> tuple[Words, Words, Words]:
        count = len(destinations)
        sources = self.bases[first : first + count] + start
        return np.array(destinations, np.uint64), sources, np.full(count, nbytes, np.int64)


class Mapped(_Published):
    """In memory files that are mapped here."""

    def __init__(
        self, layout: Layout, bases: NDArray[np.int64], page: Mapping, *, mappings: tuple[Mapping, ...]
    ) -> None:
        super().__init__(layout, bases, page)
        self._mappings = mappings
        self._addresses: list[int] = bases.tolist()  # Python's numbers: a small read is done before numpy's are

    def copy(self, destinations: Words, sources: Words, lengths: Words, flag: CancelFlag) -> int:
        return copy_rows(destinations, sources, lengths, flag)

    def read(self, first: int, start: int, destinations: Sequence[int], nbytes: int) -> bool:
        self._require(first, start, len(destinations), nbytes)
        if len(destinations) == 1:
            source = self._addresses[first] + start
            return copy_checked(destinations[0], source, nbytes, self.epoch_address, self.epoch)
        rows = self._rows(first, start, destinations, nbytes)
        return copy_rows_checked(*rows, self.epoch_address, self.epoch)


class Private(_Published):
    """Anywhere in the peer's process."""

    def __init__(self, layout: Layout, bases: NDArray[np.int64], page: Mapping, *, process: PeerProcess) -> None:
        super().__init__(layout, bases, page)
        self._process = process

    def copy(self, destinations: Words, sources: Words, lengths: Words, flag: CancelFlag) -> int:
        try:
            return self._process.read(destinations, sources, lengths, flag)
        except OSError as error:
            self.check()  # memory that was taken back, or whose process ended, need not be there any more
            self._blame(error, sources, lengths)
            raise

    def read(self, first: int, start: int, destinations: Sequence[int], nbytes: int) -> bool:
        self._require(first, start, len(destinations), nbytes)
        if not self.valid:
            return False
        try:
            self.copy(*self._rows(first, start, destinations, nbytes), CancelFlag())
        except LLMException as error:
            if error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
                return False
            raise
        self._process.check()
        return self.valid

    def _blame(self, error: OSError, sources: Words, lengths: Words) -> None:
        """The kernel does not say on which side an address was wrong: see whether the ends of each row are there."""
        if error.errno != errno.EFAULT:
            return
        some = lengths > 0
        ends = np.concatenate([sources[some], sources[some] + lengths[some] - 1])
        byte = np.zeros(1, np.uint8)
        into = np.full(len(ends), byte.ctypes.data, np.uint64)
        try:
            self._process.read(into, ends, np.ones(len(ends), np.int64), CancelFlag())
        except OSError:
            raise LLMException(
                f"the source's memory cannot be read, is the address it was registered with right? ({error})",
                status_code=LLMStatusCode.LLM_PARAM_INVALID,
            ) from error

    def check(self) -> None:
        super().check()
        self._process.check()


class Open:
    """A cache that may be read without asking for as long as its side channel has it. It does not keep it mapped."""

    def __init__(self, cache: Cache) -> None:
        self.tensors: int = cache.tensors
        self.tensor_nbytes: int = cache.tensor_nbytes
        self._cache = weakref.ref(cache)

    @property
    def valid(self) -> bool:
        cache = self._cache()
        return cache is not None and cache.valid

    def read(self, first: int, start: int, destinations: Sequence[int], nbytes: int) -> bool:
        cache = self._cache()
        return cache is not None and cache.read(first, start, destinations, nbytes)


class PeerProcess:
    """A process whose memory may be read, as far as the kernel allows."""

    def __init__(self, pid: int, *, probe_address: int, probe: bytes) -> None:
        self._pid = pid
        self._address = np.array([probe_address], np.uint64)
        self._probe = np.frombuffer(probe, np.uint8)

    def check(self) -> None:
        """OSError unless it is alive and still runs the program that said HELLO: the bytes it named are there."""
        found = np.zeros(self._probe.size, np.uint8)
        place, size = np.array([found.ctypes.data], np.uint64), np.array([found.size], np.int64)
        read_process(self._pid, place, self._address, size, CancelFlag())
        if not np.array_equal(found, self._probe):
            raise ConnectionError(f"process {self._pid} is not the peer, or no longer")

    def read(self, destinations: Words, sources: Words, lengths: Words, flag: CancelFlag) -> int:
        return read_process(self._pid, destinations, sources, lengths, flag)


class Incomplete:
    """A layout that comes in parts."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._parts: list[NDArray[np.int64]] = []
        self._filled = 0

    @property
    def places(self) -> NDArray[np.int64]:
        return np.concatenate(self._parts)

    def add(self, part: Layout) -> bool:
        """Whether it is whole now. ConnectionError for a part that does not belong here."""
        if len(part.places) % 16:
            raise ConnectionError(f"layout {part.number} has half a place")
        places = np.frombuffer(part.places, "<i8").astype(np.int64, copy=False).reshape(-1, 2)
        head = (part.number, part.slot, part.epoch, part.tensor_nbytes, part.tensors, part.files)
        known = self.layout
        if head != (known.number, known.slot, known.epoch, known.tensor_nbytes, known.tensors, known.files):
            raise ConnectionError(f"the parts of layout {part.number} contradict each other")
        if part.first != self._filled or part.first + len(places) > known.tensors:
            raise ConnectionError(f"layout {part.number}: tensors from {part.first} on, {self._filled} are known")
        self._parts.append(places)
        self._filled += len(places)
        return self._filled == known.tensors
