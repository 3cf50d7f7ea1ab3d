"""Medians, percentiles, tables and verdicts. It must not know where the numbers come from."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Spread", "across", "judge", "machine", "parsed", "percentile", "print_table", "save", "standard_arguments"]


class Spread:
    """The median over repetitions, and the lowest and highest of them."""

    def __init__(self, values: Sequence[float]) -> None:
        self.mid = statistics.median(values)
        self.low, self.high = min(values), max(values)

    def text(self, digits: int) -> str:
        """The median alone where there is nothing to spread."""
        if self.low == self.high:
            return f"{self.mid:.{digits}f}"
        return f"{self.mid:.{digits}f} ({self.low:.{digits}f}..{self.high:.{digits}f})"


def across(repetitions: Sequence[Sequence[float]]) -> list[float]:
    """One number per repetition: its median."""
    return [statistics.median(samples) for samples in repetitions]


def percentile(samples: Sequence[float], q: float) -> float:
    return float(np.percentile(np.asarray(samples), q))


def print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Left column left, the others right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    print(f"\n{title}")
    for row in (heads, *rows):
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *rest]).rstrip())


def judge(bounds: Mapping[str, tuple[float, float]], *, unit: str, quick: bool) -> int:
    """Print what was measured against each bound ("less than") and return the exit status."""
    missed = [name for name, (measured, bound) in bounds.items() if not measured < bound]
    print()
    for name, (measured, bound) in bounds.items():
        mark = "MISSED" if name in missed else "ok"
        print(f"{mark:6}  {name}: {measured:.2f} {unit}, must be under {bound:g} {unit}")
    if quick:
        print("verdict: not judged, a quick run only shows that everything works")
        return 0
    print(f"verdict: {'FAILED' if missed else 'ok'}")
    return 1 if missed else 0


def machine() -> dict[str, Any]:
    """What a reader of the figures wants to know."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def save(path: Path | None, **content: Any) -> None:
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), **content}))


def standard_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every sample there")
    parser.add_argument("--patience", type=float, default=5.0, help="s to wait for a quiet moment; 0: take it as it is")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only shows that everything works")


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; a quick run does not wait for anything."""
    options = parser.parse_args(arguments)
    if options.quick:
        options.patience = 0.0
    return options
