"""A device that hangs holds up what is to move there, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvpull_async import CacheDesc, CacheKey, DataType, LLMRole, Placement
from tests.acl_emulator import Emulator
from tests.duo import BIG, DECODER, OK, PROMPT, Duo, cluster, duo, holds, node

MANY = 12
"""More than there are threads that copy."""
DEVICE = CacheDesc(1, [1, 4096], DataType.DT_UINT8)
HOST = CacheDesc(4, [4, 1024 * 1024], DataType.DT_UINT8, Placement.HOST)


async def hanging(emulator: Emulator) -> None:
    """Wait until something runs on the device that does not end."""
    while not emulator.left()["running"]:  # noqa: ASYNC110  (the emulator tells nobody)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("aborts", [True, False], ids=["aborts work", "aborts are refused"])
@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
async def test_p5_copies_that_hang_hold_up_no_memory_of_the_host(
    transport: str, aborts: bool, emulator: Emulator
) -> None:
    async with duo(transport=transport) as pair:
        await pair.publish(HOST)
        manager = pair.decoder.kv_cache_manager
        source, here = await pair.destination(DEVICE), await pair.destination(HOST)
        destinations = [await pair.destination(DEVICE) for _ in range(MANY)]
        emulator.configure(abort_works=int(aborts))
        emulator.hang(times=-1)
        copies = [asyncio.create_task(manager.copy_cache(destination, source)) for destination in destinations]
        try:
            await asyncio.wait_for(hanging(emulator), 20)
            for entry in range(HOST.entries):
                await manager.pull_cache(CacheKey(PROMPT, entry), here, entry)
                assert holds(here, entry=entry, source=entry)
            await manager.copy_cache(here, here, 0, 1)
            await manager.deallocate_cache(await manager.allocate_cache(HOST))
        finally:
            for copy in copies:
                copy.cancel()
            emulator.resume()
            await asyncio.gather(*copies, return_exceptions=True)


async def test_p5_a_link_whose_copies_hang_leaves_the_others_theirs(emulator: Emulator) -> None:
    """Each of the first two has more copies under way than there are threads for two links."""
    hung, other = 2, 3
    async with contextlib.AsyncExitStack() as stack:
        decoder = await stack.enter_async_context(node(LLMRole.DECODER, DECODER))
        pairs = []
        for number in range(1, hung + 2):
            prompt = await stack.enter_async_context(node(LLMRole.PROMPT, 10 + number, listen=True))
            assert await decoder.link_clusters([cluster(10 + number, prompt.listen_address)], 20_000) == (OK, [OK])
            pairs.append(Duo(prompt, decoder))
        for pair in pairs:
            await pair.publish(BIG)
        into = [await pairs[0].destination(BIG) for _ in pairs]
        emulator.hang(times=4)
        manager = decoder.kv_cache_manager
        pulls = [asyncio.create_task(manager.pull_cache(CacheKey(11 + i, 0), into[i])) for i in range(hung)]
        try:
            await asyncio.wait_for(hanging(emulator), 20)
            await manager.pull_cache(CacheKey(10 + other, 0), into[hung], timeout=20_000)
            assert holds(into[hung], entry=0, source=0)
            assert not any(pull.done() for pull in pulls)
        finally:
            emulator.resume()
            await asyncio.gather(*pulls)
