"""P6: what could hold an event loop although no byte is moved."""

from __future__ import annotations

import subprocess
import sys

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


def test_p6_nothing_is_imported_on_the_core_when_first_needed() -> None:
    """An import reads files and runs code for many milliseconds; it belongs to `import` or `init`."""
    for transport in ("tcp", "inproc", "shm"):
        ended = subprocess.run(
            [sys.executable, "-c", FIRST_LINK, transport], capture_output=True, text=True, timeout=100, check=False
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.split() == ["imported:"], transport
