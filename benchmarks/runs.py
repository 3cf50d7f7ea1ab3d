"""What a run found: the timed pulls by workload and row, and what else was measured beside them.

It must not know how anything is measured, nor who is better.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quiet import SHARE

__all__ = ["Block", "PerRep", "Run", "load", "samples"]

PerRep = Mapping[int, float]
"""One number per repetition; a repetition in which something failed is not there."""


@dataclass
class Block:
    """The timed pulls of one workload by one row in one repetition. `cpu`: s of both processes for one of them."""

    rep: int
    seconds: list[float]
    cpu: float
    others: float
    wrong: int = 0

    @property
    def quiet(self) -> bool:
        return self.others <= SHARE

    @property
    def mid(self) -> float:
        return statistics.median(self.seconds)


@dataclass
class Run:
    """Everything that one run of the program measured."""

    pages: str
    nbytes: dict[str, int]
    titles: dict[str, str]
    quick: bool = False
    copies: str = ""
    blocks: dict[str, dict[str, list[Block]]] = field(default_factory=dict)
    floors: list[dict[str, list[float]]] = field(default_factory=list)
    idle: dict[str, float] = field(default_factory=dict)
    memory: dict[str, tuple[str, str]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    growth: dict[str, Any] = field(default_factory=dict)

    def add(self, work: str, row: str, block: Block) -> None:
        self.blocks.setdefault(work, {}).setdefault(row, []).append(block)

    def rows(self, work: str) -> list[str]:
        return list(self.blocks.get(work, ()))

    def mids(self, work: str, row: str) -> PerRep:
        """Seconds."""
        return {block.rep: block.mid for block in self.blocks.get(work, {}).get(row, ())}

    def cpu(self, work: str, row: str) -> PerRep:
        """CPU seconds for 1 GB."""
        blocks = self.blocks.get(work, {}).get(row, ())
        return {block.rep: 1e9 * block.cpu / self.nbytes[work] for block in blocks}

    def floor(self, *names: str) -> PerRep:
        """Seconds: the sum of the medians of these floors."""
        return {
            rep: sum(statistics.median(found[name]) for name in names)
            for rep, found in enumerate(self.floors)
            if all(name in found for name in names)
        }

    @property
    def wrong(self) -> dict[str, int]:
        found = {
            f"{row} {work}": sum(block.wrong for block in blocks)
            for work, rows in self.blocks.items()
            for row, blocks in rows.items()
        }
        return {where: wrong for where, wrong in found.items() if wrong}


def samples(runs: Sequence[Run], what: Callable[[Run], PerRep]) -> list[float]:
    """What a spread is made of: the repetitions of a single run, or the medians of several runs."""
    found = [list(what(run).values()) for run in runs]
    if len(runs) == 1:
        return found[0]
    return [statistics.median(values) for values in found if values]


def as_json(run: Run) -> dict[str, Any]:
    return asdict(run)


def load(paths: Iterable[Path]) -> list[Run]:
    """The runs in files that were written with --json."""
    return [_parsed(content) for path in paths for content in json.loads(path.read_text())["runs"]]


def _parsed(content: dict[str, Any]) -> Run:
    run = Run(**{name: value for name, value in content.items() if name not in ("blocks", "memory")})
    run.memory = {name: (source, puller) for name, (source, puller) in content["memory"].items()}
    run.blocks = {
        work: {row: [Block(**block) for block in blocks] for row, blocks in rows.items()}
        for work, rows in content["blocks"].items()
    }
    return run
