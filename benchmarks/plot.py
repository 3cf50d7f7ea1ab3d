"""One picture of a run that can be read at a glance. It must not measure; it needs matplotlib (the extra `bench`)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from contenders import CONTENDERS, LIMIT, OURS, PEER, PLAIN
from floors import FLOORS
from runs import PerRep, Run, samples

__all__ = ["plot"]

COLOURS: Final = {OURS: "#1f77b4", PEER: "#d98c3f", PLAIN: "#8f8f8f", LIMIT: "#c9c9c9"}
LABELS: Final = {OURS: "kvpull", PEER: "other engines", PLAIN: "plain sockets, floors", LIMIT: "the machine's copies"}
KINDS: Final = {row.name: contender.kind for contender in CONTENDERS.values() for row in contender.rows}
PANELS: Final = (("W1", "GB/s"), ("W2", "GB/s"), ("W5", "GB/s"), ("W3", "us"), ("W4", "us"))
Bar = tuple[str, float, str]


def plot(runs: Sequence[Run], path: Path) -> None:
    """Write a PNG. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an extra)
    from matplotlib.patches import Patch  # noqa: PLC0415

    panels = [(work, unit, bars) for work, unit in PANELS if (bars := _bars(runs, work, unit))]
    if not panels:
        return
    columns = min(3, len(panels))
    rows = [max(len(bars) for _, _, bars in panels[at : at + columns]) for at in range(0, len(panels), columns)]
    height = sum(1.2 + 0.2 * bars for bars in rows)
    figure = Figure(figsize=(6.4 * columns, height), layout="constrained")
    every = figure.subplots(len(rows), columns, squeeze=False).ravel()
    for axes, (work, unit, bars) in zip(every, panels, strict=False):
        _panel(axes, f"{work}, {_size(runs[0].nbytes[work])}", unit, bars)
    for axes in every[len(panels) :]:
        axes.set_axis_off()
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=label) for kind, label in LABELS.items()],
        loc="outside lower center",
        ncols=len(LABELS),
        frameon=False,
    )
    figure.savefig(path, format="png", dpi=100)


def _panel(axes: Any, title: str, unit: str, bars: Sequence[Bar]) -> None:
    """The best on top."""
    names, values, kinds = zip(*bars, strict=True)
    drawn = axes.barh(range(len(bars)), values, color=[COLOURS[kind] for kind in kinds])
    axes.set_yticks(range(len(bars)), names, fontsize=8)
    axes.invert_yaxis()
    axes.bar_label(drawn, labels=[f" {value:.3g}" for value in values], fontsize=8)
    better = "more" if unit == "GB/s" else "less"
    axes.set_title(f"{title}: {unit}, {better} is better", fontsize=10)
    if unit == "us":
        axes.set_xscale("log")
    axes.margins(x=0.12, y=0.01)
    axes.spines[["top", "right"]].set_visible(False)


def _bars(runs: Sequence[Run], work: str, unit: str) -> list[Bar]:
    bars = []
    for row in dict.fromkeys(row for run in runs for row in run.rows(work)):
        mid = statistics.median(_mids(runs, work, row))
        value = runs[0].nbytes[work] / mid / 1e9 if unit == "GB/s" else 1e6 * mid
        bars.append((runs[0].titles[row], value, KINDS.get(row, PLAIN)))
    if bars and unit == "us":
        floors = {name: samples(runs, lambda run, name=name: run.floor(name)) for name in FLOORS}  # type: ignore[misc]
        bars += [(name, 1e6 * statistics.median(found), PLAIN) for name, found in floors.items() if found]
    return sorted(bars, key=lambda bar: bar[1], reverse=unit == "GB/s")


def _mids(runs: Sequence[Run], work: str, row: str) -> list[float]:
    def measure(run: Run) -> PerRep:
        return run.mids(work, row)

    return samples(runs, measure)


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:g} MiB" if nbytes >= 2**20 else f"{nbytes / 1024:g} KiB"
