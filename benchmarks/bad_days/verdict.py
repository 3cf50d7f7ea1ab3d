"""What a chaos run has shown: figures, and which promises were broken. It must not touch a process."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bad_days.layout import cluster_id
from bad_days.run import Done, Run
from bad_days.schedule import ENDING, touches
from figures import percentile, print_table

__all__ = ["Verdict"]

OVERSHOOT: Final = 100.0
"""ms, 99th percentile."""
TASKS: Final = 6
"""Tasks of the cores by which a process may have grown: a link more, that a peer has not let go yet, has some."""
GROWTH: Final = 16 * 1024 * 1024
"""Bytes of anonymous memory that a process may have grown by between the two quiet moments."""
HANGS: Final = 5000.0
_AFTER_STOP: Final = 0.25
"""Seconds that a process which was stopped is allowed to catch up."""
_AFTERMATH: Final = 4.0
"""Seconds after a fault in which calls may fail because of it: the heartbeat timeout and the longest pause."""
_LONG: Final = 0.5
_NEVER: Final = 5.0
"""Seconds after which a link that is not back is not said to be slow."""
_NODES: Final = ("plain", "remote")


@dataclass(frozen=True)
class Recovery:
    """How long after a fault was over the first pull of one node succeeded."""

    kind: str
    ms: float
    text: str
    links: list[str]
    """What the decode process told of the link meanwhile."""


class Verdict:
    def __init__(
        self, run: Run, rests: Sequence[dict[tuple[str, int], dict[str, Any]]], seconds: float, *, judged: bool
    ):
        self._run, self._rests, self._seconds, self._judged = run, rests, seconds, judged
        heard = run.heard
        self.stops = [done for done in run.done if "stop" in done.fault.kind]
        own = [(late, self._stopped(late[0], late[2], late[3])) for late in heard.late]
        self.late = [late[4] for late, stopped in own if not stopped]
        self.excluded = sum(stopped for _, stopped in own)
        self.latest = max(((late[4], late[1]) for late, stopped in own if not stopped), default=(0.0, ""))
        self.cancels = [ms for number, began, ended, ms in heard.cancels if not self._stopped(number, began, ended)]
        self._touching: dict[tuple[int, int], list[Done]] = {}
        self.unrecovered: list[str] = []
        """Links that have not come back."""
        self.recoveries = list(self._recover())
        self.unexplained, self.slow = self._failures()
        self.growth = self._growth()
        self.broken = self._broken()

    @property
    def status(self) -> int:
        return 1 if self.broken else 0

    # -- what counts ------------------------------------------------------------------------------------------------

    def _stopped(self, decode: int, began: float, ended: float) -> bool:
        """Whether the calling process itself was stopped meanwhile: it can meet no deadline then."""
        return any(
            done.target[:2] == ("decode", decode) and done.began <= ended and began <= done.again + _AFTER_STOP
            for done in self.stops
        )

    def _felt(self, number: int, source: int) -> list[Done]:
        """The faults that the links between these two have felt, in order."""
        if (number, source) not in self._touching:
            found = [done for done in self._run.done if touches(done.target, ("line", number, source))]
            self._touching[number, source] = sorted(found, key=lambda done: done.began)
        return self._touching[number, source]

    def _failures(self) -> tuple[list[str], int]:
        """Calls that failed although nothing had happened to anybody who took part; and how many were only too slow."""
        unexplained, slow = [], 0
        for number, failure in self._run.heard.failures:
            began, ended = failure["began"], failure["ended"]
            if any(
                done.began <= ended and began <= max(done.again, done.began) + _AFTERMATH
                for done in self._felt(number, failure["source"])
            ):
                continue
            if failure["status"] == "LLM_TIMEOUT":
                slow += 1
            else:
                unexplained.append(failure["text"])
        return unexplained, slow

    def _recover(self) -> Iterator[Recovery]:
        """From when each target could be used again until pulls succeeded, where nothing else happened meanwhile."""
        for (number, source, kind), probes in self._run.heard.probes.items():
            felt = self._felt(number, source)
            begins, ends = zip(*sorted(probes), strict=True)
            for done in felt:
                if not done.again:
                    continue
                anew = done.target[0] == "line" and done.fault.kind not in ("stall", "throttle")
                first = bisect.bisect_right(begins if anew else ends, done.again)
                ended = ends[first] if first < len(ends) else math.inf
                others = [other for other in felt if other is not done]
                if any(other.began <= done.again and done.began <= other.again + 1.0 for other in others):
                    continue
                ahead = [other.began for other in others if other.began > done.again] + self._run.rests
                undisturbed = min((at for at in ahead if at > done.again), default=done.again)
                text = f"{done.fault.describe()}: node {_NODES[kind]} of decode {number}, prefill {source}"
                links = self._links(number, source, done.began, min(ended, undisturbed))
                if ended <= undisturbed:
                    yield Recovery(f"{done.fault.kind}, {done.target[0]}", (ended - done.again) * 1000, text, links)
                elif undisturbed - done.again > _NEVER:
                    self.unrecovered.append("\n".join([f"in {undisturbed - done.again:.1f} s, {text}", *links]))

    def _links(self, number: int, source: int, began: float, ended: float) -> list[str]:
        """Where it took long."""
        if ended - began < _LONG:
            return []
        return [
            f"{(at - ended) * 1000:8.0f} ms  {line}"
            for decode, at, line in self._run.heard.links
            if decode == number and began <= at <= ended + 0.1 and f" cluster_id={cluster_id(source)} " in f"{line} "
        ]

    def _growth(self) -> dict[str, dict[str, int]]:
        """Of the processes that lived at both quiet moments."""
        found = {}
        first, last = self._rests[0], self._rests[-1]
        for who, held in last.items():
            earlier = first.get(who)
            if earlier is not None and earlier["incarnation"] == held["incarnation"]:
                names = ("anonymous", "rss", "objects", "descriptors", "threads", "mappings", "tasks", "caches")
                found[f"{who[0]} {who[1]}"] = {name: held[name] - earlier[name] for name in names}
        return found

    @property
    def bound(self) -> float:
        """Within so many ms pulls succeed after a restart: two heartbeats, and the time to connect."""
        return 2 * self._run.plan.timing.heartbeat_interval + self.connect

    @property
    def connect(self) -> float:
        """The 99th percentile of all `link_clusters` of the run that succeeded, ms: the machine was as busy then."""
        return percentile(self._run.heard.linked, 99) if self._run.heard.linked else 0.0

    def _broken(self) -> list[str]:
        heard, broken = self._run.heard, []
        kinds: dict[str, int] = defaultdict(int)
        for kind, _ in heard.violations:
            kinds[kind] += 1
        broken += [f"{count} x {kind}" for kind, count in kinds.items()]
        broken += [f"left by {name}: {left}" for name, left in self._run.left if any(left.values())]
        for rest in self._rests:
            for who, held in rest.items():
                if held["busy"] or held["keys"]:
                    broken.append(f"{who} is not idle: {held['busy']}, {held['keys']} keys")
        for name, grown in self.growth.items():
            if grown["tasks"] > TASKS:
                broken.append(f"{name} has {grown['tasks']} tasks more at the end")
        if self.latest[0] > HANGS:
            broken.append(f"hang: {self.latest[1]} ended {self.latest[0]:.0f} ms after its deadline")
        if self.unexplained:
            broken.append(f"{len(self.unexplained)} calls failed and nothing had happened")
        broken += [f"a link does not come back: {text}" for text in self.unrecovered]
        if not heard.counts["status: ok"]:
            broken.append("no call succeeded")
        if self._judged:
            broken += self._broken_times()
        return broken

    def _broken_times(self) -> list[str]:
        broken = []
        if self.late and percentile(self.late, 99) >= OVERSHOOT:
            broken.append(f"overshoot p99 {percentile(self.late, 99):.1f} ms")
        restarts = [one.ms for one in self.recoveries if one.kind.startswith(ENDING)]
        if restarts and max(restarts) >= self.bound:
            broken.append(f"recovery after a restart took {max(restarts):.0f} ms, bound {self.bound:.0f} ms")
        for who, grown in self.growth.items():
            if grown["anonymous"] > GROWTH:
                broken.append(f"{who} grew by {grown['anonymous'] / 2**20:.1f} MiB")
        return broken

    # -- what is shown ----------------------------------------------------------------------------------------------

    def print(self) -> None:
        run, counts, plan = self._run, self._run.heard.counts, self._run.plan
        what = f"{plan.prefills} prefill and {plan.decodes} decode processes over {plan.path}"
        print(f"chaos: seed {plan.seed}, {what}, {self._seconds:.0f} s, {plan.workers} callers in each")
        print_table("calls", ["kind", "ok", "failed"], self._calls())
        others = sorted(
            (name, count) for name, count in counts.items() if name.startswith(("status", "release", "link"))
        )
        print_table("how they ended", ["status", "calls"], [[name, str(count)] for name, count in others])
        print_table("recovery after a fault, ms", ["fault", "faults", "median", "p99", "max", "seen"], self._faults())
        rows = [
            [who, *(f"{grown[name] / 2**20:.1f}" for name in ("anonymous", "rss")), *(str(grown[name]) for name in
            ("objects", "descriptors", "threads", "mappings", "tasks", "caches"))] for who, grown in self.growth.items()
        ]  # fmt: skip
        heads = ["process", "MiB", "rss MiB", "objects", "descriptors", "threads", "mappings", "tasks", "caches"]
        print_table("growth between the quiet moments of those that lived through", heads, rows)
        print_table("promises", ["", ""], self._promises())
        for text in self.unexplained[:10]:
            print(f"UNEXPLAINED  {text}")
        for kind, text in run.heard.violations[:20]:
            print(f"VIOLATION  {kind}  {text}")
        slowest = max(self.recoveries, key=lambda one: one.ms, default=None)
        if slowest is not None:
            print(f"the slowest recovery: {slowest.ms:.0f} ms, {slowest.text}")
            print("\n".join(slowest.links))
        for text in self.broken:
            print(f"BROKEN  {text}")
        print(f"verdict: {'FAILED' if self.broken else 'ok'}{'' if self._judged else ' (times are not judged)'}")

    def _calls(self) -> list[list[str]]:
        found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for name, count in self._run.heard.counts.items():
            kind, _, status = name.partition(": ")
            if status and kind not in ("status", "release", "link", "unjudged", "lag"):
                found[kind][status != "ok"] += count
        return [[kind, *map(str, both)] for kind, both in sorted(found.items())]

    def _faults(self) -> list[list[str]]:
        made: dict[str, int] = defaultdict(int)
        seen: dict[str, list[float]] = defaultdict(list)
        for done in self._run.done:
            made[f"{done.fault.kind}, {done.target[0]}"] += 1
        for one in self.recoveries:
            seen[one.kind].append(one.ms)
        rows = []
        for kind, count in sorted(made.items()):
            ms = seen[kind]
            cells = [f"{percentile(ms, q):.0f}" for q in (50, 99, 100)] if ms else ["-"] * 3
            rows.append([kind, str(count), *cells, str(len(ms))])
        return rows

    def _promises(self) -> list[list[str]]:
        heard, counts = self._run.heard, self._run.heard.counts
        kinds = [kind for kind, _ in heard.violations]
        late = [percentile(self.late, q) for q in (50, 99, 100)] if self.late else [0.0] * 3
        cancels = [percentile(self.cancels, q) for q in (50, 99, 100)] if self.cancels else [0.0] * 3
        timing, unsaid = self._run.plan.timing, counts["pushes that could not say"]
        bound = f"{self.bound:.0f} = 2 x {timing.heartbeat_interval} (heartbeats) + {self.connect:.0f} (to connect)"
        leaks = kinds.count("leak") + sum(any(left.values()) for _, left in self._run.left)
        others = len([kind for kind in kinds if kind not in ("wrong bytes", "settled", "hang", "leak")])
        return [
            ["bytes checked, MiB", f"{counts['bytes checked'] / 2**20:.0f}"],
            ["wrong bytes", str(kinds.count("wrong bytes"))],
            ["written after a call had ended (settled)", str(kinds.count("settled"))],
            ["destinations quarantined, pushes that could not say", f"{counts['quarantined']}, {unsaid}"],
            ["hangs", str(kinds.count("hang"))],
            ["other violations", str(others)],
            ["processes that left in peace, with leaks", f"{len(self._run.left)}, {leaks}"],
            ["failures that nothing explains, timeouts apart", f"{len(self.unexplained)}"],
            ["timeouts with nothing wrong (a busy machine)", str(self.slow)],
            ["calls that ended after their deadline", f"{len(self.late)}, and {self.excluded} of callers stopped then"],
            ["overshoot p50, p99, max, ms", ", ".join(f"{ms:.1f}" for ms in late) + f" (max: {self.latest[1]})"],
            ["cancellation p50, p99, max, ms", ", ".join(f"{ms:.1f}" for ms in cancels)],
            ["lag of the callers' loops p99, max, ms", ", ".join(str(self._lag(q)) for q in (0.99, 1.0))],
            ["finalize, max, s", f"{max(heard.finalized, default=0.0):.2f}"],
            ["bound after a restart, ms", bound],
            ["unjudged after a restart", str(sum(n for name, n in counts.items() if name.startswith("unjudged")))],
        ]  # fmt: skip

    def _lag(self, q: float) -> int:
        """Also of loops whose process was stopped meanwhile."""
        lags = sorted((int(name[5:]), count) for name, count in self._run.heard.counts.items() if name[:4] == "lag:")
        wanted = q * sum(count for _, count in lags)
        for ms, count in lags:
            wanted -= count
            if wanted <= 0:
                return ms
        return lags[-1][0] if lags else 0

    def as_json(self) -> dict[str, Any]:
        return {
            "counts": dict(self._run.heard.counts),
            "violations": self._run.heard.violations,
            "unexplained": self.unexplained,
            "late_ms": self.late,
            "cancels_ms": self.cancels,
            "recoveries": [vars(one) for one in self.recoveries],
            "faults": [done.fault.describe() for done in self._run.done],
            "growth": self.growth,
            "left": self._run.left,
            "rests": [{f"{who[0]} {who[1]}": held for who, held in rest.items()} for rest in self._rests],
            "broken": self.broken,
            "seconds": self._seconds,
        }
