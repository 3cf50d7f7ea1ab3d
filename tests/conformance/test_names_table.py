"""The table of docs/coming-from-llm_datadist.md: every public name of the original once, its verdict true."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kvpull_async
import kvpull_sync
from kvpull_async.config import kinds, settings
from tests import original_api

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-llm_datadist.md"
VERDICTS = {"same", "better", "not meaningful"}
PACKAGES = pytest.mark.parametrize("package", [kvpull_async, kvpull_sync], ids=lambda package: package.__name__)

Row = tuple[list[str], str, str]


def section(title: str) -> str:
    return PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(table: str) -> list[Row]:
    """(names, verdict, how or why) of each row; names as `original_api.names` has them."""
    found = re.findall(r"^\| (`.*) \| ([a-z ]+) \|(.*)\|$", table, re.MULTILINE)
    assert len(found) == len(re.findall(r"^\| `", table, re.MULTILINE)), "a row has not three columns"
    return [(full_names(cell), verdict, text.strip()) for cell, verdict, text in found]


def full_names(cell: str) -> list[str]:
    """What stands in backticks: `.name` belongs to the class before it, signatures are left out, keywords are not."""
    names: list[str] = []
    for written in re.findall(r"`([^`]+)`", cell):
        name, _, arguments = written.partition("(")
        if name.startswith("."):
            name = names[-1].split(".")[0] + name
        keyword = re.fullmatch(r"(\w+)=\)", arguments)
        names.append(f"{name}.{keyword[1]}" if keyword else name)
    return names


def signatures(table: str) -> dict[str, str]:
    """By name, the parameters that the table shows."""
    found: dict[str, str] = {}
    for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        for name, written in zip(full_names(cell), re.findall(r"`([^`]+)`", cell), strict=True):
            shown = re.fullmatch(r"[\w.]+\((.*)\)", written)
            if shown and name.rpartition(".")[2] + "=" != shown[1]:
                found[name] = shown[1]
    return found


TABLE = section("Names")
ROWS = rows(TABLE)


def verdict_of(name: str) -> str:
    (verdict,) = {verdict for names, verdict, _ in ROWS if name in names}
    return verdict


def test_every_name_of_the_original_stands_there_once() -> None:
    listed = [name for names, _, _ in ROWS for name in names]
    assert sorted(name for name in set(listed) if listed.count(name) > 1) == []
    assert set(listed) == original_api.names()


def test_every_row_has_a_verdict_and_says_how_or_why() -> None:
    assert {verdict for _, verdict, _ in ROWS} == VERDICTS
    assert not [names for names, verdict, text in ROWS if verdict != "same" and not text]


def test_what_a_row_points_to_is_on_the_page() -> None:
    headings = re.findall(r"^##+ (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert not set(re.findall(r"\]\(#([^)]+)\)", PAGE.read_text(encoding="utf-8"))) - anchors


def test_every_difference_is_found_from_a_name() -> None:
    entries = re.findall(r"^### (.+)$", section("Deliberate differences"), re.MULTILINE)
    assert len(entries) > 50
    assert not [entry for entry in entries if f"](#{entry})" not in TABLE]


@PACKAGES
def test_what_is_the_same_or_better_is_there(package: ModuleType) -> None:
    keys = {name for names, _, _ in ROWS for name in names if name in original_api.OPTION_KEYS}
    for names, verdict, _ in ROWS:
        for name in set(names) - keys - original_api.INTERNAL:
            owner, *rest = name.split(".")
            assert owner in package.__all__, name
            assert not rest or original_api._has(getattr(package, owner), rest[0]), (name, verdict)


@PACKAGES
def test_the_signatures_are_ours(package: ModuleType) -> None:
    shown = {name: text for name, text in signatures(TABLE).items() if "Key(" not in name}
    wanted = {
        owner if name == "__init__" else f"{owner}.{name}": original_api.our_signature(package, owner, name)
        for owner, name in original_api.methods()
    }
    assert len(shown) > 50
    for name in set(shown) - {"CacheKey", "BlocksCacheKey", "LlmConfig", "LayerSynchronizer"}:  # the first two: *args
        assert shown[name] == wanted[name].replace("<Placement.DEVICE: 1>", "Placement.DEVICE"), name


def test_what_is_internal_is_not_here() -> None:
    for name in original_api.INTERNAL:
        owner, _, member = name.rpartition(".")
        assert not hasattr(getattr(kvpull_sync, owner) if owner else kvpull_sync, member)
        assert verdict_of(name) == "not meaningful"


def test_an_option_stands_beside_its_property() -> None:
    for name, option in vars(kvpull_async.LLMConfig).items():
        key = getattr(option, "key", "kvpull.")
        if not key.startswith("kvpull."):
            (names,) = [names for names, _, _ in ROWS if f"LLMConfig.{name}" in names]
            assert names[names.index(f"LLMConfig.{name}") + 1] == key


def test_options_have_a_meaning_where_the_table_says_so() -> None:
    without = {key for key in original_api.OPTION_KEYS if verdict_of(key) == "not meaningful"}
    assert without == settings._IGNORED
    assert original_api.OPTION_KEYS - without == {
        key for key in settings._READ if not key.startswith(kinds.own_key(""))
    }


@PACKAGES
def test_what_is_ours_stands_under_added_here(package: ModuleType) -> None:
    """Exports, public members and keyword-only parameters that the original does not have."""
    text = section("Added here") + TABLE
    for name in package.__all__:
        assert name in original_api.EXPORTS or f"`{name}`" in text, name
        for own in own_names(name, getattr(package, name)):
            assert re.search(rf"\b{own}\b", section("Added here")), (name, own)


def own_names(name: str, made: Any) -> set[str]:
    if not inspect.isclass(made) or name in original_api.ENUMS or issubclass(made, Exception) or name == "LlmConfig":
        return set()
    members = original_api.public_names(made) | set(getattr(made, "__dataclass_fields__", ()))
    keywords = {
        parameter.name
        for member in members
        if callable(getattr(made, member, None))
        for parameter in inspect.signature(getattr(made, member)).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    theirs = {written.rpartition(".")[2] for written in original_api.names() if written.startswith(f"{name}.")}
    return members - theirs | keywords
