"""Sources on this machine that are killed, stopped, restarted, or take their memory back, while it is being copied.

Over memory files ("mapped"), memory by address read through the kernel ("read"), and streamed where that is forbidden.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvpull_async import CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, LLMStatusCode, LLMTimeoutError
from kvpull_async.testing.faults import Gate
from kvpull_async.values import LLMRole
from tests import duo
from tests.canaries import intact, set_canary
from tests.inject import gated_copies
from tests.integration.own_loop import outcome
from tests.integration.processes import Child, child
from tests.integration.reader import (
    KINDS,
    NBYTES,
    Reader,
    comes_to,
    held_memory,
    options_for,
    reader,
    refused,
    source_kind,
    whole,
)
from tests.loop_nodes import eventually

LINK_FAILED, NOT_EXIST = LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
ONE_SIDED = [kind for kind in KINDS if kind != "streamed"]
each_kind = pytest.mark.parametrize("kind", KINDS)


class Held:
    """A source with key 0, linked, and a pull of that key whose copy stands still in its middle."""

    def __init__(self, source: Child, here: Reader, gate: Gate, kind: str) -> None:
        self.source, self.here, self.kind = source, here, kind
        self._gate = gate

    async def pull(
        self, *, timeout: float = duo.TIMEOUT_MS, threads: int | None = None
    ) -> tuple[Any, asyncio.Task[None]]:
        """`threads` tells how many of those that copy here stand still: by default all, also of other pulls."""
        cache = await self.here.cache()
        if self.kind == "streamed":
            await self.source.ask("hold", "holding")
        else:
            self._gate.close(times=threads)
        task = self.here.pull(cache, 0, timeout=timeout)
        await (self.source.hear("held") if self.kind == "streamed" else self._gate.reached())
        return cache, task

    def go_on(self) -> None:
        """Where this process copies by itself, it may."""
        self._gate.open()


@contextlib.asynccontextmanager
async def held(monkeypatch: pytest.MonkeyPatch, kind: str, **properties: Any) -> AsyncIterator[Held]:
    gate = gated_copies(monkeypatch)
    options = options_for(kind, **properties)
    async with (
        child("PROMPT", duo.PROMPT, program="source", listen=True, **options) as source,
        reader(**options) as here,
    ):
        await source.ask("publish", "published", key=0, nbytes=NBYTES, kind=source_kind(kind))
        await here.link(source)
        try:
            yield Held(source, here, gate, kind)
        finally:
            gate.open()


@each_kind
async def test_p1_p2_p8_a_source_killed_in_the_middle_of_a_copy(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A memory file outlives its owner, so its bytes are right all the same; other memory is gone."""
    async with held(monkeypatch, kind) as scene:
        before = held_memory()
        cache, pull = await scene.pull()
        scene.source.kill()
        scene.go_on()
        error = await outcome(pull)
        if error is None:
            assert kind == "mapped"
            assert whole(cache, 0)
        else:
            assert refused(error, LINK_FAILED).retry_safe
        set_canary(cache)
        assert not cache.quarantined
        await eventually(lambda: bool(scene.here.node.counters.get("links_lost")))
        refused(await outcome(scene.here.pull(cache, 0, timeout=5000)), LINK_FAILED)
        await scene.here.unlink(scene.source, force=True)
        assert intact(cache)
        await eventually(lambda: held_memory()["mappings"] <= before["mappings"] + 1)  # the destination's own


