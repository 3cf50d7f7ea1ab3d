"""The bounds that the project has set itself, as ratios taken within one run. It must not measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from figures import Spread, print_table
from floors import FLOORS
from limits import MODES
from runs import PerRep, Run, samples

__all__ = ["TARGETS", "Target", "Verdict", "judged", "tell_targets"]

BULK: Final = ("W1", "W2", "W5")
LATENCY: Final = ("W3", "W4")
COPIES: Final = tuple(MODES)
NIXL, NIXL_FRESH, NIXL_TCP, MOONCAKE = ("nixl",), ("nixl-fresh",), ("nixl-tcp",), ("mooncake",)
TCP_SOCKETS: Final = ("tcp", "tcp-4m")
UNIX_SOCKETS: Final = ("unix", "unix-4m")
ROUND_TRIP: Final = FLOORS[0]
CROSSINGS: Final = FLOORS[4]
IDLE_CORES: Final = 0.02
Measure = Callable[[Run], PerRep]


@dataclass(frozen=True)
class Target:
    """A measured ratio and its bound. `huge`: the bound where all memory of callers has pages of 2 MiB, if it differs.

    A bound of None is not judged with those pages.
    """

    what: str
    against: str
    measure: Measure
    bound: float | None
    at_least: bool = True
    huge: float | None = None

    def bound_for(self, pages: str) -> float | None:
        return self.huge if pages == "huge" else self.bound


@dataclass(frozen=True)
class Verdict:
    target: Target
    spread: Spread
    bound: float

    @property
    def met(self) -> bool:
        mid = self.spread.mid
        return mid >= self.bound if self.target.at_least else mid <= self.bound


# --- ratios ----------------------------------------------------------------------------------------------------------


def _least(run: Run, work: str, rows: Sequence[str]) -> PerRep:
    """The time of the fastest of these rows, in each repetition."""
    least: dict[int, float] = {}
    for row in rows:
        for rep, seconds in run.mids(work, row).items():
            least[rep] = min(seconds, least.get(rep, seconds))
    return least


def _over(above: PerRep, below: PerRep) -> PerRep:
    """Within one repetition: what drifts from one to the next cancels out."""
    return {rep: value / below[rep] for rep, value in above.items() if below.get(rep)}


def _rate(work: str, row: str, others: Sequence[str]) -> Measure:
    """How many times as fast as the fastest of the others."""
    return lambda run: _over(_least(run, work, others), run.mids(work, row))


def _time(work: str, row: str, others: Sequence[str]) -> Measure:
    """How many times as long as the fastest of the others."""
    return lambda run: _over(run.mids(work, row), _least(run, work, others))


def _floor(work: str, row: str, *floors: str) -> Measure:
    return lambda run: _over(run.mids(work, row), run.floor(*floors))


def _cpu(work: str, row: str, other: str) -> Measure:
    return lambda run: _over(run.cpu(work, row), run.cpu(work, other))


def _apart(work: str, one: str, other: str) -> Measure:
    """How far apart two rows are, whichever is the faster."""

    def measure(run: Run) -> PerRep:
        return {rep: max(ratio, 1 / ratio) for rep, ratio in _over(run.mids(work, one), run.mids(work, other)).items()}

    return measure


def _idle(backend: str) -> Measure:
    def measure(run: Run) -> PerRep:
        cores = [cores for name, cores in run.idle.items() if name.startswith(f"kvpull {backend}")]
        return dict(enumerate(cores))

    return measure


# --- the table -------------------------------------------------------------------------------------------------------


def _fast(work: str, row: str, against: str, others: Sequence[str], *bounds: float | None) -> Target:
    """`bounds`: with pages of 4 KiB, and of 2 MiB where that differs."""
    measure = _rate(work, row, others)
    return Target(f"{work} rate, {row}", against, measure, bounds[0], huge=bounds[-1])


def _short(work: str, row: str, against: str, measure: Measure, bound: float) -> Target:
    return Target(f"{work} time, {row}", against, measure, bound, at_least=False, huge=bound)


def _shm() -> Iterator[Target]:
    for work, row, copy, nixl in (
        ("W1", "shm-await", 0.8, (2.3, 1.5)),
        ("W2", "shm-await", 0.7, (3.0, 2.3)),
        ("W5", "shm-await-layers", 0.7, (2.0, None)),
    ):
        yield _fast(work, row, "the fastest copy", COPIES, copy)
        yield _fast(work, row, "NIXL", NIXL, *nixl)
    for work in ("W1", "W2"):
        yield _fast(work, "shm-registered-await", "process_vm_readv, 2 threads", ("vmread2",), 0.9)
        yield _fast(work, "shm-registered-await", "NIXL", NIXL, 1.3, 1.15)
        yield _fast(work, "shm-streamed", "plain Unix sockets", UNIX_SOCKETS, 0.9)
    for work in LATENCY:
        yield _short(work, "shm-remote", "NIXL, fresh", _time(work, "shm-remote", NIXL_FRESH), 1.0)


def _tcp() -> Iterator[Target]:
    for row in ("tcp-await", "tcp-registered-await"):
        for work, mooncake, nixl in (("W1", 1.5, 1.0), ("W2", 2.5, 1.3)):
            yield _fast(work, row, "plain TCP sockets", TCP_SOCKETS, 0.9)
            yield _fast(work, row, "Mooncake", MOONCAKE, mooncake)
            yield _fast(work, row, "NIXL over TCP", NIXL_TCP, nixl)
    yield _fast("W5", "tcp-await-layers", "Mooncake", MOONCAKE, 1.5)
    yield _fast("W5", "tcp-await-layers", "NIXL over TCP", NIXL_TCP, 1.0)
    for work in LATENCY:
        yield _short(work, "tcp-remote", ROUND_TRIP, _floor(work, "tcp-remote", ROUND_TRIP), 2.0)


def _either() -> Iterator[Target]:
    for backend, peers in (("shm", ("nixl", "mooncake")), ("tcp", ("mooncake",))):
        for work in LATENCY:
            row = f"{backend}-consumed"
            measure = _floor(work, row, ROUND_TRIP, CROSSINGS)
            yield _short(work, row, "round trip + crossings", measure, 1.3)
        for work in BULK:
            row = f"{backend}-await" + ("-layers" if work == "W5" else "")
            for peer in peers:
                what = f"{work} CPU s per GB, {row}"
                yield Target(what, peer, _cpu(work, row, peer), 1.0, at_least=False, huge=1.0)
        for work in (*BULK, *LATENCY):
            faces = f"{backend}-await", f"{backend}-blocking"
            yield _short(work, faces[0], f"{faces[1]}, either way", _apart(work, *faces), 1.3)
        for work in LATENCY:
            faces = f"{backend}-remote", f"{backend}-remote-blocking"
            yield _short(work, faces[0], f"{faces[1]}, either way", _apart(work, *faces), 1.3)
        yield Target(f"idle cores, {backend}", "", _idle(backend), IDLE_CORES, at_least=False, huge=IDLE_CORES)


TARGETS: Final = (*_shm(), *_tcp(), *_either())


def judged(runs: Sequence[Run]) -> tuple[list[Verdict], list[Target]]:
    """What these runs can judge, and what they cannot: something was not measured, or no bound is set for the pages."""
    verdicts, others = [], []
    for target in TARGETS:
        bound, ratios = target.bound_for(runs[0].pages), samples(runs, target.measure)
        if ratios and bound is not None:
            verdicts.append(Verdict(target, Spread(ratios), bound))
        else:
            others.append(target)
    return verdicts, others


def tell_targets(runs: Sequence[Run]) -> None:
    """The lag of event loops is judged by bench_lag.py."""
    verdicts, others = judged(runs)
    rows = [
        [
            verdict.target.what,
            verdict.target.against,
            verdict.spread.text(3 if "idle" in verdict.target.what else 2),
            f"{'>=' if verdict.target.at_least else '<='} {verdict.bound:g}",
            "met" if verdict.met else "MISSED",
        ]
        for verdict in verdicts
    ]
    if rows:
        print_table("Targets", ["", "against", "ratio", "bound", ""], rows)
        met = sum(verdict.met for verdict in verdicts)
        print(f"{met} of {len(verdicts)} met; {len(others)} more cannot be judged by what was measured")
