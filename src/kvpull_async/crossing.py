"""The two ways across to an engine's core and back, with what a call tells the log. It must not know what calls do."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from kvpull_async.core import Call
from kvpull_async.engine import Engine
from kvpull_async.managers.manager import Operation
from kvpull_async.status import LLMException

__all__ = ["Told", "awaited", "blocked"]

T = TypeVar("T")


async def awaited(engine: Engine, operation: Operation[T]) -> T:
    """Run an operation from any loop; its last log event is written on this thread."""
    call = engine.call(operation)
    with Told(operation, call):
        return await call.result()


def blocked(engine: Engine, operation: Operation[T]) -> T:
    """Run an operation and block this thread until it has ended."""
    call = engine.call(operation)
    with Told(operation, call):
        return call.wait()


class Told:
    """Around the wait for a call: its log events, and the fields of its error."""

    def __init__(self, operation: Operation[Any], call: Call[Any]) -> None:
        self._operation = operation
        self._call = call
        token = object()
        self._join = partial(operation.underway.add, token)
        self.forget: Callable[[], None] = partial(operation.underway.discard, token)
        self._began = time.monotonic()

    def __enter__(self) -> None:
        self._join()
        if self._operation.report is not None:
            self._operation.report.started_event()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        report = self._operation.report
        self.forget()
        if error is not None:
            self._failed(error)
        elif report is not None:
            report.finished_event()

    def _failed(self, error: BaseException) -> None:
        report, cache = self._operation.report, self._operation.cache
        if not self._call.ended and cache is not None and cache._binding is not None:
            cache._binding.abandon()  # the caller goes on while something may still write there
        if isinstance(error, LLMException):
            error.operation = error.operation or self._operation.name
            if error.elapsed_ms is None:
                error.elapsed_ms = round((time.monotonic() - self._began) * 1000, 3)
        if report is not None and self._call.succeeded:
            report.cancelled_late = True
            report.finished_event()
        elif report is not None:
            report.failed_event(error)
