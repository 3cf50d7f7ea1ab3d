"""What memory is to the rest: regions, and how a data path fills or reads them. It must not know any concrete memory.

A data path never touches a cache's memory directly. It fills the host pieces of a *landing* or reads those of a
*lending*. For host memory these are the cache's own bytes; for device memory they are pieces of a staging buffer that
the backend copies from or to the device while the path works on the next ones.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async._deadline import NEVER, Deadline
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import Placement

if TYPE_CHECKING:
    from kvpull_async.plan import Pieces

__all__ = [
    "FEW_BYTES",
    "FEW_ROWS",
    "FEW_TENSORS",
    "PIECE_BYTES",
    "PIECE_VIEWS",
    "Allocation",
    "Batches",
    "MemoryBackend",
    "Region",
    "Span",
    "Until",
    "copy_batches",
    "forked",
    "lend_bytes",
    "no_memory",
    "planned",
    "watched",
]

PIECE_BYTES: Final = 1024 * 1024
"""Most bytes handed over at once: what a cancellation may have to wait for."""
FEW_TENSORS: Final = 64
"""Most tensors of which pieces are made at once, without a plan."""
FEW_BYTES: Final = 128 * 1024
"""Most bytes that are copied or summed on an event loop: handing them to a thread would take as long."""
FEW_ROWS: Final = 1024
"""Most separate rows that may be copied on an event loop: the time goes by the rows, however few the bytes."""
PIECE_VIEWS: Final = 256
"""Most separate views handed over at once; below the kernel's limit on one scatter-gather call (1024)."""

Batches = Generator[Sequence[memoryview], None, None]
"""Host pieces in stream order, at most PIECE_BYTES and PIECE_VIEWS at a time.

Asking for the next batch means that the former has been filled (landing) or read (lending). Exhausting the iterator
completes the work: when it ends, every byte is where it belongs. `close()` ends it early; afterwards nothing is
written any more. Whoever asks for batches must close them. Used in whatever thread the data path works in. Asking and
closing may wait for the device, which an `Until` bounds.
"""


class Until:
    """How long bytes of device memory are waited for: until the deadline, or until somebody stops it.

    Made for one transfer, by whoever may abort it. The memory looks at it in the thread that works; anyone may stop it,
    from any thread, and for good. Memory that the host reaches waits for nothing and never looks.
    """

    __slots__ = ("deadline", "stopped")

    def __init__(self, deadline: Deadline = NEVER) -> None:
        self.deadline: Deadline = deadline
        self.stopped: bool = False

    def stop(self) -> None:
        """Nobody wants the bytes any more. Never waits."""
        self.stopped = True

    @property
    def over(self) -> bool:
        return self.stopped or self.deadline.expired

    def __repr__(self) -> str:
        return f"<Until{' stopped' if self.stopped else ''} {self.deadline.remaining_ms} ms>"


@dataclass(frozen=True)
class Region:
    """`nbytes` of memory at `address`; holding the region keeps `owner`, and so the memory, alive."""

    address: int
    nbytes: int
    placement: Placement
    owner: Any = field(default=None, repr=False, compare=False)
    device: int | None = None
    """The NPU in whose memory it is; None: the host reaches it."""


@dataclass(frozen=True)
class Allocation:
    """One cache's memory: one region per tensor, and the bytes it counts against the budget of its placement."""

    regions: tuple[Region, ...]
    nbytes: int
    placement: Placement


@dataclass(frozen=True)
class Span:
    """A part of a cache, for data paths that move memory by themselves instead of filling or reading pieces.

    `rows` makes the table of tensor, byte offset, length, in stream order; it may take long, so call it off the loop.
    `landed` is for who writes here: called from any thread with the number of bytes that have landed so far, in stream
    order, never decreasing. They are final: whoever is told may read them at once.
    """

    regions: tuple[Region, ...]
    rows: Callable[[], NDArray[np.int64]]
    direct: bool
    """Whether the path may fill or read the regions by itself, without a landing or a lending: all of them are host
    memory that its backend calls direct. What a peer may read by itself is for the memory to say.
    """
    landed: Callable[[int], None] | None = None
    most_rows: int = 2**63 - 1
    """No more than these come from `rows`."""
    alike: Callable[[], tuple[Pieces, Pieces]] | None = None
    """Where the bytes are the same pieces of many tensors on both sides, cut alike: the source's pieces and these. That
    is the same as the rows, in a form that does not grow with the tensors.
    """
    until: Until | None = None
    """How long memory of a device is waited for."""


