"""The processes of a chaos run as both sides see them: what is said over the pipe, signals, and what a process holds.

It must not know what they do. Every wait is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

__all__ = ["Message", "Peer", "Voice", "descriptors", "holdings", "leftovers"]

Message = tuple[str, dict[str, Any]]
"""An event or a command, with its fields."""
Main = Callable[["Voice", Any], Coroutine[Any, Any, None]]
_MALLOC: Final = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "2"}
"""Large arrays go back to the system when they are freed, so that growth is not what malloc keeps for later."""
_LINKS: Final = 500
"""Events of links that are kept."""
_GOODBYE: Final = 15.0
_SETTLING: Final = 8.0


# --- the parent's side -----------------------------------------------------------------------------------------------


class Peer:
    """One process, which runs `main(voice, setup)`. What it says goes to `hear`, on a thread of its own."""

    def __init__(self, name: str, main: Main, setup: object, hear: Callable[[Peer, Message], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        for variable, value in _MALLOC.items():  # read when it starts
            os.environ.setdefault(variable, value)
        self._process = context.Process(target=_run, args=(theirs, main, setup), name=name, daemon=True)
        self._process.start()
        theirs.close()
        self._heard: dict[str, dict[str, Any]] = {}
        self._changed = threading.Condition()
        self._gone = False
        self._reader = threading.Thread(target=self._listen, args=(hear,), daemon=True)
        self._reader.start()

    def _listen(self, hear: Callable[[Peer, Message], None]) -> None:
        with contextlib.suppress(EOFError, OSError):  # also in the middle of a message: it was killed
            while True:
                message: Message = self._pipe.recv()
                hear(self, message)
                with self._changed:
                    self._heard[message[0]] = message[1]
                    self._changed.notify_all()
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def tell(self, command: str, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # it is dead
            self._pipe.send((command, fields))

    def wait_for(self, event: str, seconds: float) -> dict[str, Any] | None:
        """The next message of this kind, or the last one that nobody asked for; None if it is gone, or silent."""
        with self._changed:
            self._changed.wait_for(lambda: event in self._heard or self._gone, seconds)
            return self._heard.pop(event, None)

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def status(self) -> int | None:
        return self._process.exitcode

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def dump(self) -> None:
        """Have it write the stacks of its threads to standard error."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(_GOODBYE)
        self._reader.join(_GOODBYE)
        self._pipe.close()

    def end(self, seconds: float = _GOODBYE) -> bool:
        """It was told to leave: whether it did, and well."""
        self._process.join(seconds)
        left = self._process.exitcode == 0
        self.kill()
        return left


# --- the child's side ------------------------------------------------------------------------------------------------


class Voice:
    """The pipe of a child, as its event loop sees it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()  # one message at a time
        self._loop = asyncio.get_running_loop()
        self.commands: asyncio.Queue[Message] = asyncio.Queue()
        self.links: deque[tuple[float, str]] = deque(maxlen=_LINKS)
        threading.Thread(target=self._listen, name="chaos-commands", daemon=True).start()

    def say(self, event: str, **fields: Any) -> None:
        with self._lock:
            self._pipe.send((event, fields))

    def violation(self, kind: str, text: str) -> None:
        """A promise was broken. The text has all that is needed to look for it again."""
        self.say("violation", kind=kind, text=text)

    def _listen(self) -> None:
        try:
            while True:
                message = self._pipe.recv()
                self._loop.call_soon_threadsafe(self.commands.put_nowait, message)
        except (EOFError, OSError):  # the parent is gone
            os._exit(1)
        except RuntimeError:  # the loop has ended
            return


def _run(pipe: Connection, main: Main, setup: object) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    asyncio.run(_with_voice(pipe, main, setup))
    sys.stdout.flush()


async def _with_voice(pipe: Connection, main: Main, setup: object) -> None:
    voice = Voice(pipe)
    logger = logging.getLogger("kvpull")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Alarm(voice))
    await main(voice, setup)


class _Alarm(logging.Handler):
    """What the library itself calls an error, or a bug, is one: nothing of it may be logged in a run. What it tells of
    links is kept for a while, to explain what took long.
    """

    def __init__(self, voice: Voice) -> None:
        super().__init__(logging.INFO)
        self._voice = voice

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            self._voice.violation("error event", record.getMessage())
        elif record.getMessage().startswith("link."):
            self._voice.links.append((time.monotonic(), record.getMessage()))


# --- what a process holds --------------------------------------------------------------------------------------------


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvpull")]


def _mappings() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("/memfd:kvpull")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def holdings(nodes: list[Any]) -> dict[str, Any]:
    """What this process holds at a quiet moment: bytes, descriptors, threads, and what the library's tables have."""
    gc.collect()
    engines = [node._core.engine for node in nodes]
    entries = [entry for engine in engines for entry in engine.registry.entries()]
    return {
        "rss": _status("VmRSS"),
        "anonymous": _status("RssAnon"),
        "descriptors": descriptors(),
        "threads": len(_threads()),
        "mappings": _mappings(),
        "tasks": sum(len(engine.core.pending()) for engine in engines),
        "names": [name for engine in engines for name in engine.core.pending()],
        "objects": len(gc.get_objects()),
        "caches": len(entries),
        "keys": sum(len(entry.bindings) for entry in entries if not entry.registered),
        "busy": [repr(entry) for entry in entries if entry.busy],
    }


async def leftovers(before: int) -> dict[str, Any]:
    """After all nodes were finalized: what is left of them. Zeros and empty lists, or it is a leak."""
    give_up = time.monotonic() + _SETTLING
    while True:
        gc.collect()
        me = asyncio.current_task()
        tasks = [repr(task) for task in asyncio.all_tasks() if task is not me]
        left = {
            "threads": _threads(),
            "descriptors": descriptors() - before,
            "mappings": _mappings(),
            "tasks": tasks,
        }
        if not any(left.values()) or time.monotonic() > give_up:
            return left
        await asyncio.sleep(0.05)
