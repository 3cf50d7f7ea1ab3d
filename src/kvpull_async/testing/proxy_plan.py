"""What befalls the connections of a fault proxy, and at which byte: faults, plans, and plans made from a seed.

Nothing here does anything: `proxy.py` carries it out. Nothing but tests may import it.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

__all__ = ["QUIET", "Fault", "FaultKind", "Plan", "Planner", "Schedule", "Way"]


class Way(enum.Enum):
    """The two directions of a connection."""

    THERE = "there"
    """From whoever connected to the target."""
    BACK = "back"
    """From the target to whoever connected."""


class FaultKind(enum.Enum):
    """What can happen. `value` is that of the `Fault`."""

    DELAY = "delay"
    """Each piece of this way (at most 64 KiB) waits `value` ms before it goes on. 0 ends it."""
    THROTTLE = "throttle"
    """Not more than `value` bytes/s. 0 ends it."""
    STALL = "stall"
    """Nothing goes on, and nothing is lost, for `value` ms; with 0 until `resume`."""
    CUT = "cut"
    """Both sides get a reset (RST)."""
    CLOSE = "close"
    """Both sides get an orderly end (FIN)."""
    HALF_CLOSE = "half close"
    """Who reads this way gets an orderly end; what is written to it afterwards is lost. The other way goes on."""
    SWALLOW = "swallow"
    """All that comes from now on is read and lost, and nobody is told."""
    CORRUPT = "corrupt"
    """In the next byte the bits `value` are turned over."""


QUIET: Final = tuple(kind for kind in FaultKind if kind is not FaultKind.CORRUPT)
"""Those that change no byte."""
_ENDING: Final = frozenset({FaultKind.CUT, FaultKind.CLOSE})


@dataclass(frozen=True)
class Fault:
    """One fault, which happens when exactly `at` bytes have passed that way."""

    kind: FaultKind
    way: Way = Way.THERE
    at: int = 0
    value: int = 0

    def __post_init__(self) -> None:
        if self.at < 0 or self.value < 0:
            raise ValueError(f"at ({self.at}) and value ({self.value}) cannot be negative")
        if self.kind is FaultKind.CORRUPT and not 0 < self.value < 256:
            raise ValueError(f"value must be the bits of one byte to turn over, 1 to 255, not {self.value}")

    def describe(self) -> str:
        value = f" {self.value}" if self.value else ""
        return f"{self.kind.value}{value} {self.way.value} after {self.at} bytes"


@dataclass(frozen=True)
class Plan:
    """All that befalls one connection."""

    faults: tuple[Fault, ...] = ()

    def describe(self) -> str:
        return ", ".join(fault.describe() for fault in self.faults) or "nothing"


Planner = Callable[[int], Plan]
"""The plan of the n-th connection that the proxy accepts; the first is number 0."""


class Schedule:
    """Plans made from a seed: the n-th connection of the same schedule always has the same faults at the same bytes.

    What connections there are, and in which order, is up to the two sides, so a failure replays as far as they do
    the same again.

    Args:
        seed: Any integer. `repr` and `describe` show it.
        kinds: Those to choose from. Without CORRUPT unless it is asked for, since a byte of payload that is turned
            over arrives so.
        share: The share of the connections to which something happens, 0 to 1.
        most: Faults that one connection has at most.
        span: Bytes within which they begin. Small offsets are as likely as large ones: the first 64 bytes as often as
            those from 1 to 64 MiB.
        longest: ms that a delay lasts for a piece, and, ten times that, a stall.
    """

    def __init__(
        self,
        seed: int,
        *,
        kinds: Collection[FaultKind] = QUIET,
        share: float = 0.5,
        most: int = 2,
        span: int = 4 * 1024 * 1024,
        longest: int = 20,
    ) -> None:
        if not kinds or most < 1 or span < 1 or longest < 1:
            raise ValueError("kinds cannot be empty, and most, span and longest are 1 at least")
        self.seed: int = seed
        self._kinds = sorted(kinds, key=lambda kind: kind.value)
        self._share = share
        self._most = most
        self._span = span
        self._longest = longest

    def __call__(self, number: int) -> Plan:
        source = random.Random(f"{self.seed} {number}")  # noqa: S311  (it must replay)
        if source.random() >= self._share:
            return Plan()
        faults = [self._fault(source) for _ in range(source.randint(1, self._most))]
        return Plan(tuple(_until_the_end(sorted(faults, key=lambda fault: fault.at))))

    def _fault(self, source: random.Random) -> Fault:
        kind = source.choice(self._kinds)
        way = source.choice(list(Way))
        at = int(self._span ** source.random()) - 1
        return Fault(kind, way, at, self._value(kind, source))

    def _value(self, kind: FaultKind, source: random.Random) -> int:
        if kind is FaultKind.DELAY:
            return source.randint(1, self._longest)
        if kind is FaultKind.THROTTLE:
            return 1 << source.randint(12, 24)
        if kind is FaultKind.STALL:
            return source.randint(1, 10 * self._longest)
        return 1 << source.randrange(8) if kind is FaultKind.CORRUPT else 0

    def describe(self, connections: int = 16) -> str:
        """The plans of so many connections, one a line."""
        lines = (f"  connection {number}: {self(number).describe()}" for number in range(connections))
        return "\n".join([repr(self), *lines])

    def __repr__(self) -> str:
        kinds = ", ".join(kind.value for kind in self._kinds)
        return f"<Schedule seed={self.seed} share={self._share} span={self._span} of {kinds}>"


def _until_the_end(faults: Iterable[Fault]) -> Iterable[Fault]:
    """What is planned behind a cut of the same way cannot happen."""
    ended: set[Way] = set()
    for fault in faults:
        if fault.way not in ended:
            yield fault
        if fault.kind in _ENDING:
            ended.add(fault.way)
