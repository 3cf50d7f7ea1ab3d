"""One cache of this node: what refers to it, what uses its memory, and what may still write there.

It must not know the tables by which it is found. Used by the core's loop only, but for `Entry.claim` and `unclaim`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kvpull_async._deadline import Deadline
from kvpull_async._workers import report_to, resolve
from kvpull_async.memory.base import Allocation, MemoryBackend, Region
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import CacheDesc, foreign

__all__ = ["Binding", "Entry", "KeyId", "Pin", "leaked", "may_know"]

leaked: list[object] = []
"""Caches whose memory was still in use when their node ended: kept for ever, since unmapping it would be worse."""

KeyId = tuple[str, int, int]
"""A key as the tables hold it: "request" or "prefix", its id, the model id."""


class Pin:
    """One use of an entry's memory: a transfer that reads it (source) or writes it (destination).

    `cut` is called when the entry is being taken away; it must not wait or raise, and release the pin soon.
    """

    def __init__(self, entry: Entry, cut: Callable[[], object]) -> None:
        self.cut: Callable[[], object] = cut
        self._entry = entry

    def release(self) -> None:
        """May be called twice."""
        self._entry.unpin(self)
        self.cut = _nothing  # it belongs to whoever holds this pin: together they would wait for the garbage collector


@dataclass(eq=False)
class Binding:
    """A key bound to one batch entry. `generation` is never reused, so that a late DONE cannot consume a later key."""

    entry: Entry
    index: int
    key: KeyId
    generation: int
    missing: set[int] | None = None
    """Tensors nobody has pulled yet, once some have been: most keys go with one pull."""
    ends: float | None = None
    """By the clock of `leases`, when the key goes by itself."""
    step: int | None = None
    """Where `leases` has it."""

    def tick_off(self, tensors: Iterable[int]) -> int:
        """How many tensors nobody has pulled yet, after these; the key is consumed when none is left."""
        if self.missing is None:
            self.missing = set(range(self.entry.desc.num_tensors))
        self.missing.difference_update(tensors)
        return len(self.missing)


class Entry:
    """One cache. Also what a `Cache` or `KvCache` handle is bound to."""

    def __init__(
        self,
        cache_id: int,
        desc: CacheDesc,
        regions: tuple[Region, ...],
        *,
        backend: MemoryBackend,
        blocks: bool,
        allocation: Allocation | None,
        remote_accessible: bool,
        dropped: Callable[[int], None],
        allowed: frozenset[int] | None = None,
    ) -> None:
        self.cache_id = cache_id
        self.desc = desc
        self.entry_nbytes: int = desc.entry_nbytes
        self.regions: tuple[Region, ...] = regions
        self.direct: bool = backend.direct and regions[0].device is None
        """Whether an event loop may touch the memory."""
        self.blocks = blocks
        self.allocation = allocation
        self.remote_accessible = remote_accessible
        self.allowed = allowed
        """The clusters for which it exists; None: for all that are linked."""
        self.alive: bool = True
        """Whether the id still refers to it, that is, until it is deallocated or unregistered."""
        self.reached: bool = allocation is not None
        """Whether the caller's memory was found readable when it was first read."""
        self.writable: bool = allocation is not None
        """Whether it was found writable when it was first to be written."""
        self.bindings: dict[int, Binding] = {}
        self.blocks_model: int | None = None
        self._pointers: tuple[Callable[[], int], ...] = foreign.pointers([region.owner for region in regions])
        self._backend = backend
        self._dropped = dropped
        self._gate = threading.RLock()  # protects _claims, against the end of the entry and those who wait for it
        self._claims: set[object] = set()
        self._barred = False
        self._pins: set[Pin] = set()
        self._abandoned = False
        self._quarantine: set[asyncio.Future[None]] = set()
        self._waiters: set[asyncio.Future[None]] = set()
        self._gone: Callable[[Entry], None] | None = None

    @property
    def registered(self) -> bool:
        """Whether the memory belongs to the caller."""
        return self.allocation is None

    @property
    def quarantined(self) -> bool:
        """Whether something may still write here although its caller has gone on."""
        return bool(self._quarantine) or (self._abandoned and bool(self._pins))

    @property
    def busy(self) -> bool:
        return bool(self._pins) or bool(self._claims) or bool(self._quarantine)

    @property
    def referenced(self) -> bool:
        return self.alive or bool(self.bindings)

    def open_to(self, peer: int | None) -> bool:
        """Whether that cluster may know of it; None is this node itself."""
        return may_know(self.allowed, peer)

    def views(self) -> list[memoryview]:
        """LLM_KV_CACHE_NOT_EXIST once it is released: registered memory may then be gone."""
        if not self.alive:
            raise LLMException(f"cache {self.cache_id} was released", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
        self._stays()
        return self._backend.views(self.regions)

    def dropped(self) -> None:
        self._dropped(self.cache_id)

    def reach(self, *, writing: bool = False) -> None:
        """Before any use of the memory: LLM_PARAM_INVALID if there is none at an address that the caller gave, if it
        cannot be read, or written, or if a tensor of the caller's has its bytes elsewhere by now.
        """
        self._stays()
        if not (self.writable if writing else self.reached):
            self._backend.reach(self.regions, writing=writing)
            if writing:
                self.writable = True
            else:
                self.reached = True

    def moved(self, tensors: range) -> int | None:
        """From any thread: the first of these tensors that has its bytes no longer where it was registered. Its library
        did that, and has most likely freed them.
        """
        pointers, regions = self._pointers, self.regions
        if pointers:
            for i in tensors:
                if pointers[i]() != regions[i].address:
                    return i
        return None

    def _stays(self) -> None:
        moved = self.moved(range(len(self._pointers))) if self._pointers else None
        if moved is not None:
            raise LLMException(
                f"tensor {moved} of cache {self.cache_id} moved while it was registered: share_memory_(), a queue of "
                "torch.multiprocessing and a resize give a tensor other memory; register it afterwards",
                status_code=LLMStatusCode.LLM_PARAM_INVALID,
            )

    def let_go(self) -> None:
        """Nothing uses the caller's memory any more: it may end, whoever still holds this entry."""
        self._pointers = ()
        self.regions = tuple(replace(region, owner=None) for region in self.regions)

    def pin(self, cut: Callable[[], object]) -> Pin:
        pin = Pin(self, cut)
        self._pins.add(pin)
        return pin

    def claim(self, token: object) -> bool:
        """From any thread: use the memory for a moment, if nothing speaks against it. Give it back with `unclaim`."""
        with self._gate:
            if not self.alive or self._barred or self.quarantined:
                return False
            self._claims.add(token)
            return True

    def bar(self) -> None:
        """The node ends: nobody claims it any more. Handles and views keep the memory."""
        with self._gate:
            self._barred = True

    def unclaim(self, token: object, loop: asyncio.AbstractEventLoop) -> None:
        """From any thread, and more than once. Who waits for the memory is woken on the loop."""
        with self._gate:
            self._claims.discard(token)
            watched = bool(self._waiters) or self._gone is not None
        if watched:
            report_to(loop, self._wake)

    def end(self) -> None:
        """The id no longer refers to it, and nobody claims it any more."""
        with self._gate:
            self.alive = False

    def unpin(self, pin: Pin) -> None:
        self._pins.discard(pin)
        if not self._pins:
            self._abandoned = False
        self._wake()

    def abandon(self) -> None:
        """From any thread: a caller stops waiting for its pull to settle, so that what is pinned is quarantined."""
        self._abandoned = bool(self._pins)

    def quarantine(self, settled: asyncio.Future[None]) -> None:
        """Something may write here until `settled`; the memory is kept until then."""
        self._quarantine.add(settled)
        settled.add_done_callback(self._settled)

    def leak(self) -> None:
        """Something may use the memory for ever: it is never given back."""
        leaked.append(self)
        self._backend.leak(self.regions)

    def cut_pins(self) -> None:
        for pin in tuple(self._pins):
            pin.cut()

    async def idle(self, deadline: Deadline, *, writers_only: bool = False) -> bool:
        """Wait until nothing is pinned or quarantined (or, with `writers_only`, only the latter); False when the
        deadline came first.
        """
        while True:
            with self._gate:
                if not (self.quarantined if writers_only else self.busy):
                    return True
                waiter = asyncio.get_running_loop().create_future()
                self._waiters.add(waiter)
            try:
                if deadline.expired:
                    return False
                await asyncio.wait([waiter], timeout=deadline.remaining)
            finally:
                self._waiters.discard(waiter)

    def when_unused(self, gone: Callable[[Entry], None]) -> None:
        """Call `gone` once nothing refers to or uses the entry; at once when that is so already."""
        self._gone = gone
        self._wake()

    def _settled(self, settled: asyncio.Future[None]) -> None:
        self._quarantine.discard(settled)
        self._wake()

    def _wake(self) -> None:
        for waiter in tuple(self._waiters):
            resolve(waiter)
        if self._gone is not None and not self.referenced and not self.busy:
            gone, self._gone = self._gone, None
            gone(self)

    def __repr__(self) -> str:
        kind = "blocks" if self.blocks else "cache"
        return (
            f"<Entry {self.cache_id} {kind} keys={len(self.bindings)} pins={len(self._pins)}"
            f"{'' if self.alive else ' released'}{' quarantined' if self.quarantined else ''}>"
        )


def may_know(allowed: frozenset[int] | None, peer: int | None) -> bool:
    """Whether what is for those clusters (None: for all) exists for that one; None is this node itself."""
    return allowed is None or peer is None or peer in allowed


def _nothing() -> None:
    """What cutting a released pin does."""
