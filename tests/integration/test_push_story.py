"""P9 for pushes: both sides tell one story, under one id and trace; and what counters and errors say agrees with it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from kvpull_async import LLMException, LLMStatusCode, LLMTimeoutError, TransferConfig
from tests import duo
from tests.conformance.api import AWAITED, BLOCKING, Api
from tests.integration.own_loop import outcome
from tests.integration.pushing import PUSHER, RECEIVER, SIZES, WAYS, Stock, desc, ends
from tests.integration.transfers import BY_ADDRESS, addresses, transfer

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
Event = dict[str, Any]


class Heard(logging.Handler):
    """Every event, as fields, in the order of arrival; from whichever thread."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.warnings: list[Event] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(vars(record)["kvpull"])
        if record.levelno >= logging.WARNING:
            self.warnings.append(self.events[-1])

    def named(self, prefix: str) -> list[Event]:
        return [event for event in self.events if event["event"].startswith(prefix)]

    def ends_with(self, *names: str) -> bool:
        return {event["event"] for event in self.events} >= set(names)


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler, logger = Heard(), logging.getLogger("kvpull")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("api", [AWAITED, BLOCKING], ids=lambda api: api.name)
def test_p9_a_push_is_told_by_both_sides_under_one_id_and_trace(way: str, size: str, api: Api, heard: Heard) -> None:
    async def body() -> None:
        async with ends(api, way) as e:
            shape = desc(SIZES[size])
            source, destination = await e.source(shape), await e.destination(shape)
            await e.push(destination, source, traceparent=TRACE)
            await api.until(lambda: heard.ends_with("receive.started", "receive.finished", "push.finished"))
            ours, theirs = heard.named("push."), heard.named("receive.")
            assert [event["event"] for event in ours] == ["push.started", "push.finished"]
            assert [event["event"] for event in theirs] == ["receive.started", "receive.finished"]
            assert len({event["pull_id"] for event in ours + theirs}) == 1
            assert {event["traceparent"] for event in ours + theirs} == {TRACE}
            assert {event["bytes"] for event in (ours[-1], *theirs)} == {4 * SIZES[size]}
            assert {event["inline"] for event in theirs if "inline" in event} == {size == "inline"}
            assert {"queue_ms", "connect_ms", "copy_ms", "elapsed_ms"} <= set(ours[-1])
            assert ours[-1]["path"] == (way if way in ("inproc", "tcp") else "shm")
            for told, ids in ((ours, (PUSHER, RECEIVER)), (theirs, (RECEIVER, PUSHER))):
                assert {(event["local_cluster_id"], event["cluster_id"]) for event in told} == {ids}
            assert len({event["key"] for event in ours + theirs}) == 1
            assert not {"peer", "path"} & ours[0].keys()

    api.run(body())


async def test_p9_p10_a_refused_push_names_one_cause_on_both_sides(heard: Heard) -> None:
    async with ends(AWAITED, "tcp") as e:
        source = await e.source(desc(64))
        error = await e.refused(e.push, Stock(_Unknown(), []), source, traceparent=TRACE)
        await AWAITED.until(lambda: heard.ends_with("receive.refused"))
        (theirs,) = heard.named("receive.")
        started, failed = heard.named("push.")
        assert (started["event"], failed["event"]) == ("push.started", "push.failed")
        assert started["pull_id"] == failed["pull_id"] == theirs["pull_id"]
        assert started["traceparent"] == failed["traceparent"] == theirs["traceparent"] == TRACE
        assert failed["reason"] == theirs["reason"] == str(error)
        assert failed["status"] == theirs["status"] == "LLM_KV_CACHE_NOT_EXIST"
        assert e.pusher.counters["pushes_failed"] == e.receiver.counters["receives_refused"] == 1


class _Unknown:
    cache_id = 404


