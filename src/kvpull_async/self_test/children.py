"""The processes in which checks run, watched from outside: whatever they do, whoever waits for them goes on.

It must not know what they check, nor load what they load.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kvpull_async.self_test.lines import State, Step, parse

__all__ = ["Child"]

_ENDING: Final = 10.0
"""Seconds that a process has to end by itself once all is done."""
_MEANT: Final = (0, 1, 3)
"""All is well; a check has failed; nothing could be tried after it."""
_TOLD: Final = 12
"""Lines of what a process has written to standard error that are shown."""


class Child:
    """One process, begun at once; it tells its `Steps` on standard output. No wait for it is longer than `patience` (s)
    and the time to end. As a context it ends with it, and at once if something was raised there.
    """

    def __init__(self, command: Sequence[str], *, patience: float, environ: Mapping[str, str] | None = None) -> None:
        self._patience = patience
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(  # noqa: S603  (this program itself)
            command, stdin=pipe, stdout=pipe, stderr=self._errors, env=environ, start_new_session=True
        )
        self._buffer = b""
        self._current: Step | None = None

    def steps(self) -> Iterator[Step]:
        """Everything it tells, as it comes; the last one tells of its end if that is not as it should be."""
        while True:
            line = self._line(self._patience)
            if line is None:
                yield self._silent()
                return
            if not line:
                yield from self._end()
                return
            step = parse(line)
            if step.state is State.BEGUN:
                self._current = step
            else:
                self._current = None
                yield step

    def first(self, name: str) -> Step:
        """What it says under that name, or how it failed before."""
        for step in self.steps():
            if step.state is State.FAILED or step.name == name:
                return step
        return Step(0, name, State.FAILED, "the process ended without a word")

    def dismiss(self) -> None:
        """Tell one that waits for it that it may end; its `steps` tell how it does."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself
            self._process.stdin.close()

    def __enter__(self) -> Child:  # noqa: PYI034  (Self is newer than Python 3.10)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        self.close()

    def close(self) -> None:
        """See that it ends: by itself, or killed. One that even that does not end is left."""
        assert self._process.stdout is not None
        self.dismiss()
        if self._wait(_ENDING) is None:
            self._process.kill()
            self._wait(_ENDING)
        self._process.stdout.close()
        self._errors.close()

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def _line(self, seconds: float) -> bytes | None:
        """The next one; empty at the end, None when nothing comes in time."""
        assert self._process.stdout is not None
        give_up = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = give_up - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return None
            data = os.read(self._process.stdout.fileno(), 65536)
            if not data:
                return b""
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _silent(self) -> Step:
        self._process.kill()
        text = f"no answer within {self._patience:g} s; the process was killed"
        return self._failure(text)

    def _end(self) -> Iterator[Step]:
        code = self._wait(_ENDING)
        if code is None:
            self._process.kill()
            yield self._failure(f"the process did not end within {_ENDING:g} s, and was killed")
        elif self._current is not None or code not in _MEANT:
            yield self._failure(f"the process ended with exit code {code}")

    def _failure(self, text: str) -> Step:
        at = self._current or Step(0, "the process of these checks", State.BEGUN)
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").splitlines()[-_TOLD:]
        return Step(at.section, at.name, State.FAILED, text, lines=tuple(said))

    def _wait(self, seconds: float) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
