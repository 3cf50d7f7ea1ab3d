"""What the tests of memory on an NPU share: the emulator in this process, watched, and the library's way to it.

Device memory is looked at with the emulator's own eye. At a test's end nothing may be left in it, and no rule broken.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpull_async.memory._acl import OPTIONAL, REQUIRED, Acl, load
from tests.acl_emulator import Emulator
from tests.acl_libraries import at
from tests.emulation import build

__all__ = ["BOUND", "Npu", "Thread", "emulated", "eventually", "in_a_child", "pattern"]

T = TypeVar("T")
Bytes = NDArray[np.uint8]
BOUND = 30.0
"""Seconds that no test waits longer for what must come."""


def pattern(nbytes: int, seed: int = 1) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes).astype(np.uint8)


def eventually(condition: Callable[[], bool]) -> None:
    """What must become true does so in time."""
    end = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


class Thread:
    """One thread that does what it is told, so that the test's own never talks to the device."""

    def __init__(self) -> None:
        self._works: list[tuple[Callable[[], Any], threading.Event, list[Any]]] = []
        self._some = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="test-npu", daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], T]) -> Callable[..., T]:
        """`work` goes on by itself; the result waits for its end, and raises what it raised."""
        done, answer = threading.Event(), list[Any]()
        self._works.append((work, done, answer))
        self._some.release()

        def end(timeout: float = BOUND) -> T:
            if not done.wait(timeout):
                raise TimeoutError("it has not ended")
            result, error = answer
            if error is not None:
                raise error
            found: T = result
            return found

        return end

    def run(self, work: Callable[[], T]) -> T:
        return self.begin(work)()

    def close(self) -> None:
        self._works.append((self._end, threading.Event(), []))
        self._some.release()
        self._thread.join(BOUND)
        assert not self._thread.is_alive()

    def _end(self) -> None:
        raise SystemExit

    def _run(self) -> None:
        while self._some.acquire():
            work, done, answer = self._works.pop(0)
            try:
                answer += work(), None
            except SystemExit:
                return
            except BaseException as error:  # noqa: BLE001  (handed over)
                answer += None, error
            done.set()
            del work, done, answer


class Npu:
    """One library with its emulated devices."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.emulator = Emulator(home)
        self.acl: Acl = load(at(home))
        self._before = self.emulator.left()

    def without(self, *names: str) -> Acl:
        """The same library as if it lacked these functions."""
        there = {name: getattr(self.acl, name) for name in (*REQUIRED, *OPTIONAL) if name not in names}
        return Acl(self.acl.path, {name: function for name, function in there.items() if function is not None})

    def left(self) -> dict[str, int]:
        """What is allocated, open and in flight more than at the test's beginning; only what is not zero."""
        now = self.emulator.left()
        return {name: now[name] - self._before[name] for name in now if now[name] != self._before[name]}

    def running(self) -> int:
        """Copies in flight."""
        return self.left().get("running", 0)

    def look(self, address: int, nbytes: int) -> Bytes:
        """What stands in device memory, now."""
        return self.emulator.memory(address, nbytes).copy()

    def bind(self) -> int:
        """The calling thread and device 0; its context."""
        assert self.acl.aclInit(None) in (0, 100002)
        assert self.acl.aclrtSetDevice(0) == 0
        return self.context() or 0

    def context(self) -> int | None:
        """The calling thread's, None if it has none."""
        found, call = ctypes.c_void_p(), self.acl.aclrtGetCurrentContext
        assert call is not None
        code = call(ctypes.byref(found))
        return found.value if code == 0 else None


@contextlib.contextmanager
def emulated(*, release: str = "9.0", clean: bool = True, **settings: int) -> Iterator[Npu]:
    """The emulator of a release, as new; not `clean` where something must be left behind: then it is one of its own."""
    home = build(release=release)
    if not clean:  # loaded anew from another place it shares nothing with what an earlier test has left
        home = Path(shutil.copytree(home, Path(tempfile.mkdtemp()) / "acl"))
    npu = Npu(home)
    npu.emulator.reset()
    npu.emulator.configure(abort_on_violation=0, **settings)
    pid = os.getpid()
    try:
        yield npu
        npu.emulator.resume()
        assert not npu.emulator.violations(), npu.emulator.violations()
        for never in ("aclFinalize", "aclrtResetDevice", "aclrtResetDeviceForce"):
            assert npu.emulator.count(never) == 0, f"{never} ends the runtime for others, too"
        if clean:
            eventually(lambda: not npu.left())
    finally:
        if os.getpid() == pid:
            npu.emulator.resume()
            npu.emulator.reset()
            if not clean:
                shutil.rmtree(home.parent)


def in_a_child(check: Callable[[], None]) -> str:
    """What a forked child says of it; empty when all is well."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            check()
            said = ""
        except BaseException as error:  # noqa: BLE001  (told to the parent)
            said = repr(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said