async def test_p9_every_push_has_one_start_and_one_end(heard: Heard) -> None:
    """Also those that are cancelled while they wait, or not even sent."""
    async with ends(AWAITED, "tcp") as e:
        shape = desc(200_000)
        source, destination = await e.source(shape), await e.destination(shape)
        tasks = [asyncio.ensure_future(e.push(destination, source, number % 3)) for number in range(20)]
        await asyncio.sleep(0)
        for task in tasks[10:]:
            task.cancel()
        await asyncio.wait(tasks, timeout=30)
        with pytest.raises(ValueError, match="src_batch_index"):
            await e.push(destination, source, -1)
        by_push: dict[str, list[str]] = {}
        for event in heard.named("push."):
            by_push.setdefault(event["pull_id"], []).append(event["event"])
        assert len(by_push) == 20
        assert all(len(names) == 2 and names[0] == "push.started" for names in by_push.values())
        ended = Counter(names[1] for names in by_push.values())
        assert ended["push.finished"] >= sum(not task.cancelled() for task in tasks)
        assert set(ended) <= {"push.finished", "push.failed"}
        counted = e.pusher.counters
        assert counted["pushes_started"] == counted["pushes_finished"] + counted.get("pushes_cancelled", 0)


async def test_p3_p10_a_push_to_a_silent_receiver_ends_in_time_and_says_so() -> None:
    async with ends(AWAITED, "tcp") as e:
        source, destination = await e.source(desc(64)), await e.destination(desc(64))
        with duo.frozen(e.receiver):
            error = await outcome(asyncio.ensure_future(e.push(destination, source, timeout=150)))
        assert isinstance(error, LLMTimeoutError)
        assert isinstance(error, TimeoutError)
        assert isinstance(error, LLMException)
        assert error.status_code is LLMStatusCode.LLM_TIMEOUT
        assert error.operation == "push_cache"
        assert error.peer
        assert error.elapsed_ms is not None
        assert 150 <= error.elapsed_ms < 3000
        assert error.destination_unsafe
        assert not error.retry_safe
        assert e.pusher.counters["pushes_timed_out"] == 1
        await e.push(destination, source)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("api", [AWAITED, BLOCKING], ids=lambda api: api.name)
def test_p9_a_transfer_is_told_with_its_pushes_and_their_receipts(way: str, api: Api, heard: Heard) -> None:
    async def body() -> None:
        async with ends(api, way, **BY_ADDRESS) as e:
            source, destination = await e.source(desc(64)), await e.destination(desc(64))
            configs = [TransferConfig(RECEIVER, addresses(destination))]
            await api.do(transfer(e, source, configs, traceparent=TRACE).synchronize)
            await api.until(lambda: heard.ends_with("transfer.finished") and len(heard.named("receive.finished")) == 2)
            whole, pushed, taken = heard.named("transfer."), heard.named("push."), heard.named("receive.")
            assert len({event["transfer_id"] for event in whole + pushed}) == 1
            assert {event["traceparent"] for event in whole + pushed + taken} == {TRACE}
            assert [(event["config"], event["layer"]) for event in pushed] == [(0, 0), (0, 1)]
            sent, got = ({(event["pull_id"], event["key"]) for event in told} for told in (pushed, taken))
            assert sent == got
            assert {key for _, key in sent} == {f"address:{configs[0].dst_addrs[at]:#x}" for at in (0, 2)}

    api.run(body())


async def test_p9_a_transfer_that_fails_is_one_warning_which_names_the_push(heard: Heard) -> None:
    async with ends(AWAITED, "tcp", **BY_ADDRESS) as e:
        source, destination = await e.source(desc(64)), await e.destination(desc(64))
        good = addresses(destination)
        task = transfer(e, source, [TransferConfig(RECEIVER, [*good[:3], 4096])])
        await AWAITED.do(task.synchronize)
        await AWAITED.until(lambda: heard.ends_with("transfer.failed", "push.failed", "receive.refused"))
        ours, theirs = heard.named("push.failed"), heard.named("receive.refused")
        assert heard.warnings == heard.named("transfer.failed")
        (failed,) = heard.warnings
        assert [event["pull_id"] for event in ours + theirs] == [failed["pull_id"]] * 2
        assert failed["reason"] == ours[0]["reason"] == theirs[0]["reason"]
        assert ours[0]["layer"] == failed["layer"] == 1
