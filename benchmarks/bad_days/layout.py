"""What the processes of a chaos run agree on: caches, sizes, ids, options, and what each is told when it starts.

It must not do anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from bad_days.content import Identity
from kvpull_async import CacheDesc, DataType, LLMClusterInfo, LLMConfig

__all__ = [
    "BASE", "BLOCK", "BLOCKS", "CALL_KINDS", "PAGED_MODEL", "PAGES", "ROW", "ROWS", "SIZES", "SLOTS", "STATIC",
    "TENSORS", "DecodeSetup", "PrefillSetup", "base", "block", "cluster", "desc", "keyed", "options", "req_id",
]  # fmt: skip

KIB: Final = 1024
TENSORS: Final = 4
SIZES: Final = {64 * KIB: 12, 256 * KIB: 5, 1024 * KIB: 1}
"""Bytes of a row of the caches that come and go, with how often they are taken."""

BASE: Final = 1
"""Id of a cache of `ROWS` rows of `ROW` bytes, in shared memory that was registered."""
ROW, ROWS = 64 * KIB, 8
BLOCKS_MODEL: Final = 0
"""Model of a paged cache of `BLOCKS` blocks of `BLOCK` bytes, in registered memory (id 2)."""
BLOCK, BLOCKS = 16 * KIB, 64
STATIC: Final = 2
"""Rows and blocks that are never written anew; the others are, generation after generation."""
SLOTS: Final = 3
"""Id of the allocated cache that pushes go to: a row of `ROW` bytes for each worker of each decode process."""
PAGED_MODEL: Final = 1
"""Model of the allocated paged cache that pushes of blocks go to (id 4): `PAGES` blocks for each worker."""
PAGES: Final = 4

KEY, BLOCK_KIND, BASE_KIND, PUSHED, PUSHED_BLOCK, SPOILT = 1, 2, 3, 4, 5, 6
CALL_KINDS: Final = {
    "pull by key": 20,
    "pull a part": 10,
    "pull by id": 14,
    "read by id": 16,
    "pull layers": 10,
    "pull blocks": 12,
    "pull into blocks": 8,
    "wait for key": 8,
    "push": 10,
    "push blocks": 8,
    "transfer": 6,
    "renew cache": 5,
}
"""Kinds of calls, with how often they are made."""


@dataclass(frozen=True)
class Timing:
    """ms, as the options of the same names."""

    heartbeat_interval: int = 500
    heartbeat_timeout: int = 2000
    settle_timeout: int = 500
    lease_margin: int = 500
    reconnect_grace: int = 500
    handshake_timeout: int = 1000


@dataclass(frozen=True)
class PrefillSetup:
    """What a prefill process is told."""

    number: int
    incarnation: int
    path: str
    port: int
    office: str
    seed: int
    slots: int
    sabotage: str
    timing: Timing


@dataclass(frozen=True)
class DecodeSetup:
    """What a decode process is told. `addresses` and `offices` are those of the prefill processes."""

    number: int
    incarnation: int
    path: str
    addresses: tuple[tuple[str, int], ...]
    offices: tuple[str, ...]
    seed: int
    workers: int
    pause: float
    sabotage: str
    timing: Timing


def cluster_id(number: int) -> int:
    return number + 1


def req_id(incarnation: int, number: int) -> int:
    """No key is ever used twice, so what is found under it must be what was published under it."""
    return incarnation << 32 | number


def keyed(source: int, incarnation: int, number: int, tensor: int) -> Identity:
    return Identity(KEY, source, incarnation, number, 0, tensor)


def base(source: int, incarnation: int, row: int, generation: int, tensor: int) -> Identity:
    return Identity(BASE_KIND, source, incarnation, row, generation, tensor)


def block(source: int, incarnation: int, number: int, generation: int, tensor: int) -> Identity:
    return Identity(BLOCK_KIND, source, incarnation, number, generation, tensor)


def desc(rows: int, nbytes: int) -> CacheDesc:
    return CacheDesc(TENSORS, [rows, nbytes], DataType.DT_UINT8)


def options(path: str, timing: Timing, **more: Any) -> dict[str, str]:
    """For `init`: the newer manager over this path."""
    config = LLMConfig()
    config.device_backend = "host"
    config.enable_cache_manager = True
    config.transfer_backend = path
    for name, value in {**vars(timing), **more}.items():
        setattr(config, name, value)
    return config.generate_options()


def cluster(number: int, address: tuple[str, int]) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id(number)
    info.append_remote_ip_info(*address)
    return info
