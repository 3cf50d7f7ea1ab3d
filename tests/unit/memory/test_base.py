"""Copying a lending into a landing: order, bounds, laziness, and that both ends are always closed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvpull_async._deadline import Deadline
from kvpull_async.memory.base import Batches, Region, Until, copy_batches, lend_bytes, planned, watched
from kvpull_async.memory.host import HostMemory
from kvpull_async.values import Placement


class Pieces:
    """Batches over views, which remembers how far it was asked and whether it was closed."""

    def __init__(self, *batches: Sequence[memoryview]) -> None:
        self.asked = 0
        self.completed = False
        self.closed = False
        self.generator = self._run(batches)

    def _run(self, batches: Sequence[Sequence[memoryview]]) -> Batches:
        try:
            for batch in batches:
                self.asked += 1
                yield batch
            self.completed = True
        finally:
            self.closed = True


def source(*batches: Sequence[bytes]) -> Pieces:
    return Pieces(*([memoryview(piece) for piece in batch] for batch in batches))


def landing(memory: bytearray, *batches: Sequence[int]) -> Pieces:
    """Batches of views of the given lengths, one after another over `memory`."""
    made, start = [], 0
    for lengths in batches:
        batch = []
        for length in lengths:
            batch.append(memoryview(memory)[start : start + length])
            start += length
        made.append(batch)
    return Pieces(*made)


DATA = bytes(range(1, 13))


@pytest.mark.parametrize("pieces", [[[12]], [[4, 4, 4]], [[5], [7]], [[1, 2], [3, 6]], [[1]] * 12])
@pytest.mark.parametrize("targets", [[[12]], [[3, 9]], [[6], [6]], [[2, 2], [2, 6]], [[1]] * 12])
def test_whatever_the_boundaries_every_byte_lands_in_order(pieces: list[list[int]], targets: list[list[int]]) -> None:
    memory = bytearray(12)
    cut = np.split(np.frombuffer(DATA, np.uint8), np.cumsum([n for batch in pieces for n in batch])[:-1])
    parts = iter(cut)
    lending = source(*([bytes(next(parts)) for _ in batch] for batch in pieces))
    target = landing(memory, *targets)
    copied = list(copy_batches(lending.generator, target.generator))
    assert memory == DATA
    assert copied == [sum(batch) for batch in targets]
    assert lending.completed
    assert target.completed
    assert lending.closed
    assert target.closed


def test_the_bytes_outside_the_landing_stay() -> None:
    memory = bytearray(b"\xff" * 10)
    target = Pieces([memoryview(memory)[2:5]], [memoryview(memory)[7:8]])
    list(copy_batches(lend_bytes(b"abcd"), target.generator))
    assert memory == b"\xff\xffabc\xff\xffd\xff\xff"


def test_a_copy_that_is_closed_early_closes_both_ends_and_writes_no_more() -> None:
    memory = bytearray(12)
    lending, target = source([DATA[:6]], [DATA[6:]]), landing(memory, [4], [4], [4])
    steps = copy_batches(lending.generator, target.generator)
    assert next(steps) == 4
    steps.close()
    assert memory == DATA[:4] + bytes(8)
    assert lending.closed
    assert target.closed
    assert not target.completed


def test_a_source_that_is_longer_is_an_error() -> None:
    lending, target = source([DATA]), landing(bytearray(5), [5])
    with pytest.raises(ValueError, match="more bytes than the destination"):
        list(copy_batches(lending.generator, target.generator))
    assert lending.closed
    assert target.closed


def test_a_source_that_is_shorter_is_an_error() -> None:
    lending, target = source([DATA[:3]]), landing(bytearray(5), [5])
    with pytest.raises(ValueError, match="fewer bytes than the destination"):
        list(copy_batches(lending.generator, target.generator))
    assert lending.closed
    assert target.closed


def test_an_error_in_one_end_closes_the_other() -> None:
    def failing() -> Batches:
        yield [memoryview(DATA[:2])]
        raise OSError("the device is gone")

    target = landing(bytearray(5), [5])
    with pytest.raises(OSError, match="the device is gone"):
        list(copy_batches(failing(), target.generator))
    assert target.closed


def test_nothing_to_copy_copies_nothing() -> None:
    assert list(copy_batches(source().generator, landing(bytearray()).generator)) == []


def test_a_plan_is_made_only_when_the_first_piece_is_asked_for() -> None:
    made: list[str] = []
    target = landing(bytearray(5), [5])

    def plan() -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        made.append("plan")
        return np.zeros((0, 3), np.int64)

    batches = planned(plan, lambda _: target.generator)
    assert made == []
    assert len(next(batches)) == 1
    assert made == ["plan"]
    batches.close()
    assert target.closed


def test_a_plan_that_nobody_asks_for_is_never_made() -> None:
    def plan() -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        raise AssertionError("not asked for")

    planned(plan, lambda _: landing(bytearray()).generator).close()


def test_a_watched_landing_tells_what_has_been_filled() -> None:
    memory, heard = bytearray(12), []
    target = landing(memory, [2, 3], [1], [6])

    def hear(total: int) -> None:
        assert memory == DATA[:total] + bytes(12 - total)
        heard.append(total)

    list(copy_batches(lend_bytes(DATA), watched(target.generator, hear)))
    assert heard == [5, 6, 12]
    assert target.completed


def test_what_was_handed_out_and_not_filled_is_not_told() -> None:
    heard: list[int] = []
    target = landing(bytearray(9), [4], [5])
    pieces = watched(target.generator, heard.append)
    next(pieces)
    assert heard == []
    next(pieces)
    pieces.close()
    assert heard == [4]
    assert target.closed
    assert not target.completed


def test_a_region_does_not_show_or_compare_its_owner() -> None:
    one, two = (Region(4096, 8, Placement.HOST, owner=object()) for _ in range(2))
    assert one == two
    assert "owner" not in repr(one)


def test_memory_is_waited_for_until_the_deadline_or_until_somebody_stops_it() -> None:
    forever, stopped, late = Until(), Until(Deadline.after_ms(60_000)), Until(Deadline.after_ms(0))
    assert not forever.over
    assert not stopped.over
    assert (late.over, late.stopped) == (True, False)
    stopped.stop()
    stopped.stop()
    assert (stopped.over, stopped.stopped) == (True, True)
    assert "stopped" in repr(stopped)
    assert repr(forever)


def test_a_region_says_which_device_it_is_on_and_that_makes_it_another_one() -> None:
    here, there = Region(4096, 8, Placement.DEVICE), Region(4096, 8, Placement.DEVICE, device=0)
    assert here.device is None
    assert here != there


def test_a_landing_of_host_memory_tells_what_has_landed() -> None:
    memory, heard = HostMemory(), []
    data = np.zeros(8, np.uint8)
    regions = memory.adopt([data.ctypes.data], tensor_nbytes=8, placement=Placement.HOST)
    table = np.array([(0, 0, 8)], np.int64)
    for batch in memory.landing(regions, table, until=Until(), landed=lambda n: heard.append((n, data.sum()))):
        for view in batch:
            view[:] = bytes([3]) * len(view)
    assert heard == [(8, 24)]
