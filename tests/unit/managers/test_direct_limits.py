"""Where small pulls are not done on the caller's thread, and what then becomes of them: the ordinary way answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import signal
import threading
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
import structlog

from kvpull_async import CacheDesc, CacheKeyByIdAndIndex, DataType, LLMException, LLMStatusCode, Placement
from kvpull_async.managers import direct
from tests.duo import PROMPT, arrays, engine_of, fill, pattern
from tests.loop_nodes import event_log
from tests.torch_cpu import torch_cpu
from tests.unit.managers.test_direct import DESC, Scene, scene


def now(made: Scene, *arguments: Any, **options: Any) -> bool:
    """Whether the very same pull is done at once."""
    manager = made.decoder.cache_manager._manager
    return manager.pull_now(made.key(), made.cache, *(arguments or (0, -1)), options)


async def test_p6_only_few_bytes_are_copied_on_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    large = CacheDesc(2, [1, direct._MOST_BYTES], DataType.DT_UINT8, Placement.DEVICE)
    async with scene(large) as made:
        await made.pull()
        assert not now(made)
        await made.pull()
        assert made.asked == 1
        assert now(made, 0, direct._MOST_BYTES // 2)
    async with scene() as made:
        await made.pull()
        assert now(made)
        monkeypatch.setattr(direct, "_MOST_TENSORS", DESC.num_tensors - 1)
        assert not now(made)


async def test_a_deadline_of_its_own_does_not_make_a_small_pull_dear() -> None:
    async with scene() as made:
        await made.pull()
        assert now(made, timeout=500)
        assert now(made, timeout=0.5)
        for odd in (True, "1", 0, -1, float("nan"), 2**31):
            assert not now(made, timeout=odd)


@pytest.mark.parametrize(("level", "at_once"), [(logging.DEBUG, False), (logging.WARNING, True)])
async def test_a_configured_log_keeps_small_pulls_fast_unless_it_wants_to_hear_of_them(
    level: int, at_once: bool
) -> None:
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(level), logger_factory=structlog.ReturnLoggerFactory()
    )
    try:
        async with scene() as made:
            await made.pull()
            assert now(made) is at_once
    finally:
        structlog.reset_defaults()


async def test_p9_a_traced_pull_is_found_in_the_sources_events() -> None:
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    with event_log() as events:
        async with scene() as made:
            await made.pull()
            await made.pull(traceparent=trace)
            await events.first("serve.finished", traceparent=trace)


async def test_p10_memory_that_is_gone_at_the_source_is_an_error_with_all_its_fields() -> None:
    """Registered memory that the source's program has unmapped without a word."""
    memory = mmap.mmap(-1, 4 * 4096)
    array = np.frombuffer(memory, np.uint8)
    address = array.ctypes.data
    async with scene() as made:
        desc = CacheDesc(4, [1, 4096], DataType.DT_UINT8, Placement.DEVICE)
        target = await made.decoder.cache_manager.allocate_cache(desc)
        registered = await made.prompt.cache_manager.register_cache(desc, [address + i * 4096 for i in range(4)], [])
        key = CacheKeyByIdAndIndex(PROMPT, registered.cache_id, 0)
        await made.decoder.cache_manager.pull_cache(key, target)
        del array
        memory.close()
        with pytest.raises(LLMException) as caught:
            await made.decoder.cache_manager.pull_cache(key, target)
        error = caught.value
        assert error.operation == "pull_cache"
        assert error.peer
        assert error.elapsed_ms is not None
        assert engine_of(made.decoder).snapshot()["pulls_failed"] == 1
        await made.prompt.cache_manager.unregister_cache(registered.cache_id)
        await made.decoder.cache_manager.deallocate_cache(target)


async def test_p8_in_a_forked_child_a_small_pull_is_refused_as_any_other_also_while_the_parent_pulls() -> None:
    async with scene() as made:
        await made.pull()
        binding, pull = made.cache._binding, made.decoder.cache_manager.pull_cache(made.key(), made.cache)
        with binding._gate:  # type: ignore[union-attr]  # another thread of the parent is in the middle of it
            child = os.fork()
            if not child:
                os._exit(_in_child(pull))
        status = await asyncio.to_thread(_ended, child)
        assert os.waitstatus_to_exitcode(status) == 0
        await pull


def _ended(child: int) -> int:
    give_up = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > give_up:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return ended[1]


def _in_child(pull: Coroutine[Any, Any, None]) -> int:
    try:
        pull.send(None)
    except RuntimeError as error:
        return 0 if "fork" in str(error) else 2
    except BaseException:  # noqa: BLE001  (told by the exit status)
        return 3
    return 4


