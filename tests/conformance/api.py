"""The two faces behind one form, so that what is expected of both is written once.

A test's body is a coroutine that reaches the library through `Api.do` only. Under the awaitable face it runs on the
test's own loop. Under the blocking face it is driven by hand, in the test's thread and with no loop at all: as every
call blocks until it has ended, the body never really waits.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from types import ModuleType
from typing import Any, Protocol

import kvpull_async
import kvpull_sync

PATIENCE_S = 30.0
"""For things that happen within milliseconds on an idle machine."""


class Running(Protocol):
    """A call that was started and not waited for yet."""

    async def outcome(self) -> Any:
        """Wait for it (bounded); what it returned, or the exception that it raised."""


class Api:
    """`package` is the face's package."""

    name: str
    package: ModuleType

    async def do(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the face and wait until it has ended."""
        result = call(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    def start(self, call: Callable[[], Awaitable[Any]]) -> Running:
        """Run `call` beside the test: in a thread of its own, and awaited on a loop of that thread."""
        return _Thread(lambda: self.run(_outcome(call)))

    def run(self, body: Coroutine[Any, Any, Any]) -> Any:
        """Run a body from a thread that has no loop."""
        raise NotImplementedError

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait (bounded) for something that another thread is about to do."""
        give_up = time.monotonic() + PATIENCE_S
        while not reached():
            assert time.monotonic() < give_up, "what the test waits for did not come"
            await self._pause()

    async def _pause(self) -> None:
        raise NotImplementedError


class Awaited(Api):
    name = "awaited"
    package = kvpull_async

    def run(self, body: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(body)

    async def _pause(self) -> None:
        await asyncio.sleep(0.001)


class Blocking(Api):
    name = "blocking"
    package = kvpull_sync

    def run(self, body: Coroutine[Any, Any, Any]) -> Any:
        try:
            body.send(None)
        except StopIteration as ended:
            return ended.value
        body.close()
        raise AssertionError("a call of the blocking face was awaited")

    async def _pause(self) -> None:
        time.sleep(0.001)  # noqa: ASYNC251  (no loop runs here)


AWAITED, BLOCKING = Awaited(), Blocking()


async def _outcome(call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    except Exception as error:  # noqa: BLE001  (the test judges it)
        return error


class _Thread:
    def __init__(self, run: Callable[[], Any]) -> None:
        self._outcome: Any = None
        self._run = run
        self._thread = threading.Thread(target=self._keep, name="beside-the-test")
        self._thread.start()

    def _keep(self) -> None:
        self._outcome = self._run()

    async def outcome(self) -> Any:
        # Holding the test's loop meanwhile is no harm: the faces do not need it.
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "a call beside the test did not end"
        return self._outcome
