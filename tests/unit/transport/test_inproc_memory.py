"""What a path inside one process does with memory beside the copy itself: it keeps none that it does not use, looks
through none of the host's, and copies on a device what is there on both ends.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Generator, Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpull_async.memory.base import Batches, Region, Span, Until
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.base import Transfer, moved
from kvpull_async.values import Placement
from tests.loop_nodes import PlainMemory
from tests.unit.transport.test_inproc import GRANT, Paths, into, of, paths, transport

__all__ = ["paths", "transport"]


class Rows:
    """A table of rows, which holds the memory."""

    def __init__(self, memory: bytearray) -> None:
        self.memory = memory

    def __call__(self) -> NDArray[np.int64]:
        return np.array([[0, 0, len(self.memory)]])


@pytest.mark.parametrize("how", ["the source has withdrawn it", "the path ends"])
async def test_p7_a_fetch_that_never_begins_keeps_no_memory(paths: Paths, how: str) -> None:
    memory = bytearray(4)
    rows = Rows(memory)
    paths.puller.expect(GRANT, None, rows, Span((), rows, direct=True))
    if how == "the path ends":
        paths.puller.abort()
    else:
        with pytest.raises(ConnectionAbortedError, match="withdrawn"):
            paths.puller.fetch(GRANT, into(memory), 4)
    seen = weakref.ref(rows)
    del rows
    assert seen() is None


class Looked(tuple[Region, ...]):
    """Regions that are not all looked at."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Region]:
        raise AssertionError("all of them were looked at")


async def test_what_the_host_reaches_is_not_looked_through_region_by_region(paths: Paths) -> None:
    """A cache may have thousands, and this is done on the loop."""
    memory = bytearray(4)
    span = Span(Looked([Region(1, 4, Placement.HOST), Region(5, 4, Placement.HOST)]), Rows(memory), direct=True)
    for path in (paths.source, paths.puller):
        path._memory = PlainMemory()  # type: ignore[attr-defined]
    paths.source.describe(GRANT, span)
    paths.source.serve(GRANT, of(b"data"), 4)
    paths.puller.expect(GRANT, b"", Rows(memory), span)
    assert await paths.puller.fetch(GRANT, into(memory), 4).done == 4
    assert bytes(memory) == b"data"
    paths.source.release(GRANT)


# --- where both ends are on one device ---

HERE = (Region(1, 4, Placement.DEVICE, device=0),)


class OneDevice(PlainMemory):
    """Copies until it is stopped, and then ends, or cannot: the error says so."""

    def __init__(self, *, unsafe: bool) -> None:
        super().__init__()
        self.unsafe = unsafe
        self.begun = threading.Event()

    def copying(
        self,
        sources: Sequence[Region],
        destinations: Sequence[Region],
        pairs: NDArray[np.int64],
        *,
        until: Until | None = None,
    ) -> Generator[int, None, None]:
        self.begun.set()
        yield from hanging(until, unsafe=self.unsafe)


def hanging(until: Until | None, *, unsafe: bool) -> Generator[int, None, None]:
    assert until is not None
    give_up = time.monotonic() + 20
    while not until.over and time.monotonic() < give_up:
        time.sleep(0.001)
    raise LLMException("it was stopped", status_code=LLMStatusCode.LLM_FAILED, destination_unsafe=unsafe)
    yield 0


def begin(paths: Paths, memory: OneDevice, until: Until) -> tuple[Transfer, Transfer]:
    for path in (paths.source, paths.puller):
        path._memory = memory  # type: ignore[attr-defined]
    rows = Rows(bytearray(4))
    ticket = paths.source.describe(GRANT, Span(HERE, rows, direct=False))
    serving = paths.source.serve(GRANT, of(b"data"), 4)
    paths.puller.expect(GRANT, ticket, rows, Span(HERE, rows, direct=False, until=until))
    return serving, paths.puller.fetch(GRANT, into(bytearray(4)), 4)


async def test_p7_a_copy_on_the_device_is_stopped_when_the_source_withdraws_the_memory(paths: Paths) -> None:
    memory, until = OneDevice(unsafe=False), Until()
    serving, fetching = begin(paths, memory, until)
    assert await asyncio.to_thread(memory.begun.wait, 20)
    assert not until.stopped
    serving.abort()
    assert until.stopped
    with pytest.raises(ConnectionAbortedError, match="withdrawn"):
        await moved(fetching)
    await asyncio.wait_for(serving.settled, 20)
    paths.source.release(GRANT)


@pytest.mark.parametrize("staged", [False, True])
async def test_p7_memory_that_a_device_may_read_for_ever_is_never_said_to_be_free(paths: Paths, staged: bool) -> None:
    memory, until = OneDevice(unsafe=True), Until()
    if staged:
        paths.source.describe(GRANT, Span(HERE, Rows(bytearray(4)), direct=False))
        serving = paths.source.serve(GRANT, stuck(until), 4)
        fetching = paths.puller.fetch(GRANT, into(bytearray(4)), 4)
    else:
        serving, fetching = begin(paths, memory, until)
    until.stop()
    with pytest.raises(LLMException, match="it was stopped"):
        await moved(fetching)
    await asyncio.wait([fetching.settled])
    paths.source.release(GRANT)
    serving.abort()
    await asyncio.sleep(0.01)
    assert not serving.settled.done()


def stuck(until: Until) -> Batches:
    """A lending whose copy out of the source's device cannot be stopped."""
    for _ in hanging(until, unsafe=True):
        yield []


async def test_a_destination_that_may_be_written_for_ever_does_not_keep_the_source(paths: Paths) -> None:
    until = Until()
    serving = paths.source.serve(GRANT, of(b"data"), 4)
    fetching = paths.puller.fetch(GRANT, stuck(until), 4)
    until.stop()
    with pytest.raises(LLMException, match="it was stopped"):
        await moved(fetching)
    await asyncio.wait_for(serving.settled, 20)
    paths.source.release(GRANT)
