"""The leak guard: a test that leaves something behind fails, and the report names what was left.

Watched are live engines, tasks of the test's loop, threads, file descriptors (so sockets too), mapped shared memory,
objects in /dev/shm and child processes. What existed before the test is nobody's leak, and what ends within a short
grace is none either. A test that has failed already is not blamed twice: its traceback keeps its locals alive.
`@pytest.mark.allow_leak(pattern)` accepts leaks whose description matches; say why beside it.
"""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterable

GRACE_S = 2.0
TASK_GRACE_S = 0.1
_POLL_S = 0.01

_FAILED = pytest.StashKey[bool]()
_TASKS = pytest.StashKey[list[str]]()


# Probes: what there is now, as {key that stays the same: description}.


# A shell that puts a command into the background has it ignore Ctrl-C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _threads() -> dict[object, str]:
    return {
        thread: f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}"
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)  # a foreign thread that once called into threading
    }


def _descriptors() -> dict[object, str]:
    # multiprocessing's tracker is one helper per process, started on first use and kept until exit.
    tracker = getattr(resource_tracker._resource_tracker, "_fd", None)
    found: dict[object, str] = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the descriptor of the listing itself, or one closed by another thread
        if int(entry.name) != tracker:
            found[entry.name, target] = f"file descriptor {entry.name} -> {target}"
    return found


def _shared_mappings() -> dict[object, str]:
    found: dict[object, str] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *path = line.split(maxsplit=5)
        if path and path[0].startswith(("/memfd:", "/dev/shm/")):
            found[inode, path[0]] = f"mapped shared memory {path[0]} at {span}"
    return found


def _shared_memory() -> dict[object, str]:
    try:
        return {path: f"shared memory {path}" for path in Path("/dev/shm").glob("kvpull*")}  # others are not ours
    except FileNotFoundError:
        return {}


def _children() -> dict[object, str]:
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    found: dict[object, str] = {}
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            pids = listing.read_text().split()
        except OSError:
            continue  # that thread has just ended
        found.update({pid: f"child process {pid}" for pid in pids if int(pid) != tracker})
    return found


def _engines() -> dict[object, str]:
    """Engines that were not finalised; none as long as nothing imported the engine."""
    live = getattr(sys.modules.get("kvpull_async.engine"), "live_engines", None)
    if live is None:
        return {}
    return {engine: f"engine not finalised: {engine!r}" for engine in cast("Callable[[], Iterable[object]]", live)()}


_PROBES = (_engines, _threads, _descriptors, _shared_mappings, _shared_memory, _children)


@dataclass
class _Snapshot:
    before: list[dict[object, str]] = field(default_factory=lambda: [probe() for probe in _PROBES])

    def leaks(self) -> list[str]:
        """What is there now and was not before."""
        return [
            text
            for probe, before in zip(_PROBES, self.before, strict=True)
            for key, text in probe().items()
            if key not in before
        ]

    def leaks_after_grace(self) -> list[str]:
        """As `leaks`, once what is about to end by itself, or is only garbage, has gone (bounded)."""
        leaks = self.leaks()
        if leaks:
            gc.collect()
        give_up = time.monotonic() + GRACE_S
        while leaks and time.monotonic() < give_up:
            time.sleep(_POLL_S)
            leaks = self.leaks()
        return leaks


def _on_own_loop(request: pytest.FixtureRequest) -> bool:
    """Whether the test is a coroutine that pytest-asyncio runs on a loop of the test's own."""
    marker = request.node.get_closest_marker("asyncio")
    return marker is not None and marker.kwargs.get("loop_scope", "function") == "function"


def _unexpected(request: pytest.FixtureRequest, leaks: list[str]) -> list[str]:
    allowed = [str(marker.args[0]) for marker in request.node.iter_markers("allow_leak")]
    return [leak for leak in leaks if not any(re.search(pattern, leak) for pattern in allowed)]


def _describe(task: asyncio.Task[object]) -> str:
    frames = task.get_stack(limit=1)
    where = f" at {frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else ""
    return f"task {task.get_name()!r} running {task.get_coro()!r}{where}"


@pytest.fixture
async def _task_guard(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Notes the tasks that are left on the test's loop, before the loop's runner cancels them.

    Set up before the test's own fixtures, and so torn down after them: what a fixture cleans up is no leak.
    """
    before = asyncio.all_tasks()
    yield
    loop = asyncio.get_running_loop()
    give_up = loop.time() + TASK_GRACE_S
    own = {asyncio.current_task(), *before}
    while (left := asyncio.all_tasks() - own) and loop.time() < give_up:
        await asyncio.wait(left, timeout=give_up - loop.time())
    request.node.stash[_TASKS] = [_describe(task) for task in left]


@pytest.fixture(autouse=True)
def leak_guard(request: pytest.FixtureRequest) -> None:
    """Fails the test that leaves anything behind; see the module's docstring."""
    snapshot = _Snapshot()

    def check() -> None:
        if request.node.stash.get(_FAILED, False):
            return
        leaks = request.node.stash.get(_TASKS, []) + snapshot.leaks_after_grace()
        if unexpected := _unexpected(request, leaks):
            pytest.fail("the test left behind:\n  " + "\n  ".join(unexpected), pytrace=False)

    # A finalizer of the test, registered before any other fixture is set up, is the last to run. (A fixture's own
    # teardown would come before that of the fixtures it asks for by name, and so before the loop is closed.)
    request.node.addfinalizer(check)
    if _on_own_loop(request):
        request.getfixturevalue("_task_guard")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remembers whether the test failed by itself."""
    report = yield
    if report.when != "teardown" and report.failed:
        item.stash[_FAILED] = True
    return report