@each_kind
async def test_p3_p4_a_source_stopped_in_the_middle_of_a_copy(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Nobody needs the source to copy what is its own already; where it must send, the deadline ends the wait."""
    async with held(monkeypatch, kind) as scene:
        cache, pull = await scene.pull(timeout=1500)
        if kind == "streamed":
            scene.source.tell("let_go")
        scene.source.stop()
        began = time.monotonic()
        scene.go_on()
        error = await outcome(pull)
        assert time.monotonic() - began < 4
        if kind == "streamed" and error is not None:  # it may have let go before it stopped
            assert isinstance(error, LLMTimeoutError), error
            assert not error.destination_unsafe
        else:
            assert error is None
            assert whole(cache, 0)
        set_canary(cache)
        scene.source.go_on()
        if kind == "streamed":
            await scene.source.hear("let_go")
        await scene.here.check_right(0)
        assert intact(cache)
        assert scene.here.node.counters["links_up"] == 1


@pytest.mark.parametrize("kind", ONE_SIDED)
async def test_p2_p7_memory_taken_back_in_the_middle_of_a_copy_is_never_taken_for_the_cache(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The source writes something else to it as soon as the release has returned."""
    async with held(monkeypatch, kind, settle_timeout=100) as scene:
        cache, pull = await scene.pull()
        await scene.source.ask("spoil", "spoiled", key=0)
        scene.go_on()
        assert refused(await outcome(pull), NOT_EXIST).retry_safe
        assert not cache.quarantined
        set_canary(cache)
        refused(await outcome(scene.here.pull(cache, 0)), NOT_EXIST)
        await scene.source.ask("publish", "published", key=0, nbytes=NBYTES, kind=source_kind(kind), generation=1)
        await scene.here.check_right(0, generation=1)
        assert intact(cache)


@pytest.mark.parametrize("kind", ONE_SIDED)
async def test_p7_a_release_waits_for_the_reader_in_time(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    async with held(monkeypatch, kind, settle_timeout=20_000) as scene:
        cache, pull = await scene.pull(threads=1)
        async with duo.node(LLMRole.DECODER, duo.DECODER + 1, **options_for(kind)) as node:
            other = Reader(node)
            await other.link(scene.source)
            also = await other.cache()
            scene.source.tell("spoil", key=0)
            while (error := await outcome(other.pull(also, 0))) is None:
                pass
            refused(error, NOT_EXIST)  # from here on nobody else may begin, so the release has
        assert scene.source.heard_nothing(), "it was released under its reader"
        assert not pull.done()
        scene.go_on()
        assert await outcome(pull) is None
        assert whole(cache, 0)
        await scene.source.hear("spoiled")


@each_kind
async def test_p2_p4_a_source_restarted_in_the_middle_of_a_copy(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Other bytes under the same key, in the new process: never some of each."""
    async with held(monkeypatch, kind) as scene:
        cache, pull = await scene.pull()
        host, port = scene.source.address
        scene.source.kill()
        options = options_for(kind, listen_ip_info=f"{host}:{port}")
        async with child("PROMPT", duo.PROMPT, program="source", **options) as restarted:
            await restarted.ask("publish", "published", key=0, nbytes=NBYTES, kind=source_kind(kind), generation=1)
            await eventually(lambda: scene.here.node.counters.get("incarnation_changes", 0) == 1)
            scene.go_on()
            error = await outcome(pull)
            if error is None:
                assert kind == "mapped"
                assert whole(cache, 0)
            else:
                refused(error, LINK_FAILED)
            set_canary(cache)
            await scene.here.check_right(0, generation=1)
            assert intact(cache)


@pytest.mark.parametrize("kind", ONE_SIDED)
async def test_p1_a_cancelled_copy_writes_nothing_afterwards(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    async with held(monkeypatch, kind, settle_timeout=20_000) as scene:
        cache, pull = await scene.pull(threads=1)
        pull.cancel()
        await comes_to(scene.source, lambda state: not state["busy"])  # it has been told, so the pull is on its way out
        await scene.here.cache()  # the way to where the pull ends and back
        assert not pull.done(), "it ended while a thread was about to write to the destination"
        scene.go_on()
        assert isinstance(await outcome(pull), asyncio.CancelledError)
        set_canary(cache)
        await scene.here.check_right(0)
        assert intact(cache)


@pytest.mark.parametrize("kind", ONE_SIDED)
async def test_p3_a_copy_that_stands_still_is_quarantined_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    async with held(monkeypatch, kind) as scene:
        cache, pull = await scene.pull(timeout=300)
        error = await outcome(pull)
        assert isinstance(error, LLMTimeoutError), error
        assert error.destination_unsafe
        assert cache.quarantined
        scene.go_on()
        await scene.here.node.kv_cache_manager.settled(cache)
        set_canary(cache)
        await scene.here.check_right(0)
        assert intact(cache)


@pytest.mark.parametrize("kind", ONE_SIDED)
async def test_p2_p7_a_reader_stopped_in_its_copy_while_the_source_takes_the_memory_back(kind: str) -> None:
    """It finds out when it goes on, however long it slept: its copy is an error, or had been whole before."""
    nbytes, outcomes = 48 * 1024 * 1024, set()
    desc = CacheDesc(2, [1, nbytes], DataType.DT_UINT8)
    async with (
        duo.node(LLMRole.PROMPT, duo.PROMPT, listen=True, transport="shm", settle_timeout=50) as prompt,
        child("DECODER", duo.DECODER, transport="shm") as decode,
    ):
        assert prompt.listen_address is not None
        await decode.ask("link", "linked", cluster=duo.PROMPT, address=list(prompt.listen_address))
        for number in range(5):
            key = CacheKey(duo.PROMPT, 4 * number)
            if kind == "mapped":
                offered: Any = await prompt.kv_cache_manager.allocate_cache(desc, [key])
                duo.fill(offered)
                arrays = duo.arrays(offered)
            else:
                arrays = [np.full((1, nbytes), duo.pattern(tensor, 0), np.uint8) for tensor in (0, 1)]
                addresses = [int(array.ctypes.data) for array in arrays]
                offered = await prompt.cache_manager.register_cache(desc, addresses, [key])
            decode.tell("pull", cluster=duo.PROMPT, key=4 * number, nbytes=nbytes, timeout=duo.TIMEOUT_MS, entries=1)
            await decode.hear("pulling")
            await asyncio.sleep(0.005 * number)
            decode.stop()
            if kind == "mapped":
                await prompt.kv_cache_manager.remove_cache_key(key)
                await prompt.kv_cache_manager.deallocate_cache(offered)
            else:
                await prompt.cache_manager.unregister_cache(offered.cache_id)
            for array in arrays:
                array[:] = 0xEE
            decode.go_on()
            said = await decode.hear("pulled", "failed")
            assert said.get("right", True), "it took for the cache what was written there afterwards"
            assert said.get("status", "LLM_KV_CACHE_NOT_EXIST") == "LLM_KV_CACHE_NOT_EXIST"
            outcomes.add(said["event"])
    assert outcomes


@pytest.mark.parametrize("kind", ONE_SIDED)
@pytest.mark.parametrize("nbytes", [4096, 200_000])
async def test_p2_p7_reads_without_a_round_trip_end_with_the_cache(kind: str, nbytes: int) -> None:
    """Read over and over, without asking, while the source takes the cache away and overwrites its memory."""
    options: dict[str, Any] = {"transport": "shm", "settle_timeout": 100}
    async with (
        child("PROMPT", duo.PROMPT, program="source", listen=True, **options) as source,
        reader(**options, local_comm_res="") as here,
    ):
        await here.link(source)
        manager: Any = here.node.cache_manager
        cache = await here.cache(nbytes)
        whole_reads = 0
        for key in range(25):
            said = await source.ask("publish", "published", key=key, nbytes=nbytes, kind=source_kind(kind))
            there = CacheKeyByIdAndIndex(duo.PROMPT, said["cache_id"], 0)
            await manager.pull_cache(there, cache, 0, src_cache_offset=0)
            source.tell("spoil", key=key)
            error: BaseException | None = None
            while error is None:
                set_canary(cache)
                pull = asyncio.ensure_future(manager.pull_cache(there, cache, 0, src_cache_offset=0))
                error = await outcome(pull)
                assert error is not None or whole(cache, key), "not the cache that was asked for"
                whole_reads += error is None
            refused(error, NOT_EXIST)
            await source.hear("spoiled")
        assert whole_reads
