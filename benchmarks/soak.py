"""A long day: pull after pull over one link, whose connections are cut again and again, and what has grown at its end.

    benchmarks/soak.py --path tcp --pulls 100000 --every 1000

Every byte is compared. A pull that a cut has hit may fail, and is made again. Exit status 1 for a wrong byte, for a
failure that no cut explains, for growth, and unless each side has told of each cut once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bad_days.soak_nodes import puller_side, source_side
from figures import print_table, save
from kvpull_async.testing.proxy import FaultProxy
from processes import Child

_TENTH: Final = 10
"""The first and the last tenth of the pulls are compared."""
_MEMORY: Final = 8 * 1024 * 1024
_ALLOWED: Final = {"anonymous": _MEMORY, "descriptors": 4, "threads": 2, "tasks": 2, "mappings": 1}
"""By how much the median of the last tenth may be above that of the first. A link has four connections at most, some of
them only while they are needed, and those that a cut has ended may be counted while they go. A leak is one for a cut.
"""
_KNOWN: Final = ("link.lost", "pull.failed")


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", choices=("tcp", "shm"), default="tcp")
    parser.add_argument("--pulls", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=1000, help="pulls between two cuts")
    parser.add_argument("--callers", type=int, default=4, help="tasks that pull at once")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="OUT")
    return parser.parse_args(given)


class Soak:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.cuts = 0
        self.counts: Counter[str] = Counter()
        self.hit: list[int] = []
        """How many pulls failed in each stretch."""
        self.wrong: list[str] = []
        self.samples: dict[str, list[dict[str, int]]] = {"puller": [], "source": []}
        self.events: dict[str, dict[str, tuple[int, str]]] = {}
        self._random = random.Random(asked.seed)

    def run(self) -> None:
        asked = self.asked
        with (
            Child(source_side, asked.path) as source,
            FaultProxy(source.ask("address")) as proxy,
            Child(puller_side, asked.path, proxy.address, asked.seed, asked.callers) as puller,
        ):
            puller.ask("pull", asked.every)
            took = 1.0
            for _ in range(asked.pulls // asked.every):
                took = self._stretch(puller, proxy, took)
                self._sample(puller=puller, source=source)
            time.sleep(1.0)
            self.events = {"puller": puller.ask("events"), "source": source.ask("events")}

    def _stretch(self, puller: Child, proxy: FaultProxy, expected: float) -> float:
        """So many pulls, and a cut in the midst of them. How long they took."""
        began, answer = time.monotonic(), dict[str, Any]()
        pulling = threading.Thread(target=lambda: answer.update(puller.ask("pull", self.asked.every, seconds=300)))
        pulling.start()
        time.sleep(expected * self._random.uniform(0.1, 0.6))
        proxy.cut()
        self.cuts += 1
        pulling.join()
        if not answer:
            raise RuntimeError(f"after {self.cuts} cuts the puller does not answer any more")
        self.counts.update(answer["counts"])
        self.hit.append(sum(count for name, count in answer["counts"].items() if name.startswith("failed")))
        self.wrong += answer["wrong"][len(self.wrong) :]
        return time.monotonic() - began

    def _sample(self, **children: Child) -> None:
        for name, child in children.items():
            self.samples[name].append(child.ask("held"))

    # -- what has come of it ----------------------------------------------------------------------------------------

    def grown(self) -> list[tuple[str, str, float, float]]:
        """Process, what, and the medians of the first and of the last tenth."""
        found = []
        for process, samples in self.samples.items():
            tenth = max(1, len(samples) // _TENTH)
            for name in _ALLOWED:
                first, last = (
                    statistics.median(sample[name] for sample in part) for part in (samples[:tenth], samples[-tenth:])
                )
                found.append((process, name, first, last))
        return found

    def broken(self) -> list[str]:
        broken = [f"wrong bytes: {text}" for text in self.wrong]
        for process, name, first, last in self.grown():
            if last - first > _ALLOWED[name]:
                broken.append(f"{name} of the {process} grew from {first:.0f} to {last:.0f}")
        for process, events in self.events.items():
            lost = events.get("link.lost", (0, ""))[0]
            if lost != self.cuts:
                broken.append(f"the {process} told {lost} times of {self.cuts} cuts")
            others = {name: told for name, told in events.items() if name not in _KNOWN}
            if others:
                broken.append(f"the {process} also warned of {others}")
        failures = {name: count for name, count in self.counts.items() if name != "ok"}
        for name, count in failures.items():
            if name != "failed: LLM_LINK_FAILED":
                broken.append(f"{count} x {name}")
        if self.hit and max(self.hit) > self.asked.callers:
            broken.append(f"{max(self.hit)} pulls failed by one cut, and {self.asked.callers} were under way")
        return broken


def main(given: Sequence[str] | None = None) -> int:
    asked, began = _arguments(given), time.monotonic()
    soak = Soak(asked)
    soak.run()
    seconds = time.monotonic() - began
    print(f"soak: {asked.pulls} pulls over {asked.path}, {soak.cuts} cuts, seed {asked.seed}, {seconds:.0f} s")
    print_table("pulls", ["how they ended", "count"], [[name, str(n)] for name, n in sorted(soak.counts.items())])
    rows = [
        [f"{process} {name}", *(f"{value / 2**20:.2f} MiB" if name == "anonymous" else f"{value:g}" for value in both)]
        for process, name, *both in soak.grown()
    ]
    print_table("what is held, medians", ["", "first tenth", "last tenth"], rows)
    told = [
        [f"{process} {event}", str(n)] for process, events in soak.events.items() for event, (n, _) in events.items()
    ]
    print_table("warnings", ["event", "count"], told)
    broken = soak.broken()
    for text in broken:
        print(f"BROKEN  {text}")
    print(f"verdict: {'FAILED' if broken else 'ok'}")
    content = {"counts": dict(soak.counts), "samples": soak.samples, "events": soak.events, "broken": broken}
    save(asked.json, options={name: str(value) for name, value in vars(asked).items()}, seconds=seconds, **content)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
