"""A program of these tests in a process of its own, driven line by line from a test that has no event loop."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE = 40.0
"""Seconds that a test waits for what must come; reached only when it fails."""


class Running:
    """What it says are lines of JSON; what it writes to standard error is kept for its end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(process.stdout, self._said.put), daemon=True),
            threading.Thread(target=self._read, args=(process.stderr, self._errors.append), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream: Any, take: Any) -> None:
        for line in stream:
            take(line)

    def hear(self, event: str) -> dict[str, Any]:
        """The next thing it says, which must be this event."""
        try:
            line = self._said.get(timeout=PATIENCE)
        except queue.Empty:
            raise AssertionError(f"it never said {event!r}; standard error: {self._errors}") from None
        told: dict[str, Any] = json.loads(line)
        assert told.get("event") == event, (told, self._errors)
        return told

    def tell(self, word: str = "go") -> None:
        assert self.process.stdin is not None
        print(word, file=self.process.stdin, flush=True)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait for its end: its exit status and what it wrote to standard error."""
        status = self.process.wait(PATIENCE)
        for reader in self._readers:
            reader.join(PATIENCE)
        return status, "".join(self._errors)

    def rest(self) -> list[dict[str, Any]]:
        """What it said and nobody has heard yet; after its end."""
        lines = []
        while not self._said.empty():
            lines.append(json.loads(self._said.get()))
        return lines

    def close(self) -> None:
        self.process.kill()
        self.end()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue


@contextmanager
def running(module: str, *arguments: str, **environment: str) -> Iterator[Running]:
    """Run `python -m tests.integration.peers.<module>`; it is killed if it has not ended when the test has."""
    path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
    process = subprocess.Popen(
        [sys.executable, "-m", f"tests.integration.peers.{module}", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
    made = Running(process)
    try:
        yield made
    finally:
        made.close()
