"""What the suites share: bounded waiting. It must not test anything."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final, TypeVar

from kvpull_async._deadline import Deadline
from kvpull_async.transport.base import ControlChannel

__all__ = ["PATIENCE", "unwanted", "within"]

T = TypeVar("T")
PATIENCE: Final = 20.0
"""Seconds: a bound that only something that hangs reaches."""


async def within(waiting: Awaitable[T]) -> T:
    """Await with that bound."""
    async with Deadline.after_ms(PATIENCE * 1000).scope():
        return await waiting


async def unwanted(channel: ControlChannel) -> None:
    """What a listener does with a connection that no test expects."""
    channel.abort()
