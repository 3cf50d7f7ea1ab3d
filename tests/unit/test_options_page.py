"""docs/options.md has every option, with the key, the variable, the default and the values that the source has."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvpull_async.config import LLMConfig, Settings, kinds, settings

TEXT = (Path(__file__).parents[2] / "docs" / "options.md").read_text(encoding="utf-8")
OWN_PART, _, ORIGINAL_PART = TEXT.partition("\n## The original's\n")
DEFAULTS = {field.name: field.default for field in fields(Settings)}
PROPERTIES = {name: option for name, option in vars(LLMConfig).items() if hasattr(option, "key")}
FIELDS = {
    "sync_kv_timeout": "sync_kv_timeout_ms",
    "mem_pool_cfg": "device_pool_bytes",
    "host_mem_pool_cfg": "host_pool_bytes",
    "enable_cache_manager": "cache_manager_mode",
    "enable_remote_cache_accessible": "remote_cache_access",
    "listen_ip_info": "listen",
    "link_total_time": "link_total_time_s",
    "link_retry_count": "link_retry_count",
    "transfer_backend": "transfer_backend",
    "enable_switch_role": "enable_switch_role",
}
"""Those of the original's options that are a field of the settings."""


def rows(text: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:3] == "| `"]
    return {name.strip("` "): rest for name, *rest in lines}


OWN, ORIGINAL = rows(OWN_PART.replace("| |", "|  |")), rows(ORIGINAL_PART.replace("| |", "|  |"))


def test_every_option_stands_there_once_and_no_other() -> None:
    assert set(OWN) == set(kinds.OWN)
    ignored = dict(re.findall(r"`([a-z_]+)`\s+\(`(llm\.\w+)`", TEXT))
    assert set(ORIGINAL) | set(ignored) | set(OWN) == set(PROPERTIES)
    assert len(ORIGINAL) + len(ignored) + len(OWN) == len(PROPERTIES)
    for name, key in ignored.items():
        assert PROPERTIES[name].key == key
        assert "without a meaning" in PROPERTIES[name].__doc__, name


@pytest.mark.parametrize("name", sorted(kinds.OWN))
def test_an_own_option_has_its_names_default_and_values(name: str) -> None:
    key, variable, unit, default, allowed, effect = OWN[name]
    assert (key, variable) == (f"`{kinds.own_key(name)}`", f"`{kinds.own_variable(name)}`")
    assert ast.literal_eval(default.strip("`")) == getattr(LLMConfig(), name)
    assert (unit == "ms") == settings.own_field(name).endswith("_ms")
    rules: dict[str, Any] = getattr(kinds.OWN[name].check, "keywords", {})
    if "low" in rules:
        assert allowed.startswith(f"{rules['low']}..{rules['high']}")
        assert unit
    for value in rules.get("allowed", ()):
        assert f'`"{value}"`' in allowed
    assert effect


@pytest.mark.parametrize("name", sorted(ORIGINAL))
def test_an_option_of_the_original_has_its_key_and_what_counts_without_it(name: str) -> None:
    key, unit, default, allowed, effect = ORIGINAL[name]
    assert key == f"`{PROPERTIES[name].key}`"
    counts = None if default == "none" else ast.literal_eval(default.strip("`"))
    if name in FIELDS:
        assert counts == DEFAULTS[FIELDS[name]]
        assert (unit == "ms") == FIELDS[name].endswith("_ms")
    assert allowed
    assert effect


def test_every_key_and_variable_that_is_read_stands_there() -> None:
    known = settings._READ | settings._IGNORED | set(settings._VARIABLES.values())
    assert [name for name in sorted(known) if f"`{name}`" not in TEXT and f"`{name}=1`" not in TEXT] == []
    for name in settings._BACKENDS:
        assert f'`"{name}"`' in ORIGINAL["transfer_backend"][3]
