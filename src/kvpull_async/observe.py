"""What operators see: event names, the logger, counters, and the report of one pull. It must not configure logging.

Where the application configured structlog, events go through it. Otherwise they go to the standard library's logger
`kvpull`: an unconfigured structlog would print every event.
"""

from __future__ import annotations

import functools
import json
import logging
import queue
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

import structlog

__all__ = ["Counters", "EventQueue", "Log", "Report", "console", "emit", "json_lines", "key_text", "new_pull_id"]

_LOGGER: Final = logging.getLogger("kvpull")
_LOGGER.addHandler(logging.NullHandler())
_QUEUE_LIMIT: Final = 4096
_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_KNOWN_LATER: Final = ("peer", "path", "bytes", "elapsed_ms")
"""Fields of a call that its first event cannot have."""
_complained = threading.Event()


def emit(level: str, event: str, fields: Mapping[str, Any]) -> None:
    """Hand one event to the application's log, on this thread. A sink that raises is reported once on stderr: a broken
    log must not fail a pull whose bytes have landed.
    """
    try:
        if structlog.is_configured():
            getattr(structlog.get_logger("kvpull"), level)(event, **fields)
        elif _LOGGER.isEnabledFor(_LEVELS[level]):
            text = " ".join(f"{name}={_one_line(value)}" for name, value in fields.items())
            _LOGGER.log(_LEVELS[level], "%s %s", event, text, extra={"kvpull": {"event": event, **fields}})
    except Exception:  # noqa: BLE001  (whatever a sink raises)
        if not _complained.is_set():
            _complained.set()
            traceback.print_exc(file=sys.stderr)


def _one_line(value: object) -> str:
    """A peer's words may hold line breaks; a record that they forge must not look like ours."""
    text = str(value)
    return text if text.isprintable() else repr(text)


