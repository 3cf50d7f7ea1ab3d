"""Programs that never call `finalize` end by themselves, with the status they chose, in time, and their peers go on."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvpull_sync import CacheKey, LLMDataDist, LLMRole
from tests import duo
from tests.integration.running import Running, running
from tests.integration.test_blocking import Source, source, until

CLOSE_MS = 2000
IN_TIME = CLOSE_MS / 1000 + 13
"""Seconds in which a program has ended that waits `close_timeout`; a pull's own deadline is 30 s."""


@contextmanager
def program(way: str, made: Source, **given: Any) -> Iterator[Running]:
    given = {
        "address": made.node.listen_address,
        "options": {"close_timeout": CLOSE_MS, "settle_timeout": 500},
        **given,
    }
    with running("exiting", way, json.dumps(given), PYTHONWARNINGS="error") as child:
        child.hear("ready")
        yield child


def ended(child: Running, began: float) -> tuple[int, str]:
    result = child.end()
    assert time.monotonic() - began < IN_TIME
    return result


def check_the_peer_goes_on(made: Source) -> None:
    """The source has noticed that the program is gone, and serves the next one."""
    until(lambda: not _up(made))
    with LLMDataDist(LLMRole.DECODER, 3) as other:
        other.init(duo.options())
        info = duo.cluster(duo.PROMPT, made.node.listen_address)
        assert other.link_clusters([info], duo.TIMEOUT_MS) == (duo.OK, [duo.OK])
        manager, desc = other.kv_cache_manager, made.caches[0].cache_desc
        cache = manager.allocate_cache(desc)
        manager.pull_cache(CacheKey(duo.PROMPT, 2), cache, src_cache_offset=0)
        assert duo.holds(cache, entry=0, source=2)
        manager.deallocate_cache(cache)


def _up(made: Source) -> bool:
    return any(link.state.value == "ready" for link in duo.engine_of(made.node).links.all())


@pytest.mark.parametrize(
    ("way", "status", "stderr"),
    [
        ("returns", 0, ""),
        ("forgets", 0, ""),
        ("exits", 7, ""),
        ("raises", 1, "ValueError: of the program's own"),
        ("leaves", 9, ""),
        ("awaits", 3, ""),
    ],
)
def test_a_program_without_finalize_ends_with_its_own_status(way: str, status: int, stderr: str) -> None:
    with source() as made:
        with program(way, made) as child:
            began = time.monotonic()
            child.tell()
            code, errors = ended(child, began)
        assert code == status, errors
        assert errors.strip().endswith(stderr) if stderr else errors == ""
        assert errors.count("Traceback") == (1 if stderr else 0)
        check_the_peer_goes_on(made)


def test_a_silent_peer_does_not_hold_up_the_end() -> None:
    with source() as made, program("returns", made) as child, duo.frozen(made.node):
        began = time.monotonic()
        child.tell()
        assert ended(child, began) == (0, "")


@pytest.mark.parametrize("big", [False, True], ids=["inline", "streamed"])
def test_a_pull_of_a_daemon_thread_does_not_hold_up_the_end(*, big: bool) -> None:
    with source(big=big) as made:
        with program("pulls", made, big=big) as child, duo.frozen(made.node):
            began = time.monotonic()
            child.tell()
            code, errors = ended(child, began)
            assert code == 4, errors
            assert errors == ""
        check_the_peer_goes_on(made)


@pytest.mark.slow
def test_p8_a_copy_that_never_ends_does_not_hold_up_the_end_either() -> None:
    with source(big=True) as made:
        with program("is_stuck", made, big=True) as child:
            began = time.monotonic()
            child.tell()
            code, errors = ended(child, began)
            assert code == 5, errors
        check_the_peer_goes_on(made)


def test_sigterm_by_default_ends_it_at_once_and_the_peer_notices() -> None:
    with source() as made:
        with program("waits_for_a_signal", made) as child, duo.frozen(made.node):
            child.tell()
            child.hear("pulling")
            began = time.monotonic()
            child.signal(signal.SIGTERM)
            assert ended(child, began) == (-signal.SIGTERM, "")
        check_the_peer_goes_on(made)


@pytest.mark.parametrize("big", [False, True], ids=["inline", "streamed"])
def test_a_handler_that_exits_during_a_pull_keeps_its_status(*, big: bool) -> None:
    with source(big=big) as made:
        with program("handles_a_signal", made, big=big) as child, duo.frozen(made.node):
            child.tell()
            child.hear("pulling")
            began = time.monotonic()
            child.signal(signal.SIGTERM)
            code, errors = ended(child, began)
            assert code == 6, errors
            assert errors == ""
        check_the_peer_goes_on(made)


def test_ctrl_c_that_nobody_catches_ends_it_as_python_does() -> None:
    with source() as made:
        with program("waits_for_a_signal", made) as child, duo.frozen(made.node):
            child.tell()
            child.hear("pulling")
            began = time.monotonic()
            child.signal(signal.SIGINT)
            code, errors = ended(child, began)
            assert code == -signal.SIGINT, errors
            assert errors.strip().endswith("KeyboardInterrupt")
        check_the_peer_goes_on(made)
