"""Copies that fail, or whose end nobody sees: no pull succeeds with wrong bytes, and what they use stays as it is."""

from __future__ import annotations

import pytest

from kvpull_async import CacheDesc, CacheKey, DataType, LLMException, LLMRole, LLMTimeoutError
from kvpull_async.held import leaked
from tests.acl_emulator import Emulator
from tests.conformance.api import AWAITED
from tests.duo import DECODER, PROMPT, TIMEOUT_MS, Duo, duo, holds, node
from tests.integration.pushing import desc, ends
from tests.loop_nodes import event_log

ODD = CacheDesc(1, [4, 700_001], DataType.DT_UINT8)
"""All but its first entry are copied synchronously: they begin at no multiples of 64."""
EVEN = CacheDesc(4, [4, 512 * 1024], DataType.DT_UINT8)
FEW_MS = 500


@pytest.mark.parametrize("code", [107020, 207020, 507010, 507046, 507899])
@pytest.mark.parametrize("transport", ["tcp", "inproc"])
async def test_p2_a_pull_of_which_a_copy_failed_never_succeeds(transport: str, code: int, emulator: Emulator) -> None:
    async with duo(transport=transport) as pair:
        await pair.publish(EVEN)
        cache, manager = await pair.destination(EVEN), pair.decoder.kv_cache_manager
        for after in range(3):
            emulator.inject("task", code, after=after)
            with pytest.raises(LLMException, match=str(code)):
                await manager.pull_cache(CacheKey(PROMPT, 0), cache, 0)
        await manager.pull_cache(CacheKey(PROMPT, 0), cache, 0)
        assert holds(cache, entry=0, source=0)


@pytest.mark.parametrize("code", [107020, 507010])
async def test_p2_a_push_of_which_a_copy_failed_never_succeeds(code: int, emulator: Emulator) -> None:
    async with ends(AWAITED, "tcp") as e:
        source, destination = await e.source(desc(300_000)), await e.destination(desc(300_000))
        emulator.inject("task", code)
        with pytest.raises(LLMException):
            await e.push(destination, source, 1)
        await e.push(destination, source, 1)


@pytest.mark.allow_leak("acl-emulator|thread 'kvpull-acl")  # what a copy may still use is never given back
async def test_p1_p8_a_copy_whose_end_nobody_saw_keeps_its_destination_until_the_end(emulator: Emulator) -> None:
    with event_log() as log:
        async with duo(transport="tcp", settle_timeout=200, close_timeout=1000) as pair:
            await pair.publish(ODD)
            manager = pair.decoder.kv_cache_manager
            cache, other = await pair.destination(ODD), await pair.destination(ODD)
            await manager.pull_cache(CacheKey(PROMPT, 1), other, 1)
            downward = emulator.count("aclrtMemcpy") // 2  # as many as upward
            emulator.inject("aclrtMemcpy", 507010, after=downward)
            with pytest.raises(LLMTimeoutError) as caught:
                await manager.pull_cache(CacheKey(PROMPT, 2), cache, 1, timeout=FEW_MS)
            assert caught.value.destination_unsafe
            assert not caught.value.retry_safe
            assert cache.quarantined
            await manager.pull_cache(CacheKey(PROMPT, 3), other, 1)
            assert holds(other, entry=1, source=3)
            blocks = emulator.left()["device_blocks"]
    assert [event["cache_id"] for event in log.named("region.leaked")] == [cache.cache_id]
    assert log.named("memory.failed")
    assert log.named("memory.hangs")
    assert 0 < emulator.left()["device_blocks"] < blocks
    leaked.clear()


@pytest.mark.allow_leak("acl-emulator")  # the same
async def test_p1_a_source_that_ends_frees_nothing_that_a_peer_of_its_process_still_copies(emulator: Emulator) -> None:
    emulator.configure(abort_works=0)
    async with node(LLMRole.DECODER, DECODER, transport="inproc", settle_timeout=200) as decoder:
        async with node(LLMRole.PROMPT, PROMPT, listen=True, transport="inproc", close_timeout=500) as prompt:
            pair = Duo(prompt, decoder)
            await pair.link()
            await pair.publish(EVEN)
            cache = await pair.destination(EVEN)
            emulator.hang(times=-1)
            with pytest.raises(LLMTimeoutError) as caught:
                await decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT, 0), cache, 0, timeout=FEW_MS)
            assert caught.value.destination_unsafe
        assert emulator.violations() == []
        emulator.resume()
        await decoder.kv_cache_manager.settled(cache, TIMEOUT_MS)
        assert emulator.violations() == []
    leaked.clear()
