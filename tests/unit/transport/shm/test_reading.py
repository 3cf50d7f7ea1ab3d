"""One pull's copy: every byte where it belongs, an end that is true, and nothing written after it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpull_async import plan
from kvpull_async._workers import Workers
from kvpull_async.memory.base import Span
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.transport.shm import reading as reading_module
from kvpull_async.transport.shm.reading import Reading, _starts
from tests.unit.transport.shm.readings import CANARY, CHUNK, KIB, Rows, Source, Target, expected, failed, settled, table


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    made = Workers(4, name="reading-worker")
    yield made
    assert await asyncio.to_thread(made.close, 20) == 0


@pytest.fixture(params=["span", "landing"])
def start(request: pytest.FixtureRequest, workers: Workers) -> Callable[..., Reading]:
    """A reading that writes by itself, and one that fills what a landing hands out."""

    def begin(source: Source, src: Rows, target: Target, dst: Rows, nbytes: int | None = None) -> Reading:
        into = target.span(dst) if request.param == "span" else target.landing(dst)
        return Reading(workers, source, lambda: src, into, nbytes=int(dst[:, 2].sum()) if nbytes is None else nbytes)

    return begin


# -- every byte where it belongs ---------------------------------------------------------------------------------------

TABLES = {
    "whole": (table((0, 0, 64 * KIB)), table((0, 0, 64 * KIB))),
    "scattered": (
        table(*((0, i * 512, 512) for i in reversed(range(100)))),
        table(*((0, i * 640, 512) for i in range(100))),
    ),
    "cut otherwise": (table((0, 1, 1000), (0, 5000, 3000)), table((0, 77, 7), (0, 100, 3993))),
    "single bytes": (
        table(*((0, i * 7, 1) for i in range(3000))),
        table(*((0, 3000 - i, 1) for i in range(3000))),
    ),
    "one byte": (table((0, 65535, 1)), table((0, 0, 1))),
}


@pytest.mark.parametrize("name", sorted(TABLES))
async def test_bytes_land_in_stream_order_and_nowhere_else(start: Callable[..., Reading], name: str) -> None:
    src, dst = TABLES[name]
    source, target = Source(), Target()
    reading = start(source, src, target, dst)
    await settled(reading)
    assert reading.done.result() == dst[:, 2].sum()
    assert np.array_equal(target.content, expected(source, src, target, dst))


@pytest.mark.parametrize("difference", [-1, 0, 1])
@pytest.mark.parametrize("chunks", [1, 2, 3])
async def test_sizes_around_the_chunk_come_whole(
    start: Callable[..., Reading], chunks: int, difference: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_module, "_CHUNK", 4096)
    nbytes = chunks * 4096 + difference
    source, target = Source(2, 16 * KIB), Target(2, 16 * KIB)
    for src in (table((1, 3, nbytes)), table((1, 3, 5), (0, 0, nbytes - 5))):
        dst = table((0, 7, nbytes - 1), (1, 0, 1))
        reading = start(source, src, target, dst)
        await settled(reading)
        assert reading.done.result() == nbytes
        assert np.array_equal(target.content, expected(source, src, target, dst))
        target.content[:] = CANARY


async def test_one_row_longer_than_many_chunks_is_copied_by_several_threads(workers: Workers) -> None:
    source, target, nbytes = Source(1, 5 * CHUNK + 7), Target(1, 5 * CHUNK + 7), 5 * CHUNK + 7
    whole, met = table((0, 0, nbytes)), threading.Barrier(2)
    source.before = lambda number: (met.wait(20), None)[1] if number < 2 else None
    reading = Reading(workers, source, lambda: whole, target.span(whole), nbytes=nbytes)
    await settled(reading)
    assert np.array_equal(target.content, source.content)
    assert sum(source.copied) == nbytes
    assert len(source.threads) >= 2


async def test_several_tensors_on_both_sides(start: Callable[..., Reading]) -> None:
    source, target = Source(5, 8 * KIB), Target(3, 16 * KIB)
    src = table(*((t, 0, 8 * KIB) for t in (4, 0, 2, 1, 3)))
    dst = table((2, 0, 16 * KIB), (0, 0, 16 * KIB), (1, 8 * KIB, 8 * KIB))
    reading = start(source, src, target, dst)
    await settled(reading)
    assert np.array_equal(target.content, expected(source, src, target, dst))


async def test_a_table_without_rows_is_done_at_once(start: Callable[..., Reading]) -> None:
    source, target = Source(), Target()
    reading = start(source, table(), target, table())
    await settled(reading)
    assert reading.done.result() == 0
    assert target.untouched


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60), st.integers(1, 3000))
def test_chunks_cover_all_rows_once_in_order(lengths: list[int], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_module, "_CHUNK", chunk)
        lengths = [min(length, chunk) for length in lengths]  # as they are cut
        starts = _starts(np.cumsum(np.array(lengths, np.int64)))
    assert starts[0] == 0
    assert starts[-1] == len(lengths)
    assert starts == sorted(set(starts)), "an empty chunk"
    sizes = [sum(lengths[a:b]) for a, b in itertools.pairwise(starts)]
    assert all(size < 2 * chunk for size in sizes)
    assert all(size + max(lengths) > chunk for size in sizes[:-1]), "smaller than it need be"


# -- never outside -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "src",
    [
        table((0, 0, 64 * KIB + 1)),
        table((0, 1, 64 * KIB)),
        table((0, 64 * KIB, 1)),
        table((0, -1, 10)),
        table((0, 2**63 - 5, 10)),
        table((0, -(2**63), 10)),
        table((1, 0, 10)),
        table((-1, 0, 10)),
        table((2**62, 0, 10)),
        table((0, 0, 2**63 - 1)),
        table((0, 0, 20), (0, 0, -10)),
        table((0, 0, 10), (0, 0, 0)),
    ],
    ids=str,
)
async def test_rows_outside_of_the_sources_cache_are_never_read(start: Callable[..., Reading], src: Rows) -> None:
    source, target = Source(), Target()
    reading = start(source, src, target, table((0, 0, 10)))
    await failed(reading, ValueError, "outside")
    assert not source.copied
    assert target.untouched


@pytest.mark.parametrize(("granted", "destination"), [(10, 11), (11, 10), (10, 9), (2**40, 10)])
async def test_a_grant_of_another_size_is_an_error(
    start: Callable[..., Reading], granted: int, destination: int
) -> None:
    source, target = Source(), Target()
    reading = start(source, table((0, 0, 10)), target, table((0, 0, destination)), nbytes=granted)
    await failed(reading, ValueError)


def alike(src: plan.Pieces, dst: plan.Pieces, target: Target) -> Span:
    """A destination that says in both ways where the bytes go."""
    return replace(target.span(rows_of(dst)), alike=lambda: (src, dst))


def rows_of(pieces: plan.Pieces) -> Rows:
    return table(*((t, o, n) for t in pieces.tensors for o, n in zip(pieces.offsets, pieces.lengths, strict=True)))


@pytest.mark.parametrize("size", [1, 100, 3 * 1024, 2 * CHUNK + 5], ids=str)
async def test_the_same_pieces_of_many_tensors_land_where_their_rows_say(workers: Workers, size: int) -> None:
    """Short ones are planned for all tensors at once; such as are longer than a chunk as any others."""
    source, target = Source(5, 9 * size), Target(4, 9 * size)
    blocks = [np.array(numbers) for numbers in ([7, 8, 2, 0, 1], [3, 4, 8, 1, 2])]
    runs = plan.shared_runs(*blocks)
    src, dst = (
        plan.block_pieces(tensors, numbers, block_nbytes=size, runs=runs)
        for tensors, numbers in zip((range(2, 5), range(3)), blocks, strict=True)
    )
    assert dst.lengths.tolist() == [2 * size, size, 2 * size]
    reading = Reading(workers, source, lambda: rows_of(src), alike(src, dst, target), nbytes=15 * size)
    await settled(reading)
    assert reading.done.result() == 15 * size
    assert (target.content == expected(source, rows_of(src), target, rows_of(dst))).all()


@pytest.mark.parametrize(
    ("tensors", "offsets", "nbytes"),
    [
        (range(4), [0, 64], 512),
        (range(1, 4), [0, 64], 384),
        (range(3), [0, 64 * KIB - 63], 384),
        (range(3), [-1, 64], 384),
        (range(3), [0, 64], 383),
        (range(2), [0, 64], 384),
    ],
    ids=str,
)
async def test_pieces_outside_of_the_sources_cache_are_never_read(
    workers: Workers, tensors: range, offsets: list[int], nbytes: int
) -> None:
    source, target, lengths = Source(3), Target(4), np.array([64, 64])
    src = plan.Pieces(tensors, np.array(offsets), lengths)
    dst = plan.Pieces(range(len(tensors)) if len(tensors) > 2 else range(3), np.array([0, 64]), lengths)
    reading = Reading(workers, source, lambda: rows_of(src), alike(src, dst, target), nbytes=nbytes)
    await failed(reading, ValueError)
    assert not source.copied
    assert target.untouched


# -- the source goes ---------------------------------------------------------------------------------------------------


async def test_a_cache_that_is_gone_already_is_not_touched(start: Callable[..., Reading]) -> None:
    source, target = Source(), Target()
    source.gone = True
    reading = start(source, table((0, 0, 1000)), target, table((0, 0, 1000)))
    await failed(reading, LLMException, "gone")
    assert target.untouched


async def test_a_cache_that_goes_during_the_copy_is_an_error(start: Callable[..., Reading]) -> None:
    source, target, rows = Source(), Target(), table((0, 0, 64 * KIB))
    source.gate.close()
    reading = start(source, rows, target, rows)
    await source.gate.reached()
    source.gone = True
    source.gate.open()
    await failed(reading, LLMException, "gone")
    assert reading.done.exception() is not None


async def test_a_cache_that_goes_right_after_the_last_byte_is_an_error(start: Callable[..., Reading]) -> None:
    source, target, rows = Source(), Target(), table((0, 0, 64 * KIB))

    class Last(Source):
        def copy(self, *args: object) -> int:
            done = super().copy(*args)  # type: ignore[arg-type]
            self.gone = True
            return done

    source = Last()
    await failed(start(source, rows, target, rows), LLMException, "gone")


async def test_an_error_in_one_thread_stops_the_others(workers: Workers) -> None:
    source, nbytes = Source(1, 30 * CHUNK), 30 * CHUNK
    target, rows = Target(1, nbytes), table((0, 0, nbytes))

    def fail(number: int) -> None:
        if number == 1:
            raise OSError("the peer's memory went away")

    source.before = fail
    reading = Reading(workers, source, lambda: rows, target.span(rows), nbytes=nbytes)
    await failed(reading, OSError, "went away")
    assert len(source.copied) < 29, "the others went on to the end"
    content = target.content.copy()
    await asyncio.sleep(0.02)
    assert np.array_equal(target.content, content)


async def test_a_table_that_cannot_be_made_is_an_error(workers: Workers) -> None:
    def broken() -> Rows:
        raise LLMException("no such blocks", status_code=LLMStatusCode.LLM_PARAM_INVALID)

    target = Target()
    for into in (target.span(table((0, 0, 10))), target.landing(table((0, 0, 10)))):
        await failed(Reading(workers, Source(), broken, into, nbytes=10), LLMException, "no such blocks")
    assert target.untouched


async def test_memory_that_an_error_would_keep_is_let_go(workers: Workers) -> None:
    source, target, rows = Source(), Target(), table((0, 0, 10))
    source.gone = True
    reading = Reading(workers, source, lambda: rows, target.span(rows), nbytes=10)
    await settled(reading)
    known = weakref.ref(source)
    del source
    gc.collect()
    assert known() is None
    assert isinstance(reading.done.exception(), LLMException)


# -- side by side ------------------------------------------------------------------------------------------------------


async def test_p5_a_long_reading_lets_short_ones_pass() -> None:
    """One thread for all: the long one steps back after each chunk, and goes on where it was."""
    workers, source = Workers(1), Source(1, 24 * CHUNK)
    whole = table((0, 0, 24 * CHUNK))
    target = Target(1, 24 * CHUNK)
    source.before = lambda _: threading.Event().wait(0.002)  # type: ignore[assignment,return-value]
    long = Reading(workers, source, lambda: whole, target.span(whole, watch=True), nbytes=24 * CHUNK)
    small, row = Source(), table((0, 0, 64 * KIB))
    targets = [Target() for _ in range(3)]
    short = [Reading(workers, small, lambda: row, one.span(row), nbytes=64 * KIB) for one in targets]
    for reading, one in zip(short, targets, strict=True):
        await settled(reading)
        assert (one.content == small.content).all()
    assert not long.done.done(), "who came first held the thread to the end"
    await settled(long)
    assert (target.content == source.content).all()
    assert target.landed == sorted(target.landed)
    assert target.landed[-1] == 24 * CHUNK
    assert await asyncio.to_thread(workers.close, 20) == 0


async def test_a_reading_that_stepped_back_can_be_stopped(workers: Workers) -> None:
    source, whole, target = Source(1, 12 * CHUNK), table((0, 0, 12 * CHUNK)), Target(1, 12 * CHUNK)
    source.before = lambda _: threading.Event().wait(0.002)  # type: ignore[assignment,return-value]
    readings = [
        Reading(workers, source, lambda: whole, target.span(whole), nbytes=12 * CHUNK) for _ in range(9)
    ]  # more than threads, so that all step back
    await asyncio.sleep(0.01)
    for reading in readings:
        reading.abort()
    for reading in readings:
        await settled(reading)
        assert reading.done.cancelled() or reading.done.result() == 12 * CHUNK
    target.content[:] = CANARY
    await asyncio.sleep(0.02)
    assert target.untouched
