"""Small pulls in the two ways that serving programs make them: by cache id without asking, and by a key once.

It must not measure anything itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from kv_nodes import SOURCE_CLUSTER, KvPuller, KvSource
from kvpull_async import CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType
from workloads import Arena, EntryPull, Shape, Workload

__all__ = ["ConsumedPuller", "ConsumedSource", "RemotePuller", "RemoteSource"]

KEYS: Final = 2400
"""Of each workload: three attempts, their warm-ups and the check take fewer."""


class RemoteSource(KvSource):
    """Tells the id of its cache; with remote cache access on, pulls name that and no key."""

    def open(self, shape: Shape, works: Sequence[Workload], *, seed: int) -> Any:
        node = self._listen(shape)
        cache, arena = node.entries(None)
        arena.fill(seed)
        self._arenas.append(arena)
        return self._cluster_id, tuple(node.datadist.listen_address), cache.cache_id


class RemotePuller(KvPuller):
    def open(self, shape: Shape, works: Sequence[Workload], *, told: Any) -> None:
        super().open(shape, works, told=told)
        self._key = CacheKeyByIdAndIndex(self._cluster_id, told[2], 0)

    def _calls(self, work: Workload, mode: str) -> list[Callable[[], Any]]:
        return [partial(_call(self, pull), self._key) for pull in _entry_pulls(work)]


class ConsumedSource(KvSource):
    """A batch entry with a key of its own for each pull there will be."""

    def open(self, shape: Shape, works: Sequence[Workload], *, seed: int) -> Any:
        node = self._listen(shape)
        example = np.zeros((shape.tensors, shape.tensor_nbytes), np.uint8)
        Arena(list(example)).fill(seed)
        for place, work in enumerate(works):
            for pull in _entry_pulls(work):
                keys = [CacheKey(SOURCE_CLUSTER, req_id) for req_id in _req_ids(place)]
                desc = CacheDesc(1, [KEYS, pull.nbytes // 2], DataType.DT_FLOAT16)
                cache = node.do(node.manager.allocate_cache(desc, keys))
                entries = node.manager.get_cache_tensors(cache, 0)[0].numpy().view(np.uint8)
                entries[:] = example[pull.src.start, : pull.nbytes]
                self._arenas.append(Arena([entries.reshape(-1)]))
        return self._cluster_id, tuple(node.datadist.listen_address)


class ConsumedPuller(KvPuller):
    def open(self, shape: Shape, works: Sequence[Workload], *, told: Any) -> None:
        super().open(shape, works, told=told)
        self._keys = {
            work.name: iter([CacheKey(SOURCE_CLUSTER, req_id) for req_id in _req_ids(place)])
            for place, work in enumerate(works)
        }

    def _calls(self, work: Workload, mode: str) -> list[Callable[[], Any]]:
        keys = self._keys[work.name]
        moved = [_FromFirst(pull.src, pull.dst, pull.nbytes) for pull in _entry_pulls(work)]
        return [partial(_with_next, _call(self, pull), keys) for pull in moved]


@dataclass(frozen=True)
class _FromFirst(EntryPull):
    """The same destination, out of a cache of one tensor."""

    def layers(self) -> dict[str, Any]:
        return {**super().layers(), "src_layer_range": range(1)}


def _req_ids(place: int) -> range:
    return range(1 + place * KEYS, 1 + (place + 1) * KEYS)


def _entry_pulls(work: Workload) -> list[EntryPull]:
    return [pull for pull in work.pulls if isinstance(pull, EntryPull)]


def _call(puller: KvPuller, pull: EntryPull) -> Callable[[Any], Any]:
    """`pull_cache` of this range, for a key that is yet to come."""
    manager, cache = puller.node.manager, puller.entries
    said = {"batch_index": 0, "size": pull.nbytes, **pull.layers()}
    return lambda key: manager.pull_cache(key, cache, **said)


def _with_next(call: Callable[[Any], Any], keys: Any) -> Any:
    return call(next(keys))