class EventQueue:
    """Takes the core's events to the log on a thread of its own, so that a slow sink delays no pull.

    Bounded: what does not fit is counted in `dropped`, and the next event that fits is preceded by a warning.
    """

    def __init__(self) -> None:
        self.dropped: int = 0
        self._told = 0
        self._closing = False
        self._queue: queue.Queue[tuple[str, str, dict[str, Any]] | None] = queue.Queue(_QUEUE_LIMIT)
        self._thread = threading.Thread(target=self._run, name="kvpull-log", daemon=True)
        self._thread.start()

    def put(self, level: str, event: str, fields: dict[str, Any]) -> None:
        try:
            self._queue.put_nowait((level, event, fields))
        except queue.Full:
            self.dropped += 1

    def close(self, timeout: float) -> bool:
        """Write what is queued; False when the sink did not finish within `timeout` seconds. May be called again."""
        end = time.monotonic() + timeout
        if not self._closing:
            try:
                self._queue.put(None, timeout=timeout)
            except queue.Full:
                return False
            self._closing = True
        self._thread.join(max(0.0, end - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self.dropped > self._told:
                emit("warning", "log.dropped", {"events": self.dropped - self._told})
                self._told = self.dropped
            emit(*item)


class Log:
    """A logger with bound fields. Without a queue it writes on the calling thread."""

    def __init__(self, events: EventQueue | None = None, **fields: Any) -> None:
        self._events = events
        self._fields = fields

    def bind(self, **fields: Any) -> Log:
        return Log(self._events, **{**self._fields, **fields})

    @property
    def debugging(self) -> bool:
        """Whether `debug` events are wanted at all."""
        if structlog.is_configured():
            return _debugs(structlog.get_config()["wrapper_class"])
        return _LOGGER.isEnabledFor(logging.DEBUG)

    def debug(self, event: str, **fields: Any) -> None:
        if self.debugging:
            self._put("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._put("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._put("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._put("error", event, fields)

    def _put(self, level: str, event: str, fields: dict[str, Any]) -> None:
        if self._events is None:
            emit(level, event, {**self._fields, **fields})
        else:
            self._events.put(level, event, {**self._fields, **fields})


@functools.lru_cache(maxsize=16)
def _debugs(wrapper: type[Any]) -> bool:
    """Whether structlog's loggers of that class let debug events through: those that filter have a stub for it."""
    return getattr(getattr(wrapper, "debug", None), "__name__", "") != "_nop"


class Counters:
    """What happened since `init`, by name. `add` is for the core's thread only, the rest for any."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._elsewhere: Counter[str] = Counter()
        self._lock = threading.RLock()  # protects _elsewhere; a signal handler may look at the counters, or pull

    def add(self, name: str, amount: int = 1) -> None:
        self._counts[name] += amount

    def add_elsewhere(self, amounts: Mapping[str, int]) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._elsewhere[name] += amount

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            merged = Counter(self._counts)
            merged.update(self._elsewhere)
            return dict(merged)


@dataclass
class Report:
    """One pull or push, as both its log events and its error tell it. Times are in ms, by phase."""

    operation: str
    pull_id: str
    traceparent: str = ""
    cluster_id: int = 0
    peer: str = ""
    path: str = ""
    bytes: int = 0
    started: float = field(default_factory=time.monotonic)
    phases: dict[str, float] = field(default_factory=dict)
    push: bool = False
    cancelled_late: bool = False
    ended: float | None = None
    """Set where the caller hears of the end later than it came, at a time of its own choosing."""
    local_cluster_id: int = 0
    key: Callable[[], str] = str
    """Says what is pulled, or where a push goes; asked only when there is an event to write."""
    part_of: Mapping[str, Any] | None = None
    """Further fields: what this is a part of."""
    _phase: str = ""
    _entered: float = 0.0

    @property
    def elapsed_ms(self) -> float:
        return ((time.monotonic() if self.ended is None else self.ended) - self.started) * 1000

    def enter(self, phase: str) -> None:
        """From now on the time counts for this phase: queue, connect, request, copy, settle or wait."""
        now = time.monotonic()
        if self._phase:
            self.phases[self._phase] = self.phases.get(self._phase, 0.0) + (now - self._entered) * 1000
        self._phase, self._entered = phase, now

    def leave(self) -> None:
        """No phase any more."""
        self.enter("")

    def fields(self) -> dict[str, Any]:
        """Stable field names of every `pull.*` and `push.*` event."""
        fields: dict[str, Any] = {
            "operation": self.operation,
            "pull_id": self.pull_id,
            "local_cluster_id": self.local_cluster_id,
            "cluster_id": self.cluster_id,
            "key": self.key(),
            **(self.part_of or {}),
            "peer": self.peer,
            "path": self.path,
            "bytes": self.bytes,
            "elapsed_ms": round(self.elapsed_ms, 3),
        }
        fields.update({f"{name}_ms": round(spent, 3) for name, spent in self.phases.items()})
        if self.traceparent:
            fields["traceparent"] = self.traceparent
        if self.cancelled_late:
            fields["cancelled_late"] = True
        return fields

    def started_event(self) -> None:
        if structlog.is_configured() or _LOGGER.isEnabledFor(logging.DEBUG):
            fields = self.fields()
            known = {key: fields[key] for key in fields if key not in _KNOWN_LATER}
            emit("debug", "push.started" if self.push else "pull.started", known)

    def finished_event(self) -> None:
        if structlog.is_configured() or _LOGGER.isEnabledFor(logging.DEBUG):
            emit("debug", "push.finished" if self.push else "pull.finished", self.fields())

    def failed_event(self, error: BaseException) -> None:
        """A failure is a warning; a cancellation is the caller's own wish and stays at debug level."""
        fields = self.failed_fields(error)
        emit(
            "warning" if isinstance(error, Exception) else "debug",
            "push.failed" if self.push else "pull.failed",
            fields,
        )

    def failed_fields(self, error: BaseException) -> dict[str, Any]:
        fields = {**self.fields(), "error": type(error).__name__, "reason": str(error)}
        status = getattr(error, "status_code", None)
        if status is not None:
            fields["status"] = getattr(status, "name", status)
        if getattr(error, "destination_unsafe", False):
            fields["destination_unsafe"] = True
        return fields


def key_text(kind: str, number: int, model: int = 0, entry: int = 0) -> str:
    """A key as events name it: its kind, number, model and, unless it is 0, batch entry; of an address only that."""
    if kind == "address":
        return f"{kind}:{number:#x}"
    return f"{kind}:{number}:{model}" + (f":{entry}" if entry else "")


def new_pull_id() -> str:
    return f"{random.getrandbits(64):016x}"  # a name, no secret


def json_lines(stream: TextIO | None = None, *, level: str = "INFO") -> None:
    """For applications: configure structlog to write one JSON object per event to `stream` (default stderr)."""
    _configure(structlog.processors.JSONRenderer(serializer=_dumps), stream, level)


def console(stream: TextIO | None = None, *, level: str = "INFO") -> None:
    """For applications: configure structlog to write events for people to `stream` (default stderr)."""
    target = stream or sys.stderr
    _configure(structlog.dev.ConsoleRenderer(colors=target.isatty()), target, level)


def _dumps(value: Any, **kwargs: Any) -> str:
    return json.dumps(value, **{"default": str, **kwargs})


def _configure(renderer: structlog.types.Processor, stream: TextIO | None, level: str) -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(stream or sys.stderr),
        cache_logger_on_first_use=False,
    )