class MemoryBackend(ABC):
    """Where caches live. Calls may come from any thread; errors are LLMExceptions with the memory's status codes.

    Memory that has to wait for a device bounds every wait, by a limit of its own and by the `until` it was given. Once
    that is over, what waits ends: with LLMTimeoutError after its deadline, with another LLMException when it was
    stopped. As with every error of a device, it is raised only when the device neither reads nor writes these bytes any
    more, nor the pieces handed out; and `close()` returns no sooner. `until` None: only the memory's own limit.
    """

    name: str
    direct: bool
    """Whether an event loop may use landings and lendings of regions without a device: they touch host memory, and
    wait for nothing. Regions with a device are for other threads in any case.
    """

    @abstractmethod
    def allocate(self, *, tensors: int, tensor_nbytes: int, placement: Placement) -> Allocation:
        """Zeroed memory for `tensors` tensors of `tensor_nbytes` bytes. LLM_OUT_OF_MEMORY when there is none. Memory
        that has to wait for a device does so with a limit of its own, and raises LLMTimeoutError after it.
        """

    @abstractmethod
    def free(self, allocation: Allocation) -> None:
        """The cache is gone. Views that the application still holds must stay readable."""

    @abstractmethod
    def adopt(
        self, addresses: Sequence[int], *, tensor_nbytes: int, placement: Placement, owners: Sequence[object] = ()
    ) -> tuple[Region, ...]:
        """Regions over memory that belongs to the caller. Does not touch it. Each holds its one of `owners`, if any."""

    def reach(self, regions: Sequence[Region], *, writing: bool) -> None:
        """Asked before adopted memory is read, or written, for the first time: LLM_PARAM_INVALID for addresses where
        that is not possible. Changes nothing of it, and knows nothing of later.
        """

    def waits(self, placement: Placement) -> bool:
        """Whether allocating there may have to wait for a device."""
        return False

    def returning(self, placement: Placement) -> bool:
        """Whether memory of caches that are gone is about to come back, so that it is worth asking again."""
        return False

    def disown(self, regions: tuple[Region, ...]) -> None:
        """The cache over adopted memory is gone; nothing of this side touches it any more."""

    def leak(self, regions: Sequence[Region]) -> None:
        """Somebody may use them for ever: `close` gives back none of what they are in. Never waits."""

    @abstractmethod
    def views(self, regions: Sequence[Region]) -> list[memoryview]:
        """The regions' bytes, writable, for the application. LLM_FEATURE_NOT_ENABLED where the host cannot reach."""

    @abstractmethod
    def landing(
        self,
        regions: Sequence[Region],
        segments: NDArray[np.int64],
        *,
        until: Until | None = None,
        landed: Callable[[int], None] | None = None,
    ) -> Batches:
        """Pieces to fill, in the order of `segments` (rows of tensor, offset, length).

        `landed` hears, from any thread but one at a time, how many bytes in this order are final in the memory itself,
        never decreasing: whoever is told may read them there at once. What it raises ends the landing, after whose end
        it hears nothing more.
        """

    @abstractmethod
    def lending(self, regions: Sequence[Region], segments: NDArray[np.int64], *, until: Until | None = None) -> Batches:
        """Pieces to read, in the order of `segments`."""

    def copying(
        self,
        sources: Sequence[Region],
        destinations: Sequence[Region],
        pairs: NDArray[np.int64],
        *,
        until: Until | None = None,
    ) -> Generator[int, None, None]:
        """Steps of a copy inside this memory, to be run off an event loop; each yields the bytes it copied.

        `pairs` are rows of source region, byte offset, destination region, byte offset, length, of PIECE_BYTES at most.
        No byte that is written may be read, too. `close()` ends it early: afterwards nothing is written any more.
        """
        lending = self.lending(sources, pairs[:, [0, 1, 4]], until=until)
        return copy_batches(lending, self.landing(destinations, pairs[:, 2:], until=until))

    def slices(self, regions: Sequence[Region], tensors: range, *, start: int, nbytes: int) -> list[memoryview]:
        """The same bytes of each of some tensors, all at once: for `direct` memory, few tensors and few bytes."""
        return [view[start : start + nbytes] for view in self.views(regions[tensors.start : tensors.stop])]

    def watch(self, *, failed: Callable[[BaseException], object], held: Callable[[bool], object]) -> None:
        """Tell `failed` what goes wrong where nobody waits for it; and `held`, in some thread, when one of the caller's
        begins to hang with a device beyond the time it was given (True), and when it does so no more (False).
        """

    def close(self) -> None:
        """Give back what the backend itself holds. Caches still alive keep their memory."""


