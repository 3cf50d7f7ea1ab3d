"""A program with a node of its own that starts processes, by each way that Python has.

    python -m tests.integration.peers.multiplying WAY METHOD '{"address": ["127.0.0.1", 4000], ...}'

Each of its processes makes a node too and pulls; a forked one also tries the node of its parent.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import kvpull_async
from kvpull_sync import CacheKey
from tests import duo
from tests.integration.peers.blocking import Puller, say

FIRST = 10
PROCESSES = 3
_parents: list[Any] = []
"""The nodes of this process, blocking and awaitable, with a cache of each. A spawned process, which imports this module
anew, has none.
"""


def own(given: dict[str, Any], number: int) -> bool:
    """Whether a node that is made here works."""
    puller = Puller(given, cluster_id=FIRST + number)
    puller.link()
    cache = puller.manager.allocate_cache(puller.desc)
    puller.pull(cache, 0, source=number % 4)
    right = duo.holds(cache, entry=0, source=number % 4)
    puller.manager.deallocate_cache(cache)
    if number:  # else it forgets, which must not matter
        puller.datadist.finalize()
    return right


def refused() -> list[str]:
    """What is said to who uses the nodes of the parent here; nothing where none came along."""
    uses: list[Callable[[], Any]] = []
    if _parents:
        puller, cache, manager, other = _parents
        uses = [lambda: puller.pull(cache, 0), lambda: asyncio.run(pull(manager, other))]
    return list(map(said, uses))


def said(use: Callable[[], Any]) -> str:
    try:
        use()
    except RuntimeError as error:
        return str(error)
    return "nothing"


async def pull(manager: Any, cache: Any) -> None:
    await manager.pull_cache(CacheKey(duo.PROMPT, 1), cache, 0, src_cache_offset=0)


async def awaitable(given: dict[str, Any]) -> tuple[Any, Any, Any]:
    node = kvpull_async.LLMDataDist(kvpull_async.LLMRole.DECODER, 4)
    await node.init(duo.options())
    await node.link_clusters([duo.cluster(duo.PROMPT, tuple(given["address"]))], raise_on_error=True)
    return (
        node,
        node.kv_cache_manager,
        await node.kv_cache_manager.allocate_cache(duo.BIG if given["big"] else duo.SMALL),
    )


def work(given: dict[str, Any], number: int) -> tuple[bool, list[str]]:
    return own(given, number), refused()


def put(given: dict[str, Any], number: int, results: Any) -> None:
    results.put(work(given, number))


def processes(context: Any, given: dict[str, Any]) -> tuple[list[Any], list[int | None]]:
    results = context.SimpleQueue()
    started = [context.Process(target=put, args=(given, number, results)) for number in range(PROCESSES)]
    for process in started:
        process.start()
    told = [results.get() for _ in started]
    for process in started:
        process.join(30)
    return told, [process.exitcode for process in started]


def executor(context: Any, given: dict[str, Any]) -> tuple[list[Any], list[int | None]]:
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        return [future.result(30) for future in [pool.submit(work, given, n) for n in range(PROCESSES)]], []


def os_fork(_: Any, given: dict[str, Any]) -> tuple[list[Any], list[int | None]]:
    told, statuses = [], []
    for number in range(PROCESSES):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            with os.fdopen(writing, "w") as pipe:
                pipe.write(json.dumps(work(given, number)))
            sys.exit(number)  # as any program ends, with all handlers
        os.close(writing)
        with os.fdopen(reading) as pipe:
            told.append(json.loads(pipe.read()))
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return told, statuses


def main(way: str, method: str, given: dict[str, Any]) -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads: that is the point
    puller = Puller(given)
    puller.link()
    cache = puller.manager.allocate_cache(puller.desc)
    node, manager, other = asyncio.run(awaitable(given))
    _parents.extend((puller, cache, manager, other))
    puller.pull(cache, 0, source=2)
    told, statuses = {"processes": processes, "executor": executor, "fork": os_fork}[way](
        multiprocessing.get_context(method), given
    )
    puller.pull(cache, 1, source=3)
    right = duo.holds(cache, entry=0, source=2) and duo.holds(cache, entry=1, source=3)
    asyncio.run(pull(manager, other))
    right = right and duo.holds(other, entry=0, source=1) and node.counters["links_up"] == 1
    say("done", told=told, statuses=statuses, right=right, counters=puller.told())
    puller.manager.deallocate_cache(cache)
    puller.datadist.finalize()
    asyncio.run(node.finalize())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
