"""Things that go wrong, on purpose: stalled and cut connections, copies held in the middle.

For tests of the library, and of transports and memories written for it. Nothing but tests may import it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvpull_async._deadline import Deadline
from kvpull_async._workers import report_to, resolve
from kvpull_async.memory.base import Allocation, Batches, MemoryBackend, Region, Until
from kvpull_async.transport.arrivals import Arrivals
from kvpull_async.transport.base import (
    Address,
    ControlChannel,
    DataPath,
    Listener,
    OnChannel,
    PathKind,
    PathSeed,
    Transport,
)
from kvpull_async.values import Placement

__all__ = [
    "Faults",
    "FaultyChannel",
    "FaultyTransport",
    "Gate",
    "GatedMemory",
    "WrappedMemory",
]

_LIMIT: Final = 30.0
_UNREAD: Final = 256 * 1024


class Gate:
    """Holds threads up while it is closed. It begins open; `limit` (s) bounds every wait at it, so that a gate which a
    failing test left closed hangs nothing.
    """

    def __init__(self, *, limit: float = _LIMIT) -> None:
        self.held: int = 0
        """How often a thread had to wait here."""
        self._limit = limit
        self._times: int | None = None
        self._open = threading.Event()
        self._open.set()
        self._lock = threading.Lock()  # protects held, _times and _waiters
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def close(self, *, times: int | None = None) -> None:
        """Hold every thread that comes from now on, or the next `times` of them."""
        with self._lock:
            self.held, self._times = 0, times
        self._open.clear()

    def open(self) -> None:
        """Let all of them pass."""
        self._open.set()

    def pass_through(self) -> None:
        """What the held code calls. TimeoutError when nobody opened the gate in time."""
        if not self._open.is_set() and self._is_held() and not self._open.wait(self._limit):
            raise TimeoutError(f"the gate stayed closed for {self._limit} s")

    def _is_held(self) -> bool:
        with self._lock:
            if self._times is not None and self.held >= self._times:
                return False
            self.held += 1
            waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            report_to(loop, resolve, future)
        return True

    async def reached(self, *, timeout: float = 10.0) -> None:
        """Wait until a thread is held (or was, since `close`). asyncio.TimeoutError when none came."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            if self.held:
                return
            self._waiters.append((loop, future))
        async with Deadline.after_ms(timeout * 1000).scope():
            await future

    def __repr__(self) -> str:
        return f"<Gate {'open' if self._open.is_set() else 'closed'} held={self.held}>"


class WrappedMemory(MemoryBackend):
    """Another memory as it is: for those that change a part of what it does."""

    def __init__(self, inner: MemoryBackend, *, kind: str) -> None:
        self.name: str = f"{kind} {inner.name}"
        self.direct: bool = inner.direct
        self._inner = inner

    def allocate(self, *, tensors: int, tensor_nbytes: int, placement: Placement) -> Allocation:
        return self._inner.allocate(tensors=tensors, tensor_nbytes=tensor_nbytes, placement=placement)

    def free(self, allocation: Allocation) -> None:
        self._inner.free(allocation)

    def adopt(
        self, addresses: Sequence[int], *, tensor_nbytes: int, placement: Placement, owners: Sequence[object] = ()
    ) -> tuple[Region, ...]:
        return self._inner.adopt(addresses, tensor_nbytes=tensor_nbytes, placement=placement, owners=owners)

    def waits(self, placement: Placement) -> bool:
        return self._inner.waits(placement)

    def reach(self, regions: Sequence[Region], *, writing: bool) -> None:
        self._inner.reach(regions, writing=writing)

    def disown(self, regions: tuple[Region, ...]) -> None:
        self._inner.disown(regions)

    def leak(self, regions: Sequence[Region]) -> None:
        self._inner.leak(regions)

    def views(self, regions: Sequence[Region]) -> list[memoryview]:
        return self._inner.views(regions)

    def landing(
        self,
        regions: Sequence[Region],
        segments: NDArray[np.int64],
        *,
        until: Until | None = None,
        landed: Callable[[int], None] | None = None,
    ) -> Batches:
        return self._inner.landing(regions, segments, until=until, landed=landed)

    def lending(self, regions: Sequence[Region], segments: NDArray[np.int64], *, until: Until | None = None) -> Batches:
        return self._inner.lending(regions, segments, until=until)

    def close(self) -> None:
        self._inner.close()


class GatedMemory(WrappedMemory):
    """Another memory whose landings and lendings stop at a gate, after the first `after` batches of each.

    What is stopped cannot be aborted until the gate opens, like a copy inside a native library. Cannot be used on an
    event loop (`direct` is false), so it also stands for memory that is staged.
    """

    def __init__(self, inner: MemoryBackend, *, after: int = 1) -> None:
        super().__init__(inner, kind="gated")
        self.direct = False
        self.landing_gate: Gate = Gate()
        self.lending_gate: Gate = Gate()
        self._after = after

    def landing(
        self,
        regions: Sequence[Region],
        segments: NDArray[np.int64],
        *,
        until: Until | None = None,
        landed: Callable[[int], None] | None = None,
    ) -> Batches:
        pieces = super().landing(regions, segments, until=until, landed=landed)
        return _gated(pieces, self.landing_gate, self._after)

    def lending(self, regions: Sequence[Region], segments: NDArray[np.int64], *, until: Until | None = None) -> Batches:
        return _gated(super().lending(regions, segments, until=until), self.lending_gate, self._after)

    def close(self) -> None:
        self.landing_gate.open()
        self.lending_gate.open()
        super().close()


