"""What `help` says of the blocking classes: the whole text of the awaitable ones, which the sources only point to."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest

import kvpull_async
import kvpull_sync
from kvpull_async.managers.checks import BLOCKS_NAMES, PULL_NAMES
from kvpull_sync.descriptions import fill_in
from tests import original_api

CLASSES = ["LLMDataDist", "KvCacheManager", "CacheManager", "CacheTask"]
MANAGERS = [kvpull_async.KvCacheManager, kvpull_async.CacheManager, kvpull_sync.KvCacheManager]
MANAGERS.append(kvpull_sync.CacheManager)


def text(owner: Any, name: str) -> str:
    return inspect.getdoc(inspect.getattr_static(owner, name)) or ""


@pytest.mark.parametrize("owner", CLASSES)
def test_every_member_has_the_awaitable_ones_text_and_then_the_pointer(owner: str) -> None:
    blocking, awaitable = getattr(kvpull_sync, owner), getattr(kvpull_async, owner)
    for name in original_api.public_names(blocking) - {"llm_engine_instance"}:
        begins = text(awaitable, name).splitlines()[0]
        assert text(blocking, name).startswith(begins), name
        last = text(blocking, name).rpartition("\n\n")[2]
        assert last.startswith("As `kvpull_async."), name
        assert f"kvpull_async.{owner}.{name}`" in last, name


@pytest.mark.parametrize("manager", MANAGERS, ids=lambda manager: f"{manager.__module__}.{manager.__name__}")
def test_every_keyword_argument_of_a_pull_stands_in_its_text(manager: Any) -> None:
    for name in PULL_NAMES:
        assert name in text(manager, "pull_cache"), name
    for name in BLOCKS_NAMES:
        assert name in text(manager, "pull_blocks"), name
    for name in ("wait_for_key", "strict_layout", "dst_blocks", "src_blocks"):
        assert name in text(kvpull_sync.KvCacheManager, "pull_layers"), name
    assert "dst_blocks" in text(manager, "pull_layers")


@pytest.mark.parametrize("call", ["pull_cache", "pull_layers"])
def test_a_text_that_names_another_method_is_followed_by_that_ones(call: str) -> None:
    said = text(kvpull_sync.CacheManager, call)
    assert said.count("tensor_num_per_layer: tensors in one layer") == 1
    assert "`KvCacheManager.pull_cache`:" in said
    assert "async with" not in said


def test_pydoc_shows_the_arguments() -> None:
    program = "import kvpull_sync; help(kvpull_sync.CacheManager.pull_cache)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "wait_for_key: True to wait" in done.stdout


def test_it_is_done_once() -> None:
    before = text(kvpull_sync.CacheManager, "pull_cache")
    fill_in(kvpull_sync.CacheManager)
    assert text(kvpull_sync.CacheManager, "pull_cache") == before


def test_without_docstrings_the_package_works_too() -> None:
    program = "import kvpull_sync; print(kvpull_sync.CacheManager.pull_cache.__doc__)"
    command = [sys.executable, "-OO", "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout == "None\n"
