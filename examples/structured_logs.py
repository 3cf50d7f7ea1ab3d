"""The library's events as JSON lines and on a console: one pull that works, one that is refused, seen from both sides.

Its job: show how an application turns the events on and what it can do with them. The library itself configures
nothing: it is the application that decides where events go, and this must stay so.

    python examples/structured_logs.py            # JSON lines, then the story of each pull
    python examples/structured_logs.py --console  # the same events, for people
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
from typing import Any

from kvpull_async import (
    CacheDesc,
    CacheKey,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    observe,
)

PROMPT_CLUSTER, DECODER_CLUSTER = 1, 2
# What a tracing library hands on: version, trace id, span id, flags (W3C Trace Context).
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TIMEOUT_MS = 30_000
DESC = CacheDesc(4, [2, 256, 64], DataType.DT_FLOAT)


async def some_pulls() -> None:
    """Both sides in one process, so that all their events end up in one place."""
    source = LLMDataDist(LLMRole.PROMPT, PROMPT_CLUSTER)
    config = LLMConfig()
    config.listen_ip_info = "127.0.0.1:0"
    await source.init(config.generate_options())
    async with source:
        keys = [CacheKey(PROMPT_CLUSTER, req_id=1), CacheKey(PROMPT_CLUSTER, req_id=2)]
        cache = await source.kv_cache_manager.allocate_cache(DESC, cache_keys=keys)
        assert source.listen_address is not None  # it was told to listen
        await _pull(*source.listen_address)
        await source.kv_cache_manager.deallocate_cache(cache)


async def _pull(ip: str, port: int) -> None:
    config = LLMConfig()
    config.sync_kv_timeout = TIMEOUT_MS
    destination = LLMDataDist(LLMRole.DECODER, DECODER_CLUSTER)
    await destination.init(config.generate_options())
    async with destination:
        cluster = await _link(destination, ip, port=port)
        manager = destination.kv_cache_manager
        cache = await manager.allocate_cache(DESC)
        await manager.pull_cache(CacheKey(PROMPT_CLUSTER, req_id=1), cache, 0, traceparent=TRACEPARENT)
        try:
            await manager.pull_cache(CacheKey(PROMPT_CLUSTER, req_id=404), cache, 1)
        except LLMException as error:
            print(f"(as intended, one pull was refused: {error.status_code})\n", file=sys.stderr)
        await manager.deallocate_cache(cache)
        await destination.unlink_clusters([cluster], timeout=TIMEOUT_MS)


async def _link(datadist: LLMDataDist, ip: str, *, port: int) -> LLMClusterInfo:
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = PROMPT_CLUSTER
    cluster.append_local_ip_info("127.0.0.1", 0)
    cluster.append_remote_ip_info(ip, port)
    status, _ = await datadist.link_clusters([cluster], timeout=TIMEOUT_MS)
    if status != LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"link_clusters: {status}")
    return cluster


def stories(lines: str) -> dict[str, list[dict[str, Any]]]:
    """The events of each pull, both sides together: the same ``pull_id`` stands in all of them."""
    by_pull: dict[str, list[dict[str, Any]]] = {}
    for line in lines.splitlines():
        event = json.loads(line)
        if "pull_id" in event:
            by_pull.setdefault(event["pull_id"], []).append(event)
    return by_pull


def judge(by_pull: dict[str, list[dict[str, Any]]]) -> int:
    """Tells the story of each pull; 0 when the source's events could be joined to every pull, and to the trace."""
    joined = 0
    for pull_id, events in by_pull.items():
        print(f"pull {pull_id}: {' -> '.join(event['event'] for event in events)}")
        joined += {"pull", "serve"} <= {event["event"].split(".")[0] for event in events}
    traced = {event["event"] for events in by_pull.values() for event in events if "traceparent" in event}
    if len(by_pull) == joined == 2 and {"pull.finished", "serve.finished"} <= traced:
        print("OK: both pulls can be followed on both sides, the traced one by its trace id too")
        return 0
    print(f"FAILED: {joined} of {len(by_pull)} pulls have the events of both sides; traced are {sorted(traced)}")
    return 1


def main(arguments: list[str]) -> int:
    """JSON lines by default, a console on request."""
    if "--console" in arguments:
        observe.console(level="DEBUG")
        asyncio.run(some_pulls())
        return 0
    stream = io.StringIO()
    observe.json_lines(stream, level="DEBUG")
    asyncio.run(some_pulls())
    print(stream.getvalue())
    return judge(stories(stream.getvalue()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
