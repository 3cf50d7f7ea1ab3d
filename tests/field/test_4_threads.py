"""Field reports of theme 4: concurrency, cancellation, and thread safety."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from kvpull_async import (
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    TransferConfig,
)
from kvpull_async.engine import Engine
from kvpull_async.testing.proxy import Fault, FaultKind, FaultProxy, Way
from kvpull_sync import LLMDataDist as BlockingNode
from tests import duo
from tests.conformance.api import Api
from tests.hostile import HostileSource, content, honest_pull, info, link, publish, pulling, serving
from tests.integration.own_loop import outcome, within
from tests.integration.pushing import RECEIVER, desc, ends
from tests.integration.rig import (
    FAILED,
    OK,
    SOON,
    begin,
    each_face,
    each_path,
    links_of,
    nodes,
)
from tests.integration.transfers import BY_ADDRESS, addresses, transfer
from tests.loop_nodes import event_log, eventually
from tests.transferring import Held, Ready

NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK


# --- 4.2 ---


@each_path
@pytest.mark.parametrize("force", [False, True], ids=["gently", "by force"])
async def test_4_2_a_link_unlinked_and_made_again_under_ten_pulls_mixes_no_generations(path: str, force: bool) -> None:
    """Each pull has all bytes of the generation it asked, or has failed and writes no more; others are left alone."""
    large = CacheDesc(2, [4, 1024 * 1024], duo.SMALL.data_type)
    async with (
        duo.duo(transport=path, settle_timeout=2000) as pair,
        duo.node(LLMRole.PROMPT, 7, listen=True, transport=path) as bystander,
    ):
        manager = pair.decoder.kv_cache_manager
        beside = await bystander.kv_cache_manager.allocate_cache(large, [CacheKey(7, i) for i in range(4)])
        await pair.decoder.link_clusters([duo.cluster(7, bystander.listen_address)], raise_on_error=True)
        info = duo.cluster(duo.PROMPT, pair.prompt.listen_address)
        failed = 0
        for generation in range(5):
            source = await pair.publish(large)
            for array in duo.arrays(source):
                array[:] = 100 + generation
            caches = [await manager.allocate_cache(large) for _ in range(12)]
            pulls = [begin(pull(manager, CacheKey(duo.PROMPT, i % 4), cache)) for i, cache in enumerate(caches[:10])]
            others = [begin(pull(manager, CacheKey(7, 0), cache)) for cache in caches[10:]]
            await asyncio.sleep(0.001 * generation)
            code = (await pair.decoder.unlink_clusters([info], 15_000, force=force))[1][0]
            assert code is OK
            errors = [await outcome(one) for one in pulls]
            assert (await pair.decoder.link_clusters([info], duo.TIMEOUT_MS))[1] == [OK]
            for cache, error in zip(caches, errors, strict=False):
                values = {int(value) for array in duo.arrays(cache) for value in np.unique(array[0])}
                if error is None:
                    assert values == {100 + generation}
                else:
                    assert isinstance(error, LLMException), error
                    assert error.status_code is NOT_LINKED, error
                    assert not error.destination_unsafe
                    for array in duo.arrays(cache):
                        array[:] = 0xA5
            failed += sum(error is not None for error in errors)
            await within(asyncio.gather(*others))
            await pull(manager, CacheKey(duo.PROMPT, 0), caches[11])
            for cache, error in zip(caches, errors, strict=False):
                if error is not None:
                    assert all(bool((array == 0xA5).all()) for array in duo.arrays(cache))
            for cache in caches:
                await manager.deallocate_cache(cache)
            pair.kept.remove(source)
            for key in duo.keys(large):
                await pair.prompt.kv_cache_manager.remove_cache_key(key)
            await pair.prompt.kv_cache_manager.deallocate_cache(source)
        await bystander.kv_cache_manager.deallocate_cache(beside)
        assert failed, "none of them was under way"


def pull(manager: Any, key: CacheKey, cache: Any, entry: int = 0, **options: Any) -> Any:
    """The key is kept."""
    return manager.pull_cache(key, cache, entry, src_cache_offset=0, **options)


# --- 4.3 ---


@pytest.mark.slow
@each_path
def test_4_3_threads_and_loops_that_share_a_node_in_every_way_break_nothing(path: str) -> None:
    """Pulls, caches that come and go, a link that is made and unlinked, status checks: from eight threads at once."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with BlockingNode(LLMRole.PROMPT, 1) as prompt, BlockingNode(LLMRole.PROMPT, 7) as other:
            prompt.init(duo.options(listen=True, transport=path))
            other.init(duo.options(listen=True, transport=path))
            kept = prompt.kv_cache_manager.allocate_cache(duo.SMALL, duo.keys(duo.SMALL))
            duo.fill(kept)
            with BlockingNode(LLMRole.DECODER, 2) as decoder:
                decoder.init(duo.options(transport=path))
                decoder.link_clusters([duo.cluster(1, prompt.listen_address)], raise_on_error=True)
                wrong = race(decoder, duo.cluster(7, other.listen_address), seconds=1.5)
                assert wrong == []
                assert decoder.counters["pulls_started"] == decoder.counters["pulls_finished"]
            prompt.kv_cache_manager.deallocate_cache(kept)
    finally:
        sys.setswitchinterval(interval)


