"""Two nodes of one process with one NPU: what one of them lends is copied by the other, and ends with either."""

from __future__ import annotations

import asyncio

import pytest

from kvpull_async import CacheKey, LLMException, LLMRole, LLMStatusCode, LLMTimeoutError
from tests import duo, npu
from tests.acl_emulator import Emulator
from tests.integration.own_loop import within
from tests.loop_nodes import eventually

UNSTOPPABLE = npu.Variant("a library of its own", without=("aclrtGetMemInfo", "aclrtStreamAbort"))
"""What stays on it stays for the process, and must be nobody else's to look for."""
NEWEST = npu.Variant("newest")
QUICK = {"transport": "inproc", "settle_timeout": 200, "close_timeout": 1500}


async def begin(pair: duo.Duo, emulator: Emulator, timeout: int) -> tuple[duo.KvCache, asyncio.Future[None]]:
    """A pull whose copy hangs, and the source's cache, which no key keeps."""
    source, into = await pair.publish(duo.BIG), await pair.destination(duo.BIG)
    emulator.hang()
    before = emulator.left()["running"]
    key = CacheKey(duo.PROMPT, 0)
    pulling = asyncio.ensure_future(pair.decoder.kv_cache_manager.pull_cache(key, into, timeout=timeout))
    await eventually(lambda: emulator.left()["running"] > before)
    for each in duo.keys(duo.BIG):
        await pair.prompt.kv_cache_manager.remove_cache_key(each)
    return source, pulling


async def test_p7_a_copy_of_the_peers_is_stopped_when_its_source_is_released() -> None:
    with npu.serving(NEWEST) as emulator:
        async with duo.duo(**QUICK) as pair:
            source, pulling = await begin(pair, emulator, duo.TIMEOUT_MS)
            await within(pair.prompt.kv_cache_manager.deallocate_cache(source))
            with pytest.raises(LLMException, match="withdrawn"):
                await within(pulling)
            again, into = await pair.publish(duo.BIG, first=10), await pair.destination(duo.BIG)
            await within(pair.decoder.kv_cache_manager.pull_cache(CacheKey(duo.PROMPT, 10), into))
            assert duo.holds(into, entry=0, source=0)
            assert again.cache_id != source.cache_id


@pytest.mark.allow_leak("acl-emulator-device")  # which is the point
async def test_p7_a_source_is_not_free_because_the_node_whose_copy_reads_it_has_ended() -> None:
    with npu.serving(UNSTOPPABLE, left=True) as emulator:
        async with duo.node(LLMRole.PROMPT, duo.PROMPT, listen=True, **QUICK) as prompt:
            async with duo.node(LLMRole.DECODER, duo.DECODER, **QUICK) as decoder:
                pair = duo.Duo(prompt, decoder)
                await pair.link()
                source, pulling = await begin(pair, emulator, 300)
                with pytest.raises(LLMTimeoutError) as caught:
                    await within(pulling)
                assert caught.value.destination_unsafe
            with pytest.raises(LLMException, match="do not free its memory") as refused:
                await within(prompt.kv_cache_manager.deallocate_cache(source))
            assert refused.value.status_code == LLMStatusCode.LLM_TIMEOUT
        assert emulator.left()["device_blocks"] == 2, "the source's and the destination's, for the process"
