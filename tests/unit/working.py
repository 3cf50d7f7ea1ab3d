"""What the tests of the worker threads share: some of them, and work that goes on until it may end."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvpull_async._workers import Workers

__all__ = ["BOUND", "Gate", "variable", "workers"]

BOUND = 10.0
variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@contextmanager
def workers(threads: int = 1) -> Iterator[Workers]:
    executor = Workers(threads, name="test-worker")
    try:
        yield executor
    finally:
        assert executor.close(BOUND) == 0


class Gate:
    """A step that blocks its worker until it is opened, and says that it has begun."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> int:
        self.entered.set()
        assert self.opened.wait(BOUND)
        return 1
