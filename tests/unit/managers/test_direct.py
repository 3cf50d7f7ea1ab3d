"""Small pulls on the caller's thread: the same bytes as any pull's, and the ordinary way for all that is unusual."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import kvpull_sync
from kvpull_async import (
    Cache,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    face_managers,
)
from tests.duo import DECODER, PROMPT, TIMEOUT_MS, arrays, cluster, engine_of, fill, node, options, pattern

DESC = CacheDesc(4, [4, 1024], DataType.DT_UINT8, Placement.DEVICE)
ROWS = {"transport": "shm", "enable_cache_manager": True, "enable_remote_cache_accessible": True}


@dataclass
class Scene:
    """Two nodes over shared memory with remote cache access, a filled cache and a destination."""

    prompt: LLMDataDist
    decoder: LLMDataDist
    source: Cache
    cache: Cache
    ended: bool = False
    """Whether the test has finalized the decoder by itself."""

    def key(self, index: int = 0) -> CacheKeyByIdAndIndex:
        return CacheKeyByIdAndIndex(PROMPT, self.source.cache_id, index)

    async def pull(self, index: int = 0, batch_index: int = 0, size: int = -1, **options: Any) -> None:
        await self.decoder.cache_manager.pull_cache(self.key(index), self.cache, batch_index, size, **options)

    @property
    def asked(self) -> int:
        """How many requests this connection of the link has carried."""
        link = engine_of(self.decoder).links.find(PROMPT)
        assert link is not None
        return link._lanes[0].session._last_request

    @property
    def pulls(self) -> int:
        return engine_of(self.decoder).snapshot()["pulls_finished"]


@contextlib.asynccontextmanager
async def scene(desc: CacheDesc = DESC, **properties: Any) -> AsyncIterator[Scene]:
    async with (
        node(LLMRole.PROMPT, PROMPT, listen=True, **ROWS, **properties) as prompt,
        node(LLMRole.DECODER, DECODER, **ROWS, **properties) as decoder,
    ):
        await decoder.link_clusters([cluster(PROMPT, prompt.listen_address)], TIMEOUT_MS)
        source, cache = (
            await prompt.cache_manager.allocate_cache(desc),
            await decoder.cache_manager.allocate_cache(desc),
        )
        fill(source)
        made = Scene(prompt, decoder, source, cache)
        yield made
        if not made.ended:
            await decoder.cache_manager.deallocate_cache(cache)
        await prompt.cache_manager.deallocate_cache(source)


def filled(cache: Cache, *, tensor: int, entry: int, source_tensor: int, source: int, nbytes: int = 1024) -> bool:
    row = arrays(cache)[tensor][entry]
    return bool((row[:nbytes] == pattern(source_tensor, source)).all()) and not row[nbytes:].any()


async def test_after_the_first_pull_the_source_is_not_asked_any_more() -> None:
    async with scene() as made:
        await made.pull(1, 2)
        assert made.asked == 1
        for index in range(4):
            await made.pull(index, 3 - index)
        assert made.asked == 1
        assert made.pulls == 5
        for tensor in range(4):
            for index in range(4):
                assert filled(made.cache, tensor=tensor, entry=3 - index, source_tensor=tensor, source=index)


async def test_layers_sizes_and_one_tensor_layers_land_where_they_should_and_nowhere_else() -> None:
    async with scene() as made:
        await made.pull()
        for array in arrays(made.cache):
            array[...] = 0
        one = {"src_layer_range": range(3, 4), "dst_layer_range": range(1, 2), "tensor_num_per_layer": 1}
        await made.pull(2, 1, 100, **one)
        await made.pull(3, 2, src_layer_range=range(1, 2), dst_layer_range=range(1), tensor_num_per_layer=2)
        assert made.asked == 1
        assert filled(made.cache, tensor=1, entry=1, source_tensor=3, source=2, nbytes=100)
        for tensor in (0, 1):
            assert filled(made.cache, tensor=tensor, entry=2, source_tensor=2 + tensor, source=3)
        written = sum(int(array.astype(bool).sum()) for array in arrays(made.cache))
        assert written == 100 + 2 * 1024


@pytest.mark.parametrize(
    ("index", "batch_index", "size", "options", "error"),
    [
        (4, 0, -1, {}, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST),
        (0, 4, -1, {}, LLMStatusCode.LLM_PARAM_INVALID),
        (0, 0, 1025, {}, LLMStatusCode.LLM_PARAM_INVALID),
        (0, 0, 0, {}, LLMStatusCode.LLM_PARAM_INVALID),
        (0, -1, -1, {}, ValueError),
        (0, True, -1, {}, TypeError),
        (0, 0, 1.0, {}, TypeError),
        (0, 0, -1, {"layer_range": range(1)}, TypeError),
        (0, 0, -1, {"src_layer_range": range(0, 2, 2)}, LLMStatusCode.LLM_PARAM_INVALID),
        (0, 0, -1, {"src_layer_range": range(3)}, LLMStatusCode.LLM_PARAM_INVALID),
        (0, 0, -1, {"tensor_num_per_layer": 0}, LLMStatusCode.LLM_PARAM_INVALID),
        (0, 0, -1, {"src_layer_range": range(1), "tensor_num_per_layer": 3}, LLMStatusCode.LLM_PARAM_INVALID),
        (0, 0, -1, {"timeout": 0}, ValueError),
    ],
)
async def test_bad_arguments_fail_as_ever(index: int, batch_index: Any, size: Any, options: Any, error: Any) -> None:
    """The very errors of a pull that asks, and the destination stays as it was."""
    async with scene() as made:
        raised = []
        for _ in range(2):
            with pytest.raises(error if isinstance(error, type) else LLMException) as caught:
                await made.pull(index, batch_index, size, **options)
            raised.append((type(caught.value), getattr(caught.value, "status_code", None), str(caught.value)))
            if len(raised) == 1:
                await made.pull()
                for array in arrays(made.cache):
                    array[...] = 0
        assert raised[0] == raised[1]
        assert isinstance(error, type) or raised[0][1] == error
        assert not any(array.any() for array in arrays(made.cache))


async def test_offsets_deadlines_and_traces_are_served_too() -> None:
    async with scene() as made:
        await made.pull()
        for array in arrays(made.cache):
            array[...] = 0
        await made.pull(1, 0, 10, src_cache_offset=5, dst_cache_offset=7)
        assert (arrays(made.cache)[2][0][7:17] == pattern(2, 1)).all()
        await made.pull(1, 1, timeout=20_000)
        await made.pull(1, 2, traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01")
        assert all(filled(made.cache, tensor=0, entry=entry, source_tensor=0, source=1) for entry in (1, 2))


async def test_p7_a_released_source_is_an_error_and_never_stale_bytes() -> None:
    async with scene() as made:
        await made.pull()
        view = arrays(made.source)
        await made.prompt.cache_manager.deallocate_cache(made.source)
        for array in view:
            array[...] = 0xEE
        with pytest.raises(LLMException) as caught:
            await made.pull(1, 1)
        assert caught.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        assert not (arrays(made.cache)[0] == 0xEE).any()


async def test_p7_what_was_read_without_asking_is_reported_to_the_source() -> None:
    async with scene() as made:
        for _ in range(10):
            await made.pull()
        for _ in range(200):
            if engine_of(made.prompt).snapshot().get("reads_reported") == 9:
                break
            await asyncio.sleep(0.05)
        counts = engine_of(made.prompt).snapshot()
        assert counts["reads_reported"] == 9
        assert counts["bytes_served"] == 10 * 4 * 1024


async def test_p1_a_destination_taken_away_is_not_written() -> None:
    async with scene() as made:
        await made.pull()
        await made.decoder.cache_manager.deallocate_cache(made.cache)
        with pytest.raises(LLMException) as caught:
            await made.pull()
        assert caught.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


async def test_p4_a_lost_link_is_asked_anew() -> None:
    async with scene() as made:
        await made.pull()
        link = engine_of(made.decoder).links.find(PROMPT)
        assert link is not None
        loop = engine_of(made.decoder).core.loop
        lost = asyncio.run_coroutine_threadsafe(_cut(link), loop)
        await asyncio.wrap_future(lost)
        for _ in range(3):
            await made.pull(2, 2)
        assert made.asked == 1
        assert filled(made.cache, tensor=3, entry=2, source_tensor=3, source=2)


async def _cut(link: Any) -> None:
    link._lanes[0].abort("cut by the test")


async def test_p6_small_pulls_that_have_held_the_loop_too_long_leave_it_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(face_managers, "_HELD", -1.0)  # every pull has, however fast this machine is
    async with scene() as made:
        await made.pull()
        assert made.asked == 1
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        await asyncio.sleep(0)
        for _ in range(20):
            before = turns
            await made.pull()
            assert turns == before + 1, "none, or a pull that asked the source"
        counting.cancel()
        assert made.asked == 1


async def test_threads_that_pull_at_once_each_get_their_bytes() -> None:
    """The blocking face, from several threads, beside pulls that take the ordinary way on the same link."""
    with_options = options(**ROWS)
    async with node(LLMRole.PROMPT, PROMPT, listen=True, **ROWS) as prompt:
        source = await prompt.cache_manager.allocate_cache(DESC)
        fill(source)
        datadist = kvpull_sync.LLMDataDist(LLMRole.DECODER, DECODER)
        wrong: list[int] = []

        def work(number: int) -> None:
            manager = datadist.cache_manager
            cache = manager.allocate_cache(DESC)
            array = manager.get_cache_tensors(cache, 1)[0].view().reshape(4, -1)
            for turn in range(200):
                index = (number + turn) % 4
                extra = {"timeout": 20_000} if turn % 5 == 0 else {}
                array[...] = 0
                manager.pull_cache(CacheKeyByIdAndIndex(PROMPT, source.cache_id, index), cache, 0, **extra)
                if not (np.asarray(array[0]) == pattern(1, index)).all():
                    wrong.append(turn)
            manager.deallocate_cache(cache)

        def run() -> None:
            datadist.init(with_options)
            try:
                datadist.link_clusters([cluster(PROMPT, prompt.listen_address)], TIMEOUT_MS)
                threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            finally:
                datadist.finalize()

        await asyncio.to_thread(run)
        assert not wrong
        await prompt.cache_manager.deallocate_cache(source)


async def test_memory_of_the_caller_is_read_the_same_way() -> None:
    memory = np.zeros((4, 4, 1024), np.uint8)
    for tensor in range(4):
        memory[tensor] = np.arange(4, dtype=np.uint8)[:, None] + 16 * tensor + 1
    async with scene() as made:
        manager = made.prompt.cache_manager
        registered = await manager.register_cache(DESC, [tensor.ctypes.data for tensor in memory], [], True)
        key = CacheKeyByIdAndIndex(PROMPT, registered.cache_id, 3)
        for batch_index in range(3):
            await made.decoder.cache_manager.pull_cache(key, made.cache, batch_index)
            assert filled(made.cache, tensor=2, entry=batch_index, source_tensor=2, source=3)
        assert made.asked == 1
        await manager.unregister_cache(registered.cache_id)
        memory[...] = 0xEE
        with pytest.raises(LLMException):
            await made.decoder.cache_manager.pull_cache(key, made.cache, 3)
        assert not arrays(made.cache)[0][3].any()