def race(decoder: Any, come_and_go: Any, *, seconds: float) -> list[str]:
    give_up, wrong = time.monotonic() + seconds, []
    manager = decoder.kv_cache_manager

    def pulls(number: int) -> None:
        cache = manager.allocate_cache(duo.SMALL)
        pull(manager, CacheKey(duo.PROMPT, number), cache)
        if not duo.holds(cache, entry=0, source=number):
            wrong.append(f"entry {number}")
        manager.deallocate_cache(cache)

    def links(number: int) -> None:
        decoder.link_clusters([come_and_go], 5000)
        decoder.check_link_status(duo.PROMPT)
        decoder.unlink_clusters([come_and_go], 5000, number % 2 == 1)

    def repeat(work: Any, number: int) -> None:
        try:
            while time.monotonic() < give_up:
                work(number)
        except Exception as error:  # noqa: BLE001  (the test judges it)
            wrong.append(repr(error))

    threads = [threading.Thread(target=repeat, args=(pulls, number % 4)) for number in range(6)]
    threads += [threading.Thread(target=repeat, args=(links, number)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + SOON)
        assert not thread.is_alive()
    return wrong


# --- 4.4 ---


@each_path
async def test_4_4_a_hundred_senders_at_once_over_one_link_do_not_mix_their_frames(path: str) -> None:
    """Pulls of all sizes, refused ones and cancelled ones, both ways."""
    rng = random.Random(path)
    options = {"listen": True, "transport": path, "enable_cache_manager": True}
    async with duo.node(LLMRole.MIX, 1, **options) as one, duo.node(LLMRole.MIX, 2, **options) as two:
        await one.link_clusters([duo.cluster(2, two.listen_address)], raise_on_error=True)
        await eventually(lambda: bool(links_of(two)))
        held = {}
        for node in (one, two):
            for nbytes in (1, 100, 5000, 70_000, 1_100_000):
                shape = CacheDesc(1, [1, nbytes], duo.SMALL.data_type)
                cache = await node.cache_manager.allocate_cache(shape)
                duo.arrays(cache)[0][:] = (nbytes + node.cluster_id) % 251
                held[node.cluster_id, nbytes] = cache

        async def some(node: Any, other: int) -> None:
            nbytes = rng.choice([size for cluster, size in held if cluster == other])
            source = held[other, nbytes]
            cache = await node.cache_manager.allocate_cache(source.cache_desc)
            how, key = rng.random(), by_id(other, source.cache_id)
            if how < 0.15:
                with pytest.raises(LLMException) as caught:
                    await node.cache_manager.pull_cache(by_id(other, 999), cache)
                assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
            elif how < 0.3:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(node.cache_manager.pull_cache(key, cache), rng.random() * 0.05)
            else:
                await node.cache_manager.pull_cache(key, cache)
                assert bool((duo.arrays(cache)[0] == (nbytes + other) % 251).all())
            await node.cache_manager.deallocate_cache(cache)

        await within(asyncio.gather(*(some(one, 2) for _ in range(50)), *(some(two, 1) for _ in range(50))))
        assert [node.counters.get("links_lost", 0) for node in (one, two)] == [0, 0]
        for (cluster, _), cache in held.items():
            await (one if cluster == 1 else two).cache_manager.deallocate_cache(cache)


def by_id(cluster: int, cache_id: int) -> Any:
    return CacheKeyByIdAndIndex(cluster, cache_id, 0)


async def test_4_4_a_broken_frame_costs_its_own_link_and_no_other() -> None:
    async with HostileSource().listening() as hostile, serving(3) as honest, pulling() as puller:
        hostile.answer = lambda _: b"\xff" * 64
        assert await link(puller, info(1, hostile.address), honest) == [OK, OK]
        key, cache = await publish(honest, 9)
        into = await puller.kv_cache_manager.allocate_cache(cache.cache_desc)
        broken, good = (
            begin(puller.kv_cache_manager.pull_cache(CacheKey(1, 5), into)),
            begin(honest_pull(puller, honest, 5)),
        )
        error = await outcome(broken)
        assert isinstance(error, LLMException)
        assert error.status_code is FAILED
        assert "frame" in str(error)
        await within(good)
        await puller.kv_cache_manager.pull_cache(key, into)
        assert content(puller, into) == {9}
        assert puller.counters["links_lost"] == 1
        await puller.kv_cache_manager.deallocate_cache(into)
        await honest.kv_cache_manager.deallocate_cache(cache)


# --- 4.7 ---


async def test_4_7_an_init_that_does_not_return_may_be_given_up_and_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """(No native engine is here that could do that by itself: 3.1 and 3.2.)"""
    opening = Engine.open

    async def never(engine: Engine) -> None:
        await asyncio.Event().wait()

    node = LLMDataDist(LLMRole.DECODER, duo.DECODER)
    monkeypatch.setattr(Engine, "open", never)
    ticks, began = 0, time.monotonic()
    init = begin(node.init(duo.options(close_timeout=500)))
    while time.monotonic() - began < 0.3:
        await asyncio.sleep(0.01)
        ticks += 1
    assert ticks > 3, "the caller's loop goes on"
    init.cancel()
    assert isinstance(await outcome(init), asyncio.CancelledError)
    assert time.monotonic() - began < SOON
    monkeypatch.setattr(Engine, "open", opening)
    await node.init(duo.options())
    cache = await node.kv_cache_manager.allocate_cache(duo.SMALL)
    await node.kv_cache_manager.deallocate_cache(cache)
    await node.finalize()


# --- 4.8 ---


@each_path
async def test_4_8_pulls_of_one_link_queue_in_order_while_its_health_is_checked(path: str) -> None:
    async with duo.duo(transport=path) as pair:
        manager, ended = pair.decoder.kv_cache_manager, []
        await pair.publish(duo.BIG)
        caches = [await pair.destination(duo.BIG) for _ in range(20)]

        async def one(number: int) -> None:
            await pull(manager, CacheKey(duo.PROMPT, number % 4), caches[number])
            ended.append(number)

        checks = [begin(pair.decoder.check_link_status(duo.PROMPT)) for _ in range(3)]
        await within(asyncio.gather(*(one(number) for number in range(20)), *checks))
        assert ended == list(range(20))
        assert all(duo.holds(cache, entry=0, source=number % 4) for number, cache in enumerate(caches))


@each_face
@each_path
def test_4_8_a_link_may_be_told_to_refuse_what_overlaps_as_the_original_does(api: Api, path: str) -> None:
    async def body() -> None:
        async with nodes(api, path, link_busy_policy="raise", heartbeat_timeout=60_000) as two:
            await two.publish()
            cache, second = await two.destination(), await two.destination()
            with duo.frozen(two.prompt):
                first = api.start(lambda: two.pull(cache))
                await api.until(lambda: two.decoder.counters.get("pulls_started", 0) == 1)
                await api.until(lambda: any(one._active is not None for one in links_of(two.decoder)))
                error = await two.fails(second)
                assert error.status_code is LLMStatusCode.LLM_LINK_BUSY
                assert error.retry_safe
            assert await first.outcome() is None
            await two.check_right()

    api.run(body())


# --- 4.9 ---


@each_face
def test_4_9_transfers_at_once_have_ids_of_their_own_and_a_wait_that_timed_out_may_be_repeated(api: Api) -> None:
    at_once = 100

    async def body() -> None:
        with event_log() as log:
            async with ends(api, "tcp", **BY_ADDRESS) as e:
                source, destination = await e.source(desc(96)), await e.destination(desc(96))
                config = [TransferConfig(RECEIVER, addresses(destination))]
                held = Held()
                waiting = transfer(e, source, config, ready=held)
                tasks = [transfer(e, source, config, ready=Ready()) for _ in range(at_once)]
                assert await api.do(waiting.synchronize, 50) is LLMStatusCode.LLM_TIMEOUT
                assert not waiting.done()
                assert await api.do(waiting.get_results, 50) == [LLMStatusCode.LLM_TIMEOUT]
                for task in tasks:
                    assert await api.do(task.synchronize) is OK
                held.let_go()
                assert await api.do(waiting.synchronize) is OK
                assert await api.do(waiting.get_results) == [OK]
                await api.until(lambda: len(log.named("transfer.finished")) == at_once + 1)
                ids = {event["transfer_id"] for event in log.named("transfer.finished")}
                assert len(ids) == at_once + 1

    api.run(body())


# --- 4.10 ---


@pytest.mark.parametrize("kind", ["payload", "control"])
async def test_4_10_a_pull_cancelled_after_any_byte_leaves_the_link_right(kind: str) -> None:
    """The proxy stands still after so many bytes of the answer, the pull is cancelled, and the rest comes late."""
    rng, nbytes = random.Random(kind), 1024 * 1024 if kind == "payload" else 4096
    shape = CacheDesc(2, [4, nbytes], duo.SMALL.data_type)
    async with (
        duo.node(LLMRole.PROMPT, duo.PROMPT, listen=True) as prompt,
        duo.node(LLMRole.DECODER, duo.DECODER) as decoder,
    ):
        assert prompt.listen_address is not None
        with FaultProxy(prompt.listen_address) as proxy:
            pair = duo.Duo(prompt, decoder)
            await decoder.link_clusters([duo.cluster(duo.PROMPT, proxy.address)], raise_on_error=True)
            await pair.publish(shape)
            cache, other, manager = (
                await pair.destination(shape),
                await pair.destination(shape),
                decoder.kv_cache_manager,
            )
            await pull(manager, CacheKey(duo.PROMPT, 1), other)
            cancelled = 0
            for number in range(40):
                at = rng.choice([0, 1, 20, rng.randrange(2 * nbytes), 2 * nbytes - 1])
                proxy.inflict(Fault(FaultKind.STALL, Way.BACK, at), kind=kind)
                task = begin(pull(manager, CacheKey(duo.PROMPT, 0), cache))
                await asyncio.sleep(0.005 * rng.random())
                task.cancel()
                error = await outcome(task)
                assert error is None or isinstance(error, asyncio.CancelledError)
                cancelled += error is not None
                for array in duo.arrays(cache):
                    array[:] = 0xA5
                again = begin(pull(manager, CacheKey(duo.PROMPT, number % 4), other))
                while not again.done():  # that byte may come only now
                    proxy.resume()
                    await asyncio.wait([again], timeout=0.02)
                assert await outcome(again) is None
                assert duo.holds(other, entry=0, source=number % 4)
                assert all(bool((array == 0xA5).all()) for array in duo.arrays(cache))
            await decoder.check_link_status(duo.PROMPT)
            assert not decoder.counters.get("links_lost")
            assert cancelled >= 10