async def test_an_interrupt_in_the_middle_leaves_neither_link_nor_cache_claimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with scene() as made:
        await made.pull()
        link = engine_of(made.decoder).links.find(PROMPT)
        assert link is not None
        for name in ("unclaim", "claim"):
            real = getattr(type(link), name)

            def interrupted(self: Any, *arguments: Any, real: Any = real) -> Any:
                real(self, *arguments)
                monkeypatch.undo()
                raise KeyboardInterrupt

            monkeypatch.setattr(type(link), name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                now(made)
            assert not made.cache._binding.busy  # type: ignore[union-attr]
            assert now(made)


async def test_p8_finalize_while_other_threads_pull_leaves_nothing_claimed() -> None:
    async with scene() as made:
        await made.pull()
        stop, manager = threading.Event(), made.decoder.cache_manager._manager

        def work() -> None:
            with contextlib.suppress(LLMException, RuntimeError):
                while not stop.is_set():
                    manager.pull_now(made.key(), made.cache, 0, -1, {})

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        await asyncio.sleep(0.02)
        binding, link = made.cache._binding, engine_of(made.decoder).links.find(PROMPT)
        await made.decoder.finalize()
        made.ended = True
        stop.set()
        for thread in threads:
            thread.join()
        assert binding is not None
        assert not binding.busy  # type: ignore[attr-defined]
        assert link is not None
        assert not link._fifo.busy


async def test_p7_a_pool_that_just_fits_can_be_used_again_and_again() -> None:
    """Peers unmap what was released, and an allocation waits for that instead of failing."""
    nbytes = 4 * 4 * 4096
    desc = CacheDesc(4, [4, 4096], DataType.DT_UINT8, Placement.DEVICE)
    async with scene(mem_pool_cfg=f'{{"memory_size": {nbytes + 4 * 4 * 4096}}}') as made:
        manager = made.prompt.cache_manager
        target = await made.decoder.cache_manager.allocate_cache(desc)
        for turn in range(20):
            source = await manager.allocate_cache(desc)
            fill(source)
            for _ in range(1 + turn % 2):
                key = CacheKeyByIdAndIndex(PROMPT, source.cache_id, 1)
                await made.decoder.cache_manager.pull_cache(key, target)
            assert arrays(target)[3][0].any()
            await manager.deallocate_cache(source)
        await made.decoder.cache_manager.deallocate_cache(target)


async def test_p5_a_small_pull_does_not_overtake_one_that_was_asked_for_before_it() -> None:
    """Into the same bytes: whoever came last has the last word."""
    large = CacheDesc(2, [4, 1024 * 1024], DataType.DT_UINT8, Placement.DEVICE)
    async with scene(large) as made:
        await made.pull()
        one = {"src_layer_range": range(1), "dst_layer_range": range(1), "tensor_num_per_layer": 1}
        for turn in range(60):
            first = asyncio.ensure_future(made.pull(1))
            second = asyncio.ensure_future(made.pull(2, 0, 4096, **one))
            await asyncio.gather(first, second)
            assert arrays(made.cache)[0][0][0] == pattern(0, 2), turn
        assert now(made, 0, 4096)


async def test_p8_after_finalize_has_begun_nobody_claims_a_cache() -> None:
    async with scene() as made:
        await made.pull()
        binding = made.cache._binding
        assert binding is not None
        await made.decoder.finalize()
        made.ended = True
        assert not binding.claim(object())  # type: ignore[attr-defined]


async def test_p2_a_read_that_began_before_the_link_was_made_anew_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process at the other end may be another one now, whose cache of that number is another cache."""
    async with scene() as made:
        await made.pull()
        link = engine_of(made.decoder).links.find(PROMPT)
        assert link is not None
        real = type(link).claim

        def late(self: Any, token: object) -> bool:
            self.standing._offered.clear()  # what a reconnection does
            return real(self, token)

        monkeypatch.setattr(type(link), "claim", late)
        assert not now(made)
        monkeypatch.undo()
        await made.pull()
        assert now(made)


async def test_a_destination_is_found_writable_before_anything_is_done_at_once() -> None:
    room = mmap.mmap(-1, 4 * 4096, prot=mmap.PROT_READ)
    first = np.frombuffer(room, np.uint8).ctypes.data
    async with scene() as made:
        await made.pull()
        manager, good = made.decoder.cache_manager, made.cache
        made.cache = await manager.register_cache(DESC, [first + i * 4096 for i in range(4)])
        for _ in range(2):
            with pytest.raises(LLMException, match="read-only"):
                await made.pull()
            assert not now(made)
        made.cache = good
        assert now(made)


async def test_a_tensor_that_has_moved_is_not_written_at_once() -> None:
    torch = torch_cpu()
    tensors = [torch.zeros(4096, dtype=torch.uint8) for _ in range(4)]
    async with scene() as made:
        manager, good = made.decoder.cache_manager, made.cache
        made.cache = await manager.register_cache(DESC, tensors=tensors)
        for _ in range(2):
            await made.pull()
        assert now(made)
        tensors[2].share_memory_()
        assert now(made, 0, -1, src_layer_range=range(1), dst_layer_range=range(1)), "the others are where they were"
        assert not now(made)
        with pytest.raises(LLMException, match=r"tensor 2 of cache .* moved while it was registered") as caught:
            await made.pull()
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
        made.cache = good
