"""The chaos run and the soak: short ones end well, and one that is sabotaged does not. Times are not judged here."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_benchmarks import module, run

__all__ = ["module"]  # a fixture

FEW = ("--prefills", "2", "--decodes", "2", "--workers", "3", "--quick")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["tcp", "shm"])
def test_a_short_chaos_run_breaks_no_promise(path: str, tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    ran = run("chaos", "--path", path, "--seconds", "10", "--seed", "3", *FEW, "--json", str(told))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(told.read_text())
    assert found["counts"]["status: ok"] > 50
    assert found["faults"]
    assert found["violations"] == []


@pytest.mark.slow
@pytest.mark.parametrize(("sabotage", "kind"), [("flip", "wrong bytes"), ("stale", "wrong bytes"), ("late", "settled")])
def test_a_chaos_run_that_is_sabotaged_fails_and_says_where(sabotage: str, kind: str, tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    few = (*FEW, "--every", "0", "--seconds", "6", "--seed", "3")
    ran = run("chaos", "--path", "shm", *few, "--sabotage", sabotage, "--json", str(told))
    assert ran.returncode == 1, ran.stdout + ran.stderr
    kinds = {found for found, _ in json.loads(told.read_text())["violations"]}
    assert kinds == {kind}
    assert f"VIOLATION  {kind}" in ran.stdout
    assert "seed 3" in ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", ["tcp", "shm"])
def test_a_short_soak_finds_no_growth_and_one_warning_for_each_cut(path: str) -> None:
    ran = run("soak", "--path", path, "--pulls", "2000", "--every", "200")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "10 cuts" in ran.stdout


# --- content ---------------------------------------------------------------------------------------------------------


def test_words_turn_back_into_what_they_were_made_of(module: Any) -> None:
    content = module("bad_days.content")
    array = module("numpy").zeros(content.MOST, "u1")
    first, second = content.Identity(1, 200, 4095, 2**24 - 1, 1023, 63), content.Identity(0, 0, 0, 0, 0, 0)
    content.fill(array, first)
    content.fill(array[: content.MOST // 4], second)
    assert content.identities(array) == {first: 3 * content.MOST // 32, second: content.MOST // 32}


@pytest.mark.parametrize("change", ["flip", "shift", "tensor", "generation", "torn"])
def test_bytes_that_are_not_those_are_seen(module: Any, change: str) -> None:
    content = module("bad_days.content")
    right = content.Identity(1, 2, 3, 4, 5, 6)
    array = module("numpy").zeros(4096, "u1")
    content.fill(array, right)
    assert content.holds(array, right)
    assert content.holds(array[13:999], right, 13)
    if change == "flip":
        array[4095] ^= 1
    elif change == "shift":
        array[8:] = array[:-8].copy()
    elif change == "torn":
        content.fill(array[:2048], right._replace(generation=4))
    else:
        content.fill(array, right._replace(**{change: 0}))
    assert not content.holds(array, right)
    assert "4096 bytes differ" in content.story(array, right)


def test_what_does_not_fit_an_identity_is_refused(module: Any) -> None:
    content = module("bad_days.content")
    with pytest.raises(ValueError, match="1024"):
        content.Identity(1, 2, 3, 4, 1024, 6).packed()


# --- schedules -------------------------------------------------------------------------------------------------------


def made(module: Any, seed: int) -> list[Any]:
    more = {"prefills": 3, "decodes": 3, "every": 0.3, "heartbeat": 2.0, "lines": True}
    found: list[Any] = module("bad_days.schedule").schedule(seed, 0, 300.0, **more)
    return found


def test_a_seed_always_makes_the_same_schedule(module: Any) -> None:
    assert made(module, 7) == made(module, 7)
    assert made(module, 7) != made(module, 8)


def test_faults_leave_time_to_recover_and_the_first_of_each_role_alive(module: Any) -> None:
    touches = module("bad_days.schedule").touches
    faults = made(module, 7)
    assert len(faults) > 100
    for number, fault in enumerate(faults):
        assert fault.at + fault.lasts < 300.0
        assert fault.kind not in ("kill", "leave") or fault.target[1] != 0
        for later in faults[number + 1 :]:
            if touches(fault.target, later.target):
                assert later.at >= fault.at + fault.lasts
