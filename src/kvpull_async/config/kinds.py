"""Kinds of option value: how each is checked, written as text and read back. Knows no option but the project's own.

Every ``parse`` raises ValueError or TypeError; ``read`` turns that into LLM_PARAM_INVALID, as a failing ``init`` does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvpull_async import sums
from kvpull_async.status import LLMException, LLMStatusCode
from kvpull_async.values._check import UINT64_MAX, index, instance, integer, type_error, uint64

T = TypeVar("T")
INT32_MAX = 2**31 - 1
_FLAGS = {"1": True, "true": True, "0": False, "false": False}


def read(parse: Callable[[str, str], T], name: str, text: str) -> T:
    """``parse(name, text)``, with LLMException(LLM_PARAM_INVALID) for text that it refuses."""
    try:
        return parse(name, text)
    except (TypeError, ValueError) as error:
        raise LLMException(str(error), status_code=LLMStatusCode.LLM_PARAM_INVALID) from error


def string(name: str, value: object) -> str:
    """*value*, which must be a str."""
    return instance(name, value, str)


def boolean(name: str, value: object) -> bool:
    """*value*, which must be a bool."""
    return instance(name, value, bool)


def choice(name: str, value: object, *, allowed: tuple[str, ...]) -> str:
    """*value*, which must be one of *allowed*."""
    if string(name, value) not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return str(value)


def is_decimal(text: str) -> bool:
    """Whether *text* is ASCII digits and nothing else: no sign, space or underscore."""
    return text.isascii() and text.isdigit()


def number(name: str, text: str, *, low: int = 0, high: int = INT32_MAX) -> int:
    """The decimal number in *text*, in ``low..high``."""
    if not is_decimal(text):
        raise ValueError(f"{name} must be a decimal number, got {text!r}")
    return integer(name, int(text), low=low, high=high)


def flag(name: str, text: str) -> bool:
    """1 or true, 0 or false."""
    if text.lower() not in _FLAGS:
        raise ValueError(f"{name} must be 1 or 0, got {text!r}")
    return _FLAGS[text.lower()]


def switch(name: str, text: str) -> bool:
    """1 or 0. LLM-DataDist documentation: 1 alone is on. Ours: what is neither is refused, not taken for off."""
    if text not in ("1", "0"):
        raise ValueError(f"{name} must be 1 or 0, got {text!r}")
    return text == "1"


def whole(name: str, text: str) -> int:
    """A decimal number, which may be negative."""
    if not is_decimal(text.removeprefix("-")):
        raise ValueError(f"{name} must be a decimal number, got {text!r}")
    return int(text)


def fraction(name: str, text: str) -> float:
    """A number in 0..1."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ValueError(f"{name} must be a number in 0..1, got {text!r}")
    return share


