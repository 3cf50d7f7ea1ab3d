"""Nodes whose Placement.DEVICE is the memory of an emulated NPU, and a wire of a chosen speed. It must not measure.

The emulator is that of the tests, so this needs a checkout of the sources, and gcc. It copies with the processor, at a
pace that is set; what a real NPU would do to the machine meanwhile is not in any figure.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kv_nodes import NO_ID, PULLER_CLUSTER, AwaitingNode, BlockingNode, KvSource, Node, entry_key
from kvpull_async import BlocksCacheKey, Cache, CacheKey, LLMRole, Placement
from kvpull_async.memory.base import Batches, MemoryBackend, Region, Until
from kvpull_async.testing.faults import WrappedMemory
from processes import Unavailable
from workloads import Arena, Shape, Workload, wrong_bytes

__all__ = ["BATCHES", "AwaitingNpu", "BlockingNpu", "NpuPuller", "WireSource", "emulator", "npu_environ"]

BATCHES: Final = ("aclrtMemcpyBatch", "aclrtMemcpyBatchAsync")
"""What copies many rows with one call, where a release has it."""
_CHECKOUT: Final = Path(__file__).parents[1]
_LATE: Final = 0.004
"""Seconds that a wire may make up for, since a thread that sleeps wakes late."""


def _emulation() -> Any:
    if not (_CHECKOUT / "tests" / "acl_emulator").is_dir():
        raise Unavailable("no emulated NPU: it is in the sources of the project, beside the benchmarks")
    if str(_CHECKOUT) not in sys.path:
        sys.path.append(str(_CHECKOUT))
    return importlib.import_module("tests.acl_emulator")


def npu_environ(*, bandwidth: int = 0, checks: bool, without: Sequence[str] = ()) -> dict[str, str]:
    """What a process needs to find an emulated NPU, without these functions, that copies at `bandwidth` bytes/s.

    `checks`: it notices whatever a program does that hardware forbids, and is slow.
    """
    try:
        home = _emulation().build(without=without)
    except RuntimeError as error:
        raise Unavailable(f"no emulated NPU: {error}") from error
    settings = f"bandwidth={bandwidth} checks={int(checks)}" + ("" if checks else " delay_us=0")
    return {"ASCEND_HOME_PATH": str(home), "ACL_EMULATOR": settings}


def emulator() -> Any:
    """The control of this process' NPU."""
    return _emulation().Emulator(Path(os.environ["ASCEND_HOME_PATH"]))


def copied_key(cluster_id: int) -> CacheKey:
    """Of what a source has copied from its NPU to its host memory."""
    return CacheKey(cluster_id, NO_ID, 0, 8)


def _seen(cache: Cache) -> Arena:
    """Device memory with the emulator's eye."""
    desc, eye = cache.cache_desc, emulator()
    tensors: list[NDArray[np.uint8]] = [eye.memory(address, desc.size) for address in cache.tensor_addrs]
    return Arena(tensors)


class _NpuNode(Node):
    """Its caches are on the NPU unless HOST is asked for."""

    def _with_arena(self, cache: Cache) -> tuple[Cache, Arena]:
        return (cache, _seen(cache)) if cache.cache_desc.placement is Placement.DEVICE else super()._with_arena(cache)


class AwaitingNpu(_NpuNode, AwaitingNode):
    """Through `kvpull_async`."""


class BlockingNpu(_NpuNode, BlockingNode):
    """Through `kvpull_sync`."""


class Wire(WrappedMemory):
    """A memory whose bytes leave it at `rate` bytes/s, as through a network card: a piece comes when its time is over.
    0: at once. One transfer at a time.
    """

    def __init__(self, inner: MemoryBackend, *, rate: int) -> None:
        super().__init__(inner, kind="paced")
        self.direct = False  # it sleeps
        self.rate = rate

    def lending(self, regions: Sequence[Region], segments: NDArray[np.int64], *, until: Until | None = None) -> Batches:
        lent = super().lending(regions, segments, until=until)
        return _paced(lent, self.rate) if self.rate else lent


def _paced(lent: Batches, rate: int) -> Batches:
    clock = time.perf_counter
    due = clock()
    with closing(lent):
        for batch in lent:
            due = max(due, clock() - _LATE) + sum(view.nbytes for view in batch) / rate
            time.sleep(max(0.0, due - clock()))
            yield batch


