"""docs/status-codes.md has every status with its number, and knows which of them the source gives."""

from __future__ import annotations

import re

import pytest

from kvpull_async import LLMStatusCode
from tests import house

PAGE = (house.ROOT / "docs" / "status-codes.md").read_text()
GIVEN, _, NOT_GIVEN = PAGE.partition("\n## Codes that kvpull does not give\n")
ROW = re.compile(r"^\| `(LLM_\w+)` \| (-?\d+) \| (.+) \|$", re.MULTILINE)


def rows(text: str) -> list[tuple[str, int]]:
    return [(name, int(number)) for name, number, _ in ROW.findall(text)]


def names_in_source() -> set[str]:
    """Statuses that the library's own code names, outside the list of them and outside what helps testing."""
    sources = [path for path in (house.ROOT / "src").rglob("*.py") if path.name != "status.py"]
    if not sources:
        pytest.skip("an installed package is tested; there are no sources beside it")
    texts = [path.read_text() for path in sources if "testing" not in path.parts]
    return {name for text in texts for name in re.findall(r"LLMStatusCode\.(LLM_\w+)", text)}


def test_every_status_stands_there_once_with_its_number() -> None:
    listed = rows(PAGE)
    assert len(listed) == len(set(listed))
    assert dict(listed) == {code.name: int(code) for code in LLMStatusCode}


def test_those_in_the_first_table_are_given_by_the_source_and_the_others_are_not() -> None:
    assert {name for name, _ in rows(GIVEN)} == names_in_source() | {"LLM_SUCCESS"}
    assert {name for name, _ in rows(NOT_GIVEN)}.isdisjoint(names_in_source())


def test_every_status_that_is_given_says_when_whether_to_repeat_and_what_to_do() -> None:
    for name, _, told in ROW.findall(GIVEN):
        cells = [cell.strip() for cell in told.split(" | ")]
        assert len(cells) == 3, name
        assert all(cells), name


def test_every_status_that_a_text_mentions_exists() -> None:
    mentioned = set(re.findall(r"\bLLM_[A-Z_]+\b", PAGE))
    assert mentioned == set(LLMStatusCode.__members__)
