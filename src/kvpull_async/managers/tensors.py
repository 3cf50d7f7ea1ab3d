"""The bytes of one tensor for the application: the memory itself where the host reaches it, else a copy of them.

It must not know handles or data types.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from contextlib import closing
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpull_async._deadline import Deadline
from kvpull_async.call import finalized
from kvpull_async.managers.dialect import Dialect
from kvpull_async.managers.node import Node
from kvpull_async.memory.base import Until, forked
from kvpull_async.registry import Entry
from kvpull_async.status import LLMException, LLMStatusCode, LLMTimeoutError
from kvpull_async.turn import GRACE

__all__ = ["tensor_bytes"]

T = TypeVar("T")


def tensor_bytes(node: Node, dialect: Dialect, entry: Entry, index: int) -> memoryview:
    """Writable, over the memory itself; for memory of a device a read-only copy, for which this thread waits at most
    `sync_kv_timeout`, whatever the device does. The cache is in use until a copy has ended that nobody waits for any
    more. LLM_KV_CACHE_NOT_EXIST once the cache is released.
    """
    if entry.regions[index].device is None:
        return entry.views()[index]
    if not node.live:  # it has no threads, and what another one held at the fork stays locked
        raise forked()
    token, until = object(), Until(Deadline.after_ms(node.settings.sync_kv_timeout_ms))
    if not entry.claim(token):
        raise _in_the_way(dialect, entry)
    reading = _begun(node, entry, partial(_copied, node, entry, index, until), token)
    try:
        return _ended(reading, until).data
    except LLMTimeoutError as error:
        text = f"tensor {index} of cache {entry.cache_id}: {error}"
        raise LLMTimeoutError(text, status_code=dialect.timeout_status, retry_safe=True) from error
    finally:
        until.stop()
        if reading.done():
            entry.unclaim(token, node.loop)


def _begun(node: Node, entry: Entry, read: Callable[[], T], token: object) -> futures.Future[T]:
    """In one of the workers that may wait for a device; whatever becomes of it, its end gives the memory back."""
    try:
        reading = node.workers.apart.submit(read)
    except RuntimeError as error:
        entry.unclaim(token, node.loop)
        raise finalized() from error
    reading.add_done_callback(lambda _: entry.unclaim(token, node.loop))
    return reading


def _ended(reading: futures.Future[T], until: Until) -> T:
    futures.wait([reading], until.deadline.remaining + GRACE)
    if not reading.cancel() and reading.done():
        return reading.result()
    raise LLMTimeoutError("the device has not answered in time")


def _copied(node: Node, entry: Entry, index: int, until: Until) -> NDArray[np.uint8]:
    entry.reach()
    region = entry.regions[index]
    copy, at = np.empty(region.nbytes, np.uint8), 0
    whole = np.array([[0, 0, region.nbytes]], np.int64)
    with closing(node.registry.backend.lending([region], whole, until=until)) as batches:
        for batch in batches:
            for piece in batch:
                np.copyto(copy[at : at + piece.nbytes], np.frombuffer(piece, np.uint8))
                at += piece.nbytes
    copy.flags.writeable = False  # whoever writes there means the device
    return copy


def _in_the_way(dialect: Dialect, entry: Entry) -> LLMException:
    """Why the memory cannot be used."""
    if not entry.alive:
        text = f"cache {entry.cache_id} was released"
        return LLMException(text, status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
    if entry.quarantined:
        text = f"cache {entry.cache_id} is quarantined: something may still write there"
        return LLMTimeoutError(text, status_code=dialect.timeout_status, destination_unsafe=True, retry_safe=True)
    return finalized()
