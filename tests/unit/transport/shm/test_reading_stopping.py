"""One pull's copy: stopped, watched, and shared out among threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from kvpull_async._workers import Workers
from kvpull_async.memory.base import Batches, Span
from kvpull_async.status import LLMException
from kvpull_async.transport.shm.reading import Reading
from tests.unit.transport.shm.readings import CANARY, CHUNK, KIB, MIB, Rows, Source, Target, failed, settled, table


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    made = Workers(4, name="reading-worker")
    yield made
    assert await asyncio.to_thread(made.close, 20) == 0


async def free(workers: Workers, threads: int) -> None:
    """Wait until so many threads of `workers` are done with what they had to do before this."""
    meeting = threading.Barrier(threads)
    here = [asyncio.wrap_future(workers.submit(meeting.wait, 20)) for _ in range(threads)]
    await asyncio.gather(*here)


@pytest.fixture(params=["span", "landing"])
def start(request: pytest.FixtureRequest, workers: Workers) -> Callable[..., Reading]:
    """A reading that writes by itself, and one that fills what a landing hands out."""

    def begin(source: Source, src: Rows, target: Target, dst: Rows, nbytes: int | None = None) -> Reading:
        into = target.span(dst) if request.param == "span" else target.landing(dst)
        return Reading(workers, source, lambda: src, into, nbytes=int(dst[:, 2].sum()) if nbytes is None else nbytes)

    return begin


# -- stopping ----------------------------------------------------------------------------------------------------------


async def test_stopped_while_it_copies_it_settles_only_then_and_writes_nothing_more(
    start: Callable[..., Reading], workers: Workers
) -> None:
    source, nbytes = Source(1, 12 * MIB), 12 * MIB
    target, rows = Target(1, nbytes), table((0, 0, nbytes))
    source.gate.close(times=1)
    reading = start(source, rows, target, rows)
    await source.gate.reached()
    assert reading.abort()
    assert reading.abort()
    await free(workers, workers.limit - 1)  # all but the one that is held
    assert not reading.settled.done(), "a thread is about to write"
    source.gate.open()
    await settled(reading)
    target.content[:] = CANARY
    assert reading.done.cancelled()
    await free(workers, workers.limit)
    assert target.untouched


async def test_stopped_before_any_thread_began_it_never_begins(start: Callable[..., Reading]) -> None:
    source, target, rows = Source(), Target(), table((0, 0, 64 * KIB))
    blocking = threading.Event()
    workers = Workers(1, name="busy-worker")
    workers.submit(blocking.wait, 20)
    try:
        reading = Reading(workers, source, lambda: rows, target.span(rows), nbytes=64 * KIB)
        reading.abort()
        reading.abort()
        await settled(reading)
        assert reading.done.cancelled()
    finally:
        blocking.set()
        await asyncio.to_thread(workers.close, 20)
    assert not source.copied
    assert target.untouched


async def test_stopping_what_has_ended_changes_nothing(start: Callable[..., Reading], workers: Workers) -> None:
    wrong: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    source, target, rows = Source(), Target(), table((0, 0, 100))
    reading = start(source, rows, target, rows)
    await settled(reading)
    assert reading.abort()
    await free(workers, workers.limit)
    assert reading.done.result() == 100
    assert not wrong


async def test_stopping_what_has_failed_keeps_the_error(start: Callable[..., Reading]) -> None:
    source, target, rows = Source(), Target(), table((0, 0, 100))
    source.gone = True
    reading = start(source, rows, target, rows)
    await settled(reading)
    reading.abort()
    await failed(reading, LLMException, "gone")


async def test_nobody_hears_of_an_end_whose_loop_has_closed(workers: Workers) -> None:
    source, target, rows = Source(), Target(), table((0, 0, 64 * KIB))
    source.gate.close()

    def other_loop() -> None:
        async def begin() -> None:
            Reading(workers, source, lambda: rows, target.span(rows), nbytes=64 * KIB)
            await source.gate.reached()

        asyncio.run(begin())

    await asyncio.to_thread(other_loop)
    source.gate.open()


async def test_random_stops_never_leave_a_writer(workers: Workers) -> None:
    source, nbytes = Source(1, 8 * MIB), 8 * MIB
    target, rows = Target(1, nbytes), table(*((0, i * 4096, 4096) for i in range(nbytes // 4096)))
    random = np.random.default_rng(5)
    ends = {"done": 0, "stopped": 0}
    for number in range(60):
        reading = Reading(workers, source, lambda: rows, target.span(rows), nbytes=nbytes)
        if number % 2:  # else before much can have happened, however busy the machine
            await asyncio.sleep(float(random.uniform(0, 0.004)))
        reading.abort()
        await settled(reading)
        if reading.done.cancelled():
            ends["stopped"] += 1
        else:
            ends["done"] += 1
            assert np.array_equal(target.content, source.content)
        target.content[:] = CANARY
        await asyncio.sleep(0)
        assert target.untouched
    assert ends["stopped"]


# -- what has landed ---------------------------------------------------------------------------------------------------


async def test_what_is_told_has_landed_grows_and_ends_with_all(workers: Workers) -> None:
    nbytes = 6 * CHUNK + 100
    source, target = Source(1, nbytes), Target(1, nbytes)
    rows, wrong = table((0, 0, nbytes)), []

    def landed(count: int) -> None:
        if not np.array_equal(target.content[0, :count], source.content[0, :count]):
            wrong.append(count)
        target.landed.append(count)

    span = Span(target.regions, lambda: rows, True, landed)
    reading = Reading(workers, source, lambda: rows, span, nbytes=nbytes)
    await settled(reading)
    assert not wrong, "told before it had landed"
    assert target.landed == sorted(set(target.landed))
    assert target.landed[-1] == nbytes


async def test_a_chunk_that_comes_late_holds_back_what_is_behind_it(workers: Workers) -> None:
    nbytes = 4 * CHUNK
    source, target = Source(1, nbytes), Target(1, nbytes)
    rows, first = table((0, 0, nbytes)), threading.Event()
    source.before = lambda number: (first.wait(20), None)[1] if number == 0 else None
    reading = Reading(workers, source, lambda: rows, target.span(rows, watch=True), nbytes=nbytes)
    for _ in range(2000):
        if len(source.copied) == 3:
            break
        await asyncio.sleep(0.005)
    assert len(source.copied) == 3
    assert target.landed == []
    first.set()
    await settled(reading)
    assert target.landed == [nbytes]


async def test_nothing_is_told_of_a_cache_that_is_gone(workers: Workers) -> None:
    source, nbytes = Source(1, 4 * CHUNK), 4 * CHUNK
    target, rows = Target(1, nbytes), table((0, 0, nbytes))
    source.gate.close()
    reading = Reading(workers, source, lambda: rows, target.span(rows, watch=True), nbytes=nbytes)
    await source.gate.reached()
    source.gone = True
    source.gate.open()
    await failed(reading, LLMException, "gone")
    assert target.landed == []


async def test_a_landing_is_not_told_of_bytes_of_a_cache_that_is_gone(workers: Workers) -> None:
    """It tells what has landed when it is asked for the next pieces, so the check comes before that."""
    source, nbytes = Source(1, 3 * MIB), 3 * MIB
    target, rows, asked = Target(1, nbytes), table((0, 0, nbytes)), 0

    def watched() -> Batches:
        nonlocal asked
        for batch in target.landing(rows):
            yield batch
            asked += 1

    source.gate.close()
    reading = Reading(workers, source, lambda: rows, watched(), nbytes=nbytes)
    await source.gate.reached()
    source.gone = True
    source.gate.open()
    await failed(reading, LLMException, "gone")
    assert asked == 0


async def test_a_landing_is_closed_whatever_happens(workers: Workers) -> None:
    source, target, rows, closed = Source(1, 3 * MIB), Target(1, 3 * MIB), table((0, 0, 3 * MIB)), []

    def landing() -> Batches:
        try:
            yield from target.landing(rows)
        finally:
            closed.append(True)

    def broken(_: int) -> None:
        raise OSError("broken")

    await settled(Reading(workers, source, lambda: rows, landing(), nbytes=3 * MIB))
    source.before = broken
    await failed(Reading(workers, source, lambda: rows, landing(), nbytes=3 * MIB), OSError, "broken")
    source.before = lambda _: None
    source.gate.close()
    reading = Reading(workers, source, lambda: rows, landing(), nbytes=3 * MIB)
    await source.gate.reached()
    reading.abort()
    source.gate.open()
    await settled(reading)
    assert len(closed) == 3


# -- on the loop -------------------------------------------------------------------------------------------------------


async def test_few_bytes_in_few_rows_are_copied_at_once_on_the_loop(workers: Workers) -> None:
    source, target, rows = Source(), Target(), table((0, 0, 1000))
    reading = Reading(workers, source, lambda: rows, target.span(rows, few=True), nbytes=1000)
    assert reading.settled.done()
    assert reading.done.result() == 1000
    assert np.array_equal(target.content[0, :1000], source.content[0, :1000])
    assert source.threads == {threading.current_thread().name}
    assert reading.abort()


async def test_an_error_on_the_loop_is_the_transfers_not_the_callers(workers: Workers) -> None:
    source, target, rows = Source(), Target(), table((0, 0, 1000))
    source.gone = True
    reading = Reading(workers, source, lambda: rows, target.span(rows, few=True), nbytes=1000)
    await failed(reading, LLMException, "gone")


@pytest.mark.parametrize("why", ["many bytes", "many rows", "unknown rows"])
async def test_much_work_never_runs_on_the_loop(workers: Workers, why: str) -> None:
    count = {"many bytes": 1, "many rows": 2000, "unknown rows": 1}[why]
    nbytes = 300 * KIB if why == "many bytes" else 2000
    source, target = Source(1, 512 * KIB), Target(1, 512 * KIB)
    rows = table(*((0, i * (nbytes // count), nbytes // count) for i in range(count)))
    span = target.span(rows, few=why != "unknown rows")
    reading = Reading(workers, source, lambda: rows, span, nbytes=int(rows[:, 2].sum()))
    await settled(reading)
    assert reading.done.result() == rows[:, 2].sum()
    assert threading.current_thread().name not in source.threads


async def test_workers_that_have_ended_are_an_error_and_not_a_reading_for_ever() -> None:
    workers, rows = Workers(1), table((0, 0, 1000))
    workers.close(1)
    target = Target()
    with pytest.raises(RuntimeError, match="shut down"):
        Reading(workers, Source(), lambda: rows, target.span(rows), nbytes=1000)
    assert target.untouched


async def test_many_readings_share_few_threads_and_all_come_whole(workers: Workers) -> None:
    nbytes = 3 * CHUNK
    source, rows = Source(1, nbytes), table((0, 0, nbytes))
    targets = [Target(1, nbytes) for _ in range(6)]
    readings = [Reading(workers, source, lambda: rows, target.span(rows), nbytes=nbytes) for target in targets]
    for reading in readings:
        await settled(reading)
        assert reading.done.result() == nbytes
    assert all(np.array_equal(target.content, source.content) for target in targets)


async def test_one_of_many_readings_is_stopped_while_its_thread_serves_others(workers: Workers) -> None:
    nbytes = 8 * CHUNK
    source, rows = Source(1, nbytes), table((0, 0, nbytes))
    targets = [Target(1, nbytes) for _ in range(5)]
    source.gate.close()
    readings = [Reading(workers, source, lambda: rows, target.span(rows), nbytes=nbytes) for target in targets]
    await source.gate.reached()
    readings[0].abort()
    readings[3].abort()
    source.gate.open()
    for number, (reading, target) in enumerate(zip(readings, targets, strict=True)):
        await settled(reading)
        if number in (0, 3):
            assert reading.done.cancelled()
            target.content[:] = CANARY
        else:
            assert np.array_equal(target.content, source.content)
    await asyncio.sleep(0.02)
    assert targets[0].untouched
    assert targets[3].untouched
