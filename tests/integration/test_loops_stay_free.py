"""P6: what could hold an event loop although it moves no byte itself: imports, and a device that takes its time."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpull_async import CacheDesc, CacheKeyByIdAndIndex, DataType, LLMException, Placement
from tests import duo
from tests.acl_emulator import Emulator
from tests.conformance.api import Api, Awaited, Blocking
from tests.emulation import build
from tests.integration.pushing import PUSHER, RECEIVER, Ends, Stock, desc, ends
from tests.npu import Variant, serving

FIRST_LINK = """
import asyncio, sys, threading
from kvpull_async import CacheDesc, CacheKey, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole

imported = []

class Watch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if threading.current_thread().name.startswith("kvpull-core"):
            imported.append(name)

async def main():
    config = LLMConfig()
    config.listen_ip_info, config.link_secret, config.transfer_backend = "127.0.0.1:0", "secret", sys.argv[1]
    async with LLMDataDist(LLMRole.PROMPT, 1) as source, LLMDataDist(LLMRole.DECODER, 2) as destination:
        await source.init(config.generate_options())
        await destination.init(config.generate_options())
        imported.clear()  # nothing waits for a loop that has just begun
        cluster = LLMClusterInfo()
        cluster.remote_cluster_id = 1
        cluster.append_remote_ip_info(*source.listen_address)
        await destination.link_clusters([cluster], timeout=30_000, raise_on_error=True)
        desc = CacheDesc(4, [2, 65_536], DataType.DT_FLOAT)
        offered = await source.kv_cache_manager.allocate_cache(desc, [CacheKey(1, 1), CacheKey(1, 2)])
        manager = destination.kv_cache_manager
        cache = await manager.allocate_cache(desc)
        await manager.pull_cache(CacheKey(1, 1), cache, 0, timeout=30_000)
        await manager.pull_cache(CacheKey(1, 2), cache, 0, 64, timeout=30_000)
        await destination.unlink_clusters([cluster], timeout=30_000, raise_on_error=True)
        await manager.deallocate_cache(cache)
        await source.kv_cache_manager.deallocate_cache(offered)

sys.meta_path.insert(0, Watch)
asyncio.run(main())
print("imported:", *imported)
"""


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
def test_p6_nothing_is_imported_on_the_core_when_first_needed(device: bool) -> None:
    """An import reads files and runs code for many milliseconds; it belongs to `import` or `init`."""
    where = {"KVPULL_DEVICE_BACKEND": "host"}
    if device:
        where = {"KVPULL_DEVICE_BACKEND": "acl", "ASCEND_HOME_PATH": str(build())}
    for transport in ("tcp", "inproc", "shm"):
        command, env = [sys.executable, "-c", FIRST_LINK, transport], {**os.environ, **where}
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=env)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.split() == ["imported:"], transport


# -- a device ----------------------------------------------------------------------------------------------------------

WAYS = ("tcp", "streamed")
"""Of those that can carry bytes of a device between processes."""
SIZES = {"small": 64, "large": 1_300_001}
"""Bytes of an entry of one tensor: one rides on its frame, the other is streamed."""


def entry_of(stock: Stock, node: Any, entry: int = 0) -> CacheKeyByIdAndIndex:
    return CacheKeyByIdAndIndex(node.cluster_id, stock.cache.cache_id, entry)


def core_threads(ends: Ends) -> set[int]:
    """Native ids."""
    names = {f"kvpull-core-{node.cluster_id}" for node in (ends.pusher, ends.receiver)}
    found = {thread.native_id for thread in threading.enumerate() if thread.name in names}
    assert len(found) == len(names)
    return {native_id for native_id in found if native_id is not None}


async def use_everything(ends: Ends, emulator: Emulator) -> None:
    """Each call that makes memory, frees it or moves bytes, well and late."""
    do, near, far = ends.api.do, ends.receiver.cache_manager, ends.pusher
    for nbytes in SIZES.values():
        source = await ends.source(desc(nbytes))
        destination = await ends.destination(desc(nbytes), by_address=False)
        mine = await ends.destination(desc(nbytes), by_address=True)
        blocks = await ends.destination(desc(nbytes), blocks=True)
        host = await do(near.allocate_cache, CacheDesc(4, [3, nbytes], DataType.DT_UINT8, Placement.HOST))
        await ends.push(destination, source)
        await do(near.pull_cache, entry_of(source, far, 1), mine.cache, 1)
        await do(near.pull_blocks, entry_of(source, far, 2), blocks.cache, (), [1])
        await do(near.copy_cache, destination.cache, mine.cache, 2, 1)
        await do(near.copy_cache, host, destination.cache, 0, 2)
        await do(near.copy_blocks, blocks.cache, {1: [2]})
        found = near.get_cache_tensors(destination.cache, 3)[0].view()
        assert np.array_equal(np.asarray(found).reshape(3, -1)[2].view(np.uint8), source.arrays[3][1])
        emulator.hang()
        with pytest.raises(LLMException):
            await do(near.pull_cache, entry_of(source, far), destination.cache, timeout=50)
        emulator.resume()
        await do(near.unregister_cache, mine.cache.cache_id)
        await do(near.deallocate_cache, destination.cache)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("api", [Awaited(), Blocking()], ids=lambda api: api.name)
def test_p6_neither_a_caller_nor_a_core_ever_talks_to_the_device(api: Api, way: str) -> None:
    """Any call of the device's library may take as long as the device likes, or take a lock that is held as long."""
    free = {threading.get_native_id()}

    async def body() -> None:
        async with ends(api, way) as made:
            free.update(core_threads(made))
            await use_everything(made, emulator)

    with serving(Variant("newest")) as emulator:
        api.run(body())
        called = {function: emulator.threads(function) for function in emulator.counts()}
    assert {"aclInit", "aclrtMalloc", "aclrtFree", "aclrtMemcpyAsync", "aclrtPointerGetAttributes"} <= called.keys()
    assert [function for function, threads in called.items() if threads & free] == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("move", ["pull", "push", "copy"])
@pytest.mark.parametrize("release", ["9.0", "8.0"])
async def test_p6_all_loops_turn_while_the_device_does_not(release: str, move: str, size: str) -> None:
    """On the older release rows that are not aligned are copied by a call that returns when they are there."""
    nbytes = SIZES[size] + 1
    with serving(Variant(release, release)) as emulator:
        async with ends(Awaited(), "tcp") as made:
            source, destination = await made.source(desc(nbytes)), await made.destination(desc(nbytes))
            other = await made.destination(desc(nbytes))
            destination.fill(5)
            moves: dict[str, Callable[[], Any]] = {
                "pull": lambda: made.receiver.cache_manager.pull_cache(entry_of(source, made.pusher), other.cache),
                "push": lambda: made.push(other, source),
                "copy": lambda: made.receiver.cache_manager.copy_cache(other.cache, destination.cache),
            }
            emulator.hang()
            emulator.hang_sync()
            before = emulator.left()["running"]
            moving = asyncio.ensure_future(moves[move]())
            await Awaited().until(lambda: emulator.left()["running"] > before)
            for node, peer in ((made.receiver, PUSHER), (made.pusher, RECEIVER)):
                engine = duo.engine_of(node)
                asked = asyncio.run_coroutine_threadsafe(engine.check_link_status(peer), engine.core.loop)
                await asyncio.wait_for(asyncio.wrap_future(asked), duo.TIMEOUT_MS / 1000)
            assert not moving.done()
            emulator.resume()
            await moving
            assert np.array_equal(other.image[:, 0], (destination if move == "copy" else source).image[:, 0])
