"""docs/ascend.md has every code of AscendCL as the source maps it, and the numbers of the source."""

from __future__ import annotations

import re

import pytest

from kvpull_async.memory import _acl, choosing
from kvpull_async.memory.base import PIECE_BYTES
from kvpull_async.memory.npu import copiers, layout, pool, staged, staging, streams
from kvpull_async.memory.npu.codes import CODES, STILL_RUNNING, suspect
from tests import house

PAGE = (house.ROOT / "docs" / "ascend.md").read_text(encoding="utf-8")
CODE = re.compile(r"^\| (\d{6}) \| (\w+) \| `(LLM_\w+)` \| (.*) \|$", re.MULTILINE)
FUNCTION = re.compile(r"^\| `(acl\w+)`", re.MULTILINE)
MIB, GIB = 1024**2, 1024**3


def test_every_code_has_the_name_and_the_status_that_the_source_gives_it() -> None:
    listed = {int(code): (name, status) for code, name, status, _ in CODE.findall(PAGE)}
    assert listed == {code: (meaning.name, meaning.status.name) for code, meaning in CODES.items()}


def test_the_codes_after_which_a_copy_may_still_run_are_marked() -> None:
    for text, marked in (
        ("may still run", STILL_RUNNING),
        ("device suspect", {code for code in CODES if suspect(code)}),
    ):
        assert {int(code) for code, _, _, marks in CODE.findall(PAGE) if text in marks} == set(marked)


def test_what_a_release_may_lack_is_told_and_what_is_required_is_counted() -> None:
    assert set(FUNCTION.findall(PAGE)) == _acl.OPTIONAL.keys()
    assert f"the {len(_acl.REQUIRED)} functions" in PAGE


@pytest.mark.parametrize(
    ("text", "true"),
    [
        ("up to 4 for each node", copiers._THREADS == 4),
        ("slots of 1 MiB, up to 3 for each transfer", (layout.SLOT_BYTES, staged._DEPTH) == (MIB, 3)),
        ("At most 64 slots are kept", staging._SHARED == 64),
        ("multiples of 64", layout.ALIGNMENT == 64),
        ("Up to 1 GiB of blocks", pool._KEPT == GIB),
        ("One piece of at most 1 MiB may take 30 s", streams.LONGEST == 30),
        ("does not open within 120 s", choosing._PATIENCE == 120),
        ("1 MiB for each slot", PIECE_BYTES == MIB),
    ],
)
def test_the_numbers_are_those_of_the_source(text: str, true: bool) -> None:
    assert text in " ".join(PAGE.split())
    assert true, f"the page still says: {text}"
