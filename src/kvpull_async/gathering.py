"""Bytes of a cache that ride on a frame: read here or by a worker, and put in their place. It must not know on which
frame, or for whom.
"""

from __future__ import annotations

import asyncio

from kvpull_async._workers import Workers
from kvpull_async.held import Entry
from kvpull_async.memory.base import Batches, Until
from kvpull_async.status import LLMException

__all__ = ["fill", "gathered", "join"]


async def gathered(lending: Batches, entry: Entry, workers: Workers, *, here: bool, until: Until) -> bytes:
    """All bytes of a lending of the entry's memory, read on the loop when it is short enough for that (`here`).
    `until`, with which the lending was made, is stopped when nobody waits for them any more.
    """
    if here:
        return join(lending)
    pin = entry.pin(until.stop)  # as long as the thread reads, also when nobody waits for it any more
    try:
        reading = asyncio.get_running_loop().run_in_executor(workers.fit(direct=entry.direct), join, lending)
    except BaseException:
        pin.release()
        raise
    reading.add_done_callback(lambda _: pin.release())
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        until.stop()
        raise
    except LLMException as error:
        raise error.with_traceback(None)  # noqa: B904  (without the thread's: who keeps it would keep the memory)


def join(lending: Batches) -> bytes:
    """All bytes of a lending, which has ended then, also if they cannot be had."""
    try:
        return b"".join([b"".join(batch) for batch in lending])  # a batch is another's once the next is asked for
    finally:
        lending.close()


def fill(pieces: list[memoryview], payload: bytes | memoryview) -> None:
    """Put so many bytes of the payload into each piece, with the interpreter lock held: for few."""
    at = 0
    for piece in pieces:
        end = at + len(piece)
        piece[:] = payload[at:end]
        at = end
