"""The engine's executor: daemon threads that run bounded pieces of work. It must not know what the pieces copy.

The threads are our own because a stuck `ThreadPoolExecutor` worker holds the interpreter's exit.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

__all__ = ["Job", "Workers", "report_to", "resolve", "stand_in_here"]

T = TypeVar("T")
_MOST_STUCK = 8
"""Threads that are replaced while they hang; when more do, everybody waits."""
_Work = tuple["Future[Any]", Callable[[], Any]]


def report_to(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> bool:
    """Call `callback` on the loop from any thread; False when that loop has closed and nobody is left to tell."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        return False
    return True


def resolve(future: asyncio.Future[None] | None) -> None:
    """End a wait, on its loop, unless it has ended already or nobody waits."""
    if future is not None and not future.done():
        future.set_result(None)


_here = threading.local()


def stand_in_here(*, begins: bool) -> None:
    """For the calling thread, if it is one of a pool's: see `Workers.stand_in`."""
    pool: Workers | None = getattr(_here, "pool", None)
    if pool is not None:
        pool.stand_in(begins=begins)


class Workers(Executor):
    """Daemon threads, started on first use and joined with a bound: so many, and some more while some hang. Each ends
    with `finalizer`.
    """

    def __init__(
        self, threads: int, *, name: str = "kvpull-worker", finalizer: Callable[[], None] | None = None
    ) -> None:
        self.limit: int = threads
        self._name = name
        self._finalizer = finalizer
        self._stuck = 0
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # protects limit, _stuck, _threads, _spare, _closed and _apart
        self._spare = 0  # idle threads minus work that waits for one
        self._closed = False
        self._apart: Workers | None = None

    @property
    def apart(self) -> Workers:
        """Others of the same kind, for what may have to wait for a device: memory of the host never waits for those."""
        with self._lock:
            if self._apart is None:
                self._apart = Workers(self.limit, name=f"{self._name}-apart")
                if self._closed:
                    self._apart.close(0)
            return self._apart

    def fit(self, *, direct: bool) -> Workers:
        """Those for memory that the host reaches, or (`direct` False) for a device's, or for both at once."""
        return self if direct else self.apart

    @property
    def crowded(self) -> bool:
        """Whether work waits for a thread. Long work then steps back in the queue, so that nobody waits for its end."""
        return self._spare < 0

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run `fn` on a worker, in a copy of the caller's context."""
        future: Future[T] = Future()
        context = contextvars.copy_context()
        with self._lock:
            if self._closed:
                raise RuntimeError("the workers have been shut down")
            if self._spare < 1 and len(self._threads) < self.limit:
                self._grow()
            self._queue.put((future, lambda: context.run(fn, *args, **kwargs)))
            self._spare -= 1
        return future

    def stand_in(self, *, begins: bool) -> None:
        """A thread hangs in what cannot be stopped (or does so no more): another one takes its place, up to a limit."""
        with self._lock:
            before = min(self._stuck, _MOST_STUCK)
            self._stuck += 1 if begins else -1
            self.limit += min(self._stuck, _MOST_STUCK) - before
            if begins and not self._closed and self._spare < 0 and len(self._threads) < self.limit:
                self._grow()  # for what waits already

    def close(self, timeout: float) -> int:
        """Let the threads end after what is queued; returns how many were still busy when `timeout` (s) was over."""
        with self._lock:
            first, self._closed = not self._closed, True
            threads, apart = list(self._threads), self._apart
        for _ in threads if first else ():
            self._queue.put(None)
        end = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        left = 0 if apart is None else apart.close(max(0.0, end - time.monotonic()))
        return left + sum(thread.is_alive() for thread in threads)

    def _grow(self) -> None:
        """One thread more, before work is queued for it: where there is none at all, nothing may run after all."""
        try:
            self._start_thread()
        except RuntimeError:
            if not self._threads:
                raise
        else:
            self._spare += 1

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _run(self) -> None:
        _here.pool = self
        try:
            while (work := self._queue.get()) is not None:
                future, call = work
                if future.set_running_or_notify_cancel():
                    _carry_out(future, call)
                del future, call, work  # an idle worker keeps nothing alive
                with self._lock:
                    self._spare += 1
        finally:
            if self._finalizer is not None:
                self._finalizer()

    def __repr__(self) -> str:
        return f"<Workers {self._name} threads={len(self._threads)}/{self.limit} idle={max(0, self._spare)}>"


def _carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001  (handed over whole: the waiter decides)
        future.set_exception(error)
    else:
        future.set_result(result)


class Job:
    """Bounded steps run one after another on a worker; the cancel flag is looked at between two steps.

    `done` ends with the sum of what the steps returned, or with the step's error, or with CancelledError after an
    abort that came in time. `settled` ends when no step runs any more and none will.
    """

    def __init__(self, workers: Workers, steps: Iterable[int]) -> None:
        self._loop = asyncio.get_running_loop()
        self._workers = workers
        self._steps = iter(steps)
        self._total = 0
        self._cancelled = threading.Event()
        self.done: asyncio.Future[int] = self._loop.create_future()
        self.settled: asyncio.Future[None] = self._loop.create_future()
        self._first = workers.submit(self._run)

    @property
    def total(self) -> int:
        """What the steps have returned so far."""
        return self._total

    def abort(self) -> bool:
        """Ask the job to stop after the step that runs now; one that has not begun is over at once. Never waits; True,
        since a step always ends.
        """
        self._cancelled.set()
        if self._first.cancel() and not self.settled.done():
            self._finish(0, asyncio.CancelledError())
        return True

    def _run(self) -> None:
        error = None
        try:
            while not self._cancelled.is_set():
                step = next(self._steps, None)
                if step is None:
                    report_to(self._loop, self._finish, self._total, None)
                    return
                self._total += step
                if self._workers.crowded and self._step_back():
                    return
        except BaseException as raised:  # noqa: BLE001  (belongs to whoever awaits `done`)
            error = raised
        report_to(
            self._loop, self._finish, self._total, error or _closing_error(self._steps) or asyncio.CancelledError()
        )

    def _step_back(self) -> bool:
        """Go on behind those who wait; False when there is no queue any more."""
        try:
            self._workers.submit(self._run)
        except RuntimeError:
            return False
        return True

    def _finish(self, total: int, error: BaseException | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(total)
            elif isinstance(error, asyncio.CancelledError):
                self.done.cancel()
            else:
                self.done.set_exception(error)
                self.done.exception()  # an aborted caller may never ask for it
        resolve(self.settled)


def _closing_error(steps: Iterator[int]) -> BaseException | None:
    """End a generator early; what it raises then must not keep the job from settling."""
    close = getattr(steps, "close", None)
    if close is not None:
        try:
            close()
        except BaseException as error:  # noqa: BLE001  (belongs to whoever awaits `done`)
            return error
    return None
