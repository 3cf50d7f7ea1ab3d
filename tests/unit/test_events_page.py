"""docs/events.md has every event and counter that the source names, with levels and fields, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest

from tests import house

PAGE = house.ROOT / "docs" / "events.md"
EVENT = re.compile(r"[a-z]+\.[a-z_]+")
LEVELS = ("debug", "info", "warning", "error")


@dataclass
class Told:
    """One event: where the source or the page tells of it."""

    levels: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)


@dataclass
class Found:
    events: dict[str, Told] = field(default_factory=dict)
    bound: set[str] = field(default_factory=set)
    """Fields that loggers are bound to."""
    counters: set[str] = field(default_factory=set)
    unnamed: list[str] = field(default_factory=list)
    """Calls of a logger whose event is not written there, so that nobody can look it up."""


def texts(node: ast.AST) -> list[str]:
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def keywords(call: ast.Call) -> set[str]:
    return {keyword.arg for keyword in call.keywords if keyword.arg is not None}


def name_of(node: ast.expr) -> str:
    """`_log` of `self._transport._log`, and of `self._log.bind(...)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def look(trees: Iterable[ast.AST]) -> Found:
    found = Found()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                look_at_call(node, found)
            elif isinstance(node, ast.FunctionDef) and node.name == "snapshot":
                found.counters.update(text for made in dicts(node) for text in made)
    return found


def dicts(node: ast.AST) -> Iterator[list[str]]:
    for part in ast.walk(node):
        if isinstance(part, ast.Dict):
            yield [text for key in part.keys if key is not None for text in texts(key)]


def look_at_call(call: ast.Call, found: Found) -> None:
    if name_of(call.func) == "emit" and len(call.args) == 3:
        for event in filter(EVENT.fullmatch, texts(call.args[1])):
            told = found.events.setdefault(event, Told())
            told.levels |= set(texts(call.args[0])) & set(LEVELS)
            told.fields |= {field for made in dicts(call.args[2]) for field in made}
    if not isinstance(call.func, ast.Attribute):
        return
    method, owner = call.func.attr, name_of(call.func.value).lstrip("_")
    if owner == "counters" and method.startswith("add"):
        found.counters.update(text for argument in call.args for text in texts(argument))
    elif owner == "log" and method == "bind":
        found.bound |= keywords(call)
    elif owner == "log" and method in LEVELS:
        events = [event for event in texts(call.args[0]) if EVENT.fullmatch(event)]
        if not events:
            found.unnamed.append(ast.unparse(call))
        for event in events:
            told = found.events.setdefault(event, Told())
            told.levels.add(method)
            told.fields |= keywords(call)
    elif name_of(call.func) == "Log":
        found.bound |= keywords(call)


@pytest.fixture(scope="module")
def source() -> Found:
    tree = house.Tree(house.ROOT / "src")
    if not tree.modules:
        pytest.skip("an installed package is tested; there are no sources beside it")
    return look(module.tree for module in tree.modules.values())


def rows(columns: int) -> list[list[str]]:
    lines = [
        line.strip("|").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"
    ]
    return [[cell.strip() for cell in line] for line in lines if len(line) == columns]


def documented_events() -> dict[str, Told]:
    named = {}
    for event, level, _, fields in rows(4):
        assert event.strip("`") not in named, f"{event} stands there twice"
        named[event.strip("`")] = Told(set(level.lower().split(", ")), set(re.findall(r"`([a-z_]+)`", fields)))
    return named


def documented_counters() -> list[str]:
    return [name.strip("`") for name, _ in rows(2)]


def test_the_page_has_every_event_and_no_other(source: Found) -> None:
    assert len(source.events) > 30
    assert set(documented_events()) == set(source.events)


def test_every_event_is_written_out_where_it_is_logged(source: Found) -> None:
    assert source.unnamed == []


def test_every_event_has_its_levels(source: Found) -> None:
    assert {event: told.levels for event, told in documented_events().items()} == {
        event: told.levels for event, told in source.events.items()
    }


def test_the_page_has_every_field_that_an_event_is_given(source: Found) -> None:
    page = documented_events()
    missing = {event: told.fields - page[event].fields for event, told in source.events.items() if event in page}
    assert not {event: fields for event, fields in missing.items() if fields}


def test_an_event_has_no_field_that_nobody_gives_it(source: Found) -> None:
    """Those of `pull.*` and `push.*` are put together at run time: see tests/integration/test_logs.py."""
    told = {event: told for event, told in documented_events().items() if not event.startswith(("pull.", "push."))}
    unknown = {event: row.fields - source.events[event].fields - source.bound for event, row in told.items()}
    assert not {event: fields for event, fields in unknown.items() if fields}


def test_the_page_has_every_counter_and_no_other(source: Found) -> None:
    assert len(source.counters) > 15
    assert sorted(documented_counters()) == sorted(source.counters)


def test_what_is_looked_for_is_seen() -> None:
    code = """
emit("warning" if bad else "debug", "a.failed", {"status": 4})
self._log.bind(peer=1).info("a.begun", reason="x")
self._context.log.error("a.begun", where=2)
log.info(name)
self._counters.add("some", 3)
node.counters.add_elsewhere({"others": 1})
def snapshot():
    return {"more": 1}
"""
    found = look([ast.parse(code)])
    assert found.events["a.failed"] == Told({"warning", "debug"}, {"status"})
    assert found.events["a.begun"] == Told({"info", "error"}, {"reason", "where"})
    assert found.bound == {"peer"}
    assert found.counters == {"some", "others", "more"}
    assert found.unnamed == ["log.info(name)"]
