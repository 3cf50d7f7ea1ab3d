"""Events reach whatever log the application has, keep their field names, and never disturb what they tell about."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvpull_async import observe
from kvpull_async.observe import Counters, EventQueue, Log, Report
from kvpull_async.status import LLMException, LLMStatusCode

BOUND = 10.0


@pytest.fixture(autouse=True)
def _plain_logging() -> Iterator[None]:
    """Structlog and the complaint about a broken sink are of the whole process."""
    observe._complained.clear()
    yield
    structlog.reset_defaults()
    observe._complained.clear()


@pytest.fixture
def captured() -> list[dict[str, Any]]:
    """Structlog configured with a list as its sink."""
    events: list[dict[str, Any]] = []

    def take(_: object, level: str, event: structlog.types.EventDict) -> str:
        events.append({"level": level, **event})
        raise structlog.DropEvent

    structlog.configure(processors=[take])
    return events


class Sink:
    """A structlog sink that blocks until it is told to go on."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.entered = threading.Event()
        self.opened = threading.Event()
        structlog.configure(processors=[self._take])

    def _take(self, _: object, level: str, event: structlog.types.EventDict) -> str:
        self.entered.set()
        assert self.opened.wait(BOUND)
        self.events.append(event["event"])
        raise structlog.DropEvent


# -- where events go ---------------------------------------------------------------------------------------------------


