"""Every example runs as a user runs it: in a process of its own, to the verdict in its last line, leaving nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.torch_cpu import torch_cpu

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 280.0
GONE_SECONDS = 30.0
MARK = "KVPULL_TEST_MARK"

pytestmark = pytest.mark.timeout(SECONDS + 2 * GONE_SECONDS)


@pytest.fixture
def marked() -> dict[str, str]:
    """An environment by which a process, its children and their children can be found again."""
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # the examples run several processes already
    return {**os.environ, **one, MARK: uuid.uuid4().hex, "PYTHONUNBUFFERED": "1"}


def command(example: str) -> list[str]:
    script, *arguments = example.split()
    return [sys.executable, str(EXAMPLES / script), *arguments]


def run(example: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        command(example), env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert not left_behind(environment)
    return ended


def left_behind(environment: dict[str, str]) -> list[str]:
    """Processes with that mark that are still there after a while; none is waited for."""
    give_up = time.monotonic() + GONE_SECONDS
    while (left := _processes(f"{MARK}={environment[MARK]}".encode())) and time.monotonic() < give_up:
        time.sleep(0.02)
    return left


def _processes(mark: bytes) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # not ours, or gone meanwhile
    return found


@pytest.mark.parametrize(
    ("example", "verdict"),
    [
        pytest.param(
            "blocking_pull.py",
            "OK: every byte arrived where it was asked for, and no other byte changed",
            marks=pytest.mark.smoke,
        ),
        pytest.param(
            "structured_logs.py",
            "OK: both pulls can be followed on both sides, the traced one by its trace id too",
            marks=pytest.mark.smoke,
        ),
        pytest.param("layers.py", "OK: every layer was complete when it was given", marks=pytest.mark.smoke),
        pytest.param("layerwise.py", "OK: every layer arrived as it was computed", marks=pytest.mark.smoke),
        pytest.param(
            "push_cache.py",
            "bytes were pushed, each is where it was meant to go, and no other byte changed",
            marks=pytest.mark.smoke,
        ),
        ("paged_attention.py", "OK: attention through either block table gives the same numbers, bit for bit"),
        ("role_switch.py", "OK: the cache went there and back in 3 rounds, and every number is right"),
        ("tiny_transformer.py", "paged equals contiguous; a spoiled cache is noticed"),
    ],
)
def test_a_small_example_ends_well_and_says_so(example: str, verdict: str, marked: dict[str, str]) -> None:
    ended = run(example, marked)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].endswith(verdict)


def test_torch_and_the_library_share_memory(marked: dict[str, str]) -> None:
    torch_cpu()
    ended = run("torch_tensors.py", marked)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "OK: every bit arrived where it was asked for, and no other changed"


def test_without_torch_its_example_says_what_it_needs(marked: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError\n")
    ended = run("torch_tensors.py", {**marked, "PYTHONPATH": str(tmp_path)})
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "torch, which is not installed" in ended.stdout
    assert ended.stderr == ""


def test_the_console_shows_the_events_of_both_sides(marked: dict[str, str]) -> None:
    ended = run("structured_logs.py --console", marked)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for event in ("link.up", "pull.started", "serve.finished", "pull.finished", "serve.refused", "pull.failed"):
        assert event in ended.stderr


@pytest.mark.slow
def test_the_server_answers_its_own_questions(marked: dict[str, str]) -> None:
    ended = run("async_server.py --self-test", marked)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("OK: all 16 answers are those of one process doing both")


@pytest.mark.slow
def test_the_demo_says_what_travelled_and_how_and_that_the_answers_are_the_same(marked: dict[str, str]) -> None:
    ended = run("prefill_decode.py", marked)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    assert "The transport used was shm" in ended.stdout
    assert "the library's reason: same host and user" in ended.stdout
    assert "GB/s" in ended.stdout
    assert ended.stdout.count(" as from one process") == 10
    last = ended.stdout.splitlines()[-1]
    assert last == "OK: all 10 token sequences are identical to those of one process doing both."


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [4, 9])
def test_the_demo_fails_when_one_bit_of_a_cache_is_wrong(prompt: int, marked: dict[str, str]) -> None:
    ended = run(f"prefill_decode.py --logs --spoil {prompt}", marked)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "The transport used was shm" in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith(f"FAILED: prompts with another cache or answer: [{prompt}]")
    assert '"event": "pull.finished"' in ended.stderr


@pytest.mark.slow
def test_a_killed_demo_leaves_no_process_behind(marked: dict[str, str]) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(command("prefill_decode.py"), env=marked, stdout=pipe, stderr=pipe, text=True) as demo:
        assert demo.stdout is not None
        # Both children are up and linked now, and busy.
        seen = next((line for line in demo.stdout if "The DECODE process" in line), None)
        demo.kill()
        demo.communicate(timeout=GONE_SECONDS)
    assert seen is not None
    assert not left_behind(marked)
