"""What a peer lets this side read without asking: found while it is valid, and reported in batches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from kvpull_async import standing
from kvpull_async.protocol import frames
from kvpull_async.standing import Offered, Standings
from tests.loop_nodes import eventually


class Memory:
    tensors = 1
    tensor_nbytes = 64
    valid = True

    def read(self, first: int, start: int, destinations: Sequence[int], nbytes: int) -> bool:
        raise NotImplementedError


def offered(memory: Memory | None = None) -> Offered:
    return Offered(b"t", 64, memory or Memory())


async def test_what_was_remembered_is_found_while_the_peer_has_it() -> None:
    standings, memory = Standings(ignore), Memory()
    assert standings.find(7) is None
    standings.remember(7, held := offered(memory))
    assert standings.find(7) is held
    assert standings.find(8) is None
    memory.valid = False
    assert standings.find(7) is None
    standings.clear()


async def test_the_end_of_the_connection_forgets_everything_and_counts_what_goes_unreported() -> None:
    sent: list[frames.Read] = []
    standings = Standings(sent.append)
    standings.remember(7, offered())
    standings.note(7, 64)
    standings.note(8, 64)
    standings.note(7, 64)
    assert standings.clear() == 3
    assert standings.find(7) is None
    standings.report()
    assert sent == []
    assert standings.clear() == 0
    assert repr(standings) == "<Standings caches=0 unreported=0>"


async def test_reads_are_summed_up_by_cache_and_reported_once() -> None:
    sent: list[frames.Read] = []
    standings = Standings(sent.append)
    for _ in range(3):
        standings.note(7, 100)
    standings.note(8, 5, "a pull")
    standings.note(7, 1, "another")
    standings.report()
    assert sent == [frames.Read(7, 4, 301, ["another"]), frames.Read(8, 1, 5, ["a pull"])]
    standings.report()
    assert len(sent) == 2


async def test_p9_no_pull_id_is_lost_however_many_there_are() -> None:
    sent: list[frames.Read] = []
    standings = Standings(sent.append)
    ids = [f"pull-{i}" for i in range(150)]
    for pull_id in ids:
        standings.note(7, 1, pull_id)
    standings.report()
    assert [pull_id for read in sent for pull_id in read.pull_ids] == ids
    assert sum(read.pulls for read in sent) == sum(read.nbytes for read in sent) == 150
    for read in sent:
        frames.encode(read)  # fits a frame


async def test_reports_go_out_by_themselves_while_anything_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "_INTERVAL", 0.005)
    sent: list[frames.Read] = []
    standings = Standings(sent.append)
    standings.remember(7, offered())
    standings.remember(8, offered())
    for pulls in (1, 2):
        standings.note(7, 64)
        await eventually(lambda pulls=pulls: sum(read.pulls for read in sent) == pulls)  # type: ignore[misc]
    standings.clear()
    standings.note(7, 64)
    await asyncio.sleep(0.03)
    assert sum(read.pulls for read in sent) == 2


async def test_p7_no_read_is_lost_however_many_threads_make_them() -> None:
    """While caches come and go, and reports go out, on the loop."""
    sent: list[frames.Read] = []
    standings, stop = Standings(sent.append), threading.Event()
    noted = [0] * 4

    def read(number: int) -> None:
        while not stop.is_set():
            standings.find(number)
            standings.note(number, 1)
            noted[number] += 1

    threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(2000):
        memory = Memory()
        standings.remember(turn % 50, offered(memory))
        memory.valid = turn % 3 == 0
        standings._tick()
    stop.set()
    for thread in threads:
        thread.join()
    standings.report()
    assert sum(read.pulls for read in sent) == sum(read.nbytes for read in sent) == sum(noted)
    standings.clear()


def ignore(read: frames.Read) -> None:
    """Nobody listens."""
