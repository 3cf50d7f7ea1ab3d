"""docs/coming-from-llm_datadist.md: that every difference is on it, and what it says of names without a use here yet.

Its table of names is compared in test_names_table.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvpull_async import (
    CacheDesc,
    DataType,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
)
from tests.conformance import (
    test_differences,
    test_differences_links,
    test_differences_pushes,
    test_differences_transfers,
    test_key_binding,
    test_keys,
    test_rows,
)
from tests.conformance.api import AWAITED, BLOCKING
from tests.conformance.row import PI, failure, is_error
from tests.conformance.rule import RuleCase, Rules
from tests.conformance.scene import NEW, Scene

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-llm_datadist.md"
RULES = Rules()
rule = RULES.rule

LATER = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
NOTHING = {"nodes": False}


@rule(NEW, differs="nothing-to-remap", remote_access=True)
async def memory_is_not_mapped_again(f: Scene) -> None:
    remap, info = f.destination.cache_manager.remap_registered_memory, MemInfo(Memtype.MEM_TYPE_DEVICE, 4096, 64)
    assert is_error(await failure(lambda: f.api.do(remap, [info, None])), PI)
    for infos in (info, [info]):
        assert is_error(await failure(lambda infos=infos: f.api.do(remap, infos)), LATER)  # type: ignore[misc]


@rule(NEW, differs="not-in-this-version", **NOTHING)
async def options_that_come_later(f: Scene) -> None:
    node = f.api.package.LLMDataDist(LLMRole.MIX, 1)
    for name in ("nixl", "mooncake"):
        options = {"llm.TransferBackend": name}
        error = await failure(lambda options=options: f.api.do(node.init, options))  # type: ignore[misc]
        assert is_error(error, LATER), (options, error)


@rule(NEW, differs="an-npu-if-there-is-one", **NOTHING)
async def host_memory_serves_unless_an_npu_is_insisted_on(f: Scene) -> None:
    """Several devices are never served, wherever this runs."""
    several = {"ge.exec.deviceId": "0;1"}
    node = f.api.package.LLMDataDist(LLMRole.MIX, 1)
    error = await failure(lambda: f.api.do(node.init, {**several, "kvpull.DeviceBackend": "acl"}))
    assert is_error(error, LATER), error
    for backend in ("auto", "host"):
        await f.api.do(node.init, {**several, "kvpull.DeviceBackend": backend})
        try:
            cache = await f.api.do(node.cache_manager.allocate_cache, CacheDesc(1, [1, 64], DataType.DT_UINT8))
            node.cache_manager.get_cache_tensors(cache)[0].numpy()[:] = 7
        finally:
            await f.api.do(node.finalize)


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


def named_by_tests() -> set[str]:
    differences = (test_differences, test_differences_links, test_differences_pushes, test_differences_transfers)
    modules = (test_keys, test_key_binding, *differences)
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
