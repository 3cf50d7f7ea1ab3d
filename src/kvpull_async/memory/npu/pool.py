"""Blocks of device memory, kept for a while when they are given back: AscendCL takes and frees memory slowly.

It must not know what is in them, nor how memory is had.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Final

from kvpull_async._deadline import NEVER, Deadline
from kvpull_async.status import LLMException, LLMStatusCode

__all__ = ["Block", "Pool"]

_PAGE: Final = 64 * 1024
_HUGE: Final = 2 * 1024 * 1024
"""AscendCL documentation of aclrtMemMallocPolicy: what is above 1 MiB comes in pages of 2 MiB."""
_SMALL: Final = 1024 * 1024
_OWN: Final = 64
"""AscendCL documentation of aclrtMalloc: it takes up to so many bytes more (A2, A3). A block leaves room for them in
its last page, or each would take one page more.
"""
_KEPT: Final = 1024 * 1024 * 1024
"""Most bytes kept."""
_WASTE: Final = 8
"""A kept block may be larger than asked for by this part of it."""
_PATIENCE: Final = 30.0
"""Seconds that the device has to take memory back before it is asked for more."""


@dataclass(frozen=True, eq=False)
class Block:
    address: int
    nbytes: int


class Pool:
    """`make` gives the address of so many bytes by a deadline, or raises LLM_OUT_OF_MEMORY; `free` begins to take an
    address back.
    """

    def __init__(self, make: Callable[[int, Deadline], int], free: Callable[[int], Future[None]]) -> None:
        self._make = make
        self._free = free
        self._lock = threading.Lock()  # protects what is below
        self._idle: list[Block] = []  # by size
        self._taken: set[Block] = set()
        self._lost: set[Block] = set()
        self._leaving: list[Future[None]] = []
        self._held = False

    def take(self, nbytes: int, deadline: Deadline = NEVER) -> Block:
        """At least so many bytes. What is kept goes back to the device when it has no more."""
        size = _rounded(nbytes)
        block = self._reuse(size)
        if block is None:
            block = self._new(size, deadline)
            if not self._enter(block):
                self._let_go([block])
                raise _closed()
        return block

    def give(self, block: Block) -> bool:
        """Nothing reads or writes it any more. False for one that is lost, which stays so."""
        with self._lock:
            if self._held or block not in self._taken:
                return block not in self._lost
            self._taken.discard(block)
            kept = sum(idle.nbytes for idle in self._idle)
            if kept + block.nbytes <= _KEPT:
                bisect.insort(self._idle, block, key=_size)
                return True
        self._let_go([block])
        return True

    def lose(self, block: Block) -> None:
        """It may still be read or written: it never goes back, nor to anybody else."""
        with self._lock:
            if block in self._taken:
                self._taken.discard(block)
                self._lost.add(block)

    def hold(self) -> None:
        """The end begins: nothing is given any more, and whatever comes back stays until `close` or `abandon`."""
        with self._lock:
            self._held = True

    def close(self) -> None:
        """All of it goes back, whoever has it."""
        with self._lock:
            self._held = True
            blocks, self._idle, self._taken = [*self._idle, *self._taken], [], set()
        self._let_go(blocks)

    def abandon(self) -> None:
        """None of it ever goes back: some may still be written."""
        with self._lock:
            self._held = True
            self._idle, self._taken = [], set()

    def _reuse(self, size: int) -> Block | None:
        with self._lock:
            if self._held:
                raise _closed()
            at = bisect.bisect_left(self._idle, size, key=_size)
            if at == len(self._idle) or self._idle[at].nbytes - size > self._idle[at].nbytes // _WASTE:
                return None
            block = self._idle.pop(at)
            self._taken.add(block)
            return block

    def _new(self, size: int, deadline: Deadline) -> Block:
        try:
            return Block(self._make(size, deadline), size)
        except LLMException as error:
            if error.status_code != LLMStatusCode.LLM_OUT_OF_MEMORY or not self._trim(deadline):
                raise
        return Block(self._make(size, deadline), size)

    def _enter(self, block: Block) -> bool:
        """False when the end has begun meanwhile."""
        with self._lock:
            if not self._held:
                self._taken.add(block)
            return not self._held

    def _trim(self, deadline: Deadline) -> bool:
        """Have what is kept, and what was on its way already, back on the device. Whether there was anything."""
        with self._lock:
            idle, self._idle = self._idle, []
        self._let_go(idle)
        with self._lock:
            leaving = list(self._leaving)
        wait(leaving, deadline.sooner(_PATIENCE).remaining)
        return bool(leaving)

    def _let_go(self, blocks: Iterable[Block]) -> None:
        leaving = [self._free(block.address) for block in blocks]
        with self._lock:
            self._leaving = [future for future in self._leaving if not future.done()] + leaving

    def __repr__(self) -> str:
        return f"<Pool taken={len(self._taken)} idle={len(self._idle)}>"


def _closed() -> LLMException:
    return LLMException("the device's memory has been closed", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)


def _rounded(nbytes: int) -> int:
    step = _PAGE if nbytes + _OWN <= _SMALL else _HUGE
    return -(-(nbytes + _OWN) // step) * step - _OWN


def _size(block: Block) -> int:
    return block.nbytes
