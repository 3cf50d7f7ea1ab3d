"""Programs that use the blocking API and are interrupted, forked or multiplied under it.

    python -m tests.integration.peers.blocking SCENARIO '{"address": ["127.0.0.1", 4000], ...}'

They pull from a prompt node of the test's process, and say on standard output what happened.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from kvpull_sync import CacheDesc, CacheKey, LLMDataDist, LLMRole
from tests import duo


def say(event: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def hear() -> None:
    assert sys.stdin.readline()


class Puller:
    """A linked decoder node."""

    def __init__(self, given: dict[str, Any], cluster_id: int = duo.DECODER) -> None:
        self.address = (given["address"][0], given["address"][1])
        self.desc: CacheDesc = duo.BIG if given.get("big") else duo.SMALL
        self.datadist = LLMDataDist(LLMRole.DECODER, cluster_id)
        self.datadist.init(duo.options(**given.get("options", {})))
        self.manager = self.datadist.kv_cache_manager

    def link(self) -> None:
        result = self.datadist.link_clusters([duo.cluster(duo.PROMPT, self.address)], duo.TIMEOUT_MS)
        assert result == (duo.OK, [duo.OK]), result

    def pull(self, cache: Any, entry: int, *, source: int = 1) -> None:
        self.manager.pull_cache(CacheKey(duo.PROMPT, source), cache, entry, src_cache_offset=0)

    def told(self) -> dict[str, int]:
        return self.datadist.counters

    def started(self) -> int:
        return self.told().get("pulls_started", 0)


def linked(given: dict[str, Any]) -> Puller:
    """Linked, and told to go on."""
    puller = Puller(given)
    puller.link()
    say("linked")
    hear()
    return puller


def watch(reached: Callable[[], bool]) -> None:
    """Say "begun" from a thread of its own once it is so: the main thread blocks."""

    def run() -> None:
        while not reached():
            time.sleep(0.002)
        say("begun")

    threading.Thread(target=run, daemon=True).start()


def interrupted(call: Callable[[], Any]) -> str:
    """The name of the exception that a signal made of the call; afterwards Ctrl-C means nothing any more."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001  (the test judges it)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return type(error).__name__
    return "nothing"


def pull(given: dict[str, Any]) -> None:
    """One pull that is interrupted, then a canary, then another pull on the same link."""
    puller = linked(given)
    cache = puller.manager.allocate_cache(puller.desc)
    watch(lambda: puller.started() >= 1)
    raised = interrupted(lambda: puller.pull(cache, 0))
    for array in duo.arrays(cache):
        array[:] = 0xC3
    say("interrupted", raised=raised, quarantined=cache.quarantined, counters=puller.told())
    hear()
    puller.pull(cache, 1)
    untouched = all((array[[0, 2, 3]] == 0xC3).all() for array in duo.arrays(cache))
    say("pulled", right=duo.holds(cache, entry=1, source=1), untouched=bool(untouched), counters=puller.told())
    puller.manager.deallocate_cache(cache)
    puller.datadist.finalize()


def stuck(given: dict[str, Any]) -> None:
    """Two interrupts, while the copy into the destination can neither go on nor stop."""
    puller = linked(given)
    gated = duo.gate(puller.datadist)
    gated.landing_gate.close()
    cache = puller.manager.allocate_cache(puller.desc)
    watch(lambda: gated.landing_gate.held > 0)
    raised = interrupted(lambda: puller.pull(cache, 0))
    say("interrupted", raised=raised, quarantined=cache.quarantined)
    gated.landing_gate.open()
    puller.manager.settled(cache, duo.TIMEOUT_MS)
    quarantined = cache.quarantined
    puller.pull(cache, 1)
    say("pulled", right=duo.holds(cache, entry=1, source=1), quarantined=quarantined)
    puller.manager.deallocate_cache(cache)
    puller.datadist.finalize()


def link(given: dict[str, Any]) -> None:
    """Linking to a peer that never answers is interrupted; then a link to one that does."""
    puller = Puller(given)
    silent = duo.cluster(duo.PROMPT, (given["silent"][0], given["silent"][1]))
    threading.Timer(0.2, say, ("begun",)).start()
    raised = interrupted(lambda: puller.datadist.link_clusters([silent], 60_000))
    say("interrupted", raised=raised)
    puller.link()
    cache = puller.manager.allocate_cache(puller.desc)
    puller.pull(cache, 0)
    say("pulled", right=duo.holds(cache, entry=0, source=1))
    puller.manager.deallocate_cache(cache)
    puller.datadist.finalize()


