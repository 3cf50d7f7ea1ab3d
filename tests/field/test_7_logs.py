"""Reports of what operators could not see: failures without fields, causes in one counter, logs that change it all."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from kvpull_async import CacheDesc, CacheKey, DataType, LLMException, LLMRole, LLMStatusCode, LLMTimeoutError, observe
from tests import duo
from tests.conformance.api import AWAITED, Api
from tests.inject import gated_memories
from tests.integration.own_loop import outcome
from tests.integration.processes import child
from tests.integration.pushing import ends
from tests.integration.rig import (
    PATHS,
    Nodes,
    begin,
    each_face,
    each_path,
    each_process_path,
    each_size,
    faces_in_turn,
    nodes,
)
from tests.loop_nodes import event_log, eventually

FAILED = {
    "event", "level", "timestamp", "operation", "pull_id", "local_cluster_id", "cluster_id", "key", "peer", "path",
    "bytes", "elapsed_ms", "error", "reason", "status",
}  # fmt: skip
PHASES = {"queue_ms", "connect_ms", "request_ms", "copy_ms", "settle_ms", "wait_ms"}
ENDS = ("finished", "failed", "timed_out", "cancelled")
TINY = CacheDesc(4, [4, 512], DataType.DT_UINT8)


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """JSON lines of everything that is told, as an operator collects them."""
    stream = io.StringIO()
    observe.json_lines(stream, level="debug")
    yield stream
    structlog.reset_defaults()


def told(stream: io.StringIO, event: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [one for one in found if one["event"] == event]


# -- 7.2, 7.3: failures ------------------------------------------------------------------------------------------------


async def fail_in_every_way(n: Nodes, gate: Any) -> list[str]:
    """Pulls that fail, each in its own way; the status of each. The last one loses the prompt node."""
    await n.publish(duo.BIG)
    big, small = await n.destination(duo.BIG), await n.destination(TINY)
    pull = n.decoder.kv_cache_manager.pull_cache
    errors = [await n.fails(big, 404), await n.fails(small, 0, strict_layout=True)]
    gate.close()
    errors.append(await n.fails(big, timeout=200))
    released = begin(pull(CacheKey(duo.PROMPT, 0), big))
    await gate.reached()
    gate.open()
    await n.decoder.kv_cache_manager.deallocate_cache(big)
    found = await outcome(released)  # it may have been waited for
    assert found is None or isinstance(found, LLMException)
    with pytest.raises(LLMException) as caught:
        await pull(CacheKey(77, 0), small)
    errors.append(caught.value)
    await n.prompt.finalize()
    errors.append(await n.fails(small, 0))
    return [error.status_code.name for error in [*errors, *([found] if found else [])]]


@each_path
async def test_7_2_every_failed_pull_is_one_line_of_json_with_the_same_keys(
    monkeypatch: pytest.MonkeyPatch, path: str, lines: io.StringIO
) -> None:
    memories = gated_memories(monkeypatch, after=0)
    async with nodes(AWAITED, path, reconnect_grace=50) as n:
        statuses = await fail_in_every_way(n, memories[1].landing_gate)
    failed = told(lines, "pull.failed")
    assert sorted(one["status"] for one in failed) == sorted(statuses)
    assert len(set(statuses)) >= 5, "the ways to fail are to differ"
    for one in failed:
        assert set(one) >= FAILED, FAILED - set(one)
        assert set(one) - FAILED <= PHASES | {"destination_unsafe"}, one
        assert one["reason"], one
        assert one["level"] == "warning", one
        assert one["cluster_id"] in (duo.PROMPT, 77), one


@pytest.mark.parametrize("way", ["inproc", "tcp", "mapped"])
async def test_7_2_every_failed_push_has_the_same_keys_too(way: str, lines: io.StringIO) -> None:
    async with ends(AWAITED, way) as e:
        source, destination = await e.source(TINY), await e.destination(TINY)
        other = await e.destination(CacheDesc(4, [4, 64], DataType.DT_UINT8))
        await e.refused(e.push, other, source)
        await e.receiver.cache_manager.deallocate_cache(destination.cache)
        await e.refused(e.push, destination, source)
    failed = told(lines, "push.failed")
    assert [one["status"] for one in failed] == ["LLM_PARAM_INVALID", "LLM_KV_CACHE_NOT_EXIST"]
    for one in failed:
        assert set(one) >= FAILED, FAILED - set(one)
        assert set(one) - FAILED <= PHASES, one


async def test_7_2_a_link_that_cannot_be_made_says_with_whom_and_why(lines: io.StringIO) -> None:
    async with duo.node(LLMRole.DECODER, duo.DECODER) as node:
        nowhere = duo.cluster(99, ("127.0.0.1", 9))
        assert duo.codes(await node.link_clusters([nowhere], 2000))[0] == "LLM_LINK_FAILED"
    (failed,) = told(lines, "link.failed")
    assert {"cluster_id", "peer", "status", "reason"} <= set(failed)
    assert (failed["cluster_id"], failed["peer"]) == (99, "127.0.0.1:9")


@each_process_path
async def test_7_3_what_was_gone_what_broke_what_was_cancelled_and_what_was_late_are_counted_apart(path: str) -> None:
    async with (
        child("PROMPT", duo.PROMPT, listen=True, transport=path) as prefill,
        duo.node(LLMRole.DECODER, duo.DECODER, transport=path, reconnect_grace=50) as node,
    ):
        nbytes = 3 << 20
        await prefill.ask("publish", "published", nbytes=nbytes, first=0)
        info = duo.cluster(duo.PROMPT, prefill.address)
        await node.link_clusters([info], duo.TIMEOUT_MS, raise_on_error=True)
        manager = node.kv_cache_manager
        cache = await manager.allocate_cache(CacheDesc(2, [4, nbytes], DataType.DT_UINT8))

        def counted() -> dict[str, int]:
            return {name: count for name, count in node.counters.items() if name.startswith("pulls_")}

        def pull(key: int, timeout: float = duo.TIMEOUT_MS) -> Any:
            return begin(manager.pull_cache(CacheKey(duo.PROMPT, key), cache, timeout=timeout))

        assert isinstance(await outcome(pull(404)), LLMException)
        assert counted() == {"pulls_started": 1, "pulls_failed": 1, "pulls_failed_missing": 1}
        prefill.stop()
        assert isinstance(await outcome(pull(0, 100)), LLMTimeoutError)
        cancelled = pull(0)
        await eventually(lambda: node.counters["pulls_started"] == 3)
        cancelled.cancel()
        assert isinstance(await outcome(cancelled), asyncio.CancelledError)
        before = {"pulls_failed": 1, "pulls_failed_missing": 1, "pulls_timed_out": 1, "pulls_cancelled": 1}
        assert counted() == {"pulls_started": 3, **before}
        lost = pull(0)
        await eventually(lambda: node.counters["pulls_started"] == 4)
        prefill.kill()
        assert isinstance(await outcome(lost), LLMException)
        assert counted() == {"pulls_started": 4, **before, "pulls_failed": 2, "pulls_failed_link": 1}
        await manager.deallocate_cache(cache)


@each_path
async def test_7_3_a_key_that_expired_is_counted_where_it_was_and_by_who_came_too_late(path: str) -> None:
    """Apart from grants whose puller went away, and from everything that is wrong with links."""
    async with nodes(AWAITED, path) as n:
        manager, destination = n.prompt.kv_cache_manager, await n.destination()
        n.kept.append(await manager.allocate_cache(duo.SMALL))
        await manager.publish_cache(n.kept[-1], [CacheKey(duo.PROMPT, 0)], lease=1)
        await eventually(lambda: n.prompt.counters.get("keys_expired") == 1, "the end of the lease")
        error = await n.fails(destination)
        assert "expired" in str(error)
        assert {name: count for name, count in n.decoder.counters.items() if "failed" in name} == {
            "pulls_failed": 1,
            "pulls_failed_missing": 1,
        }
        assert not {"leases_expired", "links_lost"} & set(n.prompt.counters)


# -- 7.4: sums ---------------------------------------------------------------------------------------------------------


@each_path
@each_size
@each_face
async def test_7_4_what_each_pull_tells_adds_up_to_what_both_sides_count(path: str, desc: CacheDesc, api: Api) -> None:
    with event_log() as log:
        async with nodes(api, path) as n:
            await n.publish(desc)
            cache = await n.destination(desc)
            for number in range(6):
                await n.pull(cache, number % 4)
            await api.until(lambda: n.prompt.counters.get("serves") == 6)
            ours, theirs = n.decoder.counters, n.prompt.counters
    finished = log.named("pull.finished")
    nbytes = 4 * desc.entry_nbytes
    assert [one["bytes"] for one in finished] == [nbytes] * 6
    assert ours["bytes_pulled"] == theirs["bytes_served"] == sum(one["bytes"] for one in finished)
    assert sum(one["bytes"] for one in log.named("serve.finished")) == theirs["bytes_served"]
    assert {one["pull_id"] for one in finished} == {one["pull_id"] for one in log.named("serve.finished")}
    for one in finished:
        phases = {name: one[name] for name in PHASES if name in one}
        assert {"queue_ms", "connect_ms", "copy_ms"} <= set(phases)
        assert all(spent >= 0 for spent in phases.values())
        assert sum(phases.values()) <= one["elapsed_ms"] + 0.01


# -- 7.5, 7.6: levels --------------------------------------------------------------------------------------------------


async def story(n: Nodes) -> list[str]:
    """Pulls that end in different ways, and how they ended."""
    await n.publish(TINY)
    cache, manager = await n.destination(TINY), n.decoder.kv_cache_manager
    found = []
    for key, options in ((0, {}), (0, {}), (404, {}), (1, {"strict_layout": True}), (2, {"timeout": 1e-3})):
        try:
            await n.api.do(manager.pull_cache, CacheKey(duo.PROMPT, key), cache, **options)
            found.append("pulled" if duo.holds(cache, entry=0, source=key) else "wrong")
        except LLMException as error:
            found.append(error.status_code.name)
    return found


@faces_in_turn(path=PATHS, level=[logging.DEBUG, logging.INFO, logging.CRITICAL + 1])
async def test_7_5_what_happens_does_not_depend_on_what_is_logged(
    api: Api, path: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(level, "kvpull")
    async with nodes(api, path) as n:
        gone = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST.name
        late = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT.name
        assert await story(n) == ["pulled", gone, gone, "pulled", late]
        counted = {name: n.decoder.counters.get(f"pulls_{name}", 0) for name in ENDS}
        assert counted == {"finished": 2, "failed": 2, "timed_out": 1, "cancelled": 0}
    assert bool(caplog.records) is (level <= logging.INFO)


async def test_7_5_a_slow_log_of_the_engine_holds_up_no_pull(lines: io.StringIO) -> None:
    """What the serving node tells takes 30 ms each time; its pulls do not wait for that."""
    written: list[str] = []

    def slow(_: object, level: str, event: structlog.types.EventDict) -> str:
        if threading.current_thread().name == "kvpull-log":
            time.sleep(0.03)
            written.append(event["event"])
        raise structlog.DropEvent

    structlog.configure(processors=[slow])
    async with nodes(AWAITED) as n:
        await n.publish(TINY)
        cache = await n.destination(TINY)
        for number in range(40):  # two events each at the prompt node
            await n.pull(cache, number % 4)
        assert written.count("serve.finished") < 40, "the pulls were as slow as the log"
        assert "events_dropped" not in n.prompt.counters


async def events_of(caplog: pytest.LogCaptureFixture, awaited: str) -> list[str]:
    """The events told, once the awaited one is among them."""

    def told() -> list[str]:
        return [record.message.split()[0] for record in caplog.records]

    await (eventually(lambda: awaited in told(), awaited) if awaited else asyncio.sleep(0.05))
    return told()


@pytest.mark.parametrize("path", ["tcp", "shm"])
async def test_7_6_one_switch_sets_the_level_of_everything_at_run_time(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The level of the logger `kvpull`: for both sides, all layers, and without a restart."""
    async with nodes(AWAITED, path) as n:
        await n.publish(TINY)
        cache = await n.destination(TINY)
        for level, parts in ((logging.WARNING, set()), (logging.DEBUG, {"pull", "serve"}), (logging.WARNING, set())):
            caplog.set_level(level, "kvpull")
            served = n.prompt.counters.get("serves", 0)
            caplog.clear()
            await n.pull(cache, 1)
            await eventually(lambda served=served: n.prompt.counters.get("serves", 0) == served + 1)
            found = await events_of(caplog, "serve.finished" if parts else "")
            assert {event.split(".")[0] for event in found} == parts


def test_7_6_the_switch_needs_no_other_logger(lines: io.StringIO) -> None:
    """Under structlog it is the level given to the helper, for every event of the library."""
    stream = io.StringIO()
    observe.json_lines(stream, level="warning")

    async def body() -> None:
        async with nodes(AWAITED) as n:
            await story(n)

    AWAITED.run(body())
    assert {json.loads(line)["level"] for line in stream.getvalue().splitlines()} == {"warning"}
