"""A node with three caches, with which many callers deal: see `crowd`. It says its address, and at the end of its
standard input what is left of it.

    python -m tests.integration.peers.crowd_peer CLUSTER PATH
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time

from kvpull_async import BlocksCacheKey, Cache, CacheDesc, DataType, LLMRole
from kvpull_sync import LLMDataDist
from tests import duo
from tests.integration.processes import descriptors, mappings

CLUSTERS = (1, 2, 3, 4)
TENSORS = 4
ENTRY = 96 * 1024
"""Bytes of a batch entry of the first cache, whose every byte can be foretold."""
SLOT = 24 * 1024
"""Bytes of a batch entry of the second cache, of which each caller has one."""
BLOCKS = 4096
"""Bytes of a block of the third."""
PAGES = 4
"""Blocks of it that each caller has."""
CALLERS = 256


def byte_of(cluster: int, tensor: int, entry: int) -> int:
    return 1 + (31 * cluster + 8 * tensor + entry) % 255


def threads() -> list[str]:
    """Those of the library that stay in this process: one that gives memory back ends once that is done."""
    give_up = time.monotonic() + 10
    while True:
        found = [thread.name for thread in threading.enumerate() if thread.name.startswith("kvpull")]
        if not found or time.monotonic() > give_up:
            return found
        time.sleep(0.01)


def fill(cache: Cache, cluster: int) -> None:
    for tensor, array in enumerate(duo.arrays(cache)):
        for entry, row in enumerate(array):
            row[:] = byte_of(cluster, tensor, entry)


def main() -> None:
    cluster, path = int(sys.argv[1]), sys.argv[2]
    before = descriptors()
    node = LLMDataDist(LLMRole.PROMPT, cluster)
    remote = {"enable_cache_manager": True, "enable_remote_cache_accessible": True}
    node.init(duo.options(listen=True, transport=path, **remote))
    manager = node.cache_manager
    first = manager.allocate_cache(CacheDesc(TENSORS, [8, ENTRY], DataType.DT_UINT8))
    second = manager.allocate_cache(CacheDesc(TENSORS, [CALLERS, SLOT], DataType.DT_UINT8))
    paged = CacheDesc(TENSORS, [PAGES * CALLERS, BLOCKS], DataType.DT_UINT8)
    third = manager.allocate_blocks_cache(paged, BlocksCacheKey(cluster))
    fill(first, cluster)
    sys.stdout.write(json.dumps(node.listen_address) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    node.finalize()
    del first, second, third
    gc.collect()
    left = {"threads": threads(), "descriptors": descriptors() - before, "mappings": mappings()}
    sys.stdout.write(json.dumps(left) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
