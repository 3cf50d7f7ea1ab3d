"""Registered memory that is gone when it is pushed: the error says on which side, and that a retry is of no use."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest

from kvpull_async import CacheDesc, CacheKeyByIdAndIndex, DataType, LLMStatusCode
from tests.conformance.api import AWAITED
from tests.integration.pushing import RECEIVER, Ends, ends

NBYTES = 4 * 1024 * 1024
SHAPE = CacheDesc(2, [1, NBYTES], DataType.DT_UINT8)


async def registered(e: Ends, node: Any) -> tuple[Any, list[mmap.mmap], list[int]]:
    maps = [mmap.mmap(-1, NBYTES) for _ in range(2)]
    addresses = [int(np.frombuffer(made, np.uint8).ctypes.data) for made in maps]
    return await node.cache_manager.register_cache(SHAPE, addresses, remote_accessible=True), maps, addresses


def protect(addresses: list[int], allowed: int) -> None:
    """As if it were freed, but nothing else can come to lie there."""
    for address in addresses:
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(NBYTES), allowed) == 0


@pytest.mark.parametrize("way", ["tcp", "read", "streamed"])
@pytest.mark.parametrize(("gone", "done"), [("source", "read"), ("destination", "written")])
async def test_p10_memory_that_is_gone_is_the_callers_mistake_and_the_link_goes_on(
    way: str, gone: str, done: str
) -> None:
    async with ends(AWAITED, way) as e:
        source, theirs = await registered(e, e.pusher), await registered(e, e.receiver)
        key = CacheKeyByIdAndIndex(RECEIVER, theirs[0].cache_id, 0)
        push = e.pusher.cache_manager.push_cache
        await push(key, source[0])
        addresses = source[2] if gone == "source" else theirs[2]
        protect(addresses, 0)
        try:
            error = await e.refused(push, key, source[0])
        finally:
            protect(addresses, mmap.PROT_READ | mmap.PROT_WRITE)
        assert error.status_code == LLMStatusCode.LLM_PARAM_INVALID
        assert f"the {gone}'s memory cannot be {done}" in str(error)
        assert not error.retry_safe
        source[1][0][:3] = b"new"
        await push(key, source[0])
        assert theirs[1][0][:3] == b"new"