def _gated(batches: Batches, gate: Gate, after: int) -> Batches:
    with closing(batches):
        for number, batch in enumerate(batches):
            if number >= after:
                gate.pass_through()
            yield batch


class Faults:
    """What befalls the channels of a `FaultyTransport`. May be changed from any thread.

    `stall` lets nothing pass either way, as when the peer's process is stopped, and `resume` delivers what was held.
    `cut` breaks all channels; `cut_at(n)` breaks the one that is to carry the n-th frame from now (1 is the next one),
    and that frame is lost.
    """

    def __init__(self) -> None:
        self.stalled: bool = False
        self._frames_left = 0
        self._lock = threading.Lock()  # protects _channels and _frames_left
        self._channels: set[FaultyChannel] = set()

    def stall(self) -> None:
        self.stalled = True

    def resume(self) -> None:
        self.stalled = False
        self._tell(FaultyChannel.flush)

    def cut(self) -> None:
        self._tell(FaultyChannel.abort)

    def cut_at(self, frame: int) -> None:
        """0 takes it back."""
        with self._lock:
            self._frames_left = frame

    @property
    def frames_left(self) -> int:
        """Frames until the cut asked for; 0 when it has happened, or none was asked for."""
        return self._frames_left

    def opened(self, channel: FaultyChannel) -> None:
        with self._lock:
            self._channels.add(channel)

    def closed(self, channel: FaultyChannel) -> None:
        with self._lock:
            self._channels.discard(channel)

    def loses(self) -> bool:
        """Whether the frame that is to be sent now is the one to be lost."""
        with self._lock:
            if not self._frames_left:
                return False
            self._frames_left -= 1
            return not self._frames_left

    def _tell(self, action: Callable[[FaultyChannel], None]) -> None:
        with self._lock:
            channels = tuple(self._channels)
        for channel in channels:
            report_to(channel.loop, action, channel)

    def __repr__(self) -> str:
        return f"<Faults channels={len(self._channels)}{' stalled' if self.stalled else ''}>"


class FaultyChannel(ControlChannel):
    """One end of a control channel that suffers `faults`."""

    def __init__(self, inner: ControlChannel, faults: Faults) -> None:
        self.peer: str = inner.peer
        self.arrivals: Arrivals = Arrivals(self._taken)
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        self._inner = inner
        self._faults = faults
        self._ended = False
        self._held: list[bytes] = []
        self._late: list[bytes | OSError | None] = []
        self._full = False
        self._flow: asyncio.Event = asyncio.Event()
        self.unfit: str = inner.unfit
        self._inner.deliver(self._arrive, self._end)
        faults.opened(self)

    def speaks_for(self, cluster_id: int) -> bool:
        return self._inner.speaks_for(cluster_id)

    @property
    def ready(self) -> bool:
        return not self._stalled and not self._ended and self._inner.ready

    async def send(self, data: bytes) -> None:
        while self._stalled and not self._ended:
            self._flow.clear()
            await self._flow.wait()
        if self._lost():
            raise ConnectionResetError("cut by the test")
        await self._inner.send(data)

    def post(self, data: bytes) -> None:
        if self._stalled:
            self._held.append(data)
        elif not self._lost():
            self._inner.post(data)

    def pause(self) -> None:
        self.arrivals.pause()
        self._inner.pause()

    def resume(self) -> None:
        self.arrivals.resume()
        if not self._late:
            self._inner.resume()

    def abort(self) -> None:
        self._ended = True
        self._faults.closed(self)
        self._inner.abort()
        self._flow.set()
        self._catch_up()
        self.arrivals.end()

    def flush(self) -> None:
        """The stall is over. On this channel's loop."""
        held, self._held = self._held, []
        for data in held:
            self.post(data)
        self._flow.set()
        if not self._stalled:
            self._catch_up()
            if not self.arrivals.paused:
                self._inner.resume()

    @property
    def _stalled(self) -> bool:
        return self._faults.stalled or bool(self._held)

    def _arrive(self, data: bytes | memoryview) -> None:
        if self._stalled and not self._ended:
            self._late.append(bytes(data))
            self._inner.pause()
        else:
            self.arrivals.put(data)
            if self.arrivals.unread > _UNREAD:
                self._full = True
                self._inner.pause()

    def _taken(self, n: int) -> None:
        if self._full and self.arrivals.unread <= _UNREAD and not self.arrivals.paused and not self._late:
            self._full = False
            self._inner.resume()

    def _end(self, error: OSError | None) -> None:
        if self._stalled and not self._ended:
            self._late.append(error)
        else:
            self.arrivals.end(error)

    def _catch_up(self) -> None:
        late, self._late = self._late, []
        for one in late:
            if isinstance(one, bytes):
                self.arrivals.put(one)
            else:
                self.arrivals.end(one)

    def _lost(self) -> bool:
        if self._faults.loses():
            self.abort()
        return self._ended

    def __repr__(self) -> str:
        return f"<FaultyChannel of {self._inner!r}>"


class FaultyTransport(Transport, PathKind):
    """Another transport whose control channels suffer `faults`. Its data paths are left alone."""

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self.name: str = inner.name
        self._inner = inner
        self._faults = faults

    async def listen(self, address: Address, on_channel: OnChannel) -> Listener:
        return await self._inner.listen(address, lambda channel: on_channel(FaultyChannel(channel, self._faults)))

    async def dial(self, address: Address) -> ControlChannel:
        return FaultyChannel(await self._inner.dial(address), self._faults)

    def path(self, seed: PathSeed) -> DataPath:
        assert isinstance(self._inner, PathKind)
        return self._inner.path(seed)

    def reaches(self, address: Address) -> bool:
        return self._inner.reaches(address)
