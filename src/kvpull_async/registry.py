"""This node's caches: by id, by key, and who may have them. It must not know links, frames or threads.

Used by the core's loop only; every change is synchronous, so no one sees a half-changed table. A cache lives while its
id (until it is deallocated) or one of its keys refers to it, and its memory stays while anything is pinned.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import queue
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvpull_async import fates
from kvpull_async.addresses import Addresses
from kvpull_async.fates import Fates
from kvpull_async.held import Binding, Entry, KeyId, Pin
from kvpull_async.leases import Leases
from kvpull_async.memory.base import Allocation, MemoryBackend, Region
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import BlocksCacheKey, CacheDesc, CacheKey

__all__ = ["Binding", "Entry", "Pin", "Registry"]


class Registry:
    """The tables by which caches are found, here and by peers.

    A `peer` is the cluster that asks: what is not open to it does not exist for it. None is this node itself. `expired`
    is told of keys whose lease has ended.
    """

    def __init__(
        self,
        backend: MemoryBackend,
        *,
        dropped: Callable[[int], None] | None = None,
        expired: Callable[[list[Binding]], object] | None = None,
    ) -> None:
        self.backend = backend
        self.closed: bool = False
        self.drops: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Ids of caches whose handle was garbage-collected; `drain_drops` deallocates them."""
        self._dropped = dropped or self.drops.put
        self._ids = itertools.count(1)
        self._generations = itertools.count(1)
        self._entries: dict[int, Entry] = {}
        self._keys: dict[KeyId, Binding] = {}
        self._blocks: dict[int, Entry] = {}
        self._bindings: dict[int, Binding] = {}
        self._addresses = Addresses()
        self._watches: dict[KeyId, dict[Callable[[], None], int | None]] = {}
        """What is called when that is here, and for which peer."""
        self._fates = Fates()
        self._told = expired or _nobody
        self._leases = Leases(self._expire, self._told)

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
            if self.find_key(name) is not None:
                raise LLMException(f"cache_keys: {describe(name)} is bound already", status_code=bound_status)

    def add(
        self,
        desc: CacheDesc,
        regions: tuple[Region, ...],
        *,
        blocks: bool,
        allocation: Allocation | None = None,
        remote_accessible: bool = True,
        allowed: frozenset[int] | None = None,
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
            allowed=allowed,
        )
        self._entries[entry.cache_id] = entry
        if remote_accessible:
            self._addresses.add(entry)
        for index in range(entry.desc.entries) if self._watches else ():
            self._published(("cache", entry.cache_id, index), entry)
        return entry

    def bind(self, entry: Entry, keys: Iterable[CacheKey], *, lease: float | None = None) -> None:
        """Bind the i-th key to batch entry i, each for `lease` s, if that is given. A key that is bound already keeps
        its binding (only registered caches come here unchecked, and there the first registration wins).
        """
        for index, key in enumerate(keys):
            name = key_id(key)
            if key.is_padding or self.find_key(name) is not None:
                continue
            binding = Binding(entry, index, name, next(self._generations))
            self._keys[name] = entry.bindings[index] = self._bindings[binding.generation] = binding
            if lease is not None:
                self._leases.set(binding, lease)
            self._published(name, entry)

    def bind_blocks(self, entry: Entry, key: BlocksCacheKey) -> None:
        """A blocks key bound again moves to the newer cache."""
        entry.blocks_model = key.model_id
        self._blocks[key.model_id] = entry
        self._published(("blocks", 0, key.model_id), entry)

    def release(self, entry: Entry) -> None:
        """The id is given up. Keys of an allocated cache keep it until they are consumed or removed; a registered
        cache and a blocks cache lose theirs at once.
        """
        entry.end()
        self._addresses.remove(entry)
        if entry.blocks or entry.registered:
            for binding in list(entry.bindings.values()):
                self._unbind(binding, fates.UNMADE)
        if entry.blocks_model is not None and self._blocks.get(entry.blocks_model) is entry:
            del self._blocks[entry.blocks_model]
        entry.when_unused(self._forget)

    def discard(self, entry: Entry) -> None:
        """As if it had never been made: its keys go, too."""
        for binding in list(entry.bindings.values()):
            self._unbind(binding, fates.UNMADE)
        self.release(entry)

    def remove_key(self, key: CacheKey) -> None:
        """Unknown keys and keys of registered caches are left alone."""
        binding = self._keys.get(key_id(key))
        if binding is not None and not binding.entry.registered:
            self.give_up(binding)

    def give_up(self, binding: Binding) -> None:
        """Nobody is to pull that key any more."""
        self._unbind(binding, fates.RELEASED)

    def lease(self, binding: Binding, seconds: float, *, at_least: bool = False) -> None:
        """The key ends so many seconds from now. With `at_least` it is not to end earlier than it would have."""
        left = None if binding.ends is None else binding.ends - time.monotonic()
        if not at_least or (left is not None and left < seconds):
            self._leases.set(binding, seconds)

    def consume(self, generation: int, tensors: Iterable[int]) -> bool:
        """Tick off pulled tensors of the binding of that generation; True when that removed its key."""
        binding = self._bindings.get(generation)
        if binding is None:
            return False
        if binding.tick_off(tensors):
            return False
        self._unbind(binding, fates.PULLED)
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
        self._addresses.clear()
        self._keys.clear()
        self._blocks.clear()
        self._bindings.clear()
        self._leases.clear()

    def _handle_dropped(self, cache_id: int) -> None:
        if not self.closed:
            self._dropped(cache_id)

    # -- finding ----------------------------------------------------------------------------------------------------

    def local(self, cache_id: int, *, peer: int | None = None) -> Entry | None:
        """A cache of this node by id, for this node's own use, or to be written by a peer."""
        entry = self._entries.get(cache_id)
        if entry is None or not entry.alive or not (entry.allowed is None or entry.open_to(peer)):
            return None
        return entry

    def find(self, cache_id: int) -> Entry | None:
        """By id, also when released but still in use."""
        return self._entries.get(cache_id)

    def find_key(self, name: KeyId, *, peer: int | None = None) -> Binding | None:
        binding = self._keys.get(name)
        if binding is None or not (binding.ends is None or self._lasts(binding)):
            return None
        return binding if binding.entry.allowed is None or binding.entry.open_to(peer) else None

    def find_blocks(self, model_id: int, *, peer: int | None = None) -> Entry | None:
        entry = self._blocks.get(model_id)
        return entry if entry is None or entry.allowed is None or entry.open_to(peer) else None

    def find_id(self, cache_id: int, index: int, *, peer: int | None = None) -> tuple[Entry, Binding | None] | None:
        """By id, as peers ask: also after deallocation while keys are left; None outside the batch."""
        entry = self._entries.get(cache_id)
        if entry is None or not 0 <= index < entry.desc.entries:
            return None
        if entry.allowed is not None and not entry.open_to(peer):
            return None
        if not entry.alive:
            while entry.bindings and self.bound(entry, next(iter(entry.bindings))) is None:
                pass  # that key is gone: those whose time is over do not keep the cache
            if not entry.bindings:
                return None
        return entry, self.bound(entry, index)

    def bound(self, entry: Entry, index: int) -> Binding | None:
        """The key of a batch entry."""
        binding = entry.bindings.get(index)
        return binding if binding is None or binding.ends is None or self._lasts(binding) else None

    def find_addresses(
        self, addresses: NDArray[np.int64], nbytes: int, *, peer: int | None = None
    ) -> list[tuple[Entry, Region] | None]:
        """For each address the remote accessible cache, and its tensor, that has `nbytes` bytes from there on."""
        return self._addresses.find(addresses, nbytes, peer=peer)

    def missing(self, name: KeyId, *, peer: int | None = None, near: bool = True) -> str:
        """That a key is not here: what became of it, and, with `near`, which are here that resemble it."""
        words = f"{describe(name)} is not here: {self._fates.of(name, peer=peer)}"
        return f"{words} (held: {', '.join(self.nearest_keys(name, peer=peer)) or 'none at all'})" if near else words

    def nearest_keys(self, name: KeyId, *, limit: int = 3, peer: int | None = None) -> list[str]:
        """Keys that resemble `name`, for the message that says it is unknown."""
        kind, number, model = name
        some = itertools.islice(self._keys.values(), 1000)  # a miss must not hold the loop, however many keys there are
        known = [b.key for b in some if b.entry.open_to(peer) and not self._leases.over(b)]
        nearest = heapq.nsmallest(limit, known, key=lambda k: (k[0] != kind, k[2] != model, abs(k[1] - number)))
        return [describe(k) for k in nearest]

    # -- waiting ----------------------------------------------------------------------------------------------------

    def watch(self, name: KeyId, appeared: Callable[[], None], *, peer: int | None = None) -> Callable[[], None]:
        """Call `appeared`, which must not wait, once what is named is here, at once if it is: a key of a batch entry,
        ("blocks", 0, model id) or ("cache", cache id, batch index). The result takes that back.
        """
        if self._is_here(name, peer):
            appeared()
            return _nothing
        watches = self._watches.setdefault(name, {})
        watches[appeared] = peer

        def forget() -> None:
            watches.pop(appeared, None)
            if not watches and self._watches.get(name) is watches:
                del self._watches[name]

        return forget

    def _is_here(self, name: KeyId, peer: int | None) -> bool:
        kind, number, model = name
        if kind == "cache":
            return self.find_id(number, model, peer=peer) is not None
        if kind == "blocks":
            return self.find_blocks(model, peer=peer) is not None
        return self.find_key(name, peer=peer) is not None

    def _published(self, name: KeyId, entry: Entry) -> None:
        watches = self._watches.get(name, {})
        called = [appeared for appeared, peer in watches.items() if entry.open_to(peer)]
        for appeared in called:
            del watches[appeared]
        if called and not watches:
            del self._watches[name]
        for appeared in called:
            appeared()

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    # -- inside -----------------------------------------------------------------------------------------------------

    def _lasts(self, binding: Binding) -> bool:
        """False, and the key is gone, when its time is over."""
        if not self._leases.over(binding):
            return True
        self._expire(binding)
        self._told([binding])
        return False

    def _expire(self, binding: Binding) -> None:
        self._unbind(binding, fates.EXPIRED)

    def _unbind(self, binding: Binding, what: str) -> None:
        since = binding.ends if what == fates.EXPIRED else None
        self._fates.note(binding.key, what, binding.entry, since=since)
        self._leases.drop(binding)
        self._keys.pop(binding.key, None)
        self._bindings.pop(binding.generation, None)
        entry = binding.entry
        entry.bindings.pop(binding.index, None)
        if not entry.referenced:
            entry.when_unused(self._forget)

    def _forget(self, entry: Entry) -> None:
        if self._entries.pop(entry.cache_id, None) is None:
            return
        if entry.allocation is not None:
            self.backend.free(entry.allocation)
        else:
            self.backend.disown(entry.regions)
            entry.let_go()

    def __repr__(self) -> str:
        return f"<Registry caches={len(self._entries)} keys={len(self._keys)} blocks={len(self._blocks)}>"


def _nothing() -> None:
    """There is nothing to forget."""


def _nobody(bindings: list[Binding]) -> None:
    """Nobody is told."""


def key_id(key: CacheKey) -> KeyId:
    if key.is_prefix:
        return ("prefix", key.prefix_id, key.model_id)
    return ("request", key.req_id, key.model_id)


def describe(name: KeyId) -> str:
    kind, number, model = name
    return f"{'prefix_id' if kind == 'prefix' else 'req_id'} {number} of model {model}"


def _invalid(message: str) -> LLMException:
    return LLMException(message, status_code=LLMStatusCode.LLM_PARAM_INVALID)