class WireSource(KvSource):
    """A prefill node behind such a wire. What is on its NPU, if it has one, can be copied to its host memory, which is
    offered under `copied_key`.
    """

    def __init__(self, *, npu: bool, rate: int = 0, **properties: Any) -> None:
        backend = "acl" if npu else "host"
        super().__init__(BlockingNpu if npu else BlockingNode, allocated=True, device_backend=backend, **properties)
        self._npu = npu
        self._rate = rate

    def open(self, shape: Shape, works: Sequence[Workload], *, seed: int) -> Any:
        node = self._listen(shape)
        registry = node.datadist._core.engine.registry
        registry.backend = self._wire = Wire(registry.backend, rate=self._rate)
        self._entries = node.entries(None, entry_key(self._cluster_id))
        self._arenas += [self._entries[1], node.blocks(None, BlocksCacheKey(self._cluster_id))[1]]
        for arena in self._arenas:
            arena.fill(seed)
        if self._npu:
            self._copied = node.entries(None, copied_key(self._cluster_id), placement=Placement.HOST)
        return self._cluster_id, tuple(node.datadist.listen_address)

    def copy_out(self) -> float:
        """Entry 0 of the NPU's cache into the host's; the seconds that this took. It does not pass the wire."""
        assert self.node is not None
        cache, arena = self._copied
        arena.poison()
        rate, self._wire.rate = self._wire.rate, 0
        began = time.perf_counter()
        self.node.manager.copy_cache(cache, self._entries[0])
        seconds = time.perf_counter() - began
        self._wire.rate = rate
        return seconds


class NpuPuller:
    """A decode node with an NPU, whose caches are there (True) and in host memory (False), linked to some sources."""

    def __init__(self, shape: Shape, works: Mapping[str, Workload], *, seed: int, **properties: Any) -> None:
        self._shape, self._works, self._seed = shape, works, seed
        self._node = AwaitingNpu(LLMRole.DECODER, PULLER_CLUSTER, shape=shape, device_backend="acl", **properties)
        self._caches: dict[tuple[bool, bool], tuple[Cache, Arena]] = {}
        for on_npu, placement in ((True, Placement.DEVICE), (False, Placement.HOST)):
            self._caches[on_npu, False] = self._node.entries(None, placement=placement)
            self._caches[on_npu, True] = self._node.blocks(None, placement=placement)
        for _, arena in self._caches.values():
            arena.poison()

    def link(self, cluster_id: int, address: tuple[str, int]) -> None:
        self._node.link(cluster_id, address)

    def pull(self, name: str, cluster_id: int, on_npu: bool, count: int = 1) -> list[float]:
        """The seconds of each of so many pulls of a workload."""
        work = self._works[name]
        cache = self._caches[on_npu, work.in_blocks][0]
        calls = [self._node.call(pull, cache, cluster_id=cluster_id) for pull in work.pulls]
        return self._node.repeat(calls, count, budget=work.budget)

    def pull_copied(self, cluster_id: int) -> list[float]:
        """Into host memory what the source has copied from its NPU; seconds."""
        cache, key = self._caches[False, False][0], copied_key(cluster_id)
        call = partial(self._node.manager.pull_cache, key, cache, 0, self._shape.entry_nbytes)
        return self._node.repeat([call], 1, budget=1.0)

    def copy_in(self) -> float:
        """Entry 0 of the host's cache into the NPU's; the seconds that this took."""
        began = time.perf_counter()
        self._node.do(self._node.manager.copy_cache(self._caches[True, False][0], self._caches[False, False][0]))
        return time.perf_counter() - began

    def check(self, name: str, on_npu: bool) -> None:
        """RuntimeError unless every byte is as after that pull, and none else was touched. Poisons it again."""
        work = self._works[name]
        arena = self._caches[on_npu, work.in_blocks][1]
        if wrong := wrong_bytes(arena, work.pulls, shape=self._shape, seed=self._seed):
            raise RuntimeError(f"{wrong} bytes are wrong after {name}")
        arena.poison()

    def close(self) -> None:
        self._node.close()
