"""Each benchmark runs to its end on tiny sizes. What it measures is not looked at: a test does not depend on speed."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SECONDS = 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bench_pull", "bench_lag", "bench_deadline", "bench_fairness"])
def test_a_quick_run_ends_well(name: str, tmp_path: Path) -> None:
    samples = tmp_path / "samples.json"
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--json", str(samples)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "verdict: " in ran.stdout
    assert samples.stat().st_size > 0
