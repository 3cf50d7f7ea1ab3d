"""Every example runs as a user runs it: in a process of its own, to the verdict in its last line, leaving nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.emulation import build, needs_gcc
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


@pytest.fixture
def with_an_npu(marked: dict[str, str]) -> dict[str, str]:
    """The same on a machine that has an NPU, emulated."""
    return {**marked, "ASCEND_HOME_PATH": str(build())}


@pytest.mark.slow
def test_the_demo_runs_in_the_memory_of_an_npu_and_says_so(with_an_npu: dict[str, str]) -> None:
    ended = run("prefill_decode.py", {**with_an_npu, "KVPULL_DEVICE_BACKEND": "acl"})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""  # the emulator would have said which rule was broken
    assert "The KV cache lay in device memory of the emulated NPU on both sides" in ended.stdout
    assert ended.stdout.count(" as from one process") == 10
    last = ended.stdout.splitlines()[-1]
    assert last == "OK: all 10 token sequences are identical to those of one process doing both."


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [2, 7])
def test_a_wrong_bit_is_noticed_on_an_npu_too(prompt: int, with_an_npu: dict[str, str]) -> None:
    ended = run(f"prefill_decode.py --spoil {prompt}", {**with_an_npu, "KVPULL_DEVICE_BACKEND": "acl"})
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith(f"FAILED: prompts with another cache or answer: [{prompt}]")


def test_a_demo_that_insists_on_an_npu_says_what_is_missing(marked: dict[str, str]) -> None:
    bare = {name: value for name, value in marked.items() if not name.startswith("ASCEND")}
    ended = run("prefill_decode.py", {**bare, "KVPULL_DEVICE_BACKEND": "acl"})
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    assert "LLM_FEATURE_NOT_ENABLED" in ended.stderr
    assert "$ASCEND_HOME_PATH is not set" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("example", ["blocking_pull", "layers", "layerwise", "push_cache", "role_switch"])
def test_examples_that_compute_with_numpy_run_where_there_is_an_npu(example: str, with_an_npu: dict[str, str]) -> None:
    ended = run(f"{example}.py", with_an_npu)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("OK")


@pytest.mark.slow
@needs_gcc
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_demo_builds_the_emulated_npu_that_it_runs_on(marked: dict[str, str], tmp_path: Path) -> None:
    """In an environment that make takes for one of its own making."""
    root = EXAMPLES.parent
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o700)
    (tmp_path / ".built-for").write_text(f"python3 in {root}\n")
    (tmp_path / ".run").touch()
    make = ["make", "--no-print-directory", "demo", "PYTHON=python3", f"VENV={tmp_path}"]
    # The suite itself may be run by make, with arguments of its own.
    outside = {name: value for name, value in marked.items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))}

    def made(device: str) -> subprocess.CompletedProcess[str]:
        command = [*make, f"DEVICE={device}"]
        return subprocess.run(
            command, cwd=root, env=outside, capture_output=True, text=True, timeout=SECONDS, check=False
        )

    ended = made("acl-emulator")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "device memory of the emulated NPU" in ended.stdout
    assert not left_behind(marked)
    refused = made("gpu")
    assert refused.returncode == 2
    assert 'DEVICE is "gpu", it can be acl or acl-emulator' in refused.stderr


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
