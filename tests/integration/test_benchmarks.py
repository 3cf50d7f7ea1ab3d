"""The benchmarks run to their end on tiny sizes, leave out what cannot run, and count right.

What they measure is not looked at: a test does not depend on speed.
"""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvpull_async import Placement
from kvpull_async.memory.host import HostMemory

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SECONDS = 100


def run(name: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=env)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("bench_pull", ["--limits", "--peers"]),
        ("bench_pull", ["--growth"]),
        ("bench_blocks", []),
        ("bench_lag", []),
        ("bench_lag", ["--device"]),
        ("bench_device", []),
        ("bench_verify", []),
        ("bench_deadline", []),
        ("bench_fairness", []),
    ],
    ids=lambda value: "".join(value) if isinstance(value, list) else value,
)
def test_a_quick_run_ends_well(name: str, more: list[str], tmp_path: Path) -> None:
    samples = tmp_path / "samples.json"
    ran = run(name, "--quick", "--json", str(samples), *more)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "verdict: " in ran.stdout
    assert samples.stat().st_size > 0


# --- what cannot run is told, and the rest goes on -------------------------------------------------------------------


@pytest.mark.slow
def test_without_a_compiler_the_copies_in_c_are_left_out() -> None:
    ran = run("bench_pull", "--quick", "--only", "limits", "--workloads", "W4", PATH="")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "not available: memcpy1: no gcc" in ran.stdout
    assert "numpy copies, 1 thread" in ran.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is not None, reason="NIXL is installed")
def test_an_engine_that_was_asked_for_and_is_not_installed_fails() -> None:
    ran = run("bench_pull", "--quick", "--only", "nixl", "--workloads", "W4")
    assert ran.returncode == 1
    assert "pip install nixl-cu12" in ran.stdout


def test_an_unknown_contender_is_refused_before_anything_is_measured() -> None:
    ran = run("bench_pull", "--only", "nobody")
    assert ran.returncode == 2
    assert "unknown: nobody" in ran.stderr


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed")
def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    ran = run("bench_pull", "--plot", str(tmp_path / "out.png"))
    assert ran.returncode == 2
    assert "kvpull[bench]" in ran.stderr


@pytest.mark.slow
def test_without_a_compiler_there_is_no_emulated_npu(tmp_path: Path) -> None:
    ran = run("bench_device", "--quick", PATH="", TMPDIR=str(tmp_path))  # where no earlier run has left one
    assert ran.returncode == 1
    assert "not available: no emulated NPU: " in ran.stdout
    assert "gcc" in ran.stdout


# --- pulls -----------------------------------------------------------------------------------------------------------


def test_every_pull_of_a_consumed_key_takes_another_and_uses_it_up(module: Any) -> None:
    nodes, small, workloads = module("kv_nodes"), module("kv_small"), module("workloads")
    works = [work for work in workloads.build(workloads.SMALL, seed=1).values() if work.is_latency]
    said = {"allocated": True, "transfer_backend": "tcp"}
    source, puller = small.ConsumedSource(**said), small.ConsumedPuller(nodes.BlockingNode, **said)
    told = source.open(workloads.SMALL, works, seed=1)
    try:
        puller.open(workloads.SMALL, works, told=told)
        puller.arena(works[0]).poison()
        puller.pull(works[0], 2)
        assert not workloads.wrong_bytes(puller.arena(works[0]), works[0].pulls, shape=workloads.SMALL, seed=1)
        again = {"src_layer_range": range(1), "dst_layer_range": range(2, 3), "tensor_num_per_layer": 1}
        for req_id, there in ((1, False), (2, False), (3, True)):
            key = nodes.CacheKey(nodes.SOURCE_CLUSTER, req_id)
            if there:
                puller.node.manager.pull_cache(key, puller.entries, size=64 * 1024, **again)
            else:
                with pytest.raises(nodes.LLMException):
                    puller.node.manager.pull_cache(key, puller.entries, size=64 * 1024, **again)
        puller.close()
    finally:
        source.close()


def test_there_are_keys_for_every_pull_of_a_session(module: Any) -> None:
    small, measuring, workloads = module("kv_small"), module("measuring"), module("workloads")
    for work in workloads.build(workloads.FULL, seed=1).values():
        if work.is_latency:
            assert measuring.ATTEMPTS * (work.warmup + work.count) + 1 <= small.KEYS


