"""A bad day, from a seed: many processes that pull and push while they are killed, stopped, cut off and started anew.

    benchmarks/chaos.py --path tcp --seconds 60 --seed 1

Every byte that is delivered is compared with what it must be, every destination of a call that raised is watched, and
what is left at the end is counted. Exit status 1 when a promise of docs/promises.md was broken.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bad_days.run import Plan, Run
from bad_days.schedule import schedule
from bad_days.verdict import Verdict
from figures import save

_SHARE = 0.25
"""Of the time, before what is held is looked at for the first time."""
_REST = 1.0


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", choices=("tcp", "shm"), default="tcp", help="over tcp every link has a fault proxy")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prefills", type=int, default=3)
    parser.add_argument("--decodes", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4, help="callers in each decode process")
    parser.add_argument("--pause", type=float, default=20.0, help="ms that each rests at most between two calls")
    parser.add_argument("--every", type=float, default=0.7, help="mean s between faults; 0: none")
    parser.add_argument("--sabotage", choices=("flip", "stale", "late", "all"), default="", help="must fail")
    parser.add_argument("--quick", action="store_true", help="times are printed, and not judged")
    parser.add_argument("--story", action="store_true", help="print each fault as it was planned")
    parser.add_argument("--json", type=Path, metavar="OUT")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    asked = _arguments(given)
    plan = Plan(
        asked.prefills, asked.decodes, asked.path, asked.seed, asked.workers, asked.pause / 1000, asked.sabotage
    )
    run = Run(plan)
    parts = (asked.seconds * _SHARE, asked.seconds * (1 - _SHARE))
    rests = []
    with run.cleared():
        began = time.monotonic()
        run.start()
        for part, seconds in enumerate(parts):
            faults = schedule(
                asked.seed,
                part,
                seconds,
                prefills=asked.prefills,
                decodes=asked.decodes,
                every=asked.every,
                heartbeat=plan.timing.heartbeat_timeout / 1000,
                lines=True,
            )
            if asked.story:
                print("\n".join(fault.describe() for fault in faults), flush=True)
            began_part = time.monotonic()
            run.suffer(faults, began_part)
            time.sleep(max(_REST, began_part + seconds - time.monotonic()))
            rests.append(run.quiet())
            run.resume()
        run.finish()
        verdict = Verdict(run, rests, time.monotonic() - began, judged=not asked.quick)
    verdict.print()
    save(asked.json, options={k: str(v) for k, v in vars(asked).items()}, **verdict.as_json())
    return verdict.status


if __name__ == "__main__":
    sys.exit(main())
