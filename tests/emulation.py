"""The emulated AscendCL as tests build it: those that need it are skipped where there is no gcc."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests import acl_emulator

__all__ = ["build", "needs_gcc"]

_REASON: Final = "the emulator is compiled with gcc"
needs_gcc: Final = pytest.mark.skipif(shutil.which("gcc") is None, reason=_REASON)
"""For tests whose processes build it by themselves, and those that compile more than that."""


def build(*, release: str = "9.0", without: Sequence[str] = ()) -> Path:
    """The home of the emulator, as `tests.acl_emulator.build` makes it."""
    try:
        return acl_emulator.build(release=release, without=without)
    except acl_emulator.NoCompiler:
        pytest.skip(_REASON)
