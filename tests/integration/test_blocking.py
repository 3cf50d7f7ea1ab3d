"""The blocking API under signals, forks, other processes and many threads."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from kvpull_sync import CacheKey, LLMDataDist, LLMRole
from tests import duo
from tests.integration.running import PATIENCE, Running, running

pytestmark = pytest.mark.smoke

SOON = 15.0
"""Seconds in which an interrupted call has ended: far below its own deadline (30 s)."""


class Source:
    """A prompt node of this process, which holds filled caches for small and big pulls."""

    def __init__(self, cluster_id: int = duo.PROMPT, **properties: Any) -> None:
        self.node = LLMDataDist(LLMRole.PROMPT, cluster_id)
        self.node.init(duo.options(listen=True, **properties))
        self.caches: list[Any] = []

    def publish(self, desc: Any) -> Source:
        cache = self.node.kv_cache_manager.allocate_cache(desc, duo.keys(desc))
        duo.fill(cache)
        self.caches.append(cache)
        return self

    def close(self) -> None:
        self.node.finalize()
        self.caches.clear()


@contextmanager
def source(*, big: bool = False) -> Iterator[Source]:
    made = Source().publish(duo.BIG if big else duo.SMALL)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def puller(scenario: str, made: Source, **given: Any) -> Iterator[Running]:
    with running("blocking", scenario, json.dumps({"address": made.node.listen_address, **given})) as child:
        yield child


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("big", [False, True], ids=["inline", "streamed"])
def test_p1_p4_ctrl_c_against_a_silent_peer_cancels_settles_and_leaves_the_link_usable(*, big: bool) -> None:
    with source(big=big) as made, puller("pull", made, big=big) as child:
        child.hear("linked")
        with duo.frozen(made.node):
            child.tell()
            child.hear("begun")
            began = time.monotonic()
            child.signal(signal.SIGINT)
            told = child.hear("interrupted")
            assert time.monotonic() - began < SOON
        assert (told["raised"], told["quarantined"]) == ("KeyboardInterrupt", False)
        assert told["counters"]["pulls_cancelled"] == 1
        child.tell()
        told = child.hear("pulled")
        assert (told["right"], told["untouched"]) == (True, True)
        assert "reconnects" not in told["counters"]
        assert child.end() == (0, "")


def test_p1_p4_ctrl_c_in_the_middle_of_a_transfer() -> None:
    with source(big=True) as made, puller("pull", made, big=True) as child:
        child.hear("linked")
        gate = duo.gate(made.node).lending_gate
        gate.close()
        child.tell()
        child.hear("begun")
        until(lambda: gate.held > 0)
        child.signal(signal.SIGINT)
        told = child.hear("interrupted")
        assert (told["raised"], told["quarantined"]) == ("KeyboardInterrupt", False)
        gate.open()
        child.tell()
        told = child.hear("pulled")
        assert (told["right"], told["untouched"]) == (True, True)
        assert child.end() == (0, "")


def test_p1_a_second_ctrl_c_raises_at_once_and_the_destination_is_quarantined() -> None:
    # The copy cannot stop for as long as the child's gate is closed, and the first Ctrl-C would wait for a minute.
    with source(big=True) as made, puller("stuck", made, big=True, options={"settle_timeout": 60_000}) as child:
        child.hear("linked")
        child.tell()
        child.hear("begun")
        began = time.monotonic()
        heard = threading.Event()
        again = threading.Thread(target=interrupt_repeatedly, args=(child, heard))
        again.start()
        told = child.hear("interrupted")
        heard.set()
        again.join(PATIENCE)
        assert time.monotonic() - began < 30
        assert (told["raised"], told["quarantined"]) == ("KeyboardInterrupt", True)
        told = child.hear("pulled")
        assert (told["right"], told["quarantined"]) == (True, False)
        assert child.end() == (0, "")


def interrupt_repeatedly(child: Running, heard: threading.Event) -> None:
    """Signals that come while one is pending are one: leave time for each."""
    child.signal(signal.SIGINT)
    while not heard.wait(1.0):
        child.signal(signal.SIGINT)


def test_ctrl_c_while_linking_to_a_peer_that_never_answers() -> None:
    with (
        source() as made,
        socket.create_server(("127.0.0.1", 0)) as silent,
        puller("link", made, silent=silent.getsockname()) as child,
    ):
        child.hear("begun")
        began = time.monotonic()
        child.signal(signal.SIGINT)
        assert child.hear("interrupted")["raised"] == "KeyboardInterrupt"
        assert time.monotonic() - began < SOON
        assert child.hear("pulled")["right"]
        assert child.end() == (0, "")


def test_ctrl_c_reaches_the_pull_that_waits_in_the_queue_and_not_the_one_before_it() -> None:
    with source() as made, puller("queue", made) as child:
        child.hear("linked")
        with duo.frozen(made.node):
            child.tell()
            child.hear("begun")
            child.signal(signal.SIGINT)
            told = child.hear("interrupted")
        assert (told["raised"], told["quarantined"], told["untouched"]) == ("KeyboardInterrupt", False, True)
        told = child.hear("pulled")
        assert told["right"]
        assert (told["counters"]["pulls_finished"], told["counters"]["pulls_cancelled"]) == (1, 1)
        assert child.end() == (0, "")


# -- other processes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("big", [False, True], ids=["inline", "streamed"])
def test_a_forked_process_is_refused_may_start_anew_and_disturbs_nobody(*, big: bool) -> None:
    with source(big=big) as made, puller("fork", made, big=big) as child:
        child.hear("linked")
        child.tell()
        told = child.hear("forked")
        assert set(told["refused"]) == {
            "pull_cache", "allocate_cache", "kv_cache_manager", "cache_manager", "link_clusters", "finalize",
        }  # fmt: skip
        assert all("parent process" in text and "init" in text for text in told["refused"].values())
        assert told["own"] is True
        assert told["status"] == 5
        assert told["right"]
        assert told["before"]["links_up"] == told["after"]["links_up"] == 1
        assert "links_lost" not in told["after"]
        assert child.end() == (0, "")


def test_spawned_processes_pull_for_themselves() -> None:
    with source() as made, puller("multiply", made) as child:
        child.hear("linked")
        child.tell()
        assert child.hear("pulled")["right"] == [True] * 4
        assert child.end() == (0, "")


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("links", [1, 4])
@pytest.mark.parametrize("big", [False, True], ids=["inline", "streamed"])
def test_p5_sixteen_threads_get_their_own_bytes_over_one_link_and_over_several(links: int, *, big: bool) -> None:
    desc = duo.BIG if big else duo.SMALL
    with ExitStack() as stack:
        sources = [Source(10 + number).publish(desc) for number in range(links)]
        for made in sources:
            stack.callback(made.close)
        decoder = stack.enter_context(LLMDataDist(LLMRole.DECODER, duo.DECODER))
        decoder.init(duo.options())
        infos = [duo.cluster(made.node.cluster_id, made.node.listen_address) for made in sources]
        assert decoder.link_clusters(infos, duo.TIMEOUT_MS) == (duo.OK, [duo.OK] * links)
        manager, wrong = decoder.kv_cache_manager, []

        def work(number: int) -> None:
            cache, entry = manager.allocate_cache(desc), number % 4
            for turn in range(3):
                key = CacheKey(10 + (number + turn) % links, entry)
                manager.pull_cache(key, cache, turn, src_cache_offset=0)
                if not duo.holds(cache, entry=turn, source=entry):
                    wrong.append((number, turn))
            manager.deallocate_cache(cache)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert wrong == []
        assert decoder.counters["pulls_finished"] == 48


def until(condition: Any) -> None:
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.002)
