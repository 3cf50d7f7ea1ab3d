"""Fuzz a target, guided by coverage: ``python -m tests.fuzz.run --target session --runs 1000000 --seconds 300``.

Needs atheris (the extra `fuzz`). It begins with the corpus kept beside this file, writes what it finds to a folder of
its own, and prints one line: inputs, inputs per second, edges covered, failures, and the memory at begin and end.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_STATUS = re.compile(rb"#(\d+)\s+\w+\s+cov: (\d+) ft: (\d+).*?exec/s: (\d+) rss: (\d+)Mb")
_RSS_LIMIT_MB = 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="its name, several with commas, or `all`")
    parser.add_argument("--runs", type=int, default=100_000, help="inputs, for each job")
    parser.add_argument("--seconds", type=int, default=60, help="at most, for each target")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once, each with another seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-len", type=int, default=1024, help="bytes of an input")
    parser.add_argument("--work", type=Path, help="folder for new inputs and failures; by default a new one")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options, flags = parser.parse_known_args()
    if options.inside:
        return _inside(options.inside, flags)
    if importlib.util.find_spec("atheris") is None:
        parser.error("atheris is not installed: pip install 'kvpull[fuzz]'")
    from tests.fuzz.targets import TARGETS

    names = list(TARGETS) if options.target == "all" else options.target.split(",")
    work = options.work or Path(tempfile.mkdtemp(prefix="kvpull-fuzz-"))
    failures = 0
    for name in names:
        jobs = [_start(name, options, work, job) for job in range(options.jobs)]
        results = [_result(*job) for job in jobs]
        failures += sum(result["failures"] for result in results)
        print(_line(name, results), flush=True)  # noqa: T201
        with (work / "results.jsonl").open("a") as file:
            file.writelines(json.dumps({"target": name, **result}) + "\n" for result in results)
    print(f"new inputs and failures: {work}")  # noqa: T201
    return 1 if failures else 0


def _start(name: str, options: Any, work: Path, job: int) -> tuple[subprocess.Popen[bytes], Path, Path, float]:
    found, crashes = work / name, work / f"{name}-failures-{options.seed + job}"
    found.mkdir(parents=True, exist_ok=True)
    crashes.mkdir(exist_ok=True)
    log = work / f"{name}-{options.seed + job}.log"
    flags = [
        f"-runs={options.runs}", f"-max_total_time={options.seconds}", f"-seed={options.seed + job}",
        f"-max_len={options.max_len}", f"-artifact_prefix={crashes}/", f"-rss_limit_mb={_RSS_LIMIT_MB}", "-timeout=30",
        "-print_final_stats=1", "-reload=1", str(found), str(ROOT / "tests/fuzz/corpus" / name),
    ]  # fmt: skip
    command = [sys.executable, "-m", "tests.fuzz.run", "--target", name, "--inside", name, *flags]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
    return process, log, crashes, time.monotonic()


def _result(process: subprocess.Popen[bytes], log: Path, crashes: Path, began: float) -> dict[str, Any]:
    code = process.wait()
    seconds = time.monotonic() - began
    said = log.read_bytes()
    lines = _STATUS.findall(said)
    first, last = (lines[0], lines[-1]) if lines else ((b"0",) * 5, (b"0",) * 5)
    counted = re.search(rb"stat::number_of_executed_units:\s*(\d+)", said)
    runs = int(counted.group(1)) if counted else int(last[0])
    rate = re.search(rb"stat::average_exec_per_sec:\s*(\d+)", said)
    return {
        "inputs": runs, "seconds": round(seconds, 1),
        "per_second": int(rate.group(1)) if rate else round(runs / max(seconds, 0.1)),
        "edges": int(last[1]), "features": int(last[2]), "exit": code, "failures": len(list(crashes.iterdir())),
        "rss_mb": [int(first[4]), int(last[4])],
    }  # fmt: skip


def _line(name: str, results: list[dict[str, Any]]) -> str:
    total = sum(result["inputs"] for result in results)
    rate = sum(result["per_second"] for result in results)
    memory = ", ".join(f"{result['rss_mb'][0]} -> {result['rss_mb'][1]}" for result in results)
    edges, failures = max(result["edges"] for result in results), sum(result["failures"] for result in results)
    codes = sorted({result["exit"] for result in results} - {0})
    ended = f", exit {codes}" if codes else ""
    return f"{name}: {total} inputs, {rate}/s, {edges} edges, {failures} failures, RSS {memory} MiB{ended}"


def _inside(name: str, flags: list[str]) -> int:
    """In a process of its own, which ends with the run."""
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["kvpull_async"]):
        targets = importlib.import_module("tests.fuzz.targets")
    target = targets.TARGETS[name]()
    atheris.Setup([sys.argv[0], *flags], target, internal_libfuzzer=True)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