def test_a_wrong_and_a_stray_byte_are_counted(module: Any) -> None:
    workloads = module("workloads")
    shape = workloads.QUICK
    source, destination = workloads.own_memory(shape), workloads.own_memory(shape)
    source.fill(3)
    work = workloads.build(shape, seed=3)["W2"]
    destination.poison()
    for pull in work.pulls:
        for src, start, dst, at, n in pull.segments(shape):
            destination.view(dst, at, n)[:] = source.view(src, start, n)
    assert workloads.wrong_bytes(destination, work.pulls, shape=shape, seed=3) == 0
    _, _, dst, at, n = work.pulls[0].segments(shape)[0]
    destination.tensors[dst][at] ^= 1
    destination.tensors[dst][(at + n) % shape.tensor_nbytes] ^= 1  # no segment lies there: none are neighbours
    assert workloads.wrong_bytes(destination, work.pulls, shape=shape, seed=3) == 2


def test_small_pages_are_told(module: Any) -> None:
    memory = module("workloads").own_memory(module("workloads").QUICK)
    memory.poison()
    assert module("pages").pages([memory]) == "4 KiB"
    assert module("pages").pages([]) == ""


# --- a device, and a wire with a pace ---------------------------------------------------------------------------------


def test_bytes_leave_a_wire_unchanged_and_no_faster_than_it_is(module: Any) -> None:
    devices, workloads = module("devices"), module("workloads")
    arena = workloads.own_memory(workloads.QUICK)
    arena.fill(5)
    rate, nbytes = 10**7, arena.tensors[0].size
    memory = HostMemory({})
    regions = memory.adopt(arena.addresses, tensor_nbytes=nbytes, placement=Placement.HOST)
    wire = devices.Wire(memory, rate=rate)
    began = time.perf_counter()
    lent = b"".join(view for batch in wire.lending(regions, np.array([(2, 0, nbytes)])) for view in batch)
    assert time.perf_counter() - began >= nbytes / rate
    assert lent == arena.tensors[2].tobytes()


@pytest.mark.parametrize(("pipelined", "status"), [(1.31, 1), (1.29, 0)])
def test_a_copy_that_does_not_hide_misses_the_bound(module: Any, pipelined: float, status: int) -> None:
    device, figures = module("bench_device"), module("figures")
    kind = device.Paced("into the NPU", ("receive", "copy in"))
    for seconds in (0.1, pipelined, 9.0):
        kind.turns.append(device.Turn(seconds, 1.2, 0.8))
        kind.others.append(0.0)
    bounds = device.tell_paced([kind], rate=500, nbytes=10**6)
    assert figures.judge(bounds, unit="times", quick=False) == status


# --- figures ---------------------------------------------------------------------------------------------------------


def made_run(runs: ModuleType, pages: str = "4k", **seconds: list[float]) -> Any:
    """A run of W1, 1 GB, with these seconds of each repetition by row."""
    run = runs.Run(pages, {"W1": 10**9, "W3": 65536}, {row.replace("_", "-"): row for row in seconds})
    for row, every in seconds.items():
        for rep, value in enumerate(every):
            run.add("W1", row.replace("_", "-"), runs.Block(rep, [value], cpu=value / 2, others=0.0))
    return run


def verdicts(module: Any, *made: Any) -> dict[str, Any]:
    found, _ = module("targets").judged(made)
    return {f"{verdict.target.what} / {verdict.target.against}": verdict for verdict in found}


def test_a_ratio_is_taken_within_a_repetition_against_its_fastest_copy(module: Any) -> None:
    run = made_run(module("runs"), shm_await=[1.0, 2.0, 4.0], memcpy2=[0.9, 1.0, 9.0], numpy1=[2.0, 1.9, 2.0])
    verdict = verdicts(module, run)["W1 rate, shm-await / the fastest copy"]
    assert (verdict.spread.low, verdict.spread.mid, verdict.spread.high) == (0.5, 0.5, 0.9)
    assert verdict.bound == 0.8
    assert not verdict.met


def test_a_repetition_that_one_side_lacks_is_left_out(module: Any) -> None:
    run = made_run(module("runs"), shm_await=[1.0, 1.0], nixl=[3.0])
    verdict = verdicts(module, run)["W1 rate, shm-await / NIXL"]
    assert verdict.spread.mid == verdict.spread.low == 3.0
    assert verdict.met