def from_json(name: str, text: str, *, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """What the JSON says; `pairs` makes something else than a dict of an object's names and values."""
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{name} must be JSON: {error}") from error


def device_ids(name: str, text: str) -> tuple[int, ...]:
    """Device ids joined by semicolons."""
    return tuple(number(name, part) for part in text.split(";"))


def pool_bytes(name: str, text: str) -> int:
    """``memory_size`` of a pool's JSON. LLM-DataDist documentation: bytes, unsigned; ``10 <= page_shift < 31``."""
    pool = from_json(name, text)
    if not isinstance(pool, dict) or "memory_size" not in pool:
        raise ValueError(f"{name} must be a JSON object with memory_size, got {text!r}")
    integer(f"{name}: page_shift", pool.get("page_shift", 16), low=10, high=30)
    return uint64(f"{name}: memory_size", pool["memory_size"])


@dataclass(frozen=True)
class Kind:
    """How one of the project's own options is checked when assigned, written as text, and read from text."""

    check: Callable[[str, object], Any]
    render: Callable[[Any], str | None]
    parse: Callable[[str, str], Any]


def _numbers(*, low: int, high: int = INT32_MAX) -> Kind:
    return Kind(partial(integer, low=low, high=high), str, partial(number, low=low, high=high))


def _one_of(*allowed: str) -> Kind:
    return Kind(partial(choice, allowed=allowed), str, partial(choice, allowed=allowed))


def secret(name: str, text: str) -> str:
    """*text*, which must not be empty or white space alone: that would be no secret at all."""
    if not text.strip():
        raise ValueError(f"{name} must not be empty, or white space alone")
    return text


def secret_or_none(name: str, value: object) -> str:
    """*value*, a secret, or "" for none. LLM_PARAM_INVALID for one of white space alone."""
    text = string(name, value)
    return read(secret, name, text) if text else text


def secrets_by_cluster(name: str, text: str) -> tuple[tuple[int, bytes], ...]:
    """A JSON object of cluster ids and secrets, such as ``{"2": "...", "3": "..."}``."""
    table = from_json(name, text, pairs=tuple)  # with the names that come twice
    if not isinstance(table, tuple) or not all(is_decimal(key) for key, _ in table):
        raise ValueError(f"{name} must be a JSON object of cluster ids and their secrets")
    ids = [uint64(f"{name}: a cluster id", int(key)) for key, _ in table]
    if len(set(ids)) < len(ids):
        raise ValueError(f"{name} must have one secret for each cluster id")
    return tuple(
        (cluster_id, secret(f"{name}: {key}", string(f"{name}: {key}", value)).encode())
        for cluster_id, (key, value) in zip(ids, table, strict=True)
    )


def secrets_text(name: str, value: object) -> str:
    """*value*, a dict of cluster id to secret or its JSON text; "" is none. As text."""
    text = json.dumps(value) if isinstance(value, dict) else string(name, value)
    if text:
        read(secrets_by_cluster, name, text)
    return text


def clusters(name: str, text: str) -> frozenset[int] | None:
    """Cluster ids joined by semicolons; None for no text, which is every cluster."""
    parts = [part.strip() for part in text.split(";")] if text else []
    if not all(map(is_decimal, parts)):
        raise ValueError(f"{name} must be cluster ids joined by semicolons, got {text!r}")
    return frozenset(uint64(name, number(name, part, high=UINT64_MAX)) for part in parts) or None


def clusters_text(name: str, value: object) -> str:
    """*value*, an iterable of cluster ids or these joined by semicolons, as text; "" for every cluster. ValueError for
    an iterable without any: that would let nobody in.
    """
    if not isinstance(value, str):
        if isinstance(value, bytes) or not isinstance(value, Iterable):
            raise type_error(name, value, "an iterable of cluster ids, or these joined by semicolons")
        ids = sorted({uint64(f"{name}[{i}]", item) for i, item in enumerate(value)})
        if not ids:
            raise ValueError(f'{name} must not be empty; leave it unset, or "", for every cluster')
        return ";".join(map(str, ids))
    read(clusters, name, value)
    return value


def rank_hosts(name: str, value: object) -> str:
    """*value*, pairs such as ``10.1.1.1=192.168.0.4`` joined by commas; see ``host_pairs``."""
    text = string(name, value)
    host_pairs(name, text)
    return text


def host_pairs(name: str, text: str) -> dict[str, str]:
    """What stands in a rank table, by the IPv4 address to use instead; the last of equal names counts."""
    pairs = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        what, separator, host = (part.strip() for part in pair.partition("="))
        if not (what and separator and is_ipv4(host)):
            raise ValueError(f"{name} must be pairs such as node_0=192.168.0.4 joined by commas, got {pair!r}")
        pairs[what] = host
    return pairs


def is_ipv4(text: object) -> bool:
    """Whether *text* is an address of four decimal parts."""
    parts = text.split(".") if isinstance(text, str) else []
    return len(parts) == 4 and all(is_decimal(part) and len(part) < 4 and int(part) < 256 for part in parts)


OWN = {
    "link_secret": Kind(secret_or_none, lambda text: text or None, secret),
    "link_secrets": Kind(secrets_text, lambda text: text or None, secrets_by_cluster),
    "allowed_clusters": Kind(clusters_text, lambda text: text or None, clusters),
    "tls_certificate": Kind(string, lambda text: text or None, string),
    "tls_key": Kind(string, lambda text: text or None, string),
    "tls_authority": Kind(string, lambda text: text or None, string),
    "allow_insecure_network": Kind(boolean, lambda value: str(int(value)), flag),
    "link_busy_policy": _one_of("queue", "raise"),
    "queue_limit": _numbers(low=1),
    "settle_timeout": _numbers(low=0),
    "close_timeout": _numbers(low=0),
    "heartbeat_interval": _numbers(low=1),
    "heartbeat_timeout": _numbers(low=1),
    "handshake_timeout": _numbers(low=1),
    "lease_margin": _numbers(low=0),
    "reconnect_grace": _numbers(low=0),
    "inline_limit": _numbers(low=0, high=2**20),
    "rank_hosts": Kind(rank_hosts, lambda text: text or None, rank_hosts),
    "rank_port_base": _numbers(low=1024, high=65535 - 2 * 4096),
    "rank_link_timeout": _numbers(low=1),
    "device_backend": _one_of("auto", "host", "acl"),
    "allow_process_vm_read": _one_of("auto", "on", "off"),
    "verify": _one_of(*sums.NAMES),
}
"""The project's own options by the name of their LLMConfig property."""


def own_key(name: str) -> str:
    """The option key of an own property: ``kvpull.SettleTimeout`` for ``settle_timeout``."""
    return "kvpull." + name.title().replace("_", "")


def own_variable(name: str) -> str:
    """The environment variable of an own property: ``KVPULL_SETTLE_TIMEOUT`` for ``settle_timeout``."""
    return "KVPULL_" + name.upper()


def device_id(name: str, value: object) -> int:
    """A device id, int32. LLM-DataDist documentation: below 0 is LLM_PARAM_INVALID, above int32 ValueError."""
    device = index(name, value)
    if device < 0:
        raise LLMException(f"{name} must not be negative, got {device}", status_code=LLMStatusCode.LLM_PARAM_INVALID)
    return integer(name, device, low=0, high=INT32_MAX)
