"""The blocking package: the same names as the awaitable one, and a stand-in for the original's package."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest

import kvpull_async
import kvpull_sync
from tests import original_api

OWN_KIND = {"LLMDataDist", "KvCacheManager", "CacheManager", "CacheTask"}


def test_the_names_are_those_of_the_awaitable_package() -> None:
    assert set(kvpull_sync.__all__) == set(kvpull_async.__all__) | {"install_as_llm_datadist"}
    assert set(kvpull_sync.__all__) >= original_api.EXPORTS


@pytest.mark.parametrize("name", sorted(set(kvpull_async.__all__) - OWN_KIND))
def test_values_and_errors_are_the_very_same(name: str) -> None:
    assert getattr(kvpull_sync, name) is getattr(kvpull_async, name)


@pytest.mark.parametrize("name", sorted(OWN_KIND))
def test_what_waits_is_of_its_own_kind(name: str) -> None:
    assert getattr(kvpull_sync, name) is not getattr(kvpull_async, name)


def test_a_star_import_binds_them_and_nothing_else() -> None:
    names: dict[str, Any] = {}
    exec("from kvpull_sync import *", names)
    assert set(names) - {"__builtins__"} == set(kvpull_sync.__all__)


# -- in place of the original ------------------------------------------------------------------------------------------


def test_programs_find_it_under_the_originals_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "llm_datadist", raising=False)
    kvpull_sync.install_as_llm_datadist()
    kvpull_sync.install_as_llm_datadist()
    names: dict[str, Any] = {}
    exec("from llm_datadist import *\nimport llm_datadist", names)
    assert names["llm_datadist"] is kvpull_sync
    assert names["LLMDataDist"] is kvpull_sync.LLMDataDist
    monkeypatch.delitem(sys.modules, "llm_datadist")


def test_an_original_that_is_there_already_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    original = types.ModuleType("llm_datadist")
    original.__file__ = "/opt/llm_datadist/__init__.py"
    monkeypatch.setitem(sys.modules, "llm_datadist", original)
    with pytest.raises(RuntimeError, match="imported already, from /opt/llm_datadist"):
        kvpull_sync.install_as_llm_datadist()
    assert sys.modules["llm_datadist"] is original


@pytest.mark.parametrize("package", ["kvpull_sync", "kvpull_async"])
def test_importing_starts_no_thread_and_makes_no_loop(package: str) -> None:
    program = f"""
import asyncio, numpy, os, sys, threading
asyncio.new_event_loop = asyncio.SelectorEventLoop = None  # making one would fail
before = len(os.listdir("/proc/self/task"))  # numpy's own threads, of which Python does not know
import {package}
print([thread.name for thread in threading.enumerate()], len(os.listdir("/proc/self/task")) - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("['MainThread'] 0\n", "")
