"""This node's caches: ids, keys, references, pins, quarantine. It must not know links, frames or threads.

Used by the core's loop only; every change is synchronous, so no one sees a half-changed table. A cache lives while its
id (until it is deallocated) or one of its keys refers to it, and its memory stays while anything is pinned.
"""

from __future__ import annotations

import asyncio
import copy
import heapq
import itertools
import queue
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvpull_async._deadline import Deadline
from kvpull_async.memory.base import Allocation, MemoryBackend, Region
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import BlocksCacheKey, CacheDesc, CacheKey

__all__ = ["Binding", "Entry", "Pin", "Registry"]

KeyId = tuple[str, int, int]
"""A key as the tables hold it: "request" or "prefix", its id, the model id."""


class Pin:
    """One use of an entry's memory: a transfer that reads it (source) or writes it (destination).

    `cut` is called when the entry is being taken away; it must not wait or raise, and release the pin soon.
    """

    def __init__(self, entry: Entry, cut: Callable[[], object]) -> None:
        self.cut = cut
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
    missing: set[int] = field(default_factory=set)
    """Tensors nobody has pulled yet; the key is consumed when none is left."""


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
    ) -> None:
        self.cache_id = cache_id
        self.desc = desc
        self.entry_nbytes = desc.entry_nbytes
        self.regions = regions
        self.blocks = blocks
        self.allocation = allocation
        self.remote_accessible = remote_accessible
        self.alive = True
        """Whether the id still refers to it, that is, until it is deallocated or unregistered."""
        self.bindings: dict[int, Binding] = {}
        self.blocks_model: int | None = None
        self._backend = backend
        self._dropped = dropped
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
        return bool(self._pins) or bool(self._quarantine)

    @property
    def referenced(self) -> bool:
        return self.alive or bool(self.bindings)

    def views(self) -> list[memoryview]:
        """LLM_KV_CACHE_NOT_EXIST once it is released: registered memory may then be gone."""
        if not self.alive:
            raise LLMException(f"cache {self.cache_id} was released", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
        return self._backend.views(self.regions)

    def dropped(self) -> None:
        self._dropped(self.cache_id)

    def pin(self, cut: Callable[[], object]) -> Pin:
        pin = Pin(self, cut)
        self._pins.add(pin)
        return pin

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

    def cut_pins(self) -> None:
        for pin in tuple(self._pins):
            pin.cut()

    async def idle(self, deadline: Deadline, *, writers_only: bool = False) -> bool:
        """Wait until nothing is pinned or quarantined (or, with `writers_only`, only the latter); False when the
        deadline came first.
        """
        while self.quarantined if writers_only else self.busy:
            if deadline.expired:
                return False
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait([waiter], timeout=deadline.remaining)
            finally:
                self._waiters.discard(waiter)
        return True

    def when_unused(self, gone: Callable[[Entry], None]) -> None:
        """Call `gone` once nothing refers to or uses the entry; at once when that is so already."""
        self._gone = gone
        self._wake()

    def _settled(self, settled: asyncio.Future[None]) -> None:
        self._quarantine.discard(settled)
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        if self._gone is not None and not self.referenced and not self.busy:
            gone, self._gone = self._gone, None
            gone(self)

    def __repr__(self) -> str:
        kind = "blocks" if self.blocks else "cache"
        return (
            f"<Entry {self.cache_id} {kind} keys={len(self.bindings)} pins={len(self._pins)}"
            f"{'' if self.alive else ' released'}{' quarantined' if self.quarantined else ''}>"
        )


class Registry:
    """The tables by which caches are found, here and by peers."""

    def __init__(self, backend: MemoryBackend, *, dropped: Callable[[int], None] | None = None) -> None:
        self.backend = backend
        self.closed = False
        self.drops: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Ids of caches whose handle was garbage-collected; `drain_drops` deallocates them."""
        self._dropped = dropped or self.drops.put
        self._ids = itertools.count(1)
        self._generations = itertools.count(1)
        self._entries: dict[int, Entry] = {}
        self._keys: dict[KeyId, Binding] = {}
        self._blocks: dict[int, Entry] = {}
        self._bindings: dict[int, Binding] = {}

    # -- making and releasing ---------------------------------------------------------------------------------------

    def check_keys(
        self,
        desc: CacheDesc,
        keys: Sequence[CacheKey],
        *,
        bound_status: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID,
    ) -> None:
        """The rules of allocation: at most one key per batch entry, no key bound twice; padding keys bind nothing."""
        if len(keys) > desc.entries:
            raise _invalid(f"cache_keys: {len(keys)} keys for {desc.entries} batch entries")
        names = [key_id(key) for key in keys if not key.is_padding]
        if len(set(names)) != len(names):
            raise _invalid("cache_keys: the same key is given twice")
        for name in names:
            if name in self._keys:
                raise LLMException(f"cache_keys: {describe(name)} is bound already", status_code=bound_status)

    def add(
        self,
        desc: CacheDesc,
        regions: tuple[Region, ...],
        *,
        blocks: bool,
        allocation: Allocation | None = None,
        remote_accessible: bool = True,
    ) -> Entry:
        entry = Entry(
            next(self._ids),
            copy.copy(desc),
            regions,
            backend=self.backend,
            blocks=blocks,
            allocation=allocation,
            remote_accessible=remote_accessible,
            dropped=self._handle_dropped,
        )
        self._entries[entry.cache_id] = entry
        return entry

    def bind(self, entry: Entry, keys: Iterable[CacheKey]) -> None:
        """Bind the i-th key to batch entry i. A key that is bound already keeps its binding (only registered caches
        come here unchecked, and there the first registration wins).
        """
        for index, key in enumerate(keys):
            name = key_id(key)
            if key.is_padding or name in self._keys:
                continue
            tensors = set(range(entry.desc.num_tensors))
            binding = Binding(entry, index, name, next(self._generations), tensors)
            self._keys[name] = entry.bindings[index] = self._bindings[binding.generation] = binding

    def bind_blocks(self, entry: Entry, key: BlocksCacheKey) -> None:
        """A blocks key bound again moves to the newer cache."""
        entry.blocks_model = key.model_id
        self._blocks[key.model_id] = entry

    def release(self, entry: Entry) -> None:
        """The id is given up. Keys of an allocated cache keep it until they are consumed or removed; a registered
        cache and a blocks cache lose theirs at once.
        """
        entry.alive = False
        if entry.blocks or entry.registered:
            for binding in list(entry.bindings.values()):
                self._unbind(binding)
        if entry.blocks_model is not None and self._blocks.get(entry.blocks_model) is entry:
            del self._blocks[entry.blocks_model]
        entry.when_unused(self._forget)

    def discard(self, entry: Entry) -> None:
        """As if it had never been made: its keys go, too."""
        for binding in list(entry.bindings.values()):
            self._unbind(binding)
        self.release(entry)

    def remove_key(self, key: CacheKey) -> None:
        """Unknown keys and keys of registered caches are left alone."""
        binding = self._keys.get(key_id(key))
        if binding is not None and not binding.entry.registered:
            self._unbind(binding)

    def consume(self, generation: int, tensors: Iterable[int]) -> bool:
        """Tick off pulled tensors of the binding of that generation; True when that removed its key."""
        binding = self._bindings.get(generation)
        if binding is None:
            return False
        binding.missing.difference_update(tensors)
        if binding.missing:
            return False
        self._unbind(binding)
        return True

    def drain_drops(self) -> None:
        """Release the caches whose handles were dropped."""
        while not self.drops.empty():
            entry = self._entries.get(self.drops.get())
            if entry is not None and entry.alive:
                self.release(entry)

    def close(self) -> None:
        """Forget every cache: from now on its memory lives only as long as handles, and views of it, do."""
        self.closed = True
        for entry in self._entries.values():
            entry.bindings.clear()
        self._entries.clear()
        self._keys.clear()
        self._blocks.clear()
        self._bindings.clear()

    def _handle_dropped(self, cache_id: int) -> None:
        if not self.closed:
            self._dropped(cache_id)

    # -- finding ----------------------------------------------------------------------------------------------------

    def local(self, cache_id: int) -> Entry | None:
        """A cache of this node by id, for this node's own use."""
        entry = self._entries.get(cache_id)
        return entry if entry is not None and entry.alive else None

    def find(self, cache_id: int) -> Entry | None:
        """By id, also when released but still in use."""
        return self._entries.get(cache_id)

    def find_key(self, name: KeyId) -> Binding | None:
        return self._keys.get(name)

    def find_blocks(self, model_id: int) -> Entry | None:
        return self._blocks.get(model_id)

    def find_id(self, cache_id: int, index: int) -> tuple[Entry, Binding | None] | None:
        """By id, as peers ask: also after deallocation while keys are left; None outside the batch."""
        entry = self._entries.get(cache_id)
        if entry is None or not entry.referenced or not 0 <= index < entry.desc.entries:
            return None
        return entry, entry.bindings.get(index)

    def nearest_keys(self, name: KeyId, *, limit: int = 3) -> list[str]:
        """Keys that resemble `name`, for the message that says it is unknown."""
        kind, number, model = name
        some = itertools.islice(self._keys, 1000)  # a miss must not hold the loop, however many keys there are
        nearest = heapq.nsmallest(limit, some, key=lambda k: (k[0] != kind, k[2] != model, abs(k[1] - number)))
        return [describe(k) for k in nearest]

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    # -- inside -----------------------------------------------------------------------------------------------------

    def _unbind(self, binding: Binding) -> None:
        self._keys.pop(binding.key, None)
        self._bindings.pop(binding.generation, None)
        entry = binding.entry
        entry.bindings.pop(binding.index, None)
        if not entry.referenced:
            entry.when_unused(self._forget)

    def _forget(self, entry: Entry) -> None:
        if self._entries.pop(entry.cache_id, None) is not None and entry.allocation is not None:
            self.backend.free(entry.allocation)

    def __repr__(self) -> str:
        return f"<Registry caches={len(self._entries)} keys={len(self._keys)} blocks={len(self._blocks)}>"


def _nothing() -> None:
    """What cutting a released pin does."""


def key_id(key: CacheKey) -> KeyId:
    if key.is_prefix:
        return ("prefix", key.prefix_id, key.model_id)
    return ("request", key.req_id, key.model_id)


def describe(name: KeyId) -> str:
    kind, number, model = name
    return f"{'prefix_id' if kind == 'prefix' else 'req_id'} {number} of model {model}"


def _invalid(message: str) -> LLMException:
    return LLMException(message, status_code=LLMStatusCode.LLM_PARAM_INVALID)
