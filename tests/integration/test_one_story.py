"""P9: what the logs of both sides tell of one pull, over each transport."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvpull_async import (
    CacheDesc,
    CacheKey,
    DataType,
    KvCacheManager,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
)

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
DESC = CacheDesc(4, [2, 65_536], DataType.DT_FLOAT)
SECONDS = 30.0

Event = dict[str, Any]
Destination = tuple[KvCacheManager, Any]


class Heard(logging.Handler):
    """Every event, as fields, in the order of arrival; from whichever thread."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(vars(record)["kvpull"])

    def named(self, prefix: str) -> list[Event]:
        return [event for event in self.events if event["event"].startswith(prefix)]


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler, logger = Heard(), logging.getLogger("kvpull")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.fixture(params=["tcp", "inproc", "shm"])
async def destination(request: pytest.FixtureRequest, heard: Heard) -> AsyncIterator[Destination]:
    """A linked destination of which the source holds request 1; the source's events are complete when it has ended."""
    config = LLMConfig()
    config.listen_ip_info, config.transfer_backend, config.sync_kv_timeout = "127.0.0.1:0", request.param, 30_000
    async with LLMDataDist(LLMRole.PROMPT, 1) as source, LLMDataDist(LLMRole.DECODER, 2) as here:
        await source.init(config.generate_options())
        await here.init(config.generate_options())
        offered = await source.kv_cache_manager.allocate_cache(DESC, [CacheKey(1, 1)])
        cluster = LLMClusterInfo()
        cluster.remote_cluster_id = 1
        assert source.listen_address is not None
        cluster.append_remote_ip_info(*source.listen_address)
        await here.link_clusters([cluster], timeout=30_000, raise_on_error=True)
        cache = await here.kv_cache_manager.allocate_cache(DESC)
        yield here.kv_cache_manager, cache
        await here.kv_cache_manager.deallocate_cache(cache)
        await source.kv_cache_manager.deallocate_cache(offered)


async def source_said(heard: Heard, *names: str) -> list[Event]:
    """The events of the source with these names, which come through a thread and so may be a little late."""
    give_up = asyncio.get_running_loop().time() + SECONDS
    while asyncio.get_running_loop().time() < give_up:
        found = heard.named("serve.")
        if {event["event"] for event in found} >= set(names):
            return found
        await asyncio.sleep(0.005)
    raise AssertionError(f"heard only {Counter(event['event'] for event in heard.events)}")


@pytest.mark.parametrize("size", [-1, 64], ids=["streamed", "inline"])
async def test_p9_a_pull_is_told_by_both_sides_under_one_id_and_trace(
    destination: Destination, heard: Heard, size: int
) -> None:
    manager, cache = destination
    await manager.pull_cache(CacheKey(1, 1), cache, 0, size, traceparent=TRACE)
    theirs = await source_said(heard, "serve.started", "serve.finished", "serve.key_consumed")
    ours = heard.named("pull.")
    assert [event["event"] for event in ours] == ["pull.started", "pull.finished"]
    assert len({event["pull_id"] for event in ours + theirs}) == 1
    told = [event for event in ours + theirs if event["event"] != "serve.key_consumed"]
    assert {event["traceparent"] for event in told} == {TRACE}
    nbytes = DESC.num_tensors * (DESC.size // 2 if size == -1 else size)
    assert {event["bytes"] for event in told if event["event"].endswith("finished")} == {nbytes}
    assert {"queue_ms", "connect_ms", "request_ms", "copy_ms"} <= set(ours[-1])
    assert {event["key"] for event in ours + theirs if "key" in event} == {"request:1:0"}
    assert {(event["local_cluster_id"], event["cluster_id"]) for event in ours} == {(2, 1)}
    assert {(event["local_cluster_id"], event["cluster_id"]) for event in theirs} == {(1, 2)}


async def test_p9_a_refused_pull_names_one_cause_on_both_sides(destination: Destination, heard: Heard) -> None:
    manager, cache = destination
    with pytest.raises(LLMException) as caught:
        await manager.pull_cache(CacheKey(1, 404), cache, 0, traceparent=TRACE)
    (theirs,) = await source_said(heard, "serve.refused")
    started, failed = heard.named("pull.")
    assert (started["event"], failed["event"]) == ("pull.started", "pull.failed")
    assert started["pull_id"] == failed["pull_id"] == theirs["pull_id"]
    assert started["traceparent"] == failed["traceparent"] == theirs["traceparent"] == TRACE
    assert failed["reason"] == theirs["reason"] == str(caught.value)
    assert failed["status"] == theirs["status"] == "LLM_KV_CACHE_NOT_EXIST"


async def test_p9_every_pull_has_one_start_and_one_end(destination: Destination, heard: Heard) -> None:
    """Also those that are cancelled while they wait for their turn, or not even sent because an argument is wrong."""
    manager, cache = destination
    tasks = [
        asyncio.create_task(manager.pull_cache(CacheKey(1, 1), cache, 0, 64, src_cache_offset=64 * number))
        for number in range(20)
    ]
    await asyncio.sleep(0)
    for task in tasks[10:]:
        task.cancel()
    await asyncio.wait(tasks, timeout=SECONDS)
    with pytest.raises(ValueError, match="batch_index"):
        await manager.pull_cache(CacheKey(1, 1), cache, -1)
    by_pull: dict[str, list[str]] = {}
    for event in heard.named("pull."):
        by_pull.setdefault(event["pull_id"], []).append(event["event"])
    assert len(by_pull) == 20
    assert all(len(names) == 2 and names[0] == "pull.started" for names in by_pull.values())
    ends = Counter(names[1] for names in by_pull.values())
    assert ends["pull.finished"] >= sum(task.done() and not task.cancelled() for task in tasks)
    assert set(ends) <= {"pull.finished", "pull.failed"}
