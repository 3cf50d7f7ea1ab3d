"""What has arrived on a channel, and how it is handed on: to who waits, or by callbacks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvpull_async.transport.arrivals import Arrivals


class Heard:
    """What the callbacks were told, in order."""

    def __init__(self, arrivals: Arrivals, *, pause_after: int = 0) -> None:
        self.told: list[Any] = []
        self._arrivals = arrivals
        self._pause_after = pause_after
        arrivals.deliver(self._arrived, self.told.append)

    def _arrived(self, data: bytes | memoryview) -> None:
        self.told.append(bytes(data))
        if len(self.told) == self._pause_after:
            self._arrivals.pause()


async def test_what_came_before_anybody_asked_waits_and_so_does_the_end() -> None:
    arrivals = Arrivals()
    arrivals.put(b"one")
    arrivals.put(memoryview(b"two"))
    arrivals.end()
    arrivals.put(b"too late")
    assert arrivals.unread == 6
    assert [await arrivals.receive() for _ in range(4)] == [b"one", b"two", b"", b""]
    assert arrivals.unread == 0


async def test_who_waits_is_woken_by_bytes_by_the_end_and_by_what_broke() -> None:
    arrivals = Arrivals()
    waiting = asyncio.ensure_future(arrivals.receive())
    await asyncio.sleep(0)
    arrivals.put(b"here")
    assert await waiting == b"here"
    waiting = asyncio.ensure_future(arrivals.receive())
    await asyncio.sleep(0)
    arrivals.end(ConnectionResetError("broke"))
    arrivals.end()
    with pytest.raises(ConnectionResetError, match="broke"):
        await waiting
    with pytest.raises(ConnectionResetError, match="broke"):
        await arrivals.receive()


async def test_a_view_is_kept_as_bytes_of_its_own() -> None:
    arrivals, buffer = Arrivals(), bytearray(b"old")
    arrivals.put(memoryview(buffer))
    buffer[:] = b"new"
    assert await arrivals.receive() == b"old"


async def test_callbacks_hear_what_waited_in_the_next_turn_and_then_all_at_once() -> None:
    arrivals = Arrivals()
    arrivals.put(b"before")
    heard = Heard(arrivals)
    assert heard.told == []
    arrivals.put(b"behind it")
    await asyncio.sleep(0)
    assert heard.told == [b"before", b"behind it"]
    arrivals.put(memoryview(b"at once"))
    assert heard.told[2:] == [b"at once"]
    arrivals.end()
    arrivals.end(OSError("only the first end counts"))
    assert heard.told[3:] == [None]


async def test_a_paused_callback_hears_nothing_until_it_is_resumed() -> None:
    arrivals = Arrivals()
    heard = Heard(arrivals, pause_after=1)
    error = ConnectionResetError("broke")
    for data in (b"1", b"2", b"3"):
        arrivals.put(data)
    arrivals.end(error)
    assert heard.told == [b"1"]
    assert arrivals.unread == 2
    arrivals.resume()
    assert heard.told == [b"1", b"2", b"3", error]


async def test_a_pause_in_the_middle_of_what_waited_leaves_the_rest() -> None:
    arrivals = Arrivals()
    for data in (b"1", b"2", b"3"):
        arrivals.put(data)
    heard = Heard(arrivals, pause_after=2)
    await asyncio.sleep(0)
    assert heard.told == [b"1", b"2"]
    arrivals.resume()
    assert heard.told == [b"1", b"2", b"3"]


async def test_the_channel_hears_how_much_was_taken() -> None:
    taken: list[int] = []
    arrivals = Arrivals(taken.append)
    arrivals.put(b"12345")
    assert taken == []
    await arrivals.receive()
    Heard(arrivals)
    arrivals.put(b"123")
    assert taken == [5, 3]
