"""The self-test as a program: `python -m kvpull_async.self_test` prints a report, and exits with 0 if all is well.

This process loads no Ascend library: the checks run in others, which may hang or die.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvpull_async.self_test.children import Child
from kvpull_async.self_test.lines import State, Step, Steps, Stop
from kvpull_async.self_test.report import SECTIONS, Report, facts

__all__ = ["main"]

_WELL, _ILL, _STOPPED = 0, 1, 3
_OURSELVES: Final = (sys.executable, "-m", "kvpull_async.self_test", "--part")
_PULLS: Final = 7
_MIB: Final = 1024 * 1024


def main(given: Sequence[str] | None = None) -> int:
    """The exit code."""
    asked = _arguments(given)
    if asked.part is not None:
        return _checks(asked)
    report = Report(_print, known=facts(os.environ))
    began = time.monotonic()
    try:
        _report(report, asked)
    except KeyboardInterrupt:
        report.add(Step(0, "all that is left", State.FAILED, "interrupted"))
    well = report.summary(time.monotonic() - began)
    if asked.json is not None:
        asked.json.write_text(json.dumps(report.data(), indent=1) + "\n", encoding="utf-8")
    return _WELL if well else _ILL


def _report(report: Report, asked: argparse.Namespace) -> None:
    with _child(asked, "device", "--mib", str(asked.mib)) as device:
        for step in device.steps():
            report.add(step)
    if device.code not in (_WELL, _ILL):
        report.skip(SECTIONS, "what it needs has failed")
        return
    with _child(asked, "serve") as source:
        _pulls(report, source, asked)


def _child(asked: argparse.Namespace, part: str, *more: str) -> Child:
    """Without the settings of a service that runs here: its certificates and its secret are not for this test."""
    given = ["--device", str(asked.device), "--seconds", str(asked.seconds)]
    environ = {name: value for name, value in os.environ.items() if not name.upper().startswith("KVPULL_")}
    return Child([*_OURSELVES, part, *given, *more], patience=asked.seconds, environ=environ)


def _pulls(report: Report, source: Child, asked: argparse.Namespace) -> None:
    address = source.first("address")
    if address.state is State.FAILED:
        report.add(Step(_PULLS, "the second process", State.FAILED, address.text, lines=address.lines))
        return
    for part in ("pulls", "tensors"):
        with _child(asked, part, "--source", address.text) as puller:
            for step in puller.steps():
                report.add(step)
    source.dismiss()
    for step in source.steps():
        report.add(step)


def _checks(asked: argparse.Namespace) -> int:
    """What one of the other processes does."""
    # What a driver prints must not get between the lines.
    steps = Steps(os.dup(1))
    os.dup2(2, 1)
    patience = asked.seconds / 2
    try:
        if asked.part == "device":
            from kvpull_async.self_test.device import check_device  # noqa: PLC0415  (only where it may hang)

            check_device(steps, number=asked.device, nbytes=asked.mib * _MIB, patience=patience)
        else:
            _pull_checks(steps, asked, patience)
    except Stop:
        return _STOPPED
    return _ILL if steps.failed else _WELL


def _pull_checks(steps: Steps, asked: argparse.Namespace, patience: float) -> None:
    from kvpull_async.self_test import pulls, tensors  # noqa: PLC0415

    if asked.part != "serve":
        host, _, port = asked.source.rpartition(":")
        check = pulls.check_pulls if asked.part == "pulls" else tensors.check_tensors
        check(steps, device=asked.device, source=(host, int(port)), patience=patience)
        return

    def serve() -> str:
        asyncio.run(pulls.serve(steps, device=asked.device, patience=patience))
        return "served them, and ended well"

    steps.run(_PULLS, "the second process", serve)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvpull_async.self_test",
        description="Check what kvpull needs of this machine's NPU, and print a report. Exits with 0 if all is well.",
    )
    parser.add_argument("--device", type=int, default=0, metavar="N", help="the device, as AscendCL counts (default 0)")
    parser.add_argument(
        "--mib", type=_positive, default=256, metavar="M", help="MiB of a bandwidth buffer (default 256)"
    )
    parser.add_argument("--seconds", type=_positive, default=60, help="that one check may take (default 60)")
    parser.add_argument("--json", type=_writable, metavar="FILE", help="write the report there, too, for programs")
    parser.add_argument("--part", choices=("device", "serve", "pulls", "tensors"), help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _writable(text: str) -> Path:
    """Said before anything is measured."""
    path = Path(text)
    try:
        path.open("ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot be written: {error}") from error
    return path


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
