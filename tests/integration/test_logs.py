"""P9 as operators meet it: what is written where, under which names, and that no log holds up or fails a pull."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import structlog

from kvpull_async import CacheKey, LLMException, observe
from kvpull_sync import LLMDataDist, LLMRole
from tests import duo
from tests.loop_nodes import event_log, eventually
from tests.npu import emulated

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
BOUND = 20.0


@pytest.fixture
def plain_structlog() -> Iterator[None]:
    observe._complained.clear()
    yield
    structlog.reset_defaults()
    observe._complained.clear()


# -- where events go ---------------------------------------------------------------------------------------------------

PROGRAM = """
import asyncio, logging, sys
{before}
from kvpull_async import CacheKey, LLMException, observe
from tests import duo

async def main():
    async with duo.duo() as pair:
        await pair.publish()
        cache = await pair.destination()
        await pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 0), cache)
        try:
            await pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 404), cache)
        except LLMException:
            pass

{after}
asyncio.run(main())
root, own = logging.getLogger(), logging.getLogger("kvpull")
assert own.level == logging.NOTSET and own.propagate
assert [type(handler).__name__ for handler in own.handlers] == ["NullHandler"]
"""


def output(*, before: str = "", after: str = "") -> tuple[str, str]:
    """What a program with these lines of its own writes to standard output and to standard error."""
    program = PROGRAM.format(before=before, after=after)
    command = [sys.executable, "-W", "error", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_by_default_nothing_is_written_anywhere() -> None:
    assert output() == ("", "")


def test_structlog_that_is_imported_and_not_configured_is_left_alone() -> None:
    assert output(before="import structlog", after="assert not structlog.is_configured()") == ("", "")


def test_the_standard_library_shows_link_changes_and_failures_on_standard_error() -> None:
    out, err = output(before="logging.basicConfig(level=logging.INFO)")
    assert out == ""
    assert err.count("INFO:kvpull:link.up ") == 2
    assert err.count("WARNING:kvpull:pull.failed ") == 1
    assert "pull.finished" not in err


@pytest.mark.parametrize("helper", ["json_lines", "console"])
def test_the_helpers_show_both_sides_on_standard_error(helper: str) -> None:
    out, err = output(after=f"observe.{helper}(level='debug')")
    assert out == ""
    for event in ("link.up", "pull.started", "pull.finished", "serve.finished", "pull.failed", "serve.refused"):
        assert event in err, event
    if helper == "json_lines":
        lines = [json.loads(line) for line in err.splitlines()]
        assert all({"event", "level", "timestamp"} <= set(line) for line in lines)


# -- stable names ------------------------------------------------------------------------------------------------------

STARTED = {"operation", "pull_id", "local_cluster_id", "cluster_id", "key", "traceparent"}
PULL = STARTED | {"peer", "path", "queue_ms", "connect_ms", "request_ms"}
SERVE = {"local_cluster_id", "cluster_id", "peer", "pull_id", "request_id", "key", "traceparent"}
NPU = {"device_id", "library", "soc", "version", "missing"}
FIELDS: dict[str, set[str]] = {
    "memory.chosen": {"local_cluster_id", "backend", "reason"} | (NPU if emulated() else set()),
    "link.listening": {"local_cluster_id", "address"},
    "link.up": {"local_cluster_id", "cluster_id", "peer", "path", "why", "dialled", "protocol"},
    "link.lost": {"local_cluster_id", "cluster_id", "peer", "reason"},
    "link.closed": {"local_cluster_id", "cluster_id", "peer", "reason"},
    "link.failed": {"local_cluster_id", "cluster_id", "peer", "status", "reason"},
    "cache.allocated": {"local_cluster_id", "cache_id", "bytes", "keys"},
    "cache.registered": {"local_cluster_id", "cache_id", "keys"},
    "pull.started": STARTED,
    "pull.finished": PULL | {"bytes", "elapsed_ms", "copy_ms"},
    "pull.failed": PULL | {"bytes", "elapsed_ms", "error", "status", "reason"},
    "serve.started": SERVE | {"cache_id", "bytes"},
    "serve.finished": SERVE | {"bytes", "inline", "elapsed_ms"},
    "serve.refused": SERVE | {"status", "reason"},
    "serve.key_consumed": {"local_cluster_id", "cluster_id", "peer", "pull_id"},
}


@pytest.mark.parametrize("transport", ["tcp", "inproc", "shm"])
async def test_events_and_their_fields_keep_their_names(transport: str) -> None:
    with event_log() as log:
        async with duo.duo(transport=transport) as pair:
            await pair.publish()
            manager, cache = pair.decoder.kv_cache_manager, await pair.destination()
            await manager.pull_cache(CacheKey(duo.PROMPT, 0), cache, traceparent=TRACE)
            with pytest.raises(LLMException):
                await manager.pull_cache(CacheKey(duo.PROMPT, 404), cache, traceparent=TRACE)
            nowhere = duo.cluster(99, ("127.0.0.1", 9))
            assert duo.codes(await pair.decoder.link_clusters([nowhere])) == ["LLM_LINK_FAILED"] * 2
            desc, memory = duo.SMALL, [4096] * duo.SMALL.num_tensors
            registered = await pair.decoder.cache_manager.register_cache(desc, memory)
            await pair.decoder.cache_manager.unregister_cache(registered.cache_id)
    told: dict[str, set[str]] = {}
    for event in log.events:
        fields = set(event) - {"event"}
        assert told.setdefault(event["event"], fields) == fields, event
    assert set(told) - set(FIELDS) == set(), "say what is in a new event, here and in the documentation"
    assert told == {name: FIELDS[name] for name in told}
    assert set(FIELDS) - set(told) <= {"link.lost"}


def test_p9_the_blocking_api_tells_the_same_story_on_both_sides() -> None:
    with event_log() as log, LLMDataDist(LLMRole.PROMPT, duo.PROMPT) as prompt:
        prompt.init(duo.options(listen=True))
        source = prompt.kv_cache_manager.allocate_cache(duo.SMALL, duo.keys(duo.SMALL))
        with LLMDataDist(LLMRole.DECODER, duo.DECODER) as decoder:
            decoder.init(duo.options())
            decoder.link_clusters([duo.cluster(duo.PROMPT, prompt.listen_address)], raise_on_error=True)
            cache = decoder.kv_cache_manager.allocate_cache(duo.SMALL)
            decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 1), cache, traceparent=TRACE)
            decoder.kv_cache_manager.deallocate_cache(cache)
        prompt.kv_cache_manager.deallocate_cache(source)
    names = ("pull.started", "pull.finished", "serve.started", "serve.finished")
    told = [event for name in names for event in log.named(name)]
    assert len(told) == 4
    assert len({(event["pull_id"], event["traceparent"]) for event in told}) == 1
    assert told[0]["traceparent"] == TRACE


async def test_p9_a_lease_that_expires_names_its_pull() -> None:
    with event_log() as log:
        async with duo.duo(transport="inproc", lease_margin=50) as pair:
            await pair.publish(duo.BIG)
            cache = await pair.destination(duo.BIG)
            gate = duo.gate(pair.decoder).landing_gate
            gate.close()
            pull = asyncio.ensure_future(
                pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 0), cache, timeout=400, traceparent=TRACE)
            )
            await gate.reached()
            with duo.frozen(pair.decoder):  # it neither says DONE nor takes its request back
                event = await log.first("serve.lease_expired")
            gate.open()
            with pytest.raises(LLMException):
                await pull
        (started,) = log.named("pull.started")
        assert event["pull_id"] == started["pull_id"]
        assert event["traceparent"] == TRACE


async def test_p9_a_quarantined_destination_names_its_pull() -> None:
    with event_log() as log:
        async with duo.duo(settle_timeout=50) as pair:
            await pair.publish(duo.BIG)
            cache = await pair.destination(duo.BIG)
            gate = duo.gate(pair.decoder).landing_gate
            gate.close()
            with pytest.raises(LLMException) as caught:
                await pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 0), cache, timeout=300)
            assert caught.value.destination_unsafe
            event = await log.first("region.quarantined", cache_id=cache.cache_id)
            gate.open()
            await pair.decoder.kv_cache_manager.settled(cache)
        (failed,) = log.named("pull.failed")
        assert failed["pull_id"] == event["pull_id"]
        assert failed["destination_unsafe"] is True


# -- sinks that misbehave ----------------------------------------------------------------------------------------------


async def pulls(pair: duo.Duo, count: int) -> None:
    """So many pulls, all right."""
    cache = await pair.destination()
    for number in range(count):
        await pair.decoder.kv_cache_manager.pull_cache(
            CacheKey(duo.PROMPT, number % 4), cache, number % 4, src_cache_offset=0
        )
        assert duo.holds(cache, entry=number % 4, source=number % 4)


async def test_a_sink_that_hangs_delays_no_pull_and_what_was_lost_is_counted(
    plain_structlog: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, events = threading.Event(), []

    def hang(_: object, level: str, event: structlog.types.EventDict) -> str:
        if threading.current_thread().name == "kvpull-log":
            assert release.wait(BOUND * 2)
        events.append(dict(event))
        raise structlog.DropEvent

    monkeypatch.setattr(observe, "_QUEUE_LIMIT", 16)
    structlog.configure(processors=[hang])
    try:
        async with duo.duo() as pair:
            await pair.publish()
            await asyncio.wait_for(pulls(pair, 40), BOUND)  # two events each for the prompt node's log
            lost = pair.prompt.counters["events_dropped"]
            assert lost >= 40
            assert sum(event["event"] == "pull.finished" for event in events) == 40  # these are the caller's own
            release.set()
            await eventually(lambda: any(event["event"] == "log.dropped" for event in list(events)))
    finally:
        release.set()
    assert sum(event["events"] for event in events if event["event"] == "log.dropped") >= lost


async def test_a_sink_that_raises_fails_no_pull_and_is_reported_once(
    plain_structlog: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> str:
        raise OSError("no space left")

    structlog.configure(processors=[broken])
    async with duo.duo() as pair:
        await pair.publish()
        await pulls(pair, 10)
        with pytest.raises(LLMException):
            await pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 404), await pair.destination())
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("no space left") == 2  # the line of source, and the error
    assert err.count("Traceback") == 1


async def test_the_callers_events_are_written_on_its_thread_and_the_cores_on_none_that_matters(
    plain_structlog: None,
) -> None:
    threads: dict[str, set[str]] = {}

    def note(_: object, level: str, event: structlog.types.EventDict) -> str:
        threads.setdefault(event["event"].partition(".")[0], set()).add(threading.current_thread().name)
        raise structlog.DropEvent

    structlog.configure(processors=[note])
    async with duo.duo() as pair:
        await pair.publish()
        await pulls(pair, 4)
    assert threads.pop("pull") == {"MainThread"}
    assert threads == {kind: {"kvpull-log"} for kind in ("serve", "link", "cache", "memory")}


async def test_what_the_caller_bound_to_its_context_stands_in_its_pulls(plain_structlog: None) -> None:
    stream = io.StringIO()
    observe.json_lines(stream, level="debug")
    async with duo.duo() as pair:
        await pair.publish()
        with structlog.contextvars.bound_contextvars(request="r-17"):
            await pulls(pair, 1)
    told = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert {event.get("request") for event in told if event["event"].startswith("pull.")} == {"r-17"}
    assert {event.get("request") for event in told if event["event"].startswith(("serve.", "link."))} == {None}


async def test_a_level_above_the_events_costs_nothing_and_loses_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "kvpull")
    async with duo.duo() as pair:
        await pair.publish()
        await pulls(pair, 4)
        await eventually(lambda: pair.prompt.counters.get("serves") == 4)
        assert "events_dropped" not in pair.prompt.counters
    assert caplog.records == []
