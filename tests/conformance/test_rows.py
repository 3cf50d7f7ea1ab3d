"""Every conformance row of the original, for both faces and on every transport.

The number in a test's name is that of the row: `row040-new-tcp` is row 40 with the newer manager over tcp.
"""

from __future__ import annotations

import pytest

from tests.conformance import rows_blocks, rows_caches, rows_lifecycle, rows_pull
from tests.conformance.api import AWAITED, BLOCKING
from tests.conformance.row import Case, cases, play
from tests.conformance.scene import NEW, Setup, scene

ROWS = [*rows_pull.ROWS, *rows_caches.ROWS, *rows_blocks.ROWS, *rows_lifecycle.ROWS]
CASES = cases(ROWS)

NUMBERS = {
    *(1, 2, 3, 5, 6, 7, 8, 9, 10, 12, 14, 18, 19, 20, 21, 22, 24, 25, 26, 27, 29, 30, 31, 33),
    *(38, 40, 41, 42, 43, 45, 47, 48, 49, 51, 52, 53, 54, 56, 59, 60, 61, 62, 63),
    *(66, 67, 68, 71, 73, 74, 75, 77, 78, 79, 80, 81),
    *(83, 84, 85, 86, 88, 90, 91, 92),
    *(94, 98, 100, 101, 103, 104, 107, 108, 109, 111, 112, 113, 115, 116, 120, 121),
    *(122, 128, 129, 130, 131, 132, 133, 136, 137, 138, 139),
    *(141, 147, 148, 149, 150, 151, 154, 157, 160, 162, 163, 164, 166, 167, 168, 169, 170, 173, 175, 176),
}
"""All rows, by section."""


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_row_awaited(case: Case) -> None:
    await play(AWAITED, case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_row_blocking(case: Case) -> None:
    BLOCKING.run(play(BLOCKING, case))


def test_no_row_was_forgotten() -> None:
    assert {row.number for row in ROWS} == NUMBERS


def test_every_row_runs_on_every_transport() -> None:
    """But for those that make no node."""
    for row in ROWS:
        wanted = set() if row.setup.get("nodes") is False else {"inproc", "tcp", "shm"}
        assert set(row.transports) == wanted, f"row {row.number}"


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
async def test_the_transport_of_a_row_is_the_one_that_carries_its_bytes(transport: str) -> None:
    async with scene(AWAITED, Setup(manager=NEW, transport=transport)) as made:
        (link,) = made.destination._core.engine.links.all()
        assert link.path.name == transport
