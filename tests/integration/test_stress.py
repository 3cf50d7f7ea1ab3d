"""Everything at once over shared memory: see `peers/stress.py`. KVPULL_STRESS=20000 says how many pulls, of every kind;
a few hundred without it. Set KVPULL_STRESS_SEED to repeat a run's choices.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PULLS = int(os.environ.get("KVPULL_STRESS", "300"))
SEED = int(os.environ.get("KVPULL_STRESS_SEED", "1"))
SECONDS = 90 + PULLS / 20

pytestmark = pytest.mark.timeout(SECONDS + 30)


def stressed(**environment: str) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.integration.peers.stress",
            json.dumps({"pulls": PULLS, "seed": SEED, "sources": 3, "kills": 2 + PULLS // 500}),
        ],
        env={**os.environ, "PYTHONPATH": path, **environment},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    result: dict[str, Any] = json.loads(ended.stdout)
    sys.stdout.write(json.dumps(result["counts"]) + "\n")
    return result


@pytest.mark.slow
@pytest.mark.parametrize("extension", [True, False], ids=["with the extension", "without it"])
def test_p1_p2_p8_many_mixed_pulls_deliver_no_wrong_byte_and_leave_nothing(extension: bool) -> None:
    """Pulls of entries, parts, layers, blocks and slices, from memory files and from memory by address, awaited and
    blocking, with and without remote cache access; cancelled, out of time, their caches replaced, their sources killed.
    """
    result = stressed(KVPULL_NO_EXTENSION="0" if extension else "1")
    counts = result["counts"]
    assert not result["wrong"]
    assert counts["whole"] > PULLS / 5
    assert counts["sources killed"] >= 1
    assert counts["caches changed"] >= 1
    assert "late" not in counts, "pulls ended later than their deadline allows"
    assert result["accelerated"] <= extension
    left = result["left"]
    assert (left["mappings"], left["descriptors"]) == (0, 0)
    for number in (1, 2, 3):
        source = left[f"source {number}"]
        assert (source["used"], source["busy"]) == (0, [])
        assert source["mappings"] <= 1, "more than the page of its own epochs"
