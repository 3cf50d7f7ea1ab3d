"""Addresses of the wrong kind of memory are the caller's mistake: said when they are used, and harmless."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpull_async import CacheDesc, CacheKeyByIdAndIndex, DataType, LLMException, LLMRole, LLMStatusCode, Placement
from tests import duo, npu
from tests.conformance.api import AWAITED
from tests.integration.pushing import Ends, desc, ends, laid

PI = LLMStatusCode.LLM_PARAM_INVALID


def on_host() -> Any:
    return np.full((3, 4096), 7, np.uint8)


async def push(e: Ends, source: Any, to: Any) -> None:
    await e.pusher.cache_manager.push_cache(CacheKeyByIdAndIndex(e.receiver.cluster_id, to.cache_id, 0), source, 1)


@pytest.mark.parametrize("way", ["tcp", "inproc", "read"])
@pytest.mark.parametrize("side", ["source", "destination"])
async def test_p10_host_memory_registered_as_the_devices_is_refused_and_the_link_goes_on(way: str, side: str) -> None:
    async with ends(AWAITED, way) as e:
        source, destination = await e.source(desc(4096)), await e.destination(desc(4096))
        rows = [on_host() for _ in range(4)]
        node = e.pusher if side == "source" else e.receiver

        async def used() -> None:
            wrong = await node.cache_manager.register_cache(desc(4096), [int(row.ctypes.data) for row in rows])
            to = wrong if side == "destination" else destination.cache
            await push(e, wrong if side == "source" else source.cache, to)

        with pytest.raises(LLMException) as caught:
            await used()
        assert caught.value.status_code is PI, caught.value
        assert not caught.value.destination_unsafe
        assert all(bool((row == 7).all()) for row in rows)
        assert destination.untouched
        await e.push(destination, source, 1)
        assert np.array_equal(destination.image, laid(destination, [(t, 0, source.arrays[t][1]) for t in range(4)]))


async def test_memory_beyond_an_allocation_is_never_copied() -> None:
    """The runtime says so, and the bytes behind are left alone."""
    async with ends(AWAITED, "tcp") as e:
        source, room = await e.source(desc(4096)), npu.room(4, 3, 4096)
        behind = npu.address(room) + 4 * 3 * 4096

        async def used() -> None:
            places = [behind - 4096 + 64 * 1024 * 1024] * 4
            wrong = await e.receiver.cache_manager.register_cache(desc(4096), places)
            await push(e, source.cache, wrong)

        with pytest.raises(LLMException):
            await used()
        assert not room.any()


async def test_caches_of_the_host_live_beside_those_of_the_device() -> None:
    shape = CacheDesc(2, [2, 5000], DataType.DT_UINT8, Placement.HOST)
    async with duo.node(LLMRole.PROMPT, duo.PROMPT, listen=True) as node:
        manager = node.kv_cache_manager
        here, there = (
            await manager.allocate_cache(shape),
            await manager.allocate_cache(CacheDesc(2, [2, 5000], DataType.DT_UINT8)),
        )
        for array in duo.arrays(here):
            array[:] = 9
        await manager.copy_cache(there, here, 1, 0)
        assert all(bool((array[1] == 9).all()) for array in duo.arrays(there))
        for array in duo.arrays(there):
            array[0] = 5
        await manager.copy_cache(here, there, 1, 0)
        assert all(bool((array[1] == 5).all()) and bool((array[0] == 9).all()) for array in duo.arrays(here))
        assert npu.eye(here.per_device_tensor_addrs[0][0], 1) is None, "it is the host's"
        await manager.deallocate_cache(here)
        await manager.deallocate_cache(there)
