"""One engine and one of its managers, driven as the blocking face does. For tests of the managers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvpull_async import CacheDesc, DataType, LLMException, LLMRole
from kvpull_async.crossing import blocked
from kvpull_async.datadist import DataDist
from kvpull_async.engine import close_bounded
from kvpull_async.managers.manager import Manager
from tests.duo import options

DESC = CacheDesc(2, [3, 64], DataType.DT_UINT8)


class Side:
    """One engine and one of its managers, blocking."""

    def __init__(self, kind: str, role: LLMRole, **properties: Any) -> None:
        self.kind = kind
        self.datadist = DataDist(role, 1, dropped=None)
        opening = self.datadist.start(options(**properties))
        assert opening is not None
        self.engine = self.datadist.engine
        blocked(self.engine, opening)
        self.manager: Manager = self.datadist.manager(kind, self)
        self.kept: list[Any] = []

    def run(self, operation: Any) -> Any:
        result = blocked(self.engine, operation)
        self.kept.append(result)
        return result

    def allocate(self, desc: CacheDesc = DESC, keys: Any = ()) -> Any:
        return self.run(self.manager.allocate_cache(desc, keys))

    def blocks(self, desc: CacheDesc = DESC, key: Any = None) -> Any:
        return self.run(self.manager.allocate_blocks_cache(desc, key))

    def register(self, array: Any, desc: CacheDesc = DESC, keys: Any = ()) -> Any:
        addresses = [array.ctypes.data + tensor * desc.size for tensor in range(desc.num_tensors)]
        return self.run(self.manager.register_cache(desc, addresses, keys, None))

    def copy(self, dst: Any, src: Any, *more: Any) -> Any:
        arguments = [*more, *[0, 0, 0, -1, None][len(more) :]]
        return self.manager.copy_cache(dst, src, *arguments)

    def tensor(self, cache: Any, index: int) -> Any:
        return self.manager.get_cache_tensors(cache, index)[0].view()

    def close(self) -> None:
        close_bounded(self.engine)
        self.kept.clear()


def status(call: Any, *args: Any) -> Any:
    with pytest.raises(LLMException) as caught:
        call(*args)
    return caught.value.status_code


async def quarantine(cache: Any) -> asyncio.Future[None]:
    """On the engine's core: something writes to the cache until the returned future ends."""
    writer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    cache._binding.quarantine(writer)
    return writer
