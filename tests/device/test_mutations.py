"""The emulator and the suite for memories can fail: a memory that is wrong in one way is caught."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.acl_emulator import RELEASES
from tests.integration.running import ROOT

each_release = pytest.mark.parametrize("release", RELEASES)
oldest_and_newest = pytest.mark.parametrize("release", ["8.0", "9.0"])


def tried(mutant: str, release: str, *, aborting: bool = False) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *(entry for entry in sys.path if entry)])
    command = [sys.executable, "-m", "tests.device.mutants", mutant, release, str(int(aborting))]
    environ = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT, env=environ, check=False)


def verdict(mutant: str, release: str) -> tuple[dict[str, str], list[str]]:
    """The tests that failed, each with its error, and what the emulator saw."""
    done = tried(mutant, release)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said["failed"], said["violations"]


@oldest_and_newest
def test_the_memory_itself_passes(release: str) -> None:
    assert verdict("nothing", release) == ({}, [])


@oldest_and_newest
def test_who_skips_the_synchronise_is_caught(release: str) -> None:
    failed, violations = verdict("skip_the_synchronise", release)
    assert "test_what_was_landed_is_lent" in failed
    assert any("in flight" in seen for seen in violations)


@each_release
def test_who_drops_the_pin_is_caught_where_that_is_forbidden(release: str) -> None:
    """From 8.5 on the runtime copies from ordinary memory too, only slower."""
    failed, violations = verdict("drop_the_pin", release)
    if release in ("8.0", "8.2"):
        assert "test_what_was_landed_is_lent" in failed, "the bytes are garbage there"
        assert any("needs host memory of aclrtMallocHost" in seen for seen in violations)
    else:
        assert not failed
        assert not violations


@oldest_and_newest
def test_who_forgets_the_context_is_caught(release: str) -> None:
    failed, _ = verdict("forget_the_context", release)
    assert "107002" in failed["test_what_was_landed_is_lent"]


@oldest_and_newest
def test_who_frees_early_is_caught(release: str) -> None:
    _, violations = verdict("free_early", release)
    assert any("is freed while a copy that uses it is in flight" in seen for seen in violations)


@pytest.mark.parametrize("mutant", ["skip_the_synchronise", "free_early"])
def test_a_process_that_breaks_the_rules_is_aborted(mutant: str) -> None:
    """As those that other tests start."""
    done = tried(mutant, "9.0", aborting=True)
    assert done.returncode == -signal.SIGABRT
    assert "in flight" in done.stderr
