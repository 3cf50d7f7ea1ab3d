"""One pull's copy out of the peer's memory: large pieces, several threads, and an end that can be waited for.

It must not know where the peer's memory comes from, or grants.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async import plan
from kvpull_async._workers import Workers, report_to
from kvpull_async.memory.base import FEW_ROWS, Batches, Span
from kvpull_async.memory.copying import CancelFlag
from kvpull_async.plan import Pieces, Segments
from kvpull_async.status import LLMException
from kvpull_async.transport.shm.remote import Cache

__all__ = ["Reading"]

_CHUNK: Final = 4 * 1024 * 1024
"""Bytes that one thread copies before it takes the next piece of work: long enough to make Python's part of it small,
short enough that the threads end together. A stop is noticed within it, after 256 KiB or 1 MiB.
"""
_INLINE: Final = 256 * 1024
"""Bytes copied at once on the loop: handing them to a thread takes longer."""


@dataclass(frozen=True)
class _Rows:
    """Addresses and lengths of what is to be copied, and where the chunks begin."""

    destinations: NDArray[np.int64]
    sources: NDArray[np.int64]
    lengths: NDArray[np.int64]
    starts: list[int]
    ends: NDArray[np.int64]
    """Bytes up to and with each row."""

    def chunk(self, number: int) -> slice:
        return slice(self.starts[number], self.starts[number + 1])


class Reading:
    """A transfer. `into` is the destination, or a landing where memory has to be filled piece by piece."""

    def __init__(
        self,
        workers: Workers,
        cache: Cache,
        reading: Callable[[], Segments],
        into: Span | Batches,
        *,
        nbytes: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[int] = self._loop.create_future()
        self.settled: asyncio.Future[None] = self._loop.create_future()
        self._workers = workers
        self._cache = cache
        self._reading = reading
        self._into = into
        self._nbytes = nbytes
        self._flag = CancelFlag()
        self._lock = threading.Lock()  # protects what is below, which the threads of this reading share
        self._busy = 0
        self._over = False
        self._error: BaseException | None = None
        self._rows: _Rows | None = None
        self._next = itertools.count()
        self._landed: list[bool] = []
        self._prefix = 0
        self._inline = isinstance(into, Span) and nbytes <= _INLINE and into.most_rows <= FEW_ROWS
        if self._inline:
            self._run()
        else:
            workers.submit(self._run)

    def abort(self) -> bool:
        self._flag.set()
        with self._lock:
            if not self._busy:  # no thread has begun, and none will
                self._end()
        return True

    # -- in the threads ---------------------------------------------------------------------------------------------

    def _run(self, *, again: bool = False) -> None:
        with self._lock:
            if self._over:
                return
            self._busy += not again
        try:
            if not isinstance(self._into, Span):
                self._fill(self._into)
            elif self._copy(self._into):
                return
        except BaseException as error:  # noqa: BLE001  (belongs to whoever awaits `done`)
            self._flag.set()  # the other threads need not go on
            with self._lock:
                self._error = self._error or error
        with self._lock:
            self._busy -= 1
            if not self._busy:
                self._end()

    def _end(self) -> None:
        """Nothing touches memory from here on. The lock is held."""
        if self._over:
            return
        self._over = True
        error = self._error
        if error is None and self._flag.is_set:
            error = asyncio.CancelledError()
        if error is None:
            try:
                self._cache.check()
            except Exception as raised:  # noqa: BLE001  (belongs to whoever awaits `done`)
                error = raised
        del self._cache, self._into, self._reading, self._rows  # an error that is kept must not keep the memory
        if isinstance(error, (LLMException, OSError)):
            error.__traceback__ = None
        if self._inline:
            self._finish(error)
        else:
            report_to(self._loop, self._finish, error)

    def _finish(self, error: BaseException | None) -> None:
        if error is None:
            self.done.set_result(self._nbytes)
        elif isinstance(error, asyncio.CancelledError):
            self.done.cancel()
        else:
            self.done.set_exception(error)
            self.done.exception()  # an aborted caller may never ask for it
        self.settled.set_result(None)

    def _copy(self, span: Span) -> bool:
        """Copy chunks until none is left; True when it goes on later, since others wait for the thread."""
        rows = self._rows
        if rows is None:
            self._cache.check()
            rows = self._rows = self._plan(span)
            self._landed = [False] * (len(rows.starts) - 1)
            for _ in range(min(self._workers.limit, len(self._landed)) - 1):
                self._workers.submit(self._run)
        while not self._flag.is_set and (number := next(self._next)) < len(self._landed):
            chunk = rows.chunk(number)
            self._cache.copy(rows.destinations[chunk], rows.sources[chunk], rows.lengths[chunk], self._flag)
            if span.landed is not None and not self._flag.is_set:
                self._cache.check()  # what is told is final
                self._tell(number, rows, span.landed)
            if self._workers.crowded and not self._inline:
                self._workers.submit(self._run, again=True)
                return True
        return False

    def _tell(self, number: int, rows: _Rows, landed: Callable[[int], None]) -> None:
        with self._lock:
            self._landed[number] = True
            before = self._prefix
            while self._prefix < len(self._landed) and self._landed[self._prefix]:
                self._prefix += 1
            if self._prefix > before:
                landed(int(rows.ends[rows.starts[self._prefix] - 1]))

    def _plan(self, span: Span) -> _Rows:
        bases = np.array([region.address for region in span.regions], np.uint64).view(np.int64)
        if span.alike is not None:
            src_pieces, dst_pieces = span.alike()
            if int(dst_pieces.lengths.max()) <= _CHUNK:
                return self._plan_alike(src_pieces, dst_pieces, bases)
        src, dst = self._reading(), span.rows()
        plan.check_bounds(src, tensors=len(self._cache.bases), tensor_nbytes=self._cache.tensor_nbytes)
        if plan.total(dst) != self._nbytes:
            raise ValueError(f"the destination takes {plan.total(dst)} bytes, {self._nbytes} were granted")
        pairs = plan.cut(plan.pair(src, dst), limit=_CHUNK)
        lengths = np.ascontiguousarray(pairs[:, 4])
        ends = np.cumsum(lengths)
        return _Rows(
            bases[pairs[:, 2]] + pairs[:, 3],
            self._cache.bases[pairs[:, 0]] + pairs[:, 1],
            lengths,
            _starts(ends),
            ends,
        )

    def _plan_alike(self, src: Pieces, dst: Pieces, bases: NDArray[np.int64]) -> _Rows:
        tensors = len(dst.tensors)
        first, end = int(src.offsets.min()), int((src.offsets + src.lengths).max())
        if first < 0 or end > self._cache.tensor_nbytes or src.tensors.stop > len(self._cache.bases):
            raise ValueError(
                f"bytes {first}..{end} of tensors up to {src.tensors.stop - 1} are outside a cache of "
                f"{len(self._cache.bases)} tensors of {self._cache.tensor_nbytes} bytes"
            )
        if int(dst.lengths.sum()) * tensors != self._nbytes or len(src.tensors) != tensors:
            raise ValueError(f"{tensors} tensors take another number of bytes than the {self._nbytes} granted")
        lengths = np.tile(dst.lengths, tensors)
        ends = np.cumsum(lengths)
        return _Rows(
            _each(bases[dst.tensors.start : dst.tensors.stop], dst.offsets),
            _each(self._cache.bases[src.tensors.start : src.tensors.stop], src.offsets),
            lengths,
            _starts(ends),
            ends,
        )

    def _fill(self, landing: Batches) -> None:
        """Piece by piece, as the memory hands them out."""
        with closing(landing):
            self._cache.check()
            src = self._reading()
            plan.check_bounds(src, tensors=len(self._cache.bases), tensor_nbytes=self._cache.tensor_nbytes)
            sources = self._cache.bases[src[:, 0]] + src[:, 1]
            ends = np.cumsum(src[:, 2])
            at = 0
            for batch in landing:
                for view in batch:
                    for destination, source, length in _cut(view, sources, ends, src[:, 2], at):
                        self._cache.copy(destination, source, length, self._flag)
                    at += view.nbytes
                if self._flag.is_set:
                    return
                self._cache.check()  # the landing tells what has landed, and that is final
            if at != self._nbytes or at != plan.total(src):
                raise ValueError(f"{at} bytes landed, {plan.total(src)} were to be read, {self._nbytes} granted")


def _each(bases: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The addresses of the same places in each of some tensors, tensor after tensor."""
    return (bases[:, np.newaxis] + offsets).reshape(-1)


def _starts(ends: NDArray[np.int64]) -> list[int]:
    """The rows at which chunks begin, and the number of rows."""
    if not len(ends):
        return [0]
    marks = np.arange(_CHUNK, ends[-1] + _CHUNK, _CHUNK)
    return [0, *dict.fromkeys((np.searchsorted(ends, marks) + 1).clip(max=len(ends)).tolist())]


def _cut(
    view: memoryview, sources: NDArray[np.int64], ends: NDArray[np.int64], lengths: NDArray[np.int64], at: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """The source rows that fill one view, which takes the stream's bytes from `at` on."""
    if not view.nbytes:
        return
    address = np.frombuffer(view, np.uint8).ctypes.data
    first = int(np.searchsorted(ends, at, side="right"))
    last = int(np.searchsorted(ends, at + view.nbytes, side="left"))
    if last >= len(ends):
        raise ValueError("the source holds fewer bytes than the destination")
    begins = ends[first : last + 1] - lengths[first : last + 1]
    skipped = np.maximum(at - begins, 0)
    taken = np.minimum(ends[first : last + 1], at + view.nbytes) - np.maximum(begins, at)
    yield address + np.maximum(begins, at) - at, sources[first : last + 1] + skipped, taken
