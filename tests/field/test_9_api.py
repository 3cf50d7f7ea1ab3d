"""Reports of an awkward API: nothing to await, borrowed threads, errors as None or as one code for everything."""

from __future__ import annotations

import ast
import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvpull_async import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMException, LLMRole, LLMStatusCode
from tests import duo, house
from tests.conformance.api import AWAITED, Api
from tests.inject import gated_copies, gated_memories, stubborn_inproc
from tests.integration.own_loop import outcome
from tests.integration.rig import OK, PATHS, Nodes, begin, each_face, each_path, faces_in_turn, nodes

U8 = DataType.DT_UINT8
CANARY = 0xA5


# -- 9.1, 9.2, 9.4: calls that can be awaited --------------------------------------------------------------------------


@each_path
async def test_9_1_a_pull_is_awaited_by_whatever_asyncio_has(path: str) -> None:
    """No handle to poll, no helper: a coroutine, and so a task."""
    async with nodes(AWAITED, path) as n:
        await n.publish()
        caches = [await n.destination() for _ in range(4)]

        def pull(entry: int) -> Any:
            manager = n.decoder.kv_cache_manager
            return manager.pull_cache(CacheKey(duo.PROMPT, entry), caches[entry], 0, src_cache_offset=0)

        def arrived() -> bool:
            return all(duo.holds(cache, entry=0, source=entry) for entry, cache in enumerate(caches))

        await asyncio.gather(*map(pull, range(4)))
        assert arrived()
        done, pending = await asyncio.wait([begin(pull(entry)) for entry in range(4)])
        assert (len(done), pending) == (4, set())
        for finished in asyncio.as_completed([pull(entry) for entry in range(4)]):
            await finished
        await asyncio.wait_for(asyncio.shield(pull(0)), 20)
        if hasattr(asyncio, "TaskGroup"):  # from Python 3.11 on
            async with asyncio.timeout(20), asyncio.TaskGroup() as group:
                for entry in range(4):
                    group.create_task(pull(entry))
        assert n.decoder.counters["pulls_finished"] == n.decoder.counters["pulls_started"] >= 13


@each_path
async def test_9_1_a_timeout_of_the_caller_ends_a_pull_and_leaves_the_link(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories = gated_memories(monkeypatch, after=1)
    async with nodes(AWAITED, path, settle_timeout=20_000) as n:
        await n.publish(duo.BIG)
        cache, gate = await n.destination(duo.BIG), memories[1].landing_gate
        gate.close()
        pull = begin(n.pull(cache))
        await gate.reached()
        asyncio.get_running_loop().call_later(0.2, gate.open)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pull, 0.05)
        assert not cache.quarantined
        await n.check_right(duo.BIG)


@each_path
async def test_9_2_pulls_use_no_thread_of_the_callers_executor(path: str) -> None:
    """Its only one is taken, and a hundred pulls do not care; a cancelled one has given its place back."""
    released = threading.Event()
    loop = asyncio.get_running_loop()
    executor = ThreadPoolExecutor(1)
    loop.set_default_executor(executor)
    try:
        blocked = loop.run_in_executor(None, released.wait, 60)
        async with nodes(AWAITED, path) as n:
            await n.publish(duo.BIG)
            caches = [await n.destination(duo.BIG) for _ in range(4)]
            pulls = [begin(n.pull(caches[number % 4], number % 4)) for number in range(100)]
            for number in range(0, 100, 3):
                pulls[number].cancel()
            done, _ = await asyncio.wait(pulls, timeout=60)
            assert len(done) == 100
            assert sum(task.cancelled() for task in done) == 34
            assert not blocked.done()
            assert "regions_quarantined" not in n.decoder.counters
            await n.check_right(duo.BIG)
    finally:
        released.set()
        executor.shutdown()