def test_without_structlog_events_are_records_of_the_logger_kvpull(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvpull")
    observe.emit("info", "link.up", {"cluster_id": 3, "peer": "127.0.0.1:9"})
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("kvpull", "INFO")
    assert record.getMessage() == "link.up cluster_id=3 peer=127.0.0.1:9"
    assert vars(record)["kvpull"] == {"event": "link.up", "cluster_id": 3, "peer": "127.0.0.1:9"}


def test_the_loggers_level_decides(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvpull")
    for level in ("debug", "info", "warning", "error"):
        observe.emit(level, f"a.{level}", {})
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]


def test_a_percent_sign_in_a_field_is_only_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvpull")
    observe.emit("info", "link.up", {"peer": "100%s %d"})
    assert "peer=100%s %d" in caplog.records[0].getMessage()


def test_configured_structlog_gets_the_events_and_the_standard_logger_none(
    captured: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "kvpull")
    observe.emit("warning", "link.lost", {"cluster_id": 3})
    assert captured == [{"level": "warning", "event": "link.lost", "cluster_id": 3}]
    assert caplog.records == []


def test_a_sink_that_raises_is_reported_once_and_fails_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> str:
        raise OSError("the disk is full")

    structlog.configure(processors=[broken])
    for _ in range(3):
        observe.emit("info", "link.up", {})
    err = capsys.readouterr().err
    assert err.count("Traceback") == 1
    assert err.endswith("OSError: the disk is full\n")


def test_a_raising_handler_of_the_standard_logger_fails_nobody_either(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the disk is full")

    handler = Broken()
    logging.getLogger("kvpull").addHandler(handler)
    try:
        observe.emit("error", "link.lost", {})
    finally:
        logging.getLogger("kvpull").removeHandler(handler)
    assert "the disk is full" in capsys.readouterr().err


# -- bound fields ------------------------------------------------------------------------------------------------------


def test_bound_fields_stand_before_those_of_the_event(captured: list[dict[str, Any]]) -> None:
    log = Log(None, local_cluster_id=1).bind(peer="a")
    log.info("link.up", path="tcp")
    assert captured == [{"level": "info", "event": "link.up", "local_cluster_id": 1, "peer": "a", "path": "tcp"}]


def test_binding_again_replaces_and_leaves_the_original_alone(captured: list[dict[str, Any]]) -> None:
    first = Log(None, peer="a")
    first.bind(peer="b").warning("one")
    first.error("two", peer="c")
    first.debug("three")
    assert [(event["event"], event["peer"]) for event in captured] == [("one", "b"), ("two", "c"), ("three", "a")]


# -- the queue that takes the core's events to the log -----------------------------------------------------------------


def test_queued_events_arrive_in_order_and_closing_waits_for_them(captured: list[dict[str, Any]]) -> None:
    events = EventQueue()
    log = Log(events, local_cluster_id=1)
    for number in range(100):
        log.info("link.up", number=number)
    assert events.close(BOUND)
    assert [event["number"] for event in captured] == list(range(100))
    assert events.dropped == 0


def test_a_stuck_sink_delays_nobody_and_what_does_not_fit_is_counted() -> None:
    sink, events = Sink(), EventQueue()
    events.put("info", "first", {})
    assert sink.entered.wait(BOUND)
    for _ in range(observe._QUEUE_LIMIT + 5):
        events.put("info", "more", {})  # would block here for ever
    assert events.dropped == 5
    sink.opened.set()
    assert events.close(BOUND)
    assert sink.events[:3] == ["first", "log.dropped", "more"]
    assert sink.events.count("log.dropped") == 1
    assert sink.events.count("more") == observe._QUEUE_LIMIT


def test_the_warning_about_lost_events_says_how_many(captured: list[dict[str, Any]]) -> None:
    events = EventQueue()
    events.dropped = 7
    events.put("info", "next", {})
    assert events.close(BOUND)
    assert captured[0] == {"level": "warning", "event": "log.dropped", "events": 7}


def test_closing_is_bounded_when_the_sink_is_stuck() -> None:
    sink, events = Sink(), EventQueue()
    events.put("info", "first", {})
    assert sink.entered.wait(BOUND)
    assert not events.close(0.01)
    sink.opened.set()
    assert events.close(BOUND)


def test_closing_is_bounded_when_the_queue_is_full() -> None:
    sink, events = Sink(), EventQueue()
    for _ in range(observe._QUEUE_LIMIT + 2):
        events.put("info", "more", {})
    assert not events.close(0.01)
    sink.opened.set()
    assert events.close(BOUND)


def test_the_queue_survives_a_sink_that_raises(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []

    def moody(_: object, level: str, event: structlog.types.EventDict) -> str:
        seen.append(event["event"])
        raise OSError("not now")

    structlog.configure(processors=[moody])
    events = EventQueue()
    for name in ("one", "two"):
        events.put("info", name, {})
    assert events.close(BOUND)
    assert seen == ["one", "two"]
    assert capsys.readouterr().err.count("Traceback") == 1


# -- counters ----------------------------------------------------------------------------------------------------------


def test_counters_add_up_and_a_snapshot_is_a_copy() -> None:
    counters = Counters()
    counters.add("pulls_started")
    counters.add("bytes_pulled", 12)
    counters.add("bytes_pulled", 30)
    snapshot = counters.snapshot()
    snapshot["pulls_started"] = 99
    assert counters.snapshot() == {"pulls_started": 1, "bytes_pulled": 42}


# -- the report of one pull --------------------------------------------------------------------------------------------

STABLE = {"operation", "pull_id", "local_cluster_id", "cluster_id", "key", "peer", "path", "bytes", "elapsed_ms"}


def report(**fields: Any) -> Report:
    return Report("pull_cache", "0011223344556677", cluster_id=4, **fields)


def test_phases_add_up_and_one_ends_where_the_next_begins() -> None:
    told = report()
    told.enter("queue")
    told.enter("request")
    first = told.phases["queue"]
    told.enter("queue")
    told.leave()
    assert told.phases["queue"] > first
    assert set(told.phases) == {"queue", "request"}
    before = dict(told.phases)
    told.leave()
    assert told.phases == before
    assert told.fields()["queue_ms"] == pytest.approx(told.phases["queue"], abs=0.001)


def test_a_finished_pull_has_the_stable_fields(captured: list[dict[str, Any]]) -> None:
    told = report(traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    told.peer, told.path, told.bytes = "127.0.0.1:9", "tcp", 4096
    told.enter("copy")
    told.leave()
    told.started_event()
    told.finished_event()
    started, finished = captured
    assert (started["event"], finished["event"]) == ("pull.started", "pull.finished")
    assert {started["level"], finished["level"]} == {"debug"}
    assert set(finished) == STABLE | {"level", "event", "traceparent", "copy_ms"}
    assert set(started) == set(finished) - {"bytes", "elapsed_ms", "peer", "path"}
    assert (finished["bytes"], finished["peer"], finished["path"]) == (4096, "127.0.0.1:9", "tcp")
    assert finished["elapsed_ms"] >= 0


def test_a_failed_pull_tells_class_status_and_reason(captured: list[dict[str, Any]]) -> None:
    error = LLMException("no such key", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
    report().failed_event(error)
    (event,) = captured
    assert (event["level"], event["event"]) == ("warning", "pull.failed")
    assert (event["error"], event["status"]) == ("LLMException", "LLM_KV_CACHE_NOT_EXIST")
    assert event["reason"] == "no such key"
    assert set(event) >= STABLE
    assert "destination_unsafe" not in event


def test_an_unsafe_destination_stands_in_the_event(captured: list[dict[str, Any]]) -> None:
    report().failed_event(LLMException("late", status_code=77, destination_unsafe=True))
    assert captured[0]["destination_unsafe"] is True
    assert captured[0]["status"] == 77


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit()], ids=lambda error: type(error).__name__)
def test_the_callers_own_wish_is_no_warning(captured: list[dict[str, Any]], error: BaseException) -> None:
    report().failed_event(error)
    assert captured[0]["level"] == "debug"
    assert captured[0]["event"] == "pull.failed"


def test_a_report_names_its_node_its_key_and_what_it_is_part_of(captured: list[dict[str, Any]]) -> None:
    told = report(local_cluster_id=7, key=lambda: "request:5:0", part_of={"transfer_id": "t", "layer": 0})
    told.started_event()
    told.finished_event()
    told.failed_event(LLMException("no"))
    for event in captured:
        assert (event["local_cluster_id"], event["key"]) == (7, "request:5:0")
        assert (event["transfer_id"], event["layer"]) == ("t", 0)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (("request", 7, 3), "request:7:3"),
        (("prefix", 9), "prefix:9:0"),
        (("cache", 5, 0, 2), "cache:5:0:2"),
        (("cache", -1, 0, 0), "cache:-1:0"),
        (("blocks", 0, 4), "blocks:0:4"),
        (("address", 4096), "address:0x1000"),
        (("address", -4096, 1, 2), "address:-0x1000"),
    ],
)
def test_a_key_has_a_short_name(numbers: Any, text: str) -> None:
    assert observe.key_text(*numbers) == text


def test_a_cancellation_that_came_too_late_is_marked(captured: list[dict[str, Any]]) -> None:
    told = report()
    told.cancelled_late = True
    told.finished_event()
    assert captured[0]["cancelled_late"] is True


def test_a_push_tells_of_itself_in_events_of_its_own_with_the_same_fields(captured: list[dict[str, Any]]) -> None:
    told = observe.Report("push_cache", "0123456789abcdef", "", 7, push=True)
    told.started_event()
    told.finished_event()
    told.failed_event(LLMException("late", status_code=77, destination_unsafe=True))
    told.failed_event(asyncio.CancelledError())
    assert [event["event"] for event in captured] == ["push.started", "push.finished", "push.failed", "push.failed"]
    assert [event["level"] for event in captured] == ["debug", "debug", "warning", "debug"]
    assert captured[2]["destination_unsafe"] is True
    assert {event["pull_id"] for event in captured} == {"0123456789abcdef"}
    assert told.fields().keys() == observe.Report("pull_cache", "0123456789abcdef", "", 7).fields().keys()


def test_successes_cost_nothing_when_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvpull")
    report().started_event()
    report().finished_event()
    assert caplog.records == []


def test_pull_ids_differ() -> None:
    ids = {observe.new_pull_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(name) == 16 and int(name, 16) >= 0 for name in ids)


# -- helpers for applications ------------------------------------------------------------------------------------------


def test_json_lines_are_one_object_per_event() -> None:
    stream = io.StringIO()
    observe.json_lines(stream)
    observe.emit("info", "link.up", {"cluster_id": 3, "odd": Path("x")})
    observe.emit("debug", "link.detail", {})
    observe.emit("warning", "link.lost", {"reason": 'a "quoted"\nline'})
    up, lost = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (up["event"], up["level"], up["cluster_id"]) == ("link.up", "info", 3)
    assert "x" in up["odd"]
    assert up["timestamp"].endswith("Z")
    assert lost["reason"] == 'a "quoted"\nline'


def test_the_level_of_json_lines_can_be_lowered() -> None:
    stream = io.StringIO()
    observe.json_lines(stream, level="debug")
    observe.emit("debug", "pull.started", {})
    assert json.loads(stream.getvalue())["event"] == "pull.started"


def test_the_console_writes_for_people_and_without_colours_into_a_file() -> None:
    stream = io.StringIO()
    observe.console(stream)
    observe.emit("info", "link.up", {"cluster_id": 3})
    text = stream.getvalue()
    assert "link.up" in text
    assert "cluster_id=3" in text
    assert "\x1b" not in text


@pytest.mark.parametrize("configure", [observe.json_lines, observe.console])
def test_the_helpers_write_to_standard_error_by_default(configure: Any, capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    observe.emit("info", "link.up", {})
    out, err = capsys.readouterr()
    assert out == ""
    assert "link.up" in err


def test_what_the_application_bound_to_its_context_stands_in_the_callers_events() -> None:
    stream = io.StringIO()
    observe.json_lines(stream)
    with structlog.contextvars.bound_contextvars(user="u1"):
        observe.emit("info", "pull.finished", {})
    assert json.loads(stream.getvalue())["user"] == "u1"
