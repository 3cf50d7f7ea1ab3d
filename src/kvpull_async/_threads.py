"""How one thread wakes another: a bell for an event loop, an end for a thread that blocks. It must not know why."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Final

__all__ = ["Bell", "Ended"]

_SIGNALS: Final = 0.2
"""Seconds after which a signal is noticed at the latest by a thread that blocks."""


class Bell:
    """Calls `rung` on a loop when any thread rings, at half the cost of `call_soon_threadsafe`. Several rings in a row
    may become one call.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, rung: Callable[[], object]) -> None:
        self._loop = loop
        self._rung = rung
        # Protects _fd, which must not be rung when it is closed. A signal handler may ring while its thread does.
        self._lock = threading.RLock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def listen(self) -> None:
        """On the loop's thread, before it runs."""
        self._loop.add_reader(self._fd, self._heard)

    def ring(self) -> bool:
        """False when it is closed and nobody will hear it."""
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)
            return self._fd >= 0

    def close(self) -> None:
        """Before the loop is closed; may be called twice."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            self._loop.remove_reader(fd)
            os.close(fd)

    def close_after_fork(self) -> None:
        """In a forked child, where the lock may be held by a thread that did not come along."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _heard(self) -> None:
        os.eventfd_read(self._fd)
        self._rung()


class Ended:
    """Set once by the core's thread, and waited for by one that signals may interrupt.

    Not a `threading.Event`: an exception that a signal handler raises inside its `wait` may come out as another one.
    And a signal that comes in the wrong moment, or to another thread, ends no wait for a lock: this one looks up often.
    """

    def __init__(self) -> None:
        self._set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> bool:
        self._set = True
        with contextlib.suppress(RuntimeError):  # released already
            self._lock.release()
        return True

    def wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not self._set and (left := end - time.monotonic()) > 0:
            self._lock.acquire(timeout=min(left, _SIGNALS))
