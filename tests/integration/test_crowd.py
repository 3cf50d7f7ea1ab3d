"""Pulls, pushes, transfers, allocation and release by many callers at once on four links: no wrong byte, no leak, no
deadlock. KVPULL_CROWD=60 says for how many seconds; a few without it. See `peers/crowd.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("KVPULL_CROWD", "2"))
SEED = int(os.environ.get("KVPULL_CROWD_SEED", "1"))
PATIENCE = SECONDS + 90
KINDS = {"pull", "push", "push_pages", "transfer", "allocate", "register"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE + 30)]


@pytest.mark.parametrize("path", ["shm", "tcp"])
@pytest.mark.parametrize(("api", "workers"), [("threads", 16), ("tasks", 200)])
def test_p2_p5_p8_many_callers_at_once_move_no_wrong_byte_and_leave_nothing(api: str, workers: int, path: str) -> None:
    config = {"api": api, "workers": workers, "seconds": SECONDS, "path": path, "seed": SEED}
    python_path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
    ended = subprocess.run(
        [sys.executable, "-m", "tests.integration.peers.crowd", json.dumps(config)],
        env={**os.environ, "PYTHONPATH": python_path},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    result = json.loads(ended.stdout)
    sys.stdout.write(json.dumps(result["counts"]) + "\n")
    assert not result["wrong"]
    assert not result["stuck"]
    assert set(result["counts"]) == KINDS
    for left in (result["left"], *result["left there"]):
        assert left == {"descriptors": 0, "threads": [], "mappings": 0}
