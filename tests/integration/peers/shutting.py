"""Programs that are told to end in the middle of a call, and finalize as programs do that take care.

    python -m tests.integration.peers.shutting FACE DOING '{"address": ["127.0.0.1", 4000], ...}'

SIGTERM has them leave with status 143, by an exit handler (blocking) or by cancelling the main task (awaited). Ctrl-C
does what it does by default. `forgets` in what is given: without `finalize`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import kvpull_async
import kvpull_sync
from kvpull_async import CacheDesc, CacheKeyByIdAndIndex, DataType, LLMRole, TransferWithCacheKeyConfig
from tests import duo
from tests.integration.peers.blocking import hear, say
from tests.transferring import Ready

DESC = CacheDesc(2, [4, 1024], DataType.DT_UINT8)
"""As the peer's."""
TERMINATED = 143
AT_ONCE = 6
REMOTE: dict[str, Any] = {"enable_cache_manager": True, "enable_remote_cache_accessible": True}
_kept: list[Any] = []


def begin(face: Any, given: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A node that is not initialised, its options, and the description of its peer."""
    node = face.LLMDataDist(LLMRole.MIX, duo.DECODER)
    _kept.append(node)
    options = duo.options(transport=given.get("transport", "tcp"), **REMOTE, **given["options"])
    return node, options, duo.cluster(duo.PROMPT, (given["address"][0], given["address"][1]))


def calls(node: Any, cache: Any, given: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    manager, there = node.cache_manager, CacheKeyByIdAndIndex(duo.PROMPT, 1, 0)
    layers = TransferWithCacheKeyConfig(there, range(1), range(1))
    return {
        "pull": lambda: manager.pull_cache(there, cache),
        "push": lambda: manager.push_cache(there, cache),
        "transfer": lambda: manager.transfer_cache_async(cache, Ready(), [layers]).synchronize(),
        "link": lambda: node.link_clusters([duo.cluster(9, tuple(given["silent"]))], 60_000),
    }


def watch(node: Any) -> None:
    """Say "begun" from a thread of its own, once calls are under way; what is not counted is given a moment."""

    def run() -> None:
        give_up = time.monotonic() + 0.3
        names = ("pulls_started", "pushes_started")
        while time.monotonic() < give_up and not any(node.counters.get(name) for name in names):
            time.sleep(0.002)
        say("begun")

    threading.Thread(target=run, daemon=True).start()


# --- blocking ---


def leave(*_: object) -> None:
    sys.exit(TERMINATED)


def blocking(doing: str, given: dict[str, Any]) -> None:
    signal.signal(signal.SIGTERM, leave)
    node, options, peer = begin(kvpull_sync, given)
    with contextlib.nullcontext() if given.get("forgets") else node:
        node.init(options)
        node.link_clusters([peer], duo.TIMEOUT_MS, raise_on_error=True)
        cache = node.cache_manager.allocate_cache(DESC)
        _kept.append(cache)
        say("linked")
        hear()
        watch(node)
        if doing == "many":
            many(calls(node, cache, given)["pull"])
        else:
            calls(node, cache, given)[doing]()


def many(call: Callable[[], None]) -> None:
    """In threads that the interpreter waits for at its end, and in this one."""
    for _ in range(AT_ONCE):
        threading.Thread(target=quietly, args=(call,)).start()
    call()


def quietly(call: Callable[[], None]) -> None:
    with contextlib.suppress(kvpull_sync.LLMException):
        call()


# --- awaited ---


async def serve(doing: str, given: dict[str, Any]) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    node, options, peer = begin(kvpull_async, given)
    async with contextlib.nullcontext() if given.get("forgets") else node:
        await node.init(options)
        await node.link_clusters([peer], duo.TIMEOUT_MS, raise_on_error=True)
        cache = await node.cache_manager.allocate_cache(DESC)
        _kept.append(cache)
        say("linked")
        await asyncio.to_thread(hear)
        watch(node)
        call: Callable[[], Awaitable[Any]] = calls(node, cache, given)["pull" if doing == "many" else doing]
        await asyncio.gather(*(call() for _ in range(AT_ONCE if doing == "many" else 1)))


def awaited(doing: str, given: dict[str, Any]) -> None:
    try:
        asyncio.run(serve(doing, given))
    except asyncio.CancelledError:
        sys.exit(TERMINATED)


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2], json.loads(sys.argv[3]))
