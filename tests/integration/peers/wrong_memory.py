"""A process that pulls into and out of registered addresses where nothing is, any more or at all. It may fail, and say
so, but it must live.

    python -m tests.integration.peers.wrong_memory '{"transport": "tcp", "entry_nbytes": 1024, "remote_access": false}'

Its last line is a list of [what, status of the pull into or out of it], as JSON.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import sys
from typing import Any

import numpy as np

from kvpull_async import CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, LLMException
from tests.duo import PROMPT, Duo, duo


def unmapped(nbytes: int) -> int:
    """An address that was good a moment ago."""
    room = mmap.mmap(-1, nbytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    room.close()
    return address


class Scene:
    """Two nodes, each with two tensors of good memory; keys are made for the way that they pull."""

    def __init__(self, pair: Duo, desc: CacheDesc, *, remote_access: bool) -> None:
        self._desc = desc
        self._remote_access = remote_access
        self._sides = {"source": pair.prompt.cache_manager, "destination": pair.decoder.cache_manager}
        self._requests = 0
        self._memory: list[Any] = []

    async def register(self, side: str, addresses: list[int] | None = None) -> tuple[Any, Any]:
        """The cache, and its key if it is on the source's side."""
        good = [np.ones(self._desc.size, np.uint8) for _ in range(2)]
        self._memory.append(good)
        self._requests += 1
        key = CacheKey(PROMPT, self._requests)
        keys = [key] if side == "source" and not self._remote_access else []
        cache = await self._sides[side].register_cache(
            self._desc, addresses or [array.ctypes.data for array in good], keys
        )
        return cache, CacheKeyByIdAndIndex(PROMPT, cache.cache_id) if self._remote_access else key

    async def pull(self, key: Any, cache: Any) -> str:
        try:
            await self._sides["destination"].pull_cache(key, cache)
        except LLMException as error:
            return error.status_code.name if "no memory at the address" in str(error) else str(error)
        return "pulled"


async def main(transport: str, entry_nbytes: int, *, remote_access: bool) -> list[tuple[str, str]]:
    desc = CacheDesc(2, [1, entry_nbytes], DataType.DT_UINT8)
    mode = {"local_comm_res": ""} if remote_access else {"enable_cache_manager": True}
    found = []
    async with duo(transport=transport, **mode) as pair:
        scene = Scene(pair, desc, remote_access=remote_access)
        (_, key), (cache, _) = [await scene.register(side) for side in ("source", "destination")]
        found.append(("good", await scene.pull(key, cache)))
        for name, address in (("tiny", 4096), ("high", 2**64 - 2**30), ("gone", unmapped(max(entry_nbytes, 1 << 16)))):
            good = np.ones(entry_nbytes, np.uint8)
            bad, _ = await scene.register("destination", [good.ctypes.data, address])
            found.append((f"into {name}", await scene.pull(key, bad)))
            _, wrong = await scene.register("source", [address, good.ctypes.data])
            found.append((f"out of {name}", await scene.pull(wrong, cache)))
        found.append(("good again", await scene.pull(key, cache)))
    return found


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    told = asyncio.run(main(asked["transport"], asked["entry_nbytes"], remote_access=asked["remote_access"]))
    sys.stdout.write(json.dumps(told) + "\n")
