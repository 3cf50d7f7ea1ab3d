"""Reports about speed: work for each block, polling, locks and threads that others need, queues that hold up others."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpull_async import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    DataType,
    LLMRole,
    TransferConfig,
    plan,
)
from kvpull_async.memory.host import HostMemory
from kvpull_async.transport.shm.remote import Mapped
from tests import duo
from tests.conformance.api import AWAITED, Api
from tests.field.speed import by_hand, counting_steps, stalls, turns, used
from tests.inject import gated_memories
from tests.integration.own_loop import loop_pair, within
from tests.integration.processes import child, sockets
from tests.integration.pushing import RECEIVER, desc, ends
from tests.integration.rig import QUICK, Here, Nodes, begin, each_face, each_path, each_process_path, nodes
from tests.integration.transfers import BY_ADDRESS, OK, addresses, transfer
from tests.loop_nodes import eventually
from tests.transferring import Ready

U8 = DataType.DT_UINT8
KEY = BlocksCacheKey(duo.PROMPT, 0)


async def blocks_of(n: Nodes, count: int, nbytes: int, *, tensors: int = 1) -> Any:
    """Paged caches of so many blocks at both nodes; the destination's."""
    shape = CacheDesc(tensors, [count, nbytes], U8)
    n.kept.append(await n.prompt.cache_manager.allocate_blocks_cache(shape, KEY))
    n.kept.append(await n.decoder.cache_manager.allocate_blocks_cache(shape))
    return n.kept[-1]


def scattered(count: int, of: int) -> tuple[Any, Any]:
    random = np.random.default_rng(count)
    return random.permutation(of)[:count], random.permutation(of)[:count]


# -- 8.1 to 8.4: work for each block -----------------------------------------------------------------------------------


@each_path
async def test_8_1_fifteen_thousand_scattered_blocks_stall_no_loop(path: str) -> None:
    """Neither the caller's nor either core's: by less than plain Python takes to look at each block."""
    count = 15_000
    python = by_hand(count)
    async with nodes(AWAITED, path) as n:
        cache = await blocks_of(n, 2 * count, 4096)
        src, dst = scattered(count, 2 * count)
        pull = n.decoder.cache_manager.pull_blocks

        async def pulled() -> None:
            await pull(KEY, cache, src, dst, tensor_num_per_layer=1)

        await pulled()
        assert await stalls(pulled, n.prompt, n.decoder, enough=2 * python) < 2 * python


@pytest.mark.parametrize("path", ["tcp", "inproc", "shm"])
async def test_8_2_the_loops_do_nothing_for_single_blocks(path: str) -> None:
    """Sixteen times as many blocks take about as many instructions, on the loop of both cores."""
    async with loop_pair(duo.SMALL, transport=path) as pair:
        shape = CacheDesc(2, [16_384, 256], U8)
        source = await within(pair.source.manager.allocate_blocks_cache(shape, KEY).start())
        cache = await within(pair.puller.manager.allocate_blocks_cache(shape, None).start())
        steps: dict[int, list[int]] = {512: [], 8192: []}
        for count in (8192, *list(steps) * 4):
            src, dst = scattered(count, 16_384)
            with counting_steps() as counted:
                await within(pair.puller.manager.pull_blocks(KEY, cache, src, dst, {}).start())
            steps[count].append(counted[0])
        assert min(steps[8192]) < 2 * min(steps[512]), steps
        del source


def test_8_2_a_table_of_four_thousand_blocks_is_made_faster_than_python_could_look_at_them() -> None:
    src, dst = scattered(4096, 8192)
    times = []
    for _ in range(9):
        began = time.thread_time()
        runs = plan.shared_runs(src, dst)
        table = plan.block_segments(range(1), src, block_nbytes=4096, runs=runs)
        times.append(time.thread_time() - began)
    assert len(table) > 4000
    assert min(times) < by_hand(4096)


