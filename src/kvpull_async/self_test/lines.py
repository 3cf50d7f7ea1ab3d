"""What the self-test's processes tell each other: one line of JSON when a check begins, and one with how it went.

Checks run in a process of their own, since the call of a sick device may never return. This module must not know what
is checked.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

__all__ = ["Absent", "State", "Step", "Steps", "Stop", "Wrong", "parse"]


class State(str, Enum):
    """How a check went."""

    BEGUN = "begun"
    """It is under way: whoever hears nothing more knows where it hangs."""
    OK = "ok"
    FAILED = "FAILED"
    SKIPPED = "skipped"
    NOTED = "noted"
    """No check: something that the other process has to know."""


@dataclass(frozen=True)
class Step:
    """One line: `section` is its number, `seconds` what it took, `lines` are more to print."""

    section: int
    name: str
    state: State
    text: str = ""
    seconds: float = 0.0
    lines: tuple[str, ...] = ()


class Wrong(Exception):
    """The device does something else than the library takes for granted."""


class Absent(Exception):
    """What is to be checked is not there, and need not be."""


class Stop(Exception):
    """What failed is needed by all that would follow."""


class Steps:
    """Runs checks one after another and writes how they went to a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.failed: int = 0

    def run(self, section: int, name: str, check: Callable[[], str], *, needed: bool = False) -> None:
        """`check` answers what there is to say of its success, or raises. Stop where a `needed` one fails."""
        self._say(Step(section, name, State.BEGUN))
        began = time.monotonic()
        lines: tuple[str, ...] = ()
        try:
            state, text = State.OK, check()
        except Absent as absent:
            state, text = State.SKIPPED, str(absent)
        except Exception as error:  # noqa: BLE001  (any failure is an answer, and the next check may do better)
            state, text, lines = State.FAILED, told(error), tuple(getattr(error, "attempts", ()))
            text = text.partition(f" {lines[0]}")[0] if lines else text  # they are printed one by one
            self.failed += 1
        self._say(Step(section, name, state, text, time.monotonic() - began, lines))
        if state is State.FAILED and needed:
            raise Stop

    def note(self, name: str, text: str) -> None:
        """For the process that started this one."""
        self._say(Step(0, name, State.NOTED, text))

    def _say(self, step: Step) -> None:
        data = json.dumps({**asdict(step), "state": step.state.value}).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]


def told(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, Wrong) else f"{type(error).__name__}: {text}"


def parse(line: bytes) -> Step:
    """What `Steps` wrote."""
    fields: dict[str, Any] = json.loads(line)
    return Step(**{**fields, "state": State(fields["state"]), "lines": tuple(fields["lines"])})
