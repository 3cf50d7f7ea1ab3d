"""Nodes in processes of their own, seen from the test that starts, stops, kills and asks them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import duo
from tests.loop_nodes import eventually

ROOT = Path(__file__).parents[2]
PATIENCE = 40.0


class Child:
    """One such process. What it says is read line by line; each wait is bounded."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.address: tuple[str, int] = ("", 0)
        self._process = process
        self._lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._reader = threading.Thread(target=self._read, name="child-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._loop.call_soon_threadsafe(self._lines.put_nowait, json.loads(line))

    async def hear(self, *expected: str) -> dict[str, Any]:
        """The next thing it says, which must be one of these events."""
        message = await asyncio.wait_for(self._lines.get(), PATIENCE)
        assert message["event"] in expected, message
        return message

    def heard_nothing(self) -> bool:
        return self._lines.empty()

    async def ask(self, do: str, answer: str, **fields: Any) -> dict[str, Any]:
        self.tell(do, **fields)
        return await self.hear(answer)

    def tell(self, do: str, **fields: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)

    def end(self) -> int:
        """Let it finalize and leave, else kill it; its exit status."""
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            status = self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
            status = self._process.returncode
        self._reader.join(10)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status


@contextlib.asynccontextmanager
async def child(
    role: str,
    cluster: int,
    *,
    program: str = "node",
    before: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    user: int | None = None,
    **properties: Any,
) -> AsyncIterator[Child]:
    """A node with these options, ready. It must leave in peace unless the test killed it. `program` is one of those in
    `peers`, `before` what its command begins with, `user` whom it becomes.
    """
    config = {"role": role, "cluster": cluster, "options": properties, "user": user}
    path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
    process = subprocess.Popen(  # noqa: ASYNC220  (starting is quick; what it says is read by a thread)
        [*before, sys.executable, "-m", f"tests.integration.peers.{program}", json.dumps(config)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
    )
    made = Child(process)
    try:
        ready = await made.hear("ready")
        made.address = (ready["address"][0], ready["address"][1]) if ready["address"] else ("", 0)
        yield made
    except BaseException:
        made.kill()
        made.end()
        raise
    status = await asyncio.to_thread(made.end)
    assert status in (0, -signal.SIGKILL), f"the child ended with {status}"


class Footprint:
    """What an engine of this process holds: tasks of its core, threads, sockets. Taken when made."""

    def __init__(self, node: Any) -> None:
        self._core = duo.engine_of(node).core
        self._before = self._now()

    def _now(self) -> dict[str, Any]:
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("kvpull")]
        return {
            "tasks": sorted(name for name in self._core.pending() if name != "kvpull-call"),
            "threads": sorted(name for name in threads if not name.startswith("kvpull-worker")),
            "sockets": sockets(),
        }

    async def check(self) -> None:
        """As before: nothing of a link that is gone is left. (Workers are the engine's, and kept.)"""
        await eventually(lambda: self._now() == self._before, lambda: f"before: {self._before}, now: {self._now()}")


def mappings() -> int:
    """Memory files of this library that are mapped in this process, but for those that only garbage refers to."""
    gc.collect()
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("/memfd:kvpull")


def descriptors() -> int:
    """How many this process has open, the one of this look included."""
    return len(list(Path("/proc/self/fd").iterdir()))


@contextlib.contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    """This process can open so many more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + spare, before[1]))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(spare):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in taken:
            os.close(descriptor)


def sockets() -> int:
    """How many this process has open."""
    return sum(_is_socket(entry) for entry in Path("/proc/self/fd").iterdir())


def _is_socket(entry: Path) -> bool:
    try:
        return str(entry.readlink()).startswith("socket:")
    except OSError:
        return False