@each_path
async def test_9_4_a_cancelled_pull_raises_and_writes_no_more_and_the_next_one_works(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories, copies = gated_memories(monkeypatch, after=1), gated_copies(monkeypatch)
    async with nodes(AWAITED, path, settle_timeout=20_000) as n:
        await n.publish(duo.BIG)
        cache = await n.destination(duo.BIG)
        gate = copies if path == "shm" else memories[0].lending_gate
        memories[1].direct = path == "shm"
        gate.close()
        pull = begin(n.pull(cache))
        await gate.reached()
        pull.cancel()
        asyncio.get_running_loop().call_later(0.05, gate.open)
        assert isinstance(await outcome(pull), asyncio.CancelledError)
        await n.decoder.kv_cache_manager.settled(cache)  # at once: it has settled
        for array in duo.arrays(cache):
            array[:] = CANARY
        await n.check_right(duo.BIG, key=2)
        assert all(bool((array == CANARY).all()) for array in duo.arrays(cache))


async def test_9_4_where_the_path_ignores_the_cancellation_settled_says_when_the_memory_is_safe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stubborn_inproc(monkeypatch)
    memories = gated_memories(monkeypatch, after=1)
    async with nodes(AWAITED, "inproc", settle_timeout=50) as n:
        await n.publish(duo.BIG)
        cache, gate = await n.destination(duo.BIG), memories[1].landing_gate
        gate.close(times=1)
        pull = begin(n.pull(cache))
        await gate.reached()
        pull.cancel()
        assert isinstance(await outcome(pull), asyncio.CancelledError)
        assert cache.quarantined
        settled = begin(n.decoder.kv_cache_manager.settled(cache))
        await asyncio.sleep(0.05)
        assert not settled.done()
        gate.open()
        await settled
        assert not cache.quarantined
        await n.check_right(duo.BIG)


# -- 9.5: bad input ----------------------------------------------------------------------------------------------------

Call = Callable[[Nodes, Any], tuple[Any, ...]]
KEY, BLOCKS = CacheKey(duo.PROMPT, 0), BlocksCacheKey(duo.PROMPT, 0)
DESC = CacheDesc(2, [2, 64], U8)


def pull(*args: Any, **options: Any) -> Call:
    """A pull with these arguments; None among the first two stands for a good one."""
    return lambda n, cache: (n.decoder.kv_cache_manager.pull_cache, *args[:1], *(args[1:2] or (cache,)), options)


def link(*args: Any) -> Call:
    return lambda n, _: (n.decoder.link_clusters, *args, {})


def register(*args: Any, **options: Any) -> Call:
    return lambda n, _: (n.decoder.cache_manager.register_cache, *args, options)


BAD: dict[str, tuple[Call, str]] = {
    "no key": (pull(None), "cache_key"),
    "a key of another kind": (pull("request 7"), "cache_key"),
    "a padding key": (pull(CacheKey(duo.PROMPT, 2**64 - 1)), "cache_key"),
    "no cache": (pull(KEY, None), "cache"),
    "a number for a cache": (pull(KEY, 7), "cache"),
    "text for an index": (pull(KEY, batch_index="0"), "batch_index"),
    "an index below 0": (pull(KEY, batch_index=-1), "batch_index"),
    "an index outside": (pull(KEY, batch_index=99), "99"),
    "True for a size": (pull(KEY, size=True), "size"),
    "no size at all": (pull(KEY, size=0), "size"),
    "too large a size": (pull(KEY, size=10**9), "1000000000"),
    "an offset below 0": (pull(KEY, src_cache_offset=-1), "src_cache_offset"),
    "text for an offset": (pull(KEY, dst_cache_offset="1"), "dst_cache_offset"),
    "a list for a range": (pull(KEY, src_layer_range=[0, 1]), "src_layer_range"),
    "a range with steps": (pull(KEY, dst_layer_range=range(0, 2, 2)), "dst_layer_range"),
    "no tensors in a layer": (pull(KEY, tensor_num_per_layer=0), "tensor_num_per_layer"),
    "no time": (pull(KEY, timeout=0), "timeout"),
    "text for a time": (pull(KEY, timeout="5s"), "timeout"),
    "never": (pull(KEY, timeout=float("inf")), "timeout"),
    "a trace that is none": (pull(KEY, traceparent="abc"), "traceparent"),
    "a yes that is none": (pull(KEY, wait_for_key="yes"), "wait_for_key"),
    "a misspelt name": (pull(KEY, src_cach_offset=1), "src_cach_offset"),
    "no clusters": (link(None), "clusters"),
    "a list of nothing": (link([None]), "clusters"),
    "text for a link's time": (link([duo.cluster(5, ("127.0.0.1", 1))], "1 s"), "timeout"),
    "no descriptor": (register(None, [4096, 8192]), "cache_desc"),
    "no addresses": (register(DESC, None), "addrs"),
    "too few addresses": (register(DESC, [4096]), "addrs"),
    "the address 0": (register(DESC, [0, 4096]), "addrs"),
    "text for addresses": (register(DESC, ["x", "y"]), "addrs"),
    "lists for tensors": (register(DESC, tensors=[[1], [2]]), "tensors[0]"),
}


@pytest.mark.parametrize("case", BAD)
@each_face
async def test_9_5_bad_input_raises_and_names_the_argument(case: str, api: Api) -> None:
    """Never a None, a warning, or a failure of something else later."""
    make, name = BAD[case]
    async with nodes(api, "inproc") as n:
        await n.publish()
        cache = await n.destination()
        call, *args, options = make(n, cache)
        with pytest.raises((TypeError, ValueError, LLMException)) as caught:
            await api.do(call, *args, **options)
        assert name in str(caught.value), caught.value
        if isinstance(caught.value, LLMException):
            assert caught.value.status_code is not OK
        await n.check_right()


# -- 9.6: two styles of errors -----------------------------------------------------------------------------------------


@each_face
async def test_9_6_links_answer_with_codes_and_pulls_raise_as_the_original_does(api: Api) -> None:
    async with nodes(api, linked=False) as n:
        good, bad = duo.cluster(duo.PROMPT, n.prompt.listen_address), duo.cluster(77, ("127.0.0.1", 9))
        ret, rets = await api.do(n.decoder.link_clusters, [bad, good], 5000)
        assert (ret, rets) == (LLMStatusCode.LLM_LINK_FAILED, [LLMStatusCode.LLM_LINK_FAILED, OK])
        assert isinstance(rets, list)
        ret, rets = await api.do(n.decoder.unlink_clusters, [good], 5000)
        assert (ret, rets) == (OK, [OK])
        cache = await n.destination()
        error = await n.fails(cache)
        assert type(error) is LLMException
        assert error.status_code is LLMStatusCode.LLM_NOT_YET_LINK


@each_face
async def test_9_6_causes_are_told_apart_by_their_codes(api: Api) -> None:
    """No failure is called a timeout that is none, and none is a success."""
    async with nodes(api, "inproc", reconnect_grace=50) as n:
        await n.publish(first=10)
        cache = await n.destination()
        found = [(await n.fails(cache, 404)).status_code.name]
        found.append((await n.fails(cache, 10, timeout=0.001)).status_code.name)
        found.append((await n.fails(cache, 10, size=10_000)).status_code.name)
        await api.do(n.prompt.finalize)
        found.append((await n.fails(cache, 10)).status_code.name)
        assert found == [
            "LLM_KV_CACHE_NOT_EXIST", "LLM_WAIT_PROCESS_TIMEOUT", "LLM_PARAM_INVALID", "LLM_LINK_FAILED",
        ]  # fmt: skip


def test_9_6_no_exception_of_the_library_is_made_without_a_status() -> None:
    """The default is that of the original: a success."""
    bare = []
    for path in sorted((house.ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            made = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LLMException"
            if made and node.args and not {"status_code", None} & {word.arg for word in node.keywords}:
                bare.append(f"{path.name}:{node.lineno}")
    assert bare == []


# -- 9.7: the deadline of a call ---------------------------------------------------------------------------------------


@faces_in_turn(path=PATHS, kind=["kv_cache_manager", "cache_manager"])
async def test_9_7_a_timeout_of_the_call_counts_instead_of_that_of_the_node(api: Api, path: str, kind: str) -> None:
    """Longer and shorter. Without one the node's own counts, for blocks too."""
    async with nodes(api, path, sync_kv_timeout=150) as n:
        await n.publish()
        cache = await n.destination()
        blocks = await api.do(n.decoder.cache_manager.allocate_blocks_cache, DESC)
        manager = getattr(n.decoder, kind)
        calls = {
            150: (manager.pull_cache, (KEY, cache), {}),
            40: (manager.pull_cache, (KEY, cache), {"timeout": 40}),
            400: (manager.pull_cache, (KEY, cache), {"timeout": 400}),
        }
        with duo.frozen(n.prompt):
            for limit, (call, args, options) in calls.items():
                await late(api, limit, call, *args, **options)
            await late(api, 150, manager.pull_blocks, BLOCKS, blocks, [0], [1])
        await n.check_right()


async def late(api: Api, limit: int, call: Any, *args: Any, **options: Any) -> None:
    """The call ends after its limit (ms), says which that was, and how long it took."""
    began = time.monotonic()
    with pytest.raises(LLMException, match=f"the deadline of {limit} ms passed") as caught:
        await api.do(call, *args, **options)
    took = (time.monotonic() - began) * 1000
    assert limit - 1 <= caught.value.elapsed_ms <= took + 1
    assert isinstance(caught.value, TimeoutError)


@each_face
async def test_9_7_the_default_is_the_originals_second(api: Api) -> None:
    node = api.package.LLMDataDist(LLMRole.DECODER, 5)
    try:
        await api.do(node.init, {})
        assert duo.engine_of(node).settings.sync_kv_timeout_ms == 1000
    finally:
        await api.do(node.finalize)
