"""Many nodes in one process, each with a listener and a published cache of its own. Lines of JSON both ways, as `node`.

    python -m tests.integration.peers.storm '{"role": "PROMPT", "cluster": 10, "options": {"ports": [0, 0, 0]}}'

Their cluster ids count up from the one given. It must not end by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

from kvpull_async import CacheKey, LLMDataDist, LLMRole
from tests import duo
from tests.integration.peers.node import say


async def main(config: dict[str, Any]) -> None:
    options = config["options"]
    ports = options.pop("ports")
    async with contextlib.AsyncExitStack() as stack:
        nodes = []
        for number, port in enumerate(ports):
            node = await stack.enter_async_context(LLMDataDist(LLMRole[config["role"]], config["cluster"] + number))
            await node.init(duo.options(**options, listen_ip_info=f"127.0.0.1:{port}"))
            cache = await node.kv_cache_manager.allocate_cache(
                duo.SMALL, [CacheKey(node.cluster_id, i) for i in range(4)]
            )
            duo.fill(cache)
            nodes.append((node, cache))
        addresses = [list(node.listen_address or ()) for node, _ in nodes]
        say("ready", address=addresses[0])
        say("addresses", addresses=addresses)
        await asyncio.to_thread(sys.stdin.readline)
    say("gone")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
