"""A process that runs checks is never waited for without a bound, and its end is told if it is not as it should be."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from kvpull_async.self_test.children import Child
from kvpull_async.self_test.lines import State, Step

Starter = Callable[..., Child]
LONG = 60.0


@pytest.fixture
def start() -> Iterator[Starter]:
    """Starts programs that have `steps`, and ends them with the test."""
    children: list[Child] = []

    def starting(program: str, *, patience: float = LONG) -> Child:
        text = "import os, sys, time\nfrom kvpull_async.self_test.lines import *\nsteps = Steps(1)\n"
        children.append(Child([sys.executable, "-c", text + textwrap.dedent(program)], patience=patience))
        return children[-1]

    yield starting
    for child in children:
        child.close()


def states(steps: Iterator[Step]) -> list[tuple[str, State]]:
    return [(step.name, step.state) for step in steps]


def test_what_a_process_tells_comes_in_order_and_a_good_end_is_not_told(start: Starter) -> None:
    child = start("""
        steps.run(1, "one", lambda: "")
        steps.run(2, "two", lambda: "")
        sys.exit(1)
    """)
    assert states(child.steps()) == [("one", State.OK), ("two", State.OK)]
    child.close()
    assert child.code == 1


def test_a_check_that_never_returns_has_failed_and_its_process_is_killed(start: Starter) -> None:
    child = start(
        """
        steps.run(1, "one", lambda: "")
        print("it says why", file=sys.stderr, flush=True)
        steps.run(4, "hanging", lambda: time.sleep(1000))
        """,
        patience=6,
    )
    *_, last = child.steps()
    assert (last.section, last.name, last.state) == (4, "hanging", State.FAILED)
    assert last.text == "no answer within 6 s; the process was killed"
    assert last.lines == ("it says why",)
    child.close()
    assert child.code == -9


def test_a_process_that_dies_in_a_check_is_told_with_its_last_words(start: Starter) -> None:
    child = start("""
        def die():
            os.write(2, b"a rule was broken\\n")
            os.abort()

        steps.run(3, "dying", die)
    """)
    (last,) = child.steps()
    assert (last.section, last.name, last.state) == (3, "dying", State.FAILED)
    assert last.text == "the process ended with exit code -6"
    assert last.lines == ("a rule was broken",)


def test_a_process_that_dies_between_checks_is_told_too(start: Starter) -> None:
    child = start("""
        steps.run(3, "well", lambda: "")
        os._exit(7)
    """)
    assert states(child.steps()) == [("well", State.OK), ("the process of these checks", State.FAILED)]


def test_what_a_process_notes_can_be_waited_for_and_it_ends_when_it_is_dismissed(start: Starter) -> None:
    child = start("""
        steps.note("address", "here")
        steps.run(7, "serving", lambda: sys.stdin.read() or "until the end")
    """)
    assert child.first("address").text == "here"
    child.dismiss()
    (last,) = child.steps()
    assert (last.name, last.state, last.text) == ("serving", State.OK, "until the end")
    child.close()
    assert child.code == 0


def test_a_process_that_ends_before_it_notes_anything_has_failed(start: Starter) -> None:
    assert start("").first("address").state is State.FAILED
    failing = start("steps.run(7, 'serving', lambda: 1 // 0)")
    assert failing.first("address").text.startswith("ZeroDivisionError")


def test_what_is_raised_beside_a_process_ends_it_at_once(start: Starter) -> None:
    child = start("steps.run(1, 'long', lambda: time.sleep(1000))")
    with pytest.raises(KeyboardInterrupt), child:
        raise KeyboardInterrupt
    assert child.code == -9
