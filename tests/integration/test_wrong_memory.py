"""Registered memory that is not there, may not be used so, or has moved: the call that would use it says so, and the
process lives.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.torch_cpu import torch_cpu

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0
SMALL, BIG = 1024, 8 * 1024 * 1024
NAMES = ["into tiny", "out of tiny", "into high", "out of high", "into gone", "out of gone"]


def told_by(peer: str, **asked: Any) -> Any:
    """The last line of a process that must end well."""
    ended = subprocess.run(
        [sys.executable, "-m", f"tests.integration.peers.{peer}", json.dumps(asked)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("entry_nbytes", [SMALL, BIG], ids=["small", "big"])
@pytest.mark.parametrize(
    ("transport", "remote_access"), [("inproc", False), ("tcp", False), ("shm", False), ("shm", True)]
)
def test_it_is_an_error_of_the_call(transport: str, entry_nbytes: int, *, remote_access: bool) -> None:
    found = told_by("wrong_memory", transport=transport, entry_nbytes=entry_nbytes, remote_access=remote_access)
    assert found == [["good", "pulled"], *([name, "LLM_PARAM_INVALID"] for name in NAMES), ["good again", "pulled"]]


INTO = [f"{call} into" for call in ("pull", "push", "copy")]
OUT_OF = [f"{call} out of" for call in ("pull", "push", "copy")]
WRONG, DONE = "LLM_PARAM_INVALID", "done"


@pytest.mark.parametrize("nbytes", [SMALL, BIG], ids=["small", "big"])
@pytest.mark.parametrize("way", ["inproc", "tcp", "mapped", "read"])
def test_p1_read_only_memory_is_served_and_never_written(way: str, nbytes: int) -> None:
    found = told_by("guarded_memory", way=way, nbytes=nbytes, kind="constant")
    assert found[:-1] == [[name, WRONG] for name in INTO] + [[name, DONE] for name in [*OUT_OF, "push among good"]]
    assert found[-1] == ["holds", "[7]"], "what was read out of it is what was registered"


@pytest.mark.parametrize(("way", "nbytes"), [("inproc", BIG), ("tcp", SMALL), ("mapped", SMALL), ("read", BIG)])
def test_memory_without_any_access_is_an_error_of_the_call(way: str, nbytes: int) -> None:
    found = told_by("guarded_memory", way=way, nbytes=nbytes, kind="closed")
    assert found[:-1] == [*([name, WRONG] for name in [*INTO, *OUT_OF]), ["push among good", DONE]]


@pytest.mark.parametrize(
    ("kind", "way", "nbytes"), [("shared", "inproc", BIG), ("shared", "tcp", SMALL), ("queued", "mapped", BIG)]
)
def test_tensors_that_moved_while_registered_are_an_error_of_the_call(kind: str, way: str, nbytes: int) -> None:
    torch_cpu()
    found = told_by("guarded_memory", way=way, nbytes=nbytes, kind=kind)
    assert found[:-1] == [*([name, WRONG] for name in [*INTO, *OUT_OF]), ["push among good", DONE]]