def queue(given: dict[str, Any]) -> None:
    """The main thread waits behind the pull of another thread and is interrupted; the other one is not."""
    puller = linked(given)
    mine, other = puller.manager.allocate_cache(puller.desc), puller.manager.allocate_cache(puller.desc)
    thread = threading.Thread(target=puller.pull, args=(other, 0))
    thread.start()
    watch(lambda: puller.started() >= 2)
    while puller.started() < 1:
        time.sleep(0.002)
    raised = interrupted(lambda: puller.pull(mine, 0))
    say("interrupted", raised=raised, quarantined=mine.quarantined, untouched=duo.untouched(mine))
    thread.join(duo.TIMEOUT_MS / 1000)
    say("pulled", right=duo.holds(other, entry=0, source=1), counters=puller.told())
    for cache in (mine, other):
        puller.manager.deallocate_cache(cache)
    puller.datadist.finalize()


def fork(given: dict[str, Any]) -> None:
    """A forked process may not use the parent's node, may have one of its own, and disturbs nobody by ending."""
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads: that is the point
    puller = linked(given)
    cache = puller.manager.allocate_cache(puller.desc)
    puller.pull(cache, 0)
    before = puller.told()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps({"refused": _refusals(puller, cache), "own": _own(given)}))
        sys.exit(5)  # the interpreter ends as usual: handlers at exit, destructors
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = json.loads(pipe.read())
    _, status = os.waitpid(child, 0)
    puller.pull(cache, 1, source=2)
    right = duo.holds(cache, entry=0, source=1) and duo.holds(cache, entry=1, source=2)
    say("forked", status=os.waitstatus_to_exitcode(status), right=right, before=before, after=puller.told(), **told)
    puller.manager.deallocate_cache(cache)
    puller.datadist.finalize()


def _refusals(puller: Puller, cache: Any) -> dict[str, str]:
    uses: dict[str, Callable[[], Any]] = {
        "pull_cache": lambda: puller.pull(cache, 0),
        "allocate_cache": lambda: puller.manager.allocate_cache(puller.desc),
        "kv_cache_manager": lambda: puller.datadist.kv_cache_manager,
        "cache_manager": lambda: puller.datadist.cache_manager,
        "link_clusters": puller.link,
        "finalize": puller.datadist.finalize,
    }
    refused = {}
    for name, use in uses.items():
        try:
            use()
        except RuntimeError as error:
            refused[name] = str(error)
    return refused


def _own(given: dict[str, Any]) -> bool:
    """Whether a node made after the fork works."""
    puller = Puller(given, cluster_id=3)
    puller.link()
    cache = puller.manager.allocate_cache(puller.desc)
    puller.pull(cache, 2, source=3)
    right = duo.holds(cache, entry=2, source=3)
    puller.manager.deallocate_cache(cache)
    puller.datadist.finalize()
    return right


def multiply(given: dict[str, Any]) -> None:
    """Processes started by multiprocessing while this one has a node of its own."""
    puller = linked(given)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        right = pool.map(_spawned, [(given, number) for number in (10, 11, 12)])
    cache = puller.manager.allocate_cache(puller.desc)
    puller.pull(cache, 0)
    say("pulled", right=[*right, duo.holds(cache, entry=0, source=1)])
    puller.manager.deallocate_cache(cache)
    puller.datadist.finalize()


def _spawned(work: tuple[dict[str, Any], int]) -> bool:
    puller = Puller(work[0], cluster_id=work[1])
    puller.link()
    cache = puller.manager.allocate_cache(puller.desc)
    puller.pull(cache, 0, source=work[1] % 4)
    right = duo.holds(cache, entry=0, source=work[1] % 4)
    puller.manager.deallocate_cache(cache)
    puller.datadist.finalize()
    return right


if __name__ == "__main__":
    globals()[sys.argv[1]](json.loads(sys.argv[2]))
