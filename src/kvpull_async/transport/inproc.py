"""Prefill and decode in one process: frames pass between the two engines' loops, payload is copied memory to memory.

It must not know caches or links. Nothing here is visible outside the process.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Final

from kvpull_async import observe, plan
from kvpull_async._deadline import Deadline, absorb
from kvpull_async._workers import Job, Workers, report_to, resolve
from kvpull_async.memory.base import PIECE_BYTES, Batches, MemoryBackend, Span, Until, copy_batches
from kvpull_async.status import LLMException
from kvpull_async.transport.arrivals import Arrivals
from kvpull_async.transport.base import (
    Address,
    ControlChannel,
    DataPath,
    Listener,
    OnChannel,
    PathKind,
    PathSeed,
    Segments,
    Transport,
)
from kvpull_async.transport.outbox import Outbox

__all__ = ["InprocTransport"]

_BUFFER: Final = 1024 * 1024
_ANY_HOST: Final = "0.0.0.0"  # noqa: S104  (the name of a wildcard listener, not a bind)

_lock = threading.Lock()  # protects the two tables below, which engines on different threads share
_listeners: dict[Address, _InprocListener] = {}
_offers: dict[bytes, _Offer] = {}


class InprocTransport(Transport, PathKind):
    name = "inproc"
    why = "both nodes are in this process"

    def __init__(self, log: observe.Log, memory: MemoryBackend | None = None) -> None:
        """With `memory` what lies on the device of both nodes does not leave it."""
        self._log = log
        self._memory = memory

    async def listen(self, address: Address, on_channel: OnChannel) -> Listener:
        with _lock:
            if not address[1]:
                address = (
                    address[0],
                    next(port for port in itertools.count(1) if (address[0], port) not in _listeners),
                )
            if address in _listeners:
                raise OSError(errno.EADDRINUSE, "an engine of this process listens there")
            listener = _listeners[address] = _InprocListener(address, on_channel, self._log)
        return listener

    async def dial(self, address: Address) -> ControlChannel:
        listener = _find(address)
        if listener is None:
            raise ConnectionRefusedError("no engine of this process listens there")
        near = _InprocChannel(f"inproc:{address[0]}:{address[1]}", asyncio.get_running_loop())
        far = _InprocChannel(f"inproc:{address[0]}:{address[1]} (dialled)", listener.loop)
        near.other, far.other = far, near
        if not report_to(listener.loop, listener.accept, far):
            raise ConnectionRefusedError("the engine that listened there has ended")
        return near

    def path(self, seed: PathSeed) -> DataPath:
        return InprocPath(seed, self._memory)

    def reaches(self, address: Address) -> bool:
        return _find(address) is not None


def _find(address: Address) -> _InprocListener | None:
    with _lock:
        return _listeners.get(address) or _listeners.get((_ANY_HOST, address[1]))


class _InprocListener(Listener):
    def __init__(self, address: Address, on_channel: OnChannel, log: observe.Log) -> None:
        self.address = address
        self.loop = asyncio.get_running_loop()
        self._on_channel = on_channel
        self._log = log
        self._tasks: set[asyncio.Future[None]] = set()

    def accept(self, channel: _InprocChannel) -> None:
        with _lock:
            listening = _listeners.get(self.address) is self
        if not listening:
            channel.abort()
            return
        task = asyncio.ensure_future(self._on_channel(channel), loop=self.loop)
        self._tasks.add(task)
        task.add_done_callback(self._accepted)

    def _accepted(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("link.accept_failed", reason=repr(error))

    async def aclose(self) -> None:
        with _lock:
            if _listeners.get(self.address) is self:
                del _listeners[self.address]
        for task in self._tasks:  # not at once: a task cancelled before it began would not break its channel
            self.loop.call_soon(task.cancel)
        await absorb(self._tasks, Deadline.after_ms(1000))


class _InprocChannel(ControlChannel):
    """One end; each attribute is changed on its own loop only, the other end is told by a callback there."""

    other: _InprocChannel

    def __init__(self, peer: str, loop: asyncio.AbstractEventLoop) -> None:
        self.peer = peer
        self.arrivals = Arrivals(self._took)
        self._loop = loop
        self._unread = 0
        self._outbox = Outbox(self._write, lambda: self._unread > _BUFFER)

    @property
    def ready(self) -> bool:
        return self._outbox.ready

    async def send(self, data: bytes) -> None:
        await self._outbox.send(data)

    def post(self, data: bytes) -> None:
        self._outbox.post(data)

    def _write(self, data: bytes) -> None:
        if data:
            self._unread += len(data)
            report_to(self.other._loop, self.other.arrivals.put, data)

    def abort(self) -> None:
        self._end()
        report_to(self.other._loop, self.other._end)

    def _took(self, n: int) -> None:
        report_to(self.other._loop, self.other._taken, n)

    def _taken(self, n: int) -> None:
        self._unread -= n
        self._outbox.flow()

    def _end(self) -> None:
        self._outbox.end()
        self.arrivals.end()

    def __repr__(self) -> str:
        return f"<InprocChannel {self.peer} unread={self._unread}>"


class _Offer:
    """A grant that the other engine may read. Its transfer is done at once; it settles when no one reads any more, and
    never where that cannot be told.
    """

    def __init__(self, lending: Batches, span: Span | None) -> None:
        self.lending = lending
        self.span = span
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # protects the flags and the wait: the reader is on another thread
        self._reading = False
        self._withdrawn = False
        self._lost = False
        self._waits: Until | None = None
        self.done: asyncio.Future[int] = self._loop.create_future()
        self.done.set_result(0)
        self.settled: asyncio.Future[None] = self._loop.create_future()

    def begin(self, waits: Until | None) -> None:
        """`waits` is how long the reader waits for a device: no longer than the memory is offered."""
        with self._lock:
            if self._withdrawn:
                raise ConnectionAbortedError("the source has withdrawn the memory")
            self._reading, self._waits = True, waits

    def check(self) -> None:
        if self._withdrawn:
            raise ConnectionAbortedError("the source has withdrawn the memory")

    def failed(self, error: LLMException) -> None:
        """The memory failed while it was read. What was withdrawn was stopped, and has not failed; and a device that
        may read on for ever is never told to have ended.
        """
        if error.destination_unsafe:
            self._lost = True
        else:
            self.check()

    def end(self) -> None:
        with self._lock:
            self._withdrawn = True
            self.span = self._waits = None  # whoever holds this holds no memory
            if self._lost:
                return
            self._reading = False
        report_to(self._loop, resolve, self.settled)

    def abort(self) -> bool:
        with self._lock:
            self._withdrawn = True
            reading, waits = self._reading, self._waits
        if waits is not None:
            waits.stop()
        if not reading:
            self.span = None
            resolve(self.settled)
        return True


class InprocPath(DataPath):
    name = "inproc"

    def __init__(self, seed: PathSeed, memory: MemoryBackend | None) -> None:
        self._workers = seed.workers
        self._memory = memory
        self._jobs: set[Job] = set()
        self._granted: dict[bytes, Span | None] = {}
        self._expected: tuple[bytes, Span] | None = None
        self._aborted = False

    async def ready(self, deadline: Deadline) -> None:
        """Memory needs no connection."""

    def fetch(self, grant_id: bytes, landing: Batches, nbytes: int) -> Job:
        expected, self._expected = self._expected, None  # whatever comes of it: it holds the destination's memory
        into = expected[1] if expected is not None and expected[0] == grant_id else None
        with _lock:
            offer = _offers.get(grant_id)
        if offer is None or self._aborted:
            raise ConnectionAbortedError("the source has withdrawn the memory")
        offer.begin(None if into is None else into.until)
        try:
            job = Job(self._pool(into, offer), self._steps(into, offer, landing, nbytes))
        except BaseException:
            offer.end()
            raise
        self._jobs.add(job)
        job.settled.add_done_callback(lambda _: self._ended(job, offer))
        return job

    def _pool(self, into: Span | None, offer: _Offer) -> Workers:
        direct = all(span is None or span.direct for span in (into, offer.span))
        return self._workers.fit(direct=direct)

    def _steps(self, into: Span | None, offer: _Offer, landing: Batches, nbytes: int) -> Generator[int, None, None]:
        if into is None or self._memory is None or offer.span is None:
            return _checked(offer, landing)
        device = _device(offer.span)
        if device is None or device != _device(into):
            return _checked(offer, landing)
        landing.close()
        return _within(self._memory, offer, offer.span, into, nbytes)

    def describe(self, grant_id: bytes, span: Span) -> bytes:
        self._granted[grant_id] = span
        return b""  # the puller finds the offer by the grant's id

    def expect(self, grant_id: bytes, ticket: bytes | None, reading: Callable[[], Segments], span: Span) -> None:
        self._expected = grant_id, span

    def serve(self, grant_id: bytes, lending: Batches, nbytes: int) -> _Offer:
        if self._aborted:
            raise ConnectionAbortedError("the path has ended")
        offer = _Offer(lending, self._granted.setdefault(grant_id, None))
        with _lock:
            _offers[grant_id] = offer
        return offer

    def release(self, grant_id: bytes) -> None:
        self._granted.pop(grant_id, None)
        with _lock:
            offer = _offers.pop(grant_id, None)
        if offer is not None:
            offer.abort()

    def abort(self) -> None:
        self._aborted, self._expected = True, None
        for job in self._jobs:
            job.abort()
        for grant_id in tuple(self._granted):
            self.release(grant_id)

    async def aclose(self, deadline: Deadline) -> None:
        self.abort()
        await absorb([job.settled for job in self._jobs], deadline)

    def _ended(self, job: Job, offer: _Offer) -> None:
        self._jobs.discard(job)
        offer.end()

    def __repr__(self) -> str:
        return f"<InprocPath reading={len(self._jobs)} granted={len(self._granted)}>"


def _checked(offer: _Offer, landing: Batches) -> Generator[int, None, None]:
    """The copy, which looks whether the memory is still offered right before it touches any: planning may take long."""
    try:
        yield from copy_batches(_while_offered(offer), landing)
    except LLMException as error:
        if not error.destination_unsafe:  # else it is what is written, not what was offered
            offer.check()
        raise
    finally:
        offer.end()  # here too, since the loop on which the copy was begun may have closed meanwhile


def _device(span: Span) -> int | None:
    """The one in whose memory all of it is. Of what the host reaches only the beginning is looked at."""
    if span.regions[0].device is None:
        return None
    devices = {region.device for region in span.regions}
    return devices.pop() if len(devices) == 1 else None


def _within(
    memory: MemoryBackend, offer: _Offer, source: Span, destination: Span, nbytes: int
) -> Generator[int, None, None]:
    """The copy where both ends lie on one device."""
    try:
        pairs = plan.cut(plan.pair(source.rows(), destination.rows()), limit=PIECE_BYTES)
        total = 0
        copying = memory.copying(source.regions, destination.regions, pairs, until=destination.until)
        with closing(offer.lending), closing(copying):
            offer.check()
            for copied in copying:
                total += copied
                if destination.landed is not None:
                    destination.landed(total)
                yield copied
                offer.check()
        if total != nbytes:
            raise ValueError(f"{total} bytes were copied, {nbytes} granted")
    except LLMException as error:
        offer.failed(error)
        raise
    finally:
        offer.end()


def _while_offered(offer: _Offer) -> Batches:
    try:
        with closing(offer.lending):
            for batch in offer.lending:
                offer.check()
                yield batch
    except LLMException as error:
        offer.failed(error)
        raise


def _forget_parent() -> None:
    """In a forked child: the parent's engines are out of reach, and a thread of the parent may have held the lock."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _listeners.clear()
    _offers.clear()


os.register_at_fork(after_in_child=_forget_parent)