def planned(plan: Callable[[], NDArray[np.int64]], pieces: Callable[[NDArray[np.int64]], Batches]) -> Batches:
    """The pieces of a plan that is made when the first batch is asked for, so in the data path's thread: a table of a
    million rows takes longer to build than an event loop may be held.
    """
    with closing(pieces(plan())) as batches:
        yield from batches


def watched(landing: Batches, landed: Callable[[int], None]) -> Batches:
    """The same pieces, and `landed` hears how many bytes have been filled so far. Only where the pieces are the memory
    itself have these landed with that.
    """
    total = 0
    with closing(landing):
        for batch in landing:
            nbytes = sum(view.nbytes for view in batch)
            yield batch
            total += nbytes
            landed(total)


def lend_bytes(data: bytes | memoryview) -> Batches:
    """Bytes that came in a frame, as something to copy from."""
    yield [memoryview(data)]


def forked() -> LLMException:
    """What a forked child is told."""
    return LLMException(
        "device memory cannot be used in a forked child; start processes with spawn or forkserver",
        status_code=LLMStatusCode.LLM_FAILED,
    )


def no_memory(error: OSError, whose: str, *, reading: bool) -> LLMException | None:
    """What the caller is told when the kernel has found no memory where a cache was said to be; None if `error` is
    another one.
    """
    if error.errno != errno.EFAULT:
        return None
    done = "read" if reading else "written"
    reason = f"the {whose}'s memory cannot be {done}, is the address it was registered with right? ({error})"
    return LLMException(reason, status_code=LLMStatusCode.LLM_PARAM_INVALID)


def copy_batches(source: Batches, destination: Batches) -> Generator[int, None, None]:
    """Copy a lending into a landing of the same length; yields the bytes copied after each bounded step.

    numpy copies with the interpreter lock released, which assigning one memoryview to another does not.
    """
    with closing(source), closing(destination):
        reading = _arrays(source)
        piece: NDArray[np.uint8] | None = None
        for batch in destination:
            copied = 0
            for view in batch:
                target = np.frombuffer(view, np.uint8)
                while target.size:
                    if piece is None or not piece.size:
                        piece = next(reading, None)
                        if piece is None:
                            raise ValueError("the source holds fewer bytes than the destination")
                    n = min(target.size, piece.size)
                    np.copyto(target[:n], piece[:n])
                    target, piece = target[n:], piece[n:]
                    copied += n
            yield copied
        left = piece is not None and piece.size > 0
        if left or next(reading, None) is not None:  # exhausts the source, which completes it
            raise ValueError("the source holds more bytes than the destination")


def _arrays(batches: Batches) -> Iterator[NDArray[np.uint8]]:
    for batch in batches:
        for view in batch:
            if view.nbytes:
                yield np.frombuffer(view, np.uint8)
