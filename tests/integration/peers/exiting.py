"""Programs that end without `finalize`, each in its own way.

    python -m tests.integration.peers.exiting WAY '{"address": ["127.0.0.1", 4000], ...}'

They are linked to a prompt node of the test's process, say "ready", and end when they are told to.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

import kvpull_async
from kvpull_sync import CacheKey, LLMException, LLMStatusCode
from tests import duo
from tests.integration.peers.blocking import Puller, hear, say

_kept: list[Any] = []
"""What a program holds at module level, and so until the interpreter has ended."""


def ready(given: dict[str, Any]) -> Puller:
    """A node that has pulled once, and is kept."""
    puller = Puller(given)
    puller.link()
    cache = puller.manager.allocate_cache(puller.desc)
    puller.pull(cache, 0)
    assert duo.holds(cache, entry=0, source=1)
    _kept.append((puller, cache))
    say("ready")
    hear()
    return puller


def returns(given: dict[str, Any]) -> None:
    ready(given)


def forgets(given: dict[str, Any]) -> None:
    """Nothing is kept: node, manager and cache are garbage before the program ends."""
    ready(given)
    _kept.clear()


def exits(given: dict[str, Any]) -> None:
    ready(given)
    sys.exit(7)


def raises(given: dict[str, Any]) -> None:
    ready(given)
    raise ValueError("of the program's own")


def leaves(given: dict[str, Any]) -> None:
    """Not even the handlers at exit run."""
    ready(given)
    os._exit(9)


def awaits(given: dict[str, Any]) -> None:
    """The awaitable API, whose loop ends before the program does."""

    async def main() -> None:
        decoder = kvpull_async.LLMDataDist(kvpull_async.LLMRole.DECODER, duo.DECODER)
        await decoder.init(duo.options(**given.get("options", {})))
        await decoder.link_clusters([duo.cluster(duo.PROMPT, (given["address"][0], given["address"][1]))])
        cache = await decoder.kv_cache_manager.allocate_cache(duo.SMALL)
        await decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 1), cache, src_cache_offset=0)
        _kept.append((decoder, cache))

    asyncio.run(main())
    say("ready")
    hear()
    sys.exit(3)


def pulls(given: dict[str, Any]) -> None:
    """A daemon thread is in the middle of a pull."""
    puller = ready(given)
    cache = puller.manager.allocate_cache(puller.desc)
    _kept.append(cache)
    threading.Thread(target=_pull_to_the_end, args=(puller, cache), daemon=True).start()
    _until_started(puller, 2)
    sys.exit(4)


def _pull_to_the_end(puller: Puller, cache: Any) -> None:
    try:
        puller.pull(cache, 0)
    except LLMException as error:
        if error.status_code != LLMStatusCode.LLM_ENGINE_FINALIZED:
            raise


def is_stuck(given: dict[str, Any]) -> None:
    """As `pulls`; and the copy into this node's memory never ends."""
    puller = Puller(given)
    puller.link()
    gated = duo.gate(puller.datadist)
    gated.landing_gate.close()
    gated.landing_gate._limit = 3600.0
    cache = puller.manager.allocate_cache(puller.desc)
    _kept.append((puller, cache))
    threading.Thread(target=_pull_to_the_end, args=(puller, cache), daemon=True).start()
    while not gated.landing_gate.held:
        time.sleep(0.002)
    say("ready")
    hear()
    sys.exit(5)


def _until_started(puller: Puller, pulls: int) -> None:
    while puller.started() < pulls:
        time.sleep(0.002)


def waits_for_a_signal(given: dict[str, Any]) -> None:
    """The main thread is in the middle of a pull, and signals do what they do by default."""
    puller = ready(given)
    cache = puller.manager.allocate_cache(puller.desc)
    _until = threading.Thread(target=_say_when_started, args=(puller,), daemon=True)
    _until.start()
    puller.pull(cache, 0)


def handles_a_signal(given: dict[str, Any]) -> None:
    """As `waits_for_a_signal`, with a handler that ends the program as many servers do."""

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(6)

    signal.signal(signal.SIGTERM, handle)
    waits_for_a_signal(given)


def _say_when_started(puller: Puller) -> None:
    _until_started(puller, 2)
    say("pulling")


if __name__ == "__main__":
    globals()[sys.argv[1]](json.loads(sys.argv[2]))
