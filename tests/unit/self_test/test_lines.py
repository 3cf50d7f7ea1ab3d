"""Every check ends in one line, whatever it does; what is written can be read again."""

from __future__ import annotations

import os

import pytest

from kvpull_async.memory._acl import AclMissing
from kvpull_async.self_test.lines import Absent, State, Step, Steps, Stop, Wrong, parse


class Told:
    """Steps, and what they have written so far."""

    def __init__(self) -> None:
        self._reading, writing = os.pipe()
        self.steps = Steps(writing)
        self._writing = writing

    def ended(self) -> list[Step]:
        os.close(self._writing)
        with os.fdopen(self._reading, "rb") as file:
            return [parse(line) for line in file]


def raising(error: BaseException) -> str:
    raise error


def test_a_check_says_that_it_begins_and_how_it_went() -> None:
    told = Told()
    told.steps.run(4, "copies", lambda: "every byte is right")
    begun, ended = told.ended()
    assert (begun.section, begun.name, begun.state) == (4, "copies", State.BEGUN)
    assert (ended.section, ended.name, ended.state, ended.text) == (4, "copies", State.OK, "every byte is right")
    assert ended.seconds >= 0
    assert told.steps.failed == 0


def test_what_is_not_there_is_skipped_and_what_is_wrong_has_failed() -> None:
    told = Told()
    told.steps.run(5, "a", lambda: raising(Absent("no such call")))
    told.steps.run(5, "b", lambda: raising(Wrong("byte 7 is 0x01")))
    told.steps.run(5, "c", lambda: raising(ZeroDivisionError("two\nlines")))
    states = [(step.state, step.text) for step in told.ended() if step.state is not State.BEGUN]
    assert states == [
        (State.SKIPPED, "no such call"),
        (State.FAILED, "byte 7 is 0x01"),
        (State.FAILED, "ZeroDivisionError: two lines"),
    ]
    assert told.steps.failed == 2


def test_all_attempts_to_find_a_library_are_told_one_by_one() -> None:
    told = Told()
    told.steps.run(1, "library", lambda: raising(AclMissing("$HOME is not set", "libx.so: not found")))
    last = told.ended()[-1]
    assert last.lines == ("$HOME is not set", "libx.so: not found")
    assert "not found" not in last.text


def test_nothing_follows_a_failure_of_what_is_needed() -> None:
    told = Told()
    with pytest.raises(Stop):
        told.steps.run(2, "devices", lambda: raising(Wrong("none")), needed=True)
    told.steps.run(2, "more", lambda: "", needed=True)
    assert [step.state for step in told.ended()] == [State.BEGUN, State.FAILED, State.BEGUN, State.OK]


def test_an_interrupted_check_ends_the_checks() -> None:
    told = Told()
    with pytest.raises(KeyboardInterrupt):
        told.steps.run(2, "devices", lambda: raising(KeyboardInterrupt()))
    assert [step.state for step in told.ended()] == [State.BEGUN]


def test_a_note_is_for_whoever_listens() -> None:
    told = Told()
    told.steps.note("address", "127.0.0.1:4")
    assert told.ended() == [Step(0, "address", State.NOTED, "127.0.0.1:4")]
