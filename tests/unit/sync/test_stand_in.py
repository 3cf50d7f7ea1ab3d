"""The stand-in for the original's package: the modules that programs import from, and the classes behind them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvpull_sync

# As they stand in programs: plugins of serving engines, and tests of the original.
IMPORTS = {
    "from llm_datadist.v2.llm_types import Cache, CacheDesc, BlocksCacheKey": ["Cache", "CacheDesc", "BlocksCacheKey"],
    "from llm_datadist.v2.llm_types import *": ["RegisterMemStatus", "Memtype", "MemInfo", "KvCache", "Placement"],
    "from llm_datadist.v2.llm_datadist import LLMDataDist": ["LLMDataDist"],
    "from llm_datadist.v2.cache_manager import CacheManager": ["CacheManager"],
    "from llm_datadist.status import LLMException, LLMStatusCode": ["LLMException", "LLMStatusCode"],
    "from llm_datadist.configs import LLMRole, LlmConfig, LLMClusterInfo": ["LLMRole", "LlmConfig", "LLMClusterInfo"],
    "from llm_datadist.data_type import DataType": ["DataType"],
}


@pytest.fixture(autouse=True)
def _gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Another test may want to see `llm_datadist` missing."""
    kvpull_sync.install_as_llm_datadist()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "llm_datadist"]:
        del sys.modules[name]
    for name in ("configs", "data_type", "status", "v2"):
        vars(kvpull_sync).pop(name, None)


@pytest.mark.parametrize("line", IMPORTS)
def test_the_originals_modules_hold_the_same_classes(line: str) -> None:
    names: dict[str, Any] = {}
    exec(line, names)
    assert all(names[name] is getattr(kvpull_sync, name) for name in IMPORTS[line])


def test_modules_are_found_by_every_form_of_import() -> None:
    names: dict[str, Any] = {}
    exec("import llm_datadist.v2.llm_types as types\nimport llm_datadist.v2.llm_types\nimport llm_datadist", names)
    assert names["types"].CacheKey is names["llm_datadist"].v2.llm_types.CacheKey is kvpull_sync.CacheKey


@pytest.mark.parametrize("name", ["llm_datadist.v2.llm_utils", "llm_datadist.v2.status", "llm_datadist.nothing"])
def test_other_modules_are_missing(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=name):
        exec(f"import {name}", {})


def test_installing_again_changes_nothing() -> None:
    before = {name: module for name, module in sys.modules.items() if name.startswith("llm_datadist")}
    kvpull_sync.install_as_llm_datadist()
    assert {name: module for name, module in sys.modules.items() if name.startswith("llm_datadist")} == before


def test_without_it_there_is_no_such_package() -> None:
    program = "import kvpull_sync, sys\nassert not hasattr(kvpull_sync, 'v2') and 'llm_datadist' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)


LAUNCHER = """
import kvpull_sync

kvpull_sync.install_as_llm_datadist()

import multiprocessing


def work(number):
    from llm_datadist import LLMStatusCode
    from llm_datadist.v2.llm_types import CacheDesc, DataType

    return [number, LLMStatusCode.LLM_TIMEOUT.name, CacheDesc(1, [1, 8], DataType.DT_INT8).size]


if __name__ == "__main__":
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.map(work, [7]) == [[7, "LLM_TIMEOUT", 8]]
"""


def test_worker_processes_of_a_launcher_have_it(tmp_path: Path) -> None:
    """Spawned ones run the top of the launcher again, forked ones inherit what it did."""
    launcher = tmp_path / "launcher.py"
    launcher.write_text(LAUNCHER)
    subprocess.run([sys.executable, "-W", "error", str(launcher)], timeout=100, check=True)
