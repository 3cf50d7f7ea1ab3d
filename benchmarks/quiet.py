"""Tells how much of the machine others used, so that a disturbed measurement can be done again.

It must not know what is measured.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

__all__ = ["LOOK", "SHARE", "Neighbours", "quiet_ones"]

T = TypeVar("T")

SHARE: Final = 0.1
"""Cores that others may use while a measurement counts as undisturbed."""
LOOK: Final = 0.1
"""Seconds of a look at what others do."""
_KERNEL_THREAD: Final = 0x00200000
_TICK: Final = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Sample:
    at: float
    stolen: float
    processes: dict[int, float]


@dataclass
class Neighbours:
    """Watches every process of this machine but `ours`, and what the host takes away where it says so."""

    ours: Collection[int]
    _kernel: set[int] = field(default_factory=set)

    def look(self) -> _Sample:
        """To be given to `share` later."""
        return _Sample(time.monotonic(), _stolen(), self._processes())

    def share(self, before: _Sample) -> float:
        """Cores used by others since then."""
        now = self.look()
        used = sum(spent - before.processes.get(pid, 0.0) for pid, spent in now.processes.items())
        return (used + now.stolen - before.stolen) / max(now.at - before.at, 1e-9)

    @contextmanager
    def noted(self, notes: list[float], *, patience: float) -> Iterator[None]:
        """Wait for a quiet moment before the block, append the cores that others used during it."""
        self.wait(patience)
        before = self.look()
        yield
        notes.append(self.share(before))

    def wait(self, patience: float) -> None:
        """Wait for a quiet moment, at most `patience` seconds."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            before = self.look()
            time.sleep(LOOK)
            if self.share(before) <= SHARE:
                return

    def _processes(self) -> dict[int, float]:
        """CPU seconds so far by process. What ends between two looks is missed, what begins counts whole."""
        spent: dict[int, float] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or (pid := int(entry.name)) in self.ours or pid in self._kernel:
                continue
            try:
                if self._works_for_all(pid):
                    self._kernel.add(pid)
                else:
                    spent[pid] = time.clock_gettime(_clock_of(pid))
            except OSError:
                continue  # it has ended
        return spent

    @staticmethod
    def _works_for_all(pid: int) -> bool:
        """Threads of the kernel work for us too."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return bool(int(fields[6]) & _KERNEL_THREAD)


def _clock_of(pid: int) -> int:
    """What clock_getcpuclockid(3) gives, which Python lacks: the clock of another process' CPU time."""
    return (~pid << 3) | 2


def _stolen() -> float:
    """CPU seconds that the host of a virtual machine took away, as far as it tells."""
    with Path("/proc/stat").open() as lines:
        return int(lines.readline().split()[8]) * _TICK


def quiet_ones(measured: Sequence[T], others: Sequence[float]) -> tuple[list[T], str]:
    """Those that others did not disturb, or all when these are less than a third; and a cell that says so."""
    quiet = [one for one, share in zip(measured, others, strict=True) if share <= SHARE]
    cell = f"{len(quiet)}/{len(measured)}"
    return (quiet, cell) if 3 * len(quiet) >= len(measured) else (list(measured), f"{cell}, all used")
