"""Fuzz a target with random damage to the corpus, without coverage: ``python -m tests.fuzz.blind --target session``.

Needs nothing that is not installed, and tries several times as many inputs a second as with coverage. A failure is
written to a file, and ends the run.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.targets import TARGETS, inputs
from tests.wire import mutate


def damaged(known: Sequence[bytes], rng: random.Random) -> bytes:
    """The next input: mostly one that is known, or two of them, with some damage."""
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(300))
    data = rng.choice(known)
    if rng.random() < 0.4:
        data += rng.choice(known)
    return mutate(data, rng)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--runs", type=int, default=10**12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="folders of further inputs")
    parser.add_argument("--failures", type=Path, default=Path(), help="where a failure is written")
    options = parser.parse_args()
    target, rng = TARGETS[options.target](), random.Random(options.seed)
    paths = [*inputs(options.target), *(path for folder in options.more for path in sorted(folder.iterdir()))]
    known = [path.read_bytes() for path in paths]
    for data in known:
        target(data)
    before, began, count, failed = _memory(), time.monotonic(), 0, 0
    while not failed and count < options.runs and time.monotonic() < began + options.seconds:
        data = damaged(known, rng)
        count += 1
        try:
            target(data)
        except Exception:  # noqa: BLE001  (what it is about)
            traceback.print_exc()
            failed = 1
            (options.failures / f"crash-{options.target}-{options.seed}-{count}").write_bytes(data)
    rate = round(count / (time.monotonic() - began))
    memory = f"RSS {before} -> {_memory()} MiB"
    print(f"{options.target}: {count} inputs, {rate}/s, {failed} failures, {memory}, seed {options.seed}")  # noqa: T201
    return failed


def _memory() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 // 2**20


if __name__ == "__main__":
    sys.exit(main())
