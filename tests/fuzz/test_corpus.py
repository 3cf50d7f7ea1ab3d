"""Every input that is kept, against its target; and a short run of random ones. Neither needs a fuzzer."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from tests.fuzz.blind import damaged
from tests.fuzz.pullers import Puller
from tests.fuzz.sources import Service
from tests.fuzz.targets import CORPUS, TARGETS, Target, inputs

SMOKE = 2.0
"""Seconds for each target."""


@pytest.fixture(scope="module", params=sorted(TARGETS))
def named(request: pytest.FixtureRequest) -> Iterator[tuple[str, Target]]:
    target = TARGETS[request.param]()
    yield request.param, target
    if isinstance(target, (Puller, Service)):
        target.close()


def test_every_target_has_a_corpus_and_none_is_large() -> None:
    kept = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in kept} == set(TARGETS)
    assert len(kept) < 200
    assert sum(path.stat().st_size for path in kept) < 300_000


@pytest.mark.allow_leak(".*")  # a target keeps its loop and its memory for all of its inputs
def test_what_is_kept_holds(named: tuple[str, Target]) -> None:
    name, target = named
    found = inputs(name)
    assert found
    for path in found:
        _try(target, path.read_bytes(), path.name)


@pytest.mark.allow_leak(".*")
def test_random_inputs_hold(named: tuple[str, Target]) -> None:
    name, target = named
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    known = [path.read_bytes() for path in inputs(name)]
    until, count = time.monotonic() + SMOKE, 0
    while time.monotonic() < until:
        data = damaged(known, rng)
        _try(target, data, f"input {count} of seed {seed}")
        count += 1
    assert count


def _try(target: Target, data: bytes, what: str) -> None:
    try:
        target(data)
    except Exception as error:
        raise AssertionError(f"{what}: {data.hex()} (the bytes are to be kept in the corpus, as crash-...)") from error
