"""The awaitable `LLMDataDist`: the original's interface, its life cycle, and any loop of any thread."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import warnings
from typing import Any

import pytest

import kvpull_async
from kvpull_async import (
    CacheKey,
    KvCacheManager,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)
from tests import original_api
from tests.duo import BIG, DECODER, OK, PROMPT, SMALL, Duo, cluster, codes, duo, frozen, holds, node, options
from tests.loop_nodes import event_log, eventually

NOT_ENABLED = LLMStatusCode.LLM_FEATURE_NOT_ENABLED


# -- the original's interface ------------------------------------------------------------------------------------------


def test_the_originals_26_names_are_exported_and_the_cache_manager() -> None:
    assert len(original_api.EXPORTS) == 26
    assert set(kvpull_async.__all__) == original_api.EXPORTS | {"CacheManager", "LLMTimeoutError", "allocate_shared"}
    assert kvpull_async.LlmConfig is kvpull_async.LLMConfig


def test_a_star_import_binds_them_and_nothing_else() -> None:
    names: dict[str, Any] = {}
    exec("from kvpull_async import *", names)
    assert set(names) - {"__builtins__"} == set(kvpull_async.__all__)


@pytest.mark.parametrize("owner", ["LLMDataDist", "KvCacheManager", "CacheManager"])
def test_every_public_member_says_what_it_does(owner: str) -> None:
    documented = getattr(kvpull_async, owner)
    for name in original_api.public_names(documented) - {"llm_engine_instance"}:
        assert inspect.getdoc(inspect.getattr_static(documented, name)), name


def test_whatever_may_wait_is_a_coroutine() -> None:
    plain = {
        name
        for owner in (LLMDataDist, KvCacheManager, kvpull_async.CacheManager)
        for name, member in inspect.getmembers(owner)
        if not name.startswith("_") and inspect.isfunction(member) and not inspect.iscoroutinefunction(member)
    }
    # `pull_layers` waits in the block that its result opens
    assert plain == {"is_initialized", "get_cache_tensors", "pull_layers", "transfer_cache_async"}


# -- life --------------------------------------------------------------------------------------------------------------


async def test_before_init_and_after_finalize_every_use_is_a_runtime_error() -> None:
    made = LLMDataDist(LLMRole.DECODER, DECODER)
    for _ in range(2):
        for name in ("kv_cache_manager", "cache_manager", "listen_address"):
            with pytest.raises(RuntimeError, match="init"):
                getattr(made, name)
        for call in (
            made.link_clusters([]),
            made.unlink_clusters([]),
            made.check_link_status(1),
            made.switch_role(LLMRole.PROMPT),
            made.link("name", {}, ""),
            made.unlink(1),
            made.query_register_mem_status(1),
        ):
            with pytest.raises(RuntimeError, match="init"):
                await call
        assert made.cluster_id == DECODER
        await made.finalize()  # harmless before init, and a second time
        await made.init(options())
        await made.finalize()


async def test_init_again_does_nothing_and_managers_stay() -> None:
    async with node(LLMRole.DECODER, DECODER) as made:
        manager = made.kv_cache_manager
        await made.init({"nonsense": "not even looked at"})
        assert made.kv_cache_manager is manager
        assert made.cache_manager is made.cache_manager


async def test_a_manager_knows_whether_its_engine_runs_and_asking_is_harmless() -> None:
    async with node(LLMRole.DECODER, DECODER) as made:
        manager = made.kv_cache_manager
        assert manager.is_initialized()
        cache = await manager.allocate_cache(SMALL)
        assert manager.is_initialized()
        await manager.deallocate_cache(cache)
    assert not manager.is_initialized()
    with pytest.raises(LLMException) as caught:
        await manager.allocate_cache(SMALL)
    assert caught.value.status_code == LLMStatusCode.LLM_ENGINE_FINALIZED
    assert caught.value.operation == "allocate_cache"


async def test_finalized_it_can_be_initialised_again_at_once_on_the_same_port() -> None:
    made = LLMDataDist(LLMRole.PROMPT, PROMPT)
    await made.init(options(listen=True))
    address = made.listen_address
    assert address is not None
    again = options(listen_ip_info="{}:{}".format(*address))
    for _ in range(3):
        pair = Duo(made, LLMDataDist(LLMRole.DECODER, DECODER))
        await pair.decoder.init(options())
        await pair.link()
        await pair.publish()
        cache = await pair.destination()
        await pair.decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT, 1), cache)
        assert holds(cache, entry=0, source=1)
        await made.finalize()  # the peer first
        await pair.decoder.finalize()
        await made.init(again)
    await made.finalize()


async def test_leaving_the_block_finalizes_also_after_an_error() -> None:
    made = LLMDataDist(LLMRole.DECODER, DECODER)
    with pytest.raises(ZeroDivisionError):
        async with made:
            await _init_and_fail(made)
    with pytest.raises(RuntimeError, match="not initialised any more: call init"):
        made.listen_address  # noqa: B018


async def test_the_counters_are_there_still_when_it_has_ended() -> None:
    made = LLMDataDist(LLMRole.DECODER, DECODER)
    with pytest.raises(RuntimeError, match="init"):
        made.counters  # noqa: B018
    for _ in range(2):
        await made.init(options())
        assert await made.unlink_clusters([]) == (LLMStatusCode.LLM_PARAM_INVALID, [])
        before = made.counters
        await made.finalize()
        assert made.counters == before


async def _init_and_fail(made: LLMDataDist) -> None:
    await made.init(options())
    1 // 0  # noqa: B018


async def test_the_instance_initialised_last_is_remembered_until_it_ends() -> None:
    async with node(LLMRole.DECODER, 1) as first:
        assert LLMDataDist.llm_engine_instance is first
        async with node(LLMRole.DECODER, 2) as second:
            assert LLMDataDist.llm_engine_instance is second
        assert LLMDataDist.llm_engine_instance is None


async def test_a_failed_init_can_be_repeated() -> None:
    made = LLMDataDist(LLMRole.DECODER, DECODER)
    with pytest.raises(LLMException):
        await made.init({"nonsense": "1"})
    with pytest.raises(RuntimeError):
        made.counters  # noqa: B018
    await made.init(options())
    await made.finalize()


async def test_its_text_says_who_it_is() -> None:
    assert repr(LLMDataDist(LLMRole.DECODER, 7)) == "<LLMDataDist cluster=7 DECODER>"


# -- links -------------------------------------------------------------------------------------------------------------


async def test_linking_twice_and_unlinking() -> None:
    async with node(LLMRole.PROMPT, PROMPT, listen=True) as prompt, node(LLMRole.DECODER, DECODER) as decoder:
        info = cluster(PROMPT, prompt.listen_address)
        assert codes(await decoder.link_clusters([info])) == ["LLM_SUCCESS", "LLM_SUCCESS"]
        await decoder.check_link_status(PROMPT)
        assert codes(await decoder.link_clusters([info])) == ["LLM_SUCCESS", "LLM_ALREADY_LINK"]
        assert await decoder.unlink_clusters([info]) == (OK, [OK])
        with pytest.raises(LLMException) as caught:
            await decoder.check_link_status(PROMPT)
        assert caught.value.status_code == LLMStatusCode.LLM_NOT_YET_LINK
        assert caught.value.operation == "check_link_status"


async def test_failures_raise_on_request() -> None:
    async with node(LLMRole.DECODER, DECODER) as decoder:
        nowhere = [cluster(PROMPT, ("127.0.0.1", 9))]
        assert codes(await decoder.link_clusters(nowhere)) == ["LLM_LINK_FAILED", "LLM_LINK_FAILED"]
        with pytest.raises(LLMException, match="LLM_LINK_FAILED") as caught:
            await decoder.link_clusters(nowhere, raise_on_error=True)
        assert caught.value.status_code == LLMStatusCode.LLM_LINK_FAILED
        with pytest.raises(LLMException):
            await decoder.unlink_clusters([], raise_on_error=True)


# -- what is not there yet ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
async def test_transports_that_are_not_there_yet(backend: str) -> None:
    with pytest.raises(LLMException) as caught:
        await LLMDataDist(LLMRole.DECODER, DECODER).init(options(transport=backend))
    assert caught.value.status_code == NOT_ENABLED


# -- loops and threads -------------------------------------------------------------------------------------------------


def test_one_engine_serves_several_loops_of_several_threads_at_once() -> None:
    """Made on one loop, used on others while that one is gone, ended on yet another."""
    pair = asyncio.run(_pair())
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            asyncio.run(_pulls(pair, number))
        except BaseException as error:  # noqa: BLE001  (told by the test)
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    asyncio.run(_end(pair))
    assert errors == []


async def _pair(desc: Any = SMALL) -> Duo:
    pair = Duo(LLMDataDist(LLMRole.PROMPT, PROMPT), LLMDataDist(LLMRole.DECODER, DECODER))
    await pair.prompt.init(options(listen=True))
    await pair.decoder.init(options())
    await pair.link()
    await pair.publish(desc)
    return pair


async def _pulls(pair: Duo, entry: int) -> None:
    cache = await pair.destination(pair.kept[0].cache_desc)
    manager = pair.decoder.kv_cache_manager
    for _ in range(5):
        await asyncio.gather(
            *(manager.pull_cache(CacheKey(PROMPT, entry), cache, index, src_cache_offset=0) for index in range(4))
        )
        assert all(holds(cache, entry=index, source=entry) for index in range(4))


async def _end(pair: Duo) -> None:
    await pair.decoder.finalize()
    await pair.prompt.finalize()


async def test_p5_many_awaits_on_one_link_are_served_in_order() -> None:
    async with duo() as pair:
        await pair.publish()
        cache = await pair.destination()
        ended: list[int] = []

        async def pull(number: int) -> None:
            key = CacheKey(PROMPT, number % 4)
            await pair.decoder.kv_cache_manager.pull_cache(key, cache, number % 4, src_cache_offset=0)
            ended.append(number)

        await asyncio.gather(*(pull(number) for number in range(100)))
        assert ended == sorted(ended)
        assert all(holds(cache, entry=entry, source=entry) for entry in range(4))


@pytest.mark.parametrize("desc", [SMALL, BIG], ids=["inline", "streamed"])
def test_a_caller_whose_loop_is_closed_under_its_pull_leaves_an_event_and_a_usable_link(desc: Any) -> None:
    with event_log() as log:
        pair = asyncio.run(_pair(desc))
        cache = asyncio.run(pair.destination(desc))
        gone = asyncio.new_event_loop()
        gone.set_exception_handler(lambda *_: None)  # it complains of the task that it left behind
        with frozen(pair.prompt):
            pull = gone.create_task(pair.decoder.kv_cache_manager.pull_cache(CacheKey(PROMPT, 1), cache))
            gone.run_until_complete(eventually(lambda: pair.decoder.counters.get("pulls_started") == 1))
            gone.close()
            asyncio.run(eventually(lambda: pair.decoder.counters.get("pulls_cancelled") == 1))
        assert not pull.done()
        asyncio.run(eventually(lambda: bool(log.named("pull.orphaned"))))
        (event,) = log.named("pull.orphaned")
        assert event["pull_id"] == log.named("pull.started")[0]["pull_id"]
        assert not cache.quarantined
        asyncio.run(_pulls(pair, 1))
        assert pair.decoder.counters["links_up"] == 1
        del pull
        gc.collect()
        asyncio.run(_end(pair))


# -- handles that are dropped ------------------------------------------------------------------------------------------


async def test_dropping_a_cache_warns_and_deallocating_it_first_does_not() -> None:
    async with node(LLMRole.DECODER, DECODER) as made:
        manager = made.kv_cache_manager
        gc.collect()  # what other tests dropped warns before this one listens
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cache: Any = await manager.allocate_cache(SMALL)
            await manager.deallocate_cache(cache)
            del cache
            gc.collect()
            assert caught == []
            cache = await manager.allocate_cache(SMALL)
            number = cache.cache_id
            del cache
            gc.collect()
        assert [(warning.category, str(warning.message)) for warning in caught] == [
            (ResourceWarning, f"KvCache {number} was dropped without deallocate_cache")
        ]
