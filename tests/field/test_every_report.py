"""Failures that users of systems of this kind reported, by theme and number: each has a test here.

A report stands for its whole kind. Its number is in the names of its tests: those of 5.10 begin with `test_5_10_`. The
numbers are those of a larger collection of reports, so they have gaps: what is of another kind of system is left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FIELD = Path(__file__).parent
THEMES = {
    "1": ("timeouts and hangs", (1, 2, 6, 7, 8, 9, 10, 11, 12)),
    "2": ("set-up, teardown and return of links", (1, 3, 5, 6, 7, 13, 14)),
    "3": ("peers that die, processes that exit", (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12)),
    "4": ("concurrency and cancellation", (2, 3, 4, 7, 8, 9, 10)),
    "5": ("wrong data", (2, 4, 5, 6, 9, 10, 11, 15)),
    "6": ("registered memory, and leaks", (1, 3, 4, 5, 7, 8, 9, 11, 12)),
    "7": ("what operators see", (2, 3, 4, 5, 6)),
    "8": ("speed", (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13)),
    "9": ("the API in use", (1, 2, 4, 5, 6, 7)),
    "10": ("installation", (1, 3, 4, 5)),
    "11": ("security", (2, 3, 4, 5, 6)),
}
REPORTS = [f"{theme}.{number}" for theme, (_, numbers) in THEMES.items() for number in numbers]


def every_test() -> Iterator[tuple[str, str]]:
    """(file, name) of every test in this folder."""
    for path in sorted(FIELD.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield path.name, node.name


def reports_of(name: str) -> set[str]:
    """The reports in a test's name: `test_1_10_...` is about one, `test_6_3_and_6_1_...` about two."""
    leading = re.match(r"test_\d+_\d+(?:_and_\d+_\d+)*(?=_)", name)
    return set() if leading is None else {f"{a}.{b}" for a, b in re.findall(r"(\d+)_(\d+)", leading[0])}


def test_every_report_has_a_test() -> None:
    tested = {report for _, name in every_test() for report in reports_of(name)}
    assert [report for report in REPORTS if report not in tested] == []


def test_no_test_is_for_a_report_that_does_not_exist() -> None:
    assert len(set(REPORTS)) == len(REPORTS)
    assert {name for _, name in every_test() for report in reports_of(name) if report not in REPORTS} == set()


def test_each_report_is_tested_in_the_module_of_its_theme() -> None:
    for file, name in every_test():
        for report in reports_of(name):
            assert file.startswith(f"test_{report.partition('.')[0]}_"), f"{name} in {file}"
