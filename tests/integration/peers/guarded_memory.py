"""A process whose caches lie in memory that may only be read, or not even that, or in tensors that moved after they
were registered: pulls, pushes and copies into and out of it. They may fail, and say so, but it must live.

    python -m tests.integration.peers.guarded_memory '{"way": "tcp", "nbytes": 1024, "kind": "constant"}'

`kind` is "constant" (read-only), "closed" (no access), or "shared" and "queued" (torch tensors that went to shared
memory meanwhile). Its last line is a list of [what, how it ended], as JSON.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import sys
from collections.abc import Awaitable
from typing import Any

import numpy as np

from kvpull_async import CacheDesc, CacheKeyByIdAndIndex, DataType, LLMException
from tests.conformance.api import Awaited
from tests.integration.pushing import PUSHER, RECEIVER, ends

SAID = {
    "constant": ("be written: it is read-only",),
    "closed": ("be written: it is read-only, or not accessible", "be read: it is not accessible"),
    "shared": ("moved while it was registered",),
    "queued": ("moved while it was registered",),
}


class Guarded:
    """Memory of one tensor, first as good as any: filled with 7, and guarded later."""

    def __init__(self, kind: str, nbytes: int) -> None:
        self._kind = kind
        if kind in ("constant", "closed"):
            self._room = mmap.mmap(-1, nbytes)
            self._array = np.frombuffer(self._room, np.uint8)
            self.registration: dict[str, Any] = {"addrs": [self._array.ctypes.data]}
        else:
            import torch

            self._array = np.full(nbytes, 7, np.uint8)
            self._tensor = torch.full((nbytes,), 7, dtype=torch.uint8)
            self.registration = {"tensors": [self._tensor]}
        self._array[:] = 7

    def guard(self) -> None:
        if self._kind == "shared":
            self._tensor.share_memory_()
        elif self._kind == "queued":
            import torch.multiprocessing

            self._queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
            self._queue.put(self._tensor)
        else:
            rights = mmap.PROT_READ if self._kind == "constant" else 0
            protect = ctypes.CDLL(None, use_errno=True).mprotect
            protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            assert protect(self._array.ctypes.data, self._array.nbytes, rights) == 0


async def ended(call: Awaitable[Any], kind: str) -> str:
    try:
        await call
    except LLMException as error:
        said = any(words in str(error) for words in SAID[kind])
        return error.status_code.name if said else f"{error.status_code.name}: {error}"
    return "done"


async def main(way: str, nbytes: int, kind: str) -> list[tuple[str, str]]:
    desc, found = CacheDesc(1, [1, nbytes], DataType.DT_UINT8), []
    async with ends(Awaited(), way) as e:
        near, far = e.pusher.cache_manager, e.receiver.cache_manager
        guards = [Guarded(kind, nbytes) for _ in range(2)]
        mine, theirs = [
            await manager.register_cache(desc, remote_accessible=True, **guard.registration)
            for manager, guard in zip((near, far), guards, strict=True)
        ]
        good, other = [await e.stock(node, desc) for node in (e.pusher, e.receiver)]
        other.fill(1)
        for guard in guards:
            guard.guard()

        def key(cluster: int, cache: Any) -> CacheKeyByIdAndIndex:
            return CacheKeyByIdAndIndex(cluster, cache.cache_id, 0)

        there = {"tensor_num_per_layer": 1}
        calls = {
            "pull into": lambda: near.pull_cache(key(RECEIVER, other.cache), mine),
            "push into": lambda: near.push_cache(key(RECEIVER, theirs), good.cache, **there),
            "copy into": lambda: near.copy_cache(mine, good.cache),
            "pull out of": lambda: near.pull_cache(key(RECEIVER, theirs), good.cache),
            "push out of": lambda: near.push_cache(key(RECEIVER, other.cache), mine, **there),
            "copy out of": lambda: near.copy_cache(good.cache, mine),
            "push among good": lambda: far.push_cache(key(PUSHER, good.cache), other.cache, **there),
        }
        for name, call in calls.items():
            found.append((name, await ended(call(), kind)))
        found.append(("holds", str(sorted({*good.arrays[0].ravel().tolist(), *other.arrays[0].ravel().tolist()}))))
    return found


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    told = asyncio.run(main(asked["way"], asked["nbytes"], asked["kind"]))
    sys.stdout.write(json.dumps(told) + "\n")
