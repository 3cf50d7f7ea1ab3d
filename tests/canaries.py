"""What stands in memory that a call must leave alone, or ends by leaving alone: one byte, everywhere."""

from __future__ import annotations

from typing import Any, Final

from tests import duo

CANARY: Final = 0xA5


def set_canary(cache: Any) -> None:
    for array in duo.arrays(cache):
        array[:] = CANARY


def intact(cache: Any) -> bool:
    return all(bool((array == CANARY).all()) for array in duo.arrays(cache))
