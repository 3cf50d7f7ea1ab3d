"""Registered addresses where nothing is: the call that would use them says so, and the process lives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
SMALL, BIG = 1024, 8 * 1024 * 1024
NAMES = ["into tiny", "out of tiny", "into high", "out of high", "into gone", "out of gone"]


@pytest.mark.parametrize("entry_nbytes", [SMALL, BIG], ids=["small", "big"])
@pytest.mark.parametrize(
    ("transport", "remote_access"), [("inproc", False), ("tcp", False), ("shm", False), ("shm", True)]
)
def test_it_is_an_error_of_the_call(transport: str, entry_nbytes: int, *, remote_access: bool) -> None:
    asked = {"transport": transport, "entry_nbytes": entry_nbytes, "remote_access": remote_access}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.integration.peers.wrong_memory", json.dumps(asked)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found == [["good", "pulled"], *([name, "LLM_PARAM_INVALID"] for name in NAMES), ["good again", "pulled"]]
