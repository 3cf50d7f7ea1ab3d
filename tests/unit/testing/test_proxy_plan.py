"""Plans: the same seed makes the same faults, whatever else was asked before."""

from __future__ import annotations

import pytest

from kvpull_async.testing.proxy_plan import QUIET, Fault, FaultKind, Plan, Schedule, Way


def test_the_same_seed_makes_the_same_plans_in_whatever_order_they_are_asked_for() -> None:
    forwards = [Schedule(7)(number) for number in range(50)]
    schedule = Schedule(7)
    backwards = [schedule(number) for number in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert forwards != [Schedule(8)(number) for number in range(50)]
    assert Schedule(7).describe() == schedule.describe()


def test_a_schedule_uses_every_kind_and_offsets_of_every_size() -> None:
    schedule = Schedule(1, share=1.0, span=1 << 20, most=3)
    faults = [fault for number in range(500) for fault in schedule(number).faults]
    assert {fault.kind for fault in faults} == set(QUIET)
    assert {fault.way for fault in faults} == set(Way)
    assert min(fault.at for fault in faults) == 0
    assert max(fault.at for fault in faults) < 1 << 20
    assert 0.1 < sum(fault.at < 64 for fault in faults) / len(faults) < 0.6


def test_the_share_says_how_many_connections_are_harmed() -> None:
    assert not any(Schedule(3, share=0)(number).faults for number in range(50))
    assert all(Schedule(3, share=1)(number).faults for number in range(50))
    harmed = sum(bool(Schedule(3, share=0.5)(number).faults) for number in range(400))
    assert 100 < harmed < 300


def test_nothing_is_planned_behind_a_cut() -> None:
    schedule = Schedule(5, share=1.0, most=5)
    for number in range(200):
        for way in Way:
            kinds = [fault.kind for fault in schedule(number).faults if fault.way is way]
            assert not {FaultKind.CUT, FaultKind.CLOSE} & set(kinds[:-1])


def test_corruption_comes_only_when_it_is_asked_for() -> None:
    assert FaultKind.CORRUPT not in QUIET
    faults = [fault for number in range(50) for fault in Schedule(2, kinds=[FaultKind.CORRUPT], share=1)(number).faults]
    assert {fault.kind for fault in faults} == {FaultKind.CORRUPT}
    assert all(0 < fault.value < 256 for fault in faults)


def test_a_plan_says_what_it_will_do() -> None:
    plan = Plan((Fault(FaultKind.DELAY, Way.BACK, 12, 5), Fault(FaultKind.CUT, at=99)))
    assert plan.describe() == "delay 5 back after 12 bytes, cut there after 99 bytes"
    assert Plan().describe() == "nothing"
    text = Schedule(42).describe(3)
    assert "seed=42" in text
    assert text.count("\n") == 3


@pytest.mark.parametrize("wrong", [{"at": -1}, {"value": -1}, {"value": 256}, {"value": 0}])
def test_a_fault_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"value|at"):
        Fault(FaultKind.CORRUPT, **{"value": 1, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"kinds": ()}, {"most": 0}, {"span": 0}, {"longest": 0}])
def test_a_schedule_of_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cannot be empty"):
        Schedule(1, **wrong)  # type: ignore[arg-type]
