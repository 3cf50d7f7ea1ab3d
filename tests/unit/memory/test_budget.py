"""Bytes of one placement: what is left, what is refused, and that threads do not count each other away."""

from __future__ import annotations

import threading

import pytest

from kvpull_async.memory.budget import Budget
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values import Placement


def test_what_is_left_is_given_and_one_byte_more_is_not() -> None:
    budget = Budget(Placement.DEVICE, 100)
    budget.reserve(60)
    budget.reserve(40)
    with pytest.raises(LLMException, match=r"DEVICE memory: 1 bytes asked for, 0 of 100 are free") as caught:
        budget.reserve(1)
    assert caught.value.status_code == LLMStatusCode.LLM_OUT_OF_MEMORY
    assert budget.used == 100


def test_what_comes_back_can_be_had_again() -> None:
    budget = Budget(Placement.HOST, 100)
    budget.reserve(100)
    budget.give_back(30)
    budget.reserve(30)
    assert budget.used == 100


def test_without_a_limit_it_only_counts() -> None:
    budget = Budget(Placement.HOST, None)
    budget.reserve(2**60)
    assert budget.used == 2**60
    assert "HOST" in repr(budget)
    assert str(2**60) in repr(budget)


def test_nothing_fits_in_nothing() -> None:
    budget = Budget(Placement.DEVICE, 0)
    budget.reserve(0)
    with pytest.raises(LLMException, match="0 of 0 are free"):
        budget.reserve(1)


def test_threads_never_get_more_than_there_is() -> None:
    budget, got = Budget(Placement.DEVICE, 1000), []

    def work() -> None:
        for _ in range(2000):
            try:
                budget.reserve(300)
            except LLMException:
                continue
            got.append(budget.used)
            budget.give_back(300)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.used == 0
    assert got
    assert max(got) <= 1000
