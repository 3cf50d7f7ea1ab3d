"""Fuzz target: what is read from text, options and rank tables. It is refused with the documented exceptions only."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Final

from kvpull_async.config import kinds
from kvpull_async.config import settings as settings_module
from kvpull_async.config.rank_table import gathering
from kvpull_async.config.settings import Settings
from kvpull_async.status import LLMException
from kvpull_async.values import LLMRole
from tests.fuzz.making import Input

_OPTIONS: Final = sorted({*settings_module._READ, *settings_module._IGNORED})
_VARIABLES: Final = sorted(kinds.own_variable(name) for name in kinds.OWN if name != "link_secret")
_VALUES: Final = (
    "0", "1", "-1", "", "true", "1e9", "127.0.0.1:0", "1.2.3.4:65536", ":", "0;1", "{}", "[", "99999999999999999999",
    "0.95", "nan", "auto", "shm", "\x00", "٣", " 1", "1_0", '{"a":' * 300, "off", "queue",
)  # fmt: skip
_NAMES: Final = (
    "version", "server_list", "device", "rank_id", "server_id", "device_id", "device_ip", "host_ip", "status", "",
)  # fmt: skip
_LEAVES: Final = (
    "1.0",
    "1.2",
    "0",
    "1",
    "2",
    "127.0.0.1",
    "10.0.0.1",
    "",
    None,
    True,
    1,
    -1,
    2**64,
    1.5,
    "٣",
    "x" * 99,
)


def text(data: bytes) -> None:
    given = Input(data)
    choice = given.byte()
    if choice < 0x40:
        _table(given.take(4096).decode("utf-8", "replace"))
    elif choice < 0xA0:
        _table(json.dumps({"version": "1.0", "server_list": [_tree(given, 4) for _ in range(given.byte() % 4)]}))
    else:
        _options(given)


def _tree(given: Input, depth: int) -> Any:
    choice = given.byte() % 8
    if choice < 3 and depth:
        return {given.one_of(_NAMES): _tree(given, depth - 1) for _ in range(given.byte() % 5)}
    if choice < 5 and depth:
        return [_tree(given, depth - 1) for _ in range(given.byte() % 4)]
    return given.one_of(_LEAVES)


def _table(table: str) -> None:
    with contextlib.suppress(LLMException):
        found = gathering("a comm", {1: 0, 2: 1}, table, own=2, port_base=21000, renamed={})
        assert found.members == (1,)
        assert all(0 < port < 2**16 for port in found.ports)


def _options(given: Input) -> None:
    options = {given.one_of(_OPTIONS): _value(given) for _ in range(given.byte() % 4)}
    environ = {given.one_of(_VARIABLES): _value(given) for _ in range(given.byte() % 3)}
    with contextlib.suppress(LLMException, ValueError):
        made = Settings.from_options(LLMRole.DECODER, 1, options, environ=environ)
        assert made.listen is None or made.may_listen_on(made.listen[0])


def _value(given: Input) -> str:
    chosen = given.byte()
    return given.one_of(_VALUES) if chosen < 0xC0 else given.take(chosen & 0x3F).decode("utf-8", "replace")