def test_only_what_was_measured_is_judged(module: Any) -> None:
    targets, run = module("targets"), made_run(module("runs"), shm_await=[1.0], nixl=[3.0])
    judged, others = targets.judged([run])
    said = {verdict.target.what for verdict in judged}
    assert said == {"W1 rate, shm-await", "W1 CPU s per GB, shm-await"}
    assert len(judged) + len(others) == len(targets.TARGETS)


@pytest.mark.parametrize(("pages", "bound"), [("4k", 2.3), ("huge", 1.5)])
def test_pages_choose_the_bound(module: Any, pages: str, bound: float) -> None:
    run = made_run(module("runs"), pages, shm_await=[1.0], nixl=[2.0])
    verdict = verdicts(module, run)["W1 rate, shm-await / NIXL"]
    assert verdict.bound == bound
    assert verdict.met == (bound < 2.0)


def test_the_floor_of_a_consumed_key_is_the_sum_of_two(module: Any) -> None:
    floors, runs = module("floors").FLOORS, module("runs")
    run = made_run(runs)
    run.add("W3", "tcp-consumed", runs.Block(0, [300e-6], cpu=0.0, others=0.0))
    run.floors.append({floors[0]: [100e-6] * 3, floors[4]: [50e-6]})
    verdict = verdicts(module, run)["W3 time, tcp-consumed / round trip + crossings"]
    assert verdict.spread.mid == pytest.approx(2.0)
    assert not verdict.met


def test_faces_may_differ_either_way(module: Any) -> None:
    for await_, blocking in ((1.0, 1.5), (1.5, 1.0)):
        run = made_run(module("runs"), tcp_await=[await_], tcp_blocking=[blocking])
        verdict = verdicts(module, run)["W1 time, tcp-await / tcp-blocking, either way"]
        assert verdict.spread.mid == pytest.approx(1.5)
        assert not verdict.met


def test_merged_runs_count_by_their_medians(module: Any, tmp_path: Path) -> None:
    figures, runs = module("figures"), module("runs")
    paths = []
    for number, seconds in enumerate(([1.0, 1.0, 9.0], [2.0, 2.0, 2.0], [0.1, 4.0, 4.0])):
        paths.append(tmp_path / f"{number}.json")
        figures.save(paths[-1], runs=[runs.as_json(made_run(runs, tcp_await=seconds, tcp=[1.0, 1.0, 1.0]))])
    loaded = runs.load(paths)
    assert runs.samples(loaded, lambda run: run.mids("W1", "tcp-await")) == [1.0, 2.0, 4.0]
    verdict = verdicts(module, *loaded)["W1 rate, tcp-await / plain TCP sockets"]
    assert (verdict.spread.low, verdict.spread.mid, verdict.spread.high) == (0.25, 0.5, 1.0)
    ran = run("bench_pull", "--merge", *map(str, paths))
    assert ran.returncode == 0, ran.stderr
    assert "3 runs" in ran.stdout
    assert "0.50 (0.25..1.00)" in ran.stdout


def test_runs_with_other_pages_are_not_merged(module: Any, tmp_path: Path) -> None:
    figures, runs = module("figures"), module("runs")
    paths = [tmp_path / f"{pages}.json" for pages in ("4k", "huge")]
    for path in paths:
        figures.save(path, runs=[runs.as_json(made_run(runs, path.stem, tcp=[1.0]))])
    ran = run("bench_pull", "--merge", *map(str, paths))
    assert ran.returncode == 1
    assert "do not measure the same" in ran.stderr


def test_wrong_bytes_fail_the_run(module: Any, tmp_path: Path) -> None:
    figures, runs = module("figures"), module("runs")
    bad = made_run(runs, tcp=[1.0])
    bad.blocks["W1"]["tcp"][0].wrong = 7
    path = tmp_path / "bad.json"
    figures.save(path, runs=[runs.as_json(bad)])
    ran = run("bench_pull", "--merge", str(path))
    assert ran.returncode == 1
    assert "WRONG  tcp W1: 7 bytes" in ran.stdout


def test_a_picture_is_drawn(module: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'kvpull[bench]'")
    figures, runs = module("figures"), module("runs")
    path, picture = tmp_path / "run.json", tmp_path / "out.png"
    figures.save(path, runs=[runs.as_json(made_run(runs, tcp=[1.0], nixl=[0.5], memcpy1=[0.1]))])
    ran = run("bench_pull", "--merge", str(path), "--plot", str(picture))
    assert ran.returncode == 0, ran.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
