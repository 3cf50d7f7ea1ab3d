"""The tables of a run, or of several. It must not measure, nor know bounds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Final

from figures import Spread, percentile, print_table
from floors import FLOORS
from runs import PerRep, Run, samples

__all__ = ["tell"]

YARDSTICK: Final = "tcp"


def tell(runs: Sequence[Run]) -> None:
    """Cells are medians over the repetitions of one run, or over several runs."""
    works = [work for work in runs[0].nbytes if any(run.rows(work) for run in runs)]
    for work in works:
        _tell_latency(runs, work) if _is_latency(runs[0], work) else _tell_bulk(runs, work)
    _tell_floors(runs)
    _tell_idle(runs)
    memory = {name: pages for run in runs for name, pages in run.memory.items()}
    if memory:
        rows = [[name, *sides] for name, sides in memory.items()]
        print_table("Pages that the memory really has", ["", "source", "puller"], rows)
    missing = {name: why for run in runs for name, why in run.missing.items()}
    for name, why in missing.items():
        print(f"not available: {name}: {why}")


def _tell_idle(runs: Sequence[Run]) -> None:
    names = dict.fromkeys(name for run in runs for name in run.idle)
    rows = [[name, Spread([run.idle[name] for run in runs if name in run.idle]).text(3)] for name in names]
    if rows:
        print_table("Idle, both processes", ["", "cores"], rows)


def _is_latency(run: Run, work: str) -> bool:
    return run.nbytes[work] <= 64 * 1024


def _rows(runs: Sequence[Run], work: str) -> list[str]:
    """The fastest first."""

    def seconds(row: str) -> float:
        return statistics.median(samples(runs, lambda run: run.mids(work, row)))

    return sorted({row for run in runs for row in run.rows(work)}, key=seconds)


def _tell_bulk(runs: Sequence[Run], work: str) -> None:
    nbytes, rows = runs[0].nbytes[work], []
    for row in _rows(runs, work):
        mids = samples(runs, lambda run, row=row: run.mids(work, row))  # type: ignore[misc]
        cpu = samples(runs, lambda run, row=row: run.cpu(work, row))  # type: ignore[misc]
        rates, ms = Spread([nbytes / mid / 1e9 for mid in mids]), 1e3 * statistics.median(mids)
        ratio = _ratio(runs, work, row, inverse=True)
        cells = [rates.text(2), ratio, f"{ms:.1f}", f"{statistics.median(cpu):.3f}", _quiet(runs, work, row)]
        rows.append([runs[0].titles[row], *cells])
    heads = ["", "GB/s", "rate / plain TCP", "ms", "CPU s / GB", "quiet"]
    print_table(f"{work}, {nbytes / 2**20:g} MiB", heads, rows)


def _tell_latency(runs: Sequence[Run], work: str) -> None:
    rows = []
    for row in _rows(runs, work):
        mids = samples(runs, lambda run, row=row: run.mids(work, row))  # type: ignore[misc]
        every = [s for run in runs for block in run.blocks[work].get(row, ()) for s in block.seconds]
        cpu = [block.cpu for run in runs for block in run.blocks[work].get(row, ())]
        cells = [_micros(mids), f"{1e6 * percentile(every, 99):.0f}", _ratio(runs, work, row, inverse=False)]
        rows.append([runs[0].titles[row], *cells, f"{1e6 * statistics.median(cpu):.0f}", _quiet(runs, work, row)])
    rows += _floor_rows(runs)
    heads = ["", "us p50", "p99", "time / plain TCP", "CPU us", "quiet"]
    print_table(f"{work}, {runs[0].nbytes[work] / 1024:g} KiB", heads, rows)


def _floor_rows(runs: Sequence[Run]) -> Iterator[list[str]]:
    """What remains for an asyncio library on a thread of its own if everything else cost nothing."""
    floor = samples(runs, lambda run: run.floor(FLOORS[0], FLOORS[4]))
    if floor:
        yield [f"{FLOORS[0]} + {FLOORS[4]}", _micros(floor), "", "", "", ""]


def _tell_floors(runs: Sequence[Run]) -> None:
    rows = []
    for name in FLOORS:
        mids = samples(runs, lambda run, name=name: run.floor(name))  # type: ignore[misc]
        if mids:
            every = [s for run in runs for found in run.floors for s in found[name]]
            rows.append([name, _micros(mids), f"{1e6 * percentile(every, 99):.0f}"])
    if rows:
        print_table("Floors of small pulls: 64 bytes there and back, or nothing at all", ["", "us p50", "p99"], rows)


def _ratio(runs: Sequence[Run], work: str, row: str, *, inverse: bool) -> str:
    """To the yardstick of the same repetition: what drifts from one to the next cancels out."""

    def measure(run: Run) -> PerRep:
        mine, other = run.mids(work, row), run.mids(work, YARDSTICK)
        both = [rep for rep in mine if rep in other]
        return {rep: other[rep] / mine[rep] if inverse else mine[rep] / other[rep] for rep in both}

    ratios = samples(runs, measure)
    return Spread(ratios).text(2) if ratios else "-"


def _micros(seconds: Sequence[float]) -> str:
    spread = Spread([1e6 * value for value in seconds])
    return spread.text(1 if spread.mid < 20 else 0)


def _quiet(runs: Sequence[Run], work: str, row: str) -> str:
    blocks = [block for run in runs for block in run.blocks[work].get(row, ())]
    return f"{sum(block.quiet for block in blocks)}/{len(blocks)}"
