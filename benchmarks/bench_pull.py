"""How fast pulls are, beside plain sockets, the machine's own copies and other engines in the same run.

One repetition runs every contender once, each in two fresh processes (A B C ... A B C ...), so that drifts of the
machine and the luck of one page layout hit all alike. Memory is touched and connections are made before the clock runs.
After the timed pulls of a workload the destination is poisoned, pulled into once more, and compared to the last byte,
those that were not to be touched included. Wrong bytes make the exit status 1.

A block of timed pulls is done again, up to a limit, when other processes or the host used the cores meanwhile; what
stayed disturbed is counted in the tables. A contender that cannot run here is reported with the reason and left out;
when it was asked for by --only, the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from contenders import CONTENDERS, LIMIT, NAMES, PEER, matching
from figures import machine, parsed, save, standard_arguments
from growth import grow, tell_growth
from kv_nodes import COPIES
from measuring import measure
from plot import plot
from report import tell
from runs import Run, as_json, load
from targets import tell_targets

EXTRA_KINDS = {LIMIT: "limits", PEER: "peers"}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    standard_arguments(parser)
    parser.add_argument("--reps", type=int, help="repetitions (3)")
    parser.add_argument("--only", metavar="NAMES", help=f"contenders or patterns as shm*, of {', '.join(CONTENDERS)}")
    parser.add_argument("--workloads", default=",".join(NAMES))
    parser.add_argument("--limits", action="store_true", help="the machine's own copies too")
    parser.add_argument("--peers", action="store_true", help="NIXL and Mooncake too, where they are installed")
    parser.add_argument("--growth", action="store_true", help="how cost grows, and nothing else")
    parser.add_argument("--pages", choices=("4k", "huge"), default="4k", help="of memory outside the library")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="draw a PNG (needs matplotlib: the extra `bench`)")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="JSON", help="tell what earlier runs found together")
    options = parsed(parser, arguments)
    options.reps = options.reps or (1 if options.quick else 3)
    options.workloads = tuple(options.workloads.split(","))
    if unknown := [name for name in options.workloads if name not in NAMES]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'kvpull[bench]'")
    try:
        options.asked = matching(options.only) if options.only else []
    except LookupError as error:
        parser.error(str(error.args[0]))
    options.only = options.asked or [name for name in CONTENDERS if _wanted(name, options)]
    return options


def _wanted(name: str, options: argparse.Namespace) -> bool:
    switch = EXTRA_KINDS.get(CONTENDERS[name].kind)
    return switch is None or bool(getattr(options, switch))


def _found(options: argparse.Namespace) -> list[Run]:
    if options.merge:
        runs = load(options.merge)
        if len({(run.pages, run.quick, run.copies) for run in runs}) > 1:
            raise SystemExit("these runs do not measure the same: one is quick, has other pages, or no C extension")
        return runs
    if options.growth:
        found = grow(quick=options.quick)
        return [Run(options.pages, {}, {}, options.quick, COPIES, growth=found, failed=found["failed"])]
    return [measure(options)]


def _verdict(runs: Sequence[Run], asked: Sequence[str]) -> int:
    """Say what went wrong; the exit status. Another engine that fails was not asked for by name, or it counts."""
    wrong = [f"WRONG  {where}: {count} bytes" for run in runs for where, count in run.wrong.items()]
    absent = [f"not available, but asked for: {name}" for name in asked if any(name in run.missing for run in runs)]
    failed = {name: why for run in runs for name, why in run.failed.items()}
    counted = [name for name in failed if name not in CONTENDERS or CONTENDERS[name].kind != PEER or name in asked]
    print()
    for line in (*wrong, *absent, *(f"FAILED  {name}: {why}" for name, why in failed.items())):
        print(line)
    if wrong or absent or counted:
        print("verdict: FAILED, see above")
        return 1
    pulled = any(run.blocks for run in runs)
    right = "every byte is right, those not asked for untouched"
    print(f"verdict: {right if pulled else 'nothing to judge'}")
    return 0


def main() -> int:
    options = parse()
    runs = _found(options)
    if options.merge:
        print(f"{len(runs)} runs: cells are the median of the runs' medians, the lowest and the highest in parentheses")
    else:
        about = ", ".join(f"{what} {value}" for what, value in machine().items())
        print(f"{about}, pages {options.pages}, the library copies by {COPIES}")
    tell(runs)
    for run in runs:
        if run.growth:
            tell_growth(run.growth)
    if not options.quick:
        tell_targets(runs)
    save(options.json, runs=[as_json(run) for run in runs])
    if options.plot:
        plot(runs, options.plot)
        print(f"\ndrawn: {options.plot}")
    return _verdict(runs, options.asked)


if __name__ == "__main__":
    sys.exit(main())
