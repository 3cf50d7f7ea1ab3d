"""What tests of the emulated AscendCL share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.acl_emulator.raw import Pieces, Raw, clean
from tests.emulation import build


@pytest.fixture
def raw() -> Iterator[Raw]:
    with clean(build()) as raw:
        yield raw


@pytest.fixture
def pieces(raw: Raw) -> Iterator[Pieces]:
    pieces = Pieces(raw)
    yield pieces
    pieces.end()
