"""The blocking `LLMDataDist`: the awaitable one's shape, its life cycle, and who may not call it."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
from typing import Any

import pytest

import kvpull_async
import kvpull_sync
from kvpull_async.entry import blocked
from kvpull_sync import CacheDesc, CacheKey, DataType, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from tests import original_api
from tests.duo import OK, cluster, engine_of, options

CLASSES = ["LLMDataDist", "KvCacheManager", "CacheManager"]
DESC = CacheDesc(2, [2, 64], DataType.DT_UINT8)


def started(role: LLMRole = LLMRole.DECODER, **properties: Any) -> LLMDataDist:
    made = LLMDataDist(role, 7)
    made.init(options(**properties))
    return made


# -- the same shape ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", CLASSES)
def test_both_faces_have_the_same_members(owner: str) -> None:
    blocking, awaitable = getattr(kvpull_sync, owner), getattr(kvpull_async, owner)
    assert original_api.public_names(blocking) == original_api.public_names(awaitable)


@pytest.mark.parametrize("owner", CLASSES)
def test_both_faces_take_the_same_parameters(owner: str) -> None:
    blocking, awaitable = getattr(kvpull_sync, owner), getattr(kvpull_async, owner)
    for name in original_api.public_names(awaitable) | {"__init__"}:
        theirs, ours = inspect.getattr_static(awaitable, name), inspect.getattr_static(blocking, name)
        assert isinstance(ours, type(theirs)) or name == "llm_engine_instance"
        if inspect.isfunction(theirs):
            assert _parameters(ours) == _parameters(theirs), name
            assert not inspect.iscoroutinefunction(ours)


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("owner", CLASSES)
def test_both_faces_return_the_same(owner: str) -> None:
    blocking, awaitable = getattr(kvpull_sync, owner), getattr(kvpull_async, owner)
    for name, theirs in vars(awaitable).items():
        if not name.startswith("_") and inspect.isfunction(theirs):
            assert vars(blocking)[name].__annotations__["return"] == theirs.__annotations__["return"], name


@pytest.mark.parametrize("owner", CLASSES)
def test_every_public_member_points_to_its_description(owner: str) -> None:
    """At the end of its text: see test_descriptions.py."""
    documented = getattr(kvpull_sync, owner)
    for name in original_api.public_names(documented) - {"llm_engine_instance"}:
        text = inspect.getdoc(inspect.getattr_static(documented, name)) or ""
        assert f"kvpull_async.{owner}.{name}`" in text, name


# -- life --------------------------------------------------------------------------------------------------------------


def test_before_init_and_after_finalize_every_use_is_a_runtime_error() -> None:
    made = LLMDataDist(LLMRole.DECODER, 7)
    for _ in range(2):
        for call in (
            lambda: made.kv_cache_manager,
            lambda: made.cache_manager,
            lambda: made.listen_address,
            lambda: made.link_clusters([]),
            lambda: made.unlink_clusters([]),
            lambda: made.check_link_status(1),
            lambda: made.switch_role(LLMRole.PROMPT),
            lambda: made.link("name", {}, ""),
            lambda: made.unlink(1),
            lambda: made.query_register_mem_status(1),
        ):
            with pytest.raises(RuntimeError, match="init"):
                call()
        assert made.cluster_id == 7
        made.finalize()
        made.init(options())
        made.finalize()


def test_init_again_does_nothing_and_a_kept_manager_knows_its_end() -> None:
    with started() as made:
        manager = made.kv_cache_manager
        made.init({"nonsense": "not even looked at"})
        assert made.kv_cache_manager is manager
        assert manager.is_initialized()
        manager.deallocate_cache(manager.allocate_cache(DESC))
        assert manager.is_initialized()
    assert not manager.is_initialized()
    with pytest.raises(LLMException) as caught:
        manager.allocate_cache(DESC)
    assert caught.value.status_code == LLMStatusCode.LLM_ENGINE_FINALIZED


def test_finalized_it_can_be_initialised_again_at_once_on_the_same_port() -> None:
    made = started(LLMRole.PROMPT, listen=True)
    again = options(listen_ip_info="{}:{}".format(*made.listen_address or ()))
    for _ in range(3):
        with started() as peer:
            assert peer.link_clusters([cluster(7, made.listen_address)]) == (OK, [OK])
            made.finalize()
        made.init(again)
    made.finalize()


def test_a_failed_init_leaves_nothing_and_can_be_repeated() -> None:
    with started(LLMRole.PROMPT, listen=True) as first:
        taken = options(listen_ip_info="{}:{}".format(*first.listen_address or ()))
        second = LLMDataDist(LLMRole.PROMPT, 8)
        with pytest.raises(LLMException, match="cannot listen"):
            second.init(taken)
    second.init(taken)
    second.finalize()


def test_an_init_interrupted_too_late_leaves_nothing_and_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*arguments: Any) -> None:
        blocked(*arguments)
        raise KeyboardInterrupt

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made = LLMDataDist(LLMRole.PROMPT, 7)
    listening = options(listen_ip_info=f"127.0.0.1:{port}")
    with monkeypatch.context() as patched:
        patched.setattr("kvpull_sync.face.blocked", late)
        with pytest.raises(KeyboardInterrupt):
            made.init(listening)
    made.init(listening)
    made.finalize()


def test_the_instance_initialised_last_is_remembered_until_it_ends() -> None:
    with started() as first:
        assert LLMDataDist.llm_engine_instance is first
    assert LLMDataDist.llm_engine_instance is None
    assert kvpull_async.LLMDataDist.llm_engine_instance is None


def test_leaving_the_block_finalizes_also_after_an_error() -> None:
    made = started()
    with pytest.raises(ZeroDivisionError), made:
        1 // 0  # noqa: B018
    with pytest.raises(RuntimeError):
        made.listen_address  # noqa: B018
    assert made.counters == {}


def test_its_text_says_who_it_is() -> None:
    assert repr(LLMDataDist(LLMRole.PROMPT, 9)) == "<LLMDataDist cluster=9 PROMPT>"


# -- links -------------------------------------------------------------------------------------------------------------


def test_links_from_both_ends() -> None:
    with started(LLMRole.PROMPT, listen=True) as prompt, LLMDataDist(LLMRole.DECODER, 8) as decoder:
        decoder.init(options())
        info = cluster(7, prompt.listen_address)
        assert decoder.link_clusters([info]) == (OK, [OK])
        decoder.check_link_status(7)
        assert decoder.link_clusters([info]) == (OK, [LLMStatusCode.LLM_ALREADY_LINK])
        assert decoder.unlink_clusters([info], force=True) == (OK, [OK])
        with pytest.raises(LLMException, match="in the older mode role DECODER links"):
            prompt.link_clusters([info], raise_on_error=True)  # a prompt node of the older mode


# -- who may not call --------------------------------------------------------------------------------------------------


def test_blocking_the_cores_own_thread_is_refused_and_harms_nothing() -> None:
    with started(LLMRole.PROMPT) as made:
        refused: list[BaseException] = []

        async def call() -> None:
            for use in (
                lambda: made.kv_cache_manager.allocate_cache(DESC),
                lambda: made.kv_cache_manager.remove_cache_key(CacheKey(1, 1)),
                lambda: made.unlink_clusters([cluster(1, ("127.0.0.1", 9))]),
            ):
                try:
                    use()
                except RuntimeError as error:
                    refused.append(error)

        loop = engine_of(made).core.loop
        asyncio.run_coroutine_threadsafe(call(), loop).result(20)
        assert len(refused) == 3
        assert all("core's own thread" in str(error) for error in refused)
        made.kv_cache_manager.deallocate_cache(made.kv_cache_manager.allocate_cache(DESC))


def test_blocking_inside_an_event_loop_of_the_caller_works() -> None:
    async def main() -> int:
        with started() as made:
            cache = made.kv_cache_manager.allocate_cache(DESC)
            number = cache.cache_id
            made.kv_cache_manager.deallocate_cache(cache)
            return number

    assert asyncio.run(main()) == 1


def test_it_may_be_made_and_ended_in_different_threads() -> None:
    made: list[LLMDataDist] = []
    thread = threading.Thread(target=lambda: made.append(started()))
    thread.start()
    thread.join(20)
    made[0].kv_cache_manager.deallocate_cache(made[0].kv_cache_manager.allocate_cache(DESC))
    thread = threading.Thread(target=made[0].finalize)
    thread.start()
    thread.join(20)
    with pytest.raises(RuntimeError):
        made[0].listen_address  # noqa: B018
