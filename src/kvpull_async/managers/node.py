"""What the managers of one engine share. It must not contain behaviour."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpull_async._workers import Workers
from kvpull_async.config import Settings
from kvpull_async.link import Link
from kvpull_async.observe import Counters, Log
from kvpull_async.registry import Registry
from kvpull_async.values import LLMRole

__all__ = ["Node"]


@dataclass
class Node:
    """`role` changes with `switch_role`, `ranked` with `link`; the rest is fixed from `init` to `finalize`."""

    role: LLMRole
    settings: Settings
    registry: Registry
    workers: Workers
    counters: Counters
    log: Log
    loop: asyncio.AbstractEventLoop
    """The core's."""
    find_link: Callable[[int], Link | None]
    underway: dict[int, set[object]] = field(default_factory=dict)
    """By cluster, the pulls that have been asked for and not ended: none that comes later may overtake them."""
    ranked: bool = False
    """Whether `link` was called: what is registered afterwards is not remote accessible."""
    live: bool = True
    """False in a forked child."""
