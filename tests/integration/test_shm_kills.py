"""A source that is killed again and again, while its memory is pulled in each of the three ways at once.

KVPULL_KILLS=200 says how often, 6 times without it. After each death it is started anew on the same port, with other
bytes.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from typing import Any

import numpy as np
import pytest

from kvpull_async import LLMException, LLMStatusCode, LLMTimeoutError
from tests import duo
from tests.integration.content import content
from tests.integration.own_loop import outcome
from tests.integration.processes import Child, child, descriptors, mappings
from tests.integration.reader import KINDS, Reader, options_for, reader, source_kind
from tests.loop_nodes import eventually

KILLS = int(os.environ.get("KVPULL_KILLS", "6"))
NBYTES = 5 * 1024 * 1024
TIMEOUT_MS = 10_000
CANARY = 0xA5

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + 5 * KILLS)]


class Pulling:
    """One cache, pulled over and over from sources that come and go."""

    def __init__(self, here: Reader, kind: str, cache: Any) -> None:
        self.here, self.kind, self.cache = here, kind, cache
        self.key = 0 if source_kind(kind) == "allocated" else 1
        self.arrays = duo.arrays(cache)
        self.whole = self.failed = self.whole_after_death = 0
        self.right: list[Any] = []

    def now(self, generation: int) -> None:
        self.right = [content(self.key, tensor, generation, nbytes=NBYTES) for tensor in range(2)]

    async def pull(self, *, timeout: float = TIMEOUT_MS) -> BaseException | None:
        for array in self.arrays:
            array[:] = 0
        began = time.monotonic()
        error = await outcome(self.here.pull(self.cache, self.key, timeout=timeout))
        assert time.monotonic() - began < timeout / 1000 + 2
        if error is None:
            assert all(np.array_equal(array[0], right) for array, right in zip(self.arrays, self.right, strict=True))
        return error

    async def until_it_fails(self) -> None:
        while (error := await self.pull()) is None:
            self.whole += 1
            await asyncio.sleep(0)
        assert isinstance(error, LLMException), error
        assert error.status_code is LLMStatusCode.LLM_LINK_FAILED, error
        assert error.retry_safe
        assert not self.cache.quarantined
        self.failed += 1
        self.set_canary()

    def set_canary(self) -> None:
        for array in self.arrays:
            array[:] = CANARY

    def intact(self) -> bool:
        return all(bool((array == CANARY).all()) for array in self.arrays)


async def publish(source: Child, generation: int) -> None:
    for key, kind in ((0, "allocated"), (1, "registered")):
        await source.ask("publish", "published", key=key, nbytes=NBYTES, kind=kind, generation=generation)


async def until_back(pulling: Pulling) -> None:
    give_up = time.monotonic() + 20
    while (error := await pulling.pull()) is not None:
        assert isinstance(error, LLMException), error
        assert time.monotonic() < give_up, error
        await asyncio.sleep(0.01)


async def life(pullings: list[Pulling], port: tuple[str, int] | None, number: int, chance: random.Random) -> Any:
    """Start a source, pull from it in every way, kill it meanwhile; its address."""
    where = {"listen": True} if port is None else {"listen_ip_info": f"{port[0]}:{port[1]}"}
    options: dict[str, Any] = {"transport": "shm", **where}
    async with child("PROMPT", duo.PROMPT, program="source", **options) as source:
        await publish(source, number)
        for pulling in pullings:
            pulling.now(number)
            if port is None and pulling.kind != "read":  # which shares its node with another
                await pulling.here.link(source)
        for pulling in pullings:
            await until_back(pulling)
        lost = {pulling: pulling.here.node.counters.get("links_lost", 0) for pulling in pullings}
        tasks = [asyncio.ensure_future(pulling.until_it_fails()) for pulling in pullings]
        await asyncio.sleep(chance.uniform(0.0, 0.05))
        source.kill()
        await asyncio.gather(*tasks)
        for pulling in pullings:
            await eventually(lambda p=pulling: p.here.node.counters.get("links_lost", 0) > lost[p])  # type: ignore[misc]
            error = await pulling.pull(timeout=100)
            assert isinstance(error, (LLMException, LLMTimeoutError)), "it pulled from a process that was dead"
            pulling.set_canary()
        return source.address


async def test_p1_p2_p8_a_source_killed_over_and_over_costs_pulls_and_nothing_else() -> None:
    chance = random.Random(20)
    async with reader(**options_for("mapped")) as here, reader(**options_for("streamed")) as streaming:
        nodes = {"mapped": here, "read": here, "streamed": streaming}
        pullings = [Pulling(nodes[kind], kind, await nodes[kind].cache(NBYTES)) for kind in KINDS]
        address, held = None, (0, 0)
        for number in range(KILLS):
            address = await life(pullings, address, number, chance)
            assert all(pulling.intact() for pulling in pullings), "written after the pull had raised"
            if number == 2:
                held = descriptors(), mappings()
        await eventually(lambda: mappings() <= held[1] and descriptors() <= held[0], lambda: f"{held} after 3 deaths")
        assert all(pulling.failed == KILLS for pulling in pullings)
        told = {pulling.kind: (pulling.whole, pulling.failed) for pulling in pullings}
        sys.stdout.write(f"\n{KILLS} deaths; pulls whole and failed: {told}\n")