@each_path
async def test_8_3_the_first_pull_of_a_link_costs_no_more_because_the_cache_has_a_million_blocks(path: str) -> None:
    """Beside the second one, less than Python takes to look at a tenth of them."""
    look = by_hand(100_000)
    async with nodes(AWAITED, path) as n:
        cache = await blocks_of(n, 1_000_000, 32)
        blocks = list(range(0, 1000, 7))
        info = duo.cluster(duo.PROMPT, n.prompt.listen_address)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(20):
            for pulls in times:
                began = time.perf_counter()
                await n.decoder.cache_manager.pull_blocks(KEY, cache, blocks, blocks, tensor_num_per_layer=1)
                pulls.append(time.perf_counter() - began)
            if min(times[0]) < 5 * min(times[1]) + look:
                return
            await n.decoder.unlink_clusters([info], 10_000, raise_on_error=True)
            await n.decoder.link_clusters([info], 10_000, raise_on_error=True)
        pytest.fail(f"first and second pulls took {times}")


@each_path
async def test_8_4_blocks_that_follow_each_other_are_moved_as_one(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand blocks in ten runs, of two tensors: twenty pieces at the memory, not two thousand."""
    rows: list[int] = []
    landing, copy = HostMemory.landing, Mapped.copy

    def landed(memory: HostMemory, regions: Any, segments: Any, **options: Any) -> Any:
        rows.append(len(segments))
        return landing(memory, regions, segments, **options)

    def copied(cache: Mapped, destinations: Any, *rest: Any) -> int:
        rows.append(len(destinations))
        return copy(cache, destinations, *rest)

    monkeypatch.setattr(HostMemory, "landing", landed)
    monkeypatch.setattr(Mapped, "copy", copied)
    async with nodes(AWAITED, path) as n:
        cache = await blocks_of(n, 2000, 512, tensors=2)
        src = [200 * run + block for run in range(10) for block in range(100)]
        dst = [200 * run + 57 + block for run in reversed(range(10)) for block in range(100)]
        await n.decoder.cache_manager.pull_blocks(KEY, cache, src, dst)
        assert sum(rows) == 20


# -- 8.5, 8.6, 8.9: threads that are busy ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["tcp", "shm"])
async def test_8_5_linking_and_registering_leave_the_callers_loop_free(path: str) -> None:
    python = by_hand(15_000)
    memory = np.zeros((500, 256), np.uint8)
    shape, at = CacheDesc(500, [1, 256], U8), [row.ctypes.data for row in memory]
    async with nodes(AWAITED, path, linked=False) as n:
        info = duo.cluster(duo.PROMPT, n.prompt.listen_address)

        async def linked() -> None:
            await n.decoder.link_clusters([info], 10_000, raise_on_error=True)
            made = await n.decoder.cache_manager.register_cache(shape, at)
            await n.decoder.cache_manager.unregister_cache(made.cache_id)
            await n.decoder.unlink_clusters([info], 10_000, raise_on_error=True)

        await linked()
        assert await stalls(linked, enough=2 * python) < 2 * python
        with socket.create_server(("127.0.0.1", 0)) as silent:
            nowhere = duo.cluster(99, silent.getsockname())
            assert await turns(n.decoder.link_clusters([nowhere], 1000)) > 20, "it waited on the caller's loop"


def hold_the_interpreter(seconds: float) -> None:
    """As a native library does that never gives the lock back while it works."""
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))


@each_process_path
async def test_8_6_a_thread_that_holds_the_interpreter_costs_neither_the_pull_nor_the_link(path: str) -> None:
    """For twice as long as a peer may be silent: no deadline, no heartbeat counts what was not the peer's fault."""
    async with (
        child("PROMPT", duo.PROMPT, listen=True, transport=path) as prefill,
        duo.node(LLMRole.DECODER, duo.DECODER, transport=path, **QUICK) as node,
    ):
        here, nbytes = Here(node), 8 << 20
        await prefill.ask("publish", "published", nbytes=nbytes, first=0)
        await here.link(prefill)
        cache = await here.cache(nbytes)
        for _ in range(3):
            pull = here.pull(cache, 1, timeout=10_000)
            await asyncio.sleep(0.001)
            hold_the_interpreter(0.8)
            await pull
            assert duo.holds(cache, entry=0, source=1)
        await asyncio.sleep(0.1)
        assert "links_lost" not in node.counters


@pytest.mark.parametrize(("path", "how"), [("tcp", "asleep"), ("shm", "busy")])
async def test_8_9_a_prefill_program_that_is_busy_serves_all_the_same(path: str, how: str) -> None:
    """Its own loop is blocked for a second; the control plane runs beside it."""
    async with (
        child("PROMPT", duo.PROMPT, listen=True, transport=path) as prefill,
        duo.node(LLMRole.DECODER, duo.DECODER, transport=path) as node,
    ):
        here = Here(node)
        await prefill.ask("publish", "published", nbytes=300_000, first=0)
        await here.link(prefill)
        await prefill.ask("block", "blocked", seconds=1.0, how=how)
        for key in range(4):
            await here.check_right(300_000, key)
        assert prefill.heard_nothing(), "it served only once its loop was free again"
        await prefill.hear("unblocked")


# -- 8.7, 8.8: no polling ----------------------------------------------------------------------------------------------


@each_path
@each_face
async def test_8_7_a_pull_has_no_pause_of_a_poll_in_it(path: str, api: Api) -> None:
    """64 KB: the best one takes less than half of the ten milliseconds that one pause would take here."""
    async with nodes(api, path) as n:
        shape = CacheDesc(4, [4, 16_384], U8)
        await n.publish(shape)
        cache = await n.destination(shape)
        best = float("inf")
        for number in range(1000):
            began = time.perf_counter()
            await n.pull(cache, number % 4)
            best = min(best, time.perf_counter() - began)
            if number >= 20 and best < 0.005:
                return
        pytest.fail(f"none took less than {best:.4f} s")


@pytest.mark.parametrize("how", ["waiting for keys", "behind a silent source"])
async def test_8_8_a_hundred_pulls_in_flight_cost_no_processor(how: str) -> None:
    """Nor does anything wake up for each of them."""
    async with nodes(AWAITED, heartbeat_timeout=60_000) as n:
        await n.publish(duo.BIG)
        cache, pull = await n.destination(duo.BIG), n.decoder.kv_cache_manager.pull_cache
        key = 1000 if how == "waiting for keys" else 0
        with duo.frozen(n.prompt) if key == 0 else contextlib.nullcontext():
            pulls = [
                begin(pull(CacheKey(duo.PROMPT, key + number * bool(key)), cache, 0, wait_for_key=True))
                for number in range(100)
            ]
            await eventually(lambda: n.decoder.counters.get("pulls_started", 0) == 100)
            found = []  # seconds of processor time in each half second, and how often a thread fell asleep
            for _ in range(20):  # what began them may still be at work in the first ones
                before = used()
                await asyncio.sleep(0.5)
                found.append(tuple(now - then for now, then in zip(used(), before, strict=True)))
                if found[-1][0] < 0.05 and found[-1][1] < 50:
                    break
            assert not any(task.done() for task in pulls)
            for task in pulls:
                task.cancel()
            assert found[-1][0] < 0.05, found
            assert found[-1][1] < 50, found
        await asyncio.wait(pulls)


# -- 8.10: connections -------------------------------------------------------------------------------------------------


def connections(port: int) -> int:
    """Rows about that port in the kernel's table, whatever their state; those that linger too."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text(encoding="utf-8").splitlines()[1:]]
    return sum(int(end.split(":")[1], 16) == port for row in rows for end in row[1:3])


@pytest.mark.parametrize("nbytes", [512, 50_000], ids=["inline", "streamed"])
async def test_8_10_many_pulls_go_through_the_same_few_connections(nbytes: int) -> None:
    async with nodes(AWAITED, "tcp") as n:
        shape = CacheDesc(4, [4, nbytes], U8)
        await n.publish(shape)
        caches = [await n.destination(shape) for _ in range(10)]
        await n.pull(caches[0])
        port, opened = n.prompt.listen_address[1], sockets()
        before = connections(port)
        for _ in range(50):
            await asyncio.gather(*(n.pull(cache, 1) for cache in caches))
        assert connections(port) <= before, "a connection was made for some pulls"
        assert sockets() <= opened
        assert n.decoder.counters["links_up"] == 1


# -- 8.11 to 8.13: what waits for what ---------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["inproc", "tcp", "mapped"])
@each_face
async def test_8_11_a_layer_has_gone_before_the_next_one_is_computed(way: str, api: Api) -> None:
    """Layer by layer beside the computation: each waits, in the middle of it, for the one before to be at the peer."""
    layers = 4
    async with ends(api, way, **BY_ADDRESS) as e:
        source = await e.source(desc(100_000, tensors=2 * layers))
        destination = await e.destination(desc(100_000, tensors=2 * layers))

        def compute(layer: int) -> bool:
            give_up = time.monotonic() + 15
            while layer and not np.array_equal(destination.arrays[2 * layer - 1][0], source.arrays[2 * layer - 1][0]):
                if time.monotonic() > give_up:
                    return False
                time.sleep(0.001)
            return True

        config = TransferConfig(RECEIVER, addresses(destination, range(layers)))
        task = transfer(e, source, [config], ready=Ready(compute))
        assert await api.do(task.get_results) == [OK]


async def test_8_12_one_slow_source_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine pulls from another source end while one hangs in its middle; so do those that go the other way."""
    memories = gated_memories(monkeypatch, after=0)
    async with (
        duo.node(LLMRole.PROMPT, 1, listen=True) as slow,
        duo.node(LLMRole.PROMPT, 3, listen=True) as quick,
        duo.node(LLMRole.DECODER, duo.DECODER) as node,
    ):
        kept, pull = [], node.kv_cache_manager.pull_cache
        for source in (slow, quick):
            keys = [CacheKey(source.cluster_id, entry) for entry in range(4)]
            kept.append(await source.kv_cache_manager.allocate_cache(duo.BIG, keys))
            duo.fill(kept[-1])
            info = duo.cluster(source.cluster_id, source.listen_address)
            await node.link_clusters([info], duo.TIMEOUT_MS, raise_on_error=True)
        cache, gate = await node.kv_cache_manager.allocate_cache(duo.BIG), memories[0].lending_gate
        gate.close()
        hanging = begin(pull(CacheKey(1, 0), cache, 0))
        await gate.reached()
        for number in range(9):
            await pull(CacheKey(3, number % 4), cache, 1, src_cache_offset=0)
            assert duo.holds(cache, entry=1, source=number % 4)
        assert not hanging.done()
        gate.open()
        await hanging
        kept.append(cache)


@each_path
async def test_8_13_a_small_pull_waits_for_those_before_it_and_for_no_other(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no priorities: a link does one after the other, inside each one's deadline. Those behind it, and those
    that are given up, cost an urgent one nothing.
    """
    memories = gated_memories(monkeypatch, after=0)
    async with nodes(AWAITED, path) as n:
        await n.publish(duo.BIG)
        await n.publish(duo.SMALL, first=10)
        big, small, order = await n.destination(duo.BIG), await n.destination(), []

        def noted(name: str, pull: Any) -> asyncio.Task[Any]:
            task = begin(pull)
            task.add_done_callback(lambda _: order.append(name))
            return task

        gate = memories[1].landing_gate
        gate.close(times=1)
        first = noted("bulk", n.pull(big))
        await gate.reached()
        given_up = [noted("given up", n.pull(big, 1)) for _ in range(20)]
        await eventually(lambda: n.decoder.counters["pulls_started"] == 21)
        urgent = noted("urgent", n.pull(small, 11))
        await eventually(lambda: n.decoder.counters["pulls_started"] == 22)
        later = [noted("later", n.pull(big, 2)) for _ in range(5)]
        await eventually(lambda: n.decoder.counters["pulls_started"] == 27)
        for task in given_up:
            task.cancel()
        await asyncio.wait(given_up)
        assert order == ["given up"] * 20
        gate.open()
        await asyncio.gather(first, urgent, *later)
        assert order[20:] == ["bulk", "urgent", *["later"] * 5]
