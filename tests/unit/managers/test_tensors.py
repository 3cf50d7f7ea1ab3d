"""What `get_cache_tensors` hands out: the memory itself where the host reaches it, and a copy of a device's."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpull_async import CacheDesc, DataType, LLMException, LLMRole, LLMStatusCode, LLMTimeoutError, Placement
from kvpull_async.engine import close_bounded
from tests.acl_emulator import Emulator
from tests.npu import Variant, serving
from tests.unit.memory.emulated import in_a_child
from tests.unit.side import Side, quarantine, status

SIZE = 3 << 20  # more than one slot of the staging
DESC = CacheDesc(2, [2, SIZE // 2], DataType.DT_UINT8)
HOST = CacheDesc(2, [2, 64], DataType.DT_UINT8, placement=Placement.HOST)


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with serving(Variant("newest")) as made:
        yield made


@pytest.fixture(params=["kv", "cache"])
def side(request: pytest.FixtureRequest, emulator: Emulator) -> Iterator[Side]:
    made = Side(request.param, LLMRole.PROMPT, device_backend="acl", sync_kv_timeout=2000, settle_timeout=200)
    yield made
    made.close()


def filled(emulator: Emulator, cache: Any, index: int) -> Any:
    region = cache._binding.regions[index]
    memory = emulator.memory(region.address, region.nbytes)
    memory[:] = np.random.default_rng(index).integers(0, 256, memory.size, np.uint8)
    return memory.copy()


def until_idle(cache: Any) -> None:
    end = time.monotonic() + 30
    while cache._binding.busy:
        assert time.monotonic() < end, "nobody has given the memory back"
        time.sleep(0.01)


def test_of_a_device_it_is_a_copy_of_every_byte(side: Side, emulator: Emulator) -> None:
    cache = side.allocate(DESC)
    wanted = [filled(emulator, cache, index) for index in range(2)]
    for index in (1, 0):
        assert np.array_equal(side.tensor(cache, index).reshape(-1), wanted[index])


def test_nobody_takes_the_copy_for_the_device(side: Side, emulator: Emulator) -> None:
    cache = side.allocate(DESC)
    wanted = filled(emulator, cache, 0)
    (tensor,) = side.manager.get_cache_tensors(cache, 0)
    with pytest.raises(ValueError, match="read-only"):
        tensor.numpy()[0, 0] = 1
    own = tensor.numpy(copy=True)
    own[0, 0] ^= 1
    filled(emulator, cache, 1)
    assert np.array_equal(tensor.numpy().reshape(-1), wanted)


def test_of_host_memory_it_is_the_memory_itself(side: Side) -> None:
    cache = side.allocate(HOST)
    side.tensor(cache, 1)[1, 5] = 7
    assert side.tensor(cache, 1)[1, 5] == 7


def test_what_was_read_can_be_released(side: Side, emulator: Emulator) -> None:
    cache = side.allocate(DESC)
    copy = side.tensor(cache, 0)
    side.run(side.manager.deallocate(cache, blocks=None))
    assert copy.sum() == 0  # new memory is cleared, and the copy is not the device's
    assert status(side.manager.get_cache_tensors, cache, 0) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


@pytest.mark.parametrize("abort_works", [1, 0])
def test_a_device_that_does_not_answer_takes_no_longer_than_a_pull_may(
    side: Side, emulator: Emulator, abort_works: int
) -> None:
    """Also where the copy goes on: then the cache is in use until it has ended."""
    cache, began = side.allocate(DESC), time.monotonic()
    emulator.configure(abort_works=abort_works)
    emulator.hang(times=-1)
    with pytest.raises(LLMTimeoutError, match="tensor 1") as caught:
        side.manager.get_cache_tensors(cache, 1)
    assert time.monotonic() - began < 15
    older = side.kind == "kv"
    expected = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT if older else LLMStatusCode.LLM_TIMEOUT
    assert caught.value.status_code is expected
    assert caught.value.retry_safe
    assert caught.value.operation == "get_cache_tensors"
    assert (caught.value.elapsed_ms or 0) >= 2000
    assert not caught.value.destination_unsafe
    assert cache._binding.busy is not bool(abort_works)
    emulator.resume()
    until_idle(cache)
    wanted = filled(emulator, cache, 1)
    assert np.array_equal(side.tensor(cache, 1).reshape(-1), wanted)


def test_ctrl_c_ends_the_wait_and_the_copy(side: Side, emulator: Emulator) -> None:
    cache = side.allocate(DESC)
    emulator.hang(times=-1)

    def press() -> None:
        while not emulator.left()["running"]:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        side.manager.get_cache_tensors(cache, 0)
    pressing.join()
    until_idle(cache)


@pytest.mark.allow_leak("acl-emulator-device")  # what may still be read is not given back
def test_a_read_that_cannot_be_stopped_does_not_hold_finalize() -> None:
    own = Variant("one of its own", without=("aclFinalizeReference",))  # what is left there is no other test's
    with serving(own, left=True, abort_works=0) as emulator:
        made = Side("cache", LLMRole.PROMPT, device_backend="acl", sync_kv_timeout=300, settle_timeout=200)
        cache = made.allocate(DESC)
        emulator.hang(times=-1)
        with pytest.raises(LLMTimeoutError):
            made.manager.get_cache_tensors(cache, 0)
        began = time.monotonic()
        made.close()
        assert time.monotonic() - began < 30
        assert emulator.left()["device_blocks"] == 1  # what is still read is not given back


def test_in_a_forked_child_it_is_refused_at_once(side: Side) -> None:
    cache = side.allocate(DESC)

    def refused() -> None:
        with pytest.raises(LLMException, match="forked child"):
            side.manager.get_cache_tensors(cache, 0)

    assert in_a_child(refused) == ""


def test_what_is_still_written_is_not_read(side: Side) -> None:
    cache = side.allocate(DESC)

    async def writer() -> asyncio.Future[None]:
        return await quarantine(cache)

    future = asyncio.run_coroutine_threadsafe(writer(), side.engine.core.loop).result(10)
    with pytest.raises(LLMTimeoutError, match="quarantined") as caught:
        side.manager.get_cache_tensors(cache, 0)
    assert caught.value.destination_unsafe
    side.engine.core.loop.call_soon_threadsafe(future.set_result, None)


def test_after_finalize_device_memory_is_gone_and_says_so(emulator: Emulator) -> None:
    made = Side("cache", LLMRole.PROMPT, device_backend="acl")
    cache, host = made.allocate(DESC), made.allocate(HOST)
    close_bounded(made.engine)
    assert emulator.left()["device_blocks"] == 0
    with pytest.raises(LLMException) as caught:
        made.manager.get_cache_tensors(cache, 0)
    assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
    assert made.tensor(host, 0).sum() == 0  # views of host memory stay
    made.kept.clear()
