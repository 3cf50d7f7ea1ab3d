"""What a peer lets this side read without asking: found while it is valid, and reported in batches."""

from __future__ import annotations

import asyncio
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


async def test_what_was_remembered_is_found_until_the_peer_takes_it_away() -> None:
    standings, memory = Standings([].append), Memory()
    assert standings.find(7) is None
    standings.remember(7, held := offered(memory))
    assert standings.find(7) is held
    assert standings.find(8) is None
    memory.valid = False
    assert standings.find(7) is None
    memory.valid = True
    assert standings.find(7) is None, "once it was gone, the peer has to be asked"
    standings.clear()


async def test_memory_that_the_peer_took_away_is_let_go_though_nobody_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lets go of it: what is kept here stays mapped, and so keeps the peer's pages from the kernel."""
    monkeypatch.setattr(standing, "_INTERVAL", 0.01)
    standings, gone, kept = Standings([].append), Memory(), Memory()
    standings.remember(7, offered(gone))
    standings.remember(8, offered(kept))
    gone.valid = False
    await eventually(lambda: repr(standings) == "<Standings caches=1 unreported=0>")
    kept.valid = False
    await eventually(lambda: repr(standings) == "<Standings caches=0 unreported=0>")
    standings.remember(9, offered(gone))
    await eventually(lambda: repr(standings) == "<Standings caches=0 unreported=0>")
    standings.clear()


async def test_the_end_of_the_connection_forgets_everything() -> None:
    standings = Standings([].append)
    standings.remember(7, offered())
    standings.note(7, 64)
    standings.clear()
    assert standings.find(7) is None
    assert standings.reports() == []
    assert repr(standings) == "<Standings caches=0 unreported=0>"


async def test_reads_are_summed_up_by_cache_and_reported_once() -> None:
    standings = Standings([].append)
    for _ in range(3):
        standings.note(7, 100)
    standings.note(8, 5, "a pull")
    standings.note(7, 1, "another")
    assert standings.reports() == [frames.Read(7, 4, 301, ["another"]), frames.Read(8, 1, 5, ["a pull"])]
    assert standings.reports() == []


async def test_p9_no_pull_id_is_lost_however_many_there_are() -> None:
    standings = Standings([].append)
    ids = [f"pull-{i}" for i in range(150)]
    for pull_id in ids:
        standings.note(7, 1, pull_id)
    reports = standings.reports()
    assert [pull_id for report in reports for pull_id in report.pull_ids] == ids
    assert sum(report.pulls for report in reports) == sum(report.nbytes for report in reports) == 150
    for report in reports:
        frames.encode(report)  # fits a frame


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


async def test_unreported_reads_are_bounded() -> None:
    standings = Standings([].append)
    for _ in range(70_000):
        standings.note(7, 1)
    assert sum(read.pulls for read in standings.reports()) == 65_536
