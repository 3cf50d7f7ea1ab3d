"""Two linked nodes whose coroutines run on the test's own loop, so that a test can stop them at each await.

Their engines' threads exist and idle.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any

from kvpull_async import CacheDesc, CacheKey, LLMRole
from kvpull_async.datadist import DataDist
from kvpull_async.engine import end
from kvpull_async.managers.manager import Manager, Operation
from tests import duo

PATIENCE = 20.0


# --- stopping a coroutine at its k-th await ---


@dataclass
class Suspended:
    """Awaits a coroutine and calls `action` when it is suspended for the `number`-th time (from 1 on).

    `at="now"` acts right then, `at="wait"` while it waits; `at="wake"` in the turn of the loop in which what it waits
    for has happened but the coroutine has not gone on yet. From then on, `again` acts at every further suspension.
    """

    coroutine: Coroutine[Any, Any, Any]
    number: int
    action: Callable[[], object]
    at: str = "wait"
    again: bool = False
    count: int = 0

    @property
    def reached(self) -> bool:
        return self.count >= self.number

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self.coroutine.__await__()
        result: Any = None
        try:
            waited_for = next(steps)
            while True:
                self.count += 1
                if self.count == self.number or (self.again and self.reached):
                    self._arrange(waited_for)
                try:
                    result = yield waited_for
                except BaseException as error:  # noqa: BLE001  (thrown into the coroutine, as a task does it)
                    waited_for = steps.throw(error)
                else:
                    waited_for = steps.send(result)
        except StopIteration as end:
            return end.value

    def _arrange(self, waited_for: Any) -> None:
        if self.at == "now":
            self.action()
        elif self.at == "wake" and waited_for is not None:
            waited_for.add_done_callback(lambda _: self.action())
        else:
            asyncio.get_running_loop().call_soon(self.action)


async def stopped_at(
    make: Callable[[], Coroutine[Any, Any, Any]], number: int, *, at: str = "wait", again: bool = False
) -> tuple[bool, BaseException | None]:
    """Run the coroutine in a task, cancelled at its `number`-th suspension: whether it had not ended by then, and the
    error.
    """
    steps = Suspended(make(), number, bool, at, again)
    stopped = False

    async def run() -> None:
        await steps

    task = asyncio.get_running_loop().create_task(run())

    def stop() -> None:
        nonlocal stopped
        stopped = task.cancel() or stopped

    steps.action = stop
    error = await outcome(task)
    return stopped, error


async def outcome(task: asyncio.Task[Any]) -> BaseException | None:
    """The error with which the task ends, a cancellation too."""
    await within(asyncio.wait([task]))
    try:
        return task.exception()
    except asyncio.CancelledError as cancelled:
        return cancelled


async def within(waiting: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(waiting, PATIENCE)


# --- nodes ---


def prefix_key(entry: int = 0) -> CacheKey:
    return CacheKey(duo.PROMPT, 2**64 - 1, 0, entry)


class LoopNode:
    """One node. Operations return what the face's methods would, as coroutines of the core."""

    def __init__(self, role: LLMRole, cluster_id: int, **properties: Any) -> None:
        self.dist = DataDist(role, cluster_id, dropped=lambda _: None)
        opening = self.dist.start(duo.options(listen=True, enable_cache_manager=True, **properties))
        assert opening is not None
        self._opening = opening
        self.engine = self.dist.engine
        self.manager: Manager = self.dist.manager("cache", self)

    async def open(self) -> None:
        await self._opening.start()

    def get_cache_tensors(self, cache: Any, tensor: int) -> Any:
        """What `duo.arrays` asks a cache's manager for."""
        return self.manager.get_cache_tensors(cache, tensor)

    async def allocate(self, desc: CacheDesc, keys: list[CacheKey] | None = None) -> Any:
        return await within(self.manager.allocate_cache(desc, keys or []).start())

    def pull(self, key: CacheKey, cache: Any, entry: int = 0, **options: Any) -> Coroutine[Any, Any, None]:
        """The coroutine that the core runs for `pull_cache`."""
        options.setdefault("timeout", duo.TIMEOUT_MS)
        return self.operation(key, cache, entry, **options).start()

    def operation(self, key: CacheKey, cache: Any, entry: int = 0, **options: Any) -> Operation[None]:
        return self.manager.pull_cache(key, cache, entry, -1, options)

    async def link(self, other: LoopNode) -> None:
        info = duo.cluster(other.dist.cluster_id, other.engine.listen_address)
        assert await within(self.dist.link_clusters([info], duo.TIMEOUT_MS).start()) == (duo.OK, [duo.OK])

    async def close(self) -> None:
        await within(self.engine.close())
        self.dist.drop()
        end(self.engine)


@dataclass
class LoopPair:
    """The source holds `published` under prefix keys, which no pull consumes."""

    source: LoopNode
    puller: LoopNode
    published: Any


@contextlib.asynccontextmanager
async def loop_pair(desc: CacheDesc, *, dialer: str = "puller", **properties: Any) -> AsyncIterator[LoopPair]:
    """`dialer` says which of them dialled the link: "puller" or "source"."""
    source = LoopNode(LLMRole.MIX, duo.PROMPT, **properties)
    puller = LoopNode(LLMRole.MIX, duo.DECODER, **properties)
    try:
        await source.open()
        await puller.open()
        await (puller.link(source) if dialer == "puller" else source.link(puller))
        keys = [prefix_key(entry) for entry in range(desc.entries)]
        published = await source.allocate(desc, keys)
        duo.fill(published)
        while puller.engine.links.find(duo.PROMPT) is None:  # noqa: ASYNC110  (the dialled side hears a moment later)
            await asyncio.sleep(0.001)
        yield LoopPair(source, puller, published)
    finally:
        await puller.close()
        await source.close()
