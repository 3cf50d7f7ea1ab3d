"""The source tree keeps the house rules of tests/house.py, and each rule sees its own violation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests import house

TREE_RULES = {
    "every module has a level": house.unknown_parts,
    "imports go down": house.upward_imports,
    "grouping packages stay empty": house.imports_in_empty_packages,
    "the blocking API uses public names": house.sync_imports,
    "pure parts stay pure": house.impure_imports,
    "reserved libraries": house.reserved_imports,
    "links, pulls and serving know contracts only": house.concrete_imports,
    "no cycles": house.cycles,
}


def expect_none(violations: Iterable[str]) -> None:
    found = list(violations)
    assert not found, "\n".join(["", *found])


@pytest.fixture(scope="module")
def tree() -> house.Tree:
    tree = house.Tree(house.ROOT / "src")
    assert tree.modules, "no sources found"
    return tree


@pytest.mark.parametrize("rule", TREE_RULES.values(), ids=TREE_RULES.keys())
def test_the_tree_keeps_the_rule(tree: house.Tree, rule) -> None:
    expect_none(rule(tree))


def test_files_and_functions_stay_small() -> None:
    expect_none(house.oversize(house.ROOT))


def test_every_source_module_has_its_unit_test_module(tree: house.Tree) -> None:
    expect_none(house.untested_modules(tree, house.ROOT / "tests"))


def test_the_exceptions_name_modules_and_tests_that_exist(tree: house.Tree) -> None:
    for module, test in house.TESTED_ELSEWHERE.items():
        assert module not in tree.modules or (house.ROOT / test).exists(), module


# Each rule must see its own violation: {rule: ({file: source}, what the message contains)}.
VIOLATIONS = {
    house.unknown_parts: ({"kvpull_async/utils.py": ""}, "kvpull_async.utils"),
    house.upward_imports: (
        {"kvpull_async/plan.py": "from kvpull_async import engine", "kvpull_async/engine.py": ""},
        "engine",
    ),
    house.imports_in_empty_packages: ({"kvpull_async/memory/__init__.py": "from . import base"}, "memory"),
    house.sync_imports: ({"kvpull_sync/face.py": "from kvpull_async.registry import Registry"}, "registry"),
    house.impure_imports: ({"kvpull_async/plan.py": "def f():\n    import socket"}, "plan.py:2"),
    house.reserved_imports: ({"kvpull_async/link.py": "import async_timeout"}, "async_timeout"),
    house.concrete_imports: ({"kvpull_async/link.py": "from .transport.tcp import Tcp"}, "transport.tcp"),
    house.cycles: (
        {
            "kvpull_async/values/__init__.py": "from .desc import CacheDesc",
            "kvpull_async/values/desc.py": "from kvpull_async.values import keys",
            "kvpull_async/values/keys.py": "from kvpull_async.values import CacheDesc",
        },
        "kvpull_async.values -> kvpull_async.values.desc -> kvpull_async.values.keys -> kvpull_async.values",
    ),
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = root / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return root / "src"


@pytest.mark.parametrize("rule", VIOLATIONS, ids=lambda rule: rule.__name__)
def test_the_rule_sees_its_violation(tmp_path: Path, rule) -> None:
    files, expected = VIOLATIONS[rule]
    assert any(expected in message for message in rule(house.Tree(write(tmp_path, files))))


@pytest.mark.parametrize("rule", TREE_RULES.values(), ids=TREE_RULES.keys())
def test_the_rules_accept_what_they_should(tmp_path: Path, rule) -> None:
    files = {
        "kvpull_async/__init__.py": "from .face import LLMDataDist",
        "kvpull_async/face.py": "from kvpull_async.engine import Engine",
        "kvpull_async/engine.py": "import asyncio\nfrom . import link, plan",
        "kvpull_async/link.py": "from kvpull_async.transport.base import DataPath\nimport socket",
        "kvpull_async/plan.py": "import numpy\nfrom .values import CacheDesc",
        "kvpull_async/memory/host.py": "import ctypes\nfrom .base import Region",
        "kvpull_async/transport/nixl.py": "def agent():\n    import nixl",
        "kvpull_sync/face.py": "from kvpull_async import LLMException\nfrom kvpull_async.entry import Engine",
    }
    expect_none(rule(house.Tree(write(tmp_path, files))))


def test_sizes_are_seen(tmp_path: Path) -> None:
    body = "    pass\n" * house.MAX_FUNCTION_LINES
    write(tmp_path, {"a.py": f"def long():\n{body}", "b.py": "x = 1\n" * (house.MAX_FILE_LINES + 1)})
    assert [message.partition(",")[0] for message in house.oversize(tmp_path)] == [
        f"src/a.py:1 long: {house.MAX_FUNCTION_LINES + 1} lines",
        f"src/b.py: {house.MAX_FILE_LINES + 1} lines",
    ]


def test_a_shared_module_name_needs_its_parents_name(tmp_path: Path) -> None:
    names = ["memory/base", "transport/base", "values/desc", "plan", "_deadline", "face"]
    files = {f"kvpull_async/{name}.py": "" for name in names} | {"kvpull_sync/face.py": ""}
    tree = house.Tree(write(tmp_path, files))
    unit = tmp_path / "tests" / "unit"
    (unit / "values").mkdir(parents=True)
    for name in ("test_base", "test_plan", "test_deadline", "test_face", "test_memory_base", "values/test_desc"):
        (unit / f"{name}.py").touch()
    assert [message.split()[0] for message in house.untested_modules(tree, tmp_path / "tests")] == [
        "kvpull_async.transport.base",
        "kvpull_sync.face",
    ]
