"""`device_backend` as programs see it: what `init` opens, refuses and says, and that it holds no loop meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpull_async import CacheDesc, CacheKey, DataType, LLMDataDist, LLMException, LLMRole, LLMStatusCode, Placement
from kvpull_async.engine import live_engines
from kvpull_async.memory._acl import AclMissing, load
from kvpull_sync import LLMDataDist as BlockingDataDist
from tests.acl_emulator import Emulator
from tests.acl_libraries import ran
from tests.duo import DECODER, PROMPT, cluster, engine_of, node, options
from tests.loop_nodes import event_log, eventually
from tests.npu import Variant, serving

DESC = CacheDesc(2, [4, 64], DataType.DT_UINT8)
NBYTES = 4 * 64
SICK = 507033
NOT_ENABLED = LLMStatusCode.LLM_FEATURE_NOT_ENABLED


@pytest.fixture
def npu() -> Iterator[Emulator]:
    with serving(Variant("newest")) as emulator:
        yield emulator


@pytest.fixture
def no_cann(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "KVPULL_DEVICE_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    try:
        acl = load({})
    except AclMissing:
        return
    pytest.skip(f"here the dynamic loader finds {acl.path}")


def opening_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kvpull-")]


def pattern(index: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(index).integers(0, 256, NBYTES, np.uint8)


# -- without CANN ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_cann")
async def test_who_insists_on_an_npu_hears_at_init_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    made = LLMDataDist(LLMRole.MIX, 1)
    with pytest.raises(LLMException) as caught:
        await made.init(options(device_backend="acl"))
    assert caught.value.status_code is NOT_ENABLED
    for tried in (f"{tmp_path}/lib64/libascendcl.so", "libacl_rt.so", "ASCEND_TOOLKIT_HOME"):
        assert tried in str(caught.value)
    assert live_engines() == []
    await made.init(options(device_backend="host"))  # the object can be used all the same
    await made.finalize()


@pytest.mark.usefixtures("no_cann")
def test_who_insists_hears_it_from_the_blocking_api_too() -> None:
    made = BlockingDataDist(LLMRole.MIX, 1)
    with pytest.raises(LLMException, match="libascendcl") as caught:
        made.init(options(device_backend="acl"))
    assert caught.value.status_code is NOT_ENABLED


@pytest.mark.usefixtures("no_cann")
async def test_auto_serves_host_memory_and_says_why() -> None:
    with event_log() as log:
        async with node(LLMRole.PROMPT, PROMPT, device_backend="auto") as made:
            cache = await made.kv_cache_manager.allocate_cache(DESC)
            made.kv_cache_manager.get_cache_tensors(cache)[0].numpy()[:] = 7
    (event,) = log.named("memory.chosen")
    assert (event["backend"], event["local_cluster_id"]) == ("host", PROMPT)
    assert "no Ascend" in event["reason"]
    assert event not in log.warnings


def test_the_packages_look_for_nothing_when_they_are_imported() -> None:
    program = """
        import kvpull_async, kvpull_sync
        print([name for name in sys.modules if name.endswith(("._acl", ".ascend")) or ".npu" in name])
        print("acl" in open("/proc/self/maps").read())
    """
    assert ran(program).splitlines() == ["[]", "False"]


# -- on the emulated NPU -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "acl"])
async def test_an_npu_that_is_there_is_taken(npu: Emulator, backend: str) -> None:
    with event_log() as log:
        async with node(LLMRole.PROMPT, PROMPT, device_backend=backend, device_id=1) as made:
            cache = await made.kv_cache_manager.allocate_cache(DESC)
            (region, _) = cache._binding.regions  # type: ignore[union-attr]
            assert region.device == 1
            npu.memory(region.address, NBYTES)[:] = pattern(0)
            (tensor,) = made.kv_cache_manager.get_cache_tensors(cache)
            assert np.array_equal(tensor.numpy().reshape(-1), pattern(0))
    (event,) = log.named("memory.chosen")
    assert (event["backend"], event["device_id"], event["library"]) == ("acl", 1, str(npu.path))
    assert event["soc"]
    assert event["version"]
    assert event["missing"] == ""


async def test_what_the_release_lacks_is_in_the_log() -> None:
    with serving(Variant("8.0", "8.0")), event_log() as log:
        async with node(LLMRole.PROMPT, PROMPT, device_backend="auto"):
            pass
    (event,) = log.named("memory.chosen")
    assert event["missing"] == "aclrtMemcpyBatchAsync, aclrtPointerGetAttributes, aclrtStreamAbort"


async def test_host_memory_is_taken_beside_an_npu_if_that_is_wanted(npu: Emulator) -> None:
    async with node(LLMRole.PROMPT, PROMPT, device_backend="host") as made:
        cache = await made.kv_cache_manager.allocate_cache(DESC)
        made.kv_cache_manager.get_cache_tensors(cache)[0].numpy()[:] = 7
    assert npu.counts() == {}


async def test_a_pull_lands_on_the_npu_and_one_of_host_memory_beside_it(npu: Emulator) -> None:
    async with (
        node(LLMRole.PROMPT, PROMPT, device_backend="acl", listen=True) as source,
        node(LLMRole.DECODER, DECODER, device_backend="acl", device_id=1) as puller,
    ):
        await puller.link_clusters([cluster(PROMPT, source.listen_address)], 10_000)
        made = await source.kv_cache_manager.allocate_cache(DESC, [CacheKey(PROMPT, number) for number in range(4)])
        for index, region in enumerate(made._binding.regions):  # type: ignore[union-attr]
            npu.memory(region.address, NBYTES)[:] = pattern(index)
        host = CacheDesc(2, [4, 64], DataType.DT_UINT8, placement=Placement.HOST)
        for desc, key in ((DESC, 1), (host, 2)):
            into = await puller.kv_cache_manager.allocate_cache(desc)
            await puller.kv_cache_manager.pull_cache(CacheKey(PROMPT, key), into)
            for index in range(2):
                (tensor,) = puller.kv_cache_manager.get_cache_tensors(into, index)
                assert np.array_equal(tensor.numpy()[0], pattern(index).reshape(4, 64)[key])
            await puller.kv_cache_manager.deallocate_cache(into)


async def test_a_device_that_cannot_be_opened(npu: Emulator) -> None:
    npu.inject("aclrtSetDevice", SICK, times=-1)
    made = LLMDataDist(LLMRole.MIX, 1)
    with pytest.raises(LLMException, match=str(SICK)) as caught:
        await made.init(options(device_backend="acl"))
    assert caught.value.status_code is LLMStatusCode.LLM_FAILED
    with event_log() as log:
        async with node(LLMRole.PROMPT, PROMPT, device_backend="auto") as host:
            assert engine_of(host).memory.name == "host"
    (event,) = log.named("memory.chosen", text=str(SICK))
    assert event["backend"] == "host"
    assert event in log.warnings


async def test_a_device_that_is_not_there(npu: Emulator) -> None:
    made = LLMDataDist(LLMRole.MIX, 1)
    with pytest.raises(LLMException, match="no device 7"):
        await made.init(options(device_backend="acl", device_id=7))
    npu.configure(devices=0)
    with pytest.raises(LLMException):
        await made.init(options(device_backend="acl"))
    with event_log() as log:
        async with node(LLMRole.PROMPT, PROMPT, device_backend="auto"):
            pass
    assert [event["backend"] for event in log.warnings if event["event"] == "memory.chosen"] == ["host"]


# -- while it opens and closes -----------------------------------------------------------------------------------------


async def longest_pause(task: asyncio.Future[Any]) -> float:
    """Seconds that this loop was away at most while the task ran."""
    longest, last = 0.0, time.monotonic()
    while not task.done():
        await asyncio.sleep(0.005)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


async def test_p6_init_and_finalize_do_not_hold_the_loop_however_slow_the_device(npu: Emulator) -> None:
    npu.configure(call_us=300_000)
    made = LLMDataDist(LLMRole.MIX, 1)
    began = time.monotonic()
    task = asyncio.ensure_future(made.init(options(device_backend="acl")))
    pause = await longest_pause(task)
    await task
    assert time.monotonic() - began > 0.5, "the emulator was not slow"
    ending = asyncio.ensure_future(made.finalize())
    assert max(pause, await longest_pause(ending)) < 0.25
    await ending


async def test_a_cancelled_init_leaves_nothing_behind(npu: Emulator) -> None:
    npu.configure(call_us=100_000)
    made = LLMDataDist(LLMRole.MIX, 1)
    task = asyncio.ensure_future(made.init(options(device_backend="acl")))
    await eventually(lambda: npu.count("aclInit") > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert live_engines() == []
    npu.configure(call_us=0)
    await eventually(lambda: opening_threads() == [], lambda: str(opening_threads()))
    assert not any(npu.left().values())
    await made.init(options(device_backend="acl"))
    await made.finalize()


async def test_finalize_does_not_wait_for_a_device_that_still_opens(npu: Emulator) -> None:
    npu.configure(call_us=200_000)
    made = LLMDataDist(LLMRole.MIX, 1)
    task = asyncio.ensure_future(made.init(options(device_backend="acl", close_timeout=1000)))
    await eventually(lambda: npu.count("aclInit") > 0)
    await made.finalize()
    with pytest.raises(LLMException) as caught:
        await task
    assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
    npu.configure(call_us=0)
    await eventually(lambda: opening_threads() == [], lambda: str(opening_threads()))
    assert not any(npu.left().values())


async def test_what_is_asked_for_while_init_runs_is_refused(npu: Emulator) -> None:
    npu.configure(call_us=100_000)
    made = LLMDataDist(LLMRole.DECODER, DECODER)
    task = asyncio.ensure_future(made.init(options(device_backend="acl")))
    await eventually(lambda: npu.count("aclInit") > 0)
    manager = made.kv_cache_manager
    with pytest.raises(LLMException, match="init"):
        await manager.allocate_cache(DESC)
    npu.configure(call_us=0)
    await task
    cache = await manager.allocate_cache(DESC)  # the manager that was taken too early is none the worse
    assert engine_of(made).memory.name == "acl"
    assert cache._binding is not None
    await made.finalize()
