"""Child processes that answer questions over a pipe, with no wait longer than its limit.

It must not know what is measured.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Final

__all__ = ["Child", "ChildFailed", "Unavailable"]

PATIENCE: Final = 120.0
"""Seconds that an answer may take, unless the question says otherwise."""
GOODBYE: Final = 10.0

Answers = Mapping[str, Callable[..., Any]]
"""What a child can be asked, by name."""


class ChildFailed(RuntimeError):
    """The child raised, died, or did not answer in time."""


class Unavailable(RuntimeError):
    """What was asked for cannot be done here. Raised in a child, it reaches who asked; its text says why."""


class Child:
    """A fresh Python process. `make` runs in it and returns what it can be asked; "close" is asked at the end.

    `env` is set before it starts, for what is read only then. An `abrupt` one leaves without finalisers, since those
    of some libraries crash.
    """

    def __init__(
        self,
        make: Callable[..., Answers],
        *args: object,
        env: Mapping[str, str] | None = None,
        abrupt: bool = False,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, make, args, abrupt), daemon=True)
        with _environment(env or {}):
            self._process.start()
        theirs.close()
        self._name = f"{make.__name__} (pid {self._process.pid})"

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def ask(self, question: str, *args: object, seconds: float = PATIENCE) -> Any:
        """Ask and wait for the answer."""
        try:
            self._pipe.send((question, args))
            if not self._pipe.poll(seconds):
                raise ChildFailed(f"{self._name} did not answer {question!r} within {seconds} s")
            told, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ChildFailed(f"{self._name} is gone; it was asked {question!r}") from error
        if told is Unavailable:
            raise Unavailable(answer)
        if told is not None:
            raise ChildFailed(f"{self._name} failed at {question!r}:\n{answer}")
        return answer

    def close(self) -> None:
        """Let it end by itself, or end it. It may be stopped or dead already."""
        try:
            self.ask("close", seconds=GOODBYE)
        except ChildFailed:
            self._process.kill()
        self._process.join(GOODBYE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._pipe.close()

    def __enter__(self) -> Child:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._process.kill()
            self._process.join()


@contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """A child inherits the environment of the moment in which it starts."""
    before = dict(os.environ)
    os.environ.update(extra)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run(pipe: Connection, make: Callable[..., Answers], args: tuple[object, ...], abrupt: bool) -> None:
    answers: Answers = {}
    question = ""
    while question != "close":
        try:
            question, arguments = pipe.recv()
            answers = answers or {"cpu": time.process_time, "close": _nothing, **make(*args)}
            answer: tuple[Any, Any] = (None, answers[question](*arguments))
        except EOFError:  # the parent is gone
            break
        except Unavailable as why:
            answer = (Unavailable, str(why))
        except Exception:  # noqa: BLE001  (told to the parent, who gives up)
            answer = (ChildFailed, traceback.format_exc())
        pipe.send(answer)
    if abrupt:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _nothing() -> None:
    """For children that have nothing to close."""
