"""Which fault befalls whom, and when: made from the seed alone, before the run. It must not do any."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["ENDING", "LINES", "Fault", "Target", "describe", "schedule", "touches"]

Target = tuple[str, int, int]
"""("prefill", number, 0), ("decode", number, 0), or ("line", decode number, prefill number): one link's connections."""
ENDING: Final = ("kill", "leave")
"""After these the process is another one."""
LINES: Final = ("cut", "close", "half close", "stall", "throttle")
CALM: Final = 2.5
"""Seconds that a target is left alone after a fault is over, so that its recovery can be seen."""
_STARTING: Final = 4.0
"""Seconds that a process is allowed for its start, in the plan."""
_FIRST: Final = 0.5


@dataclass(frozen=True)
class Fault:
    """At `at` s after the start it befalls `target`, and `lasts` s later what can be undone is undone."""

    number: int
    at: float
    kind: str
    target: Target
    lasts: float

    def describe(self) -> str:
        role, first, second = self.target
        who = f"line decode {first} - prefill {second}" if role == "line" else f"{role} {first}"
        return f"fault {self.number}: {self.kind} of {who} at {self.at:.2f} s for {self.lasts:.2f} s"


@dataclass(frozen=True)
class _Kind:
    name: str
    role: str
    weight: int
    shortest: float
    longest: float


def _kinds(heartbeat_timeout: float, *, lines: bool) -> list[_Kind]:
    """Long ones outlast the heartbeat timeout."""
    long = heartbeat_timeout
    processes = [
        _Kind("kill", "prefill", 5, 0.0, 1.5),
        _Kind("kill", "decode", 3, 0.0, 1.0),
        _Kind("leave", "prefill", 3, 0.0, 1.0),
        _Kind("short stop", "prefill", 5, 0.05, 0.4),
        _Kind("short stop", "decode", 3, 0.05, 0.4),
        _Kind("long stop", "prefill", 2, long + 0.3, long + 1.5),
        _Kind("long stop", "decode", 2, long + 0.3, long + 1.5),
    ]
    network = [
        _Kind("cut", "line", 8, 0.0, 0.0),
        _Kind("close", "line", 2, 0.0, 0.0),
        _Kind("half close", "line", 2, 0.0, 0.0),
        _Kind("stall", "line", 5, 0.05, long + 1.0),
        _Kind("throttle", "line", 2, 0.3, 1.5),
    ]
    return processes + (network if lines else [])


def schedule(
    seed: int, part: int, seconds: float, *, prefills: int, decodes: int, every: float, heartbeat: float, lines: bool
) -> list[Fault]:
    """Faults about every `every` s (0: none), none to a target that still has another. They are all over before
    `seconds` are. `part` tells schedules of one run apart; `heartbeat` is the heartbeat timeout in s.

    The first prefill and the first decode process are never ended, so that they grow old.
    """
    rng = random.Random(f"schedule {seed} {part}")
    kinds = _kinds(heartbeat, lines=lines)
    free: dict[Target, float] = {}
    found: list[Fault] = []
    at = _FIRST if every > 0 else seconds
    while at < seconds:
        kind = rng.choices(kinds, [kind.weight for kind in kinds])[0]
        lasts = rng.uniform(kind.shortest, kind.longest)
        target = _target(rng, kind, prefills, decodes)
        over = at + lasts + (_STARTING if kind.name in ENDING else 0.0)
        if target is not None and over + 1.0 < seconds and _is_free(free, target, at):
            found.append(Fault(len(found), round(at, 3), kind.name, target, round(lasts, 3)))
            free[target] = over + CALM
        at += rng.expovariate(1.0 / every)
    return found


def _target(rng: random.Random, kind: _Kind, prefills: int, decodes: int) -> Target | None:
    if kind.role == "line":
        return "line", rng.randrange(decodes), rng.randrange(prefills)
    count = prefills if kind.role == "prefill" else decodes
    first = 1 if kind.name in ENDING else 0
    return (kind.role, rng.randrange(first, count), 0) if first < count else None


def _is_free(free: dict[Target, float], target: Target, at: float) -> bool:
    return all(until <= at for other, until in free.items() if touches(other, target))


def touches(one: Target, other: Target) -> bool:
    """Whether a fault of the one is felt where the other's recovery is measured."""
    if one == other:
        return True
    lines, ends = sorted((one, other), key=lambda target: target[0] != "line")
    if lines[0] == "line" and ends[0] != "line":
        return ends[1] == lines[1 if ends[0] == "decode" else 2]
    return False


def describe(faults: Sequence[Fault]) -> str:
    return "\n".join(fault.describe() for fault in faults)
