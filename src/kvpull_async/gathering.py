"""Bytes of a cache that ride on a frame: read here or by a worker, and put in their place. It must not know on which
frame, or for whom.
"""

from __future__ import annotations

import asyncio

from kvpull_async._workers import Workers
from kvpull_async.held import Entry
from kvpull_async.memory.base import Batches

__all__ = ["fill", "gathered", "join"]


async def gathered(lending: Batches, entry: Entry, workers: Workers, *, here: bool) -> bytes:
    """All bytes of a lending of the entry's memory, read on the loop when it is short enough for that (`here`)."""
    if here:
        return join(lending)
    pin = entry.pin(_nothing)  # as long as the thread reads, also when nobody waits for it any more
    try:
        reading = asyncio.get_running_loop().run_in_executor(workers, join, lending)
    except BaseException:
        pin.release()
        raise
    reading.add_done_callback(lambda _: pin.release())
    return await asyncio.shield(reading)


def join(lending: Batches) -> bytes:
    """All bytes of a lending."""
    return b"".join(view for batch in lending for view in batch)


def fill(pieces: list[memoryview], payload: bytes | memoryview) -> None:
    """Put so many bytes of the payload into each piece, with the interpreter lock held: for few."""
    at = 0
    for piece in pieces:
        end = at + len(piece)
        piece[:] = payload[at:end]
        at = end


def _nothing() -> None:
    """What happens when the cache is taken away: the thread ends soon."""
