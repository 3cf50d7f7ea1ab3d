"""What tests elsewhere say of nodes is true of nodes with an NPU: they run here again, with an emulated one.

Each test has the newest runtime's, in this process and in those that it starts, and fails for what hardware forbids and
for whatever is left on the device.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from tests import npu
from tests.acl_emulator import Emulator

NEWEST = npu.Variant("newest")
READS = "another process cannot read what is on a device: it is sent"
REUSED = "memory that was given back is the next cache's, while host memory stays with whoever has a view of it"
WITHIN = "what lies on one device is copied there: nothing is lent that the gate of the source could hold"
OTHERWISE = {
    r"test_push_faults.*a_pusher_(killed_in|stopped_in|takes_its_memory_back).*[\[-](mapped|read)\]": READS,
    r"test_leases.*test_p7_a_pull_under_way_ends_whole_when_its_key_expires[\[-]shm\]": READS,
    r"test_leases.*test_p7_a_pull_under_way_ends_whole_when_its_key_expires\[inproc\]": WITHIN,
    r"test_push_order.*test_p5_(two_nodes_that_push|pushes_and_pulls_of_one_link).*\[inproc\]": WITHIN,
    r"test_verify\.py.*reads_ask_the_source_then": READS,
    r"test_interruptions.*test_p1_a_destination_released_during_a_pull": REUSED,
    r"test_blocking.*test_a_forked_process_is_refused": "a forked child may not use the NPU at all: see test_forks.py",
}
"""Tests that are not about devices, and why."""
LEFT = (
    "test_p8_finalize_leaves_memory_that_is_still_written_and_says_so",
    "test_p1_p8_a_copy_whose_end_nobody_saw_keeps_its_destination_until_the_end",
    "test_p1_a_source_that_ends_frees_nothing_that_a_peer_of_its_process_still_copies",
)
"""Tests of what is left on purpose."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the ways by which host memory goes to another process, those that are no two on a device are tried once."""
    here = [item for item in items if item.path.parent.name == "device"]
    twice = [item for item in here if "streamed" in _ways(item)]
    for item in here:
        for name, reason in OTHERWISE.items():
            if re.search(name, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=reason))
    if twice:
        items[:] = [item for item in items if item not in twice]
        config.hook.pytest_deselected(items=twice)


def _ways(item: pytest.Item) -> Sequence[object]:
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return [given.get(name) for name in ("way", "path")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """KVPULL_NPU=all, or the name of a variant: the same on every installation that differs, or on that one."""
    wanted, owns = os.environ.get("KVPULL_NPU", ""), hasattr(metafunc.module, "npu_variant")
    if wanted and not owns and "npu_variant" in metafunc.fixturenames:
        chosen = [variant for variant in npu.VARIANTS if wanted in ("all", variant.name)]
        metafunc.parametrize("npu_variant", chosen, ids=[variant.name for variant in chosen])


@pytest.fixture
def npu_variant() -> npu.Variant:
    """Overridden where others are tried, too."""
    return NEWEST


@pytest.fixture(autouse=True)
def emulator(request: pytest.FixtureRequest, npu_variant: npu.Variant) -> Iterator[Emulator]:
    """Copies take as long as the test's name has it."""
    left = request.node.originalname in LEFT
    if left:  # on a device of their own, so that no other test finds it
        npu_variant = replace(npu_variant, without=(*npu_variant.without, "aclrtSetStreamFailureMode"))
    with npu.serving(npu_variant, left=left, seed=zlib.crc32(request.node.nodeid.encode())) as made:
        yield made
