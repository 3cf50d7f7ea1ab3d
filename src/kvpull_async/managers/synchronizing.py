"""The caller's `synchronize_layer` where it may block for as long as it likes: on a thread of one transfer, or on the
caller's loop. It must not know what is transferred.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, Protocol

from kvpull_async._deadline import Deadline, absorb
from kvpull_async._workers import report_to, resolve
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import LayerSynchronizer

__all__ = ["Asker", "asker"]

_Answer = tuple[bool, "BaseException | None"]
_Said = tuple["bool | Awaitable[object]", "BaseException | None"]
_WATCH: Final = 0.25
"""Seconds between two looks at a caller's loop, which may close under its coroutine."""
_ENDING_MS: Final = 250
"""What a thread gets to end in that is not inside the caller's function."""


class Asker(Protocol):
    """Used by one transfer, on the core."""

    async def ask(self, layer: int) -> _Answer:
        """What `synchronize_layer(layer, None)` says, or the exception that it raised. Bounded by the caller alone."""

    async def end(self) -> bool:
        """Nothing is asked any more; False when the caller's function still runs and cannot be stopped."""


def asker(synchronizer: LayerSynchronizer, caller: asyncio.AbstractEventLoop | None, *, name: str) -> Asker:
    """For a coroutine function, on the loop `caller`; for any other, on a thread called `name`, and what it returns, if
    that is awaitable, on the loop.

    TypeError for a coroutine function without such a loop.
    """
    if not inspect.iscoroutinefunction(synchronizer.synchronize_layer):
        return _OnThread(synchronizer.synchronize_layer, name, caller)
    if caller is None:
        raise TypeError(
            "layer_synchronizer.synchronize_layer is a coroutine function, which needs the awaitable API and a running "
            "event loop"
        )
    return _OnLoop(synchronizer.synchronize_layer, caller)


class _OnThread:
    """A daemon thread, started with the first layer."""

    def __init__(
        self, synchronize: Callable[[int, None], Any], name: str, caller: asyncio.AbstractEventLoop | None
    ) -> None:
        self._synchronize = synchronize
        self._name = name
        self._on_loop = _OnLoop(synchronize, caller) if caller is not None else None
        self._layers: queue.SimpleQueue[tuple[int, asyncio.Future[_Said]] | None] = queue.SimpleQueue()
        self._ended: asyncio.Future[None] | None = None

    async def ask(self, layer: int) -> _Answer:
        answered: asyncio.Future[_Said] = asyncio.get_running_loop().create_future()
        if self._ended is None:
            try:
                self._start()
            except RuntimeError as error:  # no thread is to be had
                return False, error
        self._layers.put((layer, answered))
        answer, raised = await answered
        if not inspect.isawaitable(answer):
            return bool(answer), raised
        if self._on_loop is not None:
            return await self._on_loop.finish(_truth(answer))
        _discard(answer)
        return False, TypeError("synchronize_layer returned an awaitable, which needs the awaitable API")

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        run = partial(contextvars.copy_context().run, self._run, loop, ended)
        threading.Thread(target=run, name=self._name, daemon=True).start()
        self._ended = ended

    async def end(self) -> bool:
        if self._on_loop is not None:
            await self._on_loop.end()
        if self._ended is None:
            return True
        self._layers.put(None)
        return await absorb([self._ended], Deadline.after_ms(_ENDING_MS))

    def _run(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
        while (item := self._layers.get()) is not None:
            layer, answered = item
            report_to(loop, _hand, answered, self._answer(layer))
            del item, answered  # a thread that waits keeps nothing alive
        report_to(loop, resolve, ended)

    def _answer(self, layer: int) -> _Said:
        try:
            answer = self._synchronize(layer, None)
            return answer if inspect.isawaitable(answer) else bool(answer), None
        except BaseException as error:  # noqa: BLE001  (handed over whole: it becomes a status)
            return False, error


class _OnLoop:
    """A coroutine on the caller's loop for each layer."""

    def __init__(self, synchronize: Callable[[int, None], Any], caller: asyncio.AbstractEventLoop) -> None:
        self._synchronize = synchronize
        self._caller = caller
        self._asked: Future[bool] | None = None

    async def ask(self, layer: int) -> _Answer:
        return await self.finish(self._answer(layer))

    async def finish(self, answering: Coroutine[Any, Any, bool]) -> _Answer:
        """Run it there to its end."""
        try:
            asked = asyncio.run_coroutine_threadsafe(answering, self._caller)
        except RuntimeError:
            answering.close()
            return False, _closed()
        self._asked = asked
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asked.add_done_callback(partial(_tell, asyncio.get_running_loop(), answered))
        while not answered.done():
            await asyncio.wait([answered], timeout=_WATCH)
            if self._caller.is_closed() and not asked.done():
                self._asked = None
                return False, _closed()
        return self._outcome(asked)

    def _outcome(self, asked: Future[bool]) -> _Answer:
        if asked.cancelled():
            return False, _failed("synchronize_layer was cancelled on its event loop, which may be closing")
        error = asked.exception()
        return error is None and asked.result(), error

    async def _answer(self, layer: int) -> bool:
        return bool(await self._synchronize(layer, None))

    async def end(self) -> bool:
        if self._asked is not None and not self._caller.is_closed():
            self._asked.cancel()
        return True


async def _truth(awaitable: Awaitable[object]) -> bool:
    return bool(await awaitable)


def _hand(answered: asyncio.Future[_Said], answer: _Said) -> None:
    if not answered.done():
        answered.set_result(answer)


def _tell(loop: asyncio.AbstractEventLoop, answered: asyncio.Future[None], _: object) -> None:
    report_to(loop, resolve, answered)


def _discard(awaitable: Any) -> None:
    """A coroutine that nobody is going to run; closing it says so."""
    close = getattr(awaitable, "close", None)
    if close is not None:
        close()


def _closed() -> LLMException:
    return _failed("the event loop of transfer_cache_async's caller has closed; nobody can run its synchronize_layer")


def _failed(message: str) -> LLMException:
    return LLMException(message, status_code=LLMStatusCode.LLM_FAILED)
