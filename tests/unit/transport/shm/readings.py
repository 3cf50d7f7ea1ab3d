"""For the tests of copies out of a peer's memory: a source that can be held, a destination full of canaries."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpull_async._deadline import Deadline, absorb
from kvpull_async.memory.base import Batches, Region, Span
from kvpull_async.memory.copying import CancelFlag, Words, copy_rows
from kvpull_async.memory.host import HostMemory
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.testing.faults import Gate
from kvpull_async.transport.shm import reading as reading_module
from kvpull_async.transport.shm.reading import Reading
from kvpull_async.values import Placement
from tests.copies import noise

KIB, MIB = 1024, 1024 * 1024
CHUNK = reading_module._CHUNK
CANARY = 0xA5
Rows = NDArray[np.int64]


class Source:
    """Memory of this process as a publication of the peer; copies can be held, fail, or find it withdrawn."""

    def __init__(self, tensors: int = 1, nbytes: int = 64 * KIB) -> None:
        self.content = np.stack([np.roll(noise(nbytes), tensor) for tensor in range(tensors)])
        self.tensor_nbytes, self.tensors = nbytes, tensors
        self.bases = self.content.ctypes.data + np.arange(tensors, dtype=np.int64) * nbytes
        self.gate = Gate(limit=20)
        self.gone = False
        self.checks = 0
        self.threads: set[str] = set()
        self.copied: list[int] = []
        self.before: Callable[[int], None] = lambda _: None
        self._count = 0
        self._lock = threading.Lock()

    @property
    def valid(self) -> bool:
        return not self.gone

    def check(self) -> None:
        self.checks += 1
        if self.gone:
            raise LLMException("gone", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, retry_safe=True)

    def copy(self, destinations: Words, sources: Words, lengths: Words, flag: CancelFlag) -> int:
        with self._lock:
            number, self._count = self._count, self._count + 1
        self.threads.add(threading.current_thread().name)
        self.before(number)
        self.gate.pass_through()
        done = copy_rows(destinations, sources, lengths, CancelFlag() if self.gate.held else flag)
        self.copied.append(done)
        return done

    def read(self, first: int, start: int, destinations: object, nbytes: int) -> bool:
        raise NotImplementedError


class Target:
    """A destination full of canaries, and what was said to have landed in it."""

    def __init__(self, tensors: int = 1, nbytes: int = 64 * KIB) -> None:
        self.content = np.full((tensors, nbytes), CANARY, np.uint8)
        first = self.content.ctypes.data
        self.regions = tuple(Region(first + i * nbytes, nbytes, Placement.HOST, self.content) for i in range(tensors))
        self.landed: list[int] = []

    def span(self, rows: Rows, *, watch: bool = False, few: bool = False) -> Span:
        most = {"most_rows": len(rows)} if few else {}
        return Span(self.regions, lambda: rows, True, self.landed.append if watch else None, **most)

    def landing(self, rows: Rows) -> Batches:
        return HostMemory().landing(self.regions, rows)

    @property
    def untouched(self) -> bool:
        return bool((self.content == CANARY).all())


def table(*rows: tuple[int, int, int]) -> Rows:
    return np.array(rows, np.int64).reshape(-1, 3)


def expected(source: Source, src: Rows, target: Target, dst: Rows) -> NDArray[np.uint8]:
    """Byte by byte, by another way than the code under test."""
    stream = np.concatenate([source.content[t, o : o + n] for t, o, n in src.tolist()] or [np.empty(0, np.uint8)])
    content, at = np.full_like(target.content, CANARY), 0
    for tensor, offset, n in dst.tolist():
        content[tensor, offset : offset + n] = stream[at : at + n]
        at += n
    return content


async def settled(reading: Reading) -> None:
    assert await absorb([reading.settled], Deadline.after_ms(20_000)), "it never settled"
    assert reading.done.done(), "it settled before it was done"


async def failed(reading: Reading, error: type[BaseException], match: str = r"\w") -> None:
    await settled(reading)
    with pytest.raises(error, match=match):
        reading.done.result()
