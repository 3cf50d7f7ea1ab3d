"""JSON lines between a parent process and the children it starts, with no wait longer than its limit.

Its job: the small out-of-band channel that every serving system has beside the KV transfer (a router tells a decode
node which requests to fetch, and where). It must not carry KV cache: that is what the library is for.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

Message = dict[str, Any]

SECONDS_FOR_AN_ANSWER = 180.0
SECONDS_TO_EXIT = 15.0


def child_environment() -> dict[str, str]:
    """For a child that computes with numpy: where several share a machine, one thread each beats many that wait."""
    return {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **os.environ}


class ChildFailed(RuntimeError):
    """A child process ended or went silent before it said what was expected."""


class Child:
    """A child process, seen by the parent that started it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    @classmethod
    async def start(cls, name: str, *arguments: str) -> Child:
        """Run ``python arguments...``; its stderr (tracebacks, logs) is the parent's.

        Ctrl-C reaches the parent only, which then closes the pipe; so does its death, whatever caused it.
        """
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=pipe, stdout=pipe, env=child_environment(), start_new_session=True
        )
        return cls(name, process)

    async def say(self, do: str, **fields: Any) -> None:
        """Send one line."""
        if self._process.stdin is None:
            raise ChildFailed(f"the {self.name} process has no standard input")
        self._process.stdin.write(_line({"do": do, **fields}))
        await self._process.stdin.drain()

    async def hear(self, *expected: str, seconds: float | None = SECONDS_FOR_AN_ANSWER) -> Message:
        """The next line, which must be one of the ``expected`` events (any, if none is named).

        With ``seconds=None`` only the end of the child bounds the wait.
        """
        if self._process.stdout is None:
            raise ChildFailed(f"the {self.name} process has no standard output")
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), seconds)
        except asyncio.TimeoutError as error:
            raise ChildFailed(f"the {self.name} process said nothing for {seconds} s") from error
        if not line:
            raise ChildFailed(f"the {self.name} process ended early (its error is above)")
        message: Message = json.loads(line)
        if expected and message["event"] not in expected:
            raise ChildFailed(f"the {self.name} process said {message['event']!r} instead of {expected}")
        return message

    async def stop(self) -> int:
        """Close the child's standard input, its sign to leave, and wait; kill it if it stays. Returns its exit code."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            return await asyncio.wait_for(self._process.wait(), SECONDS_TO_EXIT)
        except asyncio.TimeoutError:
            self._process.kill()
            return await self._process.wait()


class Parent:
    """The parent, seen by a child: lines on standard input and output."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    @classmethod
    async def connect(cls) -> Parent:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        return cls(reader)

    def say(self, event: str, **fields: Any) -> None:
        """Send one line."""
        sys.stdout.buffer.write(_line({"event": event, **fields}))
        sys.stdout.buffer.flush()

    async def hear(self) -> Message | None:
        """The next line; None when the parent closed the pipe or died, which bounds this wait."""
        line = await self._reader.readline()
        return json.loads(line) if line else None


def _line(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
