"""Layers as they land, for event loops: what `pull_layers` of the awaitable managers returns.

It must not contain more than the waiting.
"""

from __future__ import annotations

import asyncio
from functools import partial
from types import TracebackType

from kvpull_async._deadline import NEVER, absorb
from kvpull_async._workers import report_to, resolve
from kvpull_async.entry import LayerPull

__all__ = ["LandingLayers"]


class LandingLayers:
    """`async with` runs the pull, `async for` gives the numbers of its layers (int), in order, as each has landed.

    Entering starts the pull and its deadline. It goes on whether or not anybody iterates. The bytes of a layer that was
    given are final. The iteration ends when the pull has; a pull that fails raises out of it, once. The layers that it
    gave before are right even so, but the key is kept. Leaving the block before all layers were taken cancels the pull
    and returns once nothing writes any more; leaving it later waits for the end. It raises what had gone wrong already.
    """

    def __init__(self, pull: LayerPull) -> None:
        self._pull = pull
        self._news = asyncio.Event()

    async def __aenter__(self) -> LandingLayers:  # noqa: PYI034  (typing.Self is younger than Python 3.10)
        if self._pull.begun:
            raise RuntimeError("these layers have been entered already; call pull_layers again for another pull")
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._pull.begin(
            partial(report_to, loop, self._news.set),
            partial(report_to, loop, _end, self._ended, self._news),
            caller=loop,
        )
        return self

    def __aiter__(self) -> LandingLayers:
        self._check_entered()
        return self

    async def __anext__(self) -> int:
        self._check_entered()
        while not self._pull.over:
            self._news.clear()
            layer = self._pull.take()
            if layer is not None:
                return layer
            if not self._pull.over:
                await self._news.wait()
        raise StopAsyncIteration

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pull = self._pull
        if pull.over:
            return
        if not asyncio._get_running_loop():  # the coroutine is closed from outside: nobody can wait here
            pull.cancel()
            return
        if error is None and (pull.all_taken or pull.failed):
            await self._until_ended()
            pull.take()
        else:
            pull.cancel()
            await self._until_ended(pull.patience)
            pull.leave()

    async def _until_ended(self, bound: float | None = None) -> None:
        """At most `bound` seconds. Cancelled meanwhile, it cancels the pull and returns no sooner."""
        try:
            await asyncio.wait([self._ended], timeout=bound)
        except asyncio.CancelledError:
            self._pull.cancel()
            await absorb([self._ended], NEVER.sooner(self._pull.patience))
            self._pull.leave()
            raise

    def _check_entered(self) -> None:
        if not self._pull.begun:
            raise RuntimeError("enter it first: `async with manager.pull_layers(...) as layers:`, then iterate")

    def __repr__(self) -> str:
        return f"<LandingLayers {self._pull!r}>"


def _end(ended: asyncio.Future[None], news: asyncio.Event) -> None:
    resolve(ended)
    news.set()
