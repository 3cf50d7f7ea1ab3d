"""The order of frames on a connection that is full: first handed over, first sent, and everybody hears of the end."""

from __future__ import annotations

import asyncio

import pytest

from kvpull_async.transport.outbox import Outbox


class Connection:
    """Takes `room` frames until `read` makes room again."""

    def __init__(self, room: int = 1) -> None:
        self.room = room
        self.sent: list[bytes] = []
        self.box = Outbox(self.write, lambda: self.room <= 0)

    def write(self, data: bytes) -> None:
        self.room -= 1
        self.sent.append(data)

    async def read(self, frames: int = 1) -> None:
        self.room += frames
        self.box.flow()
        for _ in range(10):
            await asyncio.sleep(0)


async def senders(box: Outbox, *frames: bytes) -> list[asyncio.Task[None]]:
    tasks = [asyncio.ensure_future(box.send(frame)) for frame in frames]
    await asyncio.sleep(0)
    return tasks


async def test_what_has_room_goes_at_once() -> None:
    there = Connection(room=2)
    assert there.box.ready
    await there.box.send(b"1")
    there.box.post(b"2")
    assert there.sent == [b"1", b"2"]
    assert not there.box.ready


async def test_everybody_who_waits_has_a_turn_in_the_order_of_coming() -> None:
    there = Connection(room=0)
    tasks = await senders(there.box, b"1", b"2", b"3")
    for _ in range(3):
        await there.read()
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert there.sent == [b"1", b"2", b"3"]
    assert not there.box.ready
    await there.read()
    assert there.box.ready


async def test_nothing_overtakes_whoever_waits() -> None:
    there = Connection(room=0)
    tasks = await senders(there.box, b"1")
    there.box.post(b"2")
    tasks += await senders(there.box, b"3")
    there.box.post(b"4")
    there.room += 10
    there.box.flow()
    there.box.post(b"5")  # before the first has been woken
    tasks += await senders(there.box, b"6")
    await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert there.sent == [b"1", b"2", b"3", b"4", b"5", b"6"]


async def test_without_anybody_waiting_what_is_posted_does_not_wait_either() -> None:
    there = Connection(room=0)
    there.box.post(b"1")
    assert there.sent == [b"1"]


@pytest.mark.parametrize("woken", [False, True], ids=["while it waits", "when it is its turn"])
@pytest.mark.parametrize("which", [0, 1, 2])
async def test_who_is_cancelled_has_handed_over_nothing_and_holds_nobody_up(which: int, woken: bool) -> None:
    there = Connection(room=0)
    frames = [b"1", b"2", b"3"]
    tasks = await senders(there.box, *frames)
    if woken:
        there.room += 3
        there.box.flow()
    tasks[which].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[which]
    await there.read(3)
    await asyncio.wait_for(asyncio.wait(tasks), 5)
    assert there.sent == [frame for number, frame in enumerate(frames) if number != which]


async def test_at_the_end_all_who_wait_hear_of_it_and_nothing_is_sent() -> None:
    there = Connection(room=0)
    tasks = await senders(there.box, b"1", b"2", b"3")
    there.box.post(b"4")
    there.box.end()
    errors = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert [type(error) for error in errors] == [ConnectionResetError] * 3
    with pytest.raises(ConnectionResetError):
        await there.box.send(b"5")
    there.box.post(b"6")
    there.box.end()
    assert there.sent == []
    assert not there.box.ready
    assert "ended" in repr(there.box)
