"""docs/coming-from-llm_datadist.md: that it is complete, and what it says of names that are not in this version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvpull_async
import kvpull_sync
from kvpull_async import (
    CacheTask,
    LLMRole,
    LLMStatusCode,
)
from tests.conformance import test_differences, test_differences_links, test_key_binding, test_keys, test_rows
from tests.conformance.api import AWAITED, BLOCKING
from tests.conformance.row import PI, failure, is_error
from tests.conformance.rule import RuleCase, Rules
from tests.conformance.scene import NEW, OLD, Scene

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-llm_datadist.md"
RULES = Rules()
rule = RULES.rule

LATER = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
NOTHING = {"nodes": False}


@rule(differs="not-in-this-version")
async def what_comes_later(f: Scene) -> None:
    for where, name in later_names():
        target = {"LLMDataDist": f.destination, "CacheTask": CacheTask(None)}.get(where)
        if target is None:
            target = f.destination.kv_cache_manager if where == "KvCacheManager" else f.destination.cache_manager
        method = getattr(target, name)
        arguments = {"link": ("comm", {1: 0}, "{}"), "copy_blocks": (f.d, {}), "swap_blocks": (f.d, f.d, {})}.get(name)
        if arguments is None:
            arguments = () if where == "CacheTask" or "transfer" in name or "push" in name else (1,)
        error = await failure(lambda method=method, arguments=arguments: f.api.do(method, *arguments))  # type: ignore[misc]
        older = where == "LLMDataDist" and f.setup.manager == OLD
        assert is_error(error, PI if older else LATER), (where, name, error)


@rule(NEW, differs="not-in-this-version", **NOTHING)
async def options_that_come_later(f: Scene) -> None:
    node = f.api.package.LLMDataDist(LLMRole.MIX, 1)
    later = [{"llm.TransferBackend": name} for name in ("nixl", "mooncake")] + [{"kvpull.DeviceBackend": "acl"}]
    for options in later:
        error = await failure(lambda options=options: f.api.do(node.init, options))  # type: ignore[misc]
        assert is_error(error, LATER), (options, error)


# -- running them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RULES.cases(), ids=str)
async def test_difference_awaited(case: RuleCase) -> None:
    await case.play(AWAITED)


@pytest.mark.parametrize("case", RULES.cases(), ids=str)
def test_difference_blocking(case: RuleCase) -> None:
    BLOCKING.run(case.play(BLOCKING))


# -- the page ----------------------------------------------------------------------------------------------------------


def documented() -> list[str]:
    section = PAGE.read_text().split("\n## Deliberate differences\n")[1].split("\n## ")[0]
    return re.findall(r"^### (\S+)$", section, re.MULTILINE)


def later_names() -> list[tuple[str, str]]:
    """(class, method) of the page's table of what is not in this version."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return [(where, name) for where, names in rows for name in re.findall(r"`(\w+)`", names)]


def named_by_tests() -> set[str]:
    modules = (test_keys, test_key_binding, test_differences, test_differences_links)
    rules = [*RULES.all, *(rule for module in modules for rule in module.RULES.all)]
    return {row.differs for row in test_rows.ROWS if row.differs} | {rule.differs for rule in rules if rule.differs}


def test_every_difference_that_a_test_names_is_documented() -> None:
    assert named_by_tests() - set(documented()) == set()


def test_every_documented_difference_is_tested() -> None:
    assert set(documented()) - named_by_tests() == set()


def test_no_difference_is_documented_twice() -> None:
    assert len(set(documented())) == len(documented())


@pytest.mark.parametrize("entry", documented())
def test_every_difference_says_what_the_original_does_what_kvpull_does_and_why(entry: str) -> None:
    text = PAGE.read_text().split(f"\n### {entry}\n\n")[1].split("\n\n#")[0]
    assert re.findall(r"^- (\w+):", text, re.MULTILINE) == ["Original", "kvpull", "Why"]


def test_the_page_lists_every_name() -> None:
    listed = set(re.findall(r"`(\w+)`", PAGE.read_text().split("\n## Names\n")[1].split("\n| where")[0]))
    assert listed - {"kvpull_sync", "LLM_FEATURE_NOT_ENABLED"} == {*kvpull_async.__all__, *kvpull_sync.__all__}
