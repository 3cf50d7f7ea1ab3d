"""Pulls, pushes, layers and their cancellation are right with each of the runtimes that users have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings

from tests import npu
from tests.conformance.api import AWAITED, BLOCKING, Api
from tests.integration import test_canary, test_layers_of_blocks, test_pull_oracle, test_push_canary
from tests.integration.pushing import SIZES as PUSHED
from tests.integration.pushing import desc, ends, laid
from tests.strategies import thorough


@pytest.fixture(params=npu.VARIANTS, ids=lambda variant: variant.name)
def npu_variant(request: pytest.FixtureRequest) -> npu.Variant:
    variant: npu.Variant = request.param
    return variant


@pytest.mark.parametrize(("api", "transport", "limit"), test_pull_oracle.SETTINGS[1::2])
def test_p2_any_pull_is_whole_or_changes_nothing(
    api: Api, transport: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = settings(thorough, max_examples=25)
    monkeypatch.setattr(test_pull_oracle, "thorough", few)
    test_pull_oracle.test_p2_any_pull_is_whole_or_changes_nothing(api, transport, limit)


@pytest.mark.parametrize(("way", "api"), [("tcp", AWAITED), ("inproc", BLOCKING), ("read", BLOCKING)])
def test_p2_a_push_fills_its_entry_and_nothing_else(way: str, api: Api) -> None:
    async def body() -> None:
        async with ends(api, way) as e:
            for nbytes in PUSHED.values():
                source, destination = await e.source(desc(nbytes)), await e.destination(desc(nbytes))
                await e.push(destination, source, 1, entry=2)
                pieces = [(tensor, 2, source.arrays[tensor][1]) for tensor in range(4)]
                assert np.array_equal(destination.image, laid(destination, pieces))

    api.run(body())


@pytest.mark.parametrize("size", ["inline", "streamed"])
async def test_p1_a_pull_cancelled_at_every_await(size: str) -> None:
    await test_canary.test_p1_cancelled_at_every_await_of_the_core("tcp", size, "puller", "wait", again=False)


async def test_p1_a_push_cancelled_at_every_await() -> None:
    await test_push_canary.test_p1_p4_a_push_cancelled_at_every_await("tcp", "large", "pusher", "wait", again=False)


async def test_layers_of_blocks_come_in_order_and_whole() -> None:
    await test_layers_of_blocks.test_layers_of_blocks_come_in_order_and_whole("tcp", "streamed")
