"""P8: what was made for a caller who was cancelled too late to stop it is taken back, its keys included."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from kvpull_async import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMDataDist, LLMRole, Placement
from tests import duo
from tests.loop_nodes import eventually

DESC = CacheDesc(2, [4, 64], DataType.DT_UINT8, Placement.DEVICE)
MEMORY = np.zeros((2, 4, 64), np.uint8)
ADDRESSES = [int(tensor.ctypes.data) for tensor in MEMORY]

MADE: dict[str, Callable[[LLMDataDist], Coroutine[Any, Any, Any]]] = {
    "allocate": lambda node: node.kv_cache_manager.allocate_cache(DESC, [CacheKey(1, 7)]),
    "allocate, newer": lambda node: node.cache_manager.allocate_cache(DESC, [CacheKey(1, 7)]),
    "allocate blocks": lambda node: node.cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(1, 3)),
    "register": lambda node: node.cache_manager.register_cache(DESC, ADDRESSES, [CacheKey(1, 7)]),
    "register blocks": lambda node: node.cache_manager.register_blocks_cache(DESC, ADDRESSES, BlocksCacheKey(1, 3)),
}


@pytest.mark.parametrize("how", MADE)
async def test_p8_a_cache_made_for_a_caller_who_has_gone_is_taken_back(how: str) -> None:
    async with LLMDataDist(LLMRole.PROMPT, 1) as node:
        await node.init(duo.options())
        registry = duo.engine_of(node).registry
        for _ in range(3):
            making = asyncio.ensure_future(MADE[how](node))
            await asyncio.sleep(0)
            time.sleep(0.1)  # noqa: ASYNC251  (the core is done meanwhile, and this loop has not heard of it)
            making.cancel()
            with pytest.raises(asyncio.CancelledError):
                await making
        await eventually(lambda: not registry.entries())
        assert registry.find_key(("request", 7, 0)) is None
        assert registry.find_blocks(3) is None
        made = await MADE[how](node)  # the keys are free again
        assert registry.entries()
        await node.cache_manager.unregister_cache(made.cache_id)
        await node.cache_manager.remove_cache_key(CacheKey(1, 7))
        if "register" not in how:
            blocks = getattr(made, "is_blocks_cache", False)
            manager: Any = node.kv_cache_manager if how == "allocate" else node.cache_manager
            await (manager.deallocate_blocks_cache(made) if blocks else manager.deallocate_cache(made))
        assert not registry.entries()
